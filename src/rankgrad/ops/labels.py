"""Relevance by class labels.

    Labels              as a caller gives them
    IntervalRelevance   as the engine asks for them

Candidates are put in an order in which each class is one interval and classes grow in size, queries in the same order of
classes. Then the positives of a query are one interval, only the tiles near the diagonal hold any of them, and neighbouring
queries have about as many, so that padding costs little.

Dimension letters:  Q queries   C candidates   B queries of a row block   L levels   P positives, padded
"""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad.ops.relevance import TileRelevance, block_extents, hide_listed_, inverse_order, level_gains, moved_to


@dataclass(frozen=True)
class Labels:
    """A candidate is relevant to the queries that have its label. Without references query i is candidate i."""

    labels: Tensor  # [Q]
    ref_labels: Tensor | None = None  # [C]
    self_index: Tensor | None = None  # [Q] the query among the references, -1 where it is not
    rank_self: bool = False  # the query stays in its own list as an irrelevant candidate

    capturable = True

    @classmethod
    def of(
        cls,
        labels: Tensor,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        *,
        rank_self: bool = False,
        ignore_label: int | None = None,
    ) -> "Labels":
        """Items with `ignore_label` are relevant to nothing, and nothing is relevant to them."""
        if ignore_label is None:
            return cls(labels, ref_labels, self_index, rank_self)
        # labels become indices, which leaves the numbers beyond them for classes of one; shapes stay, so calls can be captured
        together = labels if ref_labels is None else torch.cat((labels, ref_labels.to(labels.device)))
        index = torch.searchsorted(together.sort().values, together.contiguous())
        alone = torch.arange(len(together), 2 * len(together), device=together.device)
        index = torch.where(together == ignore_label, alone, index)
        return cls(index[: len(labels)], None if ref_labels is None else index[len(labels) :], self_index, rank_self)

    @property
    def num_queries(self) -> int:
        return len(self.labels)

    @property
    def num_candidates(self) -> int:
        return len(self.labels if self.ref_labels is None else self.ref_labels)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.labels, self.ref_labels, self.self_index) if t is not None)

    @property
    def settings(self) -> Hashable:
        return self.rank_self

    def with_tensors(self, *tensors: Tensor) -> "Labels":
        given = iter(tensors)
        labels, ref_labels, self_index = (
            None if t is None else next(given) for t in (self.labels, self.ref_labels, self.self_index)
        )
        assert labels is not None
        return Labels(labels, ref_labels, self_index, self.rank_self)

    def to(self, device: torch.device) -> "Labels":
        return self.with_tensors(*(tensor.to(device, torch.long, non_blocking=True) for tensor in self.tensors))

    def shard(self, rows: slice) -> "Labels":
        if self.ref_labels is None:
            index = torch.arange(len(self.labels), device=self.labels.device)
            return Labels(self.labels[rows], self.labels, index[rows], self.rank_self)
        self_index = None if self.self_index is None else self.self_index[rows]
        return Labels(self.labels[rows], self.ref_labels, self_index, self.rank_self)

    def transposed(self) -> "Labels":
        assert self.ref_labels is not None, "a batch against itself has no other direction"
        return Labels(self.ref_labels, self.labels, rank_self=self.rank_self)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        refs = self.labels if self.ref_labels is None else self.ref_labels
        relevant = self.labels[:, None] == refs
        if self.ref_labels is not None and self.self_index is None:
            return relevant, None
        others = torch.ones_like(relevant)
        if self.self_index is None:
            others.fill_diagonal_(False)
        else:
            rows = (self.self_index >= 0).nonzero().view(-1)
            others[rows, self.self_index[rows].long()] = False
        return relevant & others, None if self.rank_self else others

    def one_tile(self) -> TileRelevance:
        device, in_batch = self.labels.device, self.ref_labels is None
        refs_on_device = self.labels if self.ref_labels is None else self.ref_labels
        hidden = self.labels[:, None] == refs_on_device
        # the rest in numpy: a dozen operations on a few hundred integers, each a fraction of what torch takes to begin one
        labels = self.labels.cpu().numpy()
        refs = labels if in_batch else refs_on_device.cpu().numpy()
        order = refs.argsort(kind="stable")
        ascending = refs[order]
        first = ascending.searchsorted(labels)
        num_relevant = ascending.searchsorted(labels, side="right") - first
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        list_length = np.full(len(labels), len(refs))
        itself = None  # the query's position in `order`, beyond the end where it is not a member of its own class there
        if in_batch:
            itself = position
            num_relevant -= 1
            list_length -= not self.rank_self
            if self.rank_self:
                hidden.fill_diagonal_(False)
        elif self.self_index is not None:
            self_index = self.self_index.cpu().numpy()
            among = self_index >= 0
            rows = torch.from_numpy(among.nonzero()[0]).to(device)
            hidden[rows, self.self_index[rows]] = not self.rank_self
            itself = position[self_index.clip(min=0)]
            in_class = among & (itself >= first) & (itself < first + num_relevant)
            itself[~in_class] = len(refs)
            num_relevant -= in_class
            list_length -= among & (not self.rank_self)
        least, most = int(num_relevant.min()), int(num_relevant.max())
        columns = first[:, None] + np.arange(most)
        if itself is not None:
            columns += columns >= itself[:, None]
        valid = None
        if least < most:
            valid = torch.from_numpy(np.arange(most) < num_relevant[:, None]).to(device)
            np.minimum(columns, len(refs) - 1, out=columns)

        def tensor(numbers: Any) -> Tensor:
            return torch.from_numpy(numbers).to(device)

        return TileRelevance(
            hidden, valid, tensor(order[columns]), tensor(num_relevant), tensor(list_length), none_empty=least > 0
        )

    def build(self, *, captured: bool = False) -> "IntervalRelevance":
        if captured and self.ref_labels is None:
            from rankgrad.ops.triton.class_order import MOST_ITEMS, class_order

            if len(self.labels) <= MOST_ITEMS:
                return IntervalRelevance.of_batch(*class_order(self.labels.long()), rank_self=self.rank_self)
        return IntervalRelevance.build(self.labels, self.ref_labels, self.self_index, rank_self=self.rank_self)


@dataclass(frozen=True)
class IntervalRelevance:
    """Every tensor but the two orders is in class order: row i is about query `query_order[i]`."""

    query_order: Tensor  # [Q] from class order to the caller's order
    candidate_order: Tensor  # [C]
    start: Tensor  # [Q] first and one past the last candidate of the query's class, positions in class order
    stop: Tensor  # [Q]
    class_start: Tensor  # [C] first candidate of the candidate's class
    self_column: Tensor  # [Q] position of the query among the candidates, -1 where it is not among them
    num_relevant: Tensor  # [Q]
    list_length: Tensor  # [Q]
    rank_self: bool  # the query stays in its own list as an irrelevant candidate
    query_levels: Tensor | None = None  # [Q, L] labels from coarse to fine, where relevance is graded by the levels they share
    candidate_levels: Tensor | None = None  # [C, L]
    table: Tensor | None = None  # [L + 1] the gain of items that share so many levels

    symmetric = True

    @classmethod
    def build(
        cls,
        labels: Tensor,
        ref_labels: Tensor | None = None,
        self_index: Tensor | None = None,
        *,
        rank_self: bool = False,
    ) -> "IntervalRelevance":
        """Lists of a batch ranked against itself, or of queries against references that `self_index` may place among them."""
        labels = labels.long()
        in_batch = ref_labels is None
        ref_labels = labels if ref_labels is None else ref_labels.long()
        ascending, by_label = ref_labels.sort(stable=True)

        def class_interval(wanted: Tensor) -> tuple[Tensor, Tensor]:
            first = torch.searchsorted(ascending, wanted)
            return first, torch.searchsorted(ascending, wanted, right=True) - first

        first, size = class_interval(ascending)
        size, by_size = _sorted_sizes(size, len(ref_labels))
        candidate_order, column = by_label[by_size], torch.arange(len(ref_labels), device=labels.device)
        class_start = column - (by_size - first[by_size])  # both sorts are stable: an item keeps its place in its class
        if in_batch:
            return cls.of_batch(candidate_order, class_start, class_start + size, size - 1, rank_self=rank_self)

        column_of = inverse_order(candidate_order)
        ascending_queries, query_order = labels.sort(stable=True)
        first, size = class_interval(ascending_queries)
        size, by_size = _sorted_sizes(size, len(ref_labels))
        query_order, first = query_order[by_size], first[by_size]
        # the run of a class that no candidate has is empty and begins before all others, like its queries
        start = column_of[by_label[first.clamp(max=len(ref_labels) - 1)]].masked_fill(size == 0, -1)
        stop = start + size
        if self_index is None:
            self_column = torch.full_like(start, -1)
        else:
            given = self_index.long()[query_order]
            self_column = torch.where(given >= 0, column_of[given.clamp(min=0)], -1)
        self_in_class = (self_column >= start) & (self_column < stop)
        length = torch.full_like(start, len(ref_labels)) - (0 if rank_self else (self_column >= 0).long())
        return cls(
            query_order,
            candidate_order,
            start,
            stop,
            class_start,
            self_column,
            size - self_in_class.long(),
            length,
            rank_self,
        )

    @classmethod
    def of_batch(
        cls, order: Tensor, start: Tensor, stop: Tensor, num_relevant: Tensor, *, rank_self: bool
    ) -> "IntervalRelevance":
        """Of a batch ranked against itself, from its class order."""
        return cls(
            query_order=order,
            candidate_order=order,
            start=start,
            stop=stop,
            class_start=start,
            self_column=torch.arange(len(order), device=order.device),
            num_relevant=num_relevant,
            list_length=torch.full_like(order, len(order) - (not rank_self)),
            rank_self=rank_self,
        )

    def to(self, device: torch.device) -> "IntervalRelevance":
        return moved_to(self, device)

    def num_relevant_in_order(self) -> Tensor:
        """[Q] relevant candidates of each query, in the caller's order."""
        return torch.empty_like(self.num_relevant).index_copy_(0, self.query_order, self.num_relevant)

    def query_intervals(self) -> tuple[Tensor, Tensor]:
        """[C] first and one past the last query of each candidate's class, both in class order."""
        return torch.searchsorted(self.start, self.class_start), torch.searchsorted(self.start, self.class_start, right=True)

    def transposed(self) -> "IntervalRelevance":
        """See `EngineRelevance`."""
        start, stop = self.query_intervals()
        return IntervalRelevance(
            query_order=self.candidate_order,
            candidate_order=self.query_order,
            start=start,
            stop=stop,
            class_start=torch.searchsorted(self.start, self.start),
            self_column=torch.full_like(start, -1),
            num_relevant=stop - start,
            list_length=torch.full_like(start, len(self.query_order)),
            rank_self=self.rank_self,
            query_levels=self.candidate_levels,
            candidate_levels=self.query_levels,
            table=self.table,
        )

    def hide_(self, tile: Tensor, rows: slice, columns: slice, width: int) -> None:
        """See `EngineRelevance`."""
        if width < tile.shape[1] // 8:  # a few of many
            itself = None if self.rank_self else self.self_column[rows]
            hide_listed_(tile, columns, *self.positives(rows, width), itself)
            return
        at = torch.arange(columns.start, columns.stop, device=tile.device)
        start, stop, self_column = (t[rows, None] for t in (self.start, self.stop, self.self_column))
        relevant = (at >= start) & (at < stop)
        tile.masked_fill_(relevant & (at != self_column) if self.rank_self else relevant | (at == self_column), -torch.inf)

    def positives(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[B, width] positions of the relevant candidates of `rows` in ascending order, and which of them are real."""
        start, stop, self_column = (t[rows, None] for t in (self.start, self.stop, self.self_column))
        step = torch.arange(width, device=self.start.device)
        columns = start + step
        columns = columns + ((self_column >= start) & (self_column < stop) & (columns >= self_column)).long()
        return columns, step < self.num_relevant[rows, None]

    def gains(self, rows: slice, width: int) -> Tensor | None:
        """See `EngineRelevance`."""
        if self.query_levels is None or self.candidate_levels is None or self.table is None:
            return None
        columns = self.positives(rows, width)[0].clamp_(0, len(self.candidate_order) - 1)
        return level_gains(self.query_levels[rows], self.candidate_levels[columns], self.table)

    def extents(self, blocks: list[slice]) -> list[tuple[int, int, int]]:
        """For every block of queries the most relevant items of a query, and the interval of columns that needs `hide_`."""
        empty = self.start == self.stop
        low = torch.where(empty, self.self_column, self.start)
        low = torch.where((self.self_column >= 0) & (self.self_column < low), self.self_column, low)
        high = torch.maximum(self.stop, self.self_column + 1)
        # a query with neither has low -1: nothing to hide
        nowhere = low < 0
        low, high = low.masked_fill(nowhere, len(self.candidate_order)), high.masked_fill(nowhere, 0)
        return block_extents(self.num_relevant, low, high, blocks)

    def class_blocks(self, size: int) -> list[slice]:
        """A batch against itself in about equal blocks, which end where a class does unless it is large."""
        at = torch.arange(size, len(self.start), size, device=self.start.device)
        start, stop = self.start[at], self.stop[at]
        nearest = torch.where(at - start <= stop - at, start, stop)
        cuts: list[int] = torch.where(stop - start <= size // 4, nearest, at).unique_consecutive().tolist()
        cuts = [0, *(cut for cut in cuts if cut < len(self.start)), len(self.start)]
        return [slice(*ends) for ends in pairwise(cuts)]


def _sorted_sizes(size: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Sizes of classes, at most `most`, in ascending order and where they come from. A GPU sorts few bits in few passes."""
    narrow = torch.int16 if most < 2**15 else torch.int32
    ordered, order = size.to(narrow).sort(stable=True)
    return ordered.long(), order
