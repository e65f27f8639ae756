"""What the search page is asked and answers, without the web around it; uploads are checked before they are decoded."""

import base64
import io
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.image_files import DAMAGE, ImageDecoder, UnreadableImageError, read_guarded, read_row, to_rgb
from rankgrad.data.seeds import derive
from rankgrad.search.searcher import Searcher
from rankgrad.search.trained_model import TrainedModel

if TYPE_CHECKING:
    from PIL import Image

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of an image, as shares of its width and height."""

MOST_BYTES = 10_000_000
MOST_PIXELS = 40_000_000
MOST_LETTERS = 5_000
FORMATS = "JPEG, PNG, WebP, GIF or BMP"
# pixels of a thumbnail: its short side, and the most of its long side
THUMB, THUMB_LONG = 256, 640

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
)


@dataclass
class RefusedError(Exception):
    """Why a request is refused: an HTTP status and a sentence for its sender."""

    status: int
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class SearchService:
    """Answers the questions of the search page about one gallery.

    Args:
        model: embeds uploads; must have made the gallery.
        searcher: of the gallery, whose folder of images must be trusted.
    """

    def __init__(self, model: TrainedModel, searcher: Searcher) -> None:
        self.model, self.searcher, self.gallery = model, searcher, searcher.gallery
        self.gallery.check_fits(model)
        self.gallery.check_images()
        self._texts = self.gallery.images.table.texts
        self._decoder = None if self._texts is not None else ImageDecoder(self.gallery.images.table, THUMB, square=False)

    def about(self) -> dict[str, Any]:
        """The run and the gallery in numbers."""
        model = self.model
        return {
            "run": model.folder.resolve().name,
            "recipe": model.recipe.name,
            "trunk": Path(model.recipe.trunk).name if Path(model.recipe.trunk).is_absolute() else model.recipe.trunk,
            "step": model.step,
            "checkpoint": model.checkpoint,
            "debug": model.debug,
            "gallery": self.gallery.about["source"],
            "of_texts": self._texts is not None,
            "most_letters": MOST_LETTERS,
            "images": len(self.gallery),
            "classes": len(self.gallery.class_sizes),
            "dim": self.gallery.embeddings.shape[1],
            "index": self.searcher.kind,
            "version": self.gallery.digest[:8],
            "most_bytes": MOST_BYTES,
            "most_pixels": MOST_PIXELS,
            "kinds": FORMATS,
        }

    def items(self, label: str, seed: int, offset: int, limit: int) -> dict[str, Any]:
        """Images whose label contains `label`, in an order decided by `seed` that visits all parts of the gallery."""
        rows = self._labelled(label)
        total = len(self.gallery) if rows is None else len(rows)
        chosen = [_scattered(place, total, seed) for place in range(offset, min(offset + limit, total))]
        found = chosen if rows is None else rows[chosen].tolist()
        return {"total": total, "offset": offset, "items": [self.item(row) for row in found]}

    def item(self, row: int) -> dict[str, Any]:
        """What is known of an image."""
        images = self.gallery.images
        label = images.labels[row]
        return {
            "id": row,
            "label": label,
            "category": images.categories[row],
            "name": images.table.paths[row],
            **({} if self._texts is None else {"text": self._texts[row]}),
            "class_size": self.gallery.class_sizes.get(label, 0),
        }

    def search_from(self, row: int, k: int, label: str = "") -> dict[str, Any]:
        """Neighbours of an image of the gallery, among those whose label contains `label`."""
        began = time.perf_counter()
        scores, rows = self.searcher.search_from(self._checked(row), k, among=self._labelled(label))
        query = self.item(row)
        return self._answer(query, scores, rows, query["label"], began)

    def search_part(self, row: int, box: Box, k: int, label: str = "") -> dict[str, Any]:
        """Neighbours of a part of an image of the gallery."""
        if self._texts is not None:
            raise RefusedError(400, "The gallery holds texts, which have no parts.")
        self.gallery.image_file(self._checked(row))
        table = self.gallery.images.table
        listed = (
            None if table.boxes is None or np.isnan(table.boxes[row]).any() else tuple(map(round, table.boxes[row].tolist()))
        )
        began = time.perf_counter()
        try:
            embedding = self.model.embed(read_row(table, row, partial(_part, box=box, listed=listed)))
        except UnreadableImageError:
            raise RefusedError(404, f"The file of image {row} is missing or cannot be read.") from None
        return self._search(self.item(row), embedding, k, label, began)

    def search_with(self, content: bytes, k: int, label: str = "", box: Box | None = None) -> dict[str, Any]:
        """Neighbours of an uploaded image, or of a part of it."""
        began = time.perf_counter()
        return self._search(None, self.embed_upload(content, box), k, label, began)

    def search_text(self, text: str, k: int, label: str = "") -> dict[str, Any]:
        """Neighbours of a text."""
        if self._texts is None:
            raise RefusedError(400, "The gallery holds images: send an image, or ?item=ID.")
        text = text.strip()
        if not 0 < len(text) <= MOST_LETTERS:
            raise RefusedError(400, f"The text must have 1 to {MOST_LETTERS:,} characters.")
        began = time.perf_counter()
        return self._search(None, self.model.embed(text), k, label, began)

    def search_link(self, link: str, k: int, label: str = "") -> dict[str, Any]:
        """Neighbours of an embedding that an earlier answer gave as its `link`."""
        began = time.perf_counter()
        return self._search(None, _embedding_in(link, self.gallery.embeddings.shape[1]), k, label, began)

    def embed_upload(self, content: bytes, box: Box | None = None) -> NDArray[np.float32]:
        """[d] of an uploaded image, prepared as files are."""
        if self._texts is not None:
            raise RefusedError(400, "The gallery holds texts: search with ?text=TEXT.")
        check_upload(content)
        try:
            return self.model.embed(content if box is None else read_guarded(content, partial(_part, box=box)))
        except UnreadableImageError as error:
            cause = str(error).removeprefix("the image cannot be read: ").removesuffix(".")
            reason = "it is truncated or damaged" if "truncated" in cause or "broken" in cause else cause
            raise RefusedError(422, f"The image cannot be read: {reason}.") from None

    def _search(
        self, query: dict[str, Any] | None, embedding: NDArray[np.float32], k: int, label: str, began: float
    ) -> dict[str, Any]:
        scores, rows = self.searcher.search(embedding[None], k, among=self._labelled(label))
        answer = self._answer(query, scores[0], rows[0], query["label"] if query else "", began)
        return {**answer, "link": _link_of(embedding)}

    def _answer(
        self, query: dict[str, Any] | None, scores: NDArray[np.float32], rows: NDArray[np.int64], label: str, began: float
    ) -> dict[str, Any]:
        found = self._results(scores, rows, label)
        return {"query": query, "results": found, "seconds": round(time.perf_counter() - began, 4)}

    def _labelled(self, text: str) -> NDArray[np.int64] | None:
        """Rows whose label contains `text`; None for all."""
        if not text:
            return None
        # each label is searched once, however many images have it
        names, codes = self.gallery.images.label_codes
        wanted = np.array([text.casefold() in name.casefold() for name in names], dtype=np.bool_)
        return np.flatnonzero(wanted[codes])

    def thumb(self, row: int) -> bytes:
        """A JPEG without the metadata of its file."""
        self._checked(row)
        if self._decoder is None:
            raise RefusedError(404, "The gallery holds texts, which have no pictures.")
        try:
            self.gallery.image_file(row)
            image = self._decoder.image(row)
        except UnreadableImageError:
            raise RefusedError(404, f"The file of image {row} is missing or cannot be read.") from None
        image.thumbnail((THUMB_LONG, THUMB_LONG))
        image.info.clear()
        content = io.BytesIO()
        image.save(content, "JPEG", quality=85)
        return content.getvalue()

    def _results(self, scores: NDArray[np.float32], rows: NDArray[np.int64], label: str) -> list[dict[str, Any]]:
        """One entry per neighbour; `right`: whether it is of the query's class, None where that is unknown."""
        found: list[dict[str, Any]] = []
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            item = self.item(row)
            right = item["label"] == label if label and item["label"] else None
            found.append({**item, "rank": len(found) + 1, "score": round(score, 4), "right": right})
        return found

    def _checked(self, row: int) -> int:
        if not 0 <= row < len(self.gallery):
            noun = self.gallery.images.table.noun
            raise RefusedError(404, f"There is no {noun} {row}: the gallery has 0 to {len(self.gallery) - 1}.")
        return row


def _scattered(place: int, total: int, seed: int) -> int:
    """The number at `place` of an order of 0 .. total - 1: steps of one length, which is fast among millions, too."""
    first, step = derive(seed, "page", "first") % total, round(0.618 * total) + derive(seed, "page", "step") % (total // 8 + 1)
    while math.gcd(step, total) != 1:
        step += 1
    return (first + place * step) % total


def _part(image: "Image.Image", box: Box, listed: tuple[int, ...] | None = None) -> "Image.Image":
    """The part of an upright image between shares of its width and height; `listed` is what the gallery shows of its file."""
    from PIL import ImageOps

    if listed is not None:
        image = image.crop((max(listed[0], 0), max(listed[1], 0), min(listed[2], image.width), min(listed[3], image.height)))
    upright = to_rgb(ImageOps.exif_transpose(image))
    left, top, right, bottom = (
        round(share * side) for share, side in zip(box, (upright.width, upright.height) * 2, strict=True)
    )
    part = upright.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    # turned already
    part.info.pop("exif", None)
    return part


def _link_of(embedding: NDArray[np.float32]) -> str:
    """An embedding for an address: a byte for each dimension, which moves a cosine by some 0.001."""
    scaled = np.round(127 * embedding / np.abs(embedding).max()).astype(np.int8)
    return base64.urlsafe_b64encode(scaled.tobytes()).decode().rstrip("=")


def _embedding_in(link: str, dim: int) -> NDArray[np.float32]:
    try:
        content = base64.b64decode(link + "=" * (-len(link) % 4), altchars=b"-_", validate=True)
    except ValueError:
        content = b""
    embedding = np.frombuffer(content, np.int8).astype(np.float32)
    if embedding.shape != (dim,) or not embedding.any():
        raise RefusedError(400, "The link is damaged or belongs to another model.")
    return embedding


def check_upload(content: bytes) -> None:
    """Raise `RefusedError` unless `content` begins like an image of a sane size; decodes no pixel."""
    from PIL import Image

    if not content:
        raise RefusedError(400, "The file is empty.")
    if len(content) > MOST_BYTES:
        raise too_large()
    kind = _format_of(content)
    try:
        with Image.open(io.BytesIO(content), formats=(kind,)) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedError(413, _too_many_pixels()) from None
    except DAMAGE:
        raise RefusedError(422, f"The {kind} file is damaged and cannot be read.") from None
    if width * height > MOST_PIXELS:
        raise RefusedError(413, f"{_too_many_pixels()} This one has {width:,} x {height:,}.")


def too_large() -> RefusedError:
    """For an upload of too many bytes."""
    return RefusedError(413, f"The file is larger than {MOST_BYTES // 1_000_000} MB. Choose a smaller one.")


def _format_of(content: bytes) -> str:
    """Pillow's name of the format that `content` begins like."""
    for start, kind in _SIGNATURES:
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    raise RefusedError(415, f"Unsupported image. Use {FORMATS}.")


def _too_many_pixels() -> str:
    return f"The image has too many pixels: the limit is {MOST_PIXELS // 1_000_000} million."
