"""A loss or gradient that is no number ends the run, without anybody waiting for the GPU."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

# images of a bad batch that are listed
LISTED = 32


@dataclass(frozen=True)
class Seen:
    """Loss and gradient length of a step, on their way to the host."""

    step: int
    indices: Tensor
    values: Tensor
    arrived: torch.cuda.Event | None


class NotFiniteError(ArithmeticError):
    """A step had a loss or gradient that is NaN or infinite; `images` are those of the batch, where one is to blame."""

    def __init__(self, fact: str, images: str = "") -> None:
        super().__init__(f"{fact}; the batch was images {images}" if images else fact)
        self.fact, self.images = fact, images


class FiniteWatch:
    """Looks at every step: on the CPU at once, on a GPU one step later, when the numbers have arrived anyway.

    Args:
        gradients: also look at gradients; with a scaled loss their overflow is the scaler's business.
    """

    def __init__(self, *, gradients: bool) -> None:
        self.gradients = gradients
        self._pending: deque[Seen] = deque()

    def see(self, step: int, indices: Tensor, loss: Tensor, length: Tensor) -> None:
        """Notes a step and raises `NotFiniteError` for one that was bad."""
        values = torch.stack((loss.detach().float(), length.detach().float().to(loss.device)))
        arrived = None
        if values.is_cuda:
            on_host = torch.empty(2, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            values = on_host
        self._pending.append(Seen(step, indices, values, arrived))
        while len(self._pending) > (1 if arrived else 0):
            self._look(self._pending.popleft())

    def settle(self) -> None:
        """Looks at all that is still on its way; nothing is to be written before."""
        while self._pending:
            self._look(self._pending.popleft())

    def _look(self, seen: Seen) -> None:
        if seen.arrived is not None:
            seen.arrived.synchronize()
        loss, length = seen.values.tolist()
        for what, value, matters in (("the loss", loss, True), ("the length of the gradient", length, self.gradients)):
            if matters and not torch.isfinite(torch.tensor(value)):
                listed = ", ".join(map(str, seen.indices[:LISTED].tolist()))
                more = f" and {len(seen.indices) - LISTED} more" if len(seen.indices) > LISTED else ""
                raise NotFiniteError(f"step {seen.step}: {what} is {value}", f"{listed}{more}")
