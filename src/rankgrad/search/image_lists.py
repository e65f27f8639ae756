"""Lists of images or texts to embed: of a folder, a file, or a split of a data set, with the names of their classes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import shorten
from rankgrad.data.readers import READERS, Columns, read
from rankgrad.data.readers.folder_tree import EXTENSIONS, images_below
from rankgrad.data.readers.list_files import ReadErrors, numbered_csv
from rankgrad.data.readers.manifest import BOX, absolute_path_hint, path_below
from rankgrad.data.readers.records import FILE_TYPES, read_records
from rankgrad.data.table import Table, path_complaint

COLUMNS = ("path", "label", "category", *BOX)


@dataclass(frozen=True, eq=False)
class ImageList:
    """Images and the names of what they show.

    Attributes:
        table: the images.
        labels: [N] names of their classes, "" where there is none.
        categories: [N] names of their categories, "" where there is none.
    """

    table: Table
    labels: tuple[str, ...]
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        lengths = len(self.table), len(self.labels), len(self.categories)
        if len(set(lengths)) != 1:
            raise ValueError(f"ImageList: images, labels and categories must be equally many, got {lengths}")

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def label_codes(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """The distinct labels in order, and [N] the position of each image's label among them."""
        names = tuple(sorted(set(self.labels)))
        number = {name: place for place, name in enumerate(names)}
        return names, np.fromiter(map(number.__getitem__, self.labels), np.int64, len(self))

    def select(self, rows: Sequence[int]) -> "ImageList":
        """Some of them, in the order given."""
        labels, categories = (tuple(names[row] for row in rows) for names in (self.labels, self.categories))
        return ImageList(self.table.select(rows), labels, categories)


def folder_of_images(folder: Path) -> ImageList:
    """All images below `folder`, in the order of their paths; symbolic links are followed, hidden files are skipped.

    The class of an image is the folder it is in, none if that is `folder` itself.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give a folder of images, a CSV file that lists them, or --data")
    paths = list(images_below(folder))
    if not paths:
        raise ValueError(f"{folder} holds no image: wanted are files that end in {', '.join(sorted(EXTENSIONS))}")
    table = Table(folder.name or "images", folder, tuple(paths), np.full(len(paths), -1, np.int64))
    return ImageList(table, names_by_folder(paths), ("",) * len(paths))


def images_at(places: Sequence[Path]) -> ImageList:
    """The images that files and folders hold, in the order of `places`; files need no particular ending."""
    if len(places) == 1 and places[0].is_dir():
        return folder_of_images(places[0])
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            table = folder_of_images(place).table
            files += [(table.root / path).absolute() for path in table.paths]
        elif place.is_file():
            files.append(place.absolute())
        else:
            raise FileNotFoundError(f"{place} does not exist or is not a file: name images or folders of images")
    root = Path(os.path.commonpath([path.parent for path in files]))
    paths = tuple(path.relative_to(root).as_posix() for path in files)
    name = places[0].stem if len(places) == 1 else "images"
    table = Table(name, root, paths, np.full(len(paths), -1, np.int64))
    return ImageList(table, ("",) * len(paths), ("",) * len(paths))


def names_by_folder(paths: list[str]) -> tuple[str, ...]:
    """The name of the folder that each path is in, with the folders above it where two have the same name."""
    parents = [path.rpartition("/")[0] for path in paths]
    last = {parent: parent.rpartition("/")[2] for parent in parents}
    unambiguous = len(set(last.values())) == len(last)
    return tuple(last[parent] if unambiguous else parent for parent in parents)


def manifest_of_images(path: Path, image_root: Path | None = None) -> ImageList:
    """Images listed in a CSV file with the column path and, where there are any, label, category and boxes.

    Paths are relative to the file, or to `image_root`, inside which they may also be absolute.
    """
    if image_root is not None:
        image_root = image_root.expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a CSV file with the column path")
    errors = ReadErrors(path.name)
    lines = numbered_csv(path, errors)
    _, header = next(lines, (1, []))
    errors.raise_if_any()
    if "path" not in header:
        raise ValueError(
            f"{path}:1: the header must name the column path (and may name {', '.join(COLUMNS[1:])}), "
            f"got {shorten(','.join(header))}"
        )
    rows: list[dict[str, str]] = []
    boxes: list[list[float]] = []
    for number, values in lines:
        if len(values) != len(header):
            errors.add(f"{path}:{number}", f"{len(header)} columns expected ({','.join(header)}), got {len(values)}")
            continue
        row = dict(zip(header, values, strict=True))
        row["path"] = path_below(image_root, row["path"])
        complaint = path_complaint(row["path"])
        if complaint:
            errors.add(f"{path}:{number}", f"{complaint}{absolute_path_hint(image_root, row['path'])}")
        try:
            boxes.append([float(row[name]) if row.get(name) else np.nan for name in BOX])
        except ValueError:
            given = ", ".join(row[name] for name in BOX)
            errors.add(f"{path}:{number}", f"{', '.join(BOX)} must be numbers or empty, got {given}")
        rows.append(row)
    errors.raise_if_any()
    if not rows:
        raise ValueError(f"{path} lists no image")
    table = Table(
        path.stem,
        image_root or path.parent,
        tuple(row["path"] for row in rows),
        np.full(len(rows), -1, np.int64),
        boxes=np.array(boxes) if any(name in header for name in BOX) else None,
    )
    return ImageList(table, *(tuple(row.get(name, "") for row in rows) for name in ("label", "category")))


def listed_texts(texts: Sequence[str], labels: Sequence[str] | None = None, name: str = "texts") -> ImageList:
    """Texts as a list; `labels` are the names of their classes, "" where there is none."""
    paths = tuple(f"row-{number}" for number in range(len(texts)))
    table = Table(name, Path(), paths, np.full(len(texts), -1, np.int64), texts=tuple(texts))
    return ImageList(table, tuple(labels or [""] * len(texts)), ("",) * len(texts))


def texts_of_file(place: Path, columns: Columns) -> ImageList:
    """The texts of a file or saved dataset, with their labels where it has them; of pairs every text."""
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist: give a file of texts that ends in {', '.join(FILE_TYPES)}")
    errors = ReadErrors(place.name)
    texts: list[str] = []
    labels: list[str] = []
    for part in read_records(place, errors):
        wanted = [name for name in (columns.text, *columns.pair) if name in part.columns]
        if not wanted:
            raise ValueError(
                f"{place} must have the column {columns.text}, or {' and '.join(columns.pair)}, got "
                f"{shorten(', '.join(part.columns))}: name it with --text-column"
            )
        used = wanted[:1] if wanted[0] == columns.text else wanted
        for row in range(len(part)):
            own = [str(part.columns[name][row] or "").strip() for name in used]
            if not all(own):
                errors.add(part.where(row), f"{used[own.index('')]} is empty")
            texts += own
            label = part.columns[columns.label][row] if columns.label in part.columns else ""
            labels += ["" if label is None else str(label)] * len(own)
    errors.raise_if_any()
    if not texts:
        raise ValueError(f"{place} has no rows: a text in each is wanted")
    return listed_texts(texts, labels, place.stem)


def split_of_data_set(
    named: str,
    split: str,
    *,
    partial: bool = False,
    split_seed: int | None = 0,
    image_root: Path | None = None,
    columns: Columns | None = None,
) -> tuple[ImageList, tuple[str, ...]]:
    """A split of `sop:DIR`, and the notes of its reader.

    A class has the name of the folder of its images where each class has its own folder, else its number.
    """
    name, colon, place = named.partition(":")
    if name not in READERS or (not colon and READERS[name].needs_folder):
        raise ValueError(f"--data must be NAME:DIR with NAME one of {', '.join(READERS)}, got {named!r}")
    root = Path(place) if place else None
    data_set = read(name, root, partial=partial, split_seed=split_seed, image_root=image_root, columns=columns)
    if split not in data_set.splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(data_set.splits)}")
    table = data_set.splits[split]
    names = ("", *table.category_names)
    categories = ("",) * len(table) if table.categories is None else tuple(names[i + 1] for i in table.categories.tolist())
    return ImageList(table, _class_names(table), categories), data_set.notes


def _class_names(table: Table) -> tuple[str, ...]:
    labels = table.labels.tolist()
    if table.class_names:
        return tuple(table.class_name(label) for label in labels)
    if table.texts is not None:
        return tuple(map(table.class_name, labels))
    parents = [path.rpartition("/")[0] for path in table.paths]
    if len(set(zip(labels, parents, strict=True))) == len(set(labels)) == len(set(parents)) and -1 not in labels:
        return names_by_folder(list(table.paths))
    return tuple(map(table.class_name, labels))
