"""The losses of the papers: named pairs of a ranker and an objective, with the papers' settings as defaults.

Each takes the keyword arguments of `RankLoss` too.
"""

from collections.abc import Sequence
from typing import Any, Literal

from rankgrad._checks import check_choice, check_count, check_positive
from rankgrad.losses.objectives import AveragePrecision, LogLogRecall, LogRecall, RecallAtK
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.rankers import Blackbox, Histogram, Sigmoid


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
        self.own_is_ranked = query_in_database


class SmoothAPLoss(RankLoss):
    """Smooth-AP (Brown et al., 2020): AP of sigmoid ranks.

    The query is neither a candidate nor relevant to itself. The published code counts it as both, which adds an item of
    rank 1 to every list.
    """

    def __init__(self, tau: float = 0.01, **options: Any) -> None:
        super().__init__(Sigmoid(tau), AveragePrecision(), **options)


class FastAPLoss(RankLoss):
    """FastAP (Cakir et al., 2019): AP of a soft histogram of squared distances with `num_bins` + 1 centres in [0, 4].

    The gradient is the derivative; the published code's is batch / 2 times as large and ignores what follows the loss.
    """

    def __init__(self, num_bins: int = 10, **options: Any) -> None:
        check_count(num_bins, name="num_bins", caller="FastAPLoss")
        super().__init__(Histogram(num_bins), AveragePrecision(), **options)


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


class RamboAPLoss(RankLoss):
    """RaMBO's AP loss (Rolinek et al., 2020): exact AP, blackbox gradient.

    `lam` is that of the published code, on ranks divided by the list's length (see `Blackbox`). The mean is over lists
    (macro). `MulticlassRankLoss` builds the mAP and APC forms for a score matrix of several classes on it.
    """

    def __init__(self, lam: float = 0.5, margin: float = 0.0, **options: Any) -> None:
        super().__init__(Blackbox(lam, margin), AveragePrecision(), **options)
