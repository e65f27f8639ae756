"""SiMix in the plane: the virtual examples of a small batch, and what they do to the number of comparisons."""

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import rankgrad as rg
from rankgrad.report.figures.style import LEFT, Theme, annotate, new_figure, style_axes

CLASSES, PER_CLASS = 3, 4
SIZES = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class VirtualExamples:
    """A batch of unit vectors in the plane and its virtual examples, and the loss with and without them."""

    points: NDArray[np.float64]  # [N, 2]
    labels: NDArray[np.int64]  # [N]
    virtual: NDArray[np.float64]  # [V, 2]
    virtual_labels: NDArray[np.int64]  # [V]
    sizes: tuple[int, ...]  # items of a class
    with_virtual: tuple[int, ...]  # items of a class with its virtual examples
    loss: float
    loss_with_virtual: float


def compute(*, seed: int = 3) -> VirtualExamples:
    """Draw a batch and mix all its pairs."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    spread = torch.linspace(-0.8, 0.8, PER_CLASS, dtype=torch.float64).repeat(CLASSES)
    angles = 2.1 * labels + spread + 0.12 * torch.randn(len(labels), generator=generator, dtype=torch.float64)
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    # in the order in which SiMix draws their coefficients
    first, second = torch.cat([torch.combinations((labels == each).nonzero()[:, 0]) for each in range(CLASSES)]).t()
    mixer = rg.SiMix(rg.SmoothAPLoss(), torch.Generator().manual_seed(seed))
    alpha = mixer.draw(labels, points)[:, None]
    mixer.generator = torch.Generator().manual_seed(seed)
    return VirtualExamples(
        points=points.numpy(),
        labels=labels.numpy(),
        virtual=(alpha * points[first] + (1 - alpha) * points[second]).numpy(),
        virtual_labels=labels[first].numpy(),
        sizes=SIZES,
        with_virtual=tuple(m + len(torch.combinations(torch.arange(m))) for m in SIZES),
        loss=float(mixer.loss(points, labels)),
        loss_with_virtual=float(mixer(points, labels)),
    )


def draw(numbers: VirtualExamples, theme: Theme) -> Figure:
    """Draw the batch with its virtual examples, and how a class grows."""
    with mpl.rc_context(theme.settings):
        figure = new_figure(
            theme,
            f"SiMix: {len(numbers.points)} embeddings and {len(numbers.virtual)} between them",
            "every pair of one class has a virtual example on the line between the two, a query and a candidate like any other",
        )
        plane = figure.add_axes((LEFT, 0.08, 0.42, 0.72))
        _plane(plane, numbers, theme)
        growth = figure.add_axes((0.6, 0.125, 0.34, 0.6))
        _growth(growth, numbers, theme)
    return figure


def _plane(axes: Axes, numbers: VirtualExamples, theme: Theme) -> None:
    axes.set_aspect("equal")
    axes.set_axis_off()
    turn = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(turn), np.sin(turn), color=theme.grid, linewidth=2)
    for label, colour in enumerate((theme.relevant, theme.irrelevant, theme.other)):
        points = numbers.points[numbers.labels == label]
        for i in range(len(points)):
            for j in range(i):
                axes.plot(*points[[i, j]].T, color=colour, linewidth=0.8, alpha=0.4)
        axes.scatter(points[:, 0], points[:, 1], s=150, color=colour, zorder=3)
        x, y = numbers.virtual[numbers.virtual_labels == label].T
        axes.scatter(x, y, s=70, facecolors=theme.background, edgecolors=colour, linewidths=2, zorder=3)
        middle = 1.3 * points.mean(axis=0) / np.linalg.norm(points.mean(axis=0))
        annotate(axes, (middle[0], middle[1]), f"class {label + 1}", colour, ha="center", xytext=(0, 0))
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.5, 1.5)


def _growth(axes: Axes, numbers: VirtualExamples, theme: Theme) -> None:
    style_axes(axes, theme, x="images of a class in the batch", y="with virtual examples")
    places = np.arange(len(numbers.sizes))
    axes.bar(places, numbers.with_virtual, width=0.6, color=theme.background, edgecolor=theme.relevant, linewidth=2)
    axes.bar(places, numbers.sizes, width=0.6, color=theme.relevant)
    axes.set_xticks(places, [str(size) for size in numbers.sizes])
    axes.set_ylim(0, 1.15 * max(numbers.with_virtual))
    for place, total in zip(places, numbers.with_virtual, strict=True):
        annotate(axes, (float(place), total), str(total), theme.relevant, ha="center", xytext=(0, 14))


def caption(numbers: VirtualExamples) -> str:
    """What the figure shows and how it was computed."""
    return (
        f"Left: {len(numbers.points)} unit embeddings of {CLASSES} classes (filled) and the {len(numbers.virtual)} virtual "
        "examples of SiMix (open), alpha x + (1 - alpha) z with alpha uniform in (0, 1) for every pair of one class. They lie "
        f"inside the circle, because they are not normalised again. Smooth-AP of this batch is {numbers.loss:.3f} without and "
        f"{numbers.loss_with_virtual:.3f} with them. Right: a class of m images becomes one of m + m (m - 1) / 2. SiMix is by "
        "Patel et al., CVPR 2022."
    )
