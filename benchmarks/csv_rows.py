"""Rows as aligned text and as lines of a CSV file that grows from run to run."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankgrad._messages import drop_empty_columns, table


def text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows under their column names, without columns that have no value."""
    return table(*drop_empty_columns(list(rows[0]), [list(row.values()) for row in rows]))


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Adds the rows to the file, which must have the same columns if it exists."""
    columns = list(rows[0])
    known = path.exists() and path.stat().st_size > 0
    if known:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != columns:
            raise ValueError(f"{path} has the columns {found}, expected {columns}: choose another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not known:
            writer.writeheader()
        writer.writerows(rows)
