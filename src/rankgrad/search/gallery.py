"""Embedded images on disk.

DIR/embeddings.npy            float32 [N, d], rows of length 1
DIR/ids.parquet or ids.csv    id (the row), path, label, category, and x_1, y_1, x_2, y_2 where only a part was embedded
DIR/embedding.json            the run and its weights, sizes, the folder that paths are relative to
DIR/left_out.txt              what is wrong with each image that could not be read, where there were any
DIR/images/                   only where the data set draws its images and has no files
"""

import csv
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.readers.list_files import listing
from rankgrad.data.readers.manifest import BOX
from rankgrad.data.table import Table
from rankgrad.search.image_lists import Items
from rankgrad.search.trained_model import Network
from rankgrad.train.progress import Progress

EMBEDDINGS, ABOUT, IMAGES, LEFT_OUT = "embeddings.npy", "embedding.json", "images", "left_out.txt"
FORMAT = 1
# what is used of embedding.json
ABOUT_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("ids", "digest", "weights", "run", "checkpoint"), str),
    **dict.fromkeys(("dim", "step"), int),
    "root": (str, type(None)),
}
IdsFormat = Literal["parquet", "csv"]


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embeddings with the images they are of.

    Attributes:
        folder: where it lies.
        embeddings: [N, d] float32, mapped from the file.
        items: the images and their names.
        about: what embedding.json says.
    """

    folder: Path
    embeddings: NDArray[np.float32]
    items: Items
    about: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def digest(self) -> str:
        """Stands for the numbers in embeddings.npy."""
        return str(self.about["digest"])

    @cached_property
    def class_sizes(self) -> Mapping[str, int]:
        """Images of each class that has a name."""
        names, counts = np.unique(np.array(self.items.labels), return_counts=True)
        return {str(name): int(count) for name, count in zip(names, counts, strict=True) if name}

    @classmethod
    def open(cls, folder: Path) -> "Gallery":
        """What `embed_images` wrote."""
        about = _about(folder)
        try:
            embeddings = np.load(_file(folder / EMBEDDINGS), mmap_mode="r", allow_pickle=False)
            columns = _read_ids(_file(folder / about["ids"]))
            shape = (len(columns["path"]), about["dim"])
            root = folder / IMAGES if about["root"] is None else Path(about["root"])
            table = Table(folder.name, root, tuple(columns["path"]), np.full(shape[0], -1, np.int64), boxes=_boxes(columns))
            items = Items(table, tuple(columns["label"]), tuple(columns["category"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            told = repr(str(error)) if not str(error).isprintable() else error
            raise ValueError(f"{folder} is no complete folder of embeddings ({told}): make it again with embed") from error
        if embeddings.dtype != np.float32 or embeddings.shape != shape:
            raise ValueError(
                f"{folder / EMBEDDINGS} must be float32 of shape {shape} as {about['ids']} and {ABOUT} say, "
                f"got {embeddings.dtype} of shape {embeddings.shape}: make it again with embed"
            )
        return cls(folder, embeddings, items, about)

    def check_fits(self, network: Network) -> None:
        """Raises where the embeddings were made with other weights than those of `network`."""
        if self.about["weights"] != network.fingerprint:
            raise ValueError(
                f"the embeddings in {self.folder} were made with step {self.about['step']:,} of {self.about['run']}, and the "
                f"{network.checkpoint} checkpoint of {network.folder}, step {network.step:,}, has other weights: their scores "
                "would mean nothing. Embed the images again"
            )


def embed_images(
    network: Network,
    items: Items,
    folder: Path,
    *,
    ids: IdsFormat = "parquet",
    skip_bad: bool = False,
    workers: int | None = None,
    shown: bool = True,
    say: Callable[[str], None] = print,
) -> Gallery:
    """Embed `items` and write them to a new folder, which appears when all of it is there.

    Args:
        network: from `open_run`.
        items: from `folder_of_images` and its siblings.
        folder: must not be there, or be empty.
        ids: the format of the list of images.
        skip_bad: list images that cannot be read and leave them out; otherwise they are an error.
        workers: threads that decode.
        shown: progress on standard error.
        say: receives the list of what was left out.
    """
    if ids == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError("a list of images as parquet needs pyarrow: pip install 'rankgrad[search]', or take --ids csv")
    with _appearing(folder) as unfinished:
        bad: list[UnreadableImageError] = []
        rows: list[int] = []
        with (
            _EmbeddingsFile(unfinished / EMBEDDINGS, network.model.dim) as file,
            Progress(len(items), f"embedding {items.table.name}", unit="images", shown=shown) as progress,
        ):
            for done, embeddings, unreadable in network.embed_table(items.table, workers):
                bad += unreadable
                if bad and not skip_bad:
                    raise _complaint(bad, "Mend or remove them, or leave such images out with --skip-bad")
                if not np.isfinite(embeddings).all():
                    raise ValueError(
                        f"embed: the network of {network.folder} gives numbers that are not finite: train it again"
                    )
                file.write(embeddings)
                rows += done
                progress.advance(len(done) + len(unreadable))
        if not rows:
            raise _complaint(bad, "There is nothing left to embed")
        if bad:
            say(f"left out {len(bad):,} of {len(items):,} images that cannot be read:\n{listing([str(one) for one in bad])}")
            (unfinished / LEFT_OUT).write_text("".join(f"{one}\n" for one in bad), encoding="utf-8")
        kept = items.select(rows)
        if kept.table.pixels is not None:
            kept = _drawn(kept, unfinished / IMAGES)
        _write_ids(unfinished / f"ids.{ids}", kept)
        about = {
            "format": FORMAT,
            "run": str(network.folder.resolve()),
            "recipe": network.recipe.name,
            "checkpoint": network.checkpoint,
            "step": network.step,
            "weights": network.fingerprint,
            "source": items.table.name,
            "root": None if items.table.pixels is not None else str(items.table.root.resolve()),
            "images": len(rows),
            "left_out": len(bad),
            "dim": network.model.dim,
            "size": network.recipe.size,
            "ids": f"ids.{ids}",
            "digest": file.digest,
            "debug": network.debug,
        }
        (unfinished / ABOUT).write_text(f"{json.dumps(about, indent=1)}\n", encoding="utf-8")
    return Gallery.open(folder)


class _EmbeddingsFile:
    """An .npy file that is written row by row; how many there are is known at the end."""

    def __init__(self, path: Path, dim: int) -> None:
        self._file, self._dim, self._rows = path.open("wb"), dim, 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._head()

    def __enter__(self) -> "_EmbeddingsFile":
        return self

    def __exit__(self, *_: object) -> None:
        # numpy leaves room in the head for the number of rows to grow
        self._file.seek(0)
        self._head()
        self._file.close()

    def _head(self) -> None:
        content = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self._dim)}
        np.lib.format.write_array_header_1_0(self._file, content)

    def write(self, embeddings: NDArray[np.float32]) -> None:
        content = np.ascontiguousarray(embeddings, dtype="<f4").tobytes()
        self._hash.update(content)
        self._file.write(content)
        self._rows += len(embeddings)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` when all went well and is removed otherwise."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty: give another folder with --out")
    unfinished = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _complaint(bad: Sequence[UnreadableImageError], advice: str) -> UnreadableImageError:
    return UnreadableImageError(f"embed: images that cannot be read:\n{listing([str(one) for one in bad])}\n{advice}")


def _drawn(items: Items, folder: Path) -> Items:
    """The same images as PNG files in `folder`, for whoever wants to look at them later."""
    from PIL import Image

    pixels = items.table.pixels
    assert pixels is not None
    paths = tuple(f"{path}.png" for path in items.table.paths)
    for path, image in zip(paths, pixels, strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / path)
    return replace(items, table=replace(items.table, root=folder, paths=paths, pixels=None))


def _file(path: Path) -> Path:
    """`path`, which must be a file: a pipe of that name would be waited for."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing")
    return path


def _boxes(columns: Mapping[str, Sequence[Any]]) -> NDArray[np.float64] | None:
    if BOX[0] not in columns:
        return None
    return np.array([[float(edge or "nan") for edge in columns[name]] for name in BOX]).T


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {folder} is not a folder that embed wrote")
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']} and not {FORMAT}")
        for name, kind in ABOUT_KINDS.items():
            if not isinstance(about[name], kind):
                raise ValueError(f"its {name} is {about[name]!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read by this version ({error}): embed the images again") from error
    return about


def _write_ids(path: Path, items: Items) -> None:
    columns: dict[str, Sequence[Any]] = {
        "id": range(len(items)),
        "path": items.table.paths,
        "label": items.labels,
        "category": items.categories,
    }
    if items.table.boxes is not None:
        columns.update(zip(BOX, items.table.boxes.T.tolist(), strict=True))
    if path.suffix == ".parquet":
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet

        parquet.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _read_ids(path: Path) -> dict[str, list[Any]]:
    """The columns of a list of images, texts as texts and edges as whatever `float` takes."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.read_table(path)
        return {name: table[name].to_pylist() for name in table.column_names}
    with path.open(newline="", encoding="utf-8") as file:
        try:
            header, *rows = csv.reader(file, strict=True)
        except csv.Error as error:
            raise ValueError(f"{path.name}: {error}") from error
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path.name}: row {number} has {len(row)} columns and not {len(header)}")
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}
