"""Scores tile by tile in plain torch, for any device: what all sources of them have in common.

Dimension letters:  B queries of a row block   Z candidates of a tile
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.rankers import Ranker, TileMap
from rankgrad.ops.tile_memory import TileMemory

# Bytes of tiles that stay in memory for the backward pass: 40 MiB are all scores of 4,096 items in float32.
KEPT_BYTES = 40 * 2**20


@dataclass(frozen=True)
class Tile:
    """A tile of scores with its rows as queries, as the ranker reads it in a pass; what is not ranked held -inf."""

    scores: Tensor  # [B, Z]
    block: int  # row block of its queries
    key: int  # identifies the tile: the same number in forward and backward
    thresholds: Any  # of its queries, as the tile is compared with them


@dataclass(frozen=True)
class TilePair:
    """A tile, and its transpose where the same rows are queries and candidates."""

    tiles: list[Tile]
    rows: Any
    columns: slice
    mirrored: bool = False  # the second tile is a view of the first
    queries: Any = None  # the embeddings whose product the tile is
    candidates: Any = None


class TiledSource(ABC):
    """Shows a ranker every tile, once to count and once for the gradient."""

    row_blocks: list[slice]
    dtype: torch.dtype  # of scores and their gradient

    def __init__(self) -> None:
        self.tile_map: Callable[[list[int]], tuple[TileMap | None, list[Any]]]
        self.kept_tile: Callable[[Tensor, TileMemory], Tensor]
        self.kept: dict[int, Tensor] = {}  # of tiles of the first pass what the second one will ask for
        self.bytes_left = 0
        self.counting = False
        self.memory = TileMemory()

    def _tile(self, key: int, tile_map: TileMap | None, scores: Callable[[], Tensor]) -> Tensor:
        """A tile as the ranker reads it in this pass. `scores` may be in the memory of that name."""
        if key in self.kept:
            return self.kept.pop(key)
        tile = scores()
        if tile_map is not None:
            tile = tile_map(tile)
        if not self.counting:
            return self.kept_tile(tile, self.memory)
        if self.bytes_left:
            kept = self.kept_tile(tile, self.memory)
            if (size := kept.numel() * kept.element_size()) <= self.bytes_left:
                self.kept[key] = kept
                self.bytes_left -= size
                if kept is tile:
                    self.memory.forget("scores")
            else:
                self.bytes_left = 0
        return tile

    @abstractmethod
    def _tile_pairs(self) -> Iterator[TilePair]:
        """Every tile of scores."""

    @abstractmethod
    def _add_grad(self, pair: TilePair, gradient: Tensor) -> None:
        """Accumulate the gradient of the scores of a pair, which it may change."""

    def count(self, ops: Ranker, thresholds: list[Any], seed: int, *, keep: bool) -> list[Any]:
        counts: list[Any] = [None] * len(self.row_blocks)
        of_all, compared = ops.tile_map(thresholds)

        def tile_map(blocks: list[int]) -> tuple[TileMap | None, list[Any]]:
            if of_all is None:
                return ops.tile_map([thresholds[block] for block in blocks])
            return of_all, [compared[block] for block in blocks]

        self.tile_map, self.kept_tile = tile_map, ops.kept_tile
        self.bytes_left, self.counting = KEPT_BYTES if keep else 0, True
        for pair in self._tile_pairs():
            for tiles in [pair.tiles] if pair.mirrored else [[tile] for tile in pair.tiles]:
                keys = [seed + tile.key for tile in tiles]
                parts = ops.count_roles(tiles[0].scores, [tile.thresholds for tile in tiles], keys, self.memory)
                for tile, part in zip(tiles, parts, strict=True):
                    counts[tile.block] = _sum(counts[tile.block], part)
        self.memory = TileMemory()
        return counts

    def backward(self, ops: Ranker, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
        d_thresholds: list[Tensor | None] = [None] * len(self.row_blocks)
        self.counting = False
        for pair in self._tile_pairs():
            gradient = self.memory.like(pair.tiles[0].scores, "gradient", self.dtype)
            for tile in pair.tiles:
                block, first = tile.block, tile is pair.tiles[0]
                into = gradient if first else gradient.t()
                # in the order of the tile's memory, which for a copy of the transpose is another one
                same = first or into.stride() == tile.scores.stride()
                out = into if same else self.memory.like(tile.scores, "other gradient", self.dtype)
                add = same and not first
                part = ops.tile_backward(
                    tile.scores, tile.thresholds, rank_grads[block], seed + tile.key, out, self.memory, add=add
                )
                d_thresholds[block] = None if part is None else _sum(d_thresholds[block], part)
                if out is not into:
                    into += out
            self._add_grad(pair, gradient)
        self.memory = TileMemory()
        return d_thresholds


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """A running sum over tiles. Integers of one tile may be narrow, those of all tiles are not."""
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.int64))
    return total.add_(part)
