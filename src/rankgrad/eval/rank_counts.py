"""Number of irrelevant candidates at or above each positive, counted over tiles; nothing of size Q x C is stored.

    count_all_vs_all        one set of embeddings, each item against all others; a product serves a tile and its transpose
    count_against_gallery   queries against a gallery, which may be on disk and is read from beginning to end
    count_with_kernels      both of these with the fused kernels, for embeddings in GPU memory

Scores of the positives are computed first, then tiles are counted against them. A few numbers per relevant pair stay in
memory while tiles are counted, so queries are processed in groups that fit in a budget of bytes.

Dimension letters:  Q queries   C candidates   B queries of a chunk   Z candidates of a tile   P positives, padded
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rankgrad.eval.embedding_blocks import EmbeddingRows, Index, row_tile
from rankgrad.eval.relevant_pairs import RelevantPairs, SameLabelPairs
from rankgrad.ops.cpu_products import dot_products
from rankgrad.ops.exact_counts import exact_counts
from rankgrad.ops.labels import IntervalRelevance, Labels
from rankgrad.ops.thresholds import BUCKETS_EACH, FEW_THRESHOLDS, MOST_BUCKETS, Thresholds
from rankgrad.ops.tile_layout import split, tile_side

Task = TypeVar("Task")
Answer = TypeVar("Answer")

# Bytes of relevant pairs at a time while tiles are counted, unless a limit of all memory is given.
MEMORY_LIMIT = 2**29

# Relevant pairs turned into metrics at once: a handful of float64 of each take 0.2 GiB.
MAX_PAIRS = 2**22

# Bytes of a relevant pair while tiles are counted: its score, its count, sorted copies of both, and what turning counts into
# metrics takes. A bucket of the counting tables has 4 more.
PAIR_BYTES = 64
BUCKET_BYTES = 4


class ProgressCounter:
    """Adds up the scores that are done and reports them to a callback.

    Args:
        callback: called with the number of scores done and in all.
        total: number of scores in all.
    """

    def __init__(self, callback: Callable[[int, int], None] | None = None, total: int = 0) -> None:
        self.callback, self.total, self.done = callback, total, 0

    def add(self, scores: int) -> None:
        self.done += scores
        if self.callback:
            self.callback(self.done, self.total)


class TileWorkers:
    """Threads that process tiles, one core each; on a GPU there is one.

    Threads that share every small operation wait for each other at the end of each, which takes a hundred times as long when
    another process uses one of the cores. One thread per tile also makes scores independent of the number of threads.
    """

    def __init__(self, device: torch.device, tile: tuple[int, int]) -> None:
        self.device, self.tile = device, tile
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1
        self.local = threading.local()

    @property
    def scratch(self) -> Tensor:
        """Memory of the calling thread for one tile of scores."""
        if not hasattr(self.local, "scratch"):
            self.local.scratch = torch.empty(self.tile, device=self.device)
        scratch: Tensor = self.local.scratch
        return scratch

    def __enter__(self) -> "TileWorkers":
        if self.threads > 1:
            self.pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *error: object) -> None:
        if self.threads > 1:
            self.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.threads)  # part of this setting is shared by all threads

    def map(self, function: Callable[[Task], Answer], tasks: Iterable[Task]) -> Iterator[Answer]:
        """Results of the function for all tasks, in order."""
        return self.pool.map(function, tasks) if self.threads > 1 else map(function, tasks)


@dataclass(frozen=True)
class RankCounts:
    """Counts of some queries, in the order of `query`."""

    query: Index  # [B]
    counts: Tensor  # [B, P] irrelevant candidates at or above each positive
    valid: Tensor  # [B, P] False at the padding
    scores: Tensor | None = None  # [B, P] of the positives, in the order of the relevance


def pair_bytes(rows: int, width: int) -> int:
    """Bytes that a chunk of queries with up to `width` positives each takes while tiles are counted."""
    buckets = 0 if width <= FEW_THRESHOLDS else min(BUCKETS_EACH * width * rows, MOST_BUCKETS)
    return rows * width * PAIR_BYTES + buckets * BUCKET_BYTES


def count_all_vs_all(
    rows: EmbeddingRows, labels: Tensor, *, pair_budget: int, progress: ProgressCounter
) -> Iterator[RankCounts]:
    """Count every row that has a positive as a query against all others."""
    side = tile_side(rows.device)
    lists = IntervalRelevance.build(labels.to(rows.device))
    order = lists.candidate_order.cpu().numpy()
    tiles = rows.reordered(order, side).split(side)
    chunks = split(len(order), side)
    bands = lists.extents(chunks)
    workers = TileWorkers(rows.device, (side, side))
    for group in groups_within([pair_bytes(side, band[0]) for band in bands], pair_budget):
        symmetric = _SymmetricTiles(tiles, lists, chunks, bands, group, workers)
        with workers:
            with_positives = [i for i in group if bands[i][0]]
            symmetric.positives.update(zip(with_positives, workers.map(symmetric.score_positives, with_positives), strict=True))
            # below the diagonal of a group a tile is the transpose of one above
            tasks = [(i, z) for i in group for z in range(len(chunks)) if z >= i or z not in group]
            for scores in workers.map(symmetric.count, tasks):
                progress.add(scores)
        for i, positives in symmetric.positives.items():
            yield positives.rank_counts(order[chunks[i]])


@dataclass
class _SymmetricTiles:
    """A group of chunks against all chunks; within the group a tile serves its rows and its columns as queries."""

    tiles: Sequence[Tensor]
    lists: IntervalRelevance
    chunks: Sequence[slice]
    bands: Sequence[tuple[int, int, int]]
    group: range
    workers: TileWorkers
    positives: dict[int, "PositiveCounts"] = field(default_factory=dict)  # of the chunks that have any

    def score_positives(self, chunk: int) -> "PositiveCounts":
        scratch = self.workers.scratch
        return PositiveCounts(*_positive_scores(self.tiles, self.lists, self.chunks, chunk, self.bands[chunk], scratch))

    def count(self, tile: tuple[int, int]) -> int:
        """Count a tile for its rows and, off the diagonal, its columns; the number of scores."""
        i, z = tile
        transposed = z in self.group and z != i
        height, width = _length(self.chunks[i]), _length(self.chunks[z])
        by_row, by_column = self.positives.get(i), self.positives.get(z) if transposed else None
        if by_row or by_column:
            scores = dot_products(self.tiles[i], self.tiles[z], out=self.workers.scratch)
            most, first, last = self.bands[i]
            if self.chunks[z].start < last and self.chunks[z].stop > first:
                self.lists.hide_(scores[:height, :width], self.chunks[i], self.chunks[z], most)
            scores[height:] = -torch.inf
            scores[:, width:] = -torch.inf
            if by_row:
                by_row.add(scores)
            if by_column:
                by_column.add(scores.t())
        return (1 + transposed) * height * width


def _positive_scores(
    tiles: Sequence[Tensor],
    lists: IntervalRelevance,
    chunks: Sequence[slice],
    chunk: int,
    band: tuple[int, int, int],
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """[side, P] scores of the positives of a chunk, padded with +inf, and False at the padding."""
    width, first, last = band
    side = len(scratch)
    columns, valid = lists.positives(chunks[chunk], width)
    short = (0, 0, 0, side - len(columns))
    columns, valid = torch.nn.functional.pad(columns, short), torch.nn.functional.pad(valid, short)
    scores = scratch.new_full(columns.shape, torch.inf)
    for z in range(first // side, -(-last // side)):
        tile = dot_products(tiles[chunk], tiles[z], out=scratch)
        here = valid & (columns >= z * side) & (columns < (z + 1) * side)
        at = (columns - z * side).clamp(0, side - 1)
        scores = torch.where(here, tile.gather(1, at), scores)
    return scores, valid


def count_against_gallery(
    queries: EmbeddingRows,
    gallery: EmbeddingRows,
    relevance: RelevantPairs,
    *,
    pair_budget: int,
    progress: ProgressCounter,
) -> Iterator[RankCounts]:
    """Count queries that have a positive against a gallery, which is read once per group of queries."""
    # queries with similar numbers of positives go together, which keeps padding small
    order = np.argsort(relevance.num_relevant, kind="stable")
    order = order[relevance.num_relevant[order] > 0]
    side = tile_side(queries.device)
    height = row_tile(len(order), side)
    chunks = [order[chunk] for chunk in split(len(order), height)]
    chunk_bytes = [pair_bytes(height, relevance.num_relevant[chunk].max()) + height * queries.dim * 4 for chunk in chunks]
    workers = TileWorkers(queries.device, (height, side))

    def score_positives(i: int) -> _QueryChunk:
        return _QueryChunk(queries, gallery, relevance, chunks[i], workers.scratch)

    def count(task: tuple[_QueryChunk, Tensor, slice]) -> int:
        chunk, tile, columns = task
        chunk.count(tile, columns, workers.scratch)
        return len(chunk.query) * _length(columns)

    for group in groups_within(chunk_bytes, pair_budget):
        with workers:
            members = list(workers.map(score_positives, group))
            for block in gallery.blocks(side):
                tiles = gallery.padded(block, side).split(side)
                columns = split(block.stop, side, block.start)
                tasks = [(member, *tile) for member in members for tile in zip(tiles, columns, strict=True)]
                for scores in workers.map(count, tasks):
                    progress.add(scores)
        for member in members:
            yield member.positives.rank_counts(member.query)


class _QueryChunk:
    """Some queries, the counts of their positives and the candidates hidden from them."""

    def __init__(
        self, queries: EmbeddingRows, gallery: EmbeddingRows, relevance: RelevantPairs, query: Index, scratch: Tensor
    ) -> None:
        self.query = query
        self.rows = queries.padded(query, len(scratch))
        row, candidate = relevance.relevant(query)
        excluded_row, excluded = relevance.excluded(query)
        scores, valid = self._positive_scores(gallery, row, candidate, relevance.num_relevant[query], scratch)
        self.positives = PositiveCounts(scores, valid)
        hidden_row, hidden = np.concatenate((row, excluded_row)), np.concatenate((candidate, excluded))
        by_candidate = np.argsort(hidden, kind="stable")
        self.hidden = hidden[by_candidate]
        self.hidden_row = torch.from_numpy(hidden_row[by_candidate]).to(scratch.device)
        self.hidden_at = torch.from_numpy(self.hidden).to(scratch.device)

    def _positive_scores(
        self, gallery: EmbeddingRows, row: Index, candidate: Index, num_relevant: Index, scratch: Tensor
    ) -> tuple[Tensor, Tensor]:
        height, side = scratch.shape
        columns, column = np.unique(candidate, return_inverse=True)
        step = np.arange(len(row)) - np.repeat(np.cumsum(num_relevant) - num_relevant, num_relevant)
        scores = scratch.new_full((height, int(num_relevant.max())), torch.inf)
        by_column = np.argsort(column, kind="stable")
        for block in split(len(columns), side):
            tile = dot_products(self.rows, gallery.padded(columns[block], side), out=scratch)
            edges = np.searchsorted(column[by_column], (block.start, block.stop))
            pairs = by_column[edges[0] : edges[1]]
            r, at, s = (torch.from_numpy(values[pairs]).to(scratch.device) for values in (row, column - block.start, step))
            scores[r, s] = tile[r, at]
        valid = np.arange(scores.shape[1]) < np.pad(num_relevant, (0, height - len(num_relevant)))[:, None]
        return scores, torch.from_numpy(valid).to(scratch.device)

    def count(self, candidates: Tensor, columns: slice, scratch: Tensor) -> None:
        tile = dot_products(self.rows, candidates, out=scratch)
        first, last = np.searchsorted(self.hidden, (columns.start, columns.stop))
        if first < last:
            tile[self.hidden_row[first:last], self.hidden_at[first:last] - columns.start] = -torch.inf
        tile[:, _length(columns) :] = -torch.inf
        self.positives.add(tile)


class PositiveCounts:
    """Scores of positives, and the irrelevant candidates at or above each that were counted so far."""

    def __init__(self, scores: Tensor, valid: Tensor) -> None:
        self.valid = valid
        self.thresholds, self.lock = Thresholds(scores), Lock()
        # counting a hidden candidate, which gives zeros, builds the tables before several threads need them
        self.counts = self.thresholds.num_reaching(scores.new_full((len(scores), 1), -torch.inf)).long()

    def add(self, tile: Tensor) -> None:
        """Count the candidates of a tile [B, Z]."""
        counts = self.thresholds.num_reaching(tile)
        with self.lock:
            self.counts += counts

    def rank_counts(self, query: Index) -> RankCounts:
        """The counts of those of the queries that have a positive."""
        valid = self.valid[: len(query)]
        some = valid.any(dim=1)
        scores = self.thresholds.values[: len(query)][some]
        return RankCounts(query[some.cpu().numpy()], self.counts[: len(query)][some], valid[some], scores)


def count_with_kernels(
    queries: EmbeddingRows,
    candidates: EmbeddingRows | None,
    labels: Tensor,
    ref_labels: Tensor | None,
    self_index: Tensor | None,
    *,
    pair_budget: int,
    progress: ProgressCounter,
) -> Iterator[RankCounts]:
    """The same counts by fused kernels. Without `candidates` the queries are ranked among themselves."""
    device = queries.device
    if candidates is None:
        ref_labels, self_index = labels, torch.arange(len(labels))
    assert ref_labels is not None, "a gallery has labels"
    relevance = SameLabelPairs(labels.numpy(), ref_labels.numpy(), None if self_index is None else self_index.numpy())
    order = np.argsort(relevance.num_relevant, kind="stable")
    order = order[relevance.num_relevant[order] > 0]
    all_candidates = (queries if candidates is None else candidates).take(slice(0, len(ref_labels)))
    # the kernels choose their own tiles: chunks only make up groups
    chunks = split(len(order), tile_side(device))
    chunk_bytes = [_length(chunk) * int(relevance.num_relevant[order[chunk.stop - 1]]) * PAIR_BYTES for chunk in chunks]
    for group in groups_within(chunk_bytes, pair_budget):
        part = order[chunks[group[0]].start : chunks[group[-1]].stop]
        index = torch.from_numpy(part)
        some = all_candidates[index.to(device)] if candidates is None else queries.take(part)
        own = None if self_index is None else self_index[index].to(device)
        given = Labels(labels[index].to(device), ref_labels.to(device), own)
        for rows, counts, valid in exact_counts(some, all_candidates, given, normalized=queries.normalize):
            yield RankCounts(part[rows.cpu().numpy()], counts, valid)
        progress.add(len(part) * len(all_candidates))


def groups_within(chunk_bytes: Sequence[int], pair_budget: int) -> Iterator[range]:
    """Consecutive chunks that together fit in the budget, or one chunk that alone exceeds it."""
    start, total = 0, 0
    for i, size in enumerate(chunk_bytes):
        if i > start and total + size > pair_budget:
            yield range(start, i)
            start, total = i, 0
        total += size
    if chunk_bytes:
        yield range(start, len(chunk_bytes))


def _length(piece: slice) -> int:
    return int(piece.stop - piece.start)
