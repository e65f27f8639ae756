"""How many irrelevant candidates lie at or above each relevant item: counted over tiles, nothing of size Q x C is kept.

    among_themselves   one set of embeddings, each item against all others; a product serves a tile and its mirror image
    against_gallery    queries against a gallery that may be on disk and is read from its beginning to its end
    by_kernels         both of these with the engine's fused kernels, for embeddings in the memory of a GPU

Scores of the relevant items come first, then the tiles are counted against them. What has to be alive while tiles are counted
is a few numbers for every relevant pair, so queries go in groups that fit in a budget of bytes.

Dimension letters:  Q queries   C candidates   B queries of a chunk   Z candidates of a tile   P relevant items, padded
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.eval.embedding_blocks import Index, Rows, row_tile
from rankgrad.ops.functional import fused_door
from rankgrad.ops.rankers import Exact
from rankgrad.ops.relevance import LabelLists
from rankgrad.ops.sources import split, tile_side
from rankgrad.ops.thresholds import BUCKETS_EACH, FEW_THRESHOLDS, MOST_BUCKETS, Thresholds

Task = TypeVar("Task")
Answer = TypeVar("Answer")
Tick = Callable[[int], None]
"""Told how many scores have been counted since the last call."""

# Bytes of a relevant pair while tiles are counted: its score, its count, copies of both in the order of counting, and what
# turning counts into metrics takes. A bucket of the counting tables has 4 more.
PAIR_BYTES = 64
BUCKET_BYTES = 4


class Workers:
    """Threads that take tiles from a list, each on a core of its own; on a GPU there is one.

    Threads that share every small operation wait for each other at the end of each, which takes a hundred times as long when
    another process has one of the cores. It also makes scores independent of the number of threads.
    """

    def __init__(self, device: torch.device, tile: tuple[int, int]) -> None:
        self.device, self.tile = device, tile
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1
        self.local = threading.local()

    @property
    def scratch(self) -> Tensor:
        """Memory for one tile of scores, the calling thread's own."""
        if not hasattr(self.local, "scratch"):
            self.local.scratch = torch.empty(self.tile, device=self.device)
        scratch: Tensor = self.local.scratch
        return scratch

    def __enter__(self) -> "Workers":
        if self.threads > 1:
            self.pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *error: object) -> None:
        if self.threads > 1:
            self.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self.threads)  # a part of the setting belongs to all threads

    def map(self, function: Callable[[Task], Answer], tasks: Iterable[Task]) -> Iterator[Answer]:
        """What the function gives for every task, in order."""
        return self.pool.map(function, tasks) if self.threads > 1 else map(function, tasks)


@dataclass(frozen=True)
class Ahead:
    """The counts of a few queries, in the order of `query`."""

    query: Index  # [B]
    count: Tensor  # [B, P] irrelevant candidates at or above each relevant item
    valid: Tensor  # [B, P] False at the padding


class Relevance(Protocol):
    """Who is relevant to whom, and who is not ranked at all."""

    num_relevant: Index  # [Q]

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        """Positions in `queries`, ascending, and candidates: every relevant pair of these queries."""
        ...

    def removed(self, queries: Index) -> tuple[Index, Index]:
        """The same for candidates that are taken out of a query's list."""
        ...


class SameLabel:
    """A candidate is relevant if it has the query's label; the query itself, where it is a candidate, is removed."""

    def __init__(self, labels: Index, ref_labels: Index, own: Index | None) -> None:
        self.order = np.argsort(ref_labels, kind="stable")
        ascending = ref_labels[self.order]
        self.first = np.searchsorted(ascending, labels)
        self.size = np.searchsorted(ascending, labels, side="right") - self.first
        self.own = np.full(len(labels), -1) if own is None else own
        itself = (self.own >= 0) & (ref_labels[self.own] == labels)
        self.num_relevant: Index = self.size - itself

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        row, step = _ragged(self.size[queries])
        candidate = self.order[self.first[queries][row] + step]
        kept = candidate != self.own[queries][row]
        return row[kept], candidate[kept]

    def removed(self, queries: Index) -> tuple[Index, Index]:
        row = np.flatnonzero(self.own[queries] >= 0)
        return row, self.own[queries][row]


class GivenLists:
    """Relevant and removed candidates written down for every query."""

    def __init__(self, relevant: Sequence[Index], removed: Sequence[Index]) -> None:
        self.num_relevant = np.array([len(items) for items in relevant], dtype=np.int64)
        self.lists = relevant, removed

    def relevant(self, queries: Index) -> tuple[Index, Index]:
        return self._pairs(self.lists[0], queries)

    def removed(self, queries: Index) -> tuple[Index, Index]:
        return self._pairs(self.lists[1], queries)

    @staticmethod
    def _pairs(lists: Sequence[Index], queries: Index) -> tuple[Index, Index]:
        chosen = [lists[query] for query in queries]
        row = np.repeat(np.arange(len(chosen)), [len(items) for items in chosen])
        return row, np.concatenate([*chosen, np.empty(0, np.int64)]).astype(np.int64)


def pair_bytes(rows: int, width: int) -> int:
    """Bytes that a chunk of queries with up to `width` relevant items each holds while tiles are counted."""
    buckets = 0 if width <= FEW_THRESHOLDS else min(BUCKETS_EACH * width * rows, MOST_BUCKETS)
    return rows * width * PAIR_BYTES + buckets * BUCKET_BYTES


def among_themselves(rows: Rows, labels: Tensor, *, budget: int, tick: Tick) -> Iterator[Ahead]:
    """Every row as a query against all others, those with a relevant item among these."""
    side = tile_side(rows.device)
    lists = LabelLists.build(labels.to(rows.device))
    order = lists.candidate_order.cpu().numpy()
    tiles = rows.all_in(order, side).split(side)
    chunks = split(len(order), side)
    bands = lists.bands(chunks)
    workers = Workers(rows.device, (side, side))
    for group in groups_within([pair_bytes(side, band[0]) for band in bands], budget):
        square = _Square(tiles, lists, chunks, bands, group, workers)
        with workers:
            seeking = [i for i in group if bands[i][0]]
            square.sought.update(zip(seeking, workers.map(square.seek, seeking), strict=True))
            # below the diagonal of a group a tile is the mirror image of one above
            wanted = [(i, z) for i in group for z in range(len(chunks)) if z >= i or z not in group]
            for scores in workers.map(square.count, wanted):
                tick(scores)
        for i, found in square.sought.items():
            yield found.ahead(order[chunks[i]])


@dataclass
class _Square:
    """A group of chunks against all chunks; within the group a tile serves its rows and its columns as queries."""

    tiles: Sequence[Tensor]
    lists: LabelLists
    chunks: Sequence[slice]
    bands: Sequence[tuple[int, int, int]]
    group: range
    workers: Workers
    sought: dict[int, "Sought"] = field(default_factory=dict)  # of the chunks in which anything is sought

    def seek(self, chunk: int) -> "Sought":
        scratch = self.workers.scratch
        return Sought(_relevant_in_class_order(self.tiles, self.lists, self.chunks, chunk, self.bands[chunk], scratch))

    def count(self, tile: tuple[int, int]) -> int:
        """Counts a tile for all that want it; how many scores that were."""
        i, z = tile
        mirrored = z in self.group and z != i
        height, width = _length(self.chunks[i]), _length(self.chunks[z])
        by_row, by_column = self.sought.get(i), self.sought.get(z) if mirrored else None
        if by_row or by_column:
            scores = torch.mm(self.tiles[i], self.tiles[z].t(), out=self.workers.scratch)
            _, first, last = self.bands[i]
            if self.chunks[z].start < last and self.chunks[z].stop > first:
                self.lists.hide(scores[:height, :width], self.chunks[i], self.chunks[z])
            scores[height:] = -torch.inf
            scores[:, width:] = -torch.inf
            if by_row:
                by_row.count(scores)
            if by_column:
                by_column.count(scores.t())
        return (1 + mirrored) * height * width


def _relevant_in_class_order(
    tiles: Sequence[Tensor],
    lists: LabelLists,
    chunks: Sequence[slice],
    chunk: int,
    band: tuple[int, int, int],
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """[side, P] scores of the relevant items of a chunk, padded with +inf, and which of them are real."""
    width, first, last = band
    side = len(scratch)
    columns, valid = lists.relevant_columns(chunks[chunk], width)
    short = (0, 0, 0, side - len(columns))
    columns, valid = torch.nn.functional.pad(columns, short), torch.nn.functional.pad(valid, short)
    scores = scratch.new_full(columns.shape, torch.inf)
    for z in range(first // side, -(-last // side)):
        torch.mm(tiles[chunk], tiles[z].t(), out=scratch)
        here = valid & (columns >= z * side) & (columns < (z + 1) * side)
        at = (columns - z * side).clamp(0, side - 1)
        scores = torch.where(here, scratch.gather(1, at), scores)
    return scores, valid


def against_gallery(queries: Rows, gallery: Rows, relevance: Relevance, *, budget: int, tick: Tick) -> Iterator[Ahead]:
    """Queries that have a relevant item against a gallery, which is read once for every group of queries."""
    # those with about as many relevant items come together: padding costs little
    order = np.argsort(relevance.num_relevant, kind="stable")
    order = order[relevance.num_relevant[order] > 0]
    side = tile_side(queries.device)
    height = row_tile(len(order), side)
    chunks = [order[chunk] for chunk in split(len(order), height)]
    held = [pair_bytes(height, relevance.num_relevant[chunk].max()) + height * queries.dim * 4 for chunk in chunks]
    workers = Workers(queries.device, (height, side))

    def seek(i: int) -> _Chunk:
        return _Chunk(queries, gallery, relevance, chunks[i], workers.scratch)

    def count(task: tuple[_Chunk, Tensor, slice]) -> int:
        member, tile, columns = task
        member.count(tile, columns, workers.scratch)
        return len(member.query) * _length(columns)

    for group in groups_within(held, budget):
        with workers:
            members = list(workers.map(seek, group))
            for block in gallery.blocks(side):
                tiles = gallery.padded(block, side).split(side)
                panels = split(block.stop, side, block.start)
                tasks = [(member, *tile) for member in members for tile in zip(tiles, panels, strict=True)]
                for scores in workers.map(count, tasks):
                    tick(scores)
        for member in members:
            yield member.sought.ahead(member.query)


class _Chunk:
    """A few queries, what they look for and what is hidden from them."""

    def __init__(self, queries: Rows, gallery: Rows, relevance: Relevance, query: Index, scratch: Tensor) -> None:
        self.query = query
        self.rows = queries.padded(query, len(scratch))
        row, candidate = relevance.relevant(query)
        gone_row, gone = relevance.removed(query)
        self.sought = Sought(self._relevant(gallery, row, candidate, relevance.num_relevant[query], scratch))
        hidden_row, hidden = np.concatenate((row, gone_row)), np.concatenate((candidate, gone))
        by_candidate = np.argsort(hidden, kind="stable")
        self.hidden = hidden[by_candidate]
        self.hidden_row = torch.from_numpy(hidden_row[by_candidate]).to(scratch.device)
        self.hidden_at = torch.from_numpy(self.hidden).to(scratch.device)

    def _relevant(
        self, gallery: Rows, row: Index, candidate: Index, num_relevant: Index, scratch: Tensor
    ) -> tuple[Tensor, Tensor]:
        height, side = scratch.shape
        wanted, place = np.unique(candidate, return_inverse=True)
        step = np.arange(len(row)) - np.repeat(np.cumsum(num_relevant) - num_relevant, num_relevant)
        scores = scratch.new_full((height, int(num_relevant.max())), torch.inf)
        by_place = np.argsort(place, kind="stable")
        for panel in split(len(wanted), side):
            torch.mm(self.rows, gallery.padded(wanted[panel], side).t(), out=scratch)
            edges = np.searchsorted(place[by_place], (panel.start, panel.stop))
            pairs = by_place[edges[0] : edges[1]]
            r, at, s = (torch.from_numpy(values[pairs]).to(scratch.device) for values in (row, place - panel.start, step))
            scores[r, s] = scratch[r, at]
        valid = np.arange(scores.shape[1]) < np.pad(num_relevant, (0, height - len(num_relevant)))[:, None]
        return scores, torch.from_numpy(valid).to(scratch.device)

    def count(self, candidates: Tensor, columns: slice, scratch: Tensor) -> None:
        tile = torch.mm(self.rows, candidates.t(), out=scratch)
        first, last = np.searchsorted(self.hidden, (columns.start, columns.stop))
        if first < last:
            tile[self.hidden_row[first:last], self.hidden_at[first:last] - columns.start] = -torch.inf
        tile[:, _length(columns) :] = -torch.inf
        self.sought.count(tile)


class Sought:
    """Scores of relevant items, and how many irrelevant candidates have reached each so far."""

    def __init__(self, scores_and_valid: tuple[Tensor, Tensor]) -> None:
        scores, self.valid = scores_and_valid
        self.thresholds, self.lock = Thresholds(scores), Lock()
        # a hidden candidate reaches nothing, and to ask makes the tables before several threads want them
        self.reached = self.thresholds.reached_by(scores.new_full((len(scores), 1), -torch.inf)).long()

    def count(self, tile: Tensor) -> None:
        reached = self.thresholds.reached_by(tile)
        with self.lock:
            self.reached += reached

    def ahead(self, query: Index) -> Ahead:
        """The counts of real queries that have something to find."""
        valid = self.valid[: len(query)]
        some = valid.any(dim=1)
        return Ahead(query[some.cpu().numpy()], self.reached[: len(query)][some], valid[some])


def by_kernels(
    queries: Rows,
    candidates: Rows | None,
    labels: Tensor,
    ref_labels: Tensor | None,
    own: Tensor | None,
    *,
    budget: int,
    tick: Tick,
) -> Iterator[Ahead]:
    """What the others count, by fused kernels. Without `candidates` the queries are ranked among themselves."""
    device = queries.device
    if candidates is None:
        ref_labels, own = labels, torch.arange(len(labels))
    assert ref_labels is not None, "a gallery has labels"
    relevance = SameLabel(labels.numpy(), ref_labels.numpy(), None if own is None else own.numpy())
    order = np.argsort(relevance.num_relevant, kind="stable")
    order = order[relevance.num_relevant[order] > 0]
    everyone = (queries if candidates is None else candidates).take(slice(0, len(ref_labels)))
    # the kernels tile on their own: chunks are only what groups are made of
    chunks = split(len(order), tile_side(device))
    held = [_length(chunk) * int(relevance.num_relevant[order[chunk.stop - 1]]) * PAIR_BYTES for chunk in chunks]
    ranker = Exact()
    for group in groups_within(held, budget):
        part = order[chunks[group[0]].start : chunks[group[-1]].stop]
        index = torch.from_numpy(part)
        some = everyone[index.to(device)] if candidates is None else queries.take(part)
        lists = LabelLists.build(
            labels[index].to(device), ref_labels.to(device), None if own is None else own[index].to(device)
        )
        door = fused_door(lists, device, "high", unit_rows=queries.normalize)(some, everyone)
        relevant = [door.relevant(chunk) for chunk in range(len(door.chunks))]
        counts = door.count(ranker, [ranker.prepare(items, 0) for items in relevant], 0)
        query = part[lists.query_order.cpu().numpy()]
        for chunk, items, count in zip(door.chunks, relevant, counts, strict=True):
            yield Ahead(query[chunk], count, items.valid)
        tick(len(part) * len(everyone))


def groups_within(held: Sequence[int], budget: int) -> Iterator[range]:
    """Neighbouring chunks that together hold no more bytes than the budget, or one chunk that holds more."""
    start, total = 0, 0
    for i, size in enumerate(held):
        if i > start and total + size > budget:
            yield range(start, i)
            start, total = i, 0
        total += size
    if held:
        yield range(start, len(held))


def _length(piece: slice) -> int:
    return int(piece.stop - piece.start)


def _ragged(sizes: NDArray[np.int64]) -> tuple[Index, Index]:
    """For rows of these sizes after another: which row an entry is in, and its place there."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
