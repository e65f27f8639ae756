"""Average precision: the objective, and the losses built on it. Each takes the keyword arguments of `RankLoss` too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankgrad._checks import check_count, check_cut, check_not_negative
from rankgrad.losses.preset_registry import preset
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.autograd import Ranks
from rankgrad.ops.exact_rankers import Blackbox
from rankgrad.ops.histogram_ranker import Histogram
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound


@dataclass(frozen=True)
class AveragePrecision:
    """1 - AP, the mean over relevant items of rank among the relevant / rank among all (RaMBO eq. 21-22).

    Args:
        k: cut-off: only items within the first k count, and the sum is divided by min(k, relevant items).
        tau: temperature of "within the first k" on ranks, sigmoid((k + 1/2 - rank) / tau). 0: a step, as metrics have it; an
            item outside then has no gradient.
    """

    k: int | None = None
    tau: float = 0.0

    def __post_init__(self) -> None:
        check_cut(self.k, self.tau, caller="AveragePrecision")

    def __call__(self, ranks: Ranks) -> Tensor:
        precision = ranks.positive_rank / ranks.rank
        if self.k is None:
            return 1 - ranks.mean(precision)
        return 1 - ranks.total(precision * ranks.within(self.k, self.tau)) / ranks.num_relevant.clamp(1, self.k)

    def with_gradient(self, ranks: Ranks, fields: Sequence[str], kernels: Any) -> tuple[Tensor, ...] | None:
        """Losses, 0 where there is no positive, and derivatives by `fields`, in half the steps of autograd; None with a cut."""
        if self.k is not None:
            return None
        weight, precision = ranks.weight, ranks.positive_rank / ranks.rank
        shares, has_any = weight * precision, ranks.num_relevant > 0
        by_field: dict[str, Callable[[], Tensor]] = {
            "rank": lambda: shares / ranks.rank,
            "positive_rank": lambda: -weight / ranks.rank,
            "mass": lambda: torch.where(has_any[:, None], -precision / ranks.num_relevant[:, None], 0),
            "gain": lambda: torch.zeros_like(precision),
        }
        losses = torch.where(has_any, 1 - shares.sum(dim=1), 0)
        return losses, *(by_field[name]() for name in fields)


@dataclass(frozen=True)
class AveragePrecisionAtR:
    """1 - mAP@R (Musgrave et al., 2020): AP with a query's number of relevant items as cut-off; `tau` as there."""

    tau: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self.tau, name="tau", caller="AveragePrecisionAtR")

    def __call__(self, ranks: Ranks) -> Tensor:
        within = ranks.within(ranks.num_relevant[:, None], self.tau)
        return 1 - ranks.mean(ranks.positive_rank / ranks.rank * within)


@dataclass(frozen=True)
class HierarchicalAveragePrecision:
    """1 - H-AP, average precision of graded relevance (HAPPIER, Ramzi et al., 2022).

        H-AP = sum over relevant x of graded_rank(x) / rank(x), divided by the sum of their gains
        graded_rank(x) = gain(x) + sum over relevant z ahead of x of min(gain(z), gain(x))

    With gains of 1 it is `AveragePrecision`. For gains by level see `Levels`; any graded relevance works, and every ranker but
    `Histogram`, whose bins hold items of several gains.
    """

    graded: ClassVar[bool] = True  # `Ranks.graded_rank` is computed for objectives that say so

    def __call__(self, ranks: Ranks) -> Tensor:
        assert ranks.graded_rank is not None, "the engine computes it for this objective"
        gains = ranks.gain.sum(dim=1)
        return 1 - ranks.total(ranks.graded_rank / ranks.rank) / torch.where(gains > 0, gains, 1)


@preset("smooth-ap", tau="tau")
class SmoothAPLoss(RankLoss):
    """Smooth-AP (Brown et al., 2020): AP of sigmoid ranks.

    The query is neither a candidate nor relevant to itself. The published code counts it as both, which adds an item of
    rank 1 to every list.
    """

    def __init__(self, tau: float = 0.01, **options: Any) -> None:
        super().__init__(Sigmoid(tau), AveragePrecision(), **options)


@preset("sup-ap", tau="tau", rho="rho", delta="delta")
class SupAPLoss(RankLoss):
    """SupAP (ROADMAP, Ramzi et al., 2021; SupRank, 2025): AP of ranks that are never too small, see `UpperBound`."""

    def __init__(self, tau: float = 0.01, rho: float = 100.0, delta: float = 0.05, **options: Any) -> None:
        super().__init__(UpperBound(tau, rho, delta), AveragePrecision(), **options)


@preset("fastap", num_bins="bins")
class FastAPLoss(RankLoss):
    """FastAP (Cakir et al., 2019): AP of a soft histogram of squared distances with `num_bins` + 1 centres in [0, 4].

    The gradient is the derivative; the published code's is batch / 2 times as large and ignores what follows the loss.
    """

    def __init__(self, num_bins: int = 10, **options: Any) -> None:
        check_count(num_bins, name="num_bins", caller="FastAPLoss")
        super().__init__(Histogram(num_bins), AveragePrecision(), **options)


@preset("rambo-ap", lam="lam", margin="margin")
class RamboAPLoss(RankLoss):
    """RaMBO's AP loss (Rolinek et al., 2020): exact AP, blackbox gradient.

    `lam` is that of the published code, on ranks divided by the list's length (see `Blackbox`). The mean is over lists
    (macro). `MulticlassRankLoss` builds the mAP and APC forms for a score matrix of several classes on it.
    """

    def __init__(self, lam: float = 0.5, margin: float = 0.0, **options: Any) -> None:
        super().__init__(Blackbox(lam, margin), AveragePrecision(), **options)
