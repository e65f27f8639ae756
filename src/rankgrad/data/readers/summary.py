"""What `rankgrad check-data` prints: the splits of a data set, their classes, what is published, what to know."""

from collections.abc import Sequence

import numpy as np

from rankgrad.data.readers.base import DataSet, Reader, SplitSize
from rankgrad.data.table import Table


def describe(reader: Reader, data: DataSet) -> str:
    """The data set as a text of aligned columns."""
    places = dict.fromkeys(str(table.root) for table in data.splits.values() if table.pixels is None)
    header = ["split", "images", "classes", "categories", "queries", "gallery", "smallest", "median", "largest", "protocol"]
    body = [[split, *_figures(table), data.protocols.get(split, "-")] for split, table in data.splits.items()]
    # a column that no split has anything to say in is left out
    kept = [i for i in range(len(header)) if any(row[i] != "-" for row in body)]
    lines = [f"{reader.name}: {reader.title}", *(f"in {place}" for place in places), ""]
    lines += _aligned([[row[i] for i in kept] for row in [header, *body]])
    if "smallest" in (header[i] for i in kept):
        lines.append("smallest, median, largest: images of a class")
    lines += ["", *_published(reader, data)]
    for note in data.notes:
        lines += ["", f"note: {note}"]
    return "\n".join(lines).rstrip()


def _figures(table: Table) -> list[str]:
    of_class = table.labels[table.labels != -1]
    counts = np.unique(of_class, return_counts=True)[1]
    categories = None if table.categories is None else len(np.unique(table.categories[table.categories >= 0]))
    spread = (counts.min(), np.median(counts), counts.max()) if len(counts) else (None, None, None)
    flags = [None if flag is None else flag.sum() for flag in (table.is_query, table.is_gallery)]
    return [_number(value) for value in (len(table), table.num_classes or None, categories, *flags, *spread)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,g}" if value < 1e5 else f"{int(value):,}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # names to the left, numbers to the right
    left = (0, len(widths) - 1)
    return [
        "  ".join(
            cell.ljust(width) if i == left[0] or (i == left[1] and rows[0][i] == "protocol") else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _published(reader: Reader, data: DataSet) -> list[str]:
    lines = []
    for split, sizes in reader.sizes.items():
        got = SplitSize.of(data.splits[split]) if split in data.splits else None
        verdict = "as published" if got in sizes else "differs"
        lines.append(f"expected {split}: {' or '.join(map(str, sizes))}: {verdict}")
    return lines or ["expected: nothing is published, any counts are right"]
