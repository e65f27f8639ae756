"""`python -m benchmarks.plot`: time and memory against the batch size, from the rows of `python -m benchmarks.kernels`."""

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "recall_at_k": "Recall@k surrogate (RS@k)",
    "smooth_ap": "Smooth-AP",
    "fast_ap": "FastAP",
    "rambo_recall": "RaMBO recall",
    "rambo_ap": "RaMBO AP",
}
ENDS = ("out of memory", "over the limit")
"""How the notes of rows begin where a formulation did not fit."""


@dataclass(frozen=True)
class Style:
    """A curve: which rows it takes, its name, and its looks. The colours are Okabe and Ito's, told apart by all eyes."""

    what: tuple[str, ...]
    precision: str
    label: str
    colour: str
    marker: str
    line: str = "-"
    width: float = 1.8


STYLES = (
    Style(("dense", "sorted-rows"), "float32", "all scores at once, float32", "#D55E00", "s"),
    Style(("chunked",), "float16", "row chunks, torch.compile, float16", "#E69F00", "^"),
    Style(("ours",), "high", "rankgrad, high precision", "#56B4E9", "D", width=2.6),
    Style(("ours",), "fast", "rankgrad, fast", "#0072B2", "o", width=2.6),
    Style(("floor",), "float16", "matrix products alone, float16", "#000000", "", "--", 1.4),
)


@dataclass(frozen=True)
class Curve:
    """Points of a formulation in order of N, and the first size that did not fit."""

    style: Style
    points: Sequence[tuple[int, float, float | None]]  # N, milliseconds, megabytes
    end: int | None


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture; returns 1 where the file has nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    add = parser.add_argument
    add("csv", type=Path, metavar="CSV", help="file that `python -m benchmarks.kernels` wrote")
    add("out", type=Path, metavar="OUT", help="picture, .svg or .png")
    add("--loss", default="recall_at_k", choices=TITLES, help="of %(choices)s (default: %(default)s)")
    add("--relevant", default="3", help="relevant items of a query (default: %(default)s)")
    add("--dim", default="512", help="embedding size (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        with options.csv.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as problem:
        parser.error(str(problem))
    curves = curves_of(rows, options.loss, options.relevant, options.dim)
    if not any(curve.style.what == ("ours",) for curve in curves):
        print(f"python -m benchmarks.plot: {options.csv} has no times of {options.loss} to draw", file=sys.stderr)
        return 1
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("python -m benchmarks.plot: this needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    mpl.use("agg")
    subtitle = f"forward + backward, d = {options.dim}, {options.relevant} relevant items per query, {rows[-1]['gpu']}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, TITLES[options.loss], subtitle, options.out)
    print(options.out)
    return 0


def curves_of(rows: Sequence[dict[str, str]], loss: str, relevant: str, dim: str) -> list[Curve]:
    """The curves of a loss on the GPU measured last, each point as it was measured last."""
    latest = {
        (row["row"], row["precision"], int(row["N"])): row
        for row in rows
        if row["gpu"] == rows[-1]["gpu"] and row["N"].isdecimal() and (row["relevant"], row["d"]) == (relevant, dim)
    }
    curves = []
    for style in STYLES:
        names = {f"{'products' if what == 'floor' else loss}/{what}" for what in style.what}
        mine = {n: row for (name, precision, n), row in latest.items() if name in names and precision == style.precision}
        points = [
            (n, float(row["ms"]), float(row["MB"]) if row["MB"] else None) for n, row in sorted(mine.items()) if row["ms"]
        ]
        if points:
            failed = [n for n, row in mine.items() if row["note"].startswith(ENDS) and n > points[-1][0]]
            curves.append(Curve(style, points, min(failed, default=None)))
    return curves


def draw(curves: Sequence[Curve], title: str, subtitle: str, path: Path) -> None:
    """Two panels side by side, time and memory, both axes logarithmic."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    looks: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.size": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#444444",
        "xtick.color": "#444444",
        "ytick.color": "#444444",
        "svg.hashsalt": "rankgrad",  # the same picture gives the same file
    }
    with mpl.rc_context(looks):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.6))
        for curve in curves:
            _draw_curve(left, curve, [(n, ms) for n, ms, _ in curve.points])
            _draw_curve(right, curve, [(n, mb) for n, _, mb in curve.points if mb])
        sizes = sorted({n for curve in curves for n, *_ in curve.points})
        for axes, name, units in (
            (left, "time", ((1e3, "s"), (1.0, "ms"), (1e-3, "µs"))),
            (right, "memory beyond inputs and gradient", ((1e3, "GB"), (1.0, "MB"), (1e-3, "kB"))),
        ):
            _axes(axes, sizes, units)
            axes.set_title(name, loc="left", fontsize=13, color="#222222", pad=10)
        figure.suptitle(title, x=0.075, y=0.98, ha="left", fontsize=18, fontweight="bold")
        figure.text(0.075, 0.895, subtitle, fontsize=12, color="#444444", va="center")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False, handlelength=2.6, columnspacing=2.4)
        figure.subplots_adjust(left=0.075, right=0.975, top=0.80, bottom=0.235, wspace=0.2)
        metadata: dict[str, str | None] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=160, metadata=metadata)
        plt.close(figure)


def _draw_curve(axes: "Axes", curve: Curve, points: Sequence[tuple[int, float]]) -> None:
    if not points:
        return
    style = curve.style
    sizes, values = zip(*points, strict=True)
    axes.plot(
        sizes,
        values,
        style.line,
        color=style.colour,
        linewidth=style.width,
        marker=style.marker,
        markersize=7,
        markeredgecolor="white",
        markeredgewidth=1,
        label=style.label,
        zorder=3 if style.what == ("ours",) else 2,
    )
    if curve.end is None:
        return
    # the end: a cross over the last size that fitted
    axes.plot(sizes[-1:], values[-1:], "X", color=style.colour, markersize=15, markeredgecolor="white", zorder=4)
    axes.annotate(
        f"out of memory\nat {curve.end:,}",
        (sizes[-1], values[-1]),
        # above the other curves, which go on to the right below it
        xytext=(-4, 12),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=11,
        color=style.colour,
        fontweight="bold",
    )


def _axes(axes: "Axes", sizes: Sequence[int], units: Sequence[tuple[float, str]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    def in_units(value: float, _position: int | None = None) -> str:
        factor, unit = next((unit for unit in units if value >= 0.999 * unit[0]), units[-1])
        return f"{value / factor:g} {unit}"

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = [n for n in sizes if n & (n - 1) == 0 and n.bit_length() % 2] or list(sizes)  # powers of 4
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(in_units))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("items in the batch, N")
    axes.grid(which="major", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)
    axes.margins(x=0.06, y=0.08)
    axes.set_ylim(top=3 * axes.get_ylim()[1])  # room for what stands above a cross


if __name__ == "__main__":
    sys.exit(main())
