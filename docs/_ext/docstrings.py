"""Our docstrings hold indented examples and Markdown tables; reStructuredText wants both announced."""

import re
from typing import Any

SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Examples?|Notes?):$")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite `lines` in place, before napoleon reads its sections."""
    if str(getattr(obj, "__module__", "")).startswith("rankgrad"):
        lines[:] = [re.sub(r"(?<!`)\|(\w[^|`]*)\|", r"\|\1\|", line) for line in _tables(_examples(lines))]


def _examples(lines: list[str]) -> list[str]:
    """Indented paragraphs outside of sections become blocks of code."""
    found: list[str] = []
    in_section = in_block = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if line and not indented:
            in_section, in_block = bool(SECTION.match(line)), False
        starts = indented and not in_section and not in_block and number > 0 and not lines[number - 1].strip()
        if starts:
            in_block = True
            is_python = re.search(r"\brg\.|\bimport\b|^\s+(class|def|with|for) |\w\(.*\)|^\s+\w+ = ", line)
            is_command = line.strip().startswith(("rankgrad ", "python ", "pip ", "torchrun "))
            found += [f".. code-block:: {'sh' if is_command else 'python' if is_python else 'text'}", ""]
        found.append(line)
    return found


def _tables(lines: list[str]) -> list[str]:
    """Markdown tables become list-tables."""
    found: list[str] = []
    rows: list[list[str]] = []

    def flush() -> None:
        if not rows:
            return
        head, *body = [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
        found.extend(["", ".. list-table::", "   :header-rows: 1", ""])
        for row in (head, *body):
            found.extend(f"   {'* -' if column == 0 else '  -'} {cell}" for column, cell in enumerate(row))
        found.append("")
        rows.clear()

    for line in lines:
        if re.match(r"\s*\|.*\|\s*$", line):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        else:
            flush()
            found.append(line)
    flush()
    return found
