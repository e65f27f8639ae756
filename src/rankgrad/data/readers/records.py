"""Rows of named columns from a CSV, JSON lines or parquet file, or from a folder that `datasets` saved."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankgrad._messages import install_hint, shorten
from rankgrad.data.readers.list_files import ReadErrors, numbered_csv, numbered_lines

FILE_TYPES = (".csv", ".jsonl", ".parquet")
# what `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write
SAVED_MARKS = ("dataset_info.json", "dataset_dict.json")
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test"}


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold what is trained on.

    Attributes:
        text: texts.
        label: their classes, or those of images.
        pair: texts that belong together, in place of text and label.
        image: images.
    """

    text: str = "text"
    label: str = "label"
    pair: tuple[str, ...] = ("anchor", "positive")
    image: str = "image"

    def are_pairs(self, names: Sequence[str]) -> bool:
        """Whether a file with these columns holds pairs."""
        return not {self.text, self.label} <= set(names) and len(self.pair) == 2 and set(self.pair) <= set(names)

    def are_texts(self, names: Sequence[str]) -> bool:
        """Whether a file with these columns holds texts."""
        return {self.text, self.label} <= set(names) or self.are_pairs(names)


@dataclass
class Records:
    """Rows by column.

    Attributes:
        place: the file or folder.
        columns: values by name.
        lines: where each row is, for messages: the number of its line, or of the row.
        split: of the rows, "" where the file does not say.
    """

    place: Path
    columns: dict[str, list[Any]]
    lines: list[int]
    split: str = ""

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, row: int) -> str:
        return f"{self.place}:{self.lines[row]}"


def is_saved_dataset(place: Path) -> bool:
    """Whether `datasets` saved this folder."""
    return any((place / mark).is_file() for mark in SAVED_MARKS)


def column_names(place: Path) -> list[str]:
    """Names of the columns; [] where the file cannot be read, which reading it will explain."""
    try:
        if is_saved_dataset(place):
            first = place if (place / SAVED_MARKS[0]).is_file() else next(place.glob(f"*/{SAVED_MARKS[0]}")).parent
            return list(json.loads((first / SAVED_MARKS[0]).read_text(encoding="utf-8"))["features"])
        if place.suffix.lower() == ".parquet":
            from pyarrow import parquet  # type: ignore[import-untyped]

            return list(parquet.read_schema(place).names)
        if place.suffix.lower() == ".jsonl":
            return list(json.loads(next(numbered_lines(place, ReadErrors("")))[1]))
        return next(numbered_csv(place, ReadErrors("")))[1]
    except (OSError, ValueError, KeyError, TypeError, ImportError, StopIteration):
        return []


def read_records(place: Path, errors: ReadErrors) -> list[Records]:
    """All rows; a saved dataset may have several splits."""
    if place.is_dir():
        return list(_saved(place))
    if place.suffix.lower() == ".parquet":
        return [_parquet(place)]
    return [_json_lines(place, errors) if place.suffix.lower() == ".jsonl" else _csv(place, errors)]


def _csv(place: Path, errors: ReadErrors) -> Records:
    lines = numbered_csv(place, errors)
    _, header = next(lines, (1, []))
    found = Records(place, {name: [] for name in header}, [])
    for number, values in lines:
        if len(values) != len(header):
            errors.add(f"{place}:{number}", f"{len(header)} columns expected ({','.join(header)}), got {len(values)}")
            continue
        found.lines.append(number)
        for name, value in zip(header, values, strict=True):
            found.columns[name].append(value)
    errors.raise_if_any()
    return found


def _json_lines(place: Path, errors: ReadErrors) -> Records:
    found = Records(place, {}, [])
    for number, line in numbered_lines(place, errors):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            errors.add(f"{place}:{number}", f"the line is not JSON ({error})")
            continue
        if not isinstance(row, dict) or (found.columns and set(row) != set(found.columns)):
            wanted = f" with {', '.join(found.columns)}" if found.columns else ""
            errors.add(f"{place}:{number}", f"each line must be an object{wanted}, got {shorten(line.strip())}")
            continue
        found.lines.append(number)
        for name, value in row.items():
            found.columns.setdefault(name, []).append(value)
    errors.raise_if_any()
    return found


def _parquet(place: Path) -> Records:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ModuleNotFoundError(f"{place} needs pyarrow: {install_hint('search')}", name="pyarrow") from None
    try:
        table = parquet.read_table(place)
    except ArrowException as error:
        raise ValueError(f"{place} is not a parquet file ({error})") from None
    return Records(place, {name: table[name].to_pylist() for name in table.column_names}, list(range(1, len(table) + 1)))


def _saved(place: Path) -> Iterator[Records]:
    for split, rows in load_saved(place).items():
        features: Mapping[str, Any] = rows.features
        columns = {}
        for name in rows.column_names:
            values = rows[name][:] if not hasattr(features[name], "decode_example") else [None] * len(rows)
            names = getattr(features[name], "names", None)
            columns[name] = [names[value] if value is not None and value >= 0 else "" for value in values] if names else values
        yield Records(place, columns, list(range(1, len(rows) + 1)), split)


def load_saved(place: Path) -> Mapping[str, Any]:
    """The splits of a folder that `datasets` saved, by our names; "" for a dataset without splits."""
    try:
        import datasets
    except ImportError:
        raise ModuleNotFoundError(f"{place} needs datasets: {install_hint('hugging-face')}", name="datasets") from None
    if not is_saved_dataset(place):
        raise FileNotFoundError(f"{place} is not a folder that `datasets` saved: it has neither {' nor '.join(SAVED_MARKS)}")
    found = datasets.load_from_disk(str(place))
    if not isinstance(found, datasets.DatasetDict):
        return {"": found}
    unknown = [name for name in found if name not in SPLIT_NAMES]
    if unknown:
        raise ValueError(f"{place}: its splits must be train, validation or test, got {', '.join(map(str, found))}")
    return {SPLIT_NAMES[str(name)]: rows for name, rows in found.items()}
