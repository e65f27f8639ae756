"""Metrics as functions of the ranks of relevant items, one float64 per query.

Candidates are ordered by descending score, and where scores are equal irrelevant ones come first: the worst list that the
scores allow. With a_j irrelevant candidates at or above the j-th best relevant item, that item has rank j + a_j, so every
metric is a function of the a_j in ascending order.

Dimension letters:  B queries   P relevant items, padded
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad._checks import check_count

# Metrics without a cut-off and the column of per-query values that each is the mean of.
COLUMN_OF = {
    "mAP": "average_precision",
    "mAP@R": "average_precision_at_r",
    "RP": "r_precision",
    "MRR": "reciprocal_rank",
    "NDCG": "ndcg",
}

# The metric that graded relevance adds.
GRADED_COLUMN = {"H-AP": "hierarchical_average_precision"}

DEFINITIONS = {
    "R@k": "1 if a relevant item is among the first k, else 0 (a hit; what metric learning papers call recall@k)",
    "recall@k": "share of the relevant items that is among the first k",
    "P@k": "share of the first k places that relevant items hold",
    "mAP": "mean over all R relevant items of the precision at their rank (finite sum, whole list)",
    "mAP@R": "the same sum over the relevant items among the first R only, divided by R",
    "RP": "R-precision: share of the first R places that relevant items hold",
    "MRR": "1 / rank of the first relevant item",
    "NDCG": "sum of gain / log2(1 + rank), divided by its value for the best order; the gain is 1 unless grades are given",
    "H-AP": "hierarchical average precision of graded relevance: sum over relevant items of (their gain and, of every relevant "
    "item ahead, the smaller of the two gains) / rank, divided by the sum of gains",
}


@dataclass(frozen=True)
class PositiveRanks:
    """Ranks of the positives of some queries, ascending from 1; padding comes last."""

    rank: Tensor  # [B, P] int64
    valid: Tensor  # [B, P]
    num_relevant: Tensor  # [B] int64

    @classmethod
    def from_counts(cls, counts: Tensor, valid: Tensor) -> "PositiveRanks":
        """From the number of irrelevant candidates at or above each positive, in any order."""
        last = torch.iinfo(torch.int64).max // 2
        position = torch.arange(1, counts.shape[1] + 1, device=counts.device)
        num_relevant = valid.sum(dim=1)
        rank = counts.long().masked_fill(~valid, last).sort(dim=1).values + position
        return cls(rank, position <= num_relevant[:, None], num_relevant)

    @property
    def positive_rank(self) -> Tensor:
        """[P] rank of each positive among the positives."""
        return torch.arange(1, self.rank.shape[1] + 1, device=self.rank.device)

    def within(self, k: int | Tensor) -> Tensor:
        """[B] positives among the first k."""
        return (self.rank <= k).sum(dim=1)

    def mean(self, values: Tensor) -> Tensor:
        """[B] mean of `values` [B, P] over the positives."""
        return torch.where(self.valid, values, 0.0).sum(dim=1) / self.num_relevant


def metric_columns(ks: Sequence[int]) -> dict[str, str]:
    """Names of all metrics in table order, and the column of per-query values that each is the mean of."""
    return {
        **{f"R@{k}": f"hit@{k}" for k in ks},
        **COLUMN_OF,
        **{f"recall@{k}": f"recall@{k}" for k in ks},
        **{f"P@{k}": f"precision@{k}" for k in ks},
    }


def checked_ks(ks: Sequence[int], caller: str) -> tuple[int, ...]:
    """Cut-offs in ascending order without duplicates."""
    if not len(ks):
        raise ValueError(f"{caller}: ks must hold at least one cut-off, got none")
    for k in ks:
        check_count(k, name="every k of ks", caller=caller)
    return tuple(sorted(set(ks)))


def per_query(ranked: PositiveRanks, ks: Sequence[int]) -> dict[str, Tensor]:
    """All columns for queries that have at least one relevant item."""
    first = ranked.rank[:, 0]
    precision = ranked.positive_rank / ranked.rank.double()
    within_r = ranked.rank <= ranked.num_relevant[:, None]
    columns = {
        "num_relevant": ranked.num_relevant,
        "first_rank": first,
        "average_precision": ranked.mean(precision),
        "average_precision_at_r": ranked.mean(torch.where(within_r, precision, 0.0)),
        "r_precision": ranked.within(ranked.num_relevant[:, None]) / ranked.num_relevant.double(),
        "reciprocal_rank": 1 / first.double(),
        "ndcg": _ndcg(ranked),
    }
    for k in ks:
        found = ranked.within(k).double()
        columns[f"hit@{k}"] = (first <= k).double()
        columns[f"recall@{k}"] = found / ranked.num_relevant
        columns[f"precision@{k}"] = found / k
    return columns


def _ndcg(ranked: PositiveRanks) -> Tensor:
    gained = torch.where(ranked.valid, 1 / torch.log2(1 + ranked.rank.double()), 0.0).sum(dim=1)
    best = (1 / torch.log2(1 + ranked.positive_rank.double())).cumsum(dim=0)
    return gained / best[ranked.num_relevant - 1]


def graded_columns(counts: Tensor, valid: Tensor, scores: Tensor, gains: Tensor) -> dict[str, Tensor]:
    """NDCG and H-AP [B] of graded relevance: irrelevant candidates at or above each positive [B, P], its score and its gain.

    Where scores are equal the smaller gain comes first.
    """
    gains = gains.double().masked_fill(~valid, 0.0)
    by_gain = gains.sort(dim=1, stable=True)
    # padding has gain 0 and goes to the end
    key = scores.double().masked_fill(~valid, -torch.inf).gather(1, by_gain.indices)
    order = by_gain.indices.gather(1, key.sort(dim=1, descending=True, stable=True).indices)
    ordered, position = gains.gather(1, order), torch.arange(1, gains.shape[1] + 1, device=gains.device)
    rank = (counts.long().gather(1, order) + position).double()
    ideal = gains.sort(dim=1, descending=True).values / torch.log2(1 + position.double())
    return {
        "ndcg": (ordered / torch.log2(1 + rank)).sum(dim=1) / ideal.sum(dim=1),
        "hierarchical_average_precision": (_graded_rank(ordered) / rank).sum(dim=1) / gains.sum(dim=1),
    }


def _graded_rank(ordered: Tensor) -> Tensor:
    """[B, P] sum over the items up to each of the smaller of the two gains, for gains [B, P] in the order of ranks."""
    levels = ordered.unique()
    if len(levels) > ordered.shape[1]:
        parts = [torch.minimum(ordered[:, : j + 1], ordered[:, j, None]).sum(dim=1) for j in range(ordered.shape[1])]
        return torch.stack(parts, dim=1)
    # few different gains, as of levels: those of at least a level count among each other, with what it adds to the one below
    total = torch.zeros_like(ordered)
    for step, level in zip(levels.diff(prepend=levels.new_zeros(1)), levels, strict=True):
        within = (ordered >= level).to(ordered.dtype)
        total += step * within * within.cumsum(dim=1)
    return total


def trapezoid_average_precision(ranked: PositiveRanks) -> Tensor:
    """[B] area under the precision-recall curve as the Oxford and Paris benchmarks compute it.

    A relevant item adds the mean of the precision before and after it, divided by the number of relevant items; before rank 1
    the precision is 1.
    """
    before = torch.where(ranked.rank == 1, 1.0, (ranked.positive_rank - 1) / (ranked.rank - 1).clamp(min=1).double())
    return ranked.mean((before + ranked.positive_rank / ranked.rank.double()) / 2)


def benchmark_precision(ranked: PositiveRanks, k: int) -> Tensor:
    """[B] precision at k of the Oxford and Paris benchmarks: at the last relevant item where that comes before k."""
    last = torch.where(ranked.valid, ranked.rank, 0).amax(dim=1).clamp(max=k)
    return ranked.within(last[:, None]) / last.double()
