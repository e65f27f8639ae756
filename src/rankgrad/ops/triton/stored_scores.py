"""Scores that are stored block by block, in passes over the queries, and the kernels that read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.ops.dry_run import launch_instead
from rankgrad.ops.triton.kernel_arguments import BackwardArgs, CountArgs
from rankgrad.ops.triton.lowerings import Lowering
from rankgrad.ops.triton.operands import padded
from rankgrad.ops.triton.passes import Passes
from rankgrad.ops.triton.ranker_kernels import SIGMOID
from rankgrad.ops.triton.stored_kernels import centre_kernel, gradient_kernel, store_kernel, tally_kernel
from rankgrad.ops.triton.tiles import (
    DESCRIBED_TILE,
    GRADIENT_TILE,
    SQUARE_GRADIENT_TILE,
    STRIPE,
    TALLY_COLUMNS,
    TALLY_ROWS,
    TILE,
    splits_of,
    takes_descriptors,
)


@dataclass(frozen=True)
class Tally:
    """What is counted for a group of queries."""

    group: slice
    args: CountArgs
    counts: Tensor  # [splits, P, queries]
    slopes: Tensor  # likewise; not touched unless the ranker keeps slopes
    centres: Tensor  # [queries] of their thresholds, likewise

    @classmethod
    def zeros(cls, ops: Lowering[Any], args: CountArgs, group: slice, device: torch.device, splits: int = 1) -> "Tally":
        count = group.stop - group.start
        shape = (1 + ops.keeps_slopes, splits, args.num_thresholds, count)
        sums = torch.zeros(shape, dtype=ops.count_dtype, device=device)
        return cls(group, args, sums[0], sums[-1], torch.zeros(count if ops.keeps_slopes else 1, device=device))

    def result(self, ops: Lowering[Any]) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """[queries, P] counts, and (slopes, centres) where `ops` keeps them; splits are summed in a fixed order."""
        counts = self.counts.sum(dim=0, dtype=self.counts.dtype).t().contiguous()
        return counts, (self.slopes.sum(dim=0), self.centres) if ops.keeps_slopes else None


@dataclass(frozen=True)
class Block:
    """Stored scores of some queries and some candidates."""

    rows: slice
    group: int  # that the rows are of
    columns: slice
    other: int  # group that the columns are of
    scores: Tensor  # [rows, columns] in whole tiles, -inf where a pair is hidden or past the end


# Which side of a tile an operand is of.
SIDES = {"queries": "BM", "candidates": "BN"}


def _descriptor(operand: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(operand, [rows, DESCRIBED_TILE["BK"]])


class StoredScores:
    """The scores of `passes`. A block is valid until the next one is made."""

    def __init__(
        self,
        ops: Lowering[Any],
        passes: Passes,
        lists: Mapping[str, Tensor],
        operands: Mapping[str, Tensor],
        constants: Mapping[str, Any],
        tile: Mapping[str, int],
    ) -> None:
        self.ops, self.passes, self.lists, self.operands = ops, passes, lists, dict(operands)
        self.constants, self.tile = constants, tile
        self.described: dict[str, Any] = {}
        if constants["SPLIT"] and takes_descriptors(lists["start"].device):
            self.tile = DESCRIBED_TILE
            self.described = {name: _descriptor(operands[name], DESCRIBED_TILE[of]) for name, of in SIDES.items()}
        self.memory = torch.empty(passes.rows, passes.columns, device=lists["start"].device)

    def blocks(self, group: int, rows: slice) -> Iterator[Block]:
        """What these rows of a group meet in their pass."""
        for other, columns in self.passes.blocks(rows):
            yield Block(rows, group, columns, other, self._store(rows, columns))

    def _store(self, rows: slice, columns: slice) -> Tensor:
        height, width = padded(rows.stop - rows.start, TILE), padded(columns.stop - columns.start, self.tile["BN"])
        scores = self.memory.view(-1)[: height * width].view(height, width)
        names = ("LISTED", "RANK_SELF", "SPLIT", "D")
        store_kernel[(height // self.tile["BM"] * (width // self.tile["BN"]),)](
            **(self.operands | self.described),
            **{name: self.lists[name] for name in ("start", "stop", "self_index", "columns")},
            scores=scores,
            first_row=rows.start,
            num_queries=len(self.lists["start"]),
            first_column=columns.start,
            num_candidates=self.passes.num_candidates,
            width=width,
            GROUP=STRIPE,
            DESCRIBED=bool(self.described),
            **{name: self.constants[name] for name in names},
            **self.tile,
        )
        return scores[:, : padded(columns.stop - columns.start, TILE)]

    def tally(self, tallies: Sequence[Tally], block: Block) -> None:
        """Count the scores of a block for its rows and, where scores are symmetric, for the columns that have not met them."""
        self._tally(tallies[block.group], block.rows, block.scores)
        # in its own square a pass has both of a pair
        beyond = slice(max(block.columns.start, block.rows.stop), block.columns.stop)
        # a dry run is for larger batches, too
        if self.passes.symmetric and (beyond.start < beyond.stop or launch_instead()):
            self._tally(tallies[block.other], beyond, block.scores[:, padded(beyond.start - block.columns.start, TILE) :].t())

    def _tally(self, tally: Tally, queries: slice, scores: Tensor) -> None:
        if not tally.args.num_thresholds:
            return
        tile = TALLY_ROWS if scores.stride(1) == 1 else TALLY_COLUMNS
        count = queries.stop - queries.start
        splits = min(splits_of(tile, *scores.shape), len(tally.counts))
        tally_kernel[(triton.cdiv(count, tile["BM"]), splits)](
            scores=scores,
            num_relevant=self.lists["num_relevant"],
            thresholds=tally.args.thresholds,
            counts=tally.counts,
            slopes=tally.slopes,
            centres=tally.centres,
            query_stride=scores.stride(0),
            other_stride=scores.stride(1),
            num_queries=count,
            num_others=scores.shape[1],
            tiles_per_split=triton.cdiv(scores.shape[1], splits * tile["BN"]),
            first_row=queries.start,
            first_in_group=queries.start - tally.group.start,
            num_rows=tally.group.stop - tally.group.start,
            P=tally.args.num_thresholds,
            **self.ops.constants,
            SPLIT=self.constants["SPLIT"],
            ASM=self.constants["ASM"],
            HELD=min(tally.args.num_thresholds, 3),
            **tile,
        )

    def find_centres(self, tally: Tally) -> None:
        """Fill in the centres of a tally, where the ranker has some."""
        count = tally.group.stop - tally.group.start
        if self.ops.mode == SIGMOID and tally.args.num_thresholds:
            centre_kernel[(triton.cdiv(count, TILE),)](
                thresholds=tally.args.thresholds,
                num_relevant=self.lists["num_relevant"],
                centres=tally.centres,
                first_row=tally.group.start,
                num_rows=count,
                P=tally.args.num_thresholds,
                MODE=self.ops.mode,
                BM=TILE,
            )

    def gradient(self, args: Sequence[BackwardArgs], block: Block, many_mode: Any, parts: Sequence[Tensor]) -> None:
        """Write the gradient of the scores of a block to `parts` [rows, columns that the pass meets], one or two in float16."""
        passes, mode = self.passes, {} if many_mode is None else {"MODE": many_mode}
        # what is looked up for each row and each column of a tile makes a square the best shape
        tile = GRADIENT_TILE if many_mode is None else SQUARE_GRADIENT_TILE
        of_rows = passes.groups[block.group]
        of_columns = passes.groups[block.other] if passes.symmetric else block.columns
        height, width = block.scores.shape
        gradient_kernel[(width // tile["BN"], height // tile["BM"])](
            scores=block.scores,
            num_relevant=self.lists["num_relevant"],
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
            **(self.ops.constants | mode),
            SYMMETRIC=passes.symmetric,
            SPLIT=self.constants["SPLIT"],
            ASM=self.constants["ASM"],
            **tile,
        )
