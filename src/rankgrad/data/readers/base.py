"""What all readers share: the value they return, where a data set is, which of its images exist, its published size."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import first_ten, plural, printable
from rankgrad.data.readers.list_files import Column, ParsedRows, ReadErrors, read_rows
from rankgrad.data.readers.records import Columns
from rankgrad.data.samplers import class_sizes
from rankgrad.data.table import Table, halves


@dataclass(frozen=True)
class SplitSize:
    """Images and classes of a split, and its queries where only some images are."""

    images: int
    classes: int
    queries: int | None = None

    def __str__(self) -> str:
        classes = f" of {self.classes:,} classes" if self.classes else ""
        queries = "" if self.queries is None else f", {self.queries:,} of them queries"
        return f"{self.images:,} images{classes}{queries}"

    @classmethod
    def of(cls, table: Table) -> "SplitSize":
        return cls(len(table), table.num_classes, None if table.is_query is None else int(table.is_query.sum()))


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set as its reader found it.

    Attributes:
        name: "sop".
        splits: "train" and the splits to test on.
        protocols: the splits to evaluate, each with the name of its protocol.
        ks: the k of R@k that the papers report for it.
        notes: what was found in this copy that its user should know: skipped or absent files, how it was split.
        split_seed: of random splits of its classes; None where classes are split in the order of their labels.
    """

    name: str
    splits: Mapping[str, Table]
    protocols: Mapping[str, str]
    ks: tuple[int, ...]
    notes: tuple[str, ...] = ()
    split_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.splits:
            raise ValueError(f"DataSet {self.name}: splits must not be empty")
        unknown = sorted(set(self.protocols) - set(self.splits))
        if unknown:
            raise ValueError(f"DataSet {self.name}: protocols for splits it does not have: {', '.join(unknown)}")


@dataclass(frozen=True)
class Reader:
    """How one data set is laid out on disk.

    Attributes:
        name: its name in recipes and on the command line.
        title: its full name.
        layout: what the folder must contain, and which archive it comes from.
        load: reads it.
        sizes: the size of each split when complete; several where several versions exist.
        needs_folder: False if it makes its images itself.
        takes_file: whether it may be a file.
        remarks: where papers and files differ.
    """

    name: str
    title: str
    layout: str
    load: Callable[["ReaderContext"], DataSet]
    sizes: Mapping[str, tuple[SplitSize, ...]] = field(default_factory=dict)
    needs_folder: bool = True
    takes_file: bool = False
    remarks: tuple[str, ...] = ()


class ReaderContext:
    """One reading of a data set: where it is, how strict to be, and what was found wrong or absent.

    Malformed lists are always an error. Absent images and other counts than published are one too, unless `partial`: then
    they are left out and listed in the notes.

    Args:
        reader: the data set.
        root: its folder or file.
        partial: accept an incomplete copy.
        split_seed: of the random split of classes where the data set has none; None: in the order of their labels.
        image_root: folder of the images that a CSV file lists; None: the folder of the file.
        columns: names of the columns of texts, images and labels.
    """

    def __init__(
        self,
        reader: Reader,
        root: Path,
        *,
        partial: bool,
        split_seed: int | None = 0,
        image_root: Path | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.reader, self.root, self.partial = reader, root, partial
        self.split_seed, self.image_root, self.columns = split_seed, image_root, columns or Columns()
        self.name = reader.name
        self.errors = ReadErrors(reader.name)
        self.notes: list[str] = []
        self._listed: dict[str, SplitSize] = {}
        self._missing: list[str] = []

    def folder(self, *marks: str) -> tuple[Path, str]:
        """The folder that contains one of `marks`, and which: the root itself or the only such folder below it."""
        for mark in marks:
            if (self.root / mark).exists():
                return self.root, mark
        with os.scandir(self.root) as entries:
            below = sorted(self.root / entry.name for entry in entries if entry.is_dir())
        found = [(folder, mark) for mark in marks for folder in below if (folder / mark).exists()]
        if not found:
            expected = " or ".join(marks)
            raise FileNotFoundError(
                f"{self.name}: {expected} is missing in {self.root} and in the folders directly below it. "
                f"Expected: {self.reader.layout}"
            )
        if len({folder for folder, _ in found}) > 1:
            places = ", ".join(printable(str(folder)) for folder, _ in found)
            raise ValueError(f"{self.name}: several folders below {self.root} qualify ({places}): name the one to read")
        return found[0]

    def file(self, path: Path) -> Path:
        """`path`, which must be a file."""
        if not path.is_file():
            raise FileNotFoundError(f"{self.name}: {path} is missing. Expected: {self.reader.layout}")
        return path

    def rows(self, path: Path, *columns: Column, header: bool = False, counted: bool = False) -> ParsedRows:
        return read_rows(self.file(path), columns, self.errors, header=header, counted=counted)

    def table(
        self,
        split: str,
        root: Path,
        paths: Sequence[str],
        labels: NDArray[np.int64],
        *,
        listed_at: ParsedRows | None = None,
        seen: bool = False,
        **known: Any,
    ) -> Table:
        """The table of a split without the images that are not on disk, which are remembered.

        `seen` says that the paths were found on disk in the first place.
        """
        self.errors.raise_if_any()
        table = Table(f"{self.name}/{split}", root, tuple(paths), labels, **known)
        self._listed[split] = SplitSize.of(table)
        if not len(table):
            raise ValueError(f"{self.name}: {root} has no images for {split!r}. Expected: {self.reader.layout}")
        found = np.ones(len(table), dtype=np.bool_) if seen else on_disk(root, table.paths)
        if found.all():
            return table
        for row in np.flatnonzero(~found).tolist():
            place = f" (listed at {listed_at.where(row)})" if listed_at else ""
            self._missing.append(f"{root / table.paths[row]}{place}")
        if not found.any():
            raise FileNotFoundError(
                f"{self.name}: none of the {len(table):,} images of {split} exist:\n{first_ten(self._missing)}\n"
                f"Expected: {self.reader.layout}"
            )
        return table.select(found)

    def split_classes(self, table: Table) -> dict[str, Table]:
        """Half of the classes as train and the other half as test, drawn with `split_seed` or in the order of their labels."""
        if table.num_classes < 2:
            raise ValueError(
                f"{self.name}: at least 2 classes are needed to train and test on, got {table.num_classes} in {table.root}"
            )
        train, test = halves(table, seed=self.split_seed)
        how = "the first by name" if self.split_seed is None else f"drawn at random with seed {self.split_seed}"
        self.notes.append(
            f"there is no split: {train.num_classes:,} classes train ({how}), the other {test.num_classes:,} test"
        )
        return {"train": replace(train, name=f"{self.name}/train"), "test": replace(test, name=f"{self.name}/test")}

    def finish(
        self,
        splits: Mapping[str, Table],
        *,
        protocols: Mapping[str, str],
        ks: tuple[int, ...],
        split_seed: int | None = None,
    ) -> DataSet:
        """The data set, after its images and counts were compared with what is published."""
        self.errors.raise_if_any()
        total = sum(size.images for size in self._listed.values())
        counts = [
            f"{split}: {self._listed[split]}; the complete one has {' or '.join(map(str, sizes))}"
            for split, sizes in self.reader.sizes.items()
            if split in self._listed and self._listed[split] not in sizes
        ]
        if not self.partial and (self._missing or counts):
            self._refuse(counts, total)
        if "train" in splits:
            self._check_overlap(splits)
        notes = [*self.notes, *_singletons(splits, protocols)]
        if counts:
            notes.append(f"partial copy, other counts than published:\n{first_ten(counts)}")
        if self._missing:
            missing = f"{len(self._missing):,} of {total:,} listed images"
            notes.append(f"left out {missing}, which do not exist:\n{first_ten(self._missing)}")
        return DataSet(self.name, splits, protocols, ks, tuple(notes), split_seed)

    def _check_overlap(self, splits: Mapping[str, Table]) -> None:
        """No image may be trained on and tested on; classes may, though the papers' are disjoint, so that is a note."""
        train = splits["train"]
        for split, table in splits.items():
            if split == "train":
                continue
            # with boxes, one file may contain images of several splits
            twice = set(train.paths) & set(table.paths) if table.boxes is None else set()
            if twice:
                images = plural(len(twice), "image is", "images are")
                raise ValueError(f"{self.name}: {images} both in train and in {split}:\n{first_ten(sorted(twice))}")
            shared = len(np.intersect1d(train.labels, table.labels))
            if shared:
                self.notes.append(f"{shared:,} of the {table.num_classes:,} classes of {split} are in train, too")

    def _refuse(self, counts: list[str], total: int) -> None:
        advice = "Complete it, or accept a partial copy with --partial (partial=True)."
        problems = [f"other counts than published:\n{first_ten(counts)}"] if counts else []
        if not self._missing:
            raise ValueError(f"{self.name}: {problems[0]}\n{advice}")
        problems.insert(0, f"{len(self._missing):,} of {total:,} images are missing:\n{first_ten(self._missing)}")
        raise FileNotFoundError(f"{self.name}: " + "\n".join([*problems, advice]))


def _singletons(splits: Mapping[str, Table], protocols: Mapping[str, str]) -> list[str]:
    """Notes on classes too small to train on, and on queries with nothing to find, which evaluation skips."""
    notes = []
    if "train" in splits and (alone := int((class_sizes(splits["train"].labels) == 1).sum())):
        classes = plural(alone, "class of train has", "classes of train have")
        notes.append(f"{classes} a single image: without a second one there is no positive pair")
    for split in protocols:
        lonely = _queries_without_positive(splits[split])
        if lonely:
            queries = plural(lonely, f"query of {split} has", f"queries of {split} have")
            skipped = "it" if lonely == 1 else "them"
            notes.append(f"{queries} no other image of the same class to find: evaluation skips {skipped}")
    return notes


def _queries_without_positive(table: Table) -> int:
    if table.ground_truth is not None:
        return 0
    if table.is_query is None or table.is_gallery is None:
        return int((class_sizes(table.labels) == 1).sum())
    classes, of_row = np.unique(table.labels, return_inverse=True)
    in_gallery = np.bincount(of_row[table.is_gallery], minlength=len(classes))
    # a query that is in the gallery itself does not find itself
    left = in_gallery[of_row] - table.is_gallery
    return int((table.is_query & (left == 0)).sum())


def on_disk(root: Path, paths: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the files exist: one listing per folder, since one call per file takes minutes on a network disk."""
    names: dict[str, frozenset[str]] = {}
    found = np.zeros(len(paths), dtype=np.bool_)
    for i, path in enumerate(paths):
        parent, _, name = path.rpartition("/")
        if parent not in names:
            names[parent] = _files(root / parent)
        found[i] = name in names[parent]
    return found


def _files(folder: Path) -> frozenset[str]:
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if entry.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
