"""Scores that are stored block by block, in passes over the queries, and the kernels that read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.triton.kernel_arguments import BackwardArgs
from rankgrad.ops.triton.lowering import Lowering
from rankgrad.ops.triton.operands import padded
from rankgrad.ops.triton.passes import Passes
from rankgrad.ops.triton.stored_kernels import gradient_kernel, store_kernel
from rankgrad.ops.triton.tiles import GRADIENT_TILE, STRIPE, TILE


@dataclass(frozen=True)
class Block:
    """Stored scores of some queries and some candidates."""

    rows: slice
    group: int  # that the rows are of
    columns: slice
    other: int  # group that the columns are of
    scores: Tensor  # [rows, columns] in whole tiles, -inf where a pair is hidden or past the end


class StoredScores:
    """The scores of `passes`. A block is valid until the next one is made."""

    def __init__(
        self,
        ops: Lowering[Any],
        passes: Passes,
        lists: Mapping[str, Tensor],
        operands: Mapping[str, Any],
        constants: Mapping[str, Any],
        tile: Mapping[str, int],
    ) -> None:
        self.ops, self.passes, self.lists, self.operands = ops, passes, lists, operands
        self.constants, self.tile = constants, tile
        self.memory = torch.empty(passes.rows, passes.columns, device=lists["start"].device)

    def blocks(self, group: int, rows: slice) -> Iterator[Block]:
        """What these rows of a group meet in their pass."""
        for other, columns in self.passes.blocks(rows):
            yield Block(rows, group, columns, other, self._store(rows, columns))

    def _store(self, rows: slice, columns: slice) -> Tensor:
        height, width = padded(rows.stop - rows.start, TILE), padded(columns.stop - columns.start, self.tile["BN"])
        scores = self.memory.view(-1)[: height * width].view(height, width)
        names = ("LISTED", "RANK_SELF", "DESCRIBED", "SPLIT", "D")
        store_kernel[(height // self.tile["BM"] * (width // self.tile["BN"]),)](
            **self.operands,
            **{name: self.lists[name] for name in ("start", "stop", "self_index", "columns")},
            scores=scores,
            first_row=rows.start,
            num_queries=len(self.lists["start"]),
            first_column=columns.start,
            num_candidates=self.passes.num_candidates,
            width=width,
            GROUP=STRIPE,
            **{name: self.constants[name] for name in names},
            **self.tile,
        )
        return scores[:, : padded(columns.stop - columns.start, TILE)]

    def gradient(self, args: Sequence[BackwardArgs], index: int, rows: slice, parts: Sequence[Tensor]) -> None:
        """Write the gradient of these rows of a group to `parts` [rows, columns that they meet], one or two in float16."""
        for block in self.blocks(index, rows):
            self._gradient(args, block, parts)

    def _gradient(self, args: Sequence[BackwardArgs], block: Block, parts: Sequence[Tensor]) -> None:
        passes, tile = self.passes, GRADIENT_TILE
        of_rows = passes.groups[block.group]
        of_columns = passes.groups[block.other] if passes.symmetric else block.columns
        height, width = block.scores.shape
        gradient_kernel[(width // tile["BN"], height // tile["BM"])](
            scores=block.scores,
            **args[block.group].kernel_args("row"),
            **args[block.other if passes.symmetric else block.group].kernel_args("column"),
            high=parts[0],
            low=parts[-1],
            first_row=of_rows.start,
            num_rows=of_rows.stop - of_rows.start,
            pass_row=block.rows.start,
            pass_rows=block.rows.stop - block.rows.start,
            first_column=of_columns.start,
            num_columns=of_columns.stop - of_columns.start,
            from_column=block.columns.start,
            score_width=block.scores.stride(0),
            row_width=parts[0].shape[1],
            **(self.ops.constants | {"MODE": self.ops.many_mode}),
            ROOT=0,
            SYMMETRIC=passes.symmetric,
            SPLIT=self.constants["SPLIT"],
            ASM=self.constants["ASM"],
            **tile,
        )
