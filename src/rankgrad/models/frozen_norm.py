"""Batch norm with frozen statistics, whose backward pass leaves activations in channels-last where they are.

With the statistics given the layer is y = x * scale + shift per channel, scale = weight / sqrt(variance + eps). On GPUs torch
gives the gradient of x in the contiguous format whatever the format of x: its kernel writes all over the memory, and the
convolution below copies the result back. Here that gradient has the format of x.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.jit._trace import is_tracing
from torch.nn import functional as F


class FrozenNorm(torch.autograd.Function):
    """x, mean, variance, weight or None, bias or None, eps -> y, the bits that `F.batch_norm` gives outside of training."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        # only the gradients of weight and bias need x, by far the largest of these
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:5]) else None, mean, var, weight)
        ctx.eps, ctx.format = eps, torch.channels_last if _in_channels_last(x) else torch.contiguous_format
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        d_y = d_y.contiguous(memory_format=ctx.format)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            # the layer once more, without its shift: torch multiplies in float32 and rounds once
            d_x = F.batch_norm(d_y, torch.zeros_like(mean), var, weight, eps=ctx.eps)
        wanted = ctx.needs_input_grad[3:5]
        if any(wanted):
            of_batch = mean.new_empty(0)  # statistics that only training has
            _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                d_y, x, weight, mean, var, of_batch, of_batch, False, ctx.eps, [False, *wanted]
            )
        return d_x, None, None, d_weight, d_bias, None


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that takes `FrozenNorm` where it is faster; in training mode it is the ordinary layer."""

    def forward(self, x: Tensor) -> Tensor:
        return frozen_norm(self, x) if is_faster(self, x) else super().forward(x)


def use_frozen_norm(layer: nn.Module) -> None:
    """Turns `layer` in place into its class with `FrozenNorm`, if it is of a class that has one."""
    if type(layer) is nn.BatchNorm2d:
        layer.__class__ = FrozenBatchNorm2d
    elif type(layer).__module__.startswith("timm."):
        from timm.layers.norm_act import BatchNormAct2d

        from rankgrad.models.frozen_norm_act import FrozenBatchNormAct2d

        if type(layer) is BatchNormAct2d:
            layer.__class__ = FrozenBatchNormAct2d


def frozen_norm(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """`x` normalised with the layer's statistics, scale and shift."""
    y: Tensor = FrozenNorm.apply(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.eps)
    return y


def is_faster(layer: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether `FrozenNorm` may stand in for torch's pass over `x`, and is faster."""
    # what is compiled or exported holds torch's layer, and torch.func transforms it
    if torch.compiler.is_compiling() or is_tracing() or _are_functorch_transforms_active():
        return False
    if layer.training or layer.running_mean is None:
        return False
    return type(x) is Tensor and torch.is_grad_enabled() and x.requires_grad and _torch_loses_format(x)


def _torch_loses_format(x: Tensor) -> bool:
    return x.is_cuda and _in_channels_last(x)


def _in_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
