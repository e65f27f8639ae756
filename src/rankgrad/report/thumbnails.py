"""Thumbnails inside the page, as many as its size allows, and rows of them: a query and its neighbours."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import plural
from rankgrad.data.image_files import UnreadableImageError, read_guarded
from rankgrad.data.table import path_complaint
from rankgrad.eval import neighbours
from rankgrad.report.markup import MINUS, cut_middle, element, text
from rankgrad.report.run_reader import Evaluation, Index, ItemTable

if TYPE_CHECKING:
    from PIL import Image

SIDE = 96
QUALITY = 78
# base64 of all thumbnails together; the charts of a few runs take about a megabyte more
MAX_BYTES = 3_500_000
SHOWN = 10
"""Neighbours in a row."""
LABEL_LETTERS = 13

RIGHT, WRONG = "\N{CHECK MARK}", "\N{MULTIPLICATION X}"


class Thumbnails:
    """Makes <img> elements of items and records which it could not make.

    Args:
        enabled: if False, every picture is an empty frame.
        max_bytes: characters that all thumbnails together may take.
    """

    def __init__(self, *, enabled: bool = True, max_bytes: int = MAX_BYTES) -> None:
        self.enabled, self.left = enabled, max_bytes
        self.unreadable: dict[str, str] = {}
        self.left_out = 0
        self._encoded: dict[tuple[str, str], str | None] = {}
        self._drawn: dict[str, NDArray[np.uint8]] | None = None

    def of(self, table: ItemTable, row: int) -> str:
        """The thumbnail of an item, or a frame with the name of its file."""
        if row >= len(table):
            return _frame("distractor")
        path = table.paths[row]
        about = f"{path}, {table.caption(row)}"
        encoded = self._encode(table, path) if self.enabled else None
        if encoded is None:
            return _frame(Path(path).name, about)
        if len(encoded) > self.left:
            self.left_out += 1
            return _frame(Path(path).name, about)
        self.left -= len(encoded)
        source = f"data:image/jpeg;base64,{encoded}"
        return f'<img src="{source}" alt="{text(about)}" title="{text(about)}">'

    def remarks(self) -> list[str]:
        """Remarks about pictures that are missing."""
        found = [] if self.enabled else ["The page was made without pictures."]
        if self.unreadable:
            path, reason = next(iter(self.unreadable.items()))
            found.append(f"{plural(len(self.unreadable), 'picture')} could not be read; the first is {path}: {reason}.")
        if self.left_out:
            found.append(f"{plural(self.left_out, 'picture')} omitted to keep the page small.")
        return found

    def _encode(self, table: ItemTable, path: str) -> str | None:
        key = (str(table.root), path)
        if key not in self._encoded:
            try:
                self._encoded[key] = self._jpeg(table, path)
            except (OSError, ValueError, ImportError) as error:
                self.unreadable[path] = str(error) if isinstance(error, ImportError) else _reason(error)
                self._encoded[key] = None
        return self._encoded[key]

    def _jpeg(self, table: ItemTable, path: str) -> str:
        from PIL import Image

        if table.name.startswith("glyphs/"):
            image: Image.Image = Image.fromarray(self._glyph(table.name, path))
        else:
            # table.csv may come from anywhere: nothing outside its root is shown
            complaint = path_complaint(path)
            if complaint:
                raise ValueError(complaint)
            file_path = table.root / path
            try:
                image = read_guarded(file_path, _small)
            except UnreadableImageError as error:
                raise ValueError(str(error).removeprefix(f"{file_path} ")) from error
        if image.mode in ("RGBA", "LA", "P", "PA"):
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
        image.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=QUALITY, optimize=True)
        return base64.b64encode(file.getvalue()).decode("ascii")

    def _glyph(self, name: str, path: str) -> NDArray[np.uint8]:
        """The built-in glyphs are not files: they are drawn again."""
        if self._drawn is None:
            from rankgrad.data.readers import read

            drawn: dict[str, NDArray[np.uint8]] = {}
            for split in read("glyphs", None).splits.values():
                assert split.pixels is not None
                drawn |= zip(split.paths, split.pixels, strict=True)
            self._drawn = drawn
        if path not in self._drawn:
            raise ValueError(f"{name} has no such glyph")
        return self._drawn[path]


def _small(image: "Image.Image") -> "Image.Image":
    """Decoded, a JPEG at no more than the size that a thumbnail needs."""
    image.draft("RGB", (2 * SIDE, 2 * SIDE))
    return image.copy()


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _frame(name: str, about: str | None = None) -> str:
    return element("span", text(cut_middle(name, 18)), class_="frame", title=about)


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
