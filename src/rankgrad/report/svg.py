"""The parts that all charts are made of: the figure around them, axes, labels, boxes."""

from collections.abc import Sequence

from rankgrad.report.markup import element, number, text
from rankgrad.report.scales import Scale

WIDTH, HEIGHT = 400, 250
LEFT, TOP, BOTTOM = 40, 26, 38
LETTER = 7.0
"""Units that a letter of a chart takes, on average."""


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
    """A chart with its caption and legend. `legend` pairs names with colours, `mark` names the level to compare with."""
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
    """Both axes, their names and lines to read heights by."""
    ticks = across.ticks(6)
    factor = 100 if percent_x else 1
    names = [_tick_name(factor * tick, [factor * each for each in ticks]) for tick in ticks]
    named = "".join(
        label(name, across(tick), HEIGHT - BOTTOM + 15, "tick", "middle") for tick, name in zip(ticks, names, strict=True)
    )
    return levels(up, across.end, y, percent=percent) + named + below(x)


def levels(up: Scale, right: float, y: str, *, percent: bool) -> str:
    """Lines at round heights from the left edge to `right`, and the name of the axis above them."""
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
    """Text at a place, in a class of the style sheet."""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{class_}"{placed}>{text(content)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    """A filled rectangle that tells `tip` when it is pointed at."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" class="f-{colour}">'
        f"<title>{text(tip)}</title></rect>"
    )
