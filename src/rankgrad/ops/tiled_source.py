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

# Bytes of tiles that stay in memory for the backward pass: 40 MiB are all scores of 4,096 items in float32.
KEPT_BYTES = 40 * 2**20


@dataclass(frozen=True)
class Tile:
    """A tile of scores with its rows as queries; what is not ranked holds -inf."""

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
    queries: Any = None  # the embeddings whose product the tile is
    candidates: Any = None


class TiledSource(ABC):
    """Shows a ranker every tile, once to count and once for the gradient."""

    row_blocks: list[slice]

    def __init__(self) -> None:
        self.tile_map: Callable[[list[int]], tuple[TileMap | None, list[Any]]]
        self.kept: dict[int, Tensor] = {}  # tiles of the first pass that the second one will ask for
        self.bytes_left = 0

    def _tile(self, key: int, tile_map: TileMap | None, scores: Callable[[], Tensor]) -> Tensor:
        """A tile as the ranker compares it."""
        if key in self.kept:
            return self.kept.pop(key)
        tile = scores()
        if tile_map is not None:
            tile = tile_map(tile)
        if (size := tile.numel() * tile.element_size()) <= self.bytes_left:
            self.kept[key] = tile
            self.bytes_left -= size
        return tile

    @abstractmethod
    def _tile_pairs(self) -> Iterator[TilePair]:
        """Every tile of scores."""

    @abstractmethod
    def _add_grad(self, pair: TilePair, gradients: list[Tensor]) -> None:
        """Accumulate the gradients of the tiles of a pair."""

    def count(self, ops: Ranker, thresholds: list[Any], seed: int, *, keep: bool) -> list[Any]:
        counts: list[Any] = [None] * len(self.row_blocks)
        self.tile_map = lambda blocks: ops.tile_map([thresholds[block] for block in blocks])
        self.bytes_left = KEPT_BYTES if keep else 0
        for pair in self._tile_pairs():
            for tile in pair.tiles:
                part = ops.count_tile(tile.scores, tile.thresholds, seed + tile.key)
                counts[tile.block] = _sum(counts[tile.block], part)
        return counts

    def backward(self, ops: Ranker, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
        d_thresholds: list[Tensor | None] = [None] * len(self.row_blocks)
        self.bytes_left = 0
        for pair in self._tile_pairs():
            gradients = []
            for tile in pair.tiles:
                block = tile.block
                gradient, part = ops.tile_backward(tile.scores, tile.thresholds, rank_grads[block], seed + tile.key)
                d_thresholds[block] = None if part is None else _sum(d_thresholds[block], part)
                gradients.append(gradient)
            self._add_grad(pair, gradients)
        return d_thresholds


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """A running sum over tiles. Integers of one tile may be narrow, those of all tiles are not."""
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.int64))
    return total.add_(part)
