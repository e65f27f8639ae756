"""`evaluate`: embeddings and labels in, every metric of a named protocol out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rankgrad._checks import check_choice, check_count, check_not_negative
from rankgrad.eval.embedding_blocks import BLOCK_NUMBERS, Array, Index, Rows, exact_products, row_tile
from rankgrad.eval.graded import SORTED_NUMBERS
from rankgrad.eval.metrics import metric_columns
from rankgrad.eval.protocols import MOST_PAIRS, PROTOCOLS, Request
from rankgrad.eval.rank_counts import PAIR_BYTES, SameLabel, pair_bytes
from rankgrad.eval.result import Protocol, Result
from rankgrad.ops.functional import Backend, resolve
from rankgrad.ops.rankers import Exact
from rankgrad.ops.sources import split, tile_side

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many scores are done and how many there are."""

BACKENDS = ("auto", "triton", "tiled")

# Bytes for what is held of the relevant pairs while tiles are counted, unless one chunk of queries needs more.
MEMORY_LIMIT = 2**29


# Blocks that exist while one is made into rows, and tiles while one is counted or looked through for neighbours.
BLOCKS_ALIVE, TILES_ALIVE = 3, 64


def evaluate(
    embeddings: Array,
    labels: Tensor | ArrayLike,
    ref_emb: Array | None = None,
    ref_labels: Tensor | ArrayLike | None = None,
    *,
    ks: Sequence[int] = (1, 10, 100, 1000),
    protocol: str | Protocol | None = None,
    categories: Tensor | ArrayLike | None = None,
    ref_categories: Tensor | ArrayLike | None = None,
    self_index: Tensor | ArrayLike | None = None,
    category_gain: float | None = None,
    neighbours: int = 0,
    repeats: int | None = None,
    seed: int | None = None,
    normalize: bool = True,
    device: torch.device | str | None = None,
    backend: Literal["auto", "triton", "tiled"] = "auto",
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Result:
    """Every metric of retrieval, exact over whole lists: hits R@k, recall@k, P@k, mAP, mAP@R, RP, MRR and NDCG.

    Ranks are counted tile by tile: no matrix of distances, no limit on k. Scores are dot products in float32. Where scores are
    equal, irrelevant candidates come first. `rankgrad protocols` prints what each protocol and each metric means.

    Args:
        embeddings: [Q, d] a tensor or a numpy array; a numpy memmap is read block by block.
        labels: [Q] integers.
        ref_emb: [C, d] the gallery, possibly a memmap larger than memory. Without it all is ranked among itself.
        ref_labels: [C] integers.
        ks: cut-offs, any positive integers.
        protocol: "all-vs-all", "query-gallery" or "vehicleid-official"; by default one of the first two. For
            ROxford and RParis see `revisited`.
        categories: [Q] a coarser class of each query, for `Result.by_category`; -1 is unknown.
        ref_categories: [C] that of the gallery, only for `category_gain`.
        self_index: [Q] row of the gallery that is the query itself and is taken out of its list, -1 where there is none.
        category_gain: gain in NDCG of an item that shares the query's category but not its class, which has gain 1.
        neighbours: keep this many nearest candidates of each query in the result.
        repeats: random galleries of "vehicleid-official", 10 by default.
        seed: of these galleries, 0 by default.
        normalize: bring embeddings to length 1 first.
        device: where to compute; by default where `embeddings` are.
        backend: "triton" are the engine's fused kernels, "tiled" is plain torch; "auto" takes the first on a GPU.
        memory_limit: bytes for what is held of relevant pairs at once; `expected_memory` tells the whole need.
        progress: called with the scores done and the scores to do.
    """
    caller = "evaluate"
    chosen = _protocol(protocol, gallery=ref_emb is not None)
    if chosen.name != "vehicleid-official":
        _refuse(chosen, repeats=repeats, seed=seed)
    else:
        _refuse(chosen, category_gain=category_gain, neighbours=neighbours or None)
    request = _request(
        embeddings,
        labels,
        ref_emb,
        ref_labels,
        self_index,
        ks=ks,
        normalize=normalize,
        device=device,
        memory_limit=memory_limit,
        caller=caller,
    )
    check_count(neighbours, name="neighbours", caller=caller, least=0)
    request = replace(
        request,
        categories=_integers(categories, len(request.queries), name="categories", of="embeddings", caller=caller),
        ref_categories=_integers(ref_categories, len(request.candidates), name="ref_categories", of="ref_emb", caller=caller),
        category_gain=category_gain,
        neighbours=neighbours,
        repeats=10 if repeats is None else repeats,
        seed=0 if seed is None else seed,
        kernels=_kernels(request, backend, caller),
        progress=progress,
    )
    check_count(request.repeats, name="repeats", caller=caller)
    check_count(request.seed, name="seed", caller=caller, least=0)
    _check_grades(request, caller)
    if not _num_relevant(request).any():
        raise ValueError(
            f"{caller}: no query has a relevant candidate: {len(request.queries)} queries and {len(request.candidates)} "
            "candidates share no label; are labels the classes, one per row?"
        )
    with exact_products(request.queries.device):
        return chosen.run(replace(request, memory=_memory(request)))


def expected_memory(
    embeddings: Array,
    labels: Tensor | ArrayLike,
    ref_emb: Array | None = None,
    ref_labels: Tensor | ArrayLike | None = None,
    *,
    ks: Sequence[int] = (1, 10, 100, 1000),
    self_index: Tensor | ArrayLike | None = None,
    memory_limit: int = MEMORY_LIMIT,
    device: torch.device | str | None = None,
    backend: Literal["auto", "triton", "tiled"] = "auto",
) -> int:
    """Bytes that `evaluate` will need at most beyond the embeddings it is given, known before it begins."""
    caller = "expected_memory"
    request = _request(
        embeddings,
        labels,
        ref_emb,
        ref_labels,
        self_index,
        ks=ks,
        normalize=True,
        device=device,
        memory_limit=memory_limit,
        caller=caller,
    )
    return _memory(replace(request, kernels=_kernels(request, backend, caller)))


def _protocol(protocol: str | Protocol | None, *, gallery: bool) -> Protocol:
    if protocol is None:
        return PROTOCOLS["query-gallery" if gallery else "all-vs-all"]
    name = protocol.name if isinstance(protocol, Protocol) else protocol
    check_choice(name, PROTOCOLS, name="protocol", caller="evaluate")
    if name.startswith("roxford"):
        raise ValueError(f"evaluate: {name} needs the lists of easy, hard and junk images: call rankgrad.eval.revisited")
    if gallery != (name == "query-gallery"):
        need = "needs ref_emb and ref_labels" if name == "query-gallery" else "takes no ref_emb"
        raise ValueError(f"evaluate: protocol {name} {need}")
    return PROTOCOLS[name]


def _refuse(protocol: Protocol, **options: object) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"evaluate: {', '.join(given)} would have no effect under {protocol.name}: leave it out")


def _request(
    embeddings: Array,
    labels: Tensor | ArrayLike,
    ref_emb: Array | None,
    ref_labels: Tensor | ArrayLike | None,
    self_index: Tensor | ArrayLike | None,
    *,
    ks: Sequence[int],
    normalize: bool,
    device: torch.device | str | None,
    memory_limit: int,
    caller: str,
) -> Request:
    if (ref_emb is None) != (ref_labels is None):
        given, missing = ("ref_emb", "ref_labels") if ref_labels is None else ("ref_labels", "ref_emb")
        raise ValueError(f"{caller}: ref_emb and ref_labels go together, got {given} and no {missing}")
    if self_index is not None and ref_emb is None:
        raise ValueError(f"{caller}: self_index needs ref_emb; without it query i is candidate i")
    on = embeddings.device if device is None and isinstance(embeddings, Tensor) else torch.device(device or "cpu")
    queries = Rows.of([embeddings], device=on, normalize=normalize, name="embeddings", caller=caller)
    own_labels = _integers(labels, len(queries), name="labels", of="embeddings", caller=caller)
    assert own_labels is not None, "labels are not optional"
    cut_offs = checked_ks(ks, caller)
    check_count(memory_limit, name="memory_limit", caller=caller)
    if ref_emb is None:
        return Request(queries=queries, labels=own_labels, ks=cut_offs, budget=memory_limit)
    gallery = Rows.of([ref_emb], device=on, normalize=normalize, name="ref_emb", caller=caller, dim=queries.dim)
    own = _integers(self_index, len(queries), name="self_index", of="embeddings", caller=caller)
    if own is not None and own.max() >= len(gallery):
        raise ValueError(f"{caller}: self_index must be below {len(gallery)}, the rows of ref_emb, got {own.max()}")
    return Request(
        queries=queries,
        labels=own_labels,
        gallery=gallery,
        ref_labels=_integers(ref_labels, len(gallery), name="ref_labels", of="ref_emb", caller=caller),
        own=own,
        ks=cut_offs,
        budget=memory_limit,
    )


def checked_ks(ks: Sequence[int], caller: str) -> tuple[int, ...]:
    """The cut-offs in ascending order, once each."""
    if not len(ks):
        raise ValueError(f"{caller}: ks must hold at least one cut-off, got none")
    for k in ks:
        check_count(k, name="every k of ks", caller=caller)
    return tuple(sorted(set(ks)))


def _integers(values: Any, items: int, *, name: str, of: str, caller: str) -> Index | None:
    if values is None:
        return None
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{caller}: {name} must be integers, got {array.dtype}")
    if array.shape != (items,):
        raise ValueError(f"{caller}: {name} must be one per row of {of}, shape ({items},), got shape {array.shape}")
    return array.astype(np.int64)


def _kernels(request: Request, backend: Backend, caller: str) -> bool:
    check_choice(backend, BACKENDS, name="backend", caller=caller)
    if request.queries.on_disk or request.candidates.on_disk:
        if backend == "triton":
            raise ValueError(f"{caller}: backend='triton' wants embeddings in memory, got a memmap; use backend='auto'")
        return False
    sample = torch.empty(0, request.queries.dim, device=request.queries.device)
    return resolve(backend, sample, Exact(), caller=caller) == "triton"


def _check_grades(request: Request, caller: str) -> None:
    if request.category_gain is None:
        if request.ref_categories is not None:
            raise ValueError(f"{caller}: ref_categories are only for category_gain, which was not given")
        return
    check_not_negative(request.category_gain, name="category_gain", caller=caller)
    if request.category_gain > 1:
        raise ValueError(f"{caller}: category_gain must be at most 1, the gain of the class, got {request.category_gain!r}")
    if request.categories is None or (request.gallery is not None and request.ref_categories is None):
        raise ValueError(f"{caller}: category_gain needs categories, and ref_categories for a gallery")


def _num_relevant(request: Request) -> Index:
    return SameLabel(request.labels, request.candidate_labels, request.self_index).num_relevant


def _memory(request: Request) -> int:
    """What is held at the worst moment: rows in the order of counting, pairs of one group, blocks, tiles and results."""
    queries, candidates, dim = len(request.queries), len(request.candidates), request.queries.dim
    side = tile_side(request.queries.device)
    widths = np.sort(_num_relevant(request))
    symmetric = request.gallery is None and not request.queries.on_disk
    height = side if symmetric else row_tile(queries, side)
    held = [pair_bytes(height, int(widths[chunk.stop - 1])) for chunk in split(queries, height)]
    pairs = max(min(sum(held), request.budget), *held)
    if request.kernels:
        # in float32, and as two halves in float16; all metrics of a slice of pairs
        rows = 8 * dim * (queries + candidates) + PAIR_BYTES * MOST_PAIRS
    else:
        rows = 4 * dim * candidates if symmetric else min(4 * dim * queries, request.budget)
    blocks = BLOCKS_ALIVE * 4 * min(BLOCK_NUMBERS, dim * candidates)
    order = 16 * 8 * (queries + candidates)
    results = 2 * 8 * queries * (len(metric_columns(request.ks)) + 2 + 2 * request.neighbours)
    sorting = 0 if request.category_gain is None else 64 * min(SORTED_NUMBERS, queries * candidates)
    return rows + pairs + blocks + order + results + sorting + TILES_ALIVE * 4 * side**2
