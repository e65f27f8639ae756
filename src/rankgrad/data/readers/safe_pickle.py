"""Untrusted pickles. A pickle is a program; this reads only those that describe containers, texts and arrays of numbers.

Nothing that a pickle names is imported. The few names it may use resolve to stand-ins, including those of numpy, whose own
functions trust the sizes and flags in a pickle.
"""

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# bool, integers and floats of fixed size; not 'O', which holds objects
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")


def load_plain(path: Path) -> Any:
    """The content of a pickle of containers, texts and numbers; arrays come as lists of numbers."""
    with path.open("rb") as file:
        try:
            return _plain(_Unpickler(file, encoding="latin1").load())
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(f"{path}: not a pickle that can be read safely ({type(error).__name__}: {error})") from error


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        value = value.values
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


class _Dtype:
    """Stands in for numpy.dtype."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(f"it asks for an array of {code!r}, which could run a program: refused")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Stands in for an array until its content is set."""

    values: NDArray[Any] = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        self.values = _from_bytes(data, dtype, shape, "F" if is_fortran else "C")


def _array(*_: object) -> _Array:
    return _Array()


def _from_bytes(data: bytes | str, dtype: _Dtype, shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    # Python 2 had one type for text and bytes
    raw = data.encode("latin1") if isinstance(data, str) else data
    # an empty buffer is refused by numpy
    flat = np.frombuffer(raw, dtype.dtype) if len(raw) else np.empty(0, dtype.dtype)
    return flat.reshape(shape, order=order)


def _scalar(dtype: _Dtype, data: bytes | str) -> Any:
    return _from_bytes(data, dtype, (), "C")[()]


def _latin1(text: str, encoding: str) -> bytes:
    """Stands in for _codecs.encode, which old pickles use for bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for bytes in encoding {encoding!r}: refused")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Stands in for bytes, which old pickles use for empty ones."""
    return b""


def _known() -> Mapping[tuple[str, str], Callable[..., Any]]:
    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _latin1,
    }
    for builtins in ("builtins", "__builtin__"):
        known |= {(builtins, "bytes"): _no_bytes, (builtins, "set"): set, (builtins, "frozenset"): frozenset}
    # numpy 2 moved its core; pickles of both times are around
    for core in ("numpy.core", "numpy._core"):
        known |= {
            (f"{core}.multiarray", "_reconstruct"): _array,
            (f"{core}.multiarray", "scalar"): _scalar,
            (f"{core}.numeric", "_frombuffer"): _from_bytes,
        }
    return known


class _Unpickler(pickle.Unpickler):
    known = _known()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run a program: refused")
        return self.known[module, name]
