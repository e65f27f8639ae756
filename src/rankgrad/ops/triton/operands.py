"""Embeddings as the kernels read them: float16, in class order, padded to whole tiles."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rankgrad.ops.triton.embedding_kernels import operand_kernel

Precision = Literal["fast", "high"]

# Rows of a tile of queries, most columns of a tile, step of a product; operands are padded to whole multiples.
TILE = 128
WIDEST = 256
STEP = 64

# float16 has 11 bits and is normal down to 6e-5: 64 times a unit vector's coordinates keeps their low parts normal too
UNIT_SCALE = 64.0


def padded(length: int, to: int) -> int:
    """The least multiple of `to` that holds `length`."""
    return -(-length // to) * to


@dataclass(frozen=True)
class Operands:
    """Both roles of some embeddings in a product of scores, and what the products of the backward pass read."""

    as_query: Tensor  # [rows, width]
    as_candidate: Tensor  # [rows, width]
    row_bias: Tensor  # [rows] what centring took from a query's scores
    column_bias: Tensor  # [rows] and from a candidate's
    parts: tuple[Tensor, ...]  # [items in whole tiles, d] high, and low where the precision is high, times `scale`
    scale: Tensor  # [1]

    @classmethod
    def of(cls, base: Tensor, order: Tensor, mean: Tensor, scale: Tensor, precision: Precision) -> "Operands":
        items, d = base.shape
        split = precision == "high"
        rows, step = padded(items, WIDEST), padded(d, STEP)
        width = 3 * step if split else step

        def new(columns: int) -> Tensor:
            out = base.new_empty(rows, columns, dtype=torch.float16)
            out[items:] = 0  # a padded row scores 0 and is hidden; uninitialised memory could hold NaN
            return out

        as_query = new(width)
        as_candidate = new(width) if split else as_query
        plain = as_query if split else new(step)
        biases = base.new_zeros(2, rows)
        operand_kernel[(items,)](
            base, order, mean, scale, as_query, as_candidate, plain, biases[0], biases[1], d,
            SPLIT=split, DP=step, BD=min(1024, 1 << (step - 1).bit_length()),
        )  # fmt: skip
        rows = padded(items, TILE)
        parts = (as_query[:rows, step : step + d], as_query[:rows, :d]) if split else (plain[:rows, :d],)
        return cls(as_query, as_candidate, biases[0], biases[1], parts, scale)


def scale_of(base: Tensor, unit: bool) -> Tensor:
    """[1] power of two that brings coordinates to where float16 is dense; `unit` says that rows have length 1."""
    if unit:
        return torch.full((1,), UNIT_SCALE, device=base.device)
    largest = base.abs().amax().reshape(1).clamp(min=1e-30)
    return torch.exp2(torch.floor(torch.log2(UNIT_SCALE / largest)))


# float16 products with a float32 result came with torch 2.8; before, the factors are widened first, which is slower
MIXED_PRODUCTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """Out += alpha * a @ b for float16 a and b with float32 sums."""
    if a.is_cuda and MIXED_PRODUCTS:
        torch.addmm(out, a, b, alpha=alpha, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a.float(), b.float(), alpha=alpha)
