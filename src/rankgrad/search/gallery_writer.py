"""Embed images into a folder that `Gallery.open` reads."""

import csv
import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankgrad._files import atomic_folder
from rankgrad._messages import Progress, first_ten, install_hint, plural
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.readers.manifest import BOX
from rankgrad.search.gallery import ABOUT, EMBEDDINGS, FORMAT, IMAGES, LEFT_OUT, Gallery, gallery_claims
from rankgrad.search.image_lists import ImageList
from rankgrad.search.signatures import sign

if TYPE_CHECKING:
    from rankgrad.search.trained_model import TrainedModel

IdsFormat: TypeAlias = Literal["parquet", "csv"]


def embed_images(
    model: "TrainedModel",
    images: ImageList,
    folder: Path,
    *,
    ids: IdsFormat = "parquet",
    skip_bad: bool = False,
    workers: int | None = None,
    shown: bool = True,
    say: Callable[[str], None] = print,
) -> Gallery:
    """Embed images and write the result to a new folder, which appears when it is complete.

    Args:
        model: from `load`.
        images: from `folder_of_images` and its siblings.
        folder: must not exist, or be empty.
        ids: format of the list of images.
        skip_bad: list images that cannot be read and skip them; otherwise they are an error.
        workers: threads that decode.
        shown: show progress on standard error.
        say: receives the list of skipped images.
    """
    if ids == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"a list of images as parquet needs pyarrow: use --ids csv, or {install_hint('search')}")
    with atomic_folder(folder) as unfinished:
        bad: list[UnreadableImageError] = []
        rows: list[int] = []
        with (
            EmbeddingsFile(unfinished / EMBEDDINGS, model.dim) as file,
            Progress(len(images), f"embedding {images.table.name}", unit=f"{images.table.noun}s", shown=shown) as progress,
        ):
            for done, embeddings, unreadable in model.embed_table(images.table, workers):
                bad += unreadable
                if bad and not skip_bad:
                    raise _unreadable(bad, "Repair or remove them, or skip them with --skip-bad")
                if not np.isfinite(embeddings).all():
                    raise ValueError(f"embed: the model of {model.folder} gives numbers that are not finite: train it again")
                file.write(embeddings)
                rows += done
                progress.advance(len(done) + len(unreadable))
        if not rows:
            raise _unreadable(bad, "No image is left to embed")
        if bad:
            say(
                f"Skipped {len(bad):,} of {plural(len(images), 'image')} that cannot be read:\n"
                f"{first_ten([str(one) for one in bad])}"
            )
            (unfinished / LEFT_OUT).write_text("".join(f"{one}\n" for one in bad), encoding="utf-8")
        kept = images.select(rows)
        if kept.table.pixels is not None:
            kept = _as_files(kept, unfinished / IMAGES)
        write_ids(unfinished / f"ids.{ids}", kept)
        about = {
            "format": FORMAT,
            "run": str(model.folder.resolve()),
            "recipe": model.recipe.name,
            "checkpoint": model.checkpoint,
            "step": model.step,
            "weights": model.fingerprint,
            "source": images.table.name,
            "root": str(images.table.root.resolve()) if _are_files(images) else None,
            "images": len(rows),
            "left_out": len(bad),
            "dim": model.dim,
            "size": model.recipe.size,
            "ids": f"ids.{ids}",
            "digest": file.digest,
            "debug": model.debug,
        }
        about["signature"] = sign(gallery_claims(unfinished, about))
        (unfinished / ABOUT).write_text(f"{json.dumps(about, indent=1)}\n", encoding="utf-8")
    return Gallery.open(folder)


class EmbeddingsFile:
    """An .npy file that is written row by row; how many there are is known at the end."""

    def __init__(self, path: Path, dim: int) -> None:
        self._file, self._dim, self._rows = path.open("wb"), dim, 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._write_head()

    def __enter__(self) -> "EmbeddingsFile":
        return self

    def __exit__(self, *_: object) -> None:
        # numpy leaves space in the head for the number of rows to grow
        self._file.seek(0)
        self._write_head()
        self._file.close()

    def _write_head(self) -> None:
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


def _unreadable(bad: Sequence[UnreadableImageError], advice: str) -> UnreadableImageError:
    return UnreadableImageError(f"embed: images that cannot be read:\n{first_ten([str(one) for one in bad])}\n{advice}")


def _as_files(images: ImageList, folder: Path) -> ImageList:
    """Drawn images as PNG files in `folder`, so that they can be shown later."""
    from PIL import Image

    pixels = images.table.pixels
    assert pixels is not None
    paths = tuple(f"{path}.png" for path in images.table.paths)
    for path, image in zip(paths, pixels, strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / path)
    return replace(images, table=replace(images.table, root=folder, paths=paths, pixels=None))


def _are_files(images: ImageList) -> bool:
    return images.table.pixels is None and images.table.texts is None


def write_ids(path: Path, images: ImageList) -> None:
    """Write the list of images, as parquet or CSV by the ending of `path`."""
    columns: dict[str, Sequence[Any]] = {
        "id": range(len(images)),
        "path": images.table.paths,
        "label": images.labels,
        "category": images.categories,
    }
    if images.table.texts is not None:
        columns["text"] = images.table.texts
    if images.table.boxes is not None:
        columns.update(zip(BOX, images.table.boxes.T.tolist(), strict=True))
    if path.suffix == ".parquet":
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet

        parquet.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
