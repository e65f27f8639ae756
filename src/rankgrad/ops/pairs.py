"""Relevance as a sparse list of pairs, each with a gain: multi-label items, clicks, graded judgements.

    Pairs           as a caller gives them
    PairLists       checked, of the queries and candidates of a batch
    PairRelevance   as the engine asks for them: the positives of a query are a row of a compressed sparse matrix

Nothing has the size queries x candidates.

Dimension letters:  Q queries   C candidates   E pairs   B queries of a row block   P positives, padded
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from rankgrad._checks import GAINS, as_tensor, check_choice, check_labels, shape_of
from rankgrad.ops.relevance import TileRelevance, block_extents, hide_listed_, inverse_order, moved_to

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
    ) -> "PairLists":
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


@dataclass(frozen=True)
class PairLists:
    """Pairs of the lists of a batch: sorted by query and item, in range, none twice, none of a query with itself."""

    query: Tensor  # [E]
    item: Tensor  # [E]
    gain: Tensor | None  # [E] above 0
    self_index: Tensor | None  # [Q] the query among the candidates, -1 where it is not
    num_queries: int
    num_candidates: int
    rank_self: bool
    in_batch: bool  # query i is candidate i

    # the number of pairs changes from batch to batch, and each would be a graph of its own
    capturable = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.query, self.item, self.gain, self.self_index) if t is not None)

    @property
    def settings(self) -> Hashable:
        return self.rank_self

    def with_tensors(self, *tensors: Tensor) -> "PairLists":
        given = iter(tensors)
        names = ("query", "item", "gain", "self_index")
        return replace(self, **{name: next(given) for name in names if getattr(self, name) is not None})  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "PairLists":
        return self.with_tensors(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))

    def shard(self, rows: slice) -> "PairLists":
        first, last = torch.searchsorted(self.query, torch.tensor([rows.start, rows.stop], device=self.query.device)).tolist()
        return PairLists(
            self.query[first:last] - rows.start,
            self.item[first:last],
            None if self.gain is None else self.gain[first:last],
            None if self.self_index is None else self.self_index[rows],
            rows.stop - rows.start,
            self.num_candidates,
            self.rank_self,
            in_batch=False,
        )

    def transposed(self) -> "PairLists":
        item, order = self.item.sort(stable=True)  # queries of an item stay ascending
        gain = None if self.gain is None else self.gain[order]
        shape = self.num_candidates, self.num_queries
        return PairLists(item, self.query[order], gain, None, *shape, self.rank_self, in_batch=False)

    @property
    def num_relevant(self) -> Tensor:
        return torch.bincount(self.query, minlength=self.num_queries)

    @property
    def list_length(self) -> Tensor:
        length = torch.full((self.num_queries,), self.num_candidates, device=self.query.device)
        return length if self.self_index is None or self.rank_self else length - (self.self_index >= 0).long()

    def dense(self) -> tuple[Tensor, Tensor | None]:
        shape = (self.num_queries, self.num_candidates)
        relevance = torch.zeros(shape, dtype=torch.double, device=self.query.device)
        relevance[self.query, self.item] = 1.0 if self.gain is None else self.gain.double()
        if self.self_index is None or self.rank_self:
            return relevance, None
        others = torch.ones(shape, dtype=torch.bool, device=relevance.device)
        rows = (self.self_index >= 0).nonzero().view(-1)
        others[rows, self.self_index[rows]] = False
        return relevance, others

    def one_tile(self) -> TileRelevance:
        hidden = torch.zeros(self.num_queries, self.num_candidates, dtype=torch.bool, device=self.query.device)
        hidden[self.query, self.item] = True
        if self.self_index is not None and not self.rank_self:
            rows = (self.self_index >= 0).nonzero().view(-1)
            hidden[rows, self.self_index[rows]] = True
        num_relevant = self.num_relevant
        least, most = (int(number) for number in torch.aminmax(num_relevant))
        step = torch.arange(most, device=self.query.device)
        valid = step < num_relevant[:, None]
        at = torch.where(valid, (num_relevant.cumsum(0) - num_relevant)[:, None] + step, 0)
        return TileRelevance(
            hidden,
            valid if least < most else None,
            self.item[at],
            num_relevant,
            self.list_length,
            least > 0,
            None if self.gain is None else self.gain[at],
        )

    def build(self) -> "PairRelevance":
        """Queries with about as many relevant items come together."""
        num_relevant = self.num_relevant
        query_order = num_relevant.argsort(stable=True)
        place = inverse_order(query_order)
        row, by_row = place[self.query].sort(stable=True)  # items of a row stay in the caller's order: the order of ties
        column = self.item[by_row]
        candidate_order = torch.arange(self.num_candidates, device=row.device)
        if self.in_batch:  # one order, so that a product serves both roles of a batch
            self_column, candidate_order, column = candidate_order, query_order, place[column]
        else:
            self_column = torch.full_like(query_order, -1) if self.self_index is None else self.self_index[query_order]
        num_relevant = num_relevant[query_order]
        return PairRelevance(
            query_order,
            candidate_order,
            row,
            column,
            None if self.gain is None else self.gain[by_row],
            torch.cat((num_relevant.new_zeros(1), num_relevant.cumsum(0))),
            self_column,
            num_relevant,
            self.list_length[query_order],
            self.rank_self,
        )


@dataclass(frozen=True)
class PairRelevance:
    """Every tensor but the two orders is in the order of queries and candidates that these give."""

    query_order: Tensor  # [Q] to the caller's order
    candidate_order: Tensor  # [C]
    row: Tensor  # [E] query of a pair, ascending
    column: Tensor  # [E] candidate of a pair, those of a query in the caller's order
    gain: Tensor | None  # [E]
    edges: Tensor  # [Q + 1] where the pairs of a query begin
    self_column: Tensor  # [Q] position of the query among the candidates, -1 where it is not among them
    num_relevant: Tensor  # [Q]
    list_length: Tensor  # [Q]
    rank_self: bool

    symmetric = False

    def to(self, device: torch.device) -> "PairRelevance":
        return moved_to(self, device)

    def transposed(self) -> "PairRelevance":
        """See `EngineRelevance`."""
        # the queries of a candidate in the caller's order, as ties are ranked
        order = torch.argsort(self.query_order[self.row], stable=True)
        order = order[torch.argsort(self.column[order], stable=True)]
        num_relevant = torch.bincount(self.column, minlength=len(self.candidate_order))
        return PairRelevance(
            query_order=self.candidate_order,
            candidate_order=self.query_order,
            row=self.column[order],
            column=self.row[order],
            gain=None if self.gain is None else self.gain[order],
            edges=torch.cat((num_relevant.new_zeros(1), num_relevant.cumsum(0))),
            self_column=torch.full_like(self.candidate_order, -1),
            num_relevant=num_relevant,
            list_length=torch.full_like(self.candidate_order, len(self.query_order)),
            rank_self=self.rank_self,
        )

    def num_relevant_in_order(self) -> Tensor:
        """[Q] relevant candidates of each query, in the caller's order."""
        return torch.empty_like(self.num_relevant).index_copy_(0, self.query_order, self.num_relevant)

    def _entries(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[B, width] where the pairs of `rows` are, 0 at the padding, and which of them are real."""
        step = torch.arange(width, device=self.row.device)
        valid = step < self.num_relevant[rows, None]
        return torch.where(valid, self.edges[:-1][rows, None] + step, 0), valid

    def positives(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[B, width] positions of the relevant candidates of `rows`, and which of them are real."""
        at, valid = self._entries(rows, width)
        return self.column[at], valid

    def gains(self, rows: slice, width: int) -> Tensor | None:
        """[B, width] gains of `positives`."""
        return None if self.gain is None else self.gain[self._entries(rows, width)[0]]

    def hide_(self, tile: Tensor, rows: slice, columns: slice, width: int) -> None:
        """Set the relevant candidates of `rows`, at most `width`, and the queries themselves to -inf in a tile of scores."""
        itself = None if self.rank_self else self.self_column[rows]
        hide_listed_(tile, columns, *self.positives(rows, width), itself)

    def ascending_columns(self) -> Tensor:
        """[E] the candidates of a query in ascending order."""
        keys = self.row * len(self.candidate_order) + self.column
        return keys.sort().values % len(self.candidate_order)

    def extents(self, blocks: list[slice]) -> list[tuple[int, int, int]]:
        """For every block of queries the most relevant items of a query, and the interval of columns that needs `hide_`."""
        candidates = len(self.candidate_order)
        low = torch.where(self.self_column >= 0, self.self_column, candidates).scatter_reduce_(0, self.row, self.column, "amin")
        high = (self.self_column + 1).scatter_reduce_(0, self.row, self.column + 1, "amax")
        return block_extents(self.num_relevant, low, high, blocks)

    def values(self, blocks: Sequence[Tensor]) -> Tensor:
        """[E] values of the pairs, from those of the positives [B, P] of all row blocks, padded."""
        begin, starts = 0, []
        for block in blocks:
            starts.append(torch.arange(len(block), device=block.device) * block.shape[1] + begin)
            begin += block.numel()
        flat = torch.cat([block.reshape(-1) for block in blocks])
        step = torch.arange(len(self.row), device=self.row.device) - self.edges[self.row]
        return flat[torch.cat(starts)[self.row] + step]

    def candidates_of_queries(self, values: Tensor, candidates: Tensor) -> Tensor:
        """[Q, d] sum over the candidates [C, d] that are relevant to a query, times the values [E] of the pairs."""
        return embedding_bag(self.column, candidates, self.edges[:-1], mode="sum", per_sample_weights=values)

    def queries_of_candidates(self, values: Tensor, queries: Tensor) -> Tensor:
        """[C, d] sum over the queries [Q, d] that a candidate is relevant to, times the values [E] of the pairs."""
        column, order = self.column.sort(stable=True)
        edges = torch.searchsorted(column, torch.arange(len(self.candidate_order), device=column.device))
        return embedding_bag(self.row[order], queries, edges, mode="sum", per_sample_weights=values[order])
