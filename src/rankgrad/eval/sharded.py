"""`evaluate_divided`: a gallery that several processes hold together and that need not fit in any of them.

Every process has the embeddings of its own rows and ranks its own queries. The gallery goes round block by block: its owner
sends a block to all, each takes from it what it needs, and it is dropped. One round for the scores of relevant items, one to
count what lies ahead of them, so the wire carries the gallery twice and a process holds one block of it at a time.

Dimension letters:  Q queries of this process   C candidates of all   B queries of a chunk   P relevant items, padded
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
from rankgrad.eval.embedding_blocks import Array, Index, Rows, exact_products, row_tile
from rankgrad.eval.evaluation import MEMORY_LIMIT, checked_ks
from rankgrad.eval.metrics import Ranked, metric_columns, per_query
from rankgrad.eval.nearest import candidates_of, hide_own, scores_of, sort_keys
from rankgrad.eval.protocols import PROTOCOLS, Meter, type_of
from rankgrad.eval.rank_counts import SameLabel, Sought, groups_within, pair_bytes
from rankgrad.eval.result import Result
from rankgrad.eval.tables import evaluate_table, without_classless
from rankgrad.ops.sources import split, tile_side

CALLER = "evaluate_divided"


@dataclass(frozen=True, eq=False)
class _Marked:
    """Labels and marks of rows, as `evaluate_table` wants them."""

    labels: Index
    is_query: NDArray[np.bool_] | None
    is_gallery: NDArray[np.bool_] | None
    categories: Index | None


def evaluate_divided(
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
    memory_limit: int = MEMORY_LIMIT,
    group: "dist.ProcessGroup | None" = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result | None:
    """What `evaluate_table` gives for the rows of all processes, in the order of their ranks; on the others it is None.

    All processes of the group must call it, each with its own rows. Without a process group the rows are all there are. The
    protocol is "query-gallery" where rows are marked and "all-vs-all" where they are not.

    Args:
        embeddings: [N, d] of this process's rows; a memmap is read block by block.
        labels: [N] integers, -1 for a row of no class.
        is_query: [N] bool, None for all; given on all processes or on none, like the next two.
        is_gallery: [N] bool.
        categories: [N] integers.
        ks: cut-offs.
        neighbours: nearest candidates of each query that are kept.
        normalize: bring embeddings to length 1 first.
        device: where to compute, one that the group's backend can send from; by default where `embeddings` are.
        memory_limit: bytes for what is held of relevant pairs at once; with less the gallery goes round more often.
        group: the processes, by default all.
        progress: called with the scores done and the scores to do of this process.
    """
    check_count(neighbours, name="neighbours", caller=CALLER, least=0)
    mine = _Marked(
        _array(labels, np.int64),
        None if is_query is None else _array(is_query, np.bool_),
        None if is_gallery is None else _array(is_gallery, np.bool_),
        None if categories is None else _array(categories, np.int64),
    )
    if len(embeddings) != len(mine.labels):
        raise ValueError(f"{CALLER}: labels must be one per embedding, {len(embeddings)}, got {len(mine.labels)}")
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return evaluate_table(
            embeddings,
            mine,
            ks=ks,
            neighbours=neighbours,
            normalize=normalize,
            device=device,
            memory_limit=memory_limit,
            progress=progress,
        )
    on = embeddings.device if device is None and isinstance(embeddings, Tensor) else torch.device(device or "cpu")
    rows = Rows.of([embeddings], device=on, normalize=normalize, name="embeddings", caller=CALLER)
    with exact_products(on):
        return _Evaluation(rows, mine, checked_ks(ks, CALLER), neighbours, memory_limit, group).result(progress)


def _array(values: Any, kind: type) -> NDArray[Any]:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(kind)


class _Evaluation:
    """One process's part. `row` numbers the rows of all processes, `candidate` those of them that are in the gallery."""

    def __init__(
        self, rows: Rows, mine: _Marked, ks: tuple[int, ...], neighbours: int, budget: int, group: "dist.ProcessGroup | None"
    ) -> None:
        self.rows, self.ks, self.budget, self.group = rows, ks, budget, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (mine, rows.dim), group=group)
        if len({dim for _, dim in found}) > 1:
            raise ValueError(f"{CALLER}: embeddings must have the same dimensions everywhere, got {[dim for _, dim in found]}")
        everyone = [marked for marked, _ in found]
        self.first_row = sum(len(marked.labels) for marked in everyone[: self.rank])
        self.labels = without_classless(_joined(everyone, "labels"))
        self.categories = _joined(everyone, "categories")
        marks = [_joined(everyone, name) for name in ("is_query", "is_gallery")]
        asking, self.gallery = (np.arange(len(self.labels)) if mark is None else np.flatnonzero(mark) for mark in marks)
        self.protocol = "all-vs-all" if marks[0] is None and marks[1] is None else "query-gallery"
        edges = np.cumsum([0, *(len(marked.labels) for marked in everyone)])
        self.shares = [slice(*pair) for pair in zip(*_edges(self.gallery, edges), strict=True)]
        self.asking = asking
        begin, end = np.searchsorted(asking, edges[self.rank : self.rank + 2])
        self.own_rows = asking[begin:end]
        place = np.full(len(self.labels), -1)
        place[self.gallery] = np.arange(len(self.gallery))
        self.self_index = place[self.own_rows]
        self.k = min(neighbours, len(self.gallery) - int((place[asking] >= 0).any()))
        self.relevance = SameLabel(self.labels[self.own_rows], self.labels[self.gallery], self.self_index)
        self.side = tile_side(rows.device)
        # the shape of products decides the rounding of scores, so it is that of one process
        self.height = self.side if self.protocol == "all-vs-all" else row_tile(len(asking), self.side)

    def result(self, progress: Callable[[int, int], None] | None) -> Result | None:
        order = np.argsort(self.relevance.num_relevant, kind="stable")
        order = order[self.relevance.num_relevant[order] > 0]
        chunks = [order[chunk] for chunk in split(len(order), self.height)]
        widths = [int(self.relevance.num_relevant[chunk].max()) for chunk in chunks]
        held = [pair_bytes(self.height, width) + 4 * self.height * self.rows.dim for width in widths]
        groups = list(groups_within(held, self.budget))
        rounds = torch.tensor(len(groups), device=self.rows.device)
        dist.all_reduce(rounds, dist.ReduceOp.MAX, group=self.group)
        meter = Meter(progress, len(order) * len(self.gallery))
        parts = []
        for number in range(int(rounds)):
            # a process that has done its queries still sends its blocks
            members = [_Asking(self, chunks[i]) for i in groups[number]] if number < len(groups) else []
            for begin, block in self.blocks():
                for member in members:
                    member.find(begin, block)
            for member in members:
                member.begin_to_count()
            for begin, block in self.blocks():
                for member in members:
                    member.count(begin, block)
                    meter(len(member.query) * len(block))
            parts += [member.columns() for member in members]
        return self._gathered(parts)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The gallery once, each block with its first candidate: all processes get the same blocks in the same order."""
        size = self.rows.blocks(self.side)[0].stop if len(self.rows) else self.side
        sizes = torch.tensor(size, device=self.rows.device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self.group)
        for owner, share in enumerate(self.shares):
            source = owner if self.group is None else dist.get_global_rank(self.group, owner)
            for piece in split(share.stop, int(sizes), share.start):
                if owner == self.rank:
                    block = self.rows.take(self.gallery[piece] - self.first_row).contiguous()
                else:
                    block = torch.empty(piece.stop - piece.start, self.rows.dim, device=self.rows.device)
                dist.broadcast(block, source, group=self.group)
                yield piece.start, block

    def _gathered(self, parts: list[dict[str, NDArray[Any]]]) -> Result | None:
        mine = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        destination = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.gather_object(mine, found, destination, group=self.group)
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
            skipped=len(self.asking) - len(row),
            neighbours=near,
        )


class _Asking:
    """A few queries of this process, what they look for and what has been counted for them."""

    def __init__(self, evaluation: _Evaluation, query: Index) -> None:
        self.of, self.query = evaluation, query
        rows, height = evaluation.rows, evaluation.height
        local = evaluation.own_rows[query] - evaluation.first_row
        self.rows = rows.padded(local, height)
        relevance = evaluation.relevance
        row, candidate = relevance.relevant(query)
        number = relevance.num_relevant[query]
        step = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        by_candidate = np.argsort(candidate, kind="stable")
        self.row, self.candidate, self.step = row[by_candidate], candidate[by_candidate], step[by_candidate]
        self.own = np.pad(evaluation.self_index[query], (0, height - len(query)), constant_values=-1)
        width = int(number.max())
        self.scores = self.rows.new_full((height, width), torch.inf)
        valid = np.arange(width) < np.pad(number, (0, height - len(query)))[:, None]
        self.valid = torch.from_numpy(valid).to(rows.device)
        if evaluation.k:
            least = torch.iinfo(torch.int64).min
            self.best = torch.full((height, evaluation.k), least, device=rows.device)

    def find(self, begin: int, block: Tensor) -> None:
        """Takes the scores of relevant items that are in a block."""
        first, last = np.searchsorted(self.candidate, (begin, begin + len(block)))
        wanted, place = np.unique(self.candidate[first:last] - begin, return_inverse=True)
        for panel in split(len(wanted), self.of.side):
            tile = self._tile(block[torch.from_numpy(wanted[panel]).to(block.device)])
            here = np.flatnonzero((place >= panel.start) & (place < panel.stop))
            at, row, step = (
                torch.from_numpy(values[here]).to(block.device)
                for values in (place - panel.start, self.row[first:last], self.step[first:last])
            )
            self.scores[row, step] = tile[row, at]

    def begin_to_count(self) -> None:
        self.sought = Sought((self.scores, self.valid))

    def count(self, begin: int, block: Tensor) -> None:
        """Counts the irrelevant candidates of a block."""
        for piece in split(len(block), self.of.side):
            tile, start = self._tile(block[piece]), begin + piece.start
            tile[:, piece.stop - piece.start :] = -torch.inf
            hide_own(tile, self.own, start)
            if self.of.k:
                keys = sort_keys(tile, start)[:, : piece.stop - piece.start]
                self.best = torch.cat((self.best, keys), dim=1).topk(self.of.k, dim=1).values
            first, last = np.searchsorted(self.candidate, (start, begin + piece.stop))
            row, column = (
                torch.from_numpy(values).to(tile.device)
                for values in (self.row[first:last], self.candidate[first:last] - start)
            )
            tile[row, column] = -torch.inf
            self.sought.count(tile)

    def _tile(self, candidates: Tensor) -> Tensor:
        return self.rows @ torch.nn.functional.pad(candidates, (0, 0, 0, self.of.side - len(candidates))).t()

    def columns(self) -> dict[str, NDArray[Any]]:
        ahead = self.sought.ahead(self.query)
        found = per_query(Ranked.of(ahead.count, ahead.valid), self.of.ks)
        columns: dict[str, NDArray[Any]] = {name: values.cpu().numpy() for name, values in found.items()}
        columns["row"] = self.of.own_rows[ahead.query]
        if self.of.k:
            keys = self.best[: len(self.query)].cpu()
            columns["neighbours"], columns["scores"] = candidates_of(keys), scores_of(keys)
        return columns


def _joined(everyone: Sequence[_Marked], name: str) -> Any:
    values = [getattr(marked, name) for marked in everyone]
    given = [value is not None for value in values]
    if any(given) and not all(given):
        raise ValueError(f"{CALLER}: {name} must be given on all processes or on none, got it on {sum(given)} of {len(given)}")
    return np.concatenate(values) if all(given) else None


def _edges(sorted_rows: Index, edges: Index) -> tuple[Index, Index]:
    """Where the rows of each process begin and end among `sorted_rows`."""
    places: Index = np.searchsorted(sorted_rows, edges)
    return places[:-1], places[1:]
