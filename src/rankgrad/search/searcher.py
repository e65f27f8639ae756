"""Nearest neighbours in a gallery: exactly, or with an index and then exactly among its candidates."""

import importlib
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rankgrad.eval import neighbours
from rankgrad.search.gallery import ABOUT, BLOCK, Gallery, unit_rows
from rankgrad.search.signatures import is_own

if TYPE_CHECKING:
    import faiss

INDEX, INDEX_ABOUT = "index.faiss", "index.json"
INDEX_FORMAT = 1
# candidates that a compressing index returns for each neighbour asked for, to be ordered by their exact scores
CANDIDATES = 10
LEAST_CANDIDATES = 100


@dataclass(frozen=True)
class Effort:
    """How thoroughly an index is searched: efSearch of hnsw, nprobe of ivfpq.

    Attributes:
        least: for a few neighbours.
        per_neighbour: for many: the effort follows the number of neighbours asked for.
    """

    least: int
    per_neighbour: float = 0.0

    def at(self, k: int) -> int:
        """Effort of a search for `k` neighbours."""
        return max(self.least, math.ceil(self.per_neighbour * k))


@dataclass(frozen=True, eq=False)
class Searcher:
    """Searches a gallery.

    Attributes:
        gallery: the embeddings.
        index: of faiss; None searches exactly.
        kind: of the index, or "exact".
        effort: of a search in the index; None for an index that has no such setting.
        rescore: score the candidates of the index again, because it holds them compressed.
    """

    gallery: Gallery
    index: "faiss.Index | None" = None
    kind: str = "exact"
    effort: Effort | None = None
    rescore: bool = False
    # faiss keeps statistics of its searches in the index
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, folder: Path, *, exact: bool = False, images: Path | None = None) -> "Searcher":
        """Open the index in `folder`, or the embeddings in it to search exactly.

        Args:
            folder: written by `build_index`, or by `embed_images` alone.
            exact: ignore the index, which needs no faiss.
            images: see `Gallery.open`.
        """
        path = folder / INDEX_ABOUT
        if not path.is_file():
            if (folder / ABOUT).is_file():
                return cls(Gallery.open(folder, images=images))
            raise FileNotFoundError(f"{folder} holds neither {INDEX_ABOUT} nor {ABOUT}: make it with embed and index")
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            if about["format"] != INDEX_FORMAT:
                raise ValueError(f"its format is {about['format']} and not {INDEX_FORMAT}")
            named, digest, kind = folder / about["embeddings"], str(about["digest"]), str(about["kind"])
            effort = effort_in(kind, about["settings"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path} cannot be read by this version ({error}): rebuild the index") from error
        if named.resolve() != folder.resolve() and not is_own(index_claims(about), about.get("signature")):
            raise ValueError(
                f"{path} says that its embeddings are in {named.resolve()}, but it was not written by you on this machine. "
                f"Rebuild it with: rankgrad index EMBEDDINGS --out {folder}"
            )
        gallery = Gallery.open(named.resolve(), images=images)
        if exact:
            return cls(gallery)
        if digest != gallery.digest:
            raise ValueError(
                f"the index in {folder} was built from different embeddings than those in {gallery.folder}; rebuild it with: "
                f"rankgrad index {gallery.folder}"
            )
        return cls(gallery, _read_index(folder / INDEX, gallery), kind, effort, rescore=kind == "ivfpq")

    def search(
        self, queries: NDArray[Any], k: int, *, among: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[Q, k] cosines and rows, best first; k is cut to the number of candidates.

        Args:
            queries: [Q, d], of any length above 0.
            k: number of neighbours.
            among: rows of the gallery to search, all by default. They are searched exactly.
        """
        if queries.ndim != 2 or queries.shape[1] != self.gallery.embeddings.shape[1]:
            raise ValueError(
                f"Searcher: queries must be [Q, {self.gallery.embeddings.shape[1]}] as the gallery is, got {queries.shape}"
            )
        units = unit_rows(queries)
        if among is not None:
            return self._search_among(units, min(k, len(among)), among)
        k = min(k, len(self.gallery))
        if self.index is None:
            return self._search_exactly(units, k)
        scores, rows = self.search_index(units, k)
        # a graph may be disconnected, and lists may be short: what the index does not find is searched for exactly
        missing = np.flatnonzero((rows < 0).any(axis=1))
        if len(missing):
            scores[missing], rows[missing] = self._search_exactly(units[missing], k)
        return scores, rows

    def search_index(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What the index alone finds for queries of length 1; row -1 where it finds fewer than k."""
        assert self.index is not None
        candidates = min(max(CANDIDATES * k, LEAST_CANDIDATES), len(self.gallery)) if self.rescore else k
        # faiss.contrib.torch_utils, which other libraries import, replaces `search` by one that takes no parameters
        search = getattr(self.index, "search_numpy", self.index.search)
        with self._lock:
            scores, rows = search(queries, candidates, params=self._parameters(k))
        return self._rescored(queries, rows, k) if self.rescore else (scores, rows)

    def search_from(
        self, row: int, k: int, *, among: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[k] cosines and rows of the neighbours of an image of the gallery, without itself."""
        scores, rows = self.search(np.array(self.gallery.embeddings[row])[None], k + 1, among=among)
        others = rows[0] != row
        return scores[0][others][:k], rows[0][others][:k]

    def _parameters(self, k: int) -> "faiss.SearchParameters | None":
        if self.effort is None:
            return None
        # the types that faiss ships do not know its parameters
        library: Any = importlib.import_module("faiss")
        effort = self.effort.at(k)
        if isinstance(self.index, library.IndexIVF):
            return cast("faiss.SearchParameters", library.SearchParametersIVF(nprobe=min(effort, self.index.nlist)))
        return cast("faiss.SearchParameters", library.SearchParametersHNSW(efSearch=effort))

    def _search_exactly(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if len(queries) > 1:
            return neighbours(queries, self.gallery.embeddings, k, normalize=False)
        # for a single query a product with a vector is ten times as fast as tiles of queries; the order is the same
        scores = self.gallery.embeddings @ queries[0]
        best = np.argsort(-scores, kind="stable")[None, :k]
        return scores[best], best

    def _search_among(
        self, queries: NDArray[np.float32], k: int, among: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The best of some rows, which are read block by block."""
        best_scores = np.empty((len(queries), 0), np.float32)
        best_rows = np.empty((len(queries), 0), np.int64)
        for first in range(0, len(among), BLOCK):
            block = among[first : first + BLOCK]
            scores = np.concatenate([best_scores, queries @ self.gallery.embeddings[block].T], axis=1)
            rows = np.concatenate([best_rows, np.broadcast_to(block, (len(queries), len(block)))], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            best_scores, best_rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
        return best_scores, best_rows

    def _rescored(
        self, queries: NDArray[np.float32], rows: NDArray[np.int64], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores = exact_scores(queries, self.gallery.embeddings, rows)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def is_searchable(folder: Path) -> bool:
    """Whether `Searcher.open` would find embeddings or an index in `folder`."""
    return (folder / INDEX_ABOUT).is_file() or (folder / ABOUT).is_file()


def index_claims(about: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which embeddings an index.json stands for."""
    return {"embeddings": about["embeddings"], "digest": about["digest"]}


def effort_in(kind: str, settings: Mapping[str, Any]) -> Effort | None:
    """The effort that index.json records; an index written before it followed k gets what it needs for that."""
    if kind == "flat":
        return None
    name, per_neighbour = ("nprobe", 0.0) if kind == "ivfpq" else ("efSearch", 2.0)
    return Effort(int(settings[name]), float(settings.get(f"{name}_per_neighbour", per_neighbour)))


def exact_scores(queries: NDArray[np.float32], gallery: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """[Q, K] cosines of each query with its rows of the gallery; -inf for row -1."""
    scores = np.full(rows.shape, -np.inf, np.float32)
    for query, (vector, chosen) in enumerate(zip(queries, rows, strict=True)):
        found = chosen >= 0
        scores[query, found] = gallery[chosen[found]] @ vector
    return scores


def _read_index(path: Path, gallery: Gallery) -> "faiss.Index":
    import faiss

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: rebuild the index")
    try:
        index = faiss.read_index(str(path))
    except RuntimeError as error:
        raise ValueError(f"{path} cannot be read: rebuild the index") from error
    if (index.ntotal, index.d) != gallery.embeddings.shape:
        raise ValueError(
            f"{path} is of {index.ntotal} images and {index.d} dimensions, the embeddings of "
            f"{gallery.embeddings.shape[0]} and {gallery.embeddings.shape[1]}: rebuild the index"
        )
    return index
