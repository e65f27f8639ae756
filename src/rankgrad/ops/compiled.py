"""Losses inside `torch.compile`: one opaque operator, so that the graph of the model around a loss stays whole.

A loss sorts, reads sizes and launches kernels of its own, which a compiler cannot trace. The operator `rankgrad::loss` is a
black box to it: at run time it calls the loss as ever and returns its value together with the gradients of its inputs, which
the backward pass multiplies by what arrives. No work is done twice. These gradients are in float32 at least: a loss scale
arrives after them, and is itself too large for float16. `Pairs` and `Levels` are passed as their tensors and made again inside.
Where a loss has more than one value, the graph breaks once around the call.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.ops.backends import as_if_narrow
from rankgrad.ops.levels import Levels
from rankgrad.ops.loss_config import is_wide
from rankgrad.ops.pairs import Pairs

_KINDS: dict[str, type[Pairs | Levels]] = {"Pairs": Pairs, "Levels": Levels}
_losses: "weakref.WeakValueDictionary[int, CompilableLoss]" = weakref.WeakValueDictionary()
_handles = itertools.count()


class CompilableLoss(nn.Module):
    """A loss that a compiled function calls through the operator."""

    def __init__(self) -> None:
        super().__init__()
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy is another loss
        super().__setstate__(state)
        self._register()

    def _register(self) -> None:
        self._handle = next(_handles)
        _losses[self._handle] = self

    def compiled_call(
        self, method: str, inputs: dict[str, Tensor | None], others: dict[str, Any], *, one_value: bool
    ) -> Tensor:
        """`method` while a compiler traces; `inputs` and the parameters of the loss get gradients. None is not passed on."""
        given = {name: value for name, value in inputs.items() if value is not None}
        rest = {name: value for name, value in others.items() if value is not None}
        value: Tensor
        if not one_value or not all(isinstance(each, (Tensor, Pairs, Levels)) for each in (*given.values(), *rest.values())):
            value = torch.compiler.disable(getattr(self, method))(**given, **rest)
            return value
        rest = _flat(rest)
        tensors = [*given.values(), *self.parameters()]
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        names = f"{method}:{','.join(given)}:{','.join(rest)}"
        value = torch.ops.rankgrad.loss(tensors, list(rest.values()), names, self._handle, wants_gradient)[0]
        return value


def _flat(values: dict[str, Any]) -> dict[str, Tensor]:
    """`Pairs` and `Levels` as their tensors, named argument.kind.field."""
    flat: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            flat[name] = value
            continue
        kind, fields = ("Pairs", ("query", "item", "gain"))
        if isinstance(value, Levels):
            kind, fields = "Levels", ("labels", "ref_labels", "gains")
        for field in fields:
            part = getattr(value, field)
            if part is not None:
                flat[f"{name}.{kind}.{field}"] = part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64)
    return flat


def _made_again(flat: dict[str, Tensor]) -> dict[str, Any]:
    """What `_flat` took apart."""
    values: dict[str, Any] = {}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        if "." in name:
            argument, kind, field = name.split(".")
            parts.setdefault((argument, kind), {})[field] = tensor
        else:
            values[name] = tensor
    return values | {argument: _KINDS[kind](**fields) for (argument, kind), fields in parts.items()}


@torch.library.custom_op("rankgrad::loss", mutates_args=())
def _loss(inputs: list[Tensor], others: list[Tensor], names: str, handle: int, wants_gradient: bool) -> list[Tensor]:
    loss, (method, given, rest) = _losses[handle], names.split(":")
    arguments = [name for name in given.split(",") if name]
    # an operator runs below autograd, which finds the gradient of the loss in here
    with (
        torch.inference_mode(False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),  # noqa: SLF001
        torch.set_grad_enabled(wants_gradient),
        as_if_narrow(any(not is_wide(tensor) for tensor in inputs[: len(arguments)])),
    ):
        leaves = [_leaf(tensor, wants_gradient) for tensor in inputs[: len(arguments)]]
        others = [_own(tensor) for tensor in others]
        keywords = dict(zip([*arguments, *filter(None, rest.split(","))], [*leaves, *others], strict=True))
        value = getattr(loss, method)(**_made_again(keywords))
        gradients = _gradients(value, [*leaves, *loss.parameters()]) if wants_gradient else ()
    return [value.detach().to(_gradient_dtype(inputs[0])), *gradients]


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _leaf(tensor: Tensor, wants_gradient: bool) -> Tensor:
    own = _own(tensor).to(_gradient_dtype(tensor))
    return own.requires_grad_() if wants_gradient else own


def _gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    # an output of an operator must not be one of its inputs, nor another output
    return [gradient.contiguous().clone() for gradient in found]


def _gradient_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@_loss.register_fake
def _(inputs: list[Tensor], others: list[Tensor], names: str, handle: int, wants_gradient: bool) -> list[Tensor]:
    gradients = [
        torch.empty_like(tensor, dtype=_gradient_dtype(tensor), memory_format=torch.contiguous_format) for tensor in inputs
    ]
    return [inputs[0].new_empty((), dtype=_gradient_dtype(inputs[0])), *(gradients if wants_gradient else ())]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes, ctx.num_others = [tensor.dtype for tensor in inputs[0]], len(inputs[1])


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    scaled = (saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors)
    of_inputs = [gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes, strict=False)]
    return of_inputs, [None] * ctx.num_others, None, None, None


_loss.register_autograd(_backward, setup_context=_save)
