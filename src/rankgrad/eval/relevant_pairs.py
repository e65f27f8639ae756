"""Which candidates are relevant to a query and which are excluded from its list: by labels, or by lists."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rankgrad.eval.embedding_blocks import Index


class RelevantPairs(Protocol):
    """Which candidates are relevant to a query, and which are excluded from its list."""

    num_relevant: Index  # [Q]

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        """Positions in `queries`, ascending, and candidates of all relevant pairs of these queries."""
        ...

    def excluded(self, queries: Index) -> tuple[Index, Index]:
        """The same for candidates excluded from a query's list."""
        ...


class SameLabelPairs:
    """A candidate is relevant if it has the query's label; the query itself, where it is a candidate, is excluded."""

    def __init__(self, labels: Index, ref_labels: Index, self_index: Index | None) -> None:
        self.order = np.argsort(ref_labels, kind="stable")
        ascending = ref_labels[self.order]
        self.first = np.searchsorted(ascending, labels)
        self.size = np.searchsorted(ascending, labels, side="right") - self.first
        self.self_index = np.full(len(labels), -1) if self_index is None else self_index
        itself = (self.self_index >= 0) & (ref_labels[self.self_index] == labels)
        self.num_relevant: Index = self.size - itself

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        row, step = _ragged(self.size[queries])
        candidate = self.order[self.first[queries][row] + step]
        kept = candidate != self.self_index[queries][row]
        return row[kept], candidate[kept]

    def excluded(self, queries: Index) -> tuple[Index, Index]:
        row = np.flatnonzero(self.self_index[queries] >= 0)
        return row, self.self_index[queries][row]


class ListedPairs:
    """Relevant and excluded candidates listed for every query."""

    def __init__(self, relevant: Sequence[Index], excluded: Sequence[Index]) -> None:
        self.num_relevant = np.array([len(items) for items in relevant], dtype=np.int64)
        self.lists = relevant, excluded

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        return self._pairs(self.lists[0], queries)

    def excluded(self, queries: Index) -> tuple[Index, Index]:
        return self._pairs(self.lists[1], queries)

    @staticmethod
    def _pairs(lists: Sequence[Index], queries: Index) -> tuple[Index, Index]:
        chosen = [lists[query] for query in queries]
        row = np.repeat(np.arange(len(chosen)), [len(items) for items in chosen])
        return row, np.concatenate([*chosen, np.empty(0, np.int64)]).astype(np.int64)


class GradedPairs(RelevantPairs, Protocol):
    """Relevant pairs that may have gains."""

    def gains(self, queries: Index) -> NDArray[np.float64] | None:
        """Gains of the pairs that `relevant` returns, None where relevance is binary."""
        ...


class SparsePairs:
    """Pairs of a list, sorted by query; the query itself, where it is a candidate, is excluded."""

    def __init__(self, query: Index, item: Index, gain: NDArray[np.float64] | None, self_index: Index) -> None:
        self.item, self.gain, self.self_index = item, gain, self_index
        self.num_relevant: Index = np.bincount(query, minlength=len(self_index))
        self.first = np.cumsum(self.num_relevant) - self.num_relevant

    def _entries(self, queries: Index) -> tuple[Index, Index]:
        row, step = _ragged(self.num_relevant[queries])
        return row, self.first[queries][row] + step

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        row, at = self._entries(queries)
        return row, self.item[at]

    def gains(self, queries: Index) -> NDArray[np.float64] | None:
        return None if self.gain is None else self.gain[self._entries(queries)[1]]

    def excluded(self, queries: Index) -> tuple[Index, Index]:
        row = np.flatnonzero(self.self_index[queries] >= 0)
        return row, self.self_index[queries][row]


class LevelPairs(SameLabelPairs):
    """Labels [Q, L] from coarse to fine: relevant by the coarsest, with the gain of the deepest level that is shared."""

    def __init__(self, levels: Index, ref_levels: Index, self_index: Index, table: NDArray[np.float64]) -> None:
        super().__init__(levels[:, 0], ref_levels[:, 0], self_index)
        self.levels, self.ref_levels, self.table = levels, ref_levels, table

    def gains(self, queries: Index) -> NDArray[np.float64]:
        row, candidate = self.relevant(queries)
        agree = self.levels[queries][row] == self.ref_levels[candidate]
        gains: NDArray[np.float64] = self.table[np.logical_and.accumulate(agree, axis=1).sum(axis=1)]
        return gains


def _ragged(sizes: NDArray[np.int64]) -> tuple[Index, Index]:
    """Row of each entry of a ragged array with these row sizes, and its position in the row."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
