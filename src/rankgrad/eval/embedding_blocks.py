"""Embeddings in memory or on disk, handed out a block at a time, and products of blocks in one fixed shape.

A matrix product rounds an entry by the shape of the whole product: the same two vectors can score differently in a tile of 512
columns and in one of 300. Ranks would then break exact ties, those of duplicates and of collapsed embeddings, at random. So
every product of an evaluation has the same shape, short blocks being padded with zeros, and all scores are float32.
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
from rankgrad.ops.autograd import island

Array: TypeAlias = Tensor | NDArray[np.floating]
Index: TypeAlias = NDArray[np.int64]

# Least rows of a query tile: with fewer, a product takes as long as with these.
FEWEST_ROWS = 32

# Numbers of a block that is read at once: 64 MiB of float32.
BLOCK_NUMBERS = 2**24


@dataclass(frozen=True, eq=False)
class Rows:
    """Embeddings of one or several arrays that follow each other, as float32 rows on one device."""

    parts: tuple[Array, ...]
    device: torch.device
    normalize: bool
    name: str  # in messages: whose rows, and who complains
    caller: str

    @classmethod
    def of(
        cls, parts: Sequence[Array], *, device: torch.device, normalize: bool, name: str, caller: str, dim: int | None = None
    ) -> "Rows":
        """The arrays as rows, checked: all floating point, [items, dimensions] and of `dim` dimensions where it is given."""
        for part in parts:
            _check(part, name=name, caller=caller)
            dim = part.shape[1] if dim is None else dim
            if part.shape[1] != dim:
                raise ValueError(f"{caller}: {name} must have {dim} dimensions like the others, got {part.shape[1]}")
        return cls(tuple(parts), device, normalize, name, caller)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def dim(self) -> int:
        return int(self.parts[0].shape[1])

    @property
    def on_disk(self) -> bool:
        return any(isinstance(part, np.memmap) for part in self.parts)

    def take(self, index: slice | Index) -> Tensor:
        """The rows of a slice, or at an index."""
        if isinstance(index, slice):
            pieces, begin = [], 0
            for part in self.parts:
                first, last = max(index.start - begin, 0), min(index.stop - begin, len(part))
                if first < last:
                    pieces.append(self._rows(part[first:last]))
                begin += len(part)
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if len(self.parts) == 1:
            return self._rows(_at(self.parts[0], index))
        taken = torch.empty(len(index), self.dim, device=self.device)
        begin = 0
        for part in self.parts:
            here = np.flatnonzero((index >= begin) & (index < begin + len(part)))
            if len(here):
                taken[torch.from_numpy(here).to(self.device)] = self._rows(_at(part, index[here] - begin))
            begin += len(part)
        return taken

    def held(self, index: Index) -> "Rows":
        """Some of the rows, read once and kept."""
        return replace(self, parts=(self.take(index),), normalize=False)

    def padded(self, index: slice | Index, multiple: int) -> Tensor:
        """The rows followed by zeros up to a multiple of rows."""
        rows = self.take(index)
        return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % multiple))

    def all_in(self, order: Index, multiple: int) -> Tensor:
        """Every row in this order, padded; no second copy exists meanwhile."""
        out = torch.zeros(len(order) + -len(order) % multiple, self.dim, device=self.device)
        for block in self.blocks(1):
            out[block] = self.take(order[block])
        return out

    def blocks(self, multiple: int) -> list[slice]:
        """Slices of all rows, each but the last a multiple of rows long."""
        size = max(BLOCK_NUMBERS // self.dim // multiple, 1) * multiple
        return [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def _rows(self, block: Array) -> Tensor:
        if isinstance(block, Tensor):
            rows = block.detach().to(self.device)
        else:
            rows = torch.from_numpy(np.array(block)).to(self.device)  # a copy: torch warns of memory that is read only
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if not bool(torch.isfinite(rows).all()):
            bad = int((~torch.isfinite(rows)).sum())
            raise ValueError(
                f"{self.caller}: {self.name} must be finite, got {bad} NaN or infinite values in one block of rows"
            )
        return (torch.nn.functional.normalize(rows, dim=1) if self.normalize else rows).float()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products in full float32, whatever autocast and the precision that training was allowed say; no gradients."""
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
        with torch.no_grad(), island(device):
            yield
    finally:
        allow(before)


def row_tile(queries: int, side: int) -> int:
    """Rows of every query tile: a power of 2 that holds these queries, `side` at most."""
    return min(max(1 << max(queries - 1, 1).bit_length(), FEWEST_ROWS), side)


def _at(part: Array, index: Index) -> Array:
    return part[torch.from_numpy(index).to(part.device)] if isinstance(part, Tensor) else part[index]


def _check(part: Array, *, name: str, caller: str) -> None:
    if isinstance(part, Tensor):
        check_floating(part, name=name, caller=caller)
    elif not isinstance(part, np.ndarray):
        raise TypeError(f"{caller}: {name} must be a torch.Tensor or a numpy array, got {type(part).__name__}")
    elif not np.issubdtype(part.dtype, np.floating):
        raise TypeError(f"{caller}: {name} must be floating-point numbers, got {part.dtype}")
    if part.ndim != 2 or not all(part.shape):
        raise ValueError(
            f"{caller}: {name} must be [items, dimensions] with at least one of each, got shape {tuple(part.shape)}"
        )
