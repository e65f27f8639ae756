"""The sentences about wrong arguments, in one place so that they are uniform: who complains, what was wanted, what came."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


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


def check_tensor(value: Any, *, name: str, caller: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be a torch.Tensor, got {type(value).__name__}")


def check_embeddings(embeddings: Any, *, name: str, caller: str) -> None:
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
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{caller}: {name} must be integers, got {labels.dtype}; use {name}.long() if they are whole numbers")
    if labels.ndim != 1 or labels.shape[0] != items:
        raise ValueError(f"{caller}: {name} must be one per row of {of}, shape ({items},), got shape {shape_of(labels)}")


def check_finite(tensor: Tensor, *, name: str, caller: str) -> None:
    bad = (~torch.isfinite(tensor)).sum().item()
    if bad:
        raise ValueError(f"{caller}: {name} must be finite, got {bad} NaN or infinite values of {tensor.numel()}")
