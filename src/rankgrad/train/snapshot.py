"""Snapshots that can be restored: random generators, a model's buffers, a loss's memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RngSnapshot:
    """States of torch's generators on the CPU and on one device."""

    cpu: Tensor
    device: torch.device
    on_device: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> "RngSnapshot":
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, on_device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)

    def equals(self, other: "RngSnapshot") -> bool:
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.on_device is None or other.on_device is None or torch.equal(self.on_device, other.on_device)


@dataclass(frozen=True)
class BufferSnapshot:
    """Copies of a model's buffers."""

    model: nn.Module
    copies: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> "BufferSnapshot":
        return cls(model, {name: buffer.detach().clone() for name, buffer in model.named_buffers()})

    @torch.no_grad()
    def restore(self) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.copies[name])

    def changed(self) -> list[str]:
        """Names of buffers that differ from the snapshot."""
        return [name for name, buffer in self.model.named_buffers() if not torch.equal(buffer, self.copies[name])]


@dataclass(frozen=True)
class LossSnapshot:
    """State that a loss carries from step to step besides its parameters, such as a memory of past batches."""

    loss: Any
    state: dict[str, Any]

    @classmethod
    def of(cls, loss: Any) -> "LossSnapshot":
        if not isinstance(loss, nn.Module):
            return cls(loss, {})
        trained = {name for name, _ in loss.named_parameters()}
        # a memory is replaced by its loss and never written in place, so a reference is enough
        state = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in loss.state_dict().items()
            if name not in trained
        }
        return cls(loss, state)

    def restore(self) -> None:
        if self.state:
            self.loss.load_state_dict(self.state, strict=False)
