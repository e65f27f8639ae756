"""Running mean, throughput and NaN guard: numbers of a run that do not make the host wait for the GPU."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad._messages import printable
from rankgrad.train.errors import NotFiniteError

# items of a bad batch that an error message lists: by index, and by name
LISTED, LISTED_NAMES = 32, 10
# steps over which the rate shown to the user is averaged
RECENT_STEPS = 20


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


class RecentRate:
    """Images per second over the last steps, by the host's clock; does not synchronise."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._points = deque([(time.perf_counter(), 0)], maxlen=RECENT_STEPS + 1)

    def add(self, images: int) -> float:
        """Counts a step; returns the rate."""
        now = time.perf_counter()
        self._points.append((now, self._points[-1][1] + images))
        start, before = self._points[0]
        return (self._points[-1][1] - before) / max(now - start, 1e-9)


class Throughput:
    """Images per second since the last reset, by the host's clock; does not synchronise."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.images, self.start = 0, time.perf_counter()

    def add(self, images: int) -> None:
        self.images += images

    def rate(self) -> float:
        return self.images / max(time.perf_counter() - self.start, 1e-9)


@dataclass(frozen=True)
class StepValues:
    """Loss and gradient norm of a step, on their way to the host."""

    step: int
    indices: Tensor
    values: Tensor
    arrived: torch.cuda.Event | None


@dataclass(frozen=True)
class CheckedStep:
    """Loss and gradient norm of a step that was finite."""

    step: int
    loss: float
    gradient_norm: float


class NaNGuard:
    """Checks loss and gradient norm of every step: at once, or one step later, which on a GPU does not synchronise.

    Args:
        late: check a step when the next one is added.
        gradients: also check gradients; False with a scaled loss, where the scaler handles overflow.
        names: names of the items that indices refer to, such as paths; for messages.

    Attributes:
        checked: the last step that was checked, None before the first.
    """

    def __init__(self, *, late: bool, gradients: bool, names: Sequence[str] | None = None) -> None:
        self.late, self.gradients, self.names = late, gradients, names
        self.checked: CheckedStep | None = None
        self._pending: deque[StepValues] = deque()

    def add(self, step: int, indices: Tensor, loss: Tensor, gradient_norm: Tensor) -> None:
        """Queues a step and raises `NotFiniteError` for one that was bad."""
        values = torch.stack((loss.detach().float(), gradient_norm.detach().float().to(loss.device)))
        arrived = None
        if values.is_cuda:
            on_host = torch.empty(2, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(values.device))
            values = on_host
        self._pending.append(StepValues(step, indices, values, arrived))
        while len(self._pending) > (1 if self.late else 0):
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
                raise NotFiniteError(f"step {pending.step}: {what} is {value}", self.describe(pending.indices))
        self.checked = CheckedStep(pending.step, loss, norm)

    def describe(self, indices: Tensor) -> str:
        """The items of a batch, by name where names are known."""
        count = LISTED if self.names is None else LISTED_NAMES
        first = indices[:count].tolist()
        listed = ", ".join(map(str, first) if self.names is None else (printable(self.names[i]) for i in first))
        return f"{listed} and {len(indices) - count} more" if len(indices) > count else listed
