"""Work on rows as one kernel forward and one backward, where torch takes a dozen launches or a tensor too many."""

from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.ops.thresholds import Thresholds
from rankgrad.ops.triton.row_kernels import among_bwd_kernel, among_kernel, proper_kernel, unit_bwd_kernel, unit_kernel

# as torch.nn.functional.normalize has it: a row of zeros stays one
SMALLEST_LENGTH = 1e-12


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        unit, inverse = torch.empty_like(x), x.new_empty(len(x))
        d = x.shape[1]
        unit_kernel[(len(x),)](x, unit, inverse, d, SMALLEST_LENGTH, BD=triton.next_power_of_2(d))
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_unit: Tensor) -> Tensor:
        unit, inverse = ctx.saved_tensors
        d_x, d = torch.empty_like(unit), unit.shape[1]
        unit_bwd_kernel[(len(unit),)](unit, inverse, d_unit.contiguous(), d_x, d, BD=triton.next_power_of_2(d))
        return d_x


def unit_rows(x: Tensor) -> Tensor:
    """Rows of a float32 matrix divided by their length."""
    rows: Tensor = _UnitRows.apply(x)
    return rows


def ahead_among(scores: Tensor, num_relevant: Tensor, tau: float) -> Tensor:
    """[B, P] how much of a row's relevant items is ahead of each, itself included; rows hold `num_relevant` of P."""
    scores, out = scores.contiguous(), torch.empty_like(scores, memory_format=torch.contiguous_format)
    if out.numel():
        among_kernel[_grid(out)](scores, num_relevant, out, out.shape[1], 1 / tau, **_blocks(out))
    return out


def ahead_among_backward(scores: Tensor, weights: Tensor, num_relevant: Tensor, tau: float) -> Tensor:
    """[B, P] gradient of the scores when the sums of `ahead_among` have gradients tau * weights."""
    scores, out = scores.contiguous(), torch.empty_like(scores, memory_format=torch.contiguous_format)
    if out.numel():
        among_bwd_kernel[_grid(out)](scores, weights.contiguous(), num_relevant, out, out.shape[1], 1 / tau, **_blocks(out))
    return out


def proper_ranks(ahead: Tensor, thresholds: Thresholds, num_relevant: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, P] ranks of relevant items among all and among the relevant, from the irrelevant ones ahead of each."""
    descending, order = thresholds.descending
    rank, among = (torch.empty(order.shape, dtype=dtype, device=order.device) for _ in range(2))
    if rank.numel():
        block = min(256, triton.next_power_of_2(rank.shape[1]))
        grid = len(rank), triton.cdiv(rank.shape[1], block)
        proper_kernel[grid](ahead.contiguous(), order, descending, num_relevant, rank, among, rank.shape[1], BLOCK=block)
    return rank, among


def _blocks(rows: Tensor) -> dict[str, int]:
    block = min(64, triton.next_power_of_2(rows.shape[1]))
    return {"BX": block, "BY": block}


def _grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], _blocks(rows)["BX"])
