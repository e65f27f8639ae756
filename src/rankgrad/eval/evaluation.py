"""`evaluate` and `evaluate_table`: embeddings and labels in, all metrics of a named protocol out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rankgrad._checks import check_choice, check_count, check_labels_or_relevance, check_not_negative
from rankgrad.eval.embedding_blocks import Array, EmbeddingRows, Index, exact_products
from rankgrad.eval.label_codes import as_integers, encode, list_labels
from rankgrad.eval.memory_plan import MemoryPlan, plan_memory
from rankgrad.eval.metrics import checked_ks
from rankgrad.eval.protocols import PROTOCOLS, EvaluationInputs, planned
from rankgrad.eval.relevant_pairs import GradedPairs, LevelPairs, SameLabelPairs, SparsePairs
from rankgrad.eval.result import Protocol, Result
from rankgrad.eval.revisited import revisited
from rankgrad.ops.backends import resolve
from rankgrad.ops.exact_rankers import Exact
from rankgrad.ops.levels import Levels
from rankgrad.ops.loss_config import Backend
from rankgrad.ops.pairs import Pairs

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with the number of scores done and in all."""

BACKENDS = ("auto", "triton", "tiled")


def evaluate(
    embeddings: Array,
    labels: Tensor | ArrayLike | None = None,
    ref_emb: Array | None = None,
    ref_labels: Tensor | ArrayLike | None = None,
    *,
    relevance: Pairs | Levels | None = None,
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
    memory_limit: int | None = None,
    progress: ProgressCallback | None = None,
) -> Result:
    """All retrieval metrics, exact over whole lists: hits R@k, recall@k, P@k, mAP, mAP@R, RP, MRR and NDCG.

    Ranks are counted tile by tile: no distance matrix, no limit on k. Scores are dot products in float32. Where scores are
    equal, irrelevant candidates come first. `rankgrad protocols` prints what each protocol and each metric means.

    Args:
        embeddings: [Q, d] tensor or numpy array; a numpy memmap is read block by block.
        labels: [Q] integers or strings.
        ref_emb: [C, d] the gallery, possibly a memmap larger than memory. Without it every item is ranked against all others.
        ref_labels: [C] labels of the gallery, of the same kind.
        relevance: in place of labels, `Pairs` of query and candidate rows, or `Levels` of labels from coarse to fine. With
            gains NDCG is graded and the result has H-AP, hierarchical average precision. Under `Levels` a candidate that
            shares the coarsest level is relevant, in all metrics.
        ks: cut-offs, any positive integers.
        protocol: "all-vs-all", "query-gallery" or "vehicleid-official"; by default one of the first two. For
            ROxford and RParis see `revisited`.
        categories: [Q] a coarser class of each query, integers with -1 for unknown or strings, for `Result.by_category`.
        ref_categories: [C] that of the gallery, only for `category_gain`.
        self_index: [Q] row of the gallery that is the query itself and is excluded from its list, -1 where there is none.
        category_gain: gain in NDCG of an item that shares the query's category but not its class, which has gain 1.
        neighbours: number of nearest candidates of each query to keep in the result.
        repeats: number of random galleries of "vehicleid-official", 10 by default.
        seed: seed of these galleries, 0 by default.
        normalize: scale embeddings to length 1 first.
        device: device to compute on; by default that of `embeddings`.
        backend: "triton" uses fused kernels, "tiled" plain torch; "auto" takes the first on a GPU.
        memory_limit: bytes that the evaluation may use in addition to the embeddings; a limit that is too small is refused with
            the least that is possible. By default whatever it needs, which `expected_memory` predicts.
        progress: called with the number of scores done and in all.
    """
    caller = "evaluate"
    check_labels_or_relevance(labels, relevance, caller=caller)
    chosen = _protocol(protocol, gallery=ref_emb is not None)
    if relevance is not None:
        if chosen.name == "vehicleid-official" or backend == "triton":
            raise ValueError(f"{caller}: relevance needs protocol all-vs-all or query-gallery and backend 'auto' or 'tiled'")
        _refuse(chosen, ref_labels=ref_labels, categories=categories, category_gain=category_gain)
        labels = np.arange(len(embeddings))  # nobody asks for them
        ref_labels = None if ref_emb is None else np.arange(len(ref_emb))
    assert labels is not None
    if chosen.name != "vehicleid-official":
        _refuse(chosen, repeats=repeats, seed=seed)
    else:
        _refuse(chosen, category_gain=category_gain, neighbours=neighbours or None)
    inputs = _inputs(
        embeddings,
        labels,
        ref_emb,
        ref_labels,
        self_index,
        ks=ks,
        normalize=normalize,
        device=device,
        caller=caller,
    )
    check_count(neighbours, name="neighbours", caller=caller, least=0)
    inputs = replace(
        inputs,
        **_categories(inputs, categories, ref_categories, caller),
        category_gain=category_gain,
        neighbours=neighbours,
        repeats=10 if repeats is None else repeats,
        seed=0 if seed is None else seed,
        kernels=_kernels(inputs, backend, caller),
        progress=progress,
    )
    if relevance is not None:
        inputs = replace(inputs, relevance=_given(relevance, inputs, caller), kernels=False)
    check_count(inputs.repeats, name="repeats", caller=caller)
    check_count(inputs.seed, name="seed", caller=caller, least=0)
    _check_grades(inputs, caller, given=ref_categories is not None)
    if inputs.relevance is not None and not inputs.relevance.num_relevant.any():
        raise ValueError(f"{caller}: no query has a relevant candidate: relevance holds no pair with a gain above 0")
    if not _num_relevant(inputs).any():
        raise ValueError(
            f"{caller}: no query has a relevant candidate: {len(inputs.queries)} queries and {len(inputs.candidates)} "
            f"candidates share no label; are labels the classes, one per row? Queries have {_listed(inputs, inputs.labels)}"
            + ("" if inputs.ref_labels is None else f", the gallery has {_listed(inputs, inputs.ref_labels)}")
        )
    subsets = chosen.name == "vehicleid-official"
    inputs = planned(inputs, _plan(inputs, memory_limit, caller, subsets=subsets))
    with exact_products(inputs.queries.device):
        return chosen.run(inputs)


def evaluate_table(embeddings: Array, table: Any, *, protocol: str | Protocol | None = None, **options: Any) -> Result:
    """`evaluate`, or `revisited`, for the rows of a table; queries and neighbours of the result are its row numbers.

    Args:
        embeddings: [N, d] one per row of the table.
        table: an object with `labels`, -1 for a row without a class, and optionally `categories`, `is_query` and `is_gallery`
            (without both every row is a query and a candidate), and `ground_truth` with `easy`, `hard` and `junk`.
        protocol: by default "roxford" with a ground truth, "query-gallery" where the table marks queries, else "all-vs-all".
        options: see `evaluate` and `revisited`.
    """
    labels = np.asarray(table.labels)
    if len(embeddings) != len(labels):
        raise ValueError(f"evaluate_table: embeddings must be one per row of the table, {len(labels)}, got {len(embeddings)}")
    labels = separate_unlabelled(labels)
    categories = getattr(table, "categories", None)
    marks = [getattr(table, name, None) for name in ("is_query", "is_gallery")]
    truth: Any = getattr(table, "ground_truth", None)
    name = protocol.name if isinstance(protocol, Protocol) else protocol or ("roxford" if truth is not None else None)
    if name is not None and name.startswith("roxford") and truth is None:
        raise ValueError(f"evaluate_table: {name} needs a table with a ground truth of easy, hard and junk images")
    if marks[0] is None and marks[1] is None:
        return evaluate(embeddings, labels, protocol=name, categories=categories, **options)
    queries, gallery = (np.arange(len(labels)) if mark is None else np.flatnonzero(mark) for mark in marks)
    if not len(queries) or not len(gallery):
        raise ValueError(f"evaluate_table: the table must mark queries and gallery rows, got {len(queries)} and {len(gallery)}")
    query_emb, gallery_emb = _at(embeddings, queries), _at(embeddings, gallery)
    if name is not None and name.startswith("roxford"):
        result = revisited(query_emb, gallery_emb, truth.easy, truth.hard, truth.junk, protocol=name, **options)
    else:
        gallery_row = np.full(len(labels), -1)
        gallery_row[gallery] = np.arange(len(gallery))
        if options.get("category_gain") is not None and categories is not None:
            options["ref_categories"] = np.asarray(categories)[gallery]
        result = evaluate(
            query_emb,
            labels[queries],
            gallery_emb,
            labels[gallery],
            protocol=name,
            categories=None if categories is None else np.asarray(categories)[queries],
            self_index=gallery_row[queries],
            **options,
        )
    near = result.neighbours
    # distractors of `revisited` are numbered after the rows of the table
    rows = np.concatenate((gallery, np.arange(len(options.get("distractors", ()))) + len(labels)))
    return replace(
        result,
        query_index=queries[result.query_index],
        neighbours=None if near is None else (rows[near[0]], near[1]),
    )


def expected_memory(
    embeddings: Array,
    labels: Tensor | ArrayLike,
    ref_emb: Array | None = None,
    ref_labels: Tensor | ArrayLike | None = None,
    *,
    ks: Sequence[int] = (1, 10, 100, 1000),
    self_index: Tensor | ArrayLike | None = None,
    memory_limit: int | None = None,
    device: torch.device | str | None = None,
    backend: Literal["auto", "triton", "tiled"] = "auto",
) -> int:
    """Upper bound of the bytes that `evaluate` will need in addition to the given embeddings."""
    caller = "expected_memory"
    inputs = _inputs(
        embeddings,
        labels,
        ref_emb,
        ref_labels,
        self_index,
        ks=ks,
        normalize=True,
        device=device,
        caller=caller,
    )
    return _plan(replace(inputs, kernels=_kernels(inputs, backend, caller)), memory_limit, caller).total


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
        raise ValueError(f"evaluate: {', '.join(given)} would have no effect under {protocol.name}: omit it")


def _inputs(
    embeddings: Array,
    labels: Tensor | ArrayLike,
    ref_emb: Array | None,
    ref_labels: Tensor | ArrayLike | None,
    self_index: Tensor | ArrayLike | None,
    *,
    ks: Sequence[int],
    normalize: bool,
    device: torch.device | str | None,
    caller: str,
) -> EvaluationInputs:
    if (ref_emb is None) != (ref_labels is None):
        given, missing = ("ref_emb", "ref_labels") if ref_labels is None else ("ref_labels", "ref_emb")
        raise ValueError(f"{caller}: ref_emb and ref_labels go together, got {given} and no {missing}")
    if self_index is not None and ref_emb is None:
        raise ValueError(f"{caller}: self_index needs ref_emb; without it query i is candidate i")
    on = embeddings.device if device is None and isinstance(embeddings, Tensor) else torch.device(device or "cpu")
    queries = EmbeddingRows.from_arrays([embeddings], device=on, normalize=normalize, name="embeddings", caller=caller)
    cut_offs = checked_ks(ks, caller)
    if ref_emb is None:
        codes, _, names = encode(labels, len(queries), None, 0, name="labels", caller=caller)
        return EvaluationInputs(queries=queries, labels=codes, label_names=names, ks=cut_offs)
    gallery = EmbeddingRows.from_arrays(
        [ref_emb], device=on, normalize=normalize, name="ref_emb", caller=caller, dim=queries.dim
    )
    codes, ref_codes, names = encode(labels, len(queries), ref_labels, len(gallery), name="labels", caller=caller)
    own_rows = None
    if self_index is not None:
        own_rows = as_integers(self_index, len(queries), name="self_index", of="embeddings", caller=caller)
        if own_rows.max() >= len(gallery):
            raise ValueError(f"{caller}: self_index must be below {len(gallery)}, the rows of ref_emb, got {own_rows.max()}")
    return EvaluationInputs(
        queries=queries,
        labels=codes,
        label_names=names,
        gallery=gallery,
        ref_labels=ref_codes,
        self_index=own_rows,
        ks=cut_offs,
    )


def _categories(inputs: EvaluationInputs, categories: Any, ref_categories: Any, caller: str) -> dict[str, Any]:
    if categories is None:
        return {}
    queries, candidates = len(inputs.queries), len(inputs.candidates)
    codes, ref_codes, names = encode(categories, queries, ref_categories, candidates, name="categories", caller=caller)
    return {"categories": codes, "ref_categories": ref_codes, "category_names": names}


def _listed(inputs: EvaluationInputs, labels: Index) -> str:
    return list_labels(labels, inputs.label_names)


def _kernels(inputs: EvaluationInputs, backend: Backend, caller: str) -> bool:
    check_choice(backend, BACKENDS, name="backend", caller=caller)
    if inputs.queries.on_disk or inputs.candidates.on_disk:
        if backend == "triton":
            raise ValueError(f"{caller}: backend='triton' needs embeddings in memory, got a memmap; use backend='auto'")
        return False
    sample = torch.empty(0, inputs.queries.dim, device=inputs.queries.device)
    return resolve(backend, sample, Exact(), caller=caller) == "triton"


def _check_grades(inputs: EvaluationInputs, caller: str, *, given: bool) -> None:
    if inputs.category_gain is None:
        if given:
            raise ValueError(f"{caller}: ref_categories are only for category_gain, which was not given")
        return
    check_not_negative(inputs.category_gain, name="category_gain", caller=caller)
    if inputs.category_gain > 1:
        raise ValueError(f"{caller}: category_gain must be at most 1, the gain of the class, got {inputs.category_gain!r}")
    if inputs.categories is None or (inputs.gallery is not None and inputs.ref_categories is None):
        raise ValueError(f"{caller}: category_gain needs categories, and ref_categories for a gallery")


def _given(relevance: Pairs | Levels, inputs: EvaluationInputs, caller: str) -> GradedPairs:
    """Relevance of all queries, checked."""
    candidates = None if inputs.gallery is None else len(inputs.gallery)
    own = None if inputs.self_index is None else torch.from_numpy(inputs.self_index)
    if isinstance(relevance, Levels):
        levels = relevance.of_batch(len(inputs.queries), candidates, own, caller=caller)
        rows, refs = (
            t.cpu().numpy() for t in (levels.labels, levels.labels if levels.ref_labels is None else levels.ref_labels)
        )
        return LevelPairs(rows, refs, inputs.self_candidate, levels.table.numpy())
    if not isinstance(relevance, Pairs):
        raise TypeError(f"{caller}: relevance must be Pairs or Levels, got {type(relevance).__name__}")
    pairs = relevance.of_batch(len(inputs.queries), candidates, own, caller=caller)
    gain = None if pairs.gain is None else pairs.gain.double().cpu().numpy()
    return SparsePairs(pairs.query.cpu().numpy(), pairs.item.cpu().numpy(), gain, inputs.self_candidate)


def _num_relevant(inputs: EvaluationInputs) -> Index:
    if inputs.relevance is not None:
        return inputs.relevance.num_relevant
    return SameLabelPairs(inputs.labels, inputs.candidate_labels, inputs.self_candidate).num_relevant


def _plan(inputs: EvaluationInputs, memory_limit: int | None, caller: str, *, subsets: bool = False) -> MemoryPlan:
    return plan_memory(
        inputs.queries,
        inputs.gallery,
        _num_relevant(inputs),
        ks=inputs.ks,
        neighbours=inputs.neighbours,
        graded=inputs.category_gain is not None,
        kernels=inputs.kernels,
        subsets=subsets,
        listed=inputs.relevance is not None,
        memory_limit=memory_limit,
        caller=caller,
    )


def separate_unlabelled(labels: Index) -> Index:
    """Give every row of label -1 a label of its own: it is relevant to nothing, and nothing to it."""
    unlabelled = labels == -1
    return np.where(unlabelled, labels.max(initial=0) + np.cumsum(unlabelled), labels)


def _at(embeddings: Array, index: Index) -> Array:
    if len(index) == len(embeddings):
        return embeddings  # a memmap stays one
    return embeddings[torch.from_numpy(index).to(embeddings.device)] if isinstance(embeddings, Tensor) else embeddings[index]
