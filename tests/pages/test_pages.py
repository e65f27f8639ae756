"""Every Python block and every command line of the README and the site runs, page by page, in a folder with tiny data.

In a page, `python` blocks share their names from top to bottom. What a block needs and a reader does not is in a comment:

    <!--- invisible-code-block: python
    model = torch.nn.Linear(8, 4)
    -->

A block that cannot run here is preceded by `<!--- skip: next "reason" -->`. Blocks marked `text` are output.
"""

import contextlib
import re
from pathlib import Path
from unittest import SkipTest

import pytest
from pages import command_lines

pytest.importorskip("sybil")

ROOT = command_lines.ROOT
SOURCES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path for path in SOURCES if not set(path.parts) & {"_build", "generated"}}
LANGUAGES = {"python", "sh", "text", "toml"}


def run_commands(example) -> None:
    for line in command_lines.lines_of(example.parsed):
        command_lines.run(line)


@pytest.mark.parametrize("name", PAGES)
# libraries that the pages use warn about themselves
@pytest.mark.filterwarnings("default")
def test_a_page_runs(name: str, page_folder: Path):
    from sybil import Document
    from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

    parsers = (PythonCodeBlockParser(), CodeBlockParser("sh", run_commands), SkipParser())
    for example in Document.parse(str(PAGES[name]), *parsers).examples():
        with contextlib.suppress(SkipTest):
            example.evaluate()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_its_blocks_are_and_why_one_is_skipped(name: str):
    text = PAGES[name].read_text()
    fences = re.findall(r"^ *(`{3,})(.*)\n(?:.*\n)*?^ *\1 *$", text, flags=re.MULTILINE)
    unknown = [language for _, language in fences if not language.startswith("{") and language not in LANGUAGES]
    assert not unknown, f"mark each block with one of {sorted(LANGUAGES)}, got {unknown}"
    assert all(re.search(r'"\w.{10,}"', line) for line in re.findall(r"^<!-+ *skip: (?!end).*", text, flags=re.MULTILINE))
