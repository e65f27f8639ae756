"""Recall and precision at k: objectives, and the losses built on them.

An objective is a plain function of (rank, positive_rank, mass, gain) written in torch, so any ranker works with any of them
and a new one needs no derivative: a callable from `Ranks` to [B] losses will do. Each loss takes the keyword arguments of
`RankLoss` too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rankgrad._checks import check_choice, check_count, check_not_negative, check_positive
from rankgrad.losses.preset_registry import preset
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.autograd import Ranks, at_least
from rankgrad.ops.exact_rankers import Blackbox
from rankgrad.ops.soft_rankers import Sigmoid


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

    def _cuts(self, like: Tensor) -> Tensor:
        """[K, 1, 1]."""
        if like.is_cuda:  # without a copy from the host, so that the loss can be captured in a graph
            cuts = torch.cat([torch.arange(k, k + 1, dtype=like.dtype, device=like.device) for k in self.ks])
        else:
            cuts = like.new_tensor(self.ks)
        return cuts[:, None, None]

    def __call__(self, ranks: Ranks) -> Tensor:
        cut = self._cuts(ranks.rank)
        within = (ranks.mass * torch.sigmoid((cut - ranks.rank) / self.tau)).sum(dim=2)  # [K, B]
        reachable = torch.minimum(ranks.num_relevant.clamp(min=1), cut[:, 0])
        return 1 - (within / reachable).clamp(max=1).mean(dim=0)

    def with_gradient(self, ranks: Ranks, fields: Sequence[str], kernels: Any) -> tuple[Tensor, ...] | None:
        """Losses, 0 where there is no positive, and derivatives by `fields`; None where it is not for them."""
        if "mass" in fields:
            return None
        found = self._by_torch(ranks) if kernels is None else kernels.recall_at_k(ranks, self.ks, self.tau)
        if found is None:
            return None
        losses, d_rank = found
        return losses, *(d_rank if name == "rank" else torch.zeros_like(d_rank) for name in fields)

    def _by_torch(self, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """[B] losses and [B, E] their derivative by the ranks, in half the steps of autograd."""
        cut, has_any = self._cuts(ranks.rank), ranks.num_relevant > 0
        inside = torch.sub(cut, ranks.rank).div_(self.tau)  # [K, B, E]
        within = inside.sigmoid()
        reachable = torch.minimum(ranks.num_relevant.clamp(min=1), cut[:, 0])
        recall = (ranks.mass * within).sum(dim=2).div_(reachable)  # [K, B]
        # what is cut at 1 has no slope
        share = (recall <= 1).div(reachable).mul_(1 / (self.tau * len(self.ks)))
        slope = inside.neg_().sigmoid_().mul_(within).mul_(share[:, :, None])  # 1 - within would lose digits
        losses = torch.where(has_any, 1 - recall.clamp_(max=1).mean(dim=0), 0)
        return losses, slope.sum(dim=0).mul_(ranks.mass)


@dataclass(frozen=True)
class PrecisionAtK:
    """1 - smooth precision@k: an item of rank r counts sigmoid((k - r) / tau), the sum is cut at k and divided by k."""

    k: int
    tau: float = 1.0

    def __post_init__(self) -> None:
        check_count(self.k, name="k", caller="PrecisionAtK")
        check_positive(self.tau, name="tau", caller="PrecisionAtK")

    def __call__(self, ranks: Ranks) -> Tensor:
        return 1 - (ranks.total(torch.sigmoid((self.k - ranks.rank) / self.tau)) / self.k).clamp(max=1)


@dataclass(frozen=True)
class RPrecision:
    """1 - R-precision: the share of relevant items among the first R, a query's number of them.

    `tau` is the temperature of "within the first R" on ranks, sigmoid((R + 1/2 - rank) / tau). 0: a step, without a gradient.
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(self.tau, name="tau", caller="RPrecision")

    def __call__(self, ranks: Ranks) -> Tensor:
        return 1 - ranks.mean(ranks.within(ranks.num_relevant[:, None], self.tau))


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
    return at_least(ranks.rank - ranks.positive_rank, 0)


@preset("recall-at-k", ks="ks", tau_rank="tau", tau_cut="tau_cut", query_in_database="query_in_database")
class RecallAtKLoss(RankLoss):
    """RS@k (Patel et al., 2022): the recall@k surrogate.

    Args:
        ks: cut-offs, averaged.
        tau_rank: temperature of "z is ahead of x" on score differences (tau_2 of the paper).
        tau_cut: temperature of "x is within the first k" on ranks (tau_1 of the paper).
        query_in_database: count the query itself among the irrelevant candidates of its own list, as the published code
            does against eq. 6 of the paper. Since its score is 1, every rank grows by about one: the smallest loss with 3
            relevant items is then 0.285 and not 0.102. All published numbers were made so.
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 2, 4, 8, 16),
        tau_rank: float = 0.01,
        tau_cut: float = 1.0,
        *,
        query_in_database: bool = False,
        **options: Any,
    ) -> None:
        check_positive(tau_rank, name="tau_rank", caller="RecallAtKLoss")
        check_positive(tau_cut, name="tau_cut", caller="RecallAtKLoss")
        super().__init__(Sigmoid(tau_rank), RecallAtK(ks, tau_cut), **options)
        self.rank_self = query_in_database


@preset("rambo-recall", lam="lam", margin="margin", weighting="weighting")
class RamboRecallLoss(RankLoss):
    """RaMBO's recall loss (Rolinek et al., 2020): exact ranks, blackbox gradient, log or loglog weighting.

    `lam` is that of the published code, on ranks divided by the list's length (see `Blackbox`). The mean is over queries of
    each query's mean over its relevant items (macro), as the paper writes it; the published code divides the sum over
    all pairs by their number (micro), which is the same where queries have equally many relevant items.
    """

    def __init__(
        self, lam: float = 4.0, margin: float = 0.02, weighting: Literal["log", "loglog"] = "loglog", **options: Any
    ) -> None:
        check_choice(weighting, ("log", "loglog"), name="weighting", caller="RamboRecallLoss")
        super().__init__(Blackbox(lam, margin), LogRecall() if weighting == "log" else LogLogRecall(), **options)
