"""The sentences about wrong arguments, in one place so that they are uniform: who complains, what was wanted, what came."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

# What gains above 0 lie between: their sums, products and quotients are then numbers of float32.
GAINS = (1e-15, 1e15)


def shape_of(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def check_choice(value: Any, choices: Collection[str], *, name: str, caller: str) -> None:
    if value not in choices:
        raise ValueError(f"{caller}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_positive(value: Any, *, name: str, caller: str) -> None:
    _check_number(value, name=name, caller=caller)
    if not value > 0:
        raise ValueError(f"{caller}: {name} must be a finite number above 0, got {value!r}")


def check_not_negative(value: Any, *, name: str, caller: str) -> None:
    _check_number(value, name=name, caller=caller)
    if not value >= 0:
        raise ValueError(f"{caller}: {name} must be a finite number of at least 0, got {value!r}")


def _check_number(value: Any, *, name: str, caller: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{caller}: {name} must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{caller}: {name} must be finite, got {value!r}")


def check_count(value: Any, *, name: str, caller: str, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}: {name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{caller}: {name} must be at least {least}, got {value!r}")


def check_labels_or_relevance(labels: Any, relevance: Any, *, caller: str) -> None:
    """That exactly one of both is given."""
    if (labels is None) == (relevance is None):
        raise TypeError(f"{caller}: give either labels or relevance, got {'neither' if labels is None else 'both'}")


def check_cut(k: Any, tau: Any, *, caller: str) -> None:
    """A cut-off of ranks, or None, and its temperature."""
    if k is not None:
        check_count(k, name="k", caller=caller)
    check_not_negative(tau, name="tau", caller=caller)


def check_tensor(value: Any, *, name: str, caller: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be a torch.Tensor, got {type(value).__name__}")


def as_tensor(values: Tensor | ArrayLike, *, name: str, caller: str) -> Tensor:
    """A tensor as it is; numbers in a list or an array as one, of integers where there are none."""
    if isinstance(values, Tensor):
        return values
    array = np.asarray([] if values is None else values)
    if values is None or array.dtype.kind not in "biuf":
        raise TypeError(f"{caller}: {name} must be a tensor, an array or a list of numbers, got {type(values).__name__}")
    return torch.from_numpy(array.copy() if array.size else array.astype(np.int64))


def check_embeddings(embeddings: Any, *, name: str, caller: str) -> None:
    if isinstance(embeddings, (list, tuple)) and embeddings and isinstance(embeddings[0], Mapping):
        raise TypeError(
            f"{caller}: {name} must be a torch.Tensor, got a list of tokenized texts such as the trainer of "
            "sentence-transformers passes on. Wrap the loss for it: "
            "rankgrad.integrations.sentence_transformers.RankLoss(model, loss)"
        )
    check_tensor(embeddings, name=name, caller=caller)
    if embeddings.ndim != 2:
        raise ValueError(f"{caller}: {name} must be [items, dimensions], got shape {shape_of(embeddings)}")
    if embeddings.shape[0] == 0 or embeddings.shape[1] == 0:
        raise ValueError(f"{caller}: {name} must hold at least one item of one dimension, got shape {shape_of(embeddings)}")
    check_floating(embeddings, name=name, caller=caller)


def check_floating(tensor: Tensor, *, name: str, caller: str) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{caller}: {name} must be a floating-point tensor, got {tensor.dtype}")


def check_labels(labels: Any, *, items: int, of: str, name: str, caller: str) -> None:
    check_tensor(labels, name=name, caller=caller)
    if labels.is_floating_point() and labels.ndim == 2 and labels.shape[0] == items:
        raise TypeError(
            f"{caller}: {name} must be one integer per row of {of}, got soft labels of shape {shape_of(labels)}. Mixup and "
            f"CutMix make such labels, and rank losses need one class per item: switch them off (rg.SiMix mixes items of one "
            f"class instead), or pass {name}.argmax(dim=1)"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{caller}: {name} must be integers, got {labels.dtype}; use {name}.long() if they are whole numbers")
    if labels.ndim != 1 or labels.shape[0] != items:
        several = name in ("labels", "ref_labels") and labels.ndim == 2 and len(labels) == items
        hint = "; for classes at several levels pass relevance=rg.Levels(labels)" if several else ""
        raise ValueError(f"{caller}: {name} must be one per row of {of}, shape ({items},), got shape {shape_of(labels)}{hint}")


def check_finite(tensor: Tensor, *, name: str, caller: str) -> None:
    bad = (~torch.isfinite(tensor)).sum().item()
    if bad:
        raise ValueError(f"{caller}: {name} must be finite, got {bad} NaN or infinite values of {tensor.numel()}")


def check_batch(
    embeddings: Any,
    labels: Any,
    ref_emb: Any,
    ref_labels: Any,
    self_index: Any,
    weights: Any,
    *,
    validate: bool,
    caller: str,
) -> None:
    """Embeddings and labels as a rank loss takes them; `validate` checks contents too, which synchronises."""
    check_embeddings(embeddings, name="embeddings", caller=caller)
    check_labels(labels, items=len(embeddings), of="embeddings", name="labels", caller=caller)
    if isinstance(ref_emb, (tuple, list)) and len(ref_emb) in (3, 4):
        raise TypeError(
            f"{caller}: ref_emb, the third argument, must be a torch.Tensor, got a tuple of {len(ref_emb)} such as a miner of "
            "pytorch-metric-learning returns. A rank loss ranks all pairs and needs no miner; to rank mined pairs only, wrap "
            "the loss: rankgrad.integrations.pytorch_metric_learning.pml(loss)(embeddings, labels, indices_tuple)"
        )
    if (ref_emb is None) != (ref_labels is None):
        given, missing = ("ref_emb", "ref_labels") if ref_labels is None else ("ref_labels", "ref_emb")
        raise ValueError(f"{caller}: ref_emb and ref_labels go together, got {given} and no {missing}")
    check_references(embeddings, ref_emb, self_index, weights, validate=validate, caller=caller)
    if ref_emb is not None:
        check_labels(ref_labels, items=len(ref_emb), of="ref_emb", name="ref_labels", caller=caller)


def check_references(embeddings: Any, ref_emb: Any, self_index: Any, weights: Any, *, validate: bool, caller: str) -> None:
    """All of a batch but what says who is relevant."""
    check_embeddings(embeddings, name="embeddings", caller=caller)
    if weights is not None:
        check_weights(weights, items=len(embeddings), validate=validate, caller=caller)
    if ref_emb is None:
        if self_index is not None:
            raise ValueError(f"{caller}: self_index needs ref_emb; without it query i is candidate i")
    else:
        check_embeddings(ref_emb, name="ref_emb", caller=caller)
        if ref_emb.shape[1] != embeddings.shape[1]:
            wanted, came = embeddings.shape[1], ref_emb.shape[1]
            raise ValueError(f"{caller}: ref_emb must have the {wanted} dimensions of embeddings, got {came}")
        if ref_emb.device != embeddings.device:
            raise ValueError(f"{caller}: ref_emb must be on {embeddings.device} like embeddings, got {ref_emb.device}")
        if self_index is not None:
            check_labels(self_index, items=len(embeddings), of="embeddings", name="self_index", caller=caller)
            if (validate or self_index.device.type == "cpu") and bool((self_index >= len(ref_emb)).any()):
                raise ValueError(f"{caller}: self_index must be below {len(ref_emb)}, got {int(self_index.max())}")
    if validate:
        check_finite(embeddings, name="embeddings", caller=caller)
        if ref_emb is not None:
            check_finite(ref_emb, name="ref_emb", caller=caller)


def check_weights(weights: Any, *, items: int, validate: bool, caller: str) -> None:
    check_tensor(weights, name="weights", caller=caller)
    check_floating(weights, name="weights", caller=caller)
    if weights.shape != (items,):
        raise ValueError(f"{caller}: weights must be one per query, shape ({items},), got shape {shape_of(weights)}")
    if validate:
        check_finite(weights, name="weights", caller=caller)
        if bool((weights < 0).any()):
            raise ValueError(f"{caller}: weights must be at least 0, got {weights.min().item()}")


def check_scores(
    scores: Any, relevance: Any, candidates: Any, weights: Any, *, lists: int | None = None, validate: bool, caller: str
) -> None:
    """Scores and relevance as a rank loss takes them, in one row per list or as a vector that holds `lists` of them, or one.

    `validate` checks contents too, which synchronises.
    """
    check_tensor(scores, name="scores", caller=caller)
    check_floating(scores, name="scores", caller=caller)
    if scores.ndim not in (1, 2) or not scores.numel():
        raise ValueError(
            f"{caller}: scores must be [queries, candidates] or [candidates] and not empty, got {shape_of(scores)}"
        )
    if weights is not None:
        check_weights(weights, items=len(scores) if scores.ndim == 2 else lists or 1, validate=validate, caller=caller)
    check_tensor(relevance, name="relevance", caller=caller)
    if relevance.is_complex():
        raise TypeError(f"{caller}: relevance must be bool, integer or floating point, got {relevance.dtype}")
    if relevance.shape != scores.shape:
        raise ValueError(f"{caller}: relevance must have the shape of scores {shape_of(scores)}, got {shape_of(relevance)}")
    if relevance.device != scores.device:
        raise ValueError(f"{caller}: relevance must be on {scores.device} like scores, got {relevance.device}")
    if candidates is not None:
        check_tensor(candidates, name="candidates", caller=caller)
        if candidates.dtype != torch.bool or candidates.shape != scores.shape:
            got = f"{candidates.dtype} of shape {shape_of(candidates)}"
            raise ValueError(f"{caller}: candidates must be bool of shape {shape_of(scores)}, got {got}")
    if validate:
        ranked = slice(None) if candidates is None else candidates
        check_finite(scores[ranked], name="scores", caller=caller)
        check_finite(relevance[ranked], name="relevance", caller=caller)
        if bool((relevance[ranked] < 0).any()):
            least = relevance[ranked].min().item()
            hint = "; if that marks padding, pass candidates=relevance >= 0" if candidates is None else ""
            raise ValueError(f"{caller}: relevance must be at least 0, got {least}{hint}")
