"""The nearest images of a gallery: exactly, or through an index and then exactly among its candidates."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankgrad.eval import neighbours
from rankgrad.search.gallery import ABOUT, Gallery

if TYPE_CHECKING:
    import faiss

INDEX, INDEX_ABOUT = "index.faiss", "index.json"
INDEX_FORMAT = 1
# candidates that a compressing index gives for each neighbour that is wanted, to be ordered by their exact scores
CANDIDATES = 10
LEAST_CANDIDATES = 100


@dataclass(frozen=True, eq=False)
class Searcher:
    """Searches a gallery.

    Attributes:
        gallery: the embeddings.
        index: of faiss; None searches exactly.
        about: what index.json says, empty without an index.
        again: whether candidates of the index are scored again, because it holds them compressed.
    """

    gallery: Gallery
    index: "faiss.Index | None" = None
    about: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False
    # faiss keeps what a search visited in the index
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def kind(self) -> str:
        return str(self.about["kind"]) if self.index is not None else "exact"

    @classmethod
    def open(cls, folder: Path, *, exact: bool = False) -> "Searcher":
        """The index in `folder`, or the embeddings in it searched exactly.

        Args:
            folder: written by `build_index`, or by `embed_images` alone.
            exact: leave the index aside, which needs no faiss.
        """
        path = folder / INDEX_ABOUT
        if not path.is_file():
            if (folder / ABOUT).is_file():
                return cls(Gallery.open(folder))
            raise FileNotFoundError(f"{folder} holds neither {INDEX_ABOUT} nor {ABOUT}: make it with embed and index")
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            if about["format"] != INDEX_FORMAT:
                raise ValueError(f"its format is {about['format']} and not {INDEX_FORMAT}")
            named, digest, kind = (folder / about["embeddings"]).resolve(), about["digest"], about["kind"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read by this version ({error}): make the index again") from error
        gallery = Gallery.open(named)
        if exact:
            return cls(gallery)
        if digest != gallery.digest:
            raise ValueError(f"the index in {folder} is of other embeddings than now lie in {gallery.folder}: make it again")
        import faiss

        if not (folder / INDEX).is_file():
            raise FileNotFoundError(f"{folder / INDEX} is missing: make the index again")
        try:
            index = faiss.read_index(str(folder / INDEX))
        except RuntimeError as error:
            raise ValueError(f"{folder / INDEX} cannot be read: make the index again") from error
        if (index.ntotal, index.d) != gallery.embeddings.shape:
            raise ValueError(
                f"{folder / INDEX} is of {index.ntotal} images and {index.d} dimensions, the embeddings of "
                f"{gallery.embeddings.shape[0]} and {gallery.embeddings.shape[1]}: make the index again"
            )
        return cls(gallery, index, about, again=kind == "ivfpq")

    def search(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[Q, k] cosines and rows, best first; k is cut to the size of the gallery.

        An index may find fewer than k: row -1 stands for what it did not find.
        """
        if queries.ndim != 2 or queries.shape[1] != self.gallery.embeddings.shape[1]:
            raise ValueError(
                f"Searcher: queries must be [Q, {self.gallery.embeddings.shape[1]}] as the gallery is, got {queries.shape}"
            )
        k = min(k, len(self.gallery))
        if self.index is None:
            return self._exactly(np.ascontiguousarray(queries), k)
        asked = min(max(CANDIDATES * k, LEAST_CANDIDATES), len(self.gallery)) if self.again else k
        with self._lock:
            scores, rows = self.index.search(np.ascontiguousarray(queries), asked)
        return self._rescored(queries, rows, k) if self.again else (scores, rows)

    def search_from(self, row: int, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[k] cosines and rows of the neighbours of an image of the gallery, itself left out."""
        scores, rows = self.search(np.array(self.gallery.embeddings[row])[None], min(k + 1, len(self.gallery)))
        others = rows[0] != row
        return scores[0][others][:k], rows[0][others][:k]

    def _exactly(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if len(queries) > 1:
            return neighbours(queries, self.gallery.embeddings, k, normalize=False)
        # for a single query a product with a vector is ten times as fast as tiles of queries; the order is the same
        scores = self.gallery.embeddings @ queries[0]
        best = np.argsort(-scores, kind="stable")[None, :k]
        return scores[best], best

    def _rescored(
        self, queries: NDArray[np.float32], rows: NDArray[np.int64], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores = exact_scores(queries, self.gallery.embeddings, rows)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def exact_scores(queries: NDArray[np.float32], gallery: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """[Q, K] cosines of each query with its rows of the gallery; -inf for row -1."""
    scores = np.full(rows.shape, -np.inf, np.float32)
    for query, (vector, chosen) in enumerate(zip(queries, rows, strict=True)):
        found = chosen >= 0
        scores[query, found] = gallery[chosen[found]] @ vector
    return scores
