"""`python -m benchmarks.gallery`: how long a large gallery takes to open and to answer with an index, on this machine.

The embeddings are random clusters, so that an index has something to find; there are no images. The folder is kept: a second
call measures without making it again.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.measure import busy_note, share_of_others
from rankgrad._files import atomic_folder
from rankgrad._messages import format_duration, table
from rankgrad.data.table import Table
from rankgrad.search import Gallery, ImageList, Searcher, build_index
from rankgrad.search.gallery import ABOUT, EMBEDDINGS, FORMAT
from rankgrad.search.gallery_writer import EmbeddingsFile, write_ids
from rankgrad.search.searcher import INDEX_ABOUT

PER_CLUSTER = 100
BLOCK = 50_000
QUERIES = 200
T = TypeVar("T")


def main() -> None:
    """Make the gallery where it is absent, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the gallery; made where it is absent")
    parser.add_argument("--items", type=int, default=1_000_000, help="number of embeddings [1000000]")
    parser.add_argument("--dim", type=int, default=128, help="dimensions [128]")
    parser.add_argument("-k", type=int, default=20, help="neighbours to ask for [20]")
    given = parser.parse_args()
    if not (given.folder / ABOUT).is_file():
        print(f"writing {given.items:,} embeddings to {given.folder}", flush=True)
        write_gallery(given.folder, given.items, given.dim)
    if not (given.folder / INDEX_ABOUT).is_file():
        print(f"{build_index(Gallery.open(given.folder), given.folder).table()}\n", flush=True)
    rows, others = share_of_others(lambda: measure(given.folder, given.k))
    cells = [(what, format_duration(wall), format_duration(own)) for what, (wall, own) in rows.items()]
    print(table(["what", "time", "processor time"], cells, align="lrr"))
    print(busy_note(others))


def write_gallery(folder: Path, items: int, dim: int) -> None:
    """Clusters of `PER_CLUSTER` unit vectors around random centres; the label of a vector is its cluster."""
    rng = np.random.default_rng(0)
    clusters = max(items // PER_CLUSTER, 1)
    centres = rng.normal(size=(clusters, dim)).astype(np.float32)
    cluster = rng.integers(0, clusters, items)
    with atomic_folder(folder) as unfinished:
        with EmbeddingsFile(unfinished / EMBEDDINGS, dim) as file:
            for first in range(0, items, BLOCK):
                of = cluster[first : first + BLOCK]
                vectors = centres[of] + 0.8 * rng.normal(size=(len(of), dim)).astype(np.float32)
                file.write(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
        names = [f"class {number:05}" for number in cluster.tolist()]
        paths = [f"{name}/image {row:07}.jpg" for row, name in enumerate(names)]
        images = Table("clusters", folder, tuple(paths), np.full(items, -1, np.int64))
        write_ids(unfinished / "ids.parquet", ImageList(images, tuple(names), ("",) * items))
        about = {"format": FORMAT, "run": "none", "checkpoint": "last", "step": 0, "weights": "none", "source": "clusters"}
        about |= {"root": str(folder), "dim": dim, "ids": "ids.parquet", "digest": file.digest}
        (unfinished / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def measure(folder: Path, k: int) -> dict[str, tuple[float, float]]:
    """Seconds on the clock, and of this process on all processors, of opening and of one query alone."""
    found: dict[str, tuple[float, float]] = {}
    searcher = _timed(found, "open embeddings, list of images and index", lambda: Searcher.open(folder))
    _timed(found, "classes and their sizes, for the search page", lambda: searcher.gallery.class_sizes)
    rows = np.random.default_rng(1).integers(0, len(searcher.gallery), QUERIES).tolist()
    _timed(found, f"first query, {k} neighbours and their names", lambda: _query(searcher, rows[0], k))
    queries: dict[str, tuple[float, float]] = {}
    for row in rows:
        _timed(queries, str(row), partial(_query, searcher, row, k))
    times = np.array(list(queries.values()))
    for name, share in (("median", 50), ("95th percentile", 95)):
        wall, own = np.percentile(times, share, axis=0).tolist()
        found[f"query, {name} of {QUERIES}"] = (wall, own)
    return found


def _query(searcher: Searcher, row: int, k: int) -> list[object]:
    return [searcher.gallery.named(each) for each in searcher.search_from(row, k)[1].tolist()]


def _timed(found: dict[str, tuple[float, float]], what: str, call: Callable[[], T]) -> T:
    began, began_own = time.perf_counter(), time.process_time()
    result = call()
    found[what] = time.perf_counter() - began, time.process_time() - began_own
    return result


if __name__ == "__main__":
    main()
