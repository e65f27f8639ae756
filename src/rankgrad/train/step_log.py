"""Journal entries of steps, written once their numbers have arrived, so that neither the host nor a GPU waits for them.

On a GPU an entry is late: its loss and gradient norm are read when the next step has begun. Ranks in the batch are computed on
a stream beside the backward pass, and the spread of the embeddings in a thread on the CPU.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankgrad.train.diagnostics import MOST_ROWS_FOR_SPREAD, CollapseDetector, diagnose, in_batch, spread, unit_rows
from rankgrad.train.large_batch import unwrap_loss
from rankgrad.train.meters import Throughput
from rankgrad.train.train_step import StepOutput, TrainStep


@dataclass
class _StepEntry:
    """An entry to be written: what is known of it, its loss and gradient norm, and numbers that are computed meanwhile."""

    step: int
    epoch: int
    content: dict[str, Any]
    values: tuple[float, float] | None = None
    pending: "Future[dict[str, float]] | None" = None


class StepLog:
    """Makes the entries of steps.

    Args:
        step: that takes the steps.
        log: writes an entry: kind, step, epoch and content.
        warn: tells the user.
    """

    def __init__(self, step: TrainStep, log: Callable[..., None], warn: Callable[[str], None]) -> None:
        self.step, self.log, self.warn = step, log, warn
        self.throughput, self.collapse = Throughput(), CollapseDetector()
        self._entry: _StepEntry | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None

    def add(self, number: int, epoch: int, output: StepOutput) -> None:
        """Begins the entry of step `number`."""
        self.finish()
        content = {"lr": output.lr, "images_per_second": self.throughput.rate(), "chunk_size": output.chunk_size}
        self._entry = _StepEntry(number, epoch, content)
        loss = unwrap_loss(self.step.loss)
        if not self.step.processes.first:
            pass
        elif self._runs_beside(loss):
            numbers, self._entry.pending = self._diagnose_beside(output, loss)
            content |= numbers
        else:
            self.step.flush()  # what follows synchronises anyway, and cannot make sense of NaN
            content |= diagnose(output.embeddings, output.labels, loss)
        if self.step.device.type == "cuda":
            content["memory"] = torch.cuda.max_memory_allocated(self.step.device)
        self.throughput.reset()
        self.write_arrived()

    def write_arrived(self) -> None:
        """Writes the entry if all its numbers are there; call it after every step."""
        if self._entry is None:
            return
        self._read_values(self._entry)
        if self._entry.values is not None and (self._entry.pending is None or self._entry.pending.done()):
            self._write()

    def finish(self) -> None:
        """Waits for the numbers of the entry and writes it; synchronises."""
        if self._entry is not None:
            self.step.flush()
            self._read_values(self._entry)
            self._write()

    def abandon(self) -> None:
        """Writes the entry if its step is known to be finite, and drops it otherwise: for a run that ends with an error."""
        if self._entry is not None and self._entry.values is not None:
            self._write()
        self._entry = None

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _read_values(self, entry: _StepEntry) -> None:
        checked = self.step.guard.checked
        if entry.values is None and checked is not None and checked.step == entry.step:
            entry.values = checked.loss, checked.gradient_norm

    def _write(self) -> None:
        entry, self._entry = self._entry, None
        assert entry is not None
        assert entry.values is not None, "the guard has checked the step"
        loss, gradient = entry.values
        content = {"loss": loss, "gradient": gradient, **entry.content}
        if entry.pending is not None:
            content |= entry.pending.result()
        scale = self.step.scale()
        if scale is not None:
            content["scale"] = scale
        self.log("step", step=entry.step, epoch=entry.epoch, **content)
        collapse = self.collapse.check(content)
        if collapse is not None:
            self.warn(collapse)

    def _runs_beside(self, loss: Any) -> bool:
        """Whether diagnostics may run beside the rest of the step: not if they read parameters, which it changes."""
        own = hasattr(loss, "diagnose") or (isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None)
        return self.step.device.type == "cuda" and not own

    def _diagnose_beside(self, output: StepOutput, loss: Any) -> tuple[dict[str, float], "Future[dict[str, float]]"]:
        on_gpu = output.embeddings.is_cuda
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagnostics")
            self._stream = torch.cuda.Stream(self.step.device) if on_gpu else None
        if self._stream is not None and output.ranked is not None:
            self._stream.wait_event(output.ranked)
        with torch.cuda.stream(self._stream):
            embeddings = unit_rows(output.embeddings)
            some = embeddings[:MOST_ROWS_FOR_SPREAD]
            rows = torch.empty(some.shape, dtype=some.dtype, pin_memory=on_gpu)
            rows.copy_(some, non_blocking=True)
            try:
                numbers = in_batch(embeddings, output.labels, loss)
            except (RuntimeError, ValueError):
                self.step.flush()  # NaN in the step explains everything
                raise
        if self._stream is not None:
            # `rows` are there, and another stream may use the memory of the embeddings again
            self._stream.synchronize()
        return numbers, self._thread.submit(spread, rows)
