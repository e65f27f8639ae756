"""Embedded images on disk.

DIR/embeddings.npy            float32 [N, d], rows of length 1
DIR/ids.parquet or ids.csv    id (the row), path, label, category; x_1, y_1, x_2, y_2 of boxes; text where texts were embedded
DIR/embedding.json            the run and its weights, sizes, the folder that paths are relative to
DIR/left_out.txt              one line for each image that could not be read, where there were any
DIR/images/                   only where the data set draws its images and has no files
"""

import csv
import hashlib
import json
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad._messages import printable
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.readers.manifest import BOX
from rankgrad.data.table import Table
from rankgrad.eval.embedding_blocks import to_unit_length
from rankgrad.search.image_lists import ImageList
from rankgrad.search.signatures import is_own

if TYPE_CHECKING:
    from rankgrad.search.trained_model import TrainedModel

EMBEDDINGS, ABOUT, IMAGES, LEFT_OUT = "embeddings.npy", "embedding.json", "images", "left_out.txt"
IDS_FILES = ("ids.parquet", "ids.csv")
# the columns that are text
TEXTS = ("path", "label", "category")
FORMAT = 1
# what is used of embedding.json
ABOUT_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("ids", "digest", "weights", "run", "checkpoint"), str),
    **dict.fromkeys(("dim", "step"), int),
    "root": (str, type(None)),
}

# what a damaged file makes its reader raise; the head of an .npy file is a Python literal
DAMAGE = (
    OSError, ValueError, KeyError, TypeError, EOFError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError,
    OverflowError, NotImplementedError,
)  # fmt: skip

# rows up to which all lengths are checked on opening, and the number checked of a larger gallery
CHECKED_ROWS, SAMPLED_ROWS = 100_000, 4096
LENGTH_ERROR = 1e-3
# rows normalised at once
BLOCK = 65_536


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embeddings and the images they are of.

    Attributes:
        folder: that it was read from.
        embeddings: [N, d] float32, rows of length 1; mapped from the file.
        images: the images and their names.
        about: the content of embedding.json.
        source: how the folder of the images is known. "inside": it lies in the gallery's folder. "trusted": this user wrote
            the gallery on this machine, or confirmed the folder. "claimed": only embedding.json says so. "none": there are
            no images.
    """

    folder: Path
    embeddings: NDArray[np.float32]
    images: ImageList
    about: Mapping[str, Any] = field(default_factory=dict)
    source: Literal["inside", "trusted", "claimed", "none"] = "claimed"

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def digest(self) -> str:
        """Digest of the numbers in embeddings.npy."""
        return str(self.about["digest"])

    @cached_property
    def class_sizes(self) -> Mapping[str, int]:
        """Number of images of each class that has a name."""
        names, codes = self.images.label_codes
        counts = np.bincount(codes, minlength=len(names)).tolist()
        return {name: count for name, count in zip(names, counts, strict=True) if name}

    @classmethod
    def of(cls, embeddings: NDArray[np.float32], images: ImageList | None = None) -> "Gallery":
        """A gallery in memory, of rows of any length above 0."""
        if embeddings.ndim != 2 or not embeddings.size:
            raise ValueError(f"Gallery.of: embeddings must be [N, d] and not empty, got shape {embeddings.shape}")
        items = len(embeddings)
        if images is None:
            table = Table("embeddings", Path(), tuple(map(str, range(items))), np.full(items, -1, np.int64))
            return cls(Path(), unit_rows(embeddings), ImageList(table, ("",) * items, ("",) * items), source="none")
        if len(images) != items:
            raise ValueError(f"Gallery.of: there are {items:,} embeddings and {len(images):,} images; they must agree")
        return cls(Path(), unit_rows(embeddings), images, source="trusted")

    @classmethod
    def open(cls, folder: Path, *, images: Path | None = None) -> "Gallery":
        """Open what `embed_images` wrote.

        Args:
            folder: holds embeddings.npy and the rest.
            images: the folder that the images are in, where it is not the one that was recorded, or to confirm that one.
        """
        if images is not None and not images.is_dir():
            raise FileNotFoundError(f"{images} is not a folder: name the one that the images of {folder} are in")
        about = _read_about(folder)
        try:
            embeddings = np.load(_inside(folder, EMBEDDINGS), mmap_mode="r", allow_pickle=False)
            columns = _read_ids(_inside(folder, about["ids"]))
            shape = (len(columns["path"]), about["dim"])
            recorded = folder / IMAGES if about["root"] is None else Path(about["root"])
            paths, labels, categories = (tuple(columns[name]) for name in TEXTS)
            texts = tuple(map(str, columns["text"])) if "text" in columns else None
            no_labels = np.full(shape[0], -1, np.int64)
            table = Table(folder.name, images or recorded, paths, no_labels, boxes=_boxes(columns), texts=texts)
            listed = ImageList(table, labels, categories)
        except DAMAGE as error:
            reason = printable(str(error))
            raise ValueError(f"{folder} is not a complete folder of embeddings ({reason}): make it again with embed") from error
        if embeddings.dtype != np.float32 or embeddings.shape != shape:
            raise ValueError(
                f"{folder / EMBEDDINGS} must be float32 of shape {shape} as {about['ids']} and {ABOUT} say, "
                f"got {embeddings.dtype} of shape {embeddings.shape}: make it again with embed"
            )
        source: Literal["inside", "trusted", "claimed"] = "claimed"
        if images is not None or is_own(gallery_claims(folder, about), about.get("signature")):
            source = "trusted"
        elif about["root"] is None:
            source = "inside"
        return cls(folder, _checked_lengths(embeddings, folder), listed, about, source)

    def check_fits(self, model: "TrainedModel") -> None:
        """Raise where the embeddings were made with other weights than those of `model`."""
        if self.about and self.about["weights"] != model.fingerprint:
            raise ValueError(
                f"the embeddings in {self.folder} were made with step {self.about['step']:,} of {self.about['run']}, but the "
                f"{model.checkpoint} checkpoint of {model.folder}, step {model.step:,}, has other weights: their scores "
                "would mean nothing. Embed the images again"
            )

    def check_images(self) -> None:
        """Raise where nobody but embedding.json says which folder the images are in."""
        if self.source == "claimed":
            root = self.images.table.root
            raise ValueError(
                f"{self.folder} says that its images are in {root}, but it was not written by you on this machine. "
                f"If these images may be shown, confirm the folder with --images {root}"
            )

    def images_moved(self) -> str:
        """A sentence where none of a few images is in its place, else ""."""
        if self.source == "none" or not len(self) or self.images.table.texts is not None:
            return ""
        rows = range(0, len(self), max(len(self) // 10, 1))
        if any(self.images.table.file(row).is_file() for row in rows):
            return ""
        return f"the images of {self.folder} are no longer in {self.images.table.root}: say where they are with --images DIR"

    def image_file(self, row: int) -> Path:
        """The file of an image, which a gallery from elsewhere cannot place outside of itself."""
        self.check_images()
        path = self.images.table.file(row)
        if self.source == "inside" and not path.resolve().is_relative_to(self.folder.resolve()):
            raise UnreadableImageError(f"{path} leads out of {self.folder}")
        return path

    def named(self, row: int) -> tuple[str, Path | None, str]:
        """Label, file and text of an item; an image has no text and a text no file."""
        label, table = self.images.labels[row], self.images.table
        if table.texts is not None:
            return label, None, table.texts[row]
        return label, None if self.source == "none" else table.file(row), ""


def unit_rows(embeddings: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of length 1 in float32; rows of zeros stay. No finite length over- or underflows."""
    result = np.empty(embeddings.shape, np.float32)
    for first in range(0, len(embeddings), BLOCK):
        block = torch.from_numpy(np.array(embeddings[first : first + BLOCK], np.float64))
        if not bool(torch.isfinite(block).all()):
            raise ValueError("embeddings must be finite, got NaN or infinite numbers")
        result[first : first + BLOCK] = to_unit_length(block).numpy()
    return result


def _checked_lengths(embeddings: NDArray[np.float32], folder: Path) -> NDArray[np.float32]:
    """`embeddings` as they are where their rows have length 1, else a normalised copy."""
    step = 1 if len(embeddings) <= CHECKED_ROWS else len(embeddings) // SAMPLED_ROWS
    with np.errstate(over="ignore", invalid="ignore"):
        is_unit = all(
            np.allclose(np.linalg.norm(embeddings[first : first + BLOCK * step : step], axis=1), 1, atol=LENGTH_ERROR, rtol=0)
            for first in range(0, len(embeddings), BLOCK * step)
        )
    if is_unit:
        return embeddings
    try:
        return unit_rows(embeddings)
    except ValueError as error:
        raise ValueError(f"{folder / EMBEDDINGS}: {error}: make it again with embed") from None


def _inside(folder: Path, name: str) -> Path:
    """A file of a gallery, which must be one (opening a named pipe would block) and lie in its folder."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{name} is missing")
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"{name} leads out of the folder")
    return path


def gallery_claims(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which files of the disk a gallery stands for."""
    ids = hashlib.blake2b((folder / about["ids"]).read_bytes(), digest_size=16).hexdigest()
    return {"root": about["root"], "digest": about["digest"], "ids": ids}


def _boxes(columns: Mapping[str, Sequence[Any]]) -> NDArray[np.float64] | None:
    if BOX[0] not in columns:
        return None
    return np.array([[float(edge or "nan") for edge in columns[name]] for name in BOX]).T


def _read_about(folder: Path) -> dict[str, Any]:
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
        if about["ids"] not in IDS_FILES:
            raise ValueError(f"its ids must be one of {', '.join(IDS_FILES)}, not {about['ids']!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read by this version ({error}): embed the images again") from error
    return about


def _read_ids(path: Path) -> dict[str, list[Any]]:
    """The columns of a list of images, paths and names as text and edges as anything that `float` takes."""
    if path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        known = [name for name in (*TEXTS, *BOX, "text") if name in parquet.read_schema(path).names]
        table = parquet.read_table(path, columns=known)
        return {
            name: _texts(table[name], repeats=name != "path") if name in TEXTS else table[name].to_pylist() for name in known
        }
    with path.open(newline="", encoding="utf-8") as file:
        try:
            header, *rows = csv.reader(file, strict=True)
        except csv.Error as error:
            raise ValueError(f"{path.name}: {error}") from error
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path.name}: row {number} has {len(row)} columns and not {len(header)}")
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _texts(column: Any, *, repeats: bool) -> list[str]:
    """A column of Arrow as text, "" for null; values that repeat as one object each, which is quicker."""
    text = column.cast("string").fill_null("").combine_chunks()
    if not repeats:
        return list(text.to_numpy(zero_copy_only=False))
    encoded = text.dictionary_encode()
    names: NDArray[np.object_] = encoded.dictionary.to_numpy(zero_copy_only=False)
    return list(names[encoded.indices.to_numpy()])
