"""Metrics as functions of the ranks of relevant items, one float64 per query.

Candidates are ordered by descending score, and where scores are equal irrelevant ones come first: the worst list that the
scores allow. With a_j irrelevant candidates at or above the j-th best relevant item, that item has rank j + a_j, so the
a_j, in ascending order, are all there is to know of a list.

Dimension letters:  B queries   P relevant items, padded
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Column of per-query values behind each metric that has no cut-off.
COLUMN_OF = {
    "mAP": "average_precision",
    "mAP@R": "average_precision_at_r",
    "RP": "r_precision",
    "MRR": "reciprocal_rank",
    "NDCG": "ndcg",
}

DEFINITIONS = {
    "R@k": "1 if a relevant item is among the first k, else 0 (a hit; what metric learning papers call recall@k)",
    "recall@k": "share of the relevant items that is among the first k",
    "P@k": "share of the first k places that relevant items hold",
    "mAP": "mean over all R relevant items of the precision at their rank (finite sum, whole list)",
    "mAP@R": "the same sum over the relevant items among the first R only, divided by R",
    "RP": "R-precision: share of the first R places that relevant items hold",
    "MRR": "1 / rank of the first relevant item",
    "NDCG": "sum of gain / log2(1 + rank), divided by its value for the best order; the gain is 1 unless grades are given",
}


@dataclass(frozen=True)
class Ranked:
    """Ranks of the relevant items of a few queries, ascending from 1; padding comes last."""

    rank: Tensor  # [B, P] int64
    valid: Tensor  # [B, P]
    num_relevant: Tensor  # [B] int64

    @classmethod
    def of(cls, ahead: Tensor, valid: Tensor) -> "Ranked":
        """From the irrelevant candidates at or above each relevant item, in any order."""
        last = torch.iinfo(torch.int64).max // 2
        place = torch.arange(1, ahead.shape[1] + 1, device=ahead.device)
        num_relevant = valid.sum(dim=1)
        rank = ahead.long().masked_fill(~valid, last).sort(dim=1).values + place
        return cls(rank, place <= num_relevant[:, None], num_relevant)

    @property
    def place(self) -> Tensor:
        """[P] rank of each relevant item among the relevant."""
        return torch.arange(1, self.rank.shape[1] + 1, device=self.rank.device)

    def within(self, k: int | Tensor) -> Tensor:
        """[B] relevant items among the first k."""
        return (self.rank <= k).sum(dim=1)

    def share(self, values: Tensor) -> Tensor:
        """[B] sum of `values` [B, P] over the relevant items, divided by their number."""
        return torch.where(self.valid, values, 0.0).sum(dim=1) / self.num_relevant


def metric_columns(ks: Sequence[int]) -> dict[str, str]:
    """Names of all metrics, in the order of a table, and the column of per-query values that each is the mean of."""
    return {
        **{f"R@{k}": f"hit@{k}" for k in ks},
        **COLUMN_OF,
        **{f"recall@{k}": f"recall@{k}" for k in ks},
        **{f"P@{k}": f"precision@{k}" for k in ks},
    }


def per_query(ranked: Ranked, ks: Sequence[int]) -> dict[str, Tensor]:
    """Every column for queries that have at least one relevant item."""
    first = ranked.rank[:, 0]
    precision = ranked.place / ranked.rank.double()
    among_r = ranked.rank <= ranked.num_relevant[:, None]
    columns = {
        "num_relevant": ranked.num_relevant,
        "first_rank": first,
        "average_precision": ranked.share(precision),
        "average_precision_at_r": ranked.share(torch.where(among_r, precision, 0.0)),
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


def _ndcg(ranked: Ranked) -> Tensor:
    gained = torch.where(ranked.valid, 1 / torch.log2(1 + ranked.rank.double()), 0.0).sum(dim=1)
    best = (1 / torch.log2(1 + ranked.place.double())).cumsum(dim=0)
    return gained / best[ranked.num_relevant - 1]


def trapezoid_average_precision(ranked: Ranked) -> Tensor:
    """[B] area under the precision-recall curve as the Oxford and Paris benchmarks take it.

    A relevant item adds the mean of the precision before and after it, divided by the number of relevant items; before the
    first place the precision is 1.
    """
    before = torch.where(ranked.rank == 1, 1.0, (ranked.place - 1) / (ranked.rank - 1).clamp(min=1).double())
    return ranked.share((before + ranked.place / ranked.rank.double()) / 2)


def benchmark_precision(ranked: Ranked, k: int) -> Tensor:
    """[B] precision at k of the Oxford and Paris benchmarks: at the last relevant item where that comes before k."""
    last = torch.where(ranked.valid, ranked.rank, 0).amax(dim=1).clamp(max=k)
    return ranked.within(last[:, None]) / last.double()
