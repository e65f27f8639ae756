"""Charts as inline SVG: lines, bars, histograms, scatter plots. Colours are CSS classes, so a chart follows the theme.

A chart is 400 units wide and is shown at about that many pixels, on a phone at 350, so its text stays readable. Marks have a
<title> for the pointer; the chart has a title and a description for screen readers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rankgrad.report.markup import cut_middle, number, text
from rankgrad.report.svg import BOTTOM, HEIGHT, LEFT, LETTER, TOP, WIDTH, Scale, axes, below, box, figure, label, levels, span

LABEL_LETTERS = 17
BAR_LETTERS = 24
LINE = 14
MAX_HOVERS = 80

# runs differ in colour and in dashes, for printing without colours
COLOURS = ("accent", "wrong", "other", "violet", "yellow", "red")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")


@dataclass(frozen=True)
class Series:
    """A curve: its points in order, NaN at gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "accent"
    dash: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Dot:
    """A point of a scatter plot; `about` is its tooltip, `item` the number of its table and its row there."""

    x: float
    y: float
    colour: str
    about: str = ""
    item: str = ""


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: one value for each series, NaN where there is none."""

    name: str
    values: Sequence[float]
    about: str = ""


@dataclass(frozen=True)
class Interval:
    """A value, its interval, and values to compare it with."""

    name: str
    value: float
    low: float
    high: float
    marks: Sequence[float] = ()


def colour_of(index: int) -> str:
    """The colour of a run."""
    return COLOURS[index % len(COLOURS)]


def dash_of(index: int) -> str:
    """The dashes of a run."""
    return DASHES[index % len(DASHES)]


def line(
    series: Sequence[Series],
    *,
    title: str,
    about: str = "",
    x: str,
    y: str,
    log_x: bool = False,
    percent: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
) -> str:
    """Curves over a common axis, each labelled at its end.

    Args:
        series: curves to draw; points that are not finite are gaps.
        title: title above the chart.
        about: sentence below the title.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        log_x: make the horizontal axis logarithmic.
        percent: show values, which are fractions, in percent.
        floor: lower end of the vertical axis, by default from the data.
        ceiling: upper end of it.
    """
    points = [(a, b) for curve in series for a, b in zip(curve.x, curve.y, strict=True) if math.isfinite(b)]
    low, high = span([b for _, b in points])
    low, high = low if floor is None else floor, high if ceiling is None else ceiling
    right = _room_for([curve.name for curve in series])
    first, last = (min(a for a, _ in points), max(a for a, _ in points)) if points else (0.0, 1.0)
    if first == last:
        first, last = (first / 2, last * 2) if log_x else span([first])
    across = Scale(first, last, LEFT, WIDTH - right, log_x)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    drawn = [axes(across, up, x, y, percent=percent), *(_curve(curve, across, up) for curve in series)]
    drawn += [_hovers(series, across, x, percent=percent), _names(series, across, up)]
    return figure(title, about, _described(series, percent=percent), drawn, HEIGHT)


def histogram(
    names: Sequence[str],
    series: Sequence[Series],
    *,
    title: str,
    about: str = "",
    x: str,
    y: str,
    marks: Sequence[float] = (),
    mark_name: str = "",
) -> str:
    """Vertical bars, a group for every name; `marks` are reference levels of the groups. Values are fractions."""
    highest = max([*(value for each in series for value in each.y), *marks, 1e-9])
    up = Scale(0, min(1.12 * highest, 1.0) if highest <= 1 else highest, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - 8) / len(names)
    thick = 0.78 * step / len(series)
    drawn = [levels(up, WIDTH - 8, y, percent=True), below(x)]
    stride = math.ceil(LETTER * (max(map(len, names)) + 1) / step)
    for place, name in enumerate(names):
        middle = LEFT + (place + 0.5) * step
        if place % stride == 0:
            drawn.append(label(name, middle, HEIGHT - BOTTOM + 15, "tick", "middle"))
        for index, each in enumerate(series):
            value = each.y[place]
            left = middle + (index - len(series) / 2) * thick
            tip = f"{each.name}: {100 * value:.1f}% at {name}"
            drawn.append(box(left, up(value), thick, up(0) - up(value), each.colour, tip))
        if marks and marks[place]:
            at = up(marks[place])
            tip = f"{mark_name}: {100 * marks[place]:.1f}% at {name}"
            drawn.append(
                f'<line x1="{middle - 0.46 * step:.1f}" x2="{middle + 0.46 * step:.1f}" y1="{at:.1f}" y2="{at:.1f}" '
                f'class="level"><title>{text(tip)}</title></line>'
            )
    described = "; ".join(f"{each.name}: " + _listed(names, each.y) for each in series)
    legend = [(each.name, each.colour) for each in series] if len(series) > 1 else []
    return figure(title, about, described, drawn, HEIGHT, legend, mark_name if marks else "")


def scatter(
    dots: Sequence[Dot],
    *,
    title: str,
    about: str = "",
    x: str = "",
    y: str = "",
    percent: bool = False,
    diagonal: bool = False,
    legend: Sequence[tuple[str, str]] = (),
    small: bool = False,
) -> str:
    """Points in the plane, without axes unless they are named."""
    bare = not x
    height = WIDTH - 40 if bare else HEIGHT
    values = [[dot.x for dot in dots], [dot.y for dot in dots]]
    ends = [span([*values[0], *values[1]])] * 2 if diagonal else [span(each) for each in values]
    across = Scale(*ends[0], 6 if bare else LEFT, WIDTH - (6 if bare else 14))
    up = Scale(*ends[1], height - (6 if bare else BOTTOM), 6 if bare else TOP)
    drawn = [] if bare else [axes(across, up, x, y, percent=percent, percent_x=percent)]
    if diagonal:
        drawn.append(
            f'<line x1="{across.start:.1f}" y1="{up.start:.1f}" x2="{across.end:.1f}" y2="{up.end:.1f}" class="mark"/>'
        )
    radius = 2.2 if small else 3
    for dot in dots:
        tip = f"<title>{text(dot.about)}</title>" if dot.about else ""
        item = f' data-item="{text(dot.item)}"' if dot.item else ""
        drawn.append(
            f'<circle cx="{across(dot.x):.1f}" cy="{up(dot.y):.1f}" r="{radius}" class="f-{dot.colour}"{item}>{tip}</circle>'
        )
    return figure(title, about, f"{len(dots):,} points", drawn, height, legend, class_="dots")


def bars(
    rows: Sequence[Bar],
    names: Sequence[str],
    *,
    title: str,
    about: str = "",
    colours: Sequence[str] = ("accent",),
    letters: int = 0,
) -> str:
    """Horizontal bars for one series, dots on a line for several; values are fractions.

    Args:
        rows: from top to bottom.
        names: of the series.
        title: title above the chart.
        about: sentence below the title.
        colours: colours of the series.
        letters: minimum width of the names of rows, to align charts side by side.
    """
    letters = min(max(letters, *(len(row.name) for row in rows)), BAR_LETTERS)
    left, height = 8 + LETTER * letters, 24 * len(rows) + 26
    across = Scale(0, 1, left, WIDTH - 44)
    drawn = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        at = across(tick)
        drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="18" y2="{height - 4}" class="grid"/>')
        drawn.append(label(f"{100 * tick:g}", at, 12, "tick", "middle"))
    for place, row in enumerate(rows):
        middle = 18 + 24 * place + 14
        drawn.append(
            f'<text x="{left - 8:.1f}" y="{middle + 4}" class="name" text-anchor="end">'
            f"{text(cut_middle(row.name, BAR_LETTERS))}"
            f"<title>{text(f'{row.name}: {row.about}')}</title></text>"
        )
        known = [(index, value) for index, value in enumerate(row.values) if math.isfinite(value)]
        if len(names) == 1 and known:
            value = known[0][1]
            tip = f"{row.name}: {100 * value:.1f}, {row.about}"
            drawn.append(box(left, middle - 7, across(value) - left, 14, colours[0], tip))
            drawn.append(label(f"{100 * value:.1f}", across(value) + 5, middle + 4, "value"))
        elif known:
            ends = across(min(value for _, value in known)), across(max(value for _, value in known))
            drawn.append(f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{middle}" y2="{middle}" class="link"/>')
            for index, value in known:
                tip = f"{row.name}, {names[index]}: {100 * value:.1f}, {row.about}"
                drawn.append(
                    f'<circle cx="{across(value):.1f}" cy="{middle}" r="5" class="f-{colours[index]}">'
                    f"<title>{text(tip)}</title></circle>"
                )
    described = "; ".join(f"{row.name}: {', '.join(f'{100 * value:.1f}' for value in row.values)}" for row in rows)
    legend = list(zip(names, colours, strict=True)) if len(names) > 1 else []
    return figure(title, about, described, drawn, height, legend)


def intervals(rows: Sequence[Interval], *, title: str, about: str = "", mark_name: str) -> str:
    """A dot for each value, a line for its interval, a tick for every value to compare with; all are fractions."""
    left, height = 18 + LETTER * max(len(row.name) for row in rows), 26 * len(rows) + 26
    ends = [end for row in rows for end in (row.value, row.low, row.high, *row.marks)]
    low, high = span(ends, room=0.08)
    across = Scale(low, min(high, 1.0), left, WIDTH - 12)
    drawn = []
    for tick in across.ticks(6):
        at = across(tick)
        drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="18" y2="{height - 4}" class="grid"/>')
        drawn.append(label(number(round(100 * tick, 6)), at, 12, "tick", "middle"))
    for place, row in enumerate(rows):
        middle = 18 + 26 * place + 15
        drawn.append(label(row.name, left - 8, middle + 4, "name", "end"))
        tip = f"{row.name}: {100 * row.value:.1f}, 95%: {100 * row.low:.1f} to {100 * row.high:.1f}"
        drawn.append(
            f'<g><line x1="{across(row.low):.1f}" x2="{across(row.high):.1f}" y1="{middle}" y2="{middle}" class="range"/>'
            f'<circle cx="{across(row.value):.1f}" cy="{middle}" r="4.5" class="f-accent"/><title>{text(tip)}</title></g>'
        )
        for mark in row.marks:
            at = across(mark)
            drawn.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 8}" y2="{middle + 8}" class="level">'
                f"<title>{text(f'{row.name}, {mark_name}: {100 * mark:.1f}')}</title></line>"
            )
    described = "; ".join(f"{row.name} {100 * row.value:.1f} ({100 * row.low:.1f} to {100 * row.high:.1f})" for row in rows)
    return figure(title, about, described, drawn, height, mark=mark_name if any(row.marks for row in rows) else "")


def _curve(curve: Series, across: Scale, up: Scale) -> str:
    parts: list[str] = []
    begins = True
    dots = []
    for a, b in zip(curve.x, curve.y, strict=True):
        if not math.isfinite(b):
            begins = True
            continue
        at = f"{across(a):.1f} {up(min(max(b, up.low), up.high)):.1f}"
        parts.append(("M" if begins else "L") + at)
        begins = False
        if curve.dots or len(curve.x) == 1:
            dots.append(at.split())
    dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
    marks = "".join(f'<circle cx="{a}" cy="{b}" r="3" class="f-{curve.colour}"/>' for a, b in dots)
    return f'<path d="{"".join(parts)}" class="curve s-{curve.colour}"{dash}/>{marks}'


def _hovers(series: Sequence[Series], across: Scale, x: str, *, percent: bool) -> str:
    """Vertical strips whose tooltips have the values of all curves."""
    places = sorted({value for curve in series for value in curve.x})
    places = places[:: math.ceil(len(places) / MAX_HOVERS) or 1]
    known = [dict(zip(curve.x, curve.y, strict=True)) for curve in series]
    edges = [across.start, *(_between(across, a, b) for a, b in pairwise(places)), across.end]
    strips = []
    for place, left, right in zip(places, edges, edges[1:], strict=False):
        told = [
            f"{curve.name}: {_value(values[place], percent=percent)}"
            for curve, values in zip(series, known, strict=True)
            if place in values and math.isfinite(values[place])
        ]
        if told:
            tip = "\n".join([f"{x} {number(place)}", *told])
            strips.append(
                f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.5):.1f}" height="{HEIGHT - BOTTOM - TOP}" '
                f'class="hover"><title>{text(tip)}</title></rect>'
            )
    return "".join(strips)


def _between(across: Scale, a: float, b: float) -> float:
    return (across(a) + across(b)) / 2


def _names(series: Sequence[Series], across: Scale, up: Scale) -> str:
    """Names beside the ends of curves, moved apart where they would overlap."""
    ends = []
    for curve in series:
        last = [b for b in curve.y if math.isfinite(b)]
        if last and curve.name:
            ends.append((up(min(max(last[-1], up.low), up.high)), curve))
    ends.sort(key=lambda end: end[0])
    heights = [height for height, _ in ends]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + LINE)
    over = max(heights[-1] - (HEIGHT - BOTTOM), 0) if heights else 0
    for index in reversed(range(len(heights))):
        limit = heights[index] - over if index == len(heights) - 1 else heights[index + 1] - LINE
        heights[index] = min(heights[index], limit)
    return "".join(
        f'<text x="{across.end + 6:.1f}" y="{height + 4:.1f}" class="name t-{curve.colour}">'
        f"{text(cut_middle(curve.name, LABEL_LETTERS))}</text>"
        for height, (_, curve) in zip(heights, ends, strict=True)
    )


def _room_for(names: Sequence[str]) -> float:
    return 12 + LETTER * min(max((len(name) for name in names), default=0), LABEL_LETTERS)


def _described(series: Sequence[Series], *, percent: bool) -> str:
    """First and last value of each curve as text."""
    told = []
    for curve in series:
        known = [b for b in curve.y if math.isfinite(b)]
        if known:
            first, last = (_value(value, percent=percent) for value in (known[0], known[-1]))
            told.append(f"{curve.name or 'curve'} from {first} to {last}")
    return "; ".join(told) or "no points"


def _value(value: float, *, percent: bool) -> str:
    return f"{100 * value:.1f}%" if percent else number(value)


def _listed(names: Sequence[str], values: Sequence[float]) -> str:
    return ", ".join(f"{name} {100 * value:.1f}%" for name, value in zip(names, values, strict=True))
