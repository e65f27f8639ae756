"""Approximate search: a faiss index chosen by size, tuned to a recall, and measured against exact search.

    flat     every vector, exact
    hnsw     a graph over the vectors; takes their memory and some more
    ivfpq    the vectors compressed and sorted into lists; candidates are scored again from embeddings.npy

All search by inner product, which is the cosine because embeddings have length 1. The effort of a search grows with the number
of neighbours asked for: a graph or a few lists that suffice for ten do not hold the hundred nearest.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_choice
from rankgrad._files import atomic_file, replace_file, write_error_reason
from rankgrad._messages import Progress, table
from rankgrad.data.seeds import bits, permutation
from rankgrad.eval import neighbours
from rankgrad.search.gallery import Gallery
from rankgrad.search.searcher import INDEX, INDEX_ABOUT, INDEX_FORMAT, Effort, Searcher, exact_scores, index_claims
from rankgrad.search.signatures import sign

if TYPE_CHECKING:
    import faiss

KINDS = ("flat", "hnsw", "ivfpq")
# sizes from which the next kind is worth its approximation: a flat search of as many takes some milliseconds, and the vectors
# of as many begin to fill a machine's memory
HNSW_FROM, IVFPQ_FROM = 50_000, 1_000_000
QUERIES = 1000
KS = (1, 10, 100)
# recall is tuned at the first, and for longer lists at the second
TUNED_K, TUNED_LONG_K = 10, 100
# an answer is right if it scores no less than the k-th neighbour, up to the rounding of float32 dot products
ROUNDING = 1e-5
# vectors added at once
ADDED = 65_536

HNSW_LINKS, HNSW_EFFORT = 32, 200
# vectors that faiss wants for each centre that it learns, and as many as help
LEAST_PER_CENTRE, ENOUGH_PER_CENTRE = 39, 64


@dataclass(frozen=True)
class IndexReport:
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
        """The figures beside those of exact search."""
        ks = list(self.recall)
        row = [
            self.kind,
            *(f"{self.recall[k]:.4f}" for k in ks),
            f"{self.median_ms:.3f}",
            f"{self.p95_ms:.3f}",
            f"{self.bytes / 1e6:.1f}",
        ]
        exact = ["exact", *("1.0000" for _ in ks), f"{self.exact_median_ms:.3f}", "", ""]
        return table(["index", *(f"recall@{k}" for k in ks), "median ms", "p95 ms", "MB"], [row, exact])


def choose_kind(items: int) -> tuple[str, str]:
    """The kind of index for this many images, and why."""
    if items < HNSW_FROM:
        return "flat", f"{items:,} images are below {HNSW_FROM:,}: comparing with all of them is fast and exact"
    if items < IVFPQ_FROM:
        return "hnsw", f"{items:,} images are below {IVFPQ_FROM:,}: a graph is fast, and the vectors fit in memory"
    return "ivfpq", f"{items:,} images are {IVFPQ_FROM:,} or more: compressed vectors save memory"


def build_index(gallery: Gallery, folder: Path, *, kind: str = "auto", recall: float = 0.95, shown: bool = True) -> IndexReport:
    """Build, tune, measure and write an index.

    Args:
        gallery: what to index.
        folder: for index.faiss and index.json, which are replaced where they are; may be the gallery's own.
        kind: one of `KINDS`, or "auto".
        recall: share of the nearest neighbours that a search must find; its effort (efSearch of hnsw, nprobe of ivfpq) is
            raised until it does, at 10 neighbours and at 100.
        shown: show progress on standard error.
    """
    check_choice(kind, ("auto", *KINDS), name="kind", caller="build_index")
    if not 0 < recall <= 1:
        raise ValueError(f"build_index: recall must lie in (0, 1], got {recall}")
    if len(gallery) < 2:
        raise ValueError(f"build_index: at least 2 images are needed, got {len(gallery)}")
    chosen, why = choose_kind(len(gallery)) if kind == "auto" else (kind, "as asked")
    began = time.perf_counter()
    index, settings = _BUILDERS[chosen](gallery.embeddings)
    _add(index, gallery.embeddings, shown)
    seconds = time.perf_counter() - began
    searcher = Searcher(gallery, index, chosen, rescore=chosen == "ivfpq")
    truth = _Truth.of(gallery)
    if chosen != "flat":
        searcher, reached = _tune(searcher, truth, recall)
        assert searcher.effort is not None
        name = "nprobe" if chosen == "ivfpq" else "efSearch"
        settings |= {name: searcher.effort.least, f"{name}_per_neighbour": searcher.effort.per_neighbour}
        why += f"; {name} {searcher.effort.least} " + (
            f"reaches recall@{truth.tuned_k} {recall:g}"
            if reached >= recall
            else f"is the maximum and reaches recall@{truth.tuned_k} {reached:.3f} of the {recall:g} asked for"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = _write_faiss(index, folder)
    report = _measure(searcher, truth, why, written)
    about: dict[str, Any] = {
        "format": INDEX_FORMAT,
        "kind": chosen,
        "settings": settings,
        "images": len(gallery),
        "dim": gallery.embeddings.shape[1],
        # relative, so that the two can be moved together
        "embeddings": os.path.relpath(gallery.folder.resolve(), folder.resolve()),
        "digest": gallery.digest,
        "build_seconds": round(seconds, 3),
        "measured": asdict(report),
    }
    about["signature"] = sign(index_claims(about))
    replace_file(folder / INDEX_ABOUT, f"{json.dumps(about, indent=1)}\n")
    return report


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
            f"build_index: ivfpq needs at least {16 * LEAST_PER_CENTRE} images, got {items}: use the kind flat or hnsw"
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
    """Queries from the gallery and what exact search finds for them, themselves excluded."""

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

    def recall(self, searcher: Searcher, k: int, *, index_alone: bool = False) -> float:
        """Of the answers that `searcher`, or its index alone, gives when it is asked for k."""
        _, found = (searcher.search_index if index_alone else searcher.search)(self.queries, k + 1)
        # the query itself goes to the end, and with it rows that were not found
        order = np.argsort((found == self.rows[:, None]) | (found < 0), axis=1, kind="stable")
        found = np.take_along_axis(found, order, axis=1)[:, :k]
        found[found == self.rows[:, None]] = -1
        scores = exact_scores(self.queries, searcher.gallery.embeddings, found)
        return float((scores >= self.scores[:, k - 1 : k] - ROUNDING).mean())


def _tune(searcher: Searcher, truth: _Truth, target: float) -> tuple[Searcher, float]:
    """Double the effort of a search until it reaches the target at 10 neighbours, then for each neighbour at 100.

    Returns the searcher and its recall at 10.
    """
    import faiss

    is_graph = not isinstance(searcher.index, faiss.IndexIVF)
    first, last = (1, searcher.index.nlist) if isinstance(searcher.index, faiss.IndexIVF) else (16, 4096)
    reached = 0.0
    for least in _doubled(first, last):
        searcher = replace(searcher, effort=Effort(least))
        reached = truth.recall(searcher, truth.tuned_k, index_alone=True)
        if reached >= target:
            break
    assert searcher.effort is not None
    least, long_k = searcher.effort.least, min(TUNED_LONG_K, truth.scores.shape[1])
    # a search in a graph that follows fewer candidates than it must return returns fewer
    for effort in _doubled(max(least, long_k) if is_graph else least, max(least, last)):
        searcher = replace(searcher, effort=Effort(least, round(effort / long_k, 4)))
        if truth.recall(searcher, long_k, index_alone=True) >= target:
            break
    return searcher, reached


def _doubled(first: int, last: int) -> Iterator[int]:
    value = first
    while value < last:
        yield value
        value *= 2
    yield last


def _measure(searcher: Searcher, truth: _Truth, why: str, written: int) -> IndexReport:
    recall = {k: truth.recall(searcher, k) for k in truth.ks}
    with _one_thread():
        times = _latencies(lambda query: searcher.search(query, TUNED_K), truth.queries)
        exact = Searcher(searcher.gallery)
        # each scans the whole gallery: a few are enough
        exact_times = _latencies(lambda query: exact.search(query, TUNED_K), truth.queries[:20])
    return IndexReport(
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
    """Milliseconds of each query alone, after a warm-up."""
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

    try:
        with atomic_file(folder / INDEX) as unfinished:
            faiss.write_index(index, str(unfinished))
    except (RuntimeError, OSError) as error:
        reason = write_error_reason(error) if isinstance(error, OSError) else "faiss could not write it, is the disk full?"
        raise OSError(f"{folder / INDEX} cannot be written ({reason}): free some space or choose another --out") from error
    return (folder / INDEX).stat().st_size


def _shuffled(items: int) -> NDArray[np.int64]:
    return permutation(items, bits(0, "index"))
