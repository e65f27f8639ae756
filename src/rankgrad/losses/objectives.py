"""What ranks are turned into: from the `Ranks` of some queries to one loss for each.

Every objective is a plain function of (rank, positive_rank, mass, gain) written in torch, so any ranker works with any of
them and a new one needs no derivative: a callable from `Ranks` to [B] losses will do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad._checks import check_count, check_not_negative, check_positive
from rankgrad.ops.ranks import Ranks


@dataclass(frozen=True)
class AveragePrecision:
    """1 - AP, the mean over relevant items of rank among the relevant / rank among all (RaMBO eq. 21-22)."""

    def __call__(self, ranks: Ranks) -> Tensor:
        # a bin that nothing has reached yet has rank 0, rank 0 among the relevant and mass 0
        return 1 - ranks.mean(ranks.positive_rank / ranks.rank.clamp(min=1e-30))


@dataclass(frozen=True)
class RecallAtK:
    """1 - smooth recall@k, averaged over `ks` (RS@k eq. 5-7): an item of rank r counts sigmoid((k - r) / tau).

    The sum is divided by min(k, relevant items) and cut at 1, so that a small k can be satisfied. An item at rank k counts
    one half, so the loss of a perfect ranking is not 0: 0.102081 with 3 relevant items, the default ks and tau 1.
    """

    ks: tuple[int, ...]
    tau: float = 1.0

    def __init__(self, ks: Sequence[int], tau: float = 1.0) -> None:
        if isinstance(ks, int) or not len(ks):
            raise ValueError(f"RecallAtK: ks must be a sequence of at least one cut-off, got {ks!r}")
        for k in ks:
            check_count(k, name="ks", caller="RecallAtK")
        check_positive(tau, name="tau", caller="RecallAtK")
        object.__setattr__(self, "ks", tuple(ks))
        object.__setattr__(self, "tau", tau)

    def __call__(self, ranks: Ranks) -> Tensor:
        # arange and not a tensor of ks: nothing is copied to a GPU, so the loss can be captured in a graph
        cuts = [torch.arange(k, k + 1, dtype=ranks.rank.dtype, device=ranks.rank.device) for k in self.ks]
        cut = torch.cat(cuts)[:, None, None]  # [K, 1, 1]
        within = (ranks.mass * torch.sigmoid((cut - ranks.rank) / self.tau)).sum(dim=2)  # [K, B]
        reachable = torch.minimum(ranks.num_relevant.clamp(min=1), cut[:, 0])
        return 1 - (within / reachable).clamp(max=1).mean(dim=0)


@dataclass(frozen=True)
class PrecisionAtK:
    """1 - smooth precision@k: an item of rank r counts sigmoid((k - r) / tau), the sum is cut at k and divided by k."""

    k: int
    tau: float = 1.0

    def __post_init__(self) -> None:
        check_count(self.k, name="k", caller="PrecisionAtK")
        check_positive(self.tau, name="tau", caller="PrecisionAtK")

    def __call__(self, ranks: Ranks) -> Tensor:
        return 1 - (_within(ranks, self.k, self.tau) / self.k).clamp(max=1)


def _within(ranks: Ranks, k: int, tau: float) -> Tensor:
    """[B] how many relevant items are within the first k."""
    return ranks.total(torch.sigmoid((k - ranks.rank) / tau))


@dataclass(frozen=True)
class LogRecall:
    """Mean of log(1 + r), r the irrelevant candidates ahead: recall at every K weighted by log(1 + 1/K) (RaMBO eq. 20)."""

    def __call__(self, ranks: Ranks) -> Tensor:
        return ranks.mean(torch.log1p(_irrelevant_ahead(ranks)))


@dataclass(frozen=True)
class LogLogRecall:
    """Mean of log(1 + log(1 + r)), r the irrelevant candidates ahead: recall weighted by about 1 / (K log K) (RaMBO eq. 20)."""

    def __call__(self, ranks: Ranks) -> Tensor:
        return ranks.mean(torch.log1p(torch.log1p(_irrelevant_ahead(ranks))))


@dataclass(frozen=True)
class WeightedRecall:
    """Sum over K of w_K times the share of relevant items with K or more irrelevant ones ahead (RaMBO eq. 18-19).

    In closed form the mean of W(r), W(r) the sum of the first r weights. Between integers W is linear, at an integer its
    slope is that of the next weight, and past the last weight it is constant.
    """

    weights: tuple[float, ...]

    def __init__(self, weights: Sequence[float] | Tensor) -> None:
        values = tuple(weights.tolist() if isinstance(weights, Tensor) else weights)
        if not values:
            raise ValueError("WeightedRecall: weights must hold at least w_1, got none")
        for value in values:
            check_not_negative(value, name="weights", caller="WeightedRecall")
        object.__setattr__(self, "weights", values)

    def __call__(self, ranks: Ranks) -> Tensor:
        ahead = _irrelevant_ahead(ranks)
        weights = ahead.new_tensor((0.0, *self.weights, 0.0))
        whole = ahead.detach().floor().clamp(max=len(self.weights))
        step = whole.long()
        return ranks.mean(weights.cumsum(0)[step] + (ahead - whole) * weights[step + 1])


def _irrelevant_ahead(ranks: Ranks) -> Tensor:
    # soft ranks are sums in another order and may differ by a rounding where nothing is ahead
    return _at_least(ranks.rank - ranks.positive_rank, 0)


def _at_least(values: Tensor, least: float) -> Tensor:
    """max(values, least) with slope 1 at equality, where ranks often are; that of `clamp` depends on torch's version."""
    return torch.where(values < least, least, values)


@dataclass(frozen=True)
class NDCG:
    """1 - DCG / ideal DCG with gain / log2(1 + rank). The graded relevance is the gain; pass 2**grade - 1 for that variant."""

    def __call__(self, ranks: Ranks) -> Tensor:
        dcg = (ranks.gain * _discount(_at_least(ranks.rank, 1))).sum(dim=1)
        places = torch.arange(1, ranks.ideal.shape[1] + 1, dtype=ranks.ideal.dtype, device=ranks.ideal.device)
        ideal = (ranks.ideal * _discount(places)).sum(dim=1)
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
        rank, order = _at_least(ranks.rank, 1).sort(dim=1, stable=True)
        reached = ranks.mass.gather(1, order).cumsum(dim=1).clamp(max=1)
        first = torch.diff(reached, dim=1, prepend=torch.zeros_like(reached[:, :1]))
        return 1 - (first / rank).sum(dim=1)
