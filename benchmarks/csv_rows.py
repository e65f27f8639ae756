"""Rows as aligned text and as lines of a CSV file that grows from run to run."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows under their column names; numbers are aligned to the right, columns without a value left out."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if any(row[name] for row in rows)}
    width = {name: max(len(name), *map(len, values)) for name, values in columns.items()}
    is_numeric = {name: all(_is_number(value) for value in values if value) for name, values in columns.items()}

    def line(row: Mapping[str, str]) -> str:
        cells = (row[name].rjust(width[name]) if is_numeric[name] else row[name].ljust(width[name]) for name in columns)
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width[name] for name in columns)
    return "\n".join([line({name: name for name in columns}), rule, *map(line, rows)])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Adds the rows to the file, which must have the same columns if it exists."""
    columns = list(rows[0])
    known = path.exists() and path.stat().st_size > 0
    if known:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != columns:
            raise ValueError(f"{path}: columns {columns} wanted, but the file has {found}: give a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not known:
            writer.writeheader()
        writer.writerows(rows)
