"""RaMBO's figure 1: a loss of ranks is piecewise constant; blackbox differentiation interpolates it.

The blackbox gradient is the gradient of a continuous, piecewise affine function f of the scores y that lies on or under the
exact loss (Vlastelica et al., 2020). With a loss L that is linear in the ranks, slope c,

    f(y) = L(s') + y . (s' - s) / lambda,    s = ranks of y,  s' = ranks of y + lambda c,

is one function everywhere, and its gradient (s' - s) / lambda is what `Blackbox` returns. So f is computed here from nothing
but the value and the gradient of the loss: f = L + (y + lambda c) . gradient.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

import rankgrad as rg
from rankgrad.report.figures.style import LEFT, PANEL, SIZE, SMALL, Theme, name_ends, new_figure, style_axes

ITEMS, RELEVANT = 8, 3
REACH = 1.5
"""Half the side of the section, in standard deviations of the scores."""


@dataclass(frozen=True)
class Landscape:
    """Losses over a square section of score space and along the line through its middle, and directions of descent."""

    lambdas: tuple[float, ...]  # as in `Blackbox`: on ranks divided by the length of the list
    side: NDArray[np.float64]  # [G] how far scores move along either direction
    exact: NDArray[np.float64]  # [G, G] mean rank of the relevant items
    interpolated: NDArray[np.float64]  # [lambdas, G, G]
    exact_on_line: NDArray[np.float64]  # [G] where the second direction is 0
    interpolated_on_line: NDArray[np.float64]  # [lambdas, G]
    roots: NDArray[np.float64]  # [A] where arrows begin, along either direction
    descent: NDArray[np.float64]  # [lambdas, A, A, 2] minus the blackbox gradient by the two directions


def mean_rank(ranks: rg.Ranks) -> Tensor:
    """The loss of this figure: linear in the ranks."""
    return ranks.mean(ranks.rank)


def value_and_gradient(scores: Tensor, relevance: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Exact losses [Q] of the lists `scores` [Q, n] and their blackbox gradient [Q, n]."""
    scores = scores.detach().requires_grad_()
    # the step of a list is that of a mean over all of them; times their number it is that of the list alone
    ranker = rg.Blackbox(lam * len(scores))
    losses = rg.RankLoss(ranker, mean_rank, reduction="none").from_scores(scores, relevance)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    return losses.detach(), gradient


def interpolation(scores: Tensor, relevance: Tensor, lam: float) -> Tensor:
    """[Q] the function whose gradient `value_and_gradient` returns."""
    losses, gradient = value_and_gradient(scores, relevance, lam)
    slope = relevance / relevance.sum(dim=1, keepdim=True)
    return losses + ((scores + lam * scores.shape[1] * slope) * gradient).sum(dim=1)


def compute(*, lambdas: tuple[float, ...] = (0.05, 0.2, 0.8), grid: int = 161, arrows: int = 9, seed: int = 4) -> Landscape:
    """Compute a section through random scores along two random directions."""
    generator = torch.Generator().manual_seed(seed)
    start, *directions = torch.randn(3, ITEMS, generator=generator, dtype=torch.float64)
    plane = torch.stack(directions)  # [2, ITEMS]

    def at(places: Tensor) -> tuple[Tensor, Tensor]:
        scores = start + places @ plane
        return scores, (torch.arange(ITEMS) < RELEVANT).expand_as(scores)

    # centres of cells, so that no arrow starts at the edge
    side, roots = _middles(grid), _middles(arrows)
    square, line = at(torch.cartesian_prod(side, side)), at(torch.stack((side, torch.zeros_like(side)), dim=1))
    rooted = at(torch.cartesian_prod(roots, roots))
    return Landscape(
        lambdas=lambdas,
        side=side.numpy(),
        exact=value_and_gradient(*square, lambdas[0])[0].view(grid, grid).numpy(),
        interpolated=torch.stack([interpolation(*square, lam) for lam in lambdas]).view(-1, grid, grid).numpy(),
        exact_on_line=value_and_gradient(*line, lambdas[0])[0].numpy(),
        interpolated_on_line=torch.stack([interpolation(*line, lam) for lam in lambdas]).numpy(),
        roots=roots.numpy(),
        descent=torch.stack([-value_and_gradient(*rooted, lam)[1] @ plane.t() for lam in lambdas])
        .view(-1, arrows, arrows, 2)
        .numpy(),
    )


def _middles(count: int) -> Tensor:
    edges = torch.linspace(-REACH, REACH, count + 1, dtype=torch.float64)
    return (edges[1:] + edges[:-1]) / 2


def draw(numbers: Landscape, theme: Theme) -> Figure:
    """Draw the losses side by side with arrows of descent, and the section below."""
    with mpl.rc_context(theme.settings):
        figure = new_figure(
            theme,
            "A loss of ranks is a staircase; a larger λ bridges more of its steps",
            "mean rank of the relevant items over a section of score space, and the functions whose gradient RaMBO returns",
        )
        heights = [numbers.exact, *numbers.interpolated]
        names = ["exact: no way down", *(f"λ = {lam:g}" for lam in numbers.lambdas)]
        limits = Normalize(min(float(height.min()) for height in heights), max(float(height.max()) for height in heights))
        # without its yellow end, where white arrows would be invisible
        colours = ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.8, 256)))
        width, tall = 0.195, 0.195 * SIZE[0] / SIZE[1]
        for column, (name, height) in enumerate(zip(names, heights, strict=True)):
            axes = figure.add_axes((LEFT + 0.2075 * column, 0.43, width, tall))
            axes.set_title(name, loc="left", fontsize=PANEL, fontweight="bold", color=[theme.ink, *theme.shades][column])
            picture = axes.imshow(height.T, cmap=colours, origin="lower", extent=(-REACH, REACH, -REACH, REACH), norm=limits)
            axes.axhline(0, color="white", linewidth=1.2, linestyle=(0, (4, 3)))
            _arrows(axes, numbers, column)
            axes.set_axis_off()
        scale = figure.colorbar(picture, cax=figure.add_axes((LEFT + 0.2075 * 3 + width + 0.0125, 0.43, 0.01, tall)))
        scale.outline.set_visible(False)
        scale.ax.set_title("mean\nrank", loc="left", fontsize=SMALL, color=theme.muted)
        _section(figure, numbers, theme)
    return figure


def _arrows(axes: Axes, numbers: Landscape, column: int) -> None:
    """Arrows of descent; the exact loss, in the first column, has no gradient."""
    x, y = np.meshgrid(numbers.roots, numbers.roots, indexing="ij")
    ways = np.zeros_like(numbers.descent[0]) if column == 0 else numbers.descent[column - 1]
    resting = ~ways.any(axis=2)
    axes.plot(x[resting], y[resting], ".", color="white", markersize=3.5, alpha=0.8)
    if resting.all():
        return
    # the longest arrow of a panel reaches the next one
    scale = float(np.linalg.norm(ways, axis=2).max() / (numbers.roots[1] - numbers.roots[0]))
    x, y, ways = x[~resting], y[~resting], ways[~resting]
    shape: dict[str, Any] = {"width": 0.009, "headwidth": 4.5, "headlength": 4.5, "headaxislength": 4, "minlength": 0.2}
    axes.quiver(x, y, ways[:, 0], ways[:, 1], color="white", angles="xy", scale_units="xy", scale=scale, **shape)


def _section(figure: Figure, numbers: Landscape, theme: Theme) -> None:
    axes = figure.add_axes((LEFT, 0.11, 0.8175, 0.235))
    style_axes(axes, theme, x="scores moved along the dashed line", y="mean rank along the dashed line")
    axes.plot(numbers.side, numbers.exact_on_line, color=theme.ink, drawstyle="steps-mid", linewidth=2.2)
    ends = [(float(numbers.exact_on_line[-1]), "exact", theme.ink)]
    for lam, heights, colour in zip(numbers.lambdas, numbers.interpolated_on_line, theme.shades, strict=True):
        axes.plot(numbers.side, heights, color=colour)
        ends.append((float(heights[-1]), f"λ = {lam:g}", colour))
    axes.set_xlim(-REACH, REACH)
    axes.margins(y=0.1)
    name_ends(axes, REACH, ends)


def caption(numbers: Landscape) -> str:
    """What the figure shows and how it was computed."""
    lambdas = ", ".join(f"{lam:g}" for lam in numbers.lambdas)
    return (
        f"The mean rank of {RELEVANT} relevant among {ITEMS} items over a two-dimensional section of score space (left), "
        f"and its interpolations by blackbox differentiation for λ = {lambdas} (λ of `Blackbox`, on ranks divided by the "
        "length of the list). The exact loss is constant on every plateau, so its gradient is zero. An interpolation is "
        "continuous and piecewise affine, never lies above the loss, and touches it wherever moving the relevant scores up "
        "by λ times their share changes no rank; its gradient is the one that training receives. Arrows go down that "
        "gradient, their lengths relative to the longest of a panel; where it is zero, a dot. Below, the section along one "
        "line: a growing λ bridges more steps, and is less faithful. After figure 1 of RaMBO (Rolínek et al., CVPR 2020)."
    )
