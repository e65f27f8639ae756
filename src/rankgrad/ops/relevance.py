"""Who is ranked for whom, and who of them is relevant: by labels, or by a relevance matrix.

For labels, candidates are put in an order in which each class is one run and classes grow in size, queries in the same order of
classes. Then the relevant candidates of a query are one interval, only a band of tiles near the diagonal holds any of
them, and neighbouring queries have about as many, so that padding costs little.

Dimension letters:  Q queries   C candidates
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LabelLists:
    """Every tensor but the two orders is in class order: row i is about query `query_order[i]`."""

    query_order: Tensor  # [Q] from class order to the caller's order
    candidate_order: Tensor  # [C]
    start: Tensor  # [Q] first and one past the last candidate of the query's class, positions in class order
    stop: Tensor  # [Q]
    class_start: Tensor  # [C] first candidate of the candidate's class
    own: Tensor  # [Q] position of the query among the candidates, -1 where it is not among them
    num_relevant: Tensor  # [Q]
    list_length: Tensor  # [Q]
    own_is_ranked: bool  # the query stays in its own list as an irrelevant candidate

    @classmethod
    def build(
        cls,
        labels: Tensor,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        *,
        own_is_ranked: bool = False,
    ) -> "LabelLists":
        """Lists of a batch ranked against itself, or of queries against references that `self_index` may place them among."""
        labels = labels.long()
        in_batch = ref_labels is None
        ref_labels = labels if ref_labels is None else ref_labels.long()
        by_label = ref_labels.argsort(stable=True)
        ascending = ref_labels[by_label]

        def class_run(wanted: Tensor) -> tuple[Tensor, Tensor]:
            first = torch.searchsorted(ascending, wanted)
            return first, torch.searchsorted(ascending, wanted, right=True) - first

        candidate_order = by_label[class_run(ascending)[1].argsort(stable=True)]
        place = torch.empty_like(candidate_order)
        place[candidate_order] = torch.arange(len(ref_labels), device=labels.device)

        first, size = class_run(ref_labels[candidate_order])
        class_start = place[by_label[first]]
        if in_batch:
            return cls(
                query_order=candidate_order,
                candidate_order=candidate_order,
                start=class_start,
                stop=class_start + size,
                class_start=class_start,
                own=torch.arange(len(labels), device=labels.device),
                num_relevant=size - 1,
                list_length=torch.full_like(size, len(labels) - (not own_is_ranked)),
                own_is_ranked=own_is_ranked,
            )

        query_order = labels.argsort(stable=True)
        query_order = query_order[class_run(labels[query_order])[1].argsort(stable=True)]
        first, size = class_run(labels[query_order])
        # the run of a class that no candidate has is empty and begins before all others, like its queries
        start = place[by_label[first.clamp(max=len(ref_labels) - 1)]].masked_fill(size == 0, -1)
        stop = start + size
        if self_index is None:
            own = torch.full_like(start, -1)
        else:
            given = self_index.long()[query_order]
            own = torch.where(given >= 0, place[given.clamp(min=0)], -1)
        own_in_class = (own >= start) & (own < stop)
        length = torch.full_like(start, len(ref_labels)) - (0 if own_is_ranked else (own >= 0).long())
        return cls(
            query_order,
            candidate_order,
            start,
            stop,
            class_start,
            own,
            size - own_in_class.long(),
            length,
            own_is_ranked,
        )

    def to(self, device: torch.device) -> "LabelLists":
        tensors: dict[str, Any] = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def query_runs(self) -> tuple[Tensor, Tensor]:
        """[C] first and one past the last query of each candidate's class, both in class order."""
        return torch.searchsorted(self.start, self.class_start), torch.searchsorted(self.start, self.class_start, right=True)

    def dense(self) -> tuple[Tensor, Tensor]:
        """[Q, C] which candidates are relevant and which are ranked, both in the caller's order."""
        at = torch.arange(len(self.candidate_order), device=self.start.device)
        start, stop, own = self.start[:, None], self.stop[:, None], self.own[:, None]
        in_order = torch.stack(((at >= start) & (at < stop) & (at != own), (at != own) | self.own_is_ranked))
        out = torch.empty_like(in_order)
        out[:, self.query_order[:, None], self.candidate_order] = in_order
        return out[0], out[1]

    def hide(self, tile: Tensor, rows: slice, columns: slice) -> None:
        """Set the relevant candidates of `rows` in a tile of scores, and the queries themselves, to -inf."""
        at = torch.arange(columns.start, columns.stop, device=tile.device)
        start, stop, own = (t[rows, None] for t in (self.start, self.stop, self.own))
        relevant = (at >= start) & (at < stop)
        tile.masked_fill_(relevant & (at != own) if self.own_is_ranked else relevant | (at == own), -torch.inf)

    def relevant_columns(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[B, width] positions of the relevant candidates of `rows` in ascending order, and which of them are real."""
        start, stop, own = (t[rows, None] for t in (self.start, self.stop, self.own))
        step = torch.arange(width, device=self.start.device)
        columns = start + step
        columns = columns + ((own >= start) & (own < stop) & (columns >= own)).long()
        return columns, step < self.num_relevant[rows, None]

    def bands(self, chunks: list[slice]) -> list[tuple[int, int, int]]:
        """For every chunk of queries the most relevant items of a query, and the interval of columns that needs `hide`."""
        empty = self.start == self.stop
        low = torch.where(empty, self.own, self.start)
        low = torch.where((self.own >= 0) & (self.own < low), self.own, low)
        high = torch.maximum(self.stop, self.own + 1)
        # a query with neither has low -1: nothing to hide
        nowhere = low < 0
        low, high = low.masked_fill(nowhere, len(self.candidate_order)), high.masked_fill(nowhere, 0)
        # one transfer to the host for all chunks
        table = torch.stack((self.num_relevant, low, high)).cpu().numpy()
        return [(int(table[0, c].max()), int(table[1, c].min()), int(table[2, c].max())) for c in chunks]


@dataclass(frozen=True)
class ScoreLists:
    """The lists of a relevance matrix, one per row. Rows with about as many relevant items come together."""

    is_relevant: Tensor  # [Q, C]
    grades: Tensor | None  # [Q, C] graded relevance
    ranked: Tensor | None  # [Q, C] False for what is not ranked, None where all is
    query_order: Tensor  # [Q]
    num_relevant: Tensor  # [Q] in the caller's order, like all below
    list_length: Tensor  # [Q]
    column: Tensor  # [pairs] columns of the relevant items, row after row, ascending
    first: Tensor  # [Q] where a row begins in `column`
    width: int | None = None  # most relevant items of a row, if those of `column` are padded to it, in the caller's order

    @classmethod
    def build(cls, relevance: Tensor, ranked: Tensor | None) -> "ScoreLists":
        grades = None if relevance.dtype == torch.bool else relevance
        is_relevant = relevance if grades is None else relevance > 0
        queries, length = relevance.shape
        if ranked is None:
            list_length = torch.full((queries,), length, device=relevance.device)
        else:
            is_relevant, list_length = is_relevant & ranked, _true_per_row(ranked)
        flat = is_relevant.reshape(-1).nonzero().view(-1)
        if queries == 1:  # a long list is worth a shortcut: no copies, and nothing more to wait for
            num_relevant = torch.full_like(list_length, len(flat))
            return cls(
                is_relevant,
                grades,
                ranked,
                torch.zeros_like(list_length),
                num_relevant,
                list_length,
                flat,
                num_relevant,
            )
        edges = torch.searchsorted(flat, torch.arange(0, (queries + 1) * length, length, device=flat.device))
        num_relevant = edges.diff()
        order = num_relevant.argsort(stable=True)
        return cls(is_relevant, grades, ranked, order, num_relevant, list_length, flat % length, edges[:-1])

    @property
    def single(self) -> bool:
        """One list without padding."""
        return len(self.query_order) == 1 and self.width is None

    def rows(self, chunk: slice) -> Tensor | slice:
        """The rows of a chunk of the query order, to index a matrix with: a view, where the order is the caller's."""
        return chunk if self.single or self.width is not None else self.query_order[chunk]

    def most_relevant(self, chunks: list[slice]) -> list[int]:
        """Most relevant items of a row in each chunk."""
        if self.single or self.width is not None:
            return [len(self.column) if self.width is None else self.width for _ in chunks]
        # the query order has the most at the end; one transfer to the host for all chunks
        most: list[int] = self.num_relevant[self.query_order[[c.stop - 1 for c in chunks]]].tolist()
        return most

    def hidden(self, rows: Tensor | slice, columns: slice) -> Tensor:
        """[B, Z] True for what is relevant or not ranked."""
        hidden = self.is_relevant[rows, columns]
        return hidden if self.ranked is None else hidden | ~self.ranked[rows, columns]

    def relevant_columns(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor]:
        """[B, width] columns of the relevant items of `rows`, and which of them are real."""
        if self.single:
            return self.column[None], torch.ones(1, width, dtype=torch.bool, device=self.column.device)
        step = torch.arange(width, device=self.column.device)
        valid = step < self.num_relevant[rows, None]
        if self.width is not None:
            return self.column.view(-1, self.width)[rows], valid
        return self.column[torch.where(valid, self.first[rows, None] + step, 0)], valid

    def at(self, matrix: Tensor, rows: Tensor | slice, columns: Tensor) -> Tensor:
        """[B, width] entries of a matrix of the lists' shape at `columns` of `rows`."""
        if isinstance(rows, slice):
            return matrix[0].index_select(0, columns[0])[None] if self.single else matrix[rows].gather(1, columns)
        return matrix[rows[:, None], columns]


def _true_per_row(mask: Tensor) -> Tensor:
    # a bool sum along rows is slow on a CPU, and counting a whole tensor is not
    return torch.stack([row.count_nonzero() for row in mask]) if len(mask) <= 8 else mask.sum(dim=1)
