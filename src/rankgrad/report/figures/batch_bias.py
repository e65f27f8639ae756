"""RaMBO's figure 2: the mean Average Precision inside a mini-batch is too high."""

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

import rankgrad as rg
from rankgrad.report.figures import glyph_components
from rankgrad.report.figures.style import BODY, LEFT, Theme, annotate, log_axis, new_figure, style_axes

# batch sizes of the papers
PAPERS = {128: "RaMBO's batch", 256: "FastAP's batch", 4096: "RS@k's batch"}


@dataclass(frozen=True)
class BatchBias:
    """Exact mAP in batches of whole classes, and of all items."""

    sizes: NDArray[np.int64]  # [S] items of a batch
    mean: NDArray[np.float64]  # [S] over the batches of a size
    deviation: NDArray[np.float64]  # [S]
    batches: int  # of each size
    items: int
    per_class: int
    full: float


def mean_average_precision(embeddings: Tensor, labels: Tensor) -> float:
    """MAP with every item as a query against all others."""
    return 1 - float(rg.RankLoss(rg.Exact(), rg.AveragePrecision())(embeddings, labels))


def compute(*, sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), batches: int = 40) -> BatchBias:
    """Compute on the test glyphs, embedded once."""
    _, (embeddings, labels) = glyph_components()
    return estimate(embeddings, labels, sizes=sizes, batches=batches)


def estimate(embeddings: Tensor, labels: Tensor, *, sizes: tuple[int, ...], batches: int, seed: int = 0) -> BatchBias:
    """Measure batches of whole classes, in which a query always has the same relevant items and only the others differ."""
    rng = np.random.default_rng(seed)
    members = labels.argsort(stable=True).view(int(labels.max()) + 1, -1)  # equally many of every class
    per_class = members.shape[1]
    found = np.empty((len(sizes), batches))
    for row, size in enumerate(sizes):
        for column in range(batches):
            chosen = members[torch.from_numpy(rng.choice(len(members), size // per_class, replace=False))].flatten()
            found[row, column] = mean_average_precision(embeddings[chosen], labels[chosen])
    return BatchBias(
        sizes=np.array(sizes),
        mean=found.mean(axis=1),
        deviation=found.std(axis=1, ddof=1),
        batches=batches,
        items=len(labels),
        per_class=per_class,
        full=mean_average_precision(embeddings, labels),
    )


def draw(numbers: BatchBias, theme: Theme) -> Figure:
    """Draw the mAP in batches over their size."""
    with mpl.rc_context(theme.settings):
        size, seen = int(numbers.sizes[0]), float(numbers.mean[0])
        figure = new_figure(
            theme,
            f"A batch of {size} reports an mAP of {seen:.0%} where the full set has {numbers.full:.0%}",
            "the same embeddings measured inside mini-batches of growing size: mean and standard deviation over batches",
        )
        axes = figure.add_axes((LEFT, 0.125, 0.76, 0.63))
        style_axes(axes, theme, x="items in the batch", y="exact mean Average Precision")
        sizes, mean = np.append(numbers.sizes, numbers.items), np.append(numbers.mean, numbers.full)
        spread = np.append(numbers.deviation, 0)
        log_axis(axes, sizes.tolist())
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlim(0.8 * sizes[0], sizes[-1])
        axes.set_ylim(0, 1.08)  # room for labels near 100%
        axes.axhline(numbers.full, color=theme.ink, linewidth=2.2)
        axes.fill_between(sizes, mean - spread, mean + spread, color=theme.relevant, alpha=0.2, linewidth=0)
        axes.plot(sizes, mean, color=theme.relevant, marker="o", markersize=10, markeredgecolor=theme.background, clip_on=False)
        for size, value in zip(sizes[:-1], mean[:-1], strict=True):
            batch = f"{value:.0%}" + (f"  {PAPERS[int(size)]}" if int(size) in PAPERS else "")
            annotate(axes, (size, value), batch, theme.relevant, xytext=(9, 15))
        annotate(
            axes,
            (numbers.items, numbers.full),
            f"all {numbers.items:,}:\n{numbers.full:.1%}",
            theme.ink,
            fontsize=BODY,
            xytext=(16, 0),
        )
    return figure


def caption(numbers: BatchBias) -> str:
    """What the figure shows and how it was computed."""
    return (
        f"Exact mean Average Precision of one fixed set of embeddings (64 principal components of the {numbers.items:,} "
        f"test drawings of the built-in glyphs, {numbers.per_class} of each character), measured inside {numbers.batches} "
        "random batches of each size: mean and standard deviation. Batches hold whole classes, so a query always has the "
        f"same relevant items, and only the number of others grows. In a batch of {numbers.sizes[0]} the value is "
        f"{numbers.mean[0]:.1%}, over all items {numbers.full:.1%}: what a loss sees in a small batch is a far easier "
        "problem. The labels say which batch the papers train with (RS@k: 4,000). After figure 2 of RaMBO (Rolínek et al., "
        "CVPR 2020)."
    )
