"""Reads run folders. Missing or damaged files are skipped and recorded as problems, which a report lists.

    RUN/recipe.json, data.json, journal.jsonl, checkpoints/{best,last}.json
    RUN/eval/<key>/{result.json,queries.npz,table.csv,embeddings.npy}

The key of a run's own test is the name of the split; tests on other data, under another protocol or of another checkpoint
have more in their key.
"""

import csv
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

# what numpy raises for a damaged array or archive
UNREADABLE = (
    *(OSError, ValueError, EOFError, TypeError, AttributeError, OverflowError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)

NO_CLASS = "-1"
PREFERRED_SPLITS = ("test", "validation")


@dataclass(frozen=True, eq=False)
class ItemTable:
    """The items of table.csv, one image or text each."""

    name: str  # "omniglot/test"
    root: Path
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    categories: tuple[str, ...]  # "" where there is none
    is_query: NDArray[np.bool_]
    is_gallery: NDArray[np.bool_]
    class_names: tuple[str, ...] = ()  # of every item; the labels if it is empty
    texts: tuple[str, ...] = ()  # of every item; empty where they are images

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def noun(self) -> str:
        return "text" if self.texts else "image"

    def shown_name(self, row: int) -> str:
        """The text of an item, or the path of an image."""
        return self.texts[row] if self.texts else self.paths[row]

    def caption(self, row: int) -> str:
        """Name of the class of an item, or of its file if it has no class."""
        return Path(self.paths[row]).stem if self.labels[row] == NO_CLASS else (self.class_names or self.labels)[row]

    @cached_property
    def classes(self) -> Index:
        """[N] equal where labels are equal; every item without a class has a number of its own."""
        numbers: Index = np.unique(np.array(self.labels, dtype=str), return_inverse=True)[1].astype(np.int64)
        alone = np.array([label == NO_CLASS for label in self.labels], dtype=np.bool_)
        return np.where(alone, len(self) + np.arange(len(self)), numbers)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One test of a run. `queries` are the columns of queries.npz, empty if the file is missing."""

    key: str  # folder below eval
    split: str
    protocol: str
    rule: str
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    deviations: Mapping[str, float]
    per_category: Mapping[str, Mapping[str, float]]
    count: int  # queries that had something to find
    skipped: int
    notes: tuple[str, ...]
    queries: Mapping[str, NDArray[Any]]
    table: ItemTable | None
    embeddings: NDArray[np.float32] | None
    fingerprint: str | None = None  # of the data; None in older results
    data_path: str = ""
    is_own: bool = True  # whether it is the data of the run
    checkpoint: str = ""  # which weights, where a result says it

    @property
    def title(self) -> str:
        """Split, and data and weights where they are not the run's own."""
        parts = [self.split]
        if not self.is_own:
            parts.append(f"other data: {self.data_path or self.fingerprint or 'unknown'}")
        if self.key.rpartition("@")[2] == self.checkpoint:
            parts.append(f"{self.checkpoint} weights")
        return ", ".join(parts)

    @property
    def index(self) -> Index | None:
        """[Q] item of the table that each query is."""
        return self.queries.get("index")

    @property
    def first_rank(self) -> NDArray[np.float64] | None:
        """[Q] rank of the first relevant item; of the medium setting where a protocol has several."""
        for name in ("first_rank", "first_rank[medium]", "first_rank[hard]", "first_rank[easy]"):
            if name in self.queries:
                return self.queries[name]
        return None

    @property
    def by_lists(self) -> bool:
        """Whether the data set lists the relevant items of each query instead of labels."""
        return self.protocol.startswith("roxford")


@dataclass(frozen=True, eq=False)
class Run:
    """The contents of a run folder."""

    folder: Path
    name: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    journal: Sequence[Mapping[str, Any]] = ()
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)  # by key
    best: Mapping[str, Any] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)  # of data.json: what each split holds
    problems: tuple[str, ...] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the recipe; a run of `rankgrad.fit` has none, and its journal has the settings of the training loop."""
        start = next(iter(self.entries("start")), {})
        found = self.recipe.get("settings") or start.get("settings")
        return found if isinstance(found, Mapping) else {}

    @property
    def debug(self) -> bool:
        return bool(self.recipe.get("debug"))

    def entries(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The journal's entries of these kinds, in order."""
        return [entry for entry in self.journal if entry["kind"] in kinds]

    def evaluation(self, split: str | None) -> Evaluation | None:
        """The test with this key or of this split, on the run's own data if possible; by default of the test split."""
        own_first = sorted(self.evaluations.values(), key=lambda each: (not each.is_own, each.key != each.split))
        if split is not None:
            found = [each for each in own_first if split in (each.key, each.split)]
            return self.evaluations.get(split) or next(iter(found), None)
        preferred = [each for name in PREFERRED_SPLITS for each in own_first if each.split == name and each.is_own]
        return next(iter([*preferred, *own_first]), None)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs, each under a unique name."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        twice = next(folder for folder in folders if resolved.count(folder.resolve()) > 1)
        raise ValueError(f"{twice} was given twice: give each run once")
    return [_read(folder, name) for folder, name in zip(folders, names_of(resolved), strict=True)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names of folders: as many of their last parts as tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: give a run folder, as written by `rankgrad train --out`")
    parts = [folder / "recipe.json", folder / "journal.jsonl", folder / "eval"]
    if not any(part.exists() for part in parts):
        raise ValueError(f"{folder} is not a run folder: it has none of {', '.join(part.name for part in parts)}")
    problems: list[str] = []
    evaluations = {}
    for place in sorted((folder / "eval").glob("[!.]*/")):
        found = _evaluation(place, problems)
        if found is not None:
            evaluations[found.key] = found
    journal = _journal(parts[1], problems) if parts[1].exists() else []
    # a run of `rankgrad.fit` has no recipe, a test of embeddings has neither, and a shared model has no journal
    if not journal and parts[0].exists() and not (folder / "manifest.json").exists():
        _is_there(parts[1], problems)
    has_recipe = any("recipe" in entry for entry in journal if entry["kind"] == "start")
    return Run(
        folder=folder,
        name=name,
        recipe=_json(parts[0], problems, wanted=has_recipe) or {},
        journal=journal,
        evaluations=evaluations,
        best=_json(folder / "checkpoints" / "best.json", problems, wanted=False),
        data=_json(folder / "data.json", problems, wanted=False) or {},
        problems=tuple(problems),
    )


def _is_there(path: Path, problems: list[str]) -> bool:
    """Whether it is a regular file: reading a pipe or a device could block."""
    if not path.is_file():
        problems.append(f"{path.name} {'is not a file' if path.exists() else 'is missing'}")
        return False
    return True


def _json(path: Path, problems: list[str], *, wanted: bool = True) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is none; a problem if it was `wanted`."""
    if not _is_there(path, problems if wanted else []):
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    if isinstance(content, dict):
        return content
    problems.append(f"{path.name} does not contain a JSON object")
    return None


def _journal(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not _is_there(path, problems):
        return []
    entries, torn = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            torn += 1
            continue
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            entries.append(entry)
    if torn:
        problems.append(f"{path.name}: {torn} damaged {'line' if torn == 1 else 'lines'} skipped")
    return entries


def _evaluation(place: Path, problems: list[str]) -> Evaluation | None:
    noted: list[str] = []
    content = _json(place / "result.json", noted)
    found = None
    if content is not None:
        table = _table(place / "table.csv", content, noted)
        metrics = {str(name): float_of(value) for name, value in _mapping(content.get("metrics")).items()}
        queries = _queries(place / "queries.npz", table, noted)
        found = Evaluation(
            key=place.name,
            split=_split(content, place.name),
            protocol=str(content.get("protocol", "unknown")),
            rule=str(content.get("rule", "")),
            metrics=metrics,
            intervals=dict(_intervals(content.get("intervals"))),
            deviations={str(name): float_of(value) for name, value in _mapping(content.get("deviations")).items()},
            per_category={
                str(name): {str(key): float_of(value) for key, value in _mapping(means).items()}
                for name, means in _mapping(content.get("per_category")).items()
            },
            count=_count(content.get("queries"), len(queries.get("index", ()))),
            skipped=_count(content.get("skipped"), 0),
            notes=tuple(map(str, notes)) if isinstance(notes := content.get("notes"), list) else (),
            queries=queries,
            table=table,
            embeddings=_embeddings(place / "embeddings.npy", table, noted),
            **_data(content),
        )
    problems += [f"eval/{place.name}/{note}" for note in noted]
    return found


def _split(content: Mapping[str, Any], key: str) -> str:
    """Name of the split; older results may lack it and are in a folder of that name."""
    split = content.get("split")
    return split if isinstance(split, str) and split else key.partition("@")[0]


def _data(content: Mapping[str, Any]) -> dict[str, Any]:
    """Which data and which weights were tested; a result that does not say it is of the run's own data."""
    data, checkpoint = _mapping(content.get("data")), _mapping(content.get("checkpoint"))
    fingerprint = data.get("fingerprint")
    return {
        "fingerprint": str(fingerprint) if fingerprint else None,
        "data_path": str(data.get("path") or ""),
        "is_own": data.get("own") is not False,
        "checkpoint": str(checkpoint.get("name") or ""),
    }


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _intervals(value: Any) -> Iterator[tuple[str, tuple[float, float]]]:
    for name, bounds in _mapping(value).items():
        if isinstance(bounds, list) and len(bounds) == 2:
            low, high = map(float_of, bounds)
            if math.isfinite(low) and math.isfinite(high):
                yield str(name), (low, high)


def float_of(value: Any) -> float:
    """A number of a JSON file; NaN if it is not one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _table(path: Path, result: Mapping[str, Any], problems: list[str]) -> ItemTable | None:
    if not _is_there(path, problems):
        return None
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(csv.DictReader(file))
    except (OSError, csv.Error) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    if not rows or not {"path", "label"} <= rows[0].keys():
        problems.append(f"{path.name} has no rows with the columns path and label")
        return None

    labels = tuple(row["label"] or "" for row in rows)

    def flags(name: str) -> NDArray[np.bool_]:
        return np.array([row.get(name) != "0" for row in rows], dtype=np.bool_)

    return ItemTable(
        name=str(result.get("table", "")),
        root=Path(str(result.get("root", ""))),
        paths=tuple(row["path"] or "" for row in rows),
        labels=labels,
        class_names=_class_names(rows, labels),
        categories=tuple(row.get("category") or "" for row in rows),
        is_query=flags("is_query"),
        is_gallery=flags("is_gallery"),
        texts=tuple(row["text"] or "" for row in rows) if "text" in rows[0] else (),
    )


def _class_names(rows: Sequence[Mapping[str, str | None]], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the classes of all rows; of older tables the folders, where there is one for every class."""
    if "class" in rows[0]:
        return tuple(row.get("class") or label for row, label in zip(rows, labels, strict=True))
    folders = [str(PurePosixPath(row["path"] or "").parent.name) for row in rows]
    pairs = {(label, folder) for label, folder in zip(labels, folders, strict=True) if label != NO_CLASS}
    one_each = len({label for label, _ in pairs}) == len({folder for _, folder in pairs}) == len(pairs)
    if not one_each or not all(label.isdigit() for label, _ in pairs) or not all(folder for _, folder in pairs):
        return labels
    return tuple(label if label == NO_CLASS else folder for label, folder in zip(labels, folders, strict=True))


def _queries(path: Path, table: ItemTable | None, problems: list[str]) -> dict[str, NDArray[Any]]:
    """Columns of the same length; `index` and `neighbours` are items of the table."""
    if not _is_there(path, problems):
        return {}
    try:
        # opened here, since numpy leaves a damaged archive open
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except UNREADABLE as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    index = columns.get("index")
    if index is None or index.ndim != 1 or any(column.shape[:1] != index.shape for column in columns.values()):
        problems.append(f"{path.name} does not have one row per query")
        return {}
    odd = [name for name, column in columns.items() if not _fits(name, column)]
    near, scores = columns.get("neighbours"), columns.get("scores")
    if near is not None and scores is not None and near.shape != scores.shape:
        odd.append("scores")
    if odd:
        problems.append(f"{path.name} has columns of a wrong type: {', '.join(odd)}")
        return {}
    if table is not None and len(index) and not 0 <= index.min() <= index.max() < len(table):
        problems.append(f"{path.name} refers to rows that table.csv does not have")
        return {}
    return columns


def _fits(name: str, column: NDArray[Any]) -> bool:
    """Whether a column has the type that its name implies: items of the table, or numbers."""
    if name in ("index", "neighbours"):
        return bool(np.issubdtype(column.dtype, np.integer)) and (not column.size or int(column.min()) >= 0)
    return column.dtype.kind in "biuf"


def _embeddings(path: Path, table: ItemTable | None, problems: list[str]) -> NDArray[np.float32] | None:
    """A memmap: only what is used is read."""
    if not _is_there(path, problems):
        return None
    try:
        found: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    if (
        found.ndim != 2
        or not found.size
        or not np.issubdtype(found.dtype, np.floating)
        or (table is not None and len(found) != len(table))
    ):
        problems.append(f"{path.name} does not have one row per row of table.csv")
        return None
    return found
