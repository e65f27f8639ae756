"""The site: Sphinx, furo and MyST. `make docs` builds it."""

import re
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import docstrings  # noqa: E402  beside this file
import generated_pages  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import rankgrad  # noqa: E402
from rankgrad.report.figures.pictures import PICTURES  # noqa: E402

project, author, copyright = "rankgrad", "the rankgrad authors", "the rankgrad authors"  # noqa: A001  Sphinx's name
version = release = rankgrad.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "generated/recipes.md"]
# `name` in a docstring is code, as in Markdown
default_role = "code"

html_theme = "furo"
html_title = f"rankgrad {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"footer_icons": [], "top_of_page_buttons": []}
html_copy_source = html_show_sourcelink = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
# torch says something of its own on some machines
nb_output_stderr = "remove"

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autosummary_generate = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
copybutton_exclude = ".linenos, .gp, .go"

INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
SECONDS = 5


def reachable_inventories() -> dict[str, tuple[str, str]]:
    """What names of other libraries link to. Without a network and without a copy of an earlier build, they stay plain text."""
    folder = HERE / "_build" / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, address in INVENTORIES.items():
        copy = folder / f"{name}.inv"
        if not copy.is_file():
            try:
                with urllib.request.urlopen(f"{address}objects.inv", timeout=SECONDS) as answer:
                    content = answer.read()
            except OSError:
                continue
            if not content.startswith(b"# Sphinx inventory"):
                continue
            copy.write_bytes(content)
        found[name] = (address, str(copy))
    return found


intersphinx_mapping = reachable_inventories()


def mark_drawings(app: Sphinx, doctree: nodes.document) -> None:
    """Give our own figures, which are drawn on white, a class that the style sheet inverts on a dark page."""
    for image in doctree.findall(nodes.image):
        if image["uri"].endswith(".svg") or Path(image["uri"]).stem in PICTURES:
            image["classes"].append("drawing")


def drop_empty_patterns(app: Sphinx, name: str, source: list[str]) -> None:
    """The contents leave room for pages that studies write; where there is none, Sphinx would warn."""
    if name == "index":
        lines = source[0].splitlines(keepends=True)
        source[0] = "".join(
            line for line in lines if not re.fullmatch(r"\w+\*\n", line) or any(HERE.glob(f"{line.strip()}.md"))
        )


def setup(app: Sphinx) -> None:
    """Pages that are made from the code, and docstrings as reStructuredText."""
    app.connect("source-read", drop_empty_patterns)
    app.connect("doctree-read", mark_drawings)
    generated_pages.write(HERE / "generated")
    app.connect("autodoc-process-docstring", docstrings.process, priority=100)
