"""Learning curves of rank losses and of stand-ins: the same network, batches and steps."""

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import rankgrad as rg
from rankgrad._messages import Progress
from rankgrad.report.figures import glyph_components
from rankgrad.report.figures.bins import batch_of, quality
from rankgrad.report.figures.style import LEFT, Theme, name_ends, new_figure, style_axes

WIDTH, DIMENSIONS = 256, 64
MARGIN, TEMPERATURE = 0.2, 0.1


def triplet(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Triplet margin loss over all triplets of the batch that violate the margin."""
    scores, same = _scores(embeddings, labels)
    query, relevant = (same & ~torch.eye(len(labels), dtype=torch.bool)).nonzero().t()
    gaps = MARGIN - scores[query, relevant][:, None] + scores[query]  # [pairs, candidates]
    violated = F.relu(gaps.masked_fill(same[query], 0))
    return violated.sum() / (violated.detach() > 0).sum().clamp(min=1)


def supervised_contrastive(embeddings: Tensor, labels: Tensor) -> Tensor:
    """SupCon: cross-entropy of each relevant item against the rest of the batch."""
    scores, same = _scores(embeddings, labels)
    alone = torch.eye(len(labels), dtype=torch.bool)
    log_share = (scores / TEMPERATURE).masked_fill(alone, -torch.inf).log_softmax(dim=1)
    return -log_share[same & ~alone].mean()


def _scores(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    unit = F.normalize(embeddings)
    return unit @ unit.t(), labels[:, None] == labels


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "RecallAtKLoss": rg.RecallAtKLoss(),
    "SmoothAPLoss": rg.SmoothAPLoss(),
    "contrastive": supervised_contrastive,
    "triplet": triplet,
}


@dataclass(frozen=True)
class LearningCurves:
    """Retrieval of unseen classes during training, with the learning rate that did best on validation classes."""

    losses: tuple[str, ...]
    rates: tuple[float, ...]  # [losses] chosen
    tried: tuple[float, ...]
    step: NDArray[np.int64]  # [T]
    recall_at_1: NDArray[np.float64]  # [losses, seeds, T]
    mean_average_precision: NDArray[np.float64]  # [losses, seeds, T]


def train(
    loss: Callable[[Tensor, Tensor], Tensor],
    train_set: tuple[Tensor, Tensor],
    test_set: tuple[Tensor, Tensor],
    *,
    rate: float,
    steps: int,
    every: int,
    seed: int,
) -> NDArray[np.float64]:
    """[T, 2] R@1 and mAP of the test set before training and after every so many steps."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(train_set[0].shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, DIMENSIONS))
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01), np.random.default_rng(seed)
    found = []
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                found.append(quality(model(test_set[0]), test_set[1]))
        batch = batch_of(train_set[1], rng)
        optimizer.zero_grad()
        loss(model(train_set[0][batch]), train_set[1][batch]).backward()
        optimizer.step()
    return np.array(found)


def compute(
    *,
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2),
    steps: int = 400,
    every: int = 40,
    seeds: int = 3,
    test_classes: int = 400,
) -> LearningCurves:
    """Choose a learning rate for each loss on a quarter of the training classes, then train on all and test."""
    seen, unseen = glyph_components()
    classes = int(seen[1].max()) + 1
    held_out = _subset(seen, np.random.default_rng(1).permutation(classes)[: classes // 4])
    kept = ~torch.isin(seen[1], held_out[1])
    fitted = seen[0][kept], seen[1][kept]
    test_set = _subset(unseen, np.random.default_rng(0).permutation(int(unseen[1].max()) + 1)[:test_classes])
    best, found = [], []
    with Progress(len(LOSSES) * (len(rates) + seeds), "learning-curve", unit="trainings") as progress:
        for loss in LOSSES.values():
            tried = []
            for rate in rates:
                tried.append(train(loss, fitted, held_out, rate=rate, steps=steps, every=steps, seed=0)[-1, 0])
                progress.advance()
            best.append(rates[int(np.argmax(tried))])
            curves = []
            for seed in range(seeds):
                curves.append(train(loss, seen, test_set, rate=best[-1], steps=steps, every=every, seed=seed))
                progress.advance()
            found.append(curves)
    values = np.array(found)
    return LearningCurves(
        losses=tuple(LOSSES),
        rates=tuple(best),
        tried=rates,
        step=np.arange(0, steps + 1, every),
        recall_at_1=values[..., 0],
        mean_average_precision=values[..., 1],
    )


def _subset(items: tuple[Tensor, Tensor], classes: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    kept = torch.isin(items[1], torch.from_numpy(classes))
    return items[0][kept], items[1][kept]


def draw(numbers: LearningCurves, theme: Theme) -> Figure:
    """Draw R@1 and mAP over training steps."""
    final = dict(zip(numbers.losses, numbers.recall_at_1[:, :, -1].mean(axis=1), strict=True))
    with mpl.rc_context(theme.settings):
        figure = new_figure(
            theme,
            f"R@1: {', '.join(f'{name} {value:.0%}' for name, value in final.items() if name != 'SmoothAPLoss')}",
            "unseen characters, the same network and batches, each loss at the learning rate that validation chose",
        )
        for column, (values, name) in enumerate(
            ((numbers.recall_at_1, "R@1"), (numbers.mean_average_precision, "mean Average Precision"))
        ):
            axes = figure.add_axes((LEFT + 0.49 * column, 0.125, 0.26, 0.6))
            style_axes(axes, theme, x="training step", y=name)
            _curves(axes, numbers, values, theme)
    return figure


def _curves(axes: Axes, numbers: LearningCurves, values: NDArray[np.float64], theme: Theme) -> None:
    colours = (theme.relevant, theme.other, theme.irrelevant, theme.muted)
    ends = []
    for name, curves, colour in zip(numbers.losses, values, colours, strict=True):
        axes.fill_between(numbers.step, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(numbers.step, curves.mean(axis=0), color=colour)
        ends.append((float(curves[:, -1].mean()), f"{name} {100 * curves[:, -1].mean():.1f}", colour))
    axes.set_xlim(0, numbers.step[-1])
    axes.set_ylim(0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="x", pad=6)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    name_ends(axes, float(numbers.step[-1]), ends)


def caption(numbers: LearningCurves) -> str:
    """What the figure shows and how it was computed."""
    chosen = ", ".join(f"{name} {rate:g}" for name, rate in zip(numbers.losses, numbers.rates, strict=True))
    results = ", ".join(
        f"{name} {100 * recall[:, -1].mean():.1f} and {100 * precision[:, -1].mean():.1f}"
        for name, recall, precision in zip(numbers.losses, numbers.recall_at_1, numbers.mean_average_precision, strict=True)
    )
    return (
        f"R@1 and mean Average Precision of characters never seen, during {numbers.step[-1]} steps of AdamW on a network of "
        f"two layers from 64 principal components of the built-in glyphs to {DIMENSIONS} dimensions, batches of 64 characters "
        f"with 4 drawings each, mean and range of {numbers.recall_at_1.shape[1]} seeds. The stand-ins are the supervised "
        f"contrastive loss (temperature {TEMPERATURE}) and the triplet loss (margin {MARGIN}, all triplets that violate it). "
        f"The learning rate of each loss is the best of {', '.join(f'{rate:g}' for rate in numbers.tried)} on a quarter of the "
        f"training characters: {chosen}. R@1 and mAP at the end, in percent: {results}."
    )
