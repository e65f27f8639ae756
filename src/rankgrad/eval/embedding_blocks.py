"""Embeddings in memory or on disk, read in blocks, and products of blocks in one fixed shape.

The rounding of a matrix product depends on its shape: the same two vectors can score differently in a tile of 512 columns and
in one of 300. Exact ties, of duplicates and of collapsed embeddings, would then be broken at random. So every product of an
evaluation has the same shape, short blocks being padded with zeros, and all scores are float32.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_floating
from rankgrad._device import autocast_disabled

Array: TypeAlias = Tensor | NDArray[np.floating]
Index: TypeAlias = NDArray[np.int64]

# Minimum rows of a query tile: a product with fewer takes as long.
MIN_ROWS = 32

# Numbers in a block read at once: 64 MiB of float32.
BLOCK_NUMBERS = 2**24


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """One or several arrays of embeddings, concatenated, as float32 rows on one device."""

    arrays: tuple[Array, ...]
    device: torch.device
    normalize: bool
    name: str  # the argument and the function that error messages name
    caller: str
    block_numbers: int | None = None  # numbers in a block read at once, BLOCK_NUMBERS by default

    @classmethod
    def from_arrays(
        cls, arrays: Sequence[Array], *, device: torch.device, normalize: bool, name: str, caller: str, dim: int | None = None
    ) -> "EmbeddingRows":
        """Check that the arrays are floating point, [items, dimensions] and have `dim` dimensions where it is given."""
        for array in arrays:
            _check(array, name=name, caller=caller)
            dim = array.shape[1] if dim is None else dim
            if array.shape[1] != dim:
                raise ValueError(f"{caller}: {name} must have {dim} dimensions like the others, got {array.shape[1]}")
        return cls(tuple(arrays), device, normalize, name, caller)

    def __len__(self) -> int:
        return sum(len(array) for array in self.arrays)

    @property
    def dim(self) -> int:
        return int(self.arrays[0].shape[1])

    @property
    def on_disk(self) -> bool:
        return any(isinstance(array, np.memmap) for array in self.arrays)

    def take(self, index: slice | Index) -> Tensor:
        """Read the rows of a slice or at an index."""
        if isinstance(index, slice):
            pieces, begin = [], 0
            for array in self.arrays:
                first, last = max(index.start - begin, 0), min(index.stop - begin, len(array))
                if first < last:
                    pieces.append(self._rows(array[first:last]))
                begin += len(array)
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if len(self.arrays) == 1:
            return self._rows(_at(self.arrays[0], index))
        taken = torch.empty(len(index), self.dim, device=self.device)
        begin = 0
        for array in self.arrays:
            here = np.flatnonzero((index >= begin) & (index < begin + len(array)))
            if len(here):
                taken[torch.from_numpy(here).to(self.device)] = self._rows(_at(array, index[here] - begin))
            begin += len(array)
        return taken

    def subset(self, index: Index) -> "EmbeddingRows":
        """Read some of the rows into memory."""
        return replace(self, arrays=(self.take(index),), normalize=False)

    def padded(self, index: slice | Index, multiple: int) -> Tensor:
        """Read rows and append zeros up to a multiple of `multiple` rows."""
        rows = self.take(index)
        return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % multiple))

    def reordered(self, order: Index, multiple: int) -> Tensor:
        """Read all rows in this order, padded, without a second copy."""
        out = torch.zeros(len(order) + -len(order) % multiple, self.dim, device=self.device)
        for block in self.blocks(1):
            out[block] = self.take(order[block])
        return out

    def blocks(self, multiple: int) -> list[slice]:
        """Slices that cover all rows, each but the last a multiple of `multiple` long."""
        size = max((self.block_numbers or BLOCK_NUMBERS) // self.dim // multiple, 1) * multiple
        return [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def _rows(self, block: Array) -> Tensor:
        if isinstance(block, Tensor):
            rows = block.detach().to(self.device)
        else:
            rows = torch.from_numpy(np.array(block)).to(self.device)  # copied: torch warns about read-only memory
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if not bool(torch.isfinite(rows).all()):
            bad = int((~torch.isfinite(rows)).sum())
            raise ValueError(
                f"{self.caller}: {self.name} must be finite, got {bad} NaN or infinite values in one block of rows"
            )
        return (to_unit_length(rows) if self.normalize else rows).float()


def to_unit_length(rows: Tensor) -> Tensor:
    """Scale rows to length 1 without a gradient, also those whose squares overflow or underflow; zeros stay zeros.

    Rows are brought near 1 by a power of two first, which is exact, so that for ordinary rows the result is that of
    `torch.nn.functional.normalize` to the last bit.
    """
    exponent = torch.frexp(rows.abs().amax(dim=1, keepdim=True)).exponent
    # in two halves: a single power of two may be out of range itself
    half, one = exponent // 2, torch.ones_like(exponent, dtype=rows.dtype)
    # ldexp of a whole matrix is many times slower than a product
    return torch.nn.functional.normalize(rows * one.ldexp(-half) * one.ldexp(half - exponent), dim=1)


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute products in full float32 and without gradients, whatever autocast and the matmul precision are set to."""
    backend: Any = torch.backends.cuda.matmul if device.type == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    if hasattr(backend, "fp32_precision"):
        before = backend.fp32_precision

        def allow(precision: str) -> None:
            backend.fp32_precision = precision

        exact = "ieee"
    else:  # torch before 2.9 has one setting for all
        before, allow, exact = torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision, "highest"
    try:
        allow(exact)
        with torch.no_grad(), autocast_disabled(device):
            yield
    finally:
        allow(before)


def row_tile(queries: int, side: int) -> int:
    """Rows of every query tile: the power of 2 that holds these queries, at most `side`."""
    return min(max(1 << max(queries - 1, 1).bit_length(), MIN_ROWS), side)


def _at(array: Array, index: Index) -> Array:
    return array[torch.from_numpy(index).to(array.device)] if isinstance(array, Tensor) else array[index]


def _check(array: Array, *, name: str, caller: str) -> None:
    if isinstance(array, Tensor):
        check_floating(array, name=name, caller=caller)
    elif not isinstance(array, np.ndarray):
        raise TypeError(f"{caller}: {name} must be a torch.Tensor or a numpy array, got {type(array).__name__}")
    elif not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{caller}: {name} must be floating-point numbers, got {array.dtype}")
    if array.ndim != 2 or not all(array.shape):
        raise ValueError(
            f"{caller}: {name} must be [items, dimensions] with at least one of each, got shape {tuple(array.shape)}"
        )
