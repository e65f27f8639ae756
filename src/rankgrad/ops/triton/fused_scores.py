"""Scores that are made tile by tile where they are needed: launches of the kernels that count them and take their gradient."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.ops.triton.embedding_kernels import backward_kernel, count_kernel
from rankgrad.ops.triton.kernel_arguments import BackwardArgs, CountArgs
from rankgrad.ops.triton.lowering import Lowering
from rankgrad.ops.triton.operands import padded
from rankgrad.ops.triton.passes import Passes
from rankgrad.ops.triton.tiles import STRIPE, TILE

# Programs of a count: so many that the last wave of a large GPU is a small part of them all. With 1,056 RS@k of 16,384 items in
# "high" took 4.75 and not 4.51 ms on an H200, of 65,536 61.6 and not 60.2; in "fast" it makes no difference. Bytes of what they
# count for rows, split by split of the candidates, and for columns, tile by tile of the rows.
PROGRAMS = 8448
ROW_BYTES = 2**26
COLUMN_BYTES = 2**26


class FusedScores:
    """The scores of `passes`."""

    def __init__(
        self,
        ops: Lowering[Any],
        passes: Passes,
        lists: Mapping[str, Tensor],
        root: int,
        operands: Mapping[str, Any],
        constants: Mapping[str, Any],
        tile: Mapping[str, int],
    ) -> None:
        self.ops, self.passes, self.tile, self.device = ops, passes, tile, lists["start"].device
        self.arguments: dict[str, Any] = {
            **lists,
            **operands,
            **constants,
            **ops.constants,
            "num_queries": len(lists["start"]),
            "num_candidates": passes.num_candidates,
            "ROOT": root,
        }

    def count(self, args: Sequence[CountArgs], *, both: bool) -> list[Tensor]:
        """[1, or 2 with slopes; P, queries] of every group of queries.

        `both`: scores are symmetric, and each is made once and counted for both of its queries.
        """
        groups = self.passes.groups
        sums: dict[int, Tensor] = {}
        of_tile = max(self._bytes(*of_group) for of_group in zip(args, groups, strict=True))
        for index, group in enumerate(groups):
            for rows in self._row_passes(group, of_tile) if both else [group]:
                for other, columns in self._columns(index, rows, both=both):
                    for_rows, for_columns = self._count(args, index, rows, other, columns, both=both)
                    self._add(sums, index, rows, for_rows)
                    if both:
                        self._add(sums, other, columns, for_columns)
        return [sums[index] for index in range(len(groups))]

    def _add(self, sums: dict[int, Tensor], index: int, queries: slice, parts: Tensor) -> None:
        """Add what was counted in parts for some queries of a group, in a fixed order."""
        group, found = self.passes.groups[index], parts.sum(dim=1, dtype=parts.dtype)
        if index not in sums and queries == group:
            sums[index] = found
            return
        if index not in sums:
            sums[index] = found.new_zeros(*found.shape[:2], group.stop - group.start)
        sums[index][:, :, queries.start - group.start : queries.stop - group.start] += found

    def _bytes(self, args: CountArgs, queries: slice) -> int:
        """Of what is counted once for these queries of a group, 1 where there is nothing to count."""
        count: int = queries.stop - queries.start
        return max(4 * (1 + self.ops.keeps_slopes) * args.num_thresholds * count, 1)

    def _row_passes(self, group: slice, of_tile: int) -> Iterator[slice]:
        """Rows of a group that are counted at once: COLUMN_BYTES hold what they are ahead of, `of_tile` bytes for each tile."""
        step = max(COLUMN_BYTES // of_tile * self.tile["BM"] // TILE, 1) * TILE
        for begin in range(group.start, group.stop, step):
            yield slice(begin, min(begin + step, group.stop))

    def _columns(self, index: int, rows: slice, *, both: bool) -> Iterator[tuple[int, slice]]:
        """Candidates that these rows of a group meet; if `both`, those that have not met them, by their groups of queries."""
        if not both:
            yield index, slice(0, self.passes.num_candidates)
            return
        for other, group in enumerate(self.passes.groups):
            if group.stop > rows.start:
                yield other, slice(max(group.start, rows.start), group.stop)

    def _count(
        self, args: Sequence[CountArgs], index: int, rows: slice, other: int, columns: slice, *, both: bool
    ) -> tuple[Tensor, Tensor]:
        """[1 or 2, parts, P, queries] for these rows and, if `both`, for these columns."""
        row_tiles = triton.cdiv(rows.stop - rows.start, self.tile["BM"])
        column_tiles = triton.cdiv(columns.stop - columns.start, self.tile["BN"])
        most_splits = min(triton.cdiv(PROGRAMS, row_tiles), max(ROW_BYTES // self._bytes(args[index], rows), 1))
        per_split = triton.cdiv(column_tiles, min(column_tiles, most_splits))
        splits = triton.cdiv(column_tiles, per_split)
        for_rows = self._zeros(splits, args[index], rows)
        for_columns = self._zeros(row_tiles, args[other], columns) if both else for_rows
        if for_rows.numel() or for_columns.numel():
            count_kernel[(row_tiles, splits)](
                **self.arguments,
                **self._ranges(index, rows, other, columns, both=both),
                row_t=args[index].thresholds,
                row_counts=for_rows[0],
                row_slopes=for_rows[-1],
                column_t=args[other].thresholds,
                column_counts=for_columns[0],
                column_slopes=for_columns[-1],
                row_p=args[index].num_thresholds,
                column_p=args[other].num_thresholds,
                tiles_per_split=per_split,
                BOTH=both,
                **{"PARTS": 1, **self.tile},
            )
        return for_rows, for_columns

    def _zeros(self, parts: int, args: CountArgs, queries: slice) -> Tensor:
        shape = (1 + self.ops.keeps_slopes, parts, args.num_thresholds, queries.stop - queries.start)
        return torch.zeros(shape, dtype=self.ops.count_dtype, device=self.device)

    def _ranges(self, index: int, rows: slice, other: int, columns: slice, *, both: bool) -> dict[str, int]:
        """Where the groups of rows and columns begin, and where in them the kernel does."""
        of_rows, of_columns = self.passes.groups[index], self.passes.groups[other] if both else columns
        return {
            "first_row": of_rows.start,
            "num_rows": of_rows.stop - of_rows.start,
            "pass_row": rows.start,
            "pass_rows": rows.stop - rows.start,
            "first_column": of_columns.start,
            "num_columns": of_columns.stop - of_columns.start,
            "from_column": columns.start,
        }

    def gradient(self, args: Sequence[BackwardArgs], index: int, rows: slice, parts: Sequence[Tensor]) -> None:
        """Write the gradient of these rows of a group to `parts` [rows, columns that they meet], one or two in float16."""
        symmetric, row_tiles = self.passes.symmetric, triton.cdiv(rows.stop - rows.start, self.tile["BM"])
        for other, columns in self._columns(index, rows, both=symmetric):
            backward_kernel[(row_tiles * (padded(columns.stop - columns.start, TILE) // self.tile["BN"]),)](
                **self.arguments,
                **self._ranges(index, rows, other, columns, both=symmetric),
                **args[index].kernel_args("row"),
                **args[other].kernel_args("column"),
                high=parts[0],
                low=parts[-1],
                row_width=parts[0].shape[1],
                SYMMETRIC=symmetric,
                GROUP=STRIPE,
                **self.tile,
            )
