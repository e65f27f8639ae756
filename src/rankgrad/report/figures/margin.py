"""RaMBO's figure 3: without a margin, scores collapse into a tie; with one, they keep a gap."""

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray
from torch import Tensor

import rankgrad as rg
from rankgrad.report.figures.style import Theme, annotate, new_figure, style_axes, three_panels

RELEVANT, IRRELEVANT = 6, 24
LAM = 4.0


@dataclass(frozen=True)
class Collapse:
    """Scores of lists under gradient descent, without and with a margin, and the effect of noise on the final ones."""

    margins: tuple[float, float]
    rate: float
    decay: float
    scores: NDArray[np.float64]  # [2, steps + 1, items] of the first list, the relevant items first
    gap: NDArray[np.float64]  # [2, steps + 1] lowest relevant minus highest irrelevant score, mean over lists
    noise: NDArray[np.float64]  # [S] standard deviation
    precision: NDArray[np.float64]  # [2, S] mean Average Precision of the last scores with noise


def descend(scores: Tensor, relevance: Tensor, *, margin: float, steps: int, rate: float, decay: float) -> Tensor:
    """[steps + 1, Q, n] scores under plain gradient descent on RaMBO's recall loss with weight decay."""
    scores = scores.clone().requires_grad_()
    # one loss per list: lists do not influence each other. The step of a list is that of a mean over all of them, so `lam` is
    # multiplied by their number
    loss = rg.RamboRecallLoss(LAM * len(scores), margin, weighting="log", reduction="none")
    optimizer = torch.optim.SGD([scores], lr=rate, weight_decay=decay)
    path = [scores.detach().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        loss.from_scores(scores, relevance).sum().backward()
        optimizer.step()
        path.append(scores.detach().clone())
    return torch.stack(path)


def compute(
    *, margin: float = 0.2, steps: int = 500, lists: int = 32, rate: float = 0.1, decay: float = 0.05, seed: int = 0
) -> Collapse:
    """Optimise the same random scores without and with a margin."""
    generator = torch.Generator().manual_seed(seed)
    start = 0.3 * torch.randn(lists, RELEVANT + IRRELEVANT, generator=generator, dtype=torch.float64)
    relevance = (torch.arange(RELEVANT + IRRELEVANT) < RELEVANT).expand_as(start)
    margins = (0.0, margin)
    paths = [descend(start, relevance, margin=each, steps=steps, rate=rate, decay=decay) for each in margins]
    noise = torch.linspace(0, margin, 21, dtype=torch.float64)
    jitter = torch.randn(20, *start.shape, generator=generator, dtype=torch.float64)
    exact = rg.RankLoss(rg.Exact(), rg.AveragePrecision())
    precision = [
        [1 - float(exact.from_scores((path[-1] + by * jitter).flatten(0, 1), relevance.repeat(len(jitter), 1))) for by in noise]
        for path in paths
    ]
    return Collapse(
        margins=margins,
        rate=rate,
        decay=decay,
        scores=torch.stack([path[:, 0] for path in paths]).numpy(),
        gap=torch.stack([(path[..., :RELEVANT].amin(2) - path[..., RELEVANT:].amax(2)).mean(dim=1) for path in paths]).numpy(),
        noise=noise.numpy(),
        precision=np.array(precision),
    )


def draw(numbers: Collapse, theme: Theme) -> Figure:
    """Draw the paths of all scores, and the mAP of the final ones under noise."""
    with mpl.rc_context(theme.settings):
        figure = new_figure(
            theme,
            "Both rank perfectly; only with a margin do the scores stay apart",
            "scores under gradient descent with weight decay on RaMBO's recall loss, from the same start",
        )
        left, middle, right = three_panels(figure)
        reach = 1.08 * float(np.abs(numbers.scores).max())
        for axes, margin, scores, colour in zip((left, middle), numbers.margins, numbers.scores, _colours(theme), strict=True):
            style_axes(axes, theme, title=_named(margin), colour=colour, x="step", y="score of each item")
            _paths(axes, scores, reach, theme)
        middle.tick_params(labelleft=False)
        last = numbers.scores.shape[1] - 1
        annotate(left, (last, 0.3 * reach), "relevant", theme.relevant)
        annotate(left, (last, -0.3 * reach), "irrelevant", theme.irrelevant)
        _noise(right, numbers, theme)
    return figure


def _colours(theme: Theme) -> tuple[str, str]:
    """Colours without and with a margin."""
    return theme.muted, theme.other


def _named(margin: float) -> str:
    return f"Margin {margin:g}" if margin else "No margin"


def _paths(axes: Axes, scores: NDArray[np.float64], reach: float, theme: Theme) -> None:
    axes.plot(scores[:, RELEVANT:], color=theme.irrelevant, linewidth=1.3, alpha=0.75)
    axes.plot(scores[:, :RELEVANT], color=theme.relevant, linewidth=1.8)
    last = len(scores) - 1
    axes.set_xlim(0, last)
    axes.set_ylim(-reach, reach)
    low, high = float(scores[-1, :RELEVANT].min()), float(scores[-1, RELEVANT:].max())
    axes.plot((last, last), (low, high), color=theme.ink, linewidth=4, clip_on=False, solid_capstyle="butt", zorder=4)
    annotate(axes, (last, (low + high) / 2), f"gap {low - high:.2f}", theme.ink)


def _noise(axes: Axes, numbers: Collapse, theme: Theme) -> None:
    style_axes(axes, theme, title="When scores get noisy", x="standard deviation of the noise", y="mean Average Precision")
    for margin, curve, colour in zip(numbers.margins, numbers.precision, _colours(theme), strict=True):
        axes.plot(numbers.noise, curve, color=colour)
        middle = len(curve) // 2
        annotate(axes, (numbers.noise[middle], curve[middle]), _named(margin).lower(), colour, xytext=(4, 14))
    axes.set_xlim(0, numbers.noise[-1])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def caption(numbers: Collapse) -> str:
    """What the figure shows and how it was computed."""
    return (
        f"Scores of {RELEVANT} relevant and {IRRELEVANT} irrelevant items under gradient descent (rate {numbers.rate:g}, "
        f"weight decay {numbers.decay:g}) on RaMBO's recall loss with log weighting, from the same start, without and with "
        f"a margin of {numbers.margins[1]:g}. Without one the gradient is zero as soon as the last relevant item is ahead "
        "by any difference; as ranks do not depend on scale, weight decay then shrinks all scores towards one tie (mean "
        f"gap over all lists {numbers.gap[0, -1]:.3f}). With it, the loss asks for the margin and so for a scale "
        f"({numbers.gap[1, -1]:.3f}). Both rank the items perfectly; right, what is left of that when noise is added to the "
        "scores, as a new data set would. After figure 3 of RaMBO (Rolínek et al., CVPR 2020)."
    )
