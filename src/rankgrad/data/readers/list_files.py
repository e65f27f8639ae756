"""Lists in text files, checked line by line: every error names its file and line, and the first ten are raised together."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import first_ten, plural, shorten
from rankgrad.data.table import path_complaint

# longer lines belong to another kind of file
MAX_LINE = 1 << 16
# 18 digits fit into int64
_INTEGER = re.compile(r"[0-9]{1,18}")


class ReadErrors:
    """What is wrong with the lists of a data set, collected to be raised as one error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._found: list[str] = []

    def add(self, where: str, message: str) -> None:
        self._found.append(f"{where}: {message}")

    def raise_if_any(self) -> None:
        """Raise a `ValueError` that lists the first ten, if there are any."""
        if self._found:
            raise ValueError(f"{self.name}: {plural(len(self._found), 'error')} in its lists:\n{first_ten(self._found)}")


def numbered_lines(path: Path, errors: ReadErrors) -> Iterator[tuple[int, str]]:
    """Number and text of each line with its line end; a byte order mark is dropped, a bad line is an error."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}:{number}"
            if len(raw) > MAX_LINE:
                errors.add(where, f"the line is longer than {MAX_LINE // 1024} KiB: this is not the expected list")
                return
            if b"\0" in raw:
                errors.add(where, "the line contains a NUL byte: this is not a text file")
                continue
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                errors.add(where, f"not UTF-8 at byte {error.start + 1} of the line ({raw[error.start : error.start + 1]!r})")
                continue
            yield number, text


def numbered_csv(path: Path, errors: ReadErrors) -> Iterator[tuple[int, list[str]]]:
    """First line number and cells of each non-empty row of a CSV file; a row that is not CSV is an error and ends it."""
    current = 0

    def texts() -> Iterator[str]:
        nonlocal current
        for current, text in numbered_lines(path, errors):  # noqa: B007 (read below, after a row is complete)
            yield text

    reader = csv.reader(texts(), strict=True)
    while True:
        start = current + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            errors.add(f"{path}:{start}", f"the row that begins here is not CSV ({error})")
            return
        if values:
            yield start, [value.strip() for value in values]


@dataclass(frozen=True)
class Column:
    """What one column of a list must contain.

    Attributes:
        name: as in the header or in the data set's description.
        kind: "integer" (not negative), "path" (below the data set's folder) or "text".
        unique: no value may come twice.
        choices: the values allowed; any if empty.
    """

    name: str
    kind: Literal["integer", "path", "text"] = "text"
    unique: bool = False
    choices: tuple[str, ...] = ()

    def complaint(self, value: str) -> str | None:
        """Why `value` is not allowed in this column; None if it is."""
        if self.kind == "integer" and not _INTEGER.fullmatch(value):
            return f"{self.name} must be an integer, got {shorten(value)}"
        if self.choices and value not in self.choices:
            return f"{self.name} must be one of {', '.join(self.choices)}, got {shorten(value)}"
        return path_complaint(value) if self.kind == "path" else None


@dataclass
class ParsedRows:
    """A list by columns, without its bad rows, and the line that each row came from."""

    path: Path
    lines: list[int] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)

    def integers(self, name: str) -> NDArray[np.int64]:
        return np.array([int(text) for text in self.texts[name]], dtype=np.int64)

    def where(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


def read_rows(
    path: Path, columns: Sequence[Column], errors: ReadErrors, *, header: bool = False, counted: bool = False
) -> ParsedRows:
    """A list of columns separated by white space.

    Args:
        path: the file.
        columns: the columns of a line. A single column may contain spaces.
        errors: collects what is wrong.
        header: the first line names the columns.
        counted: the very first line is the number of rows, as in DeepFashion.
    """

    def fields() -> Iterator[tuple[int, list[str]]]:
        for number, line in numbered_lines(path, errors):
            values = line.split() if len(columns) > 1 else [line.strip()]
            if values and values != [""]:
                yield number, values

    lines = fields()
    stated = None
    if counted:
        number, values = next(lines, (1, []))
        if len(values) == 1 and _INTEGER.fullmatch(values[0]):
            stated = int(values[0])
        else:
            errors.add(f"{path}:{number}", f"expected the number of rows, got {shorten(' '.join(values))}")
    if header:
        number, values = next(lines, (1, []))
        names = [column.name for column in columns]
        if values != names:
            errors.add(f"{path}:{number}", f"expected the header {' '.join(names)!r}, got {shorten(' '.join(values))}")
    rows = check_rows(path, lines, columns, errors)
    if stated is not None and stated != len(rows):
        errors.add(f"{path}:1", f"{stated:,} rows announced, {len(rows):,} found: the file is truncated or was changed")
    return rows


def check_rows(path: Path, lines: Iterable[tuple[int, list[str]]], columns: Sequence[Column], errors: ReadErrors) -> ParsedRows:
    """The numbered `lines` as columns; a malformed line is an error and left out."""
    rows = ParsedRows(path, texts={column.name: [] for column in columns})
    seen: dict[str, dict[str, int]] = {column.name: {} for column in columns if column.unique}
    for number, values in lines:
        complaint = _line_complaint(values, columns, seen, number)
        if complaint:
            errors.add(f"{path}:{number}", complaint)
            continue
        rows.lines.append(number)
        for column, value in zip(columns, values, strict=True):
            rows.texts[column.name].append(value)
    return rows


def _line_complaint(values: list[str], columns: Sequence[Column], seen: dict[str, dict[str, int]], number: int) -> str | None:
    if len(values) != len(columns):
        names = " ".join(column.name for column in columns)
        return f"{len(columns)} columns expected ({names}), got {len(values)}: {shorten(' '.join(values))}"
    for column, value in zip(columns, values, strict=True):
        complaint = column.complaint(value)
        if complaint:
            return complaint
        if column.unique:
            # 7 and 007 are one image
            key = str(int(value)) if column.kind == "integer" else value
            first = seen[column.name].setdefault(key, number)
            if first != number:
                return f"{column.name} {shorten(value)} is already listed in line {first}"
    return None


def as_labels(texts: Sequence[str]) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Labels and their names: integers as they are, without names; otherwise positions among the sorted distinct texts."""
    if all(map(_INTEGER.fullmatch, texts)):
        return np.array([int(text) for text in texts], dtype=np.int64), {}
    names, labels = positions(texts)
    return labels, dict(enumerate(names))


def positions(texts: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The distinct texts, sorted, and the position of each text among them."""
    names = tuple(sorted(set(texts)))
    place = {name: i for i, name in enumerate(names)}
    return names, np.array([place[text] for text in texts], dtype=np.int64)
