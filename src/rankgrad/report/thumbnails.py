"""Thumbnails inside the page, as many as its size allows, and rows of them: a query and its neighbours."""

import base64
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import plural
from rankgrad.data.image_files import UnreadableImageError, read_guarded
from rankgrad.data.prefetch import default_threads, prefetch, with_progress
from rankgrad.data.table import path_complaint
from rankgrad.eval import neighbours
from rankgrad.report.markup import MINUS, cut_middle, element, text
from rankgrad.report.run_reader import Evaluation, Index, ItemTable

SIDE = 128
QUALITY = 72
# base64 of all <img> together; the charts of a few runs take about a megabyte more
MAX_BYTES = 3_500_000
# sides and qualities to choose from where many thumbnails share a number of bytes, the largest first
SIZES = ((320, 72), (256, 70), (192, 68), (160, 64), (128, 60), (112, 55), (96, 50), (80, 40), (64, 35))
SIZED = 16
"""Images encoded to learn how large thumbnails become."""
SHOWN = 10
"""Neighbours in a row."""
LABEL_LETTERS = 34

RIGHT, WRONG = "\N{CHECK MARK}", "\N{MULTIPLICATION X}"


class Thumbnails:
    """Makes thumbnails of items and records which it could not make.

    Args:
        enabled: if False, every picture is an empty frame.
        max_bytes: characters that all <img> together may take.
    """

    def __init__(self, *, enabled: bool = True, max_bytes: int = MAX_BYTES) -> None:
        self.enabled, self.left = enabled, max_bytes
        self.unreadable: dict[str, str] = {}
        self.left_out = 0
        self._encoded: dict[tuple[str, str], str | None] = {}
        self._glyphs: dict[str, NDArray[np.uint8]] | None = None
        self._tables: list[ItemTable] = []

    def number(self, table: ItemTable) -> int:
        """Number of a table on the page, by which its items are found."""
        for place, known in enumerate(self._tables):
            if known is table:
                return place
        self._tables.append(table)
        return len(self._tables) - 1

    def of(self, table: ItemTable, row: int) -> str:
        """An <img> of an item, or a frame with its text or with the name of its file."""
        if row >= len(table):
            return _frame("distractor")
        path = table.paths[row]
        about = f"{table.shown_name(row)}, {table.caption(row)}"
        place = f"{self.number(table)} {row}"
        if table.texts:
            return element("span", text(table.texts[row]), class_="frame text", title=about, data_item=place)
        encoded = self._cached(table, path) if self.enabled else None
        if encoded is not None and len(encoded) > self.left:
            self.left_out += 1
            encoded = None
        if encoded is None:
            return _frame(Path(path).name, about, place)
        self.left -= len(encoded)
        return f'<img src="{self.prefix}{encoded}" alt="{text(about)}" title="{text(about)}" data-item="{place}">'

    def encode_all(self, table: ItemTable, rows: Sequence[int], max_bytes: int) -> list[str | None]:
        """Base64 of items in a size that lets all of them fit in `max_bytes` characters; None where there is none."""
        if not self.enabled or not rows or table.texts:
            return [None] * len(rows)
        if table.name.startswith("glyphs/"):
            self._glyph(table.name, table.paths[rows[0]])  # drawn once, not by every thread
        side, quality = self._fitting_size(table, rows, max_bytes)
        results: list[str | None] = []
        encoding = prefetch(
            lambda row: self._attempt(table, table.paths[row], side, quality), rows, threads=default_threads(), ahead=64
        )
        for row, found in with_progress(encoding, len(rows), "making thumbnails", shown=True):
            encoded = None
            if isinstance(found, Exception):
                self.unreadable[table.paths[row]] = _reason(found)
            elif len(found) > max_bytes:
                self.left_out += 1
            else:
                encoded = found
                max_bytes -= len(found)
            results.append(encoded)
        return results

    def _fitting_size(self, table: ItemTable, rows: Sequence[int], max_bytes: int) -> tuple[int, int]:
        chosen = [rows[i] for i in np.linspace(0, len(rows) - 1, min(SIZED, len(rows))).astype(int).tolist()]
        for side, quality in SIZES[:-1]:
            tried = [self._attempt(table, table.paths[row], side, quality) for row in chosen]
            sizes = [len(each) for each in tried if isinstance(each, str)]
            if not sizes or 1.06 * len(rows) * float(np.mean(sizes)) <= max_bytes:
                return side, quality
        return SIZES[-1]

    @property
    def prefix(self) -> str:
        """Beginning of the address of every thumbnail."""
        return f"data:image/{_format().lower()};base64,"

    def remarks(self) -> list[str]:
        """Remarks about pictures that are missing."""
        found = [] if self.enabled else ["The page was made without pictures."]
        if self.unreadable:
            path, reason = next(iter(self.unreadable.items()))
            found.append(f"{plural(len(self.unreadable), 'picture')} could not be read; the first is {path}: {reason}.")
        if self.left_out:
            found.append(f"{plural(self.left_out, 'picture')} omitted to keep the page small.")
        return found

    def _cached(self, table: ItemTable, path: str) -> str | None:
        key = (str(table.root), path)
        if key not in self._encoded:
            found = self._attempt(table, path, SIDE, QUALITY)
            if isinstance(found, Exception):
                self.unreadable[path] = _reason(found)
            self._encoded[key] = found if isinstance(found, str) else None
        return self._encoded[key]

    def _attempt(self, table: ItemTable, path: str, side: int, quality: int) -> "str | OSError | ValueError | ImportError":
        try:
            return self._encode(table, path, side, quality)
        except (OSError, ValueError, ImportError) as error:
            return error

    def _encode(self, table: ItemTable, path: str, side: int, quality: int) -> str:
        from PIL import Image

        def small(image: Image.Image) -> Image.Image:
            # a JPEG is decoded at no more than the size that the thumbnail needs
            image.draft("RGB", (2 * side, 2 * side))
            return image.copy()

        if table.name.startswith("glyphs/"):
            image: Image.Image = Image.fromarray(self._glyph(table.name, path))
        else:
            # table.csv may come from anywhere: nothing outside its root is shown
            complaint = path_complaint(path)
            if complaint:
                raise ValueError(complaint)
            file_path = table.root / path
            try:
                image = read_guarded(file_path, small)
            except UnreadableImageError as error:
                raise ValueError(str(error).removeprefix(f"{file_path} ")) from error
        if image.mode in ("RGBA", "LA", "P", "PA"):
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("RGB")
        image.thumbnail((side, side))
        file = io.BytesIO()
        image.save(file, format=_format(), quality=quality)
        return base64.b64encode(file.getvalue()).decode("ascii")

    def _glyph(self, name: str, path: str) -> NDArray[np.uint8]:
        """The built-in glyphs are not files: they are drawn again."""
        if self._glyphs is None:
            from rankgrad.data.readers import read

            glyphs: dict[str, NDArray[np.uint8]] = {}
            for split in read("glyphs", None).splits.values():
                assert split.pixels is not None
                glyphs |= zip(split.paths, split.pixels, strict=True)
            self._glyphs = glyphs
        if path not in self._glyphs:
            raise ValueError(f"{name} has no such glyph")
        return self._glyphs[path]


@cache
def _format() -> str:
    """WebP is a third smaller than JPEG, where Pillow was built with it."""
    from PIL import features

    return "WEBP" if features.check("webp") else "JPEG"


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _frame(name: str, about: str | None = None, place: str | None = None) -> str:
    return element("span", text(cut_middle(name, 18)), class_="frame", title=about, data_item=place)


def nearest_of(evaluation: Evaluation, rows: Sequence[int], most: int = SHOWN) -> tuple[Index, NDArray[np.float32]] | str:
    """[len(rows), k] neighbours of queries, given by position, and their scores; or the reason why there are none."""
    kept = evaluation.queries.get("neighbours")
    if kept is not None and "scores" in evaluation.queries:
        return kept[list(rows), :most], evaluation.queries["scores"][list(rows), :most]
    if evaluation.protocol == "vehicleid-official":
        return "vehicleid-official draws several random galleries, so there is no single list of neighbours."
    table, index = evaluation.table, evaluation.index
    if table is None or index is None or evaluation.embeddings is None:
        return "Neighbours need queries.npz, table.csv and embeddings.npy: run `rankgrad eval` again."
    gallery = np.flatnonzero(table.is_gallery)
    gallery_row = np.full(len(table), -1)
    gallery_row[gallery] = np.arange(len(gallery))
    rows_of_queries = index[list(rows)]
    k = min(most, len(gallery) - 1)
    if k < 1:
        return "The gallery has only one image."
    scores, found = neighbours(
        evaluation.embeddings[rows_of_queries], evaluation.embeddings[gallery], k, gallery_row[rows_of_queries]
    )
    return gallery[found], scores


def retrieval_row(
    evaluation: Evaluation, query: int, near: Index, scores: NDArray[np.float32], thumbnails: Thumbnails, *, about: str
) -> str:
    """A query and its neighbours, those of its class marked by colour and symbol."""
    query_part = query_cell(evaluation, query, thumbnails, about)
    return element("div", query_part, answers(evaluation, query, near, scores, thumbnails), class_="found")


def query_cell(evaluation: Evaluation, query: int, thumbnails: Thumbnails, about: str) -> str:
    """The thumbnail of a query with its class."""
    table, index = evaluation.table, evaluation.index
    assert table is not None
    assert index is not None
    row = int(index[query])
    told = [part for part in (table.categories[row], *about.split(", ")) if part]
    return element(
        "div",
        thumbnails.of(table, row),
        element("b", text(cut_middle(table.caption(row), 26))),
        *(element("small", text(cut_middle(part, 40))) for part in told),
        class_="query",
    )


def answers(evaluation: Evaluation, query: int, near: Index, scores: NDArray[np.float32], thumbnails: Thumbnails) -> str:
    """The neighbours of a query, the nearest first."""
    table, index = evaluation.table, evaluation.index
    assert table is not None
    assert index is not None
    own = table.classes[int(index[query])]
    items = []
    for row, score in zip(near.tolist(), scores.tolist(), strict=True):
        label = table.caption(row) if row < len(table) else "distractor"
        right = None if evaluation.by_lists else row < len(table) and bool(table.classes[row] == own)
        kind, sign, word = {None: ("", "", ""), True: ("right", RIGHT, "right"), False: ("wrong", WRONG, "wrong")}[right]
        mark = element("i", sign, role="img", aria_label=word) if sign else ""
        caption = element("span", mark, text(cut_middle(label, LABEL_LETTERS)))
        cosine = element("small", f"{score:.3f}".replace("-", MINUS))
        items.append(element("li", thumbnails.of(table, row), caption, cosine, class_=kind or None))
    return element("ol", *items)
