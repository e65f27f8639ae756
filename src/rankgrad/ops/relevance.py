"""Who is relevant to whom: as the caller says it, and as the engine asks for it.

    Labels -> IntervalRelevance   a candidate is relevant if it has the query's label, see `labels`
    Levels -> IntervalRelevance   labels from coarse to fine, see `levels`
    Pairs  -> PairRelevance       a sparse list, see `pairs`
    Mask   -> MaskRelevance       a matrix of relevance for given scores, see `masks`

Dimension letters:  Q queries   C candidates   B queries of a row block   P positives, padded
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from rankgrad._checks import check_labels_or_relevance

# Relevant pairs, padding included, up to which the kernels treat all queries as one group: an objective then is one pass of
# small launches.
ONE_GROUP = 2**23


def rounded_width(most: int) -> int:
    """Positives of a query, rounded up to one of 4 steps an octave so that few groups cover ragged classes."""
    step = 1 << max(most.bit_length() - 3, 0)
    return -(-most // step) * step


def inverse_order(order: Tensor) -> Tensor:
    """Where each item of an order went."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


T = TypeVar("T")


def moved_to(relevance: T, device: torch.device) -> T:
    """A dataclass with all its tensors on a device."""
    tensors: dict[str, Any] = {
        f.name: value
        for f in fields(relevance)  # type: ignore[arg-type]
        if isinstance(value := getattr(relevance, f.name), Tensor)
    }
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return replace(relevance, **moved)  # type: ignore[type-var]


def block_extents(num_relevant: Tensor, low: Tensor, high: Tensor, blocks: list[slice]) -> list[tuple[int, int, int]]:
    """Most relevant items, least `low` and largest `high` of each block, from one transfer to the host."""
    table = torch.stack((num_relevant, low, high)).cpu().numpy()
    return [(int(table[0, c].max()), int(table[1, c].min()), int(table[2, c].max())) for c in blocks]


def hide_listed_(tile: Tensor, columns: slice, listed: Tensor, valid: Tensor, itself: Tensor | None) -> None:
    """Set to -inf in a tile of scores the `valid` ones of the candidates `listed` [B, P] and `itself` [B], unless it is -1."""
    if itself is not None:
        listed = torch.cat((listed, itself[:, None]), dim=1)
        valid = torch.cat((valid, itself[:, None] >= 0), dim=1)
    here = valid & (listed >= columns.start) & (listed < columns.stop)
    at = (listed - columns.start).clamp_(0, columns.stop - columns.start - 1)
    infinite = torch.full_like(at, torch.inf, dtype=tile.dtype).masked_fill_(here, -torch.inf)
    tile.scatter_reduce_(1, at, infinite, "amin")


def level_gains(query: Tensor, candidates: Tensor, table: Tensor) -> Tensor:
    """[Q, P] gains of candidates [Q or 1, P, L] by the levels that they share with the query [Q, L], coarse ones first."""
    shared = torch.zeros(len(query), candidates.shape[1], dtype=torch.long, device=query.device)
    agree: Tensor | bool = True
    for level in range(query.shape[1]):  # one matrix of the size of the positives at a time
        agree = (query[:, level, None] == candidates[:, :, level]) & agree
        shared += agree
    return table.to(query.device)[shared]


class RelevanceInput(Protocol):
    """Relevance as the caller says it: raw tensors, nothing sorted."""

    @property
    def capturable(self) -> bool:
        """Whether `build` does not synchronise, and batches have tensors of the same shapes: then CUDA graphs pay off."""
        ...

    @property
    def num_queries(self) -> int: ...

    @property
    def num_candidates(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Static inputs of a CUDA graph."""
        ...

    @property
    def settings(self) -> Hashable:
        """What else the key of a CUDA graph holds."""
        ...

    def with_tensors(self, *tensors: Tensor) -> Self: ...

    def to(self, device: torch.device) -> Self: ...

    def shard(self, rows: slice) -> Self:
        """Some of the queries, all candidates."""
        ...

    def transposed(self) -> Self:
        """The references as queries: a candidate is relevant to a query if the query was to it. None is its own candidate."""
        ...

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """[Q, C] relevance, and [Q, C] which are candidates at all, None where all are."""
        ...

    def one_tile(self) -> "TileRelevance":
        """Relevance of a batch whose scores fit in one tile. Synchronises."""
        ...

    def build(self, *, captured: bool = False) -> "EngineRelevance":
        """Relevance as the engine asks for it, sorted on the device of the tensors.

        `captured`: for a CUDA graph, which is replayed often enough to compile kernels of its own. The result is the same.
        """
        ...


@runtime_checkable
class Relevance(Protocol):
    """What a caller gives in place of labels."""

    def of_batch(
        self, queries: int, candidates: int | None, self_index: Tensor | None = None, *, rank_self: bool = False, caller: str
    ) -> RelevanceInput:
        """Checked relevance of `queries` ranked against themselves (`candidates` None) or against so many references."""
        ...

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> "Relevance":
        """The relevance of the batch that several processes hold together; `gather` joins the rows of all."""
        ...

    def item_rows(self, items: int) -> Tensor:
        """[items, ...] what says which other items an item is relevant to, to be kept with its embedding."""
        ...

    def with_references(self, rows: Tensor) -> "Relevance":
        """Of the same queries against references with these `item_rows`."""
        ...


def labels_or_relevance(labels: Tensor | Relevance | None, relevance: Relevance | None, caller: str) -> Tensor | Relevance:
    """The one of both that was given; `labels` may hold either."""
    check_labels_or_relevance(labels, relevance, caller=caller)
    if labels is not None:
        return labels
    if not isinstance(relevance, Relevance):
        raise TypeError(
            f"{caller}: relevance must be Pairs or Levels, got {type(relevance).__name__}; a matrix of relevance becomes "
            "Pairs(*matrix.nonzero(as_tuple=True))"
        )
    return relevance


class EngineRelevance(Protocol):
    """Relevance of the queries and candidates of a batch, both in an order of its own choice."""

    @property
    def query_order(self) -> Tensor:
        """[Q] to the caller's order; every other tensor but `candidate_order` is in this one."""
        ...

    @property
    def candidate_order(self) -> Tensor: ...

    @property
    def self_column(self) -> Tensor:
        """[Q] position of the query among the candidates, -1 where it is not among them."""
        ...

    @property
    def num_relevant(self) -> Tensor: ...

    @property
    def list_length(self) -> Tensor: ...

    @property
    def rank_self(self) -> bool: ...

    @property
    def symmetric(self) -> bool:
        """Whether in a batch ranked against itself i is relevant to j if j is to i, so that a tile serves both."""
        ...

    def to(self, device: torch.device) -> Self: ...

    def transposed(self) -> Self:
        """Candidates as queries and queries as candidates, both in the same orders."""
        ...

    def num_relevant_in_order(self) -> Tensor:
        """[Q] relevant candidates of each query, in the caller's order."""
        ...

    def hide_(self, tile: Tensor, rows: slice, columns: slice, width: int) -> None:
        """Set the relevant candidates of `rows`, at most `width`, and the queries themselves to -inf in a tile of scores."""
        ...

    def positives(self, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """[B, width] positions of the relevant candidates of `rows`, those of equal score as they rank, and which are real."""
        ...

    def gains(self, rows: slice, width: int) -> Tensor | None:
        """[B, width] gains of `positives`, None where relevance is binary."""
        ...

    def extents(self, blocks: list[slice]) -> list[tuple[int, int, int]]:
        """For every block of queries the most relevant items of a query, and the interval of columns that needs `hide_`."""
        ...


@dataclass(frozen=True)
class TileRelevance:
    """Relevance of a batch whose scores fit in one tile, in the caller's order."""

    hidden: Tensor  # [Q, C] positives, and the query itself unless it is ranked
    valid: Tensor | None  # [Q, P] False at the padding, None where there is none
    columns: Tensor  # [Q, P] of the positives, ascending
    num_relevant: Tensor  # [Q]
    list_length: Tensor  # [Q]
    none_empty: bool  # every query has a positive
    gains: Tensor | None = None  # [Q, P] of the positives, None where relevance is binary
