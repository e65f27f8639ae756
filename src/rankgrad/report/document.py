"""The frame of a page: sections in order with links to them, one style sheet, no script, nothing from elsewhere."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rankgrad.report.markup import element, paragraph, text

# a page may hold pictures and styles of its own and can ask for nothing else, whatever a label says
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

Section = tuple[str, str, str]
"""Anchor, title and content."""


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
