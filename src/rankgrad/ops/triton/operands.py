"""Embeddings as the kernels read them: normalised, in class order, in float16."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from rankgrad._dry_run import launch_instead
from rankgrad.ops.autograd import first_derivative_only
from rankgrad.ops.normalize import SMALLEST_LENGTH
from rankgrad.ops.triton.operand_kernels import normalize_bwd_kernel, normalize_kernel, operand_kernel
from rankgrad.ops.triton.tiles import STEP, TILE, WIDEST

Precision = Literal["fast", "high"]

# float16 has 11 bits and is normal down to 6e-5: 64 times a unit vector's coordinates keeps their low parts normal too
NORMALIZED_SCALE = 64.0


def padded(length: int, to: int) -> int:
    """The least multiple of `to` that holds `length`."""
    return -(-length // to) * to


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        normalized, inverse = torch.empty_like(x), x.new_empty(len(x))
        d = x.shape[1]
        normalize_kernel[(len(x),)](
            x=x, normalized=normalized, inverse=inverse, d=d, smallest=SMALLEST_LENGTH, BD=triton.next_power_of_2(d)
        )
        ctx.save_for_backward(normalized, inverse)
        if launch_instead() and ctx.needs_input_grad[0]:
            _normalize_backward(normalized, inverse, normalized)
        return normalized

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_normalized: Tensor) -> Tensor:
        normalized, inverse = ctx.saved_tensors
        return _normalize_backward(normalized, inverse, d_normalized)


def _normalize_backward(normalized: Tensor, inverse: Tensor, d_normalized: Tensor) -> Tensor:
    d_x, d = torch.empty_like(normalized), normalized.shape[1]
    normalize_bwd_kernel[(len(normalized),)](
        normalized=normalized,
        inverse=inverse,
        d_normalized=d_normalized.contiguous(),
        d_x=d_x,
        d=d,
        BD=triton.next_power_of_2(d),
    )
    return d_x


def normalize(x: Tensor) -> Tensor:
    """Rows of a float32 matrix divided by their length: one kernel forward and one backward, where torch takes a dozen."""
    rows: Tensor = _Normalize.apply(x)
    return rows


@dataclass(frozen=True)
class Operands:
    """Embeddings as the kernels read them: float16, in class order, padded to whole tiles."""

    operand: Tensor  # [rows past all tiles, width] in whole steps of a product: one part less the mean, or high and low parts
    bias: Tensor  # [rows] what centring took from the scores of an item; that of a pair is the sum of two
    plain: Tensor  # [items in whole tiles, width] as `operand` without centring, for the products of the backward pass
    scale: float | Tensor  # of the numbers in both, [1]
    parts: int  # 1, or 2 with a high and a low part in each row

    @classmethod
    def of(cls, base: Tensor, order: Tensor, mean: Tensor, scale: float | Tensor, precision: Precision) -> "Operands":
        items, d = base.shape
        split = precision == "high"
        rows, step = padded(items, WIDEST) + TILE, padded(d, STEP)  # a tile of stored scores may begin at any TILE
        operand = base.new_empty(rows, 2 * step if split else step, dtype=torch.float16)
        plain = operand if split else torch.empty_like(operand)
        bias = base.new_empty(rows)
        operand_kernel[(rows,)](  # a padded row scores 0 and is hidden; uninitialised memory could hold NaN
            base=base,
            order=order,
            mean=mean,
            scale=scale,
            operand=operand,
            plain=plain,
            bias=bias,
            items=items,
            d=d,
            KNOWN_SCALE=isinstance(scale, float),
            SPLIT=split,
            DP=step,
            BD=min(1024, 1 << (step - 1).bit_length()),
        )
        return cls(operand, bias, plain[: padded(items, TILE)], scale, 1 + split)


def operand_scale(base: Tensor, normalized: bool) -> float | Tensor:
    """Power of two that brings coordinates to where float16 is dense, [1]; `normalized` says that rows have length 1."""
    if normalized:
        return NORMALIZED_SCALE
    largest = base.abs().amax().reshape(1).clamp(min=1e-30)
    return torch.exp2(torch.floor(torch.log2(NORMALIZED_SCALE / largest)))
