"""Batches as trees: a tensor, or nested lists, tuples and dicts of tensors with one row per item."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)


def num_rows(images: Any) -> int:
    """Number of items in a batch: the first dimension of all its tensors."""
    lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves(images)}
    if len(lengths) != 1 or None in lengths:
        got = ", ".join(sorted(map(str, lengths))) or "no tensor"
        raise ValueError(f"LargeBatch: the tensors of a batch must share their first dimension, got {got}")
    items = int(lengths.pop() or 0)
    if not items:
        raise ValueError("LargeBatch: a batch must hold at least one image, got none")
    return items


def select_rows(tree: Any, rows: slice, device: torch.device | None = None) -> Any:
    """Items `rows` of a batch, moved to `device` if one is given."""
    if isinstance(tree, Tensor):
        return tree[rows] if device is None else tree[rows].to(device, non_blocking=True)
    if isinstance(tree, dict):
        return type(tree)((key, select_rows(value, rows, device)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(select_rows(value, rows, device) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(select_rows(value, rows, device) for value in tree)
    return tree
