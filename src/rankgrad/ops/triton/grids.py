"""Sigmoids of queries with many positives: the grids of all queries, and the launches around the tiles. See `grid_kernels`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad._gpu import has_gpu
from rankgrad.ops.triton.grid_kernels import (
    ABOVE,
    BELOW,
    PER_UNIT,
    collect_kernel,
    grid_kernel,
    moment_kernel,
    table_kernel,
)
from rankgrad.ops.triton.kernel_arguments import BackwardArgs

# Most cells of a query, for which unit vectors need tau >= 0.0075, and what their number is a multiple of.
MOST_CELLS = 2048
WHOLE_CELLS = 128

# Bytes of sums that exist at once, for as many queries as fit.
MOMENT_BYTES = 2**28

# Bits of an offset in a cell, or as many as let the number of candidates and the sum of their offsets fit in 63.
OFFSET_BITS = 16

# Blocks of cells and thresholds. One warp with several thresholds in each thread reads a cell once for all of them.
COLLECT_BLOCK = {"BC": 8, "BP": 128, "num_warps": 1}
TABLE_BLOCK = {"BC": 128, "BP": 16, "num_warps": 4}
GRID_BLOCK = {"BP": 32, "BR": 32, "num_warps": 4}
BLOCK = 1024


def cells_of_unit_vectors(units: float) -> int:
    """Cells that hold the thresholds of any query if embeddings have length 1, so that scores are at most so many units."""
    cells = math.ceil((2.001 * units + float(ABOVE.value) + float(BELOW.value)) * int(PER_UNIT.value)) + 2
    return -(-cells // WHOLE_CELLS) * WHOLE_CELLS


class QueryGrids:
    """The grids of all queries, whose thresholds come in row blocks [P, rows]. `wide`: all four sums of a cell are kept."""

    def __init__(
        self, thresholds: Sequence[Tensor], rows: Sequence[slice], num_relevant: Tensor, cells: int, *, wide: bool
    ) -> None:
        self.thresholds, self.rows, self.num_relevant, self.cells, self.wide = thresholds, rows, num_relevant, cells, wide
        self.queries, self.device = rows[-1].stop, num_relevant.device
        self.begins = torch.empty(self.queries, device=self.device)
        self.used = torch.empty(self.queries, dtype=torch.int32, device=self.device)
        for columns, block in zip(thresholds, rows, strict=True):
            count = block.stop - block.start
            grid_kernel[(triton.cdiv(count, GRID_BLOCK["BR"]),)](
                thresholds=columns,
                begins=self.begins,
                used=self.used,
                first_row=block.start,
                num_rows=count,
                P=columns.shape[0],
                cells=cells,
                **GRID_BLOCK,
            )

    def count(self, num_candidates: int, deposit: Callable[[slice, dict[str, Any]], None], whole: int) -> list[Tensor]:
        """[2, P, rows] counts and slopes of every row block.

        `deposit` adds all candidates of some queries, a whole multiple of `whole` but for the last, to their grids.
        """
        parts = 1 + self.wide
        size = min(MOMENT_BYTES // (8 * parts * self.cells), self.queries + whole - 1) // whole * whole
        size = max(size, whole)
        moments = torch.empty(min(size, self.queries), self.cells, parts, dtype=torch.int64, device=self.device)
        sums = [torch.empty(2, *columns.shape, device=self.device) for columns in self.thresholds]
        count_bits = num_candidates.bit_length()
        bits = min(OFFSET_BITS, 63 - 2 * count_bits)
        fixed_point = {"bits": bits, "count_bits": count_bits}
        for start in range(0, self.queries, size):
            chunk = slice(start, min(start + size, self.queries))
            moments.zero_()
            grids = {"maps": self.begins[chunk], "tables": self.used[chunk], "descending": self.begins, "sums": moments}
            deposit(chunk, grids | fixed_point | {"size": self.cells, "scale": float(PER_UNIT.value << bits)})
            total = (chunk.stop - start) * self.cells
            moment_kernel[(triton.cdiv(total, BLOCK),)](
                moments=moments, total=total, **fixed_point, WIDE=self.wide, BLOCK=BLOCK
            )
            self._collect(moments.view(torch.float32), chunk, sums)
        return sums

    def _collect(self, moments: Tensor, chunk: slice, sums: list[Tensor]) -> None:
        for columns, block, found in zip(self.thresholds, self.rows, sums, strict=True):
            first, last = max(block.start, chunk.start), min(block.stop, chunk.stop)
            if first < last and columns.shape[0]:
                collect_kernel[(last - first, triton.cdiv(columns.shape[0], COLLECT_BLOCK["BP"]))](
                    **self._of_block(columns, block),
                    moments=moments,
                    counts=found[0],
                    slopes=found[1],
                    from_row=first,
                    moment_row=chunk.start,
                    WIDE=self.wide,
                    **COLLECT_BLOCK,
                )

    def backward_args(self, args: Sequence[BackwardArgs]) -> BackwardArgs:
        """The tables of all queries, in place of the thresholds and weights of row blocks."""
        table = torch.empty(self.queries, self.cells, dtype=torch.int64, device=self.device)
        for columns, block, of_block in zip(self.thresholds, self.rows, args, strict=True):
            table_kernel[(block.stop - block.start, triton.cdiv(self.cells, TABLE_BLOCK["BC"]))](
                **self._of_block(columns, block), weights=of_block.weights, table=table, **TABLE_BLOCK
            )
        return BackwardArgs.of_tables(self.begins, table)

    def _of_block(self, columns: Tensor, block: slice) -> dict[str, Any]:
        return {
            "thresholds": columns,
            "num_relevant": self.num_relevant,
            "begins": self.begins,
            "used": self.used,
            "first_row": block.start,
            "num_rows": block.stop - block.start,
            "P": columns.shape[0],
            "cells": self.cells,
            "ASM": has_gpu(self.begins.device),
        }
