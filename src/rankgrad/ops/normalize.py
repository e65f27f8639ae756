"""Embeddings divided by their length."""

from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.autograd import first_derivative_only

# As torch.nn.functional.normalize has it: a row of zeros stays one.
SMALLEST_LENGTH = 1e-12


class _NormalizeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        # squares of large numbers overflow; on a GPU reading whether they do would synchronise
        if x.device.type != "cpu" or length.amax().item() == torch.inf:
            scale = x.abs().amax(dim=1, keepdim=True).clamp_(min=1)
            scaled = x / scale
            length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_(min=SMALLEST_LENGTH)
            normalized = scaled.div_(length)
            ctx.save_for_backward(normalized, length, scale)
        else:
            length.clamp_(min=SMALLEST_LENGTH)
            normalized = x / length
            ctx.save_for_backward(normalized, length)
        return normalized

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_normalized: Tensor) -> Tensor:
        normalized, *lengths = ctx.saved_tensors
        d_x: Tensor = normalized * d_normalized
        along = d_x.sum(dim=1, keepdim=True)
        torch.addcmul(d_normalized, normalized, along, value=-1, out=d_x)
        for length in lengths:
            d_x.div_(length)
        return d_x


def normalize_rows(x: Tensor) -> Tensor:
    """Rows divided by their length, as `torch.nn.functional.normalize` does, also where squares of large numbers overflow."""
    rows: Tensor = _NormalizeRows.apply(x)
    return rows
