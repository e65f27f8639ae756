"""Lower bounds of a loss of a batch against itself on a CPU, with rankgrad's matrix products: the results mean nothing.

products    a score of each pair once and one product with the gradient of all scores, 3 N^2 d operations
operators   these, and the operators that sigmoid ranks and their gradient take, on tiles that stay in the cache; relevance,
            sums over tiles, the objective and the normalisation are left out
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.chunked import Formulation
from rankgrad.ops.cpu_products import add_product_, dot_products

SIDE = 512


@dataclass
class _Tiles:
    """Memory that all tiles of a call share; a row of the tile is a query."""

    tile: Tensor
    relevant: int  # items of a query
    scratch: Tensor = field(init=False)
    gradient: Tensor = field(init=False)
    column: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scratch, self.gradient = torch.ones_like(self.tile), torch.zeros_like(self.tile)
        self.column = self.tile.new_ones(len(self.tile), 1)


Operators = Callable[[_Tiles], Any]


def _nothing(tiles: _Tiles) -> None: ...


def _sigmoid_counts(tiles: _Tiles) -> None:
    for _ in range(tiles.relevant):
        torch.add(tiles.tile, tiles.column, out=tiles.scratch).reciprocal_().sum(dim=1)


def _sigmoid_gradient(tiles: _Tiles) -> None:
    weights = tiles.column.expand_as(tiles.tile)
    for _ in range(tiles.relevant):
        ahead = torch.minimum(tiles.tile, tiles.column, out=tiles.scratch).add_(tiles.column)
        torch.div(tiles.column, ahead, out=ahead)
        slope = torch.ops.aten.sigmoid_backward.grad_input(weights, ahead, grad_input=ahead)
        tiles.gradient += slope
        slope.sum(dim=1)


class _Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, relevant: int, count: Operators, gradient: Operators) -> Tensor:
        side = min(SIDE, len(embeddings))
        tiles, memory = _Tiles(embeddings.new_ones(side, side), relevant), embeddings.new_empty(side, side)
        blocks = embeddings.split(SIDE)
        for i, rows in enumerate(blocks):
            for z in range(i, len(blocks)):
                scores = dot_products(rows, blocks[z], out=memory[: len(rows), : len(blocks[z])])
                for _ in range(1 if z == i else 2):  # its rows are queries, and its columns
                    count(tiles)
        ctx.save_for_backward(embeddings)
        ctx.tiles, ctx.operators = tiles, gradient
        return scores.sum()

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        (embeddings,), tiles = ctx.saved_tensors, ctx.tiles
        blocks = embeddings.split(SIDE)
        gradient = torch.zeros_like(embeddings)
        for rows, into in zip(blocks, gradient.split(SIDE), strict=True):
            for columns in blocks:
                ctx.operators(tiles)
                add_product_(into, tiles.tile[: len(rows), : len(columns)], columns)
        return gradient, None, None, None


def floor(count: Operators, gradient: Operators, embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """The products, and for each tile and its transpose the operators of both passes."""
    found: Tensor = _Floor.apply(embeddings, per_class - 1, count, gradient)
    return found


symmetric_products: Formulation = partial(floor, _nothing, _nothing)
sigmoid_operators: Formulation = partial(floor, _sigmoid_counts, _sigmoid_gradient)
