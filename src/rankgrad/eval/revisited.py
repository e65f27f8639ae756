"""`revisited`: ROxford5k and RParis6k, with or without distractors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rankgrad._checks import check_choice, check_count
from rankgrad.eval.embedding_blocks import BLOCK_NUMBERS, Array, Index, Rows, exact_products, row_tile
from rankgrad.eval.evaluation import MEMORY_LIMIT, checked_ks
from rankgrad.eval.protocols import PROTOCOLS, Request
from rankgrad.eval.rank_counts import pair_bytes
from rankgrad.eval.result import Result
from rankgrad.ops.sources import split, tile_side

CALLER = "revisited"


def revisited(
    queries: Array,
    database: Array,
    easy: Sequence[ArrayLike],
    hard: Sequence[ArrayLike],
    junk: Sequence[ArrayLike],
    *,
    distractors: Array | None = None,
    ks: Sequence[int] = (1, 5, 10),
    protocol: str = "roxford",
    neighbours: int = 0,
    normalize: bool = True,
    device: torch.device | str | None = None,
    memory_limit: int = MEMORY_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """The mAP and mP@k of the revisited Oxford and Paris benchmarks, named "mAP[medium]", "mP@10[hard]" and so on.

    Args:
        queries: [Q, d] embeddings of the cropped query images.
        database: [N, d] embeddings of the database.
        easy: for every query the rows of the database that are marked easy.
        hard: those marked hard.
        junk: those to be ignored.
        distractors: [M, d] more embeddings, relevant to no query; a numpy memmap is read block by block.
        ks: cut-offs of mP@k.
        protocol: "roxford" for all three settings, or "roxford-easy", "roxford-medium", "roxford-hard".
        neighbours: keep this many nearest candidates of each query in the result, junk among them.
        normalize: bring embeddings to length 1 first.
        device: where to compute; by default where `queries` are.
        memory_limit: bytes for what is held of queries and their relevant images at once.
        progress: called with the scores done and the scores to do.
    """
    check_choice(protocol, [name for name in PROTOCOLS if name.startswith("roxford")], name="protocol", caller=CALLER)
    check_count(neighbours, name="neighbours", caller=CALLER, least=0)
    on = queries.device if device is None and isinstance(queries, Tensor) else torch.device(device or "cpu")
    asking = Rows.of([queries], device=on, normalize=normalize, name="queries", caller=CALLER)
    parts = [database] if distractors is None else [database, distractors]
    asked = Rows.of(parts, device=on, normalize=normalize, name="database and distractors", caller=CALLER, dim=asking.dim)
    lists = {
        name: _checked(name, given, len(asking), len(database))
        for name, given in (("easy", easy), ("hard", hard), ("junk", junk))
    }
    for query, items in enumerate(zip(*lists.values(), strict=True)):
        every = np.concatenate(items)
        if len(np.unique(every)) < len(every):
            raise ValueError(f"{CALLER}: query {query} has an image twice in its lists of easy, hard and junk")
    relevant = np.array([len(e) + len(h) for e, h in zip(lists["easy"], lists["hard"], strict=True)])
    if not relevant.any():
        raise ValueError(f"{CALLER}: no query has an easy or a hard image: are these the lists of the ground truth?")
    request = Request(
        queries=asking,
        labels=np.arange(len(asking)),
        gallery=asked,
        lists=lists,
        ks=checked_ks(ks, CALLER),
        neighbours=neighbours,
        budget=memory_limit,
        memory=_memory(asking, asked, relevant, memory_limit),
        progress=progress,
    )
    with exact_products(on):
        result = PROTOCOLS[protocol].run(request)
    if distractors is None:
        return result
    name = f"{protocol}+distractors"
    notes = (f"{len(distractors):,} distractors after {len(database):,} database images",)
    return replace(result, protocol=replace(result.protocol, name=name), notes=notes)


def _checked(name: str, lists: Sequence[ArrayLike], queries: int, database: int) -> list[Index]:
    if len(lists) != queries:
        raise ValueError(f"{CALLER}: {name} must be one list per query, {queries}, got {len(lists)}")
    arrays = [np.asarray(items, dtype=np.int64).reshape(-1) for items in lists]
    for query, items in enumerate(arrays):
        if len(items) and not 0 <= items.min() <= items.max() < database:
            raise ValueError(
                f"{CALLER}: {name} of query {query} must be rows of a database of {database}, "
                f"got {items.min()} to {items.max()}"
            )
    return arrays


def _memory(queries: Rows, gallery: Rows, relevant: Index, budget: int) -> int:
    side = tile_side(queries.device)
    height = row_tile(len(queries), side)
    widths = np.sort(relevant)
    held = [pair_bytes(height, int(widths[c.stop - 1])) + height * queries.dim * 4 for c in split(len(widths), height)]
    pairs = max(min(sum(held), budget), *held)
    return pairs + 3 * 4 * min(BLOCK_NUMBERS, len(gallery) * queries.dim) + 16 * 4 * height * side
