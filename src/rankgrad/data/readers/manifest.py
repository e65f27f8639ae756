"""Your own images as a CSV file: path, label, split, and what else is known. Reads files made for open-metric-learning."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext
from rankgrad.data.readers.list_files import ParsedRows, as_labels, numbered_csv, positions
from rankgrad.data.table import Table, path_complaint

SPLITS = ("train", "validation", "test")
REQUIRED = ("path", "label")
BOX = ("x_1", "y_1", "x_2", "y_2")
KNOWN = (*REQUIRED, "split", "category", "is_query", "is_gallery", *BOX)
# pandas writes 1.0 for a flag in a column with empty cells
FLAGS = {"": False, "true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def read_csv(context: ReaderContext) -> DataSet:
    """A line per image; without a column split, half of the classes train and the others test."""
    path = _manifest(context)
    rows = _read(context, path)
    rows.texts["path"] = [path_below(context.image_root, text) for text in rows.texts["path"]]
    _check(rows, context)
    context.errors.raise_if_any()
    if not len(rows):
        raise ValueError(f"{context.name}: {path} lists no images")
    columns = _columns(rows)
    if "split" in rows.texts:
        named = np.array(rows.texts["split"])
        splits = {
            split: _table(context, split, rows, columns, np.flatnonzero(named == split)) for split in SPLITS if split in named
        }
    else:
        splits = context.split_classes(_table(context, "all", rows, columns, np.arange(len(rows))))
    protocols = {
        split: "all-vs-all" if table.is_query is None else "query-gallery"
        for split, table in splits.items()
        if split != "train"
    }
    if not protocols:
        context.notes.append("there are only training images: nothing to evaluate on")
    return context.finish(splits, protocols=protocols, ks=(1, 10, 100), split_seed=context.split_seed)


def _manifest(context: ReaderContext) -> Path:
    if context.root.is_file():
        return context.root
    if (context.root / "dataset.csv").is_file():
        return context.root / "dataset.csv"
    found = sorted(context.root.glob("*.csv"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise FileNotFoundError(
            f"{context.name}: {context.root} must contain dataset.csv or a single CSV file, got {names}: name the file"
        )
    return found[0]


def _read(context: ReaderContext, path: Path) -> ParsedRows:
    lines = numbered_csv(path, context.errors)
    _, header = next(lines, (1, []))
    _check_header(context, path, header)
    rows = ParsedRows(path, texts={name: [] for name in header})
    for number, values in lines:
        if len(values) != len(header):
            complaint = f"{len(header)} columns expected ({','.join(header)}), got {len(values)}: {shorten(','.join(values))}"
            context.errors.add(f"{path}:{number}", complaint)
            continue
        rows.lines.append(number)
        for name, value in zip(header, values, strict=True):
            rows.texts[name].append(value)
    ignored = [name for name in header if name not in KNOWN]
    if ignored:
        context.notes.append(f"ignored columns: {', '.join(map(repr, ignored))}")
    return rows


def _check_header(context: ReaderContext, path: Path, header: list[str]) -> None:
    # a bad first line is reported rather than a missing header
    context.errors.raise_if_any()
    absent = [name for name in REQUIRED if name not in header]
    if any(name in header for name in ("is_query", "is_gallery")):
        absent += [name for name in ("split", "is_query", "is_gallery") if name not in header]
    if any(name in header for name in BOX):
        absent += [name for name in BOX if name not in header]
    if absent:
        hint = " (columns are separated by commas)" if len(header) == 1 else ""
        raise ValueError(
            f"{context.name}: {path}:1: the header lacks {', '.join(absent)}, got {shorten(','.join(header))}{hint}. "
            f"Expected: {context.reader.layout}"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise ValueError(f"{context.name}: {path}:1: columns named twice: {', '.join(twice)}")


def path_below(image_root: Path | None, path: str) -> str:
    """`path` relative to `image_root` where it is absolute and inside, else as it is."""
    if image_root is None or not path.startswith("/"):
        return path
    absolute = PurePosixPath(path)
    return str(absolute.relative_to(image_root)) if absolute.is_relative_to(image_root) else path


def absolute_path_hint(image_root: Path | None, path: str) -> str:
    """What to do about a path that was refused."""
    if not path.startswith("/"):
        return ""
    if image_root is None:
        return "; name the folder that absolute paths start with by --image-root DIR"
    return f"; --image-root is {image_root}"


def _check(rows: ParsedRows, context: ReaderContext) -> None:
    errors = context.errors
    first: dict[tuple[str, ...], int] = {}
    keys = [rows.texts[name] for name in ("path", *BOX) if name in rows.texts]
    for i, line in enumerate(rows.lines):
        values = {name: texts[i] for name, texts in rows.texts.items()}
        complaint = path_complaint(values["path"])
        if complaint:
            errors.add(rows.where(i), f"{complaint}{absolute_path_hint(context.image_root, values['path'])}")
        for complaint in _complaints(values):
            errors.add(rows.where(i), complaint)
        before = first.setdefault(tuple(key[i] for key in keys), line)
        if before != line:
            errors.add(rows.where(i), f"path {shorten(values['path'])} is already listed in line {before}")


def _complaints(values: dict[str, str]) -> Iterator[str]:
    if not values["label"]:
        yield "label is empty"
    if values.get("split", SPLITS[0]) not in SPLITS:
        yield f"split must be one of {', '.join(SPLITS)}, got {shorten(values['split'])}"
    for name in ("is_query", "is_gallery"):
        if values.get(name, "").lower() not in FLAGS:
            yield f"{name} must be true, false or empty, got {shorten(values[name])}"
    if BOX[0] in values and any(values[name] for name in BOX):
        box = [_number(values[name]) for name in BOX]
        if not (all(map(math.isfinite, box)) and 0 <= box[0] < box[2] and 0 <= box[1] < box[3]):
            cells = ", ".join(values[name] for name in BOX)
            yield f"a box must have 0 <= x_1 < x_2 and 0 <= y_1 < y_2 (or be empty), got {shorten(cells)}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _columns(rows: ParsedRows) -> dict[str, Any]:
    labels, class_names = as_labels(rows.texts["label"])
    columns: dict[str, Any] = {"labels": labels, "class_names": class_names}
    categories = rows.texts.get("category", [])
    if any(categories):
        # the empty name sorts first, so that unlabelled becomes -1
        names, places = positions(["", *categories])
        columns["categories"], columns["category_names"] = places[1:] - 1, names[1:]
    if BOX[0] in rows.texts:
        cells = [[_number(cell) for cell in rows.texts[name]] for name in BOX]
        columns["boxes"] = np.array(cells, dtype=np.float64).T
    for name in ("is_query", "is_gallery"):
        if name in rows.texts:
            columns[name] = np.array([FLAGS[flag.lower()] for flag in rows.texts[name]], dtype=np.bool_)
    return columns


def _table(context: ReaderContext, split: str, rows: ParsedRows, columns: dict[str, Any], index: NDArray[np.int64]) -> Table:
    listed_at = ParsedRows(rows.path, [rows.lines[i] for i in index])
    known = {name: values if name.endswith("_names") else values[index] for name, values in columns.items()}
    labels = known.pop("labels")
    if "is_query" in known:
        _check_flags(context, split, listed_at, known)
    paths = [rows.texts["path"][i] for i in index]
    return context.table(split, context.image_root or rows.path.parent, paths, labels, listed_at=listed_at, **known)


def _check_flags(context: ReaderContext, split: str, listed_at: ParsedRows, known: dict[str, Any]) -> None:
    """Drop the flags where they say nothing: in train, where all are empty, where every image is both."""
    is_query, is_gallery = known["is_query"], known["is_gallery"]
    both = bool(is_query.all() and is_gallery.all())
    if split == "train" or both or not (is_query.any() or is_gallery.any()):
        del known["is_query"], known["is_gallery"]
        return
    for i in np.flatnonzero(~(is_query | is_gallery)).tolist():
        context.errors.add(listed_at.where(i), f"an image of {split} must be a query or in the gallery, this one is neither")
    for name, flags in (("is_query", is_query), ("is_gallery", is_gallery)):
        if not flags.any():
            context.errors.add(str(listed_at.path), f"{split} has no image with {name}")


CSV = Reader(
    name="csv",
    title="your images, listed in a CSV file",
    layout=f"columns path,label and optionally split ({', '.join(SPLITS)}), category, is_query, is_gallery, {', '.join(BOX)}; "
    "paths are relative to the file, or to the folder given as --image-root",
    load=read_csv,
    takes_file=True,
)
