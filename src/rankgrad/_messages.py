"""Text for people: tables, sizes, durations, lists cut short, names that were meant, and progress."""

import difflib
import importlib
import importlib.util
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any, TextIO

FIRST = 10
# characters of a column whose cells are broken, however narrow the terminal is
LEAST_COLUMN = 30
# seconds between two lines of progress where there is no terminal
BETWEEN_LINES = 10.0
_NUMBER = re.compile(r"[-+±~<>]?\s?\d[\d,.:]*(e[-+]?\d+)?( ?[%A-Za-zµ/]+)?( ± [\d,.]+)?|-|nan")


def printable(text: str) -> str:
    """The text with control characters escaped, so that a file or class name cannot drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str | None = None,
    indent: str = "",
    width: int | None = None,
) -> str:
    """Aligned columns under their names, two spaces apart.

    Args:
        header: names of the columns.
        rows: cells; control characters in them are escaped.
        align: "l" or "r" for each column. By default a column of numbers is aligned to the right, with or without a unit.
        indent: put before each line.
        width: of a line; cells of the last column are broken at spaces to fit. By default lines are as long as they must be.
    """
    if width is not None:
        rows = _broken(header, rows, width - len(indent))
    lines = _aligned(header, rows, align)
    return "\n".join(f"{indent}{'  '.join(line).rstrip()}" for line in lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str | None = None) -> str:
    """The same as a Markdown table, whose source is aligned, too."""
    header, rows = [_escape(cell) for cell in header], [[_escape(cell) for cell in row] for row in rows]
    sides = align or _sides(header, rows)
    names, *body = _aligned(header, rows, sides)
    rule = [f"{'-' * (len(name) - 1)}{'-' if side == 'l' else ':'}" for name, side in zip(names, sides, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rule, *body))


def drop_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows without the columns that are "" or "-" in every row."""
    kept = [i for i in range(len(header)) if any(row[i] not in ("", "-") for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def did_you_mean(name: str, known: Collection[str], *, otherwise: str | None = None, most: int = 1, cutoff: float = 0.6) -> str:
    """The end of a sentence about an unknown name: `did you mean 'sop'?`, or what there is to choose from.

    Args:
        name: what was given.
        known: what would have been right.
        otherwise: said when nothing is similar, in place of the list of all names.
        most: names to propose.
        cutoff: similarity from 0 to 1 that a proposal needs.
    """
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    if near:
        # a flag is typed as it stands
        return f"did you mean {', '.join(each if each.startswith('-') else repr(each) for each in near)}?"
    return f"choose one of {', '.join(known)}" if otherwise is None else otherwise


def install_hint(extra: str) -> str:
    """How to install what an extra of pyproject.toml brings, from a clone or from the package index."""
    return f"pip install -e '.[{extra}]' in a clone of rankgrad, or pip install 'rankgrad[{extra}]'"


def shorten(value: object, width: int = 80) -> str:
    """A value as Python writes it, on one line and cut to `width` characters."""
    text = repr(value)
    return printable(text if len(text) <= width else f"{text[: width - 3]}...")


def first_ten(entries: Sequence[str]) -> str:
    """The first ten entries, one a line, and how many more there are."""
    lines = [f"  {printable(entry)}" for entry in entries[:FIRST]]
    if len(entries) > FIRST:
        lines.append(f"  and {len(entries) - FIRST:,} more")
    return "\n".join(lines)


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """`1 image`, `2,000 images`."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def format_bytes(count: float) -> str:
    """`512 B`, `1.5 MiB`, `80.0 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def format_duration(seconds: float) -> str:
    """`3.2 ms`, `4.1 s`, `48 s`, `12 min 3 s`, `5 h 20 min`."""
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def format_clock(seconds: float) -> str:
    """`0:48`, `12:03`, `5:20:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Counts up to `total` on standard error: a bar on a terminal, an occasional line elsewhere.

        with Progress(len(images), "embedding", unit="images") as progress:
            progress.advance(256)

    Without a terminal nothing is printed in the first `BETWEEN_LINES` seconds, so quick work stays quiet.

    Args:
        total: what is to be done.
        name: what it is called.
        unit: what is counted, in the plural.
        done: what was done before.
        shown: False prints nothing.
        delay: seconds before a bar appears, so that quick work stays quiet on a terminal, too.
        stream: where to print, standard error by default.
    """

    def __init__(
        self,
        total: int,
        name: str,
        *,
        unit: str,
        done: int = 0,
        shown: bool = True,
        delay: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.name, self.unit, self.done, self.shown = total, name, unit, done, shown
        self._stream = stream or sys.stderr
        self._first, self._start = done, time.perf_counter()
        self._printed = self._start
        self._note = ""
        self._bar: Any = None
        if shown and self._stream.isatty() and importlib.util.find_spec("tqdm") is not None:
            tqdm = importlib.import_module("tqdm").tqdm
            self._bar = tqdm(
                total=total, initial=done, desc=name, unit=f" {unit}", file=self._stream, dynamic_ncols=True, delay=delay
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Adds `count`; `note` is shown beside the count until another one comes."""
        self.done += count
        self._note = note or self._note
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
            return
        now = time.perf_counter()
        if self.shown and now - self._printed >= BETWEEN_LINES:
            self._printed = now
            self._print(self._line(now))

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._print(line)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, now: float) -> str:
        rate = (self.done - self._first) / max(now - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        parts = [f"{self.name}: {self.done:,} of {self.total:,} {self.unit}", self._note, f"{format_clock(left)} left"]
        return ", ".join(part for part in parts if part)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _broken(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """`rows`, the last cell of each on as many lines as it needs; the other cells of the further lines are empty."""
    taken = sum(max(_width(printable(row[i])) for row in (header, *rows)) + 2 for i in range(len(header) - 1))
    broken = []
    for *cells, last in rows:
        first, *more = textwrap.wrap(
            last, max(width - taken, LEAST_COLUMN), break_long_words=False, break_on_hyphens=False
        ) or [""]
        broken += [[*cells, first], *([*[""] * len(cells), line] for line in more)]
    return broken


def terminal_width() -> int:
    """Columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], align: str | None) -> list[list[str]]:
    sides = align or _sides(header, rows)
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    return [[_pad(cell, width, side) for cell, width, side in zip(row, widths, sides, strict=True)] for row in cells]


def _sides(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = [[row[i] for row in rows if row[i]] for i in range(len(header))]
    return "".join("r" if column and all(map(_NUMBER.fullmatch, column)) else "l" for column in columns)


def _pad(cell: str, width: int, side: str) -> str:
    space = " " * (width - _width(cell))
    return f"{cell}{space}" if side == "l" else f"{space}{cell}"


def _width(text: str) -> int:
    """Columns on a terminal: East Asian characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")
