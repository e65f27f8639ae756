"""Approximate search: an index of faiss chosen by size, tuned to a recall, and measured against exact search.

    flat     every vector, exact
    hnsw     a graph over the vectors; its memory is theirs and some more
    ivfpq    the vectors compressed and sorted into lists; candidates are scored again from embeddings.npy

All search by inner product, which is the cosine because embeddings have length 1.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_choice
from rankgrad.data.seeds import bits, permutation
from rankgrad.eval import neighbours
from rankgrad.search.gallery import Gallery
from rankgrad.search.searcher import INDEX, INDEX_ABOUT, INDEX_FORMAT, Searcher, exact_scores
from rankgrad.train.progress import Progress

if TYPE_CHECKING:
    import faiss

KINDS = ("flat", "hnsw", "ivfpq")
# sizes from which the next kind is worth its approximation: a flat search of as many takes some milliseconds, and the vectors
# of as many begin to fill a machine's memory
HNSW_FROM, IVFPQ_FROM = 50_000, 1_000_000
QUERIES = 1000
KS = (1, 10, 100)
# recall is tuned at this k
TUNED_K = 10
# an answer is right if it scores no less than the k-th neighbour, up to the rounding of float32 dot products
ROUNDING = 1e-5
# vectors added at once
ADDED = 65_536

HNSW_LINKS, HNSW_EFFORT = 32, 200
# what faiss wants to see of every centre that it learns, and what is enough
LEAST_PER_CENTRE, ENOUGH_PER_CENTRE = 39, 64


@dataclass(frozen=True)
class Measured:
    """How an index answers, against exact search.

    Attributes:
        kind: of the index.
        why: the reason for its kind and effort.
        queries: images of the gallery that were searched from, each left out of its own answers.
        recall: for each k, the share of the k answers that belong to the k nearest; ties count as right.
        median_ms: of one query on one thread, k = 10.
        p95_ms: the same, 95th percentile.
        bytes: of the index file.
        exact_median_ms: of exact search, for comparison.
    """

    kind: str
    why: str
    queries: int
    recall: dict[int, float]
    median_ms: float
    p95_ms: float
    bytes: int
    exact_median_ms: float

    def table(self) -> str:
        """Lines for people."""
        ks = list(self.recall)
        header = ["index", *(f"recall@{k}" for k in ks), "median ms", "p95 ms", "MB"]
        row = [
            self.kind,
            *(f"{self.recall[k]:.4f}" for k in ks),
            f"{self.median_ms:.3f}",
            f"{self.p95_ms:.3f}",
            f"{self.bytes / 1e6:.1f}",
        ]
        exact = ["exact", *("1.0000" for _ in ks), f"{self.exact_median_ms:.3f}", "", ""]
        widths = [max(map(len, column)) for column in zip(header, row, exact, strict=True)]
        lines = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in (header, row, exact))
        return "\n".join("  ".join(line).rstrip() for line in lines)


def choose_kind(items: int) -> tuple[str, str]:
    """The kind of index for so many images, and why."""
    if items < HNSW_FROM:
        return "flat", f"{items:,} images are below {HNSW_FROM:,}: comparing with all of them is fast and exact"
    if items < IVFPQ_FROM:
        return "hnsw", f"{items:,} images are below {IVFPQ_FROM:,}: a graph is fast, and the vectors fit in memory"
    return "ivfpq", f"{items:,} images are {IVFPQ_FROM:,} or more: compressed vectors save memory"


def build_index(gallery: Gallery, folder: Path, *, kind: str = "auto", recall: float = 0.95, shown: bool = True) -> Measured:
    """Build, tune, measure and write an index.

    Args:
        gallery: what to index.
        folder: for index.faiss and index.json, which are replaced where they are; may be the gallery's own.
        kind: one of `KINDS`, or "auto".
        recall: what the effort of a search (efSearch of hnsw, nprobe of ivfpq) is raised to reach, at 10 neighbours.
        shown: progress on standard error.
    """
    check_choice(kind, ("auto", *KINDS), name="kind", caller="build_index")
    if not 0 < recall <= 1:
        raise ValueError(f"build_index: recall must lie in (0, 1], got {recall}")
    if len(gallery) < 2:
        raise ValueError(f"build_index: at least 2 images are wanted, got {len(gallery)}")
    chosen, why = choose_kind(len(gallery)) if kind == "auto" else (kind, "as asked")
    began = time.perf_counter()
    index, settings = _BUILDERS[chosen](gallery.embeddings)
    _add(index, gallery.embeddings, shown)
    seconds = time.perf_counter() - began
    searcher = Searcher(gallery, index, {"kind": chosen}, again=chosen == "ivfpq")
    truth = _Truth.of(gallery)
    if chosen != "flat":
        effort, reached = _tune(searcher, truth, recall)
        settings |= effort
        why += f"; {', '.join(f'{name} {value}' for name, value in effort.items())} " + (
            f"reaches recall@{truth.tuned_k} {recall:g}"
            if reached >= recall
            else f"is the most there is, and reaches recall@{truth.tuned_k} {reached:.3f} of the {recall:g} asked for"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = _write_faiss(index, folder)
    measured = _measure(searcher, truth, why, written)
    about = {
        "format": INDEX_FORMAT,
        "kind": chosen,
        "settings": settings,
        "images": len(gallery),
        "dim": gallery.embeddings.shape[1],
        # beside one another they may be moved together
        "embeddings": os.path.relpath(gallery.folder.resolve(), folder.resolve()),
        "digest": gallery.digest,
        "build_seconds": round(seconds, 3),
        "measured": asdict(measured),
    }
    unfinished = folder / f".writing-{INDEX_ABOUT}"
    unfinished.write_text(f"{json.dumps(about, indent=1)}\n", encoding="utf-8")
    unfinished.replace(folder / INDEX_ABOUT)
    return measured


def _flat(embeddings: NDArray[np.float32]) -> "tuple[faiss.Index, dict[str, Any]]":
    import faiss

    return faiss.IndexFlatIP(embeddings.shape[1]), {}


def _hnsw(embeddings: NDArray[np.float32]) -> "tuple[faiss.Index, dict[str, Any]]":
    import faiss

    index = faiss.IndexHNSWFlat(embeddings.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_EFFORT
    return index, {"M": HNSW_LINKS, "efConstruction": HNSW_EFFORT}


def _ivfpq(embeddings: NDArray[np.float32]) -> "tuple[faiss.Index, dict[str, Any]]":
    import faiss

    items, dim = embeddings.shape
    # 8 bits a code where there is enough to learn them from
    code_bits = min(8, int(math.log2(max(items // LEAST_PER_CENTRE, 1))))
    if code_bits < 4:
        raise ValueError(
            f"build_index: ivfpq learns from at least {16 * LEAST_PER_CENTRE} images, got {items}: use the kind flat or hnsw"
        )
    # about 4 sqrt(N) lists, a power of two
    lists = 2 ** min(round(math.log2(4 * math.sqrt(items))), int(math.log2(items // LEAST_PER_CENTRE)))
    # four dimensions a code: a sixteenth of the memory of float32
    codes = max((n for n in range(1, dim // 4 + 1) if dim % n == 0), default=1)
    quantizer = faiss.IndexFlatIP(dim)
    index = faiss.IndexIVFPQ(quantizer, dim, lists, codes, code_bits, faiss.METRIC_INNER_PRODUCT)
    sample = np.sort(_shuffled(items)[: ENOUGH_PER_CENTRE * max(lists, 2**code_bits)])
    index.train(np.ascontiguousarray(embeddings[sample]))
    return index, {"lists": lists, "codes": codes, "bits": code_bits, "trained_on": len(sample)}


_BUILDERS: "dict[str, Callable[[NDArray[np.float32]], tuple[faiss.Index, dict[str, Any]]]]" = {
    "flat": _flat,
    "hnsw": _hnsw,
    "ivfpq": _ivfpq,
}


def _add(index: "faiss.Index", embeddings: NDArray[np.float32], shown: bool) -> None:
    with Progress(len(embeddings), "indexing", unit="images", shown=shown) as progress:
        for first in range(0, len(embeddings), ADDED):
            block = np.ascontiguousarray(embeddings[first : first + ADDED])
            index.add(block)
            progress.advance(len(block))


@dataclass(frozen=True, eq=False)
class _Truth:
    """Queries out of the gallery and what exact search finds for them, themselves left out."""

    rows: NDArray[np.int64]
    queries: NDArray[np.float32]
    scores: NDArray[np.float32]

    @classmethod
    def of(cls, gallery: Gallery) -> "_Truth":
        rows = np.sort(_shuffled(len(gallery))[:QUERIES])
        queries = np.ascontiguousarray(gallery.embeddings[rows])
        most = min(max(KS), len(gallery) - 1)
        scores, _ = neighbours(queries, gallery.embeddings, most, self_index=rows, normalize=False)
        return cls(rows, queries, scores)

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(k for k in KS if k <= self.scores.shape[1])

    @property
    def tuned_k(self) -> int:
        return min(TUNED_K, len(self.scores[0]))

    def recall(self, searcher: Searcher, k: int) -> float:
        """Of the answers that `searcher` gives when it is asked for k."""
        _, found = searcher.search(self.queries, k + 1)
        # the query itself goes to the end, and with it what stands for nothing found
        order = np.argsort((found == self.rows[:, None]) | (found < 0), axis=1, kind="stable")
        found = np.take_along_axis(found, order, axis=1)[:, :k]
        found[found == self.rows[:, None]] = -1
        scores = exact_scores(self.queries, searcher.gallery.embeddings, found)
        return float((scores >= self.scores[:, k - 1 : k] - ROUNDING).mean())


def _tune(searcher: Searcher, truth: _Truth, target: float) -> tuple[dict[str, int], float]:
    """Double the effort of a search until it reaches the target; the setting and the recall."""
    import faiss

    index = searcher.index
    compressed = isinstance(index, faiss.IndexIVF)
    reached, effort = 0.0, 0
    for effort in _doubled(1, index.nlist) if isinstance(index, faiss.IndexIVF) else _doubled(16, 4096):
        if isinstance(index, faiss.IndexIVF):
            index.nprobe = effort
        elif isinstance(index, faiss.IndexHNSW):
            index.hnsw.efSearch = effort
        reached = truth.recall(searcher, truth.tuned_k)
        if reached >= target:
            break
    return {"nprobe" if compressed else "efSearch": effort}, reached


def _doubled(first: int, last: int) -> Iterator[int]:
    value = first
    while value < last:
        yield value
        value *= 2
    yield last


def _measure(searcher: Searcher, truth: _Truth, why: str, written: int) -> Measured:
    recall = {k: truth.recall(searcher, k) for k in truth.ks}
    with _one_thread():
        times = _latencies(lambda query: searcher.search(query, TUNED_K), truth.queries)
        exact = Searcher(searcher.gallery)
        # a scan of the whole gallery each: a few tell enough
        exact_times = _latencies(lambda query: exact.search(query, TUNED_K), truth.queries[:20])
    return Measured(
        kind=searcher.kind,
        why=why,
        queries=len(truth.queries),
        recall=recall,
        median_ms=float(np.median(times)),
        p95_ms=float(np.percentile(times, 95)),
        bytes=written,
        exact_median_ms=float(np.median(exact_times)),
    )


def _latencies(search: Callable[[NDArray[np.float32]], object], queries: NDArray[np.float32]) -> list[float]:
    """Milliseconds of each query alone, after one that counts for nothing."""
    search(queries[:1])
    times = []
    for i in range(len(queries)):
        began = time.perf_counter()
        search(queries[i : i + 1])
        times.append(1e3 * (time.perf_counter() - began))
    return times


@contextmanager
def _one_thread() -> Iterator[None]:
    import faiss
    import torch

    before = faiss.omp_get_max_threads(), torch.get_num_threads()
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before[0])
        torch.set_num_threads(before[1])


def _write_faiss(index: "faiss.Index", folder: Path) -> int:
    import faiss

    unfinished = folder / f".writing-{INDEX}"
    try:
        faiss.write_index(index, str(unfinished))
    except RuntimeError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{folder / INDEX} cannot be written: make room there or give another folder with --out") from error
    unfinished.replace(folder / INDEX)
    return (folder / INDEX).stat().st_size


def _shuffled(items: int) -> NDArray[np.int64]:
    return permutation(items, bits(0, "index"))
