"""Where scores come from. A door knows its lists, hands out tiles of scores and takes their gradient back.

    EmbeddingDoor   scores are products of queries and candidates, made tile by tile and never kept
    ScoreDoor       scores are given

Both show the same face: queries in `chunks`, the relevant items of a chunk, two visits to all tiles (one that counts,
one that returns a gradient for each tile), and the gradients of the tensors they were opened with.

Dimension letters:  Q queries   C candidates   B queries of a chunk   Z candidates of a tile   P relevant items, padded
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rankgrad.ops.lists import LabelLists, ScoreLists
from rankgrad.ops.rankers import Relevant

# (tile, chunk, key): the key names the tile, the same number in forward and backward
Count = Callable[[Tensor, int, int], None]
Pull = Callable[[Tensor, int, int], Tensor]

# Integers are exact in float32 up to here; longer lists get their ranks in float64.
EXACT_FLOAT32 = 2**24


def tile_side(device: torch.device) -> int:
    """Rows and columns of a tile: 1 MiB of float32, in a core's cache, or 64 MiB where launches cost more than memory."""
    return 512 if device.type == "cpu" else 4096


def split(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class Door(Protocol):
    chunks: list[slice]
    order: Tensor  # [Q] from the door's order of queries to the caller's

    def relevant(self, chunk: int) -> Relevant: ...

    def visit(self, count: Count) -> None: ...

    def visit_back(self, pull: Pull) -> None: ...

    def give_relevant(self, chunk: int, d_scores: Tensor) -> None: ...

    def gradients(self) -> tuple[Tensor | None, ...]: ...


class Rows:
    """Embeddings in class order, taken by slices; gradients go back by slices."""

    def __init__(self, base: Tensor, order: Tensor) -> None:
        self.order = order
        self.values = base[order]
        self.gradient: Tensor | None = None

    def take(self, rows: slice) -> Tensor:
        return self.values[rows]

    def give(self, rows: slice, gradient: Tensor) -> None:
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.values)
        self.gradient[rows] += gradient

    def d_base(self) -> Tensor:
        out = torch.zeros_like(self.values)
        if self.gradient is not None:
            out[self.order] = self.gradient
        return out


class MixedRows:
    """Rows alpha * base[first] + (1 - alpha) * base[second], made when they are taken and never stored."""

    def __init__(self, base: Tensor, order: Tensor, first: Tensor, second: Tensor, alpha: Tensor) -> None:
        self.base = base
        self.first, self.second = first[order], second[order]
        self.alpha = alpha[order, None].to(base.dtype)
        self.gradient = torch.zeros_like(base)

    def take(self, rows: slice) -> Tensor:
        return torch.lerp(self.base[self.second[rows]], self.base[self.first[rows]], self.alpha[rows])

    def give(self, rows: slice, gradient: Tensor) -> None:
        # index_put_ and not index_add_: on a GPU it adds in a fixed order
        self.gradient.index_put_((self.first[rows],), gradient * self.alpha[rows], accumulate=True)
        self.gradient.index_put_((self.second[rows],), gradient * (1 - self.alpha[rows]), accumulate=True)

    def d_base(self) -> Tensor:
        return self.gradient


@dataclass(frozen=True)
class Layout:
    """How labels cut the work into tiles. Made once for forward and backward."""

    lists: LabelLists
    chunks: list[slice]  # of queries
    panels: list[slice]  # of candidates
    bands: list[tuple[int, int, int]]  # per chunk: most relevant items of a query, and the columns where `hide` matters

    @classmethod
    def of(cls, lists: LabelLists, device: torch.device) -> "Layout":
        side = tile_side(device)
        chunks = split(len(lists.query_order), side)
        # from where the labels are: labels that stay on the host spare a GPU the wait for this
        return cls(lists.to(device), chunks, split(len(lists.candidate_order), side), lists.bands(chunks))


class EmbeddingDoor:
    """Scores are dot products. With one set of rows in both roles a product serves a tile and its mirror image."""

    def __init__(self, queries: Rows | MixedRows, candidates: Rows | MixedRows, layout: Layout) -> None:
        self.queries, self.candidates = queries, candidates
        self.layout, self.lists, self.chunks = layout, layout.lists, layout.chunks
        self.order = layout.lists.query_order
        self.mirrored = queries is candidates

    def relevant(self, chunk: int) -> Relevant:
        rows = self.chunks[chunk]
        width, first, last = self.layout.bands[chunk]
        columns, valid = self.lists.relevant_columns(rows, width)
        queries = self.queries.take(rows)
        scores = queries.new_full(columns.shape, torch.inf)
        for panel in self._panels(first, last) if width else ():
            tile = queries @ self.candidates.take(panel).t()
            here = valid & (columns >= panel.start) & (columns < panel.stop)
            found = tile.gather(1, (columns - panel.start).clamp(0, tile.shape[1] - 1))
            scores = torch.where(here, found, scores)
        num_candidates = len(self.lists.candidate_order)
        return Relevant(
            scores=scores,
            valid=valid,
            gains=None,
            num_relevant=self.lists.num_relevant[rows],
            list_length=self.lists.list_length[rows],
            rank_dtype=torch.float64 if num_candidates > EXACT_FLOAT32 else scores.dtype,
        )

    def _panels(self, first: int, last: int) -> list[slice]:
        side = tile_side(self.order.device)
        return [slice(first + p.start, first + p.stop) for p in split(last - first, side)]

    def _tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
        """Chunk, panel, their rows, and the tile of scores with what is not ranked hidden."""
        for i, rows in enumerate(self.chunks):
            queries = self.queries.take(rows)
            _, first, last = self.layout.bands[i]
            for z, columns in enumerate(self.layout.panels):
                if self.mirrored and z < i:
                    continue  # the mirror image of a tile that was visited
                candidates = self.candidates.take(columns)
                tile = queries @ candidates.t()
                if columns.start < last and columns.stop > first:
                    self.lists.hide(tile, rows, columns)
                yield i, z, queries, candidates, tile

    def _key(self, chunk: int, panel: int) -> int:
        return chunk * len(self.layout.panels) + panel

    def visit(self, count: Count) -> None:
        for i, z, _, _, tile in self._tiles():
            count(tile, i, self._key(i, z))
            if self.mirrored and i != z:
                count(tile.t(), z, self._key(z, i))

    def visit_back(self, pull: Pull) -> None:
        for i, z, queries, candidates, tile in self._tiles():
            gradient = pull(tile, i, self._key(i, z))
            if self.mirrored and i != z:
                gradient += pull(tile.t(), z, self._key(z, i)).t()
            self._give(self.chunks[i], self.layout.panels[z], queries, candidates, gradient)

    def _give(self, rows: slice, columns: slice, queries: Tensor, candidates: Tensor, gradient: Tensor) -> None:
        self.queries.give(rows, gradient @ candidates)
        self.candidates.give(columns, gradient.t() @ queries)

    def give_relevant(self, chunk: int, d_scores: Tensor) -> None:
        rows = self.chunks[chunk]
        width, first, last = self.layout.bands[chunk]
        columns, valid = self.lists.relevant_columns(rows, width)
        queries = self.queries.take(rows)
        for panel in self._panels(first, last) if width else ():
            here = valid & (columns >= panel.start) & (columns < panel.stop)
            gradient = d_scores.new_zeros(d_scores.shape[0], panel.stop - panel.start)
            gradient.scatter_add_(1, (columns - panel.start).clamp(0, gradient.shape[1] - 1), torch.where(here, d_scores, 0))
            self._give(rows, panel, queries, self.candidates.take(panel), gradient)

    def gradients(self) -> tuple[Tensor | None, ...]:
        if self.mirrored:
            return (self.queries.d_base(),)
        return self.queries.d_base(), self.candidates.d_base()


class ScoreDoor:
    """Scores are given as a matrix, one list per row."""

    def __init__(self, scores: Tensor, lists: ScoreLists) -> None:
        self.scores, self.lists = scores, lists
        self.order = lists.query_order
        self.dtype = torch.promote_types(scores.dtype, torch.float32)
        side = tile_side(scores.device)
        self.chunks = split(scores.shape[0], side)
        self.panels = split(scores.shape[1], side * max(side // scores.shape[0], 1))
        self.widths = torch.stack([lists.num_relevant[self.order[c]].max() for c in self.chunks]).tolist()
        self.d_scores: Tensor | None = None

    def relevant(self, chunk: int) -> Relevant:
        rows = self.order[self.chunks[chunk]]
        columns, valid = self.lists.relevant_columns(rows, self.widths[chunk])
        at, grades = (rows[:, None], columns), self.lists.grades
        return Relevant(
            scores=self.scores[at].to(self.dtype).masked_fill(~valid, torch.inf),
            valid=valid,
            gains=None if grades is None else grades[at].to(self.dtype),
            num_relevant=self.lists.num_relevant[rows],
            list_length=self.lists.list_length[rows],
            rank_dtype=torch.float64 if self.scores.shape[1] > EXACT_FLOAT32 else self.dtype,
        )

    def _tiles(self) -> Iterator[tuple[int, int, Tensor, slice, Tensor]]:
        for i, chunk in enumerate(self.chunks):
            rows = self.order[chunk]
            for z, columns in enumerate(self.panels):
                tile = self.scores[rows, columns].to(self.dtype)
                yield i, i * len(self.panels) + z, rows, columns, tile.masked_fill_(self.lists.hidden(rows, columns), -torch.inf)

    def visit(self, count: Count) -> None:
        for i, key, _, _, tile in self._tiles():
            count(tile, i, key)

    def visit_back(self, pull: Pull) -> None:
        self.d_scores = torch.empty_like(self.scores)
        for i, key, rows, columns, tile in self._tiles():
            self.d_scores[rows, columns] = pull(tile, i, key).to(self.scores.dtype)

    def give_relevant(self, chunk: int, d_scores: Tensor) -> None:
        assert self.d_scores is not None, "visit_back comes first"
        rows = self.order[self.chunks[chunk]]
        columns, valid = self.lists.relevant_columns(rows, self.widths[chunk])
        # relevant entries are hidden in the tiles and so are 0 until now; padding adds 0
        given = torch.where(valid, d_scores, 0).to(self.scores.dtype)
        self.d_scores.index_put_((rows[:, None].expand_as(columns), columns), given, accumulate=True)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return (self.d_scores,)
