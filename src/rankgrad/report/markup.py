"""HTML as text. Whatever comes from files goes through `text`, so that a label or a path can never be markup."""

import html
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Cell = str | tuple[str, str]
"""Markup of a cell, or that and the class of the cell."""

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"

# a page may hold pictures and styles of its own and can ask for nothing else, whatever a label says
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

Section = tuple[str, str, str]
"""Anchor, title and content."""


def text(value: object) -> str:
    """`value` as text of a page or of an attribute."""
    # neither control characters nor halves of surrogate pairs, which names of files may hold, are part of a page
    whole = str(value).encode("utf-8", "replace").decode("utf-8")
    return html.escape("".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in whole))


def element(tag: str, *content: str, **attributes: object) -> str:
    """<tag attributes>content</tag>; `content` is markup. `class_` loses its underscore, others become `-`."""
    opening = tag
    for name, value in attributes.items():
        if value is not None:
            opening += f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
    return f"<{opening}>{''.join(content)}</{tag}>"


def paragraph(*content: str, class_: str | None = None) -> str:
    """<p>; `content` is markup."""
    return element("p", *content, class_=class_)


def absent(reason: str) -> str:
    """What stands where something cannot be shown."""
    return paragraph(text(reason), class_="absent")


def table(header: Sequence[Cell], rows: Iterable[Sequence[Cell]], *, class_: str = "") -> str:
    """A table that scrolls sideways on its own where it is too wide. The first cell of a row is its heading."""
    head = "".join(_cell("th", cell, scope="col") for cell in header)
    body = "".join(
        "<tr>"
        + "".join(_cell("td" if column else "th", cell, scope=None if column else "row") for column, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return element(
        "div",
        element("table", f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", class_=class_ or None),
        class_="wide",
        role="region",
        aria_label="table",
        tabindex=0,
    )


def _cell(tag: str, cell: Cell, *, scope: str | None) -> str:
    content, kind = cell if isinstance(cell, tuple) else (cell, "")
    return element(tag, content, scope=scope, class_=kind or None)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent without its sign, as the papers print it."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}"


def signed(points: float, digits: int = 1) -> str:
    """Points of percent with their sign; what rounds to nothing has none."""
    shown = f"{abs(points):.{digits}f}"
    if not float(shown):
        return shown
    return f"{'+' if points > 0 else MINUS}{shown}"


def number(value: float) -> str:
    """A number as short as it can be read: thousands set apart, four digits of a fraction."""
    if not math.isfinite(value):
        return NOTHING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", MINUS)
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}").replace("-", MINUS)


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 query`, `1,200 queries`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def shortened(name: str, most: int) -> str:
    """`name` with its middle left out where it is too long: beginnings and ends tell runs apart."""
    if len(name) <= most:
        return name
    front = (most - 1) // 2
    return f"{name[:front]}\N{HORIZONTAL ELLIPSIS}{name[-(most - 1 - front) :]}"


def document(title: str, about: str, sections: Iterable[Section]) -> str:
    """One HTML document of the sections that have a content."""
    shown = [section for section in sections if section[2]]
    links = "".join(element("li", element("a", text(name), href=f"#{anchor}")) for anchor, name, _ in shown)
    body = "".join(element("section", element("h2", text(name)), content, id=anchor) for anchor, name, content in shown)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)} \N{MIDDLE DOT} rankgrad report</title><style>{style}</style></head><body>"
        + element("nav", element("ul", links), aria_label="Sections")
        + element(
            "main",
            element("header", element("h1", text(title)), paragraph(text(about))),
            body,
            element("footer", text(f"rankgrad {_version()}. All numbers are read from the folders of the runs.")),
        )
        + "</body></html>\n"
    )


def _version() -> str:
    try:
        return version("rankgrad")
    except PackageNotFoundError:
        import rankgrad

        return rankgrad.__version__
