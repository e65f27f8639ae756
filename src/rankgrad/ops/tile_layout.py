"""How the scores of a call are cut into tiles.

Dimension letters:  B queries of a row block   P positives, padded
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad.ops.labels import IntervalRelevance
from rankgrad.ops.pair_relevance import PairRelevance
from rankgrad.ops.relevance import EngineRelevance

# Most columns of a tile of given scores.
WIDEST_TILE = 2**22

# Scores of tiles on the diagonal of a batch against itself that stay in memory: 2**22 float32 are 16 MiB.
OWN_SCORES = 2**22


def tile_side(device: torch.device) -> int:
    """Rows and columns of a tile: 1 MiB of float32, in a core's cache, or 64 MiB where launches cost more than memory."""
    return 512 if device.type == "cpu" else 4096


def is_one_tile(queries: int, candidates: int, device: torch.device) -> bool:
    """Whether all scores fit in one tile."""
    return queries * candidates <= tile_side(device) ** 2


def split(stop: int, size: int, start: int = 0) -> list[slice]:
    """start..stop in slices of `size`, the last one shorter."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def length(part: slice) -> int:
    """Items of a slice with both ends."""
    return int(part.stop - part.start)


def list_row_blocks(lists: int, device: torch.device) -> list[slice]:
    """Rows of the tiles of given scores."""
    return split(lists, tile_side(device))


def list_column_blocks(lists: int, length: int, most_positives: int, device: torch.device) -> list[slice]:
    """Columns of the tiles of given scores. A tile also costs a few passes over the positives, so it holds as many scores."""
    side = tile_side(device)
    return split(length, max(side * max(side // lists, 1), min(most_positives, WIDEST_TILE)))


@dataclass(frozen=True)
class PositiveBlock:
    """Some queries and, for a few of them at a time, an interval of candidates that holds positives of theirs."""

    parts: list[tuple[slice, slice]]  # queries and candidates
    holds_all: bool  # all positives of these queries

    @property
    def rows(self) -> slice:
        return slice(self.parts[0][0].start, self.parts[-1][0].stop)

    @property
    def width(self) -> int:
        """Of the widest interval."""
        return max(length(columns) for _, columns in self.parts)

    def offsets(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where candidates of each of `rows` are in its interval, clamped to it, and which are inside; None where all are."""
        starts = torch.zeros(len(columns), 1, dtype=columns.dtype)
        for rows, interval in self.parts:
            starts[rows.start - self.rows.start : rows.stop - self.rows.start] = interval.start
        offset = columns - starts.to(columns.device, non_blocking=True)
        inside = None if self.holds_all else (offset >= 0) & (offset < self.width)
        return offset.clamp_(0, self.width - 1), inside


@dataclass(frozen=True)
class TileLayout:
    """How relevance cuts the work into tiles. Made once for forward and backward."""

    relevance: EngineRelevance
    row_blocks: list[slice]
    column_blocks: list[slice]
    extents: list[tuple[int, int, int]]  # per row block: most positives of a query, and the columns where `hide_` matters
    positive_blocks: list[list[PositiveBlock]]  # per row block that is not `own`: where the positives are, more finely
    own: list[bool]  # per row block of a batch against itself: whether its tile on the diagonal holds all positives, and stays

    @classmethod
    def of(cls, relevance: EngineRelevance, device: torch.device) -> "TileLayout":
        side = tile_side(device)
        row_blocks = split(len(relevance.query_order), side)
        column_blocks = split(len(relevance.candidate_order), side)
        if isinstance(relevance, PairRelevance):  # positives may be anywhere: whole tiles, like those that are counted
            extents_of_pairs = relevance.extents(row_blocks)
            whole = len(column_blocks) == 1
            tiles = [
                [PositiveBlock([(rows, each)], whole) for each in column_blocks if each.stop > first and each.start < last]
                for rows, (_, first, last) in zip(row_blocks, extents_of_pairs, strict=True)
            ]
            return cls(relevance.to(device), row_blocks, column_blocks, extents_of_pairs, tiles, [False] * len(tiles))
        in_batch = isinstance(relevance, IntervalRelevance) and relevance.query_order is relevance.candidate_order
        if isinstance(relevance, IntervalRelevance) and in_batch:
            row_blocks = column_blocks = relevance.class_blocks(side)
        # read where the labels are: with labels on the host a GPU is not synchronised
        coarse = relevance.extents(row_blocks)
        own = [
            in_batch and block < OWN_SCORES // side**2 and rows.start <= first and last <= rows.stop
            for block, (rows, (_, first, last)) in enumerate(zip(row_blocks, coarse, strict=True))
        ]
        fine = [
            [] if is_own else split(rows.stop, max(side // 8, 1), rows.start)
            for rows, is_own in zip(row_blocks, own, strict=True)
        ]
        extents = iter(relevance.extents([rows for of_block in fine for rows in of_block]) if any(fine) else ())
        positive_blocks = []
        for of_block in fine:
            parts = [(rows, slice(first, last)) for rows, (width, first, last) in zip(of_block, extents, strict=False) if width]
            if all(length(columns) <= side for _, columns in parts):
                positive_blocks.append([PositiveBlock(parts, holds_all=True)] if parts else [])
            else:
                pieces = [(rows, piece) for rows, columns in parts for piece in split(columns.stop, side, columns.start)]
                positive_blocks.append([PositiveBlock([piece], holds_all=piece in parts) for piece in pieces])
        return cls(relevance.to(device), row_blocks, column_blocks, coarse, positive_blocks, own)
