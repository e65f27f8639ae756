"""Embeddings that were made elsewhere: read from files with their labels, and evaluated like the test split of a run.

Embeddings are .npy, .safetensors or .parquet, or a folder that `rankgrad embed` wrote; labels are .csv, .npy, .parquet or part
of the file of the embeddings. The result is a folder that `rankgrad report` reads.
"""

import csv
import os
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad._files import atomic_folder
from rankgrad._messages import did_you_mean, plural, shorten
from rankgrad.data.table import Table, path_complaint
from rankgrad.eval import evaluate_table
from rankgrad.runs.retrieval_evaluation import NEIGHBOURS, RetrievalEvaluation
from rankgrad.train.processes import ALONE

SPLIT = "test"
KS = (1, 10, 100, 1000)
# columns of a list of labels; those of a run's table.csv and of the list that `rankgrad embed` writes
COLUMNS = ("label", "path", "category", "class", "is_query", "is_gallery")
# what a damaged file makes its reader raise; the head of an .npy file is a Python literal
DAMAGE = (ValueError, KeyError, TypeError, EOFError, SyntaxError, tokenize.TokenError, OverflowError, MemoryError)


@dataclass(frozen=True, eq=False)
class EmbeddingFile:
    """Embeddings and what is known about each.

    Attributes:
        path: the file, for messages.
        embeddings: [N, d].
        columns: of `COLUMNS`, [N] texts each; "label" is always there.
        root: folder that relative paths of images begin at.
    """

    path: Path
    embeddings: NDArray[Any]
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    root: Path = Path()

    def __len__(self) -> int:
        return len(self.embeddings)


def read_embeddings(path: Path, labels: Path | None = None, image_root: Path | None = None) -> EmbeddingFile:
    """Read embeddings and their labels.

    Args:
        path: .npy, .safetensors, .parquet, or a folder that `rankgrad embed` wrote.
        labels: .csv, .npy or .parquet; without it `path` must hold the labels, too.
        image_root: folder that paths of images are relative to, by default that of `labels`, else of `path`.
    """
    if path.is_dir():
        lists = [path / name for name in ("ids.parquet", "ids.csv") if (path / name).is_file()]
        if not (path / "embeddings.npy").is_file() or not lists:
            raise FileNotFoundError(f"{path} is not a folder that `rankgrad embed` wrote: name a file of embeddings")
        path, labels = path / "embeddings.npy", labels or lists[0]
    embeddings, columns = _reader(path, EMBEDDING_READERS, "--embeddings")(path)
    if embeddings.ndim != 2 or not embeddings.size:
        raise ValueError(f"{path}: embeddings must have the shape [N, d], got {list(embeddings.shape)}")
    if embeddings.dtype.kind not in "fiu":
        raise ValueError(f"{path}: embeddings must be numbers, got {embeddings.dtype}")
    if labels is not None:
        columns = _reader(labels, LABEL_READERS, "--labels")(labels)
        if len(columns["label"]) != len(embeddings):
            raise ValueError(
                f"{labels} has {plural(len(columns['label']), 'label')} and {path} {plural(len(embeddings), 'embedding')}: "
                "there must be one label for each embedding, in the same order"
            )
    elif "label" not in columns:
        raise ValueError(f"{path} holds no labels: name a file of labels with --labels")
    return EmbeddingFile(path, embeddings, columns, (image_root or (labels or path).parent).absolute())


def evaluate_files(
    queries: EmbeddingFile,
    gallery: EmbeddingFile | None = None,
    *,
    protocol: str | None = None,
    normalize: bool = True,
    device: torch.device | str = "cpu",
) -> RetrievalEvaluation:
    """Rank every embedding against all others, or the queries against the gallery."""
    table = make_table(queries, gallery)
    embeddings = queries.embeddings
    if gallery is not None:
        if gallery.embeddings.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f"{queries.path} has embeddings of {embeddings.shape[1]} dimensions and {gallery.path} of "
                f"{gallery.embeddings.shape[1]}: they must come from one network"
            )
        embeddings = np.concatenate((embeddings, gallery.embeddings))
    if embeddings.dtype != np.float32:
        embeddings = embeddings.astype(np.float32)
    candidates = len(table) if table.is_gallery is None else int(table.is_gallery.sum())
    options: dict[str, Any] = {"ks": tuple(k for k in KS if k == 1 or k < candidates), "normalize": normalize, "device": device}
    if protocol != "vehicleid-official":
        options["neighbours"] = min(NEIGHBOURS, candidates - 1) or 1
    result = evaluate_table(embeddings, table, protocol=protocol, **options)
    return RetrievalEvaluation(SPLIT, table, embeddings, result, result.protocol.name, ALONE)


def save_evaluation(evaluation: RetrievalEvaluation, folder: Path, source: Path) -> None:
    """Write FOLDER/eval/test, which makes the folder one that `rankgrad report` reads."""
    fingerprint = evaluation.table.fingerprint()
    with atomic_folder(folder / "eval" / SPLIT) as unfinished:
        evaluation.write(unfinished, {"data": {"path": str(source), "fingerprint": fingerprint, "own": True}})


def make_table(queries: EmbeddingFile, gallery: EmbeddingFile | None = None) -> Table:
    """The table of a file, or of queries followed by their gallery."""
    files = [queries] if gallery is None else [queries, gallery]
    columns = {
        name: [text for file in files for text in file.columns[name]]
        for name in COLUMNS
        if all(name in file.columns for file in files)
    }
    labels, class_names = _labels(columns["label"], columns.get("class"))
    categories = columns.get("category")
    names = tuple(dict.fromkeys(filter(None, categories or ())))
    marks = _marks(files, columns)
    root, paths = _paths(columns.get("path"), len(labels), queries.root)
    return Table(
        queries.path.stem,
        root,
        paths,
        labels,
        categories=np.array([names.index(name) if name else -1 for name in categories]) if categories and names else None,
        category_names=names if categories else (),
        class_names=class_names,
        is_query=marks[0],
        is_gallery=marks[1],
    )


def _labels(texts: Sequence[str], classes: Sequence[str] | None) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Integers as they are, other texts numbered in the order of their names; an empty one has no class."""
    try:
        numbers = np.array([int(text) if text else -1 for text in texts], dtype=np.int64)
    except (ValueError, OverflowError):
        known = {name: number for number, name in enumerate(sorted({text for text in texts if text}))}
        numbers = np.array([known[text] if text else -1 for text in texts], dtype=np.int64)
        return numbers, {number: name for name, number in known.items()}
    return numbers, dict(zip(numbers.tolist(), classes, strict=True)) if classes else {}


def _marks(
    files: Sequence[EmbeddingFile], columns: Mapping[str, Sequence[str]]
) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
    if len(files) == 2:
        is_query = np.repeat([True, False], [len(file) for file in files])
        return is_query, ~is_query
    found = [columns.get(name) for name in ("is_query", "is_gallery")]
    if found[0] is None or found[1] is None:
        return None, None
    is_query, is_gallery = (np.array([text not in ("", "0", "False", "false") for text in mark]) for mark in found if mark)
    return (None, None) if is_query.all() and is_gallery.all() else (is_query, is_gallery)


def _paths(paths: Sequence[str] | None, items: int, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Images below one folder; row numbers where nothing says which images the embeddings are of."""
    if paths and all(map(os.path.isabs, paths)):
        root = os.path.commonpath([Path(path).parent for path in paths])
        return Path(root), tuple(os.path.relpath(path, root) for path in paths)
    if paths and not any(map(path_complaint, paths)):
        return folder, tuple(paths)
    return folder, tuple(map(str, range(items)))


Columns = Mapping[str, Sequence[str]]


def _read_npy(path: Path) -> tuple[NDArray[Any], Columns]:
    return np.load(path, mmap_mode="r", allow_pickle=False), {}


def _read_safetensors(path: Path) -> tuple[NDArray[Any], Columns]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        matrices = [name for name in names if len(file.get_slice(name).get_shape()) == 2]
        chosen = "embeddings" if "embeddings" in matrices else matrices[0] if len(matrices) == 1 else None
        if chosen is None:
            raise ValueError(f"wanted one tensor [N, d], or one called 'embeddings', found {', '.join(names) or 'none'}")
        columns = {"label": [str(label) for label in file.get_tensor("labels").tolist()]} if "labels" in names else {}
        return file.get_tensor(chosen).float().numpy(), columns


def _read_parquet(path: Path) -> tuple[NDArray[Any], Columns]:
    types, parquet = import_module("pyarrow.types"), import_module("pyarrow.parquet")
    content = parquet.read_table(path)
    kinds = {entry.name: entry.type for entry in content.schema}
    lists = [name for name, kind in kinds.items() if types.is_list(kind) or types.is_fixed_size_list(kind)]
    chosen = next((name for name in ("embedding", "embeddings") if name in lists), lists[0] if len(lists) == 1 else None)
    if chosen is None:
        raise ValueError(f"wanted a column 'embedding' of lists of numbers, found {', '.join(kinds)}")
    rows = content.column(chosen).to_pylist()
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"the lists of {chosen!r} differ in length")
    return np.array(rows, dtype=np.float32), _text_columns(content.to_pydict())


def _read_label_csv(path: Path) -> Columns:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise ValueError("it is empty")
    header = [name.strip() for name in rows[0]]
    if "label" in header:
        for number, row in enumerate(rows[1:], start=2):
            if len(row) != len(header):
                raise ValueError(f"line {number} has {len(row)} values for {len(header)} columns")
        return {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(header) if name in COLUMNS}
    if all(len(row) == 1 for row in rows):
        return {"label": [row[0].strip() for row in rows]}
    hint = did_you_mean("label", header, otherwise="name the column of the classes 'label'")
    raise ValueError(f"wanted a column 'label', or one label a line, found the columns {', '.join(header)}: {hint}")


def _read_label_npy(path: Path) -> Columns:
    labels = np.load(path, allow_pickle=False)
    if labels.ndim != 1 or labels.dtype.kind not in "iuUS":
        raise ValueError(f"labels must be [N] integers or strings, got {labels.dtype} of shape {list(labels.shape)}")
    return {"label": [str(label) for label in (labels.astype(str) if labels.dtype.kind == "S" else labels).tolist()]}


def _read_label_parquet(path: Path) -> Columns:
    parquet = import_module("pyarrow.parquet")
    columns = _text_columns(parquet.read_table(path).to_pydict())
    if "label" not in columns:
        raise ValueError("wanted a column 'label'")
    return columns


def _text_columns(content: Mapping[str, Sequence[Any]]) -> Columns:
    return {
        name: ["" if value is None else str(value) for value in values] for name, values in content.items() if name in COLUMNS
    }


EMBEDDING_READERS: Mapping[str, Callable[[Path], tuple[NDArray[Any], Columns]]] = {
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
    ".parquet": _read_parquet,
}
LABEL_READERS: Mapping[str, Callable[[Path], Columns]] = {
    ".csv": _read_label_csv,
    ".npy": _read_label_npy,
    ".parquet": _read_label_parquet,
}


def _reader(path: Path, readers: Mapping[str, Callable[[Path], Any]], flag: str) -> Callable[[Path], Any]:
    """The reader of a file by its suffix; what it raises becomes a sentence that names the file."""
    if path.suffix.lower() not in readers:
        raise ValueError(f"{flag} must end in {', '.join(readers)}, got {shorten(str(path))}")
    if not path.is_file():
        raise FileNotFoundError(f"{flag}: {path} does not exist")

    def read(file: Path) -> Any:
        try:
            return readers[path.suffix.lower()](file)
        except (*DAMAGE, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        except Exception as error:
            # safetensors and pyarrow have errors of their own
            if type(error).__module__.split(".")[0] not in ("safetensors", "safetensors_rust", "pyarrow"):
                raise
            raise ValueError(f"{path} cannot be read: {error}") from error

    return read
