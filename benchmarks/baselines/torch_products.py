"""rankgrad itself with torch's own matrix products, on processors where it takes those of oneDNN."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.baselines.chunked import Formulation
from benchmarks.presets import PRESETS
from rankgrad.ops import cpu_products


class _Loss(torch.autograd.Function):
    """Both passes at once, so that the products of both are torch's."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, labels: Tensor, loss: torch.nn.Module) -> Tensor:
        with patch.object(cpu_products, "_is_faster", lambda: False), torch.enable_grad():
            leaf = embeddings.detach().requires_grad_()
            value = loss(leaf, labels)
            ctx.save_for_backward(*torch.autograd.grad(value, leaf))
        found: Tensor = value.detach()
        return found

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        return grad_output[0] * ctx.saved_tensors[0], None, None


def _by_torch(name: str, embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    found: Tensor = _Loss.apply(embeddings, labels, PRESETS[name]("auto"))
    return found


def with_torch_products(loss: str) -> Formulation:
    """A loss by its name in `benchmarks.presets`."""
    return partial(_by_torch, loss)
