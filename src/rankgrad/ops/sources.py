"""Score sources in plain torch, for any device: scores tile by tile, made again for the backward pass.

    EmbeddingScores   scores are products of queries and candidates and are never stored
    TwoWayScores      the same with the candidates as queries too
    OneTileScores     the same for a small batch, in one tile that is kept
    GivenScores       scores are given as a matrix

Dimension letters:  Q queries   C candidates   B queries of a row block   Z candidates of a tile   P positives, padded
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.autograd import PositiveScores
from rankgrad.ops.cpu_products import dot_products, product
from rankgrad.ops.masks import MaskRelevance
from rankgrad.ops.pair_relevance import PairRelevance
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.relevance import TileRelevance
from rankgrad.ops.tile_layout import PositiveBlock, TileLayout, length, list_column_blocks, list_row_blocks
from rankgrad.ops.tile_memory import TileMemory
from rankgrad.ops.tile_rows import TileRows
from rankgrad.ops.tiled_source import Tile, TiledSource, TilePair

# Integers are exact in float32 up to here; longer lists get their ranks in float64.
EXACT_FLOAT32 = 2**24


def without_subnormal_(gradient: Tensor) -> Tensor:
    """In place 0 for numbers so small that products with them are subnormal, which take 100 times as long on many CPUs."""
    limits = torch.finfo(gradient.dtype)
    found: Tensor = torch.ops.aten.hardshrink.out(gradient, limits.tiny / limits.eps**2, out=gradient)
    return found


def _within(outer: slice, inner: slice) -> slice:
    """Where a slice is inside another one."""
    return slice(inner.start - outer.start, inner.stop - outer.start)


def _at(columns: Tensor, block: slice) -> Tensor:
    """Where columns are in a block, clamped to it for the sake of padding."""
    start: int = block.start
    return (columns - start).clamp_(0, length(block) - 1)


class EmbeddingScores(TiledSource):
    """Scores are dot products. With one set of rows in both roles a product serves a tile and its transpose."""

    def __init__(self, queries: TileRows, candidates: TileRows, layout: TileLayout) -> None:
        super().__init__()
        self.queries, self.candidates = queries, candidates
        self.layout, self.relevance, self.row_blocks = layout, layout.relevance, layout.row_blocks
        self.query_order = layout.relevance.query_order
        self.symmetric = queries is candidates
        self.dtype = queries.dtype
        self.own_scores: dict[int, Tensor] = {}  # by row block its scores with itself, until its tile is counted
        self.own_grads: dict[int, Tensor] = {}  # and their gradient, until that of the positives is there

    def positives(self, block: int) -> PositiveScores:
        rows = self.layout.row_blocks[block]
        columns, valid = self.relevance.positives(rows, self.layout.extents[block][0])
        queries = self.queries.read(rows)
        if self._is_own(block):
            self.own_scores[block] = dot_products(queries, queries)
            scores = self.own_scores[block].gather(1, _at(columns, rows))
        else:
            scores = self._scores_of(columns, rows, queries, self.layout.positive_blocks[block])
        scores.masked_fill_(~valid, torch.inf)
        num_candidates, gains = len(self.relevance.candidate_order), self.relevance.gains(rows, columns.shape[1])
        return PositiveScores(
            scores=scores,
            valid=valid,
            gains=None if gains is None else gains.to(scores.dtype),
            num_relevant=self.relevance.num_relevant[rows],
            list_length=self.relevance.list_length[rows],
            rank_dtype=torch.float64 if num_candidates > EXACT_FLOAT32 else scores.dtype,
        )

    def _is_own(self, block: int) -> bool:
        """Whether all positives of a row block are in a tile that is visited anyway, the one on the diagonal."""
        return self.symmetric and self.layout.own[block]

    def _scores_of(self, columns: Tensor, rows: slice, queries: Tensor, blocks: list[PositiveBlock]) -> Tensor:
        """[B, P] scores of a row block's positives, of products that are made for them."""
        scores = queries.new_full(columns.shape, torch.inf)
        for of_block in blocks:
            local = _within(rows, of_block.rows)
            products = queries.new_empty(length(local), of_block.width)
            for some, interval in of_block.parts:
                candidates, into = self.candidates.read(interval), products[_within(of_block.rows, some)]
                into[:, : len(candidates)] = dot_products(queries[_within(rows, some)], candidates)
            offsets, inside = of_block.offsets(columns[local])
            found = products.gather(1, offsets)
            scores[local] = found if inside is None else torch.where(inside, found, scores[local])
        return scores

    def _tile_pairs(self) -> Iterator[TilePair]:
        for i, rows in enumerate(self.layout.row_blocks):
            queries = self.queries.read(rows)
            for z, columns in enumerate(self.layout.column_blocks):
                if self.symmetric and z < i:
                    continue  # the transpose of a tile that was visited
                yield self._tile_pair(i, z, rows, columns, queries, self.candidates.read(columns))

    def _tile_pair(self, i: int, z: int, rows: slice, columns: slice, queries: Tensor, candidates: Tensor) -> TilePair:
        blocks = self._blocks(i, z)
        stride = max(len(self.layout.row_blocks), len(self.layout.column_blocks))
        keys = [block * stride + other for block, other in zip(blocks, (z, i), strict=False)]
        tile_map, compared = self.tile_map(blocks)
        made: list[Tensor] = []

        def unhidden() -> Tensor:  # made at most once, and not at all where the tiles are kept
            if not made:
                made.append(self._product(i, z, queries, candidates))
            return made[0]

        transposed = None
        if self.symmetric and i != z and not self.relevance.symmetric:  # hides other scores
            copy = partial(torch.clone, memory_format=torch.contiguous_format)
            transposed = self._tile(keys[1], tile_map, lambda: self._hide(copy(unhidden().t()), z, columns, rows))
        scores = self._tile(keys[0], tile_map, lambda: self._hide(unhidden(), i, rows, columns))
        both = scores, scores.t() if transposed is None else transposed
        tiles = [Tile(*tile) for tile in zip(both, blocks, keys, compared, strict=False)]
        return TilePair(tiles, rows, columns, transposed is None, queries, candidates)

    def _product(self, i: int, z: int, queries: Tensor, candidates: Tensor) -> Tensor:
        if i == z and i in self.own_scores:
            return self.own_scores.pop(i)
        out = self.memory.empty("scores", (len(queries), len(candidates)), self.dtype, queries.device)
        return dot_products(queries, candidates, out=out)

    def _blocks(self, i: int, z: int) -> list[int]:
        """Row blocks of the queries of a tile and, where its columns are queries too, of its transpose."""
        return [i, z] if self.symmetric and i != z else [i]

    def _hide(self, scores: Tensor, block: int, rows: slice, columns: slice) -> Tensor:
        width, first, last = self.layout.extents[block]
        if columns.start < last and columns.stop > first:
            self.relevance.hide_(scores, rows, columns, width)
        return scores

    def backward(self, ops: Ranker, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
        self.queries.zero_grad()
        if not self.symmetric:
            self.candidates.zero_grad()
        return super().backward(ops, thresholds, rank_grads, seed)

    def _add_grad(self, pair: TilePair, gradient: Tensor) -> None:
        if len(pair.tiles) == 1 and self._is_own(pair.tiles[0].block):
            self.own_grads[pair.tiles[0].block] = gradient
            self.memory.forget("gradient")
            return
        self._add_products(pair.rows, pair.columns, without_subnormal_(gradient), pair.queries, pair.candidates)

    def _add_products(self, rows: slice, columns: slice, gradient: Tensor, queries: Tensor, candidates: Tensor) -> None:
        if self.symmetric and rows == columns:  # both sums are of the same rows
            self.queries.add_product_grad(rows, gradient + gradient.t(), candidates)
            return
        self.queries.add_product_grad(rows, gradient, candidates)
        self.candidates.add_product_grad(columns, gradient.t(), queries)

    def input_grads(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        self.add_positive_grads(d_positives)
        return (self.queries.base_grad(),) if self.symmetric else (self.queries.base_grad(), self.candidates.base_grad())

    def add_positive_grads(self, d_positives: list[Tensor]) -> None:
        """Accumulate the gradients of the positives' scores."""
        if isinstance(self.relevance, PairRelevance):
            self._add_pairs(self.relevance, d_positives)
        else:
            self._add_blocks(d_positives)

    def _add_pairs(self, pairs: PairRelevance, d_positives: list[Tensor]) -> None:
        everyone, everything = slice(0, len(pairs.query_order)), slice(0, len(pairs.candidate_order))
        values = pairs.values(d_positives)
        self.queries.add_grad(everyone, pairs.candidates_of_queries(values, self.candidates.read(everything)))
        self.candidates.add_grad(everything, pairs.queries_of_candidates(values, self.queries.read(everyone)))

    def _add_blocks(self, d_positives: list[Tensor]) -> None:
        for block, (rows, d_scores) in enumerate(zip(self.layout.row_blocks, d_positives, strict=True)):
            columns, valid = self.relevance.positives(rows, self.layout.extents[block][0])
            queries, values = self.queries.read(rows), d_scores.masked_fill(~valid, 0)
            if self._is_own(block):
                gradient = self.own_grads.pop(block).scatter_add_(1, _at(columns, rows), values)
                self._add_products(rows, rows, without_subnormal_(gradient), queries, queries)
                continue
            for of_block in self.layout.positive_blocks[block]:
                local = _within(rows, of_block.rows)
                offsets, inside = of_block.offsets(columns[local])
                gradient = values.new_zeros(len(offsets), of_block.width)
                gradient.scatter_add_(1, offsets, values[local] if inside is None else values[local].masked_fill(~inside, 0))
                without_subnormal_(gradient)
                for some, interval in of_block.parts:
                    candidates, part = self.candidates.read(interval), gradient[_within(of_block.rows, some)]
                    part = part[:, : len(candidates)]
                    self._add_products(some, interval, part, queries[_within(rows, some)], candidates)


class TwoWayScores(EmbeddingScores):
    """Queries against candidates, and the candidates as queries against the queries: a product serves a tile and its transpose.

    The queries of the source are those of both ways, one after the other.
    """

    def __init__(self, queries: TileRows, candidates: TileRows, there: TileLayout, back: TileLayout) -> None:
        super().__init__(queries, candidates, there)
        self.back = EmbeddingScores(candidates, queries, back)
        self.blocks_there, offset = len(there.row_blocks), len(there.relevance.query_order)
        self.row_blocks = [*there.row_blocks, *(slice(c.start + offset, c.stop + offset) for c in back.row_blocks)]
        self.query_order = torch.cat((there.relevance.query_order, back.relevance.query_order + offset))

    def positives(self, block: int) -> PositiveScores:
        return super().positives(block) if block < self.blocks_there else self.back.positives(block - self.blocks_there)

    def _blocks(self, i: int, z: int) -> list[int]:
        # what is relevant one way is relevant the other way, so that the transpose hides the same scores
        return [i, self.blocks_there + z]

    def add_positive_grads(self, d_positives: list[Tensor]) -> None:
        super().add_positive_grads(d_positives[: self.blocks_there])
        self.back.add_positive_grads(d_positives[self.blocks_there :])


class OneTileScores:
    """Dot products of a batch so small that all of them fit in one tile: kept, not computed again for the gradient."""

    query_order = None

    def __init__(self, queries: Tensor, candidates: Tensor | None = None, *, relevance: TileRelevance) -> None:
        self.queries, self.candidates, self.relevance = queries, queries if candidates is None else candidates, relevance
        self.symmetric = candidates is None
        self.row_blocks = [slice(0, len(queries))]
        self.scores = dot_products(queries, self.candidates, alone=True)
        self.tile = self.scores.masked_fill(relevance.hidden, -torch.inf)

    def positives(self, block: int) -> PositiveScores:
        r = self.relevance
        scores = self.scores.gather(1, r.columns)
        return PositiveScores(
            scores=scores if r.valid is None else scores.masked_fill_(~r.valid, torch.inf),
            valid=r.valid,
            gains=None if r.gains is None else r.gains.to(scores.dtype),
            num_relevant=r.num_relevant,
            list_length=r.list_length,
            rank_dtype=scores.dtype,
            one_tile=True,
        )

    def count(self, ops: Ranker, thresholds: list[Any], seed: int, *, keep: bool) -> list[Any]:
        tile_map, (self.compared,) = ops.tile_map(thresholds)
        if tile_map is not None:
            self.tile = tile_map(self.tile)
        memory = TileMemory()
        tile, self.tile = self.tile, ops.kept_tile(self.tile, memory) if keep else self.tile
        return [ops.count_tile(tile, self.compared, seed, memory)]

    def backward(self, ops: Ranker, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
        self.d_scores = torch.empty_like(self.scores)
        return [ops.tile_backward(self.tile, self.compared, rank_grads[0], seed, self.d_scores, TileMemory(), add=False)]

    def input_grads(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        r, (given,) = self.relevance, d_positives
        d_scores = without_subnormal_(
            self.d_scores.scatter_add_(1, r.columns, given if r.valid is None else given.masked_fill(~r.valid, 0))
        )
        if self.symmetric:
            return (product(d_scores + d_scores.t(), self.queries),)
        return product(d_scores, self.candidates), product(d_scores.t(), self.queries)


class GivenScores(TiledSource):
    """Scores are given as a matrix, one list per row."""

    def __init__(self, scores: Tensor, relevance: MaskRelevance) -> None:
        super().__init__()
        self.scores, self.relevance = scores, relevance
        self.query_order: Tensor | None = relevance.query_order
        self.dtype = torch.promote_types(scores.dtype, torch.float32)
        lists, length = scores.shape
        self.row_blocks = list_row_blocks(lists, scores.device)
        self.widths = relevance.widths(self.row_blocks)
        self.column_blocks = list_column_blocks(lists, length, max(self.widths), scores.device)

    def positives(self, block: int) -> PositiveScores:
        rows, grades = self.relevance.rows(self.row_blocks[block]), self.relevance.grades
        scores, columns, valid = self._listed(rows, self.widths[block])
        return PositiveScores(
            scores=scores,
            valid=valid,
            gains=None if grades is None else self.relevance.gather(grades, rows, columns).to(self.dtype),
            num_relevant=self.relevance.num_relevant[rows],
            list_length=self.relevance.list_length[rows],
            rank_dtype=torch.float64 if self.scores.shape[1] > EXACT_FLOAT32 else self.dtype,
        )

    def _listed(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """[B, width] scores of the positives of `rows`, infinite at the padding, their columns, and which are no padding."""
        columns, valid = self.relevance.positives(rows, width)
        scores = self.relevance.gather(self.scores, rows, columns).to(self.dtype)
        return scores if valid is None else scores.masked_fill_(~valid, torch.inf), columns, valid

    def _tile_pairs(self) -> Iterator[TilePair]:
        for i, block in enumerate(self.row_blocks):
            rows = self.relevance.rows(block)
            for z, columns in enumerate(self.column_blocks):
                key = i * len(self.column_blocks) + z
                tile_map, (compared,) = self.tile_map([i])
                scores = self._tile(key, tile_map, partial(self._hidden, rows, columns))
                yield TilePair([Tile(scores, i, key, compared)], rows, columns)

    def _hidden(self, rows: Any, columns: slice) -> Tensor:
        tile = self.scores[rows, columns].to(self.dtype)
        return tile.masked_fill(self.relevance.hidden(rows, columns), -torch.inf)

    def backward(self, ops: Ranker, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
        self.d_scores = torch.empty_like(self.scores)
        return super().backward(ops, thresholds, rank_grads, seed)

    def _add_grad(self, pair: TilePair, gradient: Tensor) -> None:
        self.d_scores[pair.rows, pair.columns] = gradient.to(self.scores.dtype)

    def input_grads(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        for block, width, d_scores in zip(self.row_blocks, self.widths, d_positives, strict=True):
            rows = self.relevance.rows(block)
            columns, valid = self.relevance.positives(rows, width)
            gradient = d_scores.to(self.scores.dtype)
            if isinstance(rows, slice):
                self.d_scores[0].index_copy_(0, columns[0], gradient[0])
            else:
                # positives are hidden in the tiles, so their gradient is 0 until now; padding adds 0
                at = (rows[:, None].expand_as(columns), columns)
                gradient = gradient if valid is None else torch.where(valid, gradient, 0)
                self.d_scores.index_put_(at, gradient, accumulate=True)
        return (self.d_scores,)
