"""Relevance as a sparse list of pairs, each with a gain, as a caller gives it: multi-label items, clicks, graded judgements.

Nothing has the size queries x candidates. `pair_relevance` has what the engine makes of it.

Dimension letters:  Q queries   C candidates   E pairs
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rankgrad._checks import GAINS, as_tensor, check_choice, check_labels, shape_of
from rankgrad.ops.pair_relevance import PairLists

LabelSets = Tensor | NDArray[np.bool_] | Sequence[Iterable[Hashable]]


@dataclass(frozen=True, eq=False, init=False)
class Pairs:
    """Relevant pairs: candidate `item[n]` is relevant to query `query[n]` with gain `gain[n]`; no other candidate is.

        loss(embeddings, relevance=rg.Pairs(query, item))                  rows of the batch
        loss(embeddings, relevance=rg.Pairs(query, item), ref_emb=refs)    items are rows of the references
        rg.Pairs.from_multilabel(labels)                                   items that share a label

    Relevance need not be symmetric: for a batch ranked against itself give both (i, j) and (j, i) where both are meant. A
    query without pairs has no relevant candidate. Rows out of range, a pair given twice, a query paired with itself and
    gains that are negative or not finite raise; to find out synchronises with the device of the pairs.

    Args:
        query: [E] integers, rows of the queries; a tensor, an array or a list, like the others.
        item: [E] integers, rows of the candidates.
        gain: [E] graded relevance for objectives such as `NDCG`, 1 by default. A pair of gain 0 is not relevant.
    """

    query: Tensor
    item: Tensor
    gain: Tensor | None = None

    def __init__(self, query: Tensor | ArrayLike, item: Tensor | ArrayLike, gain: Tensor | ArrayLike | None = None) -> None:
        query, item = as_tensor(query, name="query", caller="Pairs"), as_tensor(item, name="item", caller="Pairs")
        if query.ndim != 1:
            raise ValueError(f"Pairs: query must be [pairs], got shape {shape_of(query)}")
        check_labels(query, items=len(query), of="the list", name="query", caller="Pairs")
        check_labels(item, items=len(query), of="query", name="item", caller="Pairs")
        if gain is not None:
            gain = as_tensor(gain, name="gain", caller="Pairs")
            if gain.shape != query.shape or gain.dtype == torch.bool or gain.is_complex():
                came = f"{gain.dtype} of shape {shape_of(gain)}"
                raise ValueError(f"Pairs: gain must be one number per pair, shape {shape_of(query)}, got {came}")
        for name, tensor in (("query", query), ("item", item), ("gain", gain)):
            object.__setattr__(self, name, tensor)

    def to(self, device: torch.device | str) -> "Pairs":
        """The same pairs on a device; a loss moves pairs by itself."""
        return Pairs(*(None if t is None else t.to(device) for t in (self.query, self.item, self.gain)))  # type: ignore[arg-type]

    @classmethod
    def from_multilabel(
        cls,
        labels: LabelSets,
        ref_labels: LabelSets | None = None,
        *,
        self_index: Tensor | None = None,
        gain: Literal["overlap", "jaccard"] | None = None,
    ) -> "Pairs":
        """Pairs of items that share at least one label.

        Args:
            labels: [Q, L] bool, tensor or array, or the labels of each query as a list of sets.
            ref_labels: [C, L] bool, or a list of sets for the candidates; without it the batch is ranked against itself.
            self_index: [Q] row of each query among the candidates, -1 where it is not among them.
            gain: None for 1, "overlap" for the number of shared labels, "jaccard" for its share of the labels of either.
        """
        caller = "Pairs.from_multilabel"
        if gain is not None:
            check_choice(gain, ("overlap", "jaccard"), name="gain", caller=caller)
        (row, label), (ref_row, ref_label) = _incidences(labels, ref_labels, caller)
        queries, candidates = len(labels), len(labels if ref_labels is None else ref_labels)
        itself = None if self_index is None else self_index.to(row.device)
        if ref_labels is None:
            itself = torch.arange(queries, device=row.device)
        # every label of a query against every candidate that has it; a pair comes once for each label the two share
        ref_label, by_label = ref_label.sort()
        first = torch.searchsorted(ref_label, label)
        count = torch.searchsorted(ref_label, label, right=True) - first
        query = row.repeat_interleave(count)
        step = torch.arange(len(query), device=row.device) - (count.cumsum(0) - count).repeat_interleave(count)
        items = ref_row[by_label][first.repeat_interleave(count) + step]
        key, shared = torch.unique(query * candidates + items, return_counts=True)
        query, item = key // max(candidates, 1), key % max(candidates, 1)
        if itself is not None:
            other = item != itself[query]
            query, item, shared = query[other], item[other], shared[other]
        if gain is None:
            return cls(query, item)
        if gain == "overlap":
            return cls(query, item, shared.float())
        size, ref_size = torch.bincount(row, minlength=queries), torch.bincount(ref_row, minlength=candidates)
        return cls(query, item, shared / (size[query] + ref_size[item] - shared))

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> "Pairs":
        """The pairs of all processes, which must be rows of the whole batch."""
        graded = gather(torch.tensor([self.gain is not None])).tolist()
        if any(graded) != all(graded):
            raise ValueError(f"Pairs: either all processes give gains or none does, got {graded} by rank")
        gain = None if self.gain is None else gather(self.gain.double())
        return Pairs(gather(self.query.long()), gather(self.item.long()), gain)

    def item_rows(self, items: int) -> Tensor:
        """Nothing: pairs are of rows, and not of what the rows hold."""
        return self.query.new_empty(items, 0)

    def with_references(self, rows: Tensor) -> "Pairs":
        """The same pairs: items may be rows of any of the references."""
        return self

    def of_batch(
        self, queries: int, candidates: int | None, self_index: Tensor | None = None, *, rank_self: bool = False, caller: str
    ) -> PairLists:
        """Checked pairs of a batch of `queries` ranked against itself (`candidates` None) or against so many references."""
        count = queries if candidates is None else candidates
        query, item = self.query.long(), self.item.to(self.query.device, torch.long)
        itself = None if self_index is None else self_index.to(query.device, torch.long)
        if candidates is None:
            itself = torch.arange(queries, device=query.device)
        key, order = (query * count + item).sort()
        gain = None if self.gain is None else self.gain.to(query.device)[order]
        query, item = query[order], item[order]
        _check_pairs(query, item, gain, key, queries, count, itself, caller)
        if gain is not None:
            relevant = gain > 0
            query, item, gain = query[relevant], item[relevant], gain[relevant]
        return PairLists(query, item, gain, itself, queries, count, rank_self, in_batch=candidates is None)


Incidence = tuple[Tensor, Tensor]


def _incidences(labels: LabelSets, ref_labels: LabelSets | None, caller: str) -> tuple[Incidence, Incidence]:
    """(row, label) of all labels of all queries and of all candidates; equal labels are equal numbers."""
    given = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (labels, ref_labels) if x is not None]
    found: list[Any] = []
    if isinstance(given[0], Tensor) and isinstance(given[-1], Tensor):
        for name, each in zip(("labels", "ref_labels"), given, strict=False):
            assert isinstance(each, Tensor)
            if each.dtype != torch.bool or each.ndim != 2:
                came = f"{each.dtype} of shape {shape_of(each)}"
                raise TypeError(f"{caller}: {name} must be bool, [items, labels], or a list of sets of labels, got {came}")
        widths = {each.shape[1] for each in given if isinstance(each, Tensor)}
        if len(widths) > 1:
            raise ValueError(f"{caller}: labels and ref_labels must have as many columns, got {' and '.join(map(str, widths))}")
        found = [each.to(given[0].device).nonzero().unbind(dim=1) for each in given if isinstance(each, Tensor)]
    else:
        number: dict[Hashable, int] = {}
        for each in given:
            if isinstance(each, Tensor):
                raise TypeError(f"{caller}: labels and ref_labels must both be tensors or both lists of sets of labels")
            if any(isinstance(item, str) or not isinstance(item, Iterable) for item in each):
                raise TypeError(f"{caller}: labels must be a set of labels for each item, got {each[0]!r}")
            pairs = [(row, number.setdefault(label, len(number))) for row, item in enumerate(each) for label in set(item)]
            row, label = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()
            found.append((row, label))
    return found[0], found[-1]


def _check_pairs(
    query: Tensor,
    item: Tensor,
    gain: Tensor | None,
    key: Tensor,
    queries: int,
    candidates: int,
    itself: Tensor | None,
    caller: str,
) -> None:
    """The first thing that is wrong with sorted pairs, from one transfer to the host."""
    if not len(query):
        return
    out_of_range = (query < 0) | (query >= queries)
    item_out_of_range = (item < 0) | (item >= candidates)
    nothing = torch.zeros_like(out_of_range)
    twice = torch.cat((nothing[:1], key[1:] == key[:-1]))
    alone = nothing if itself is None else item == itself[query.clamp(0, queries - 1)]
    bad_gain = nothing if gain is None else (gain != 0) & ~((gain.double() >= GAINS[0]) & (gain.double() <= GAINS[1]))
    found = torch.stack((out_of_range, item_out_of_range, twice, alone, bad_gain))
    any_wrong, first = found.any(dim=1), found.long().argmax(dim=1)
    wrong, at = torch.stack((any_wrong.long(), first)).tolist()
    if not any(wrong):
        return
    kind = wrong.index(1)
    q, i = int(query[at[kind]]), int(item[at[kind]])
    came = None if gain is None else gain[at[kind]].item()
    raise ValueError(
        f"{caller}: relevance: "
        + (
            f"query must be a row of the {queries} queries, 0 to {queries - 1}, got {q}",
            f"item must be a row of the {candidates} candidates, 0 to {candidates - 1}, got {i} for query {q}",
            f"each pair must be given once, got query {q} with item {i} more than once",
            f"a query must not be relevant to itself, got query {q} with item {i}; remove such pairs",
            f"gain must be 0 or between {GAINS[0]:g} and {GAINS[1]:g}, got {came} for query {q}, item {i}",
        )[kind]
    )
