"""Relevance of pairs as the engine asks for it.

    PairLists       checked, of the queries and candidates of a batch
    PairRelevance   the positives of a query are a row of a compressed sparse matrix

Dimension letters:  Q queries   C candidates   E pairs   B queries of a row block   P positives, padded
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from rankgrad.ops.relevance import TileRelevance, block_extents, hide_listed_, inverse_order, moved_to


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

    def build(self, *, captured: bool = False) -> "PairRelevance":
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
