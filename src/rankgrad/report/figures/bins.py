"""FastAP's figure 4: few bins approximate Average Precision badly, many give few scores a gradient."""

import time
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
from rankgrad._messages import Progress
from rankgrad.report.figures import glyph_components
from rankgrad.report.figures.style import Theme, annotate, log_axis, name_ends, new_figure, style_axes, three_panels

CLASSES_PER_BATCH, PER_CLASS = 64, 4
DIMENSIONS = 32
LEARNING_RATE = 0.02
UNNAMED = (50, 200)
"""Numbers of bins without a label on the axis."""


@dataclass(frozen=True)
class Bins:
    """Effect of the number of bins on the loss, its gradient and the trained model."""

    bins: tuple[int, ...]
    error: NDArray[np.float64]  # [bins, batches] |FastAP - exact AP|, mean over the queries of a batch
    reached: NDArray[np.float64]  # [bins, batches] fraction of the scores that get a gradient
    recall_at_1: NDArray[np.float64]  # [bins, seeds] of characters never seen
    mean_average_precision: NDArray[np.float64]  # [bins, seeds]
    untrained_recall_at_1: float  # of the components themselves
    milliseconds: NDArray[np.float64]  # [bins] of a training step, median
    steps: int


def approximation(embeddings: Tensor, labels: Tensor, bins: int) -> tuple[float, float]:
    """Error of FastAP against exact AP on a batch, and the fraction of its scores that get a gradient."""
    unit = torch.nn.functional.normalize(embeddings)
    scores = (unit @ unit.t()).requires_grad_()
    others = ~torch.eye(len(labels), dtype=torch.bool)
    relevance = (labels[:, None] == labels) & others
    fast = rg.FastAPLoss(bins, reduction="none").from_scores(scores, relevance, candidates=others)
    exact = rg.RankLoss(rg.Exact(), rg.AveragePrecision(), reduction="none").from_scores(
        scores.detach(), relevance, candidates=others
    )
    (gradient,) = torch.autograd.grad(fast.sum(), scores)
    return float((fast.detach() - exact).abs().mean()), float((gradient[others] != 0).float().mean())


def batch_of(labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Indices of a class-balanced batch; `labels` are sorted and every class has equally many items."""
    each = len(labels) // (int(labels[-1]) + 1)
    classes = rng.choice(int(labels[-1]) + 1, CLASSES_PER_BATCH, replace=False)
    return torch.from_numpy(np.concatenate([c * each + rng.choice(each, PER_CLASS, replace=False) for c in classes]))


def train(embeddings: Tensor, labels: Tensor, *, bins: int, steps: int, seed: int) -> tuple[Tensor, list[float]]:
    """A linear map [components, DIMENSIONS] learnt with FastAP, and the milliseconds of every step."""
    weights = torch.randn(embeddings.shape[1], DIMENSIONS, generator=torch.Generator().manual_seed(seed))
    weights = (weights / embeddings.shape[1] ** 0.5).requires_grad_()
    loss, optimizer, rng = rg.FastAPLoss(bins), torch.optim.Adam([weights], lr=LEARNING_RATE), np.random.default_rng(seed)
    times = []
    for _ in range(steps):
        batch = batch_of(labels, rng)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(embeddings[batch] @ weights, labels[batch]).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return weights.detach(), times


def quality(embeddings: Tensor, labels: Tensor) -> tuple[float, float]:
    """R@1 and mAP with every item as a query against all others."""

    def first_is_irrelevant(ranks: rg.Ranks) -> Tensor:
        return 1 - ((ranks.rank == 1) & (ranks.mass > 0)).any(dim=1).to(ranks.rank)

    exact = (rg.RankLoss(rg.Exact(), objective) for objective in (first_is_irrelevant, rg.AveragePrecision()))
    recall, precision = (1 - float(loss(embeddings, labels)) for loss in exact)
    return recall, precision


def compute(
    *,
    bins: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 400),
    steps: int = 80,
    seeds: int = 3,
    test_classes: int = 400,
) -> Bins:
    """Train on one split of the glyphs, evaluate on some classes of the other."""
    (seen, seen_labels), (unseen, unseen_labels) = glyph_components()
    rng = np.random.default_rng(0)
    kept = torch.isin(unseen_labels, torch.from_numpy(rng.choice(int(unseen_labels[-1]) + 1, test_classes, replace=False)))
    unseen, unseen_labels = unseen[kept], unseen_labels[kept]
    batches = [batch_of(seen_labels, rng) for _ in range(4)]
    close = np.array([[approximation(seen[batch], seen_labels[batch], each) for batch in batches] for each in bins])
    found, times = np.empty((len(bins), seeds, 2)), []
    with Progress(len(bins) * seeds, "fastap-bins", unit="trainings") as progress:
        for row, each in enumerate(bins):
            took: list[float] = []
            for seed in range(seeds):
                weights, steps_took = train(seen, seen_labels, bins=each, steps=steps, seed=seed)
                found[row, seed] = quality(unseen @ weights, unseen_labels)
                took += steps_took
                progress.advance()
            times.append(float(np.median(took)))
    return Bins(
        bins=bins,
        error=close[..., 0],
        reached=close[..., 1],
        recall_at_1=found[..., 0],
        mean_average_precision=found[..., 1],
        untrained_recall_at_1=quality(unseen, unseen_labels)[0],
        milliseconds=np.array(times),
        steps=steps,
    )


def draw(numbers: Bins, theme: Theme) -> Figure:
    """Draw error, gradient and retrieval over the number of bins."""
    with mpl.rc_context(theme.settings):
        best = numbers.bins[int(numbers.recall_at_1.mean(axis=1).argmax())]
        figure = new_figure(
            theme,
            f"FastAP does best around {best} bins: near AP, and still a gradient",
            "a linear map trained with finer and finer histograms of scores; bands are the range over batches or seeds",
        )
        left, middle, right = three_panels(figure)
        _curve(left, numbers.bins, numbers.error, theme.ink)
        style_axes(
            left, theme, title="More bins are closer to AP", x="bins of the histogram", y="error of FastAP against exact AP"
        )
        _curve(middle, numbers.bins, numbers.reached, theme.other)
        style_axes(middle, theme, title="and reach fewer scores", x="bins of the histogram", y="scores that get a gradient")
        _curve(right, numbers.bins, numbers.recall_at_1, theme.relevant)
        _curve(right, numbers.bins, numbers.mean_average_precision, theme.relevant, marker="s")
        right.axhline(numbers.untrained_recall_at_1, color=theme.muted, linewidth=1.8, linestyle=(0, (4, 3)))
        style_axes(right, theme, title="so the best is between", x="bins of the histogram", y="retrieval of unseen characters")
        for axes in (left, middle, right):
            axes.set_ylim(0)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ends = [
            (float(numbers.recall_at_1[-1].mean()), "R@1", theme.relevant),
            (float(numbers.mean_average_precision[-1].mean()), "mAP", theme.relevant),
        ]
        name_ends(right, right.get_xlim()[1], ends)
        annotate(right, (5, numbers.untrained_recall_at_1), "untrained R@1", theme.muted, xytext=(0, -14))
    return figure


def _curve(axes: Axes, bins: tuple[int, ...], values: NDArray[np.float64], colour: str, marker: str = "o") -> None:
    log_axis(axes, [each for each in bins if each not in UNNAMED])
    axes.fill_between(bins, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.2, linewidth=0)
    axes.plot(bins, values.mean(axis=1), color=colour, marker=marker, markersize=8, markeredgecolor=axes.get_facecolor())


def caption(numbers: Bins) -> str:
    """What the figure shows and how it was computed."""
    recall, times = numbers.recall_at_1.mean(axis=1), numbers.milliseconds
    best = int(recall.argmax())
    few, many = numbers.bins[0], numbers.bins[-1]
    return (
        f"FastAP with {few} to {many} bins. Left: how far its value is from exact Average Precision, mean over the queries "
        f"of batches of {CLASSES_PER_BATCH * PER_CLASS}. Middle: the share of scores that get any gradient; in fine "
        "histograms most bins hold no relevant item, and the scores there do not matter. Right: R@1 and mean Average "
        f"Precision on characters never seen, after {numbers.steps} steps of Adam on a linear map of 64 principal "
        f"components of the built-in glyphs to {DIMENSIONS} dimensions, {numbers.recall_at_1.shape[1]} seeds. R@1 of the "
        f"components themselves is {numbers.untrained_recall_at_1:.1%}, after training {recall[0]:.1%} with {few} bin, "
        f"{recall[best]:.1%} with {numbers.bins[best]} and {recall[-1]:.1%} with {many}. The median step took "
        f"{times[best]:.1f} ms with {numbers.bins[best]} bins and {times[-1]:.1f} ms with {many}. After figure 4 of FastAP "
        "(Cakir et al., CVPR 2019)."
    )
