"""`evaluate_sharded`: a gallery sharded over several processes, which need not fit in any of them.

Every process has the embeddings of its shard and ranks its own queries. Blocks of the gallery are broadcast one by one, once
for the scores of positives and once to count the candidates above them, so the gallery is sent twice and a process has one
block of it in memory at a time.

Dimension letters:  Q queries of this process   C candidates of all   B queries of a chunk   P positives, padded
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.eval import rank_counts
from rankgrad.eval.embedding_blocks import Array, EmbeddingRows, Index, exact_products, row_tile
from rankgrad.eval.evaluation import evaluate_table, separate_unlabelled
from rankgrad.eval.memory_plan import BLOCKS_ALIVE, TILES_ALIVE, limit_error
from rankgrad.eval.metrics import PositiveRanks, checked_ks, metric_columns, per_query
from rankgrad.eval.nearest import candidates_of, hide_self, scores_of, sort_keys
from rankgrad.eval.protocols import PROTOCOLS, type_of
from rankgrad.eval.rank_counts import PositiveCounts, ProgressCounter, groups_within, pair_bytes
from rankgrad.eval.relevant_pairs import SameLabelPairs
from rankgrad.eval.result import Result
from rankgrad.ops.cpu_products import dot_products
from rankgrad.ops.tile_layout import split, tile_side

CALLER = "evaluate_sharded"


@dataclass(frozen=True, eq=False)
class _ShardTable:
    """Labels and marks of a shard, as `evaluate_table` takes them."""

    labels: Index
    is_query: NDArray[np.bool_] | None
    is_gallery: NDArray[np.bool_] | None
    categories: Index | None


def evaluate_sharded(
    embeddings: Array,
    labels: Tensor | ArrayLike,
    *,
    is_query: ArrayLike | None = None,
    is_gallery: ArrayLike | None = None,
    categories: ArrayLike | None = None,
    ks: Sequence[int] = (1, 10, 100, 1000),
    neighbours: int = 0,
    normalize: bool = True,
    device: torch.device | str | None = None,
    memory_limit: int | None = None,
    group: "dist.ProcessGroup | None" = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result | None:
    """`evaluate_table` for the rows of all processes in the order of their ranks; None on all processes but the first.

    All processes of the group must call it, each with its shard. Without a process group it is `evaluate_table`. The protocol
    is "query-gallery" where rows are marked and "all-vs-all" where they are not.

    Args:
        embeddings: [N, d] the rows of this process; a memmap is read block by block.
        labels: [N] integers, -1 for a row without a class.
        is_query: [N] bool, None for all; given on all processes or on none, as are the next two.
        is_gallery: [N] bool.
        categories: [N] integers.
        ks: cut-offs.
        neighbours: number of nearest candidates of each query to keep.
        normalize: scale embeddings to length 1 first.
        device: device to compute on, one that the group's backend can send from; by default that of `embeddings`.
        memory_limit: bytes that each process may use in addition to its embeddings; with less the gallery is sent more often.
            By default whatever is needed.
        group: process group, by default all processes.
        progress: called with the number of scores of this process done and in all.
    """
    check_count(neighbours, name="neighbours", caller=CALLER, least=0)
    shard = _ShardTable(
        _array(labels, np.int64),
        None if is_query is None else _array(is_query, np.bool_),
        None if is_gallery is None else _array(is_gallery, np.bool_),
        None if categories is None else _array(categories, np.int64),
    )
    if len(embeddings) != len(shard.labels):
        raise ValueError(f"{CALLER}: labels must be one per embedding, {len(embeddings)}, got {len(shard.labels)}")
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return evaluate_table(
            embeddings,
            shard,
            ks=ks,
            neighbours=neighbours,
            normalize=normalize,
            device=device,
            memory_limit=memory_limit,
            progress=progress,
        )
    on = embeddings.device if device is None and isinstance(embeddings, Tensor) else torch.device(device or "cpu")
    rows = EmbeddingRows.from_arrays([embeddings], device=on, normalize=normalize, name="embeddings", caller=CALLER)
    with exact_products(on):
        return _ShardedEvaluation(rows, shard, checked_ks(ks, CALLER), neighbours, memory_limit, group).result(progress)


def _array(values: Any, kind: type) -> NDArray[Any]:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(kind)


class _ShardedEvaluation:
    """The work of one process. `row` numbers the rows of all processes, `candidate` those of them in the gallery."""

    def __init__(
        self,
        rows: EmbeddingRows,
        shard: _ShardTable,
        ks: tuple[int, ...],
        neighbours: int,
        memory_limit: int | None,
        group: "dist.ProcessGroup | None",
    ) -> None:
        self.rows, self.ks, self.memory_limit, self.group = rows, ks, memory_limit, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (shard, rows.dim), group=group)
        if len({dim for _, dim in found}) > 1:
            raise ValueError(f"{CALLER}: embeddings must have the same dimensions everywhere, got {[dim for _, dim in found]}")
        shards = [each for each, _ in found]
        self.first_row = sum(len(each.labels) for each in shards[: self.rank])
        self.labels = separate_unlabelled(_joined(shards, "labels"))
        self.categories = _joined(shards, "categories")
        marks = [_joined(shards, name) for name in ("is_query", "is_gallery")]
        self.query_rows, self.gallery = (
            np.arange(len(self.labels)) if mark is None else np.flatnonzero(mark) for mark in marks
        )
        self.protocol = "all-vs-all" if marks[0] is None and marks[1] is None else "query-gallery"
        edges = np.cumsum([0, *(len(each.labels) for each in shards)])
        self.gallery_shards = [slice(*pair) for pair in zip(*_edges(self.gallery, edges), strict=True)]
        begin, end = np.searchsorted(self.query_rows, edges[self.rank : self.rank + 2])
        self.shard_queries = self.query_rows[begin:end]
        candidate = np.full(len(self.labels), -1)
        candidate[self.gallery] = np.arange(len(self.gallery))
        self.self_index = candidate[self.shard_queries]
        self.k = min(neighbours, len(self.gallery) - int((candidate[self.query_rows] >= 0).any()))
        self.relevance = SameLabelPairs(self.labels[self.shard_queries], self.labels[self.gallery], self.self_index)
        self.side = tile_side(rows.device)
        # the shape of products decides the rounding of scores, so it is that of one process
        self.height = self.side if self.protocol == "all-vs-all" else row_tile(len(self.query_rows), self.side)

    def result(self, progress: Callable[[int, int], None] | None) -> Result | None:
        order = np.argsort(self.relevance.num_relevant, kind="stable")
        order = order[self.relevance.num_relevant[order] > 0]
        chunks = [order[chunk] for chunk in split(len(order), self.height)]
        widths = [int(self.relevance.num_relevant[chunk].max()) for chunk in chunks]
        chunk_bytes = [pair_bytes(self.height, width) + 4 * self.height * self.rows.dim for width in widths]
        groups = list(groups_within(chunk_bytes, self._pair_budget(max(chunk_bytes, default=0))))
        rounds = torch.tensor(len(groups), device=self.rows.device)
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group=self.group)
        counter = ProgressCounter(progress, len(order) * len(self.gallery))
        parts = []
        for number in range(int(rounds)):
            # a process without queries left still sends its blocks
            members = [_ShardQueryChunk(self, chunks[i]) for i in groups[number]] if number < len(groups) else []
            for begin, block in self.blocks():
                for member in members:
                    member.score_positives(begin, block)
            for member in members:
                member.start_counting()
            for begin, block in self.blocks():
                for member in members:
                    member.count(begin, block)
                    counter.add(len(member.query) * len(block))
            parts += [member.columns() for member in members]
        return self._gathered(parts)

    def _pair_budget(self, largest_chunk: int) -> int:
        if self.memory_limit is None:
            return rank_counts.MEMORY_LIMIT
        fixed = (
            16 * 8 * (len(self.labels) + len(self.gallery))
            + 2 * 8 * len(self.shard_queries) * (len(metric_columns(self.ks)) + 2 + 2 * self.k)
            + TILES_ALIVE * 4 * self.side**2
            + BLOCKS_ALIVE * 4 * self.rows.dim * self.rows.blocks(self.side)[0].stop
        )
        # all processes raise or none: one that left would keep the others waiting
        least = torch.tensor(fixed + largest_chunk, device=self.rows.device)
        dist.all_reduce(least, dist.ReduceOp.MAX, group=self.group)
        if self.memory_limit < int(least):
            raise limit_error(self.memory_limit, int(least), CALLER)
        return self.memory_limit - int(fixed)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The gallery block by block, each with its first candidate; all processes get the same blocks in the same order."""
        size = self.rows.blocks(self.side)[0].stop if len(self.rows) else self.side
        sizes = torch.tensor(size, device=self.rows.device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self.group)
        for owner, shard in enumerate(self.gallery_shards):
            source = owner if self.group is None else dist.get_global_rank(self.group, owner)
            for piece in split(shard.stop, int(sizes), shard.start):
                if owner == self.rank:
                    block = self.rows.take(self.gallery[piece] - self.first_row).contiguous()
                else:
                    block = torch.empty(piece.stop - piece.start, self.rows.dim, device=self.rows.device)
                dist.broadcast(block, source, group=self.group)
                yield piece.start, block

    def _gathered(self, parts: list[dict[str, NDArray[Any]]]) -> Result | None:
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        destination = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.gather_object(columns, found, destination, group=self.group)
        if found is None:
            return None
        filled = [part for part in found if part]
        if not filled:
            raise ValueError(f"{CALLER}: no query has a relevant candidate: are labels the classes, one per row?")
        columns = {name: np.concatenate([part[name] for part in filled]) for name in filled[0]}
        order = np.argsort(columns["row"], kind="stable")
        columns = {name: values[order] for name, values in columns.items()}
        row = columns.pop("row")
        near = (self.gallery[columns.pop("neighbours")], columns.pop("scores")) if self.k else None
        return Result(
            protocol=PROTOCOLS[self.protocol],
            columns=metric_columns(self.ks),
            per_query={name: values.astype(type_of(name)) for name, values in columns.items()},
            query_index=row,
            labels=self.labels[row],
            categories=None if self.categories is None else self.categories[row],
            skipped=len(self.query_rows) - len(row),
            skipped_labels=np.unique(self.labels[np.setdiff1d(self.query_rows, row)]),
            neighbours=near,
        )


class _ShardQueryChunk:
    """Some queries of this process and the counts of their positives."""

    def __init__(self, evaluation: _ShardedEvaluation, query: Index) -> None:
        self.of, self.query = evaluation, query
        rows, height = evaluation.rows, evaluation.height
        local = evaluation.shard_queries[query] - evaluation.first_row
        self.rows = rows.padded(local, height)
        relevance = evaluation.relevance
        row, candidate = relevance.relevant(query)
        number = relevance.num_relevant[query]
        step = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        by_candidate = np.argsort(candidate, kind="stable")
        self.row, self.candidate, self.step = row[by_candidate], candidate[by_candidate], step[by_candidate]
        self.self_index = np.pad(evaluation.self_index[query], (0, height - len(query)), constant_values=-1)
        width = int(number.max())
        self.scores = self.rows.new_full((height, width), torch.inf)
        valid = np.arange(width) < np.pad(number, (0, height - len(query)))[:, None]
        self.valid = torch.from_numpy(valid).to(rows.device)
        if evaluation.k:
            least = torch.iinfo(torch.int64).min
            self.best = torch.full((height, evaluation.k), least, device=rows.device)

    def score_positives(self, begin: int, block: Tensor) -> None:
        """Compute the scores of the positives in a block."""
        first, last = np.searchsorted(self.candidate, (begin, begin + len(block)))
        columns, column = np.unique(self.candidate[first:last] - begin, return_inverse=True)
        for piece in split(len(columns), self.of.side):
            tile = self._tile(block[torch.from_numpy(columns[piece]).to(block.device)])
            here = np.flatnonzero((column >= piece.start) & (column < piece.stop))
            at, row, step = (
                torch.from_numpy(values[here]).to(block.device)
                for values in (column - piece.start, self.row[first:last], self.step[first:last])
            )
            self.scores[row, step] = tile[row, at]

    def start_counting(self) -> None:
        self.positives = PositiveCounts(self.scores, self.valid)

    def count(self, begin: int, block: Tensor) -> None:
        """Count the irrelevant candidates of a block."""
        for piece in split(len(block), self.of.side):
            tile, start = self._tile(block[piece]), begin + piece.start
            tile[:, piece.stop - piece.start :] = -torch.inf
            hide_self(tile, self.self_index, start)
            if self.of.k:
                keys = sort_keys(tile, start)[:, : piece.stop - piece.start]
                self.best = torch.cat((self.best, keys), dim=1).topk(self.of.k, dim=1).values
            first, last = np.searchsorted(self.candidate, (start, begin + piece.stop))
            row, column = (
                torch.from_numpy(values).to(tile.device)
                for values in (self.row[first:last], self.candidate[first:last] - start)
            )
            tile[row, column] = -torch.inf
            self.positives.add(tile)

    def _tile(self, candidates: Tensor) -> Tensor:
        return dot_products(self.rows, torch.nn.functional.pad(candidates, (0, 0, 0, self.of.side - len(candidates))))

    def columns(self) -> dict[str, NDArray[Any]]:
        counted = self.positives.rank_counts(self.query)
        found = per_query(PositiveRanks.from_counts(counted.counts, counted.valid), self.of.ks)
        columns: dict[str, NDArray[Any]] = {name: values.cpu().numpy() for name, values in found.items()}
        columns["row"] = self.of.shard_queries[counted.query]
        if self.of.k:
            keys = self.best[: len(self.query)].cpu()
            columns["neighbours"], columns["scores"] = candidates_of(keys), scores_of(keys)
        return columns


def _joined(shards: Sequence[_ShardTable], name: str) -> Any:
    values = [getattr(shard, name) for shard in shards]
    given = [value is not None for value in values]
    if any(given) and not all(given):
        raise ValueError(f"{CALLER}: {name} must be given on all processes or on none, got it on {sum(given)} of {len(given)}")
    return np.concatenate(values) if all(given) else None


def _edges(sorted_rows: Index, edges: Index) -> tuple[Index, Index]:
    """First and last position in `sorted_rows` of the rows of each process."""
    positions: Index = np.searchsorted(sorted_rows, edges)
    return positions[:-1], positions[1:]
