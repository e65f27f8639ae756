"""What all readers share: the value they return, where a data set lies, which of its images are there, its published size."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.readers.list_files import Column, ParsedRows, ReadErrors, listing, read_rows
from rankgrad.data.table import Table


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
        splits: "train" and whatever there is to test on.
        protocols: the splits to evaluate, each with the name of its protocol.
        ks: the k of R@k that the papers report for it.
        notes: what its user should know: what is absent, where papers and files differ.
    """

    name: str
    splits: Mapping[str, Table]
    protocols: Mapping[str, str]
    ks: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.splits:
            raise ValueError(f"DataSet {self.name}: at least one split wanted, got none")
        unknown = sorted(set(self.protocols) - set(self.splits))
        if unknown:
            raise ValueError(f"DataSet {self.name}: protocols for splits it does not have: {', '.join(unknown)}")


@dataclass(frozen=True)
class Reader:
    """How one data set lies on disk.

    Attributes:
        name: what it is called in recipes and on the command line.
        title: its full name.
        layout: what the folder must hold, and which archive brings it.
        load: reads it.
        sizes: what each split holds when complete; several where several versions are around.
        needs_folder: False when it makes its images itself.
    """

    name: str
    title: str
    layout: str
    load: Callable[["ReaderContext"], DataSet]
    sizes: Mapping[str, tuple[SplitSize, ...]] = field(default_factory=dict)
    needs_folder: bool = True


class ReaderContext:
    """One reading of a data set: where it is, how strict to be, and what was found wrong or absent on the way.

    Malformed lists are always an error. Absent images and other counts than published are one too, unless `partial`: then
    they are left out and stated in the notes.
    """

    def __init__(self, reader: Reader, root: Path, *, partial: bool) -> None:
        self.reader, self.root, self.partial = reader, root, partial
        self.name = reader.name
        self.errors = ReadErrors(reader.name)
        self.notes: list[str] = []
        self._listed: dict[str, SplitSize] = {}
        self._missing: list[str] = []

    def folder(self, *marks: str) -> tuple[Path, str]:
        """The folder that holds one of `marks`, and which: the root itself or the one folder below it."""
        for mark in marks:
            if (self.root / mark).exists():
                return self.root, mark
        with os.scandir(self.root) as entries:
            below = sorted(self.root / entry.name for entry in entries if entry.is_dir())
        found = [(folder, mark) for mark in marks for folder in below if (folder / mark).exists()]
        if not found:
            wanted = " or ".join(marks)
            raise FileNotFoundError(
                f"{self.name}: {wanted} is missing in {self.root} and in the folders directly below it. "
                f"Wanted: {self.reader.layout}"
            )
        if len({folder for folder, _ in found}) > 1:
            places = ", ".join(str(folder) for folder, _ in found)
            raise ValueError(f"{self.name}: several folders below {self.root} hold one ({places}): name the one to read")
        return found[0]

    def file(self, path: Path) -> Path:
        """`path`, which must be a file."""
        if not path.is_file():
            raise FileNotFoundError(f"{self.name}: {path} is missing. Wanted: {self.reader.layout}")
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
            raise ValueError(f"{self.name}: {root} has no image for {split!r}. Wanted: {self.reader.layout}")
        found = np.ones(len(table), dtype=np.bool_) if seen else on_disk(root, table.paths)
        if found.all():
            return table
        for row in np.flatnonzero(~found).tolist():
            place = f" (listed at {listed_at.where(row)})" if listed_at else ""
            self._missing.append(f"{root / table.paths[row]}{place}")
        if not found.any():
            raise FileNotFoundError(
                f"{self.name}: none of the {len(table):,} images of {split} is there:\n{listing(self._missing)}\n"
                f"Wanted: {self.reader.layout}"
            )
        return table.select(found)

    def finish(self, splits: Mapping[str, Table], *, protocols: Mapping[str, str], ks: tuple[int, ...]) -> DataSet:
        """The data set, once its images and counts have been held against what is published."""
        self.errors.raise_if_any()
        total = sum(size.images for size in self._listed.values())
        counts = [
            f"{split}: {self._listed[split]}, complete it has {' or '.join(map(str, sizes))}"
            for split, sizes in self.reader.sizes.items()
            if split in self._listed and self._listed[split] not in sizes
        ]
        if not self.partial and (self._missing or counts):
            self._refuse(counts, total)
        if "train" in splits:
            self._check_overlap(splits)
        notes = list(self.notes)
        if counts:
            notes.append(f"partial copy, other counts than published:\n{listing(counts)}")
        if self._missing:
            notes.append(f"left out {len(self._missing):,} of {total:,} listed images, absent:\n{listing(self._missing)}")
        return DataSet(self.name, splits, protocols, ks, tuple(notes))

    def _check_overlap(self, splits: Mapping[str, Table]) -> None:
        """No image may be trained on and tested on; classes may, though the papers' are disjoint, so that is a note."""
        train = splits["train"]
        for split, table in splits.items():
            if split == "train":
                continue
            # with boxes, one file may hold images of several splits
            twice = set(train.paths) & set(table.paths) if table.boxes is None else set()
            if twice:
                raise ValueError(
                    f"{self.name}: {len(twice):,} images are both in train and in {split}:\n{listing(sorted(twice))}"
                )
            shared = len(np.intersect1d(train.labels, table.labels))
            if shared:
                self.notes.append(f"{shared:,} of the {table.num_classes:,} classes of {split} are in train too")

    def _refuse(self, counts: list[str], total: int) -> None:
        advice = "Complete it, or accept a partial copy with partial=True (--partial on the command line)."
        told = [f"other counts than published:\n{listing(counts)}"] if counts else []
        if not self._missing:
            raise ValueError(f"{self.name}: {told[0]}\n{advice}")
        told.insert(0, f"{len(self._missing):,} of {total:,} images are missing:\n{listing(self._missing)}")
        raise FileNotFoundError(f"{self.name}: " + "\n".join([*told, advice]))


def on_disk(root: Path, paths: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the files exist: one listing per folder, where a question per file would take minutes on a network disk."""
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
