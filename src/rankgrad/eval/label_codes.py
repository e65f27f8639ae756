"""Labels as callers have them, integers or strings, to the integers that evaluation compares."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.eval.embedding_blocks import Index

# Names that a message lists before it only counts.
LISTED = 5


def as_integers(values: Any, items: int, *, name: str, of: str, caller: str) -> Index:
    """Check that `values` are integers, one per row of `of`."""
    array = _checked(values, items, name=name, of=of, caller=caller)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{caller}: {name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def encode(
    values: Any, items: int, ref_values: Any, ref_items: int, *, name: str, caller: str
) -> tuple[Index, Index | None, tuple[str, ...] | None]:
    """Integers for labels and gallery labels, equal where the labels are, and the names behind them if they are strings.

    Args:
        values: [Q] integers or strings.
        items: number of queries.
        ref_values: [C] labels of the gallery, of the same kind; None without a gallery.
        ref_items: number of rows of the gallery.
        name: argument that error messages name; that of the gallery has "ref_" before it.
        caller: function that error messages name.
    """
    given = [_checked(values, items, name=name, of="embeddings", caller=caller)]
    names = [name]
    if ref_values is not None:
        given.append(_checked(ref_values, ref_items, name=f"ref_{name}", of="ref_emb", caller=caller))
        names.append(f"ref_{name}")
    are_text = [array.dtype.kind in "UTO" for array in given]
    if any(are_text) and not all(are_text):
        raise TypeError(f"{caller}: {name} and ref_{name} must both be integers or both strings")
    if not are_text[0]:
        for array, each in zip(given, names, strict=True):
            if not np.issubdtype(array.dtype, np.integer):
                raise TypeError(f"{caller}: {each} must be integers or strings, got {array.dtype}")
        codes = [array.astype(np.int64) for array in given]
        return codes[0], codes[1] if len(codes) > 1 else None, None
    texts = [_text(array, name=each, caller=caller) for array, each in zip(given, names, strict=True)]
    known, encoded = np.unique(np.concatenate(texts), return_inverse=True)
    query, ref = encoded[:items].astype(np.int64), encoded[items:].astype(np.int64)
    return query, ref if len(given) > 1 else None, tuple(known.tolist())


def list_labels(labels: Index, names: Sequence[str] | None) -> str:
    """The distinct labels in a message, the first few by name."""
    distinct = np.unique(labels).tolist()
    shown = [repr(names[label]) if names is not None else str(label) for label in distinct[:LISTED]]
    more = f" and {len(distinct) - LISTED:,} more" if len(distinct) > LISTED else ""
    return ", ".join(shown) + more


def _checked(values: Any, items: int, *, name: str, of: str, caller: str) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.shape != (items,):
        raise ValueError(f"{caller}: {name} must be one per row of {of}, shape ({items},), got shape {array.shape}")
    return array


def _text(array: NDArray[Any], *, name: str, caller: str) -> NDArray[np.str_]:
    missing = [row for row, value in enumerate(array.tolist()) if not isinstance(value, str) or not value]
    if missing:
        rows = ", ".join(map(str, missing[:LISTED])) + (f" and {len(missing) - LISTED:,} more" if len(missing) > LISTED else "")
        raise ValueError(
            f"{caller}: every one of {name} must be a string that is not empty, got {array.tolist()[missing[0]]!r}; "
            f"missing in {'row' if len(missing) == 1 else 'rows'} {rows}"
        )
    return array.astype(np.str_)
