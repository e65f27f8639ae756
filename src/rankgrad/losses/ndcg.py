"""Objectives that discount by rank, NDCG and the reciprocal rank, and the loss built on NDCG."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad._checks import check_cut
from rankgrad.losses.preset_registry import preset
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.autograd import Ranks, at_least
from rankgrad.ops.soft_rankers import Sigmoid


@dataclass(frozen=True)
class NDCG:
    """1 - DCG / ideal DCG with gain / log2(1 + rank). The graded relevance is the gain; pass 2**grade - 1 for that variant.

    Args:
        k: cut-off of both sums.
        tau: temperature of "within the first k" on ranks, sigmoid((k + 1/2 - rank) / tau). 0: a step, as metrics have it; an
            item outside then has no gradient.
    """

    k: int | None = None
    tau: float = 0.0

    def __post_init__(self) -> None:
        check_cut(self.k, self.tau, caller="NDCG")

    def __call__(self, ranks: Ranks) -> Tensor:
        gain = ranks.gain if self.k is None else ranks.gain * ranks.within(self.k, self.tau)
        dcg = (gain * _discount(at_least(ranks.rank, 1))).sum(dim=1)
        places = torch.arange(1, ranks.ideal.shape[1] + 1, dtype=ranks.ideal.dtype, device=ranks.ideal.device)
        ideal = (ranks.ideal * _discount(places))[:, : self.k].sum(dim=1)
        return 1 - dcg / torch.where(ideal > 0, ideal, 1)


def _discount(rank: Tensor) -> Tensor:
    return math.log(2) / torch.log1p(rank)


@dataclass(frozen=True)
class ReciprocalRank:
    """1 - 1 / rank of the first relevant item.

    Where entries hold parts of items (`Histogram`), the first item is the first unit of mass in the order of ranks.
    """

    def __call__(self, ranks: Ranks) -> Tensor:
        # padding has mass 0 and takes no part wherever it is sorted
        rank, order = at_least(ranks.rank, 1).sort(dim=1, stable=True)
        reached = ranks.mass.gather(1, order).cumsum(dim=1).clamp(max=1)
        first = torch.diff(reached, dim=1, prepend=torch.zeros_like(reached[:, :1]))
        return 1 - (first / rank).sum(dim=1)


@preset("approx-ndcg", tau="tau")
class ApproxNDCGLoss(RankLoss):
    """ApproxNDCG (Qin et al., 2010): NDCG of sigmoid ranks.

    The default `tau` is that of TF-Ranking, for scores of any size; for cosines take 0.01. The graded relevance is the gain;
    pass 2**grade - 1 for the exponential variant.
    """

    def __init__(self, tau: float = 0.1, **options: Any) -> None:
        super().__init__(Sigmoid(tau), NDCG(), **options)
