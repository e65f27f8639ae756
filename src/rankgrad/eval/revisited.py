"""`revisited`: ROxford5k and RParis6k, with or without distractors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rankgrad._checks import check_choice, check_count
from rankgrad.eval.embedding_blocks import Array, EmbeddingRows, Index, exact_products
from rankgrad.eval.memory_plan import plan_memory
from rankgrad.eval.metrics import checked_ks
from rankgrad.eval.protocols import PROTOCOLS, EvaluationInputs, planned
from rankgrad.eval.result import Result

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
    memory_limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """MAP and mP@k of the revisited Oxford and Paris benchmarks, named "mAP[medium]", "mP@10[hard]" and so on.

    Args:
        queries: [Q, d] embeddings of the cropped query images.
        database: [N, d] embeddings of the database.
        easy: rows of the database marked easy, for every query.
        hard: rows marked hard.
        junk: rows to ignore.
        distractors: [M, d] more embeddings, relevant to no query; a numpy memmap is read block by block.
        ks: cut-offs of mP@k.
        protocol: "roxford" for all three settings, or "roxford-easy", "roxford-medium", "roxford-hard".
        neighbours: number of nearest candidates of each query to keep in the result, including junk.
        normalize: scale embeddings to length 1 first.
        device: device to compute on; by default that of `queries`.
        memory_limit: bytes to use in addition to the embeddings; by default whatever is needed.
        progress: called with the number of scores done and in all.
    """
    check_choice(protocol, [name for name in PROTOCOLS if name.startswith("roxford")], name="protocol", caller=CALLER)
    check_count(neighbours, name="neighbours", caller=CALLER, least=0)
    on = queries.device if device is None and isinstance(queries, Tensor) else torch.device(device or "cpu")
    query_rows = EmbeddingRows.from_arrays([queries], device=on, normalize=normalize, name="queries", caller=CALLER)
    parts = [database] if distractors is None else [database, distractors]
    gallery_rows = EmbeddingRows.from_arrays(
        parts, device=on, normalize=normalize, name="database and distractors", caller=CALLER, dim=query_rows.dim
    )
    lists = {
        name: _checked(name, given, len(query_rows), len(database))
        for name, given in (("easy", easy), ("hard", hard), ("junk", junk))
    }
    for query, items in enumerate(zip(*lists.values(), strict=True)):
        every = np.concatenate(items)
        if len(np.unique(every)) < len(every):
            raise ValueError(f"{CALLER}: query {query} lists an image twice among easy, hard and junk")
    relevant = np.array([len(e) + len(h) for e, h in zip(lists["easy"], lists["hard"], strict=True)])
    if not relevant.any():
        raise ValueError(f"{CALLER}: no query has an easy or a hard image: are these the lists of the ground truth?")
    inputs = EvaluationInputs(
        queries=query_rows,
        labels=np.arange(len(query_rows)),
        gallery=gallery_rows,
        lists=lists,
        ks=checked_ks(ks, CALLER),
        neighbours=neighbours,
        progress=progress,
    )
    plan = plan_memory(
        query_rows,
        gallery_rows,
        relevant,
        ks=inputs.ks,
        neighbours=neighbours,
        memory_limit=memory_limit,
        caller=CALLER,
    )
    with exact_products(on):
        result = PROTOCOLS[protocol].run(planned(inputs, plan))
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
