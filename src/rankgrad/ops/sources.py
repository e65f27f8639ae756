"""The two doors in plain torch, for any device: scores tile by tile, made again for the backward pass.

    EmbeddingDoor   scores are products of queries and candidates and are never kept
    ScoreDoor       scores are given

Dimension letters:  Q queries   C candidates   B queries of a chunk   Z candidates of a tile   P relevant items, padded
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rankgrad.ops.rankers import Ranker, Relevant
from rankgrad.ops.relevance import LabelLists, ScoreLists

# Integers are exact in float32 up to here; longer lists get their ranks in float64.
EXACT_FLOAT32 = 2**24

# Most columns of a tile of given scores.
WIDEST_TILE = 2**22


def tile_side(device: torch.device) -> int:
    """Rows and columns of a tile: 1 MiB of float32, in a core's cache, or 64 MiB where launches cost more than memory."""
    return 512 if device.type == "cpu" else 4096


def is_one_tile(lists: LabelLists, device: torch.device) -> bool:
    """Whether all scores of the lists fit in one tile."""
    return len(lists.query_order) * len(lists.candidate_order) <= tile_side(device) ** 2


def split(stop: int, size: int, start: int = 0) -> list[slice]:
    """start..stop in slices of `size`, the last one shorter."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def _within(columns: Tensor, valid: Tensor, panel: slice) -> tuple[Tensor, Tensor]:
    """Which real columns lie in a panel, and all columns' places there, those elsewhere at an end."""
    here = valid & (columns >= panel.start) & (columns < panel.stop)
    return here, (columns - panel.start).clamp(0, panel.stop - panel.start - 1)


class TiledDoor(ABC):
    """Lets a ranker see every tile, once to count and once to pull."""

    chunks: list[slice]

    @abstractmethod
    def _views(self) -> Iterator["View"]:
        """Every tile of scores, what is not ranked hidden."""

    @abstractmethod
    def _give(self, view: "View", gradients: list[Tensor]) -> None:
        """Take the gradient of every side of a view."""

    def count(self, ranker: Ranker, prepared: list[Any], seed: int) -> list[Tensor]:
        counts: list[Any] = [None] * len(self.chunks)
        for view in self._views():
            for side in view.sides:
                part = ranker.count(side.tile, prepared[side.chunk], seed + side.key)
                counts[side.chunk] = _sum(counts[side.chunk], part)
        return counts

    def pull(self, ranker: Ranker, prepared: list[Any], aimed: list[Any], seed: int) -> list[Tensor | None]:
        pulled: list[Tensor | None] = [None] * len(self.chunks)
        for view in self._views():
            gradients = []
            for side in view.sides:
                gradient, part = ranker.pull(side.tile, prepared[side.chunk], aimed[side.chunk], seed + side.key)
                pulled[side.chunk] = None if part is None else _sum(pulled[side.chunk], part)
                gradients.append(gradient)
            self._give(view, gradients)
        return pulled


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """What one more tile makes of a total. Integers of a tile may be narrow, those of all tiles are not."""
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.int64))
    return total.add_(part)


@dataclass(frozen=True)
class Side:
    """A tile of scores with its rows as queries."""

    tile: Tensor
    chunk: int
    key: int  # names the tile: the same number in forward and backward


@dataclass(frozen=True)
class View:
    """A tile, and its mirror image where the same rows are queries and candidates."""

    sides: list[Side]
    rows: Any
    columns: slice
    queries: Any = None  # the rows of an embedding door that made the tile
    candidates: Any = None


class Rows(Protocol):
    """Embeddings in class order, taken by slices; gradients go back by slices."""

    def take(self, rows: slice) -> Tensor: ...

    def clear(self) -> None:
        """Begin to collect a gradient."""

    def give(self, rows: slice, gradient: Tensor) -> None: ...

    def d_base(self) -> Tensor:
        """The gradient collected, in the caller's order."""
        ...


class PlainRows:
    """The embeddings themselves."""

    def __init__(self, base: Tensor, order: Tensor) -> None:
        self.order = order
        self.values = base[order]

    def take(self, rows: slice) -> Tensor:
        return self.values[rows]

    def clear(self) -> None:
        self.gradient = torch.zeros_like(self.values)

    def give(self, rows: slice, gradient: Tensor) -> None:
        self.gradient[rows] += gradient

    def d_base(self) -> Tensor:
        return torch.empty_like(self.gradient).index_copy_(0, self.order, self.gradient)


class MixedRows:
    """Rows alpha * base[first] + (1 - alpha) * base[second], made when they are taken and never stored."""

    def __init__(self, base: Tensor, order: Tensor, first: Tensor, second: Tensor, alpha: Tensor) -> None:
        self.base = base
        self.first, self.second = first[order], second[order]
        self.alpha = alpha[order, None].to(base.dtype)

    def clear(self) -> None:
        self.gradient = torch.zeros_like(self.base)

    def take(self, rows: slice) -> Tensor:
        return torch.lerp(self.base[self.second[rows]], self.base[self.first[rows]], self.alpha[rows])

    def give(self, rows: slice, gradient: Tensor) -> None:
        # index_put_ and not index_add_: on a GPU it adds in a fixed order
        self.gradient.index_put_((self.first[rows],), gradient * self.alpha[rows], accumulate=True)
        self.gradient.index_put_((self.second[rows],), gradient * (1 - self.alpha[rows]), accumulate=True)

    def d_base(self) -> Tensor:
        return self.gradient


@dataclass(frozen=True)
class Block:
    """A few queries and an interval of candidates that holds relevant items of theirs."""

    rows: slice
    columns: slice


@dataclass(frozen=True)
class Layout:
    """How labels cut the work into tiles. Made once for forward and backward."""

    lists: LabelLists
    chunks: list[slice]  # of queries
    panels: list[slice]  # of candidates
    bands: list[tuple[int, int, int]]  # per chunk: most relevant items of a query, and the columns where `hide` matters
    blocks: list[list[Block]]  # per chunk: where the relevant items are, more finely

    @classmethod
    def of(cls, lists: LabelLists, device: torch.device) -> "Layout":
        side = tile_side(device)
        chunks = split(len(lists.query_order), side)
        fine = [split(chunk.stop, max(side // 8, 1), chunk.start) for chunk in chunks]
        # from where the labels are: labels that stay on the host spare a GPU the wait for this
        bands = iter(lists.bands([*chunks, *(rows for rows_of_chunk in fine for rows in rows_of_chunk)]))
        coarse = [next(bands) for _ in chunks]
        blocks = [
            [Block(rows, panel) for rows, (width, first, last) in zip(of_chunk, bands, strict=False) if width
             for panel in split(last, side, first)]
            for of_chunk in fine
        ]  # fmt: skip
        return cls(lists.to(device), chunks, split(len(lists.candidate_order), side), coarse, blocks)


class EmbeddingDoor(TiledDoor):
    """Scores are dot products. With one set of rows in both roles a product serves a tile and its mirror image."""

    def __init__(self, queries: Rows, candidates: Rows, layout: Layout) -> None:
        self.queries, self.candidates = queries, candidates
        self.layout, self.lists, self.chunks = layout, layout.lists, layout.chunks
        self.order = layout.lists.query_order
        self.mirrored = queries is candidates

    def relevant(self, chunk: int) -> Relevant:
        rows = self.chunks[chunk]
        columns, valid = self.lists.relevant_columns(rows, self.layout.bands[chunk][0])
        queries = self.queries.take(rows)
        scores = queries.new_full(columns.shape, torch.inf)
        for block in self.layout.blocks[chunk]:
            local = slice(block.rows.start - rows.start, block.rows.stop - rows.start)
            tile = queries[local] @ self.candidates.take(block.columns).t()
            here, at = _within(columns[local], valid[local], block.columns)
            scores[local] = torch.where(here, tile.gather(1, at), scores[local])
        num_candidates = len(self.lists.candidate_order)
        return Relevant(
            scores=scores,
            valid=valid,
            gains=None,
            num_relevant=self.lists.num_relevant[rows],
            list_length=self.lists.list_length[rows],
            rank_dtype=torch.float64 if num_candidates > EXACT_FLOAT32 else scores.dtype,
        )

    def _views(self) -> Iterator[View]:
        panels = self.layout.panels
        for i, rows in enumerate(self.chunks):
            queries = self.queries.take(rows)
            _, first, last = self.layout.bands[i]
            for z, columns in enumerate(panels):
                if self.mirrored and z < i:
                    continue  # the mirror image of a tile that was visited
                candidates = self.candidates.take(columns)
                tile = queries @ candidates.t()
                if columns.start < last and columns.stop > first:
                    self.lists.hide(tile, rows, columns)
                sides = [Side(tile, i, i * len(panels) + z)]
                if self.mirrored and i != z:
                    sides.append(Side(tile.t(), z, z * len(panels) + i))
                yield View(sides, rows, columns, queries, candidates)

    def pull(self, ranker: Ranker, prepared: list[Any], aimed: list[Any], seed: int) -> list[Tensor | None]:
        self.queries.clear()
        self.candidates.clear()
        return super().pull(ranker, prepared, aimed, seed)

    def _give(self, view: View, gradients: list[Tensor]) -> None:
        gradient = gradients[0] if len(gradients) == 1 else gradients[0].add_(gradients[1].t())
        self.queries.give(view.rows, gradient @ view.candidates)
        self.candidates.give(view.columns, gradient.t() @ view.queries)

    def gradients(self, d_relevant: list[Tensor]) -> tuple[Tensor, ...]:
        for chunk, (rows, d_scores) in enumerate(zip(self.chunks, d_relevant, strict=True)):
            columns, valid = self.lists.relevant_columns(rows, self.layout.bands[chunk][0])
            queries = self.queries.take(rows)
            for block in self.layout.blocks[chunk]:
                local = slice(block.rows.start - rows.start, block.rows.stop - rows.start)
                here, at = _within(columns[local], valid[local], block.columns)
                gradient = d_scores.new_zeros(len(here), block.columns.stop - block.columns.start)
                gradient.scatter_add_(1, at, torch.where(here, d_scores[local], 0))
                candidates = self.candidates.take(block.columns)
                self._give(View([], block.rows, block.columns, queries[local], candidates), [gradient])
        return (self.queries.d_base(),) if self.mirrored else (self.queries.d_base(), self.candidates.d_base())


class ScoreDoor(TiledDoor):
    """Scores are given as a matrix, one list per row."""

    fused = False  # whether kernels compare the relevant items with each other, see `Relevant`

    def __init__(self, scores: Tensor, lists: ScoreLists) -> None:
        self.scores, self.lists = scores, lists
        self.order = lists.query_order
        self.dtype = torch.promote_types(scores.dtype, torch.float32)
        side = tile_side(scores.device)
        self.chunks = split(scores.shape[0], side)
        self.widths = lists.most_relevant(self.chunks)
        width = side * max(side // scores.shape[0], 1)
        # a tile also costs a few passes over the relevant items, so it is to hold as many scores
        self.panels = split(scores.shape[1], max(width, min(max(self.widths), WIDEST_TILE)))

    def relevant(self, chunk: int) -> Relevant:
        rows = self.lists.rows(self.chunks[chunk])
        columns, valid = self.lists.relevant_columns(rows, self.widths[chunk])
        scores, grades = self.lists.at(self.scores, rows, columns).to(self.dtype), self.lists.grades
        return Relevant(
            scores=scores if self.lists.single else scores.masked_fill_(~valid, torch.inf),
            full=self.lists.single,
            fused=self.fused,
            valid=valid,
            gains=None if grades is None else self.lists.at(grades, rows, columns).to(self.dtype),
            num_relevant=self.lists.num_relevant[rows],
            list_length=self.lists.list_length[rows],
            rank_dtype=torch.float64 if self.scores.shape[1] > EXACT_FLOAT32 else self.dtype,
        )

    def _views(self) -> Iterator[View]:
        for i, chunk in enumerate(self.chunks):
            rows = self.lists.rows(chunk)
            for z, columns in enumerate(self.panels):
                tile = self.scores[rows, columns].to(self.dtype).masked_fill(self.lists.hidden(rows, columns), -torch.inf)
                yield View([Side(tile, i, i * len(self.panels) + z)], rows, columns)

    def pull(self, ranker: Ranker, prepared: list[Any], aimed: list[Any], seed: int) -> list[Tensor | None]:
        self.d_scores = torch.empty_like(self.scores)
        return super().pull(ranker, prepared, aimed, seed)

    def _give(self, view: View, gradients: list[Tensor]) -> None:
        self.d_scores[view.rows, view.columns] = gradients[0].to(self.scores.dtype)

    def gradients(self, d_relevant: list[Tensor]) -> tuple[Tensor, ...]:
        for chunk, width, d_scores in zip(self.chunks, self.widths, d_relevant, strict=True):
            rows = self.lists.rows(chunk)
            columns, valid = self.lists.relevant_columns(rows, width)
            given = d_scores.to(self.scores.dtype)
            if isinstance(rows, slice):
                self.d_scores[0].index_copy_(0, columns[0], given[0])
            else:
                # relevant entries are hidden in the tiles and so are 0 until now; padding adds 0
                at = (rows[:, None].expand_as(columns), columns)
                self.d_scores.index_put_(at, torch.where(valid, given, 0), accumulate=True)
        return (self.d_scores,)
