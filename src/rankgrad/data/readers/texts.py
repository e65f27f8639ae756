"""Your own texts: text and label, or pairs of texts that belong together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import first_ten, plural, shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext
from rankgrad.data.readers.list_files import as_labels
from rankgrad.data.readers.records import FILE_TYPES, Records, is_saved_dataset, read_records
from rankgrad.data.table import Table

SPLITS = ("train", "validation", "test")


def read_texts(context: ReaderContext) -> DataSet:
    """A row per text or pair; without splits, half of the classes train and the others test."""
    parts = [part for part in read_records(_place(context), context.errors) if len(part)]
    if not parts:
        raise ValueError(f"{context.name}: {context.root} has no rows. Expected: {context.reader.layout}")
    for part in parts:
        _check_columns(context, part)
    table, split_of = _table(context, parts)
    context.errors.raise_if_any()
    if any(split_of):
        named = np.array(split_of)
        splits = {
            split: replace(table.select(named == split), name=f"{context.name}/{split}") for split in SPLITS if split in named
        }
    else:
        splits = context.split_classes(table)
    if "train" in splits:
        splits["train"] = replace(splits["train"], is_query=None, is_gallery=None)
    _note_repeats(context, table)
    protocols = {
        split: "all-vs-all" if part.is_query is None else "query-gallery" for split, part in splits.items() if split != "train"
    }
    if not protocols:
        context.notes.append("there are only training texts: nothing to evaluate on")
    return context.finish(splits, protocols=protocols, ks=(1, 10, 100), split_seed=context.split_seed)


def _place(context: ReaderContext) -> Path:
    root = context.root
    if root.is_file():
        if root.suffix.lower() not in FILE_TYPES:
            raise ValueError(f"{context.name}: {root} must end in {', '.join(FILE_TYPES)}. Expected: {context.reader.layout}")
        return root
    if is_saved_dataset(root):
        return root
    found = sorted(path for kind in FILE_TYPES for path in root.glob(f"*{kind}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise FileNotFoundError(
            f"{context.name}: {root} must contain a single file of texts, got {names}: name the file. "
            f"Expected: {context.reader.layout}"
        )
    return found[0]


def _check_columns(context: ReaderContext, part: Records) -> None:
    columns = context.columns
    if not columns.are_texts(list(part.columns)):
        raise ValueError(
            f"{context.name}: {part.place} must have the columns {columns.text} and {columns.label}, or "
            f"{' and '.join(columns.pair)} for pairs, got {shorten(', '.join(part.columns))}; name them with --text-column, "
            "--label-column or --pair-columns"
        )


def _table(context: ReaderContext, parts: list[Records]) -> tuple[Table, list[str]]:
    """All texts, and the split of each."""
    texts: list[str] = []
    labels: list[str] = []
    names: list[str] = []
    splits: list[str] = []
    is_anchor: list[bool] = []
    columns, pairs = context.columns, context.columns.are_pairs(list(parts[0].columns))
    for part in parts:
        wanted = columns.pair if pairs else (columns.text, columns.label)
        own_splits = part.columns.get("split")
        seen: set[str] = set()
        for row, values in enumerate(zip(*(part.columns[name] for name in wanted), strict=True)):
            first, second = (_text(context, part, row, *pair) for pair in zip(wanted, values, strict=True))
            split = part.split or ("" if own_splits is None else str(own_splits[row]))
            if (part.split or own_splits is not None) and split not in SPLITS:
                context.errors.add(part.where(row), f"split must be one of {', '.join(SPLITS)}, got {shorten(split)}")
            name = f"{split or 'row'}-{part.lines[row]}"
            if not pairs:
                added = [(first, second, name, False)]
            else:
                # pairs with the same anchor belong together: the anchor is one text
                added = [(second, first, f"{name}-{columns.pair[1]}", False)]
                if first not in seen:
                    added.insert(0, (first, first, f"{name}-{columns.pair[0]}", True))
                    seen.add(first)
            for text, label, named, anchor in added:
                texts.append(text)
                labels.append(label)
                names.append(named)
                is_anchor.append(anchor)
                splits.append(split)
    marks: dict[str, Any] = {}
    if pairs:
        anchors: NDArray[np.bool_] = np.array(is_anchor)
        marks = {"is_query": anchors, "is_gallery": ~anchors}
    codes, class_names = as_labels(labels)
    known = {"class_names": class_names, "texts": tuple(texts), **marks}
    return context.table("all", context.root, names, codes, seen=True, **known), splits


def _text(context: ReaderContext, part: Records, row: int, name: str, value: Any) -> str:
    text = "" if value is None else str(value).strip()
    if not text:
        context.errors.add(part.where(row), f"{name} is empty")
    return text


def _note_repeats(context: ReaderContext, table: Table) -> None:
    assert table.texts is not None
    first: dict[str, int] = {}
    repeated, contradictory = 0, []
    for text, label in zip(table.texts, table.labels.tolist(), strict=True):
        before = first.setdefault(text, label)
        repeated += before == label
        if before != label:
            contradictory.append(f"{shorten(text)}: {table.class_name(before)} and {table.class_name(label)}")
    repeated -= len(first)
    if repeated and table.is_query is None:
        context.notes.append(f"{plural(repeated, 'text is', 'texts are')} listed more than once with the same label")
    if contradictory:
        context.notes.append(
            f"{plural(len(contradictory), 'text has', 'texts have')} several labels:\n{first_ten(contradictory)}"
        )


TEXTS = Reader(
    name="texts",
    title="your texts, in a file or a saved `datasets` folder",
    layout=f"a {', '.join(FILE_TYPES)} file or a folder of `datasets.save_to_disk` with the columns text,label or "
    f"anchor,positive and optionally split ({', '.join(SPLITS)})",
    load=read_texts,
    takes_file=True,
)
