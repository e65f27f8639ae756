"""Running mean, throughput and NaN guard: numbers of a run that do not make the host wait for the GPU."""

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad.train.errors import NotFiniteError

# indices of a bad batch that an error message lists
LISTED = 32


class RunningMean:
    """A mean that stays on the device until `value` reads it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, value: Tensor) -> None:
        self.total = value.clone() if self.total is None else self.total + value
        self.count += 1

    def value(self) -> float | None:
        """Mean since the last reset, None without values; synchronises."""
        return None if self.total is None else float(self.total) / self.count


class Throughput:
    """Images per second since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.images, self.start = 0, time.perf_counter()

    def add(self, images: int) -> None:
        self.images += images

    def rate(self, device: torch.device) -> float:
        """Synchronises with the device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.images / max(time.perf_counter() - self.start, 1e-9)


@dataclass(frozen=True)
class StepValues:
    """Loss and gradient norm of a step, on their way to the host."""

    step: int
    indices: Tensor
    values: Tensor
    arrived: torch.cuda.Event | None


class NaNGuard:
    """Checks loss and gradient norm of every step: at once on a CPU, one step later on a GPU, without synchronising.

    Args:
        gradients: also check gradients; False with a scaled loss, where the scaler handles overflow.
    """

    def __init__(self, *, gradients: bool) -> None:
        self.gradients = gradients
        self._pending: deque[StepValues] = deque()

    def add(self, step: int, indices: Tensor, loss: Tensor, gradient_norm: Tensor) -> None:
        """Queues a step and raises `NotFiniteError` for one that was bad."""
        values = torch.stack((loss.detach().float(), gradient_norm.detach().float().to(loss.device)))
        arrived = None
        if values.is_cuda:
            on_host = torch.empty(2, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            values = on_host
        self._pending.append(StepValues(step, indices, values, arrived))
        while len(self._pending) > (1 if arrived else 0):
            self._check(self._pending.popleft())

    def flush(self) -> None:
        """Checks all steps so far; call it before anything is written."""
        while self._pending:
            self._check(self._pending.popleft())

    def _check(self, pending: StepValues) -> None:
        if pending.arrived is not None:
            pending.arrived.synchronize()
        loss, norm = pending.values.tolist()
        for what, value, matters in (("the loss", loss, True), ("the gradient norm", norm, self.gradients)):
            if matters and not torch.isfinite(torch.tensor(value)):
                listed = ", ".join(map(str, pending.indices[:LISTED].tolist()))
                more = f" and {len(pending.indices) - LISTED} more" if len(pending.indices) > LISTED else ""
                raise NotFiniteError(f"step {pending.step}: {what} is {value}", f"{listed}{more}")
