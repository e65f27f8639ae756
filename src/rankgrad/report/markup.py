"""HTML as text. Everything read from files goes through `text`, so that a label or a path can never be markup."""

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Cell = str | tuple[str, str]
"""Markup of a cell, or that and the class of the cell."""

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"

# a page may contain images and styles of its own and request nothing else, whatever a label says
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

Section = tuple[str, str, str]
"""Anchor, title and content of a section."""


def text(value: object) -> str:
    """`value` as text of a page or of an attribute."""
    # file names may have control characters and lone surrogates, which a page must not
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
    """A placeholder for what cannot be shown."""
    return paragraph(text(reason), class_="absent")


def details(title: str, content: str, *, is_open: bool = False) -> str:
    """A part of the page that can be folded; `content` is markup."""
    summary = element("summary", text(title))
    return f"<details{' open' if is_open else ''}>{summary}{content}</details>"


def table(header: Sequence[Cell], rows: Iterable[Sequence[Cell]], *, class_: str = "") -> str:
    """A table that scrolls sideways if it is too wide. The first cell of a row is its heading."""
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
    """A fraction in percent without the percent sign, as papers print it."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}"


def signed(points: float, digits: int = 1) -> str:
    """Percentage points with their sign; what rounds to 0 has none."""
    shown = f"{abs(points):.{digits}f}"
    if not float(shown):
        return shown
    return f"{'+' if points > 0 else MINUS}{shown}"


def number(value: float) -> str:
    """A number in short: thousands separated, four significant digits of a fraction."""
    if not math.isfinite(value):
        return NOTHING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", MINUS)
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}").replace("-", MINUS)


def cut_middle(name: str, most: int) -> str:
    """`name` with its middle cut out if it is too long: beginnings and ends tell runs apart."""
    if len(name) <= most:
        return name
    front = (most - 1) // 2
    return f"{name[:front]}\N{HORIZONTAL ELLIPSIS}{name[-(most - 1 - front) :]}"


def document(
    title: str, about: str, sections: Iterable[Section], *, script: str = "", data: Iterable[tuple[str, str]] = ()
) -> str:
    """One HTML document of the sections that have content.

    Args:
        title: heading of the page.
        about: line below it.
        sections: parts of the page; those without content are left out.
        script: JavaScript that may run; nothing else on the page can.
        data: JSON for the script by name, escaped.
    """
    shown = [section for section in sections if section[2]]
    links = "".join(element("li", element("a", text(name), href=f"#{anchor}")) for anchor, name, _ in shown)
    body = "".join(element("section", element("h2", text(name)), content, id=anchor) for anchor, name, content in shown)
    policy = POLICY
    tail = "".join(f'<script type="application/json" id="data-{text(name)}">{block}</script>' for name, block in data)
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
        policy += f"; script-src 'sha256-{digest}'"
        tail += f"<script>{script}</script>"
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)} \N{MIDDLE DOT} rankgrad report</title><style>{style}</style></head><body>"
        + element("nav", element("ul", links), aria_label="Sections")
        + element(
            "main",
            element("header", element("h1", text(title)), paragraph(text(about))),
            body,
            element("footer", text(f"rankgrad {_version()}. All numbers are read from the run folders.")),
        )
        + f"{tail}</body></html>\n"
    )


def _version() -> str:
    try:
        return version("rankgrad")
    except PackageNotFoundError:
        import rankgrad

        return rankgrad.__version__
