"""What the site makes from the code, and that its contents list every page."""

import fnmatch
import importlib.util
import re

import pytest
from pages.command_lines import ROOT

import rankgrad as rg
from rankgrad.recipes.catalogue import RECIPES

DOCS = ROOT / "docs"


def extension(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_and_every_recipe_is_listed():
    pytest.importorskip("lightning")
    pytest.importorskip("sentence_transformers")
    pages = extension("generated_pages")
    text = "\n".join(pages.api_pages().values())
    listed = re.findall(r"^\.\. auto(?:class|function):: (\w+)$", text, flags=re.MULTILINE)
    assert set(rg.__all__) <= set(listed)
    recipes = re.findall(r"^\| `([\w.-]+)` \|", pages.recipes_page(), flags=re.MULTILINE)
    assert sorted(recipes) == sorted(RECIPES)


def test_measured_numbers_are_those_of_the_file():
    page = extension("generated_pages").recipes_page()
    for name, measured in (("smooth-ap", "89.3 ± 0.1"), ("recall-at-k-simix", "87.2 ± 0.3")):
        (row,) = re.findall(rf"^\| `omniglot-{name}` .*$", page, flags=re.MULTILINE)
        assert f"[R@1 {measured}](../benchmarks/results/omniglot-" in row


def test_the_contents_list_every_page():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    pages = {name for name in pages if not name.startswith(("_build", "generated"))}
    listed = set()
    for index in (DOCS / "index.md", DOCS / "integrations" / "index.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(encoding="utf-8"), flags=re.DOTALL):
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            names = [(index.parent / entry).relative_to(DOCS).as_posix() for entry in entries]
            listed |= {page for name in names for page in fnmatch.filter(pages, name) or [name] if "*" not in page}
    assert pages - listed == {"index"}
    assert listed - pages == {"generated/api", "generated/glyphs"}


def test_docstrings_become_restructured_text():
    lines = [
        "Sums |x| of parts.",
        "",
        "    total = sum(parts)",
        "",
        "| a | b |",
        "| --- | --- |",
        "| 1 | 2 |",
        "",
        "Args:",
        "    x: one.",
    ]
    extension("docstrings").process(None, "class", "Name", rg.RankLoss, None, lines)
    text = "\n".join(lines)
    assert "\\|x\\|" in text
    assert ".. code-block:: python\n\n    total = sum(parts)" in text
    assert "   * - a\n     - b\n   * - 1\n     - 2" in text
    assert text.endswith("Args:\n    x: one.")
