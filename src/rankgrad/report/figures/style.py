"""The style of all figures, light and dark: colours with fixed meanings, sizes for slides, axes and labels.

The colours are Okabe and Ito's and shades of one blue, told apart by all eyes and in grey. What a colour means never changes:
the exact metric has the colour of the text, relevant items are blue, irrelevant ones orange, what else is compared is green,
and the values of one setting are shades of blue, from faint to strong as the setting grows.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

# 16:9, in inches
SIZE = (13.333, 7.5)
BODY, SMALL, PANEL, HEADLINE = 15, 13, 16, 22
LEFT = 0.06
"""Left edge of the text, as a fraction of the width."""


@dataclass(frozen=True)
class Theme:
    """Colours of a figure by meaning."""

    background: str
    ink: str  # text, and the exact metric
    muted: str  # explanations
    grid: str
    relevant: str
    irrelevant: str
    other: str  # anything else that is compared
    shades: tuple[str, str, str]  # increasing values of a setting

    @property
    def settings(self) -> dict[Any, Any]:
        """Matplotlib settings for drawing and saving."""
        return {
            "font.family": "DejaVu Sans",  # comes with matplotlib, so the picture is the same everywhere
            "font.size": BODY,
            "text.color": self.ink,
            "figure.facecolor": self.background,
            "savefig.facecolor": self.background,
            "axes.facecolor": self.background,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.muted,
            "axes.labelsize": BODY,
            "axes.labelpad": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelsize": SMALL,
            "ytick.labelsize": SMALL,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "lines.linewidth": 2.8,
            "lines.solid_capstyle": "round",
            "svg.hashsalt": "rankgrad",  # the same picture gives the same file
        }


LIGHT = Theme(
    background="#FFFFFF",
    ink="#16191D",
    muted="#59626E",
    grid="#E4E7EB",
    relevant="#0072B2",
    irrelevant="#D55E00",
    other="#009E73",
    shades=("#4A9FDC", "#1B6DB0", "#0A3566"),
)
DARK = Theme(
    background="#14171C",
    ink="#F3F5F7",
    muted="#AAB3BF",
    grid="#2C323A",
    relevant="#56B4E9",
    irrelevant="#F28E4C",
    other="#2CC295",
    shades=("#3F86C0", "#6BBAF0", "#CDE8FC"),
)


def new_figure(theme: Theme, headline: str, explanation: str) -> Figure:
    """An empty figure with a headline and an explanation."""
    figure = Figure(figsize=SIZE)
    figure.text(LEFT, 0.938, headline, fontsize=HEADLINE, fontweight="bold", va="center")
    figure.text(LEFT, 0.876, explanation, fontsize=BODY, color=theme.muted, va="center")
    return figure


def three_panels(figure: Figure) -> list[Axes]:
    """Three panels side by side, with room for labels at the ends of curves."""
    return [figure.add_axes((LEFT + 0.325 * column, 0.12, 0.225, 0.575)) for column in range(3)]


def style_axes(axes: Axes, theme: Theme, *, title: str = "", colour: str | None = None, x: str, y: str) -> None:
    """Title, axis labels, that of the y axis horizontal above it, and horizontal grid lines."""
    if title:
        axes.set_title(title, loc="left", fontsize=PANEL, fontweight="bold", color=colour or theme.ink, pad=38)
    axes.annotate(
        y, (0, 1), xytext=(0, 10), xycoords="axes fraction", textcoords="offset points", color=theme.muted, fontsize=SMALL
    )
    axes.set_xlabel(x, fontsize=SMALL)
    axes.grid(axis="y", color=theme.grid, linewidth=1)
    axes.spines["left"].set_visible(False)


def log_axis(axes: Axes, ticks: Sequence[int]) -> None:
    """A logarithmic x axis with these ticks."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())


def annotate(axes: Axes, place: tuple[float, float], text: str, colour: str, **more: Any) -> None:
    """A label at a data point, in the colour of what it names, with an outline that separates it from lines."""
    rim = withStroke(linewidth=4, foreground=axes.get_facecolor())
    options: dict[str, Any] = {"fontsize": SMALL, "fontweight": "bold", "ha": "left", "va": "center", "xytext": (8, 0), **more}
    axes.annotate(text, place, color=colour, textcoords="offset points", annotation_clip=False, path_effects=[rim], **options)


def name_ends(axes: Axes, end: float, names: Sequence[tuple[float, str, str]]) -> None:
    """Labels (height, text, colour) beside the right ends of curves, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    points = axes.get_position().height * SIZE[1] * 72
    least = 1.35 * SMALL * (high - low) / points
    rows = sorted(names)
    heights = np.array([height for height, _, _ in rows])
    # stack labels from below, then shift the column back to the ends of its curves
    stacked = np.maximum.accumulate(heights - least * np.arange(len(rows))) + least * np.arange(len(rows))
    stacked -= (stacked - heights).mean()
    stacked += max(low - stacked[0], 0) + min(high - stacked[-1], 0)
    for (_, text, colour), height in zip(rows, stacked, strict=True):
        annotate(axes, (end, float(height)), text, colour)


def save(figure: Figure, path: Path, theme: Theme, *, width: int = 1920) -> None:
    """Write the figure, a png `width` pixels wide in 256 colours; the same numbers give the same bytes."""
    with mpl.rc_context(theme.settings):
        if path.suffix == ".svg":
            figure.savefig(path, metadata={"Date": None})
            return
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=round(width / SIZE[0]))
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)
