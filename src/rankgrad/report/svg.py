"""Parts of charts: scales, the figure around them, axes, labels, boxes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankgrad.report.markup import element, number, text

WIDTH, HEIGHT = 400, 250
LEFT, TOP, BOTTOM = 40, 26, 38
LETTER = 7.0
"""Average width of a letter in units of the chart."""


@dataclass(frozen=True)
class Scale:
    """Maps `low` to `high` in the data onto `start` to `end` on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """About `about` round values inside the scale."""
        return log_ticks(self.low, self.high, about) if self.log else round_ticks(self.low, self.high, about)


def span(values: Sequence[float], *, room: float = 0.04) -> tuple[float, float]:
    """Ends of an axis for `values`, with some room, never of length 0; below 0 only if a value is."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    around = room * (high - low) or abs(low) / 2 or 0.5
    return (max(low - around, 0.0) if low >= 0 else low - around), high + around


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # a multiple carries the rounding of its step: 0.30000000000000004
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Powers of ten, with 2 and 5 times them where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        inside = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(inside) <= about:
            return inside
    return inside[:: math.ceil(len(inside) / about)]


def figure(
    title: str,
    about: str,
    described: str,
    drawn: Sequence[str],
    height: float,
    legend: Sequence[tuple[str, str]] = (),
    mark: str = "",
    class_: str = "",
) -> str:
    """A chart with its caption and legend. `legend` pairs names with colours, `mark` names the reference level."""
    keys = "".join(
        f'<span class="key"><svg viewBox="0 0 10 10" aria-hidden="true"><circle cx="5" cy="5" r="5" class="f-{colour}"/></svg>'
        f"{text(name)}</span>"
        for name, colour in legend
    )
    if mark:
        keys += (
            '<span class="key"><svg viewBox="0 0 10 10" aria-hidden="true"><line x1="0" x2="10" y1="5" y2="5" class="level"/>'
            f"</svg>{text(mark)}</span>"
        )
    return element(
        "figure",
        element("figcaption", element("b", text(title)), f" {text(about)}" if about else ""),
        element("div", keys, class_="legend") if keys else "",
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">'
        f"<title>{text(title)}</title><desc>{text(described)}</desc>{''.join(drawn)}</svg>",
        class_=f"chart {class_}".strip(),
    )


def axes(across: Scale, up: Scale, x: str, y: str, *, percent: bool, percent_x: bool = False) -> str:
    """Both axes with their names and horizontal grid lines."""
    ticks = across.ticks(6)
    factor = 100 if percent_x else 1
    names = [_tick_name(factor * tick, [factor * each for each in ticks]) for tick in ticks]
    named = "".join(
        label(name, across(tick), HEIGHT - BOTTOM + 15, "tick", "middle") for tick, name in zip(ticks, names, strict=True)
    )
    return levels(up, across.end, y, percent=percent) + named + below(x)


def levels(up: Scale, right: float, y: str, *, percent: bool) -> str:
    """Grid lines at round values up to `right`, and the name of the axis above them."""
    factor = 100 if percent else 1
    ticks = up.ticks(5)
    names = [_tick_name(factor * tick, [factor * each for each in ticks]) for tick in ticks]
    lines = "".join(
        f'<line x1="{LEFT}" x2="{right:.1f}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" class="grid"/>'
        + label(name, LEFT - 6, up(tick) + 4, "tick", "end")
        for tick, name in zip(ticks, names, strict=True)
    )
    return lines + label(y, 2, 12, "axis")


def below(x: str) -> str:
    """The name of the horizontal axis."""
    return label(x, LEFT, HEIGHT - 4, "axis")


def _tick_name(tick: float, all_ticks: Sequence[float]) -> str:
    largest = max((abs(each) for each in all_ticks), default=0.0)
    if largest >= 10_000:
        return f"{tick / 1000:g}k" if tick else "0"
    if 0 < largest < 1e-3:
        return f"{tick:.0e}".replace("e-0", "e-") if tick else "0"
    return number(tick)


def label(content: str, x: float, y: float, class_: str, anchor: str = "") -> str:
    """Text at a position, in a class of the style sheet."""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{class_}"{placed}>{text(content)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    """A filled rectangle with a tooltip."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" class="f-{colour}">'
        f"<title>{text(tip)}</title></rect>"
    )
