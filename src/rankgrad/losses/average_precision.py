"""Average precision: the objective, and the losses built on it. Each takes the keyword arguments of `RankLoss` too."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.losses.rank_loss import RankLoss, preset
from rankgrad.ops.autograd import Ranks
from rankgrad.ops.rankers import Blackbox, Histogram, Sigmoid


@dataclass(frozen=True)
class AveragePrecision:
    """1 - AP, the mean over relevant items of rank among the relevant / rank among all (RaMBO eq. 21-22)."""

    def __call__(self, ranks: Ranks) -> Tensor:
        return 1 - ranks.mean(ranks.positive_rank / ranks.rank)


@preset("smooth-ap", tau="tau")
class SmoothAPLoss(RankLoss):
    """Smooth-AP (Brown et al., 2020): AP of sigmoid ranks.

    The query is neither a candidate nor relevant to itself. The published code counts it as both, which adds an item of
    rank 1 to every list.
    """

    def __init__(self, tau: float = 0.01, **options: Any) -> None:
        super().__init__(Sigmoid(tau), AveragePrecision(), **options)


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
