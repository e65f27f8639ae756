"""Figures 1 and 3 of RS@k: the smooth recall@k beside the exact one, and its gradient by rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

import rankgrad as rg
from rankgrad.report.figures.style import Theme, annotate, log_axis, name_ends, new_figure, style_axes, three_panels

PAPER_KS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Surrogate:
    """Recall of a list whose only relevant item moves past the others, and the gradient by its rank."""

    k: int
    others: NDArray[np.float64]  # [n] scores of the irrelevant items
    score: NDArray[np.float64]  # [S] of the relevant item
    exact: NDArray[np.float64]  # [S] recall@k, 0 or 1
    tau_ranks: tuple[float, ...]
    by_tau_rank: NDArray[np.float64]  # [tau_ranks, S] smooth recall@k, tau_cut 1
    tau_cuts: tuple[float, ...]
    by_tau_cut: NDArray[np.float64]  # [tau_cuts, S] smooth recall@k, tau_rank 0.01
    rank: NDArray[np.float64]  # [R]
    sets: tuple[tuple[int, ...], ...]  # of cut-offs
    gradients: NDArray[np.float64]  # [sets, R] |d loss / d rank|


def exact_recall(score: Tensor, others: Tensor, k: int) -> Tensor:
    """[S] 1 where the relevant item of score [S] is among the first k; a tie counts against it."""

    def missed(ranks: rg.Ranks) -> Tensor:
        return ranks.mean((ranks.rank > k).double())

    return 1 - rg.RankLoss(rg.Exact(), missed, reduction="none").from_scores(*_lists(score, others))


def smooth_recall(score: Tensor, others: Tensor, k: int, *, tau_rank: float, tau_cut: float) -> Tensor:
    """[S] the surrogate of `RecallAtKLoss`."""
    loss = rg.RecallAtKLoss((k,), tau_rank, tau_cut, reduction="none")
    return 1 - loss.from_scores(*_lists(score, others))


def _lists(score: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.cat((score[:, None], others.expand(len(score), -1)), dim=1)
    return scores, (torch.arange(scores.shape[1]) == 0).expand_as(scores)


def gradient_by_rank(rank: Tensor, ks: Sequence[int]) -> Tensor:
    """[R] magnitude of the gradient of the loss with these cut-offs at `rank`, for one relevant item per query."""
    rank = rank.detach().requires_grad_()
    one = torch.ones(len(rank), 1, dtype=rank.dtype)
    losses = rg.RecallAtK(ks)(rg.Ranks(rank[:, None], one, one, one, one, one[:, 0]))
    (gradient,) = torch.autograd.grad(losses.sum(), rank)
    return gradient.abs()


def compute(
    *,
    k: int = 4,
    tau_ranks: tuple[float, ...] = (0.01, 0.03, 0.1),
    tau_cuts: tuple[float, ...] = (0.1, 1.0, 3.0),
    sets: tuple[tuple[int, ...], ...] = ((1,), (4,), (16,), PAPER_KS),
    points: int = 600,
    seed: int = 0,
) -> Surrogate:
    """One relevant item against twenty irrelevant ones, at random cosines, one in each of twenty intervals."""
    jitter = torch.rand(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    others = 0.2 + 0.6 * (torch.arange(20) + jitter) / 20
    score = torch.linspace(0.3, 0.9, points, dtype=torch.float64)
    rank = torch.logspace(0, 5, points, base=2, dtype=torch.float64)
    return Surrogate(
        k=k,
        others=others.numpy(),
        score=score.numpy(),
        exact=exact_recall(score, others, k).numpy(),
        tau_ranks=tau_ranks,
        by_tau_rank=torch.stack([smooth_recall(score, others, k, tau_rank=tau, tau_cut=1.0) for tau in tau_ranks]).numpy(),
        tau_cuts=tau_cuts,
        by_tau_cut=torch.stack([smooth_recall(score, others, k, tau_rank=0.01, tau_cut=tau) for tau in tau_cuts]).numpy(),
        rank=rank.numpy(),
        sets=sets,
        gradients=torch.stack([gradient_by_rank(rank, ks) for ks in sets]).numpy(),
    )


def draw(numbers: Surrogate, theme: Theme) -> Figure:
    """Draw both temperatures and the gradient by rank."""
    with mpl.rc_context(theme.settings):
        figure = new_figure(
            theme,
            "RS@k makes a slope of recall@k's step; several k reach more ranks",
            f"recall@{numbers.k} while a relevant item climbs past irrelevant ones, and the pull on it by its rank",
        )
        left, middle, right = three_panels(figure)
        _recall(left, numbers, theme, "Softer ranks, τ₂", numbers.tau_ranks, numbers.by_tau_rank, "τ₂")
        _recall(middle, numbers, theme, "Softer cut at k, τ₁", numbers.tau_cuts, numbers.by_tau_cut, "τ₁")
        middle.tick_params(labelleft=False)
        annotate(left, (numbers.score[-1], -0.06), "irrelevant\nitems", theme.irrelevant)
        _gradients(right, numbers, theme)
    return figure


def _recall(
    axes: Axes,
    numbers: Surrogate,
    theme: Theme,
    title: str,
    taus: tuple[float, ...],
    curves: NDArray[np.float64],
    symbol: str,
) -> None:
    style_axes(axes, theme, title=title, x="cosine of the relevant item", y=f"recall@{numbers.k}")
    axes.plot(numbers.score, numbers.exact, color=theme.ink, linewidth=2.2)
    for curve, colour in zip(curves, theme.shades, strict=True):
        axes.plot(numbers.score, curve, color=colour)
    axes.plot(
        numbers.others, np.full(len(numbers.others), -0.06), "|", color=theme.irrelevant, markersize=11, markeredgewidth=1.8
    )
    axes.set_xlim(numbers.score[0], numbers.score[-1])
    axes.set_ylim(-0.1, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    names = [
        (float(curve[-1]), f"{symbol} = {tau:g}", colour) for tau, curve, colour in zip(taus, curves, theme.shades, strict=True)
    ]
    name_ends(axes, float(numbers.score[-1]), [(1.0, "exact", theme.ink), *names])


def _gradients(axes: Axes, numbers: Surrogate, theme: Theme) -> None:
    style_axes(axes, theme, title="Where the gradient is", x="rank of the relevant item", y="|∂ loss / ∂ rank|")
    log_axis(axes, (1, 2, 4, 8, 16, 32))
    for ks, curve, colour in zip(numbers.sets, numbers.gradients, [*theme.shades, theme.other], strict=True):
        axes.plot(numbers.rank, curve, color=colour)
        top = int(curve.argmax())
        if len(ks) == 1:
            annotate(
                axes, (numbers.rank[top], curve[top]), f"k = {ks[0]}", colour, xytext=(0, 12), ha="center" if top else "left"
            )
        else:
            axes.fill_between(numbers.rank, curve, color=colour, alpha=0.2, linewidth=0)
            annotate(
                axes, (8, curve[np.abs(numbers.rank - 8).argmin()]), "k = " + ", ".join(map(str, ks)), colour, xytext=(-10, 16)
            )
    axes.set_xlim(1, 32)
    axes.set_ylim(0, 0.28)


def caption(numbers: Surrogate) -> str:
    """What the figure shows and how it was computed."""
    return (
        f"Recall@{numbers.k} of a list with one relevant item, as its cosine grows past those of {len(numbers.others)} "
        "irrelevant ones (orange marks): the exact value is a step without a gradient, the surrogate of RS@k a slope. "
        "Left: the temperature of ranks, τ₂ (`tau_rank`), at τ₁ = 1; middle: the temperature of the cut, τ₁ (`tau_cut`), "
        f"at τ₂ = 0.01. Towards 0 both lead back to the step, but for one half at rank {numbers.k} itself. Right: the "
        "gradient of the loss by the rank of the item. One k pulls only on items near that rank; the mean over the paper's "
        "five pulls from the first rank to beyond the sixteenth. After figures 1 and 3 of RS@k (Patel et al., CVPR 2022); "
        "the paper draws the sum over k, this is the mean, as in the loss."
    )
