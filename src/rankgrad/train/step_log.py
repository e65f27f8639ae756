"""Journal entries of steps, written once their numbers have arrived, so that neither the host nor a GPU waits for them.

On a GPU an entry is late: its loss and gradient norm are read when the next step has begun. Ranks in the batch are computed on
a stream beside that step, once all of it has been launched and the GPU has work for longer than they take the host, and the
spread of the embeddings in a thread on the CPU.

Of several processes only the first has diagnostics, and waits for them. What ends a run, a step that is not finite or a scale
that has collapsed, is looked for at the same point on all of them.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.train.diagnostics import MOST_ROWS_FOR_SPREAD, CollapseDetector, diagnose, in_batch, of_loss, spread, unit_rows
from rankgrad.train.large_batch import unwrap_loss
from rankgrad.train.meters import Throughput
from rankgrad.train.train_step import StepOutput, TrainStep


@dataclass
class _StepEntry:
    """An entry to be written: what is known of it, its loss and gradient norm, and numbers that are computed meanwhile.

    `begin` starts what becomes `pending`.
    """

    step: int
    epoch: int
    content: dict[str, Any]
    values: dict[str, float] | None = None
    begin: "Callable[[], Future[dict[str, float]]] | None" = None
    pending: "Future[dict[str, float]] | None" = None


class StepLog:
    """Writes the journal entries of steps.

    Args:
        step: takes the steps.
        log: writes an entry, of a kind, step, epoch and content.
        say: shows a line to the user.
    """

    def __init__(self, step: TrainStep, log: Callable[..., None], say: Callable[[str], None]) -> None:
        self.step, self.log, self.say = step, log, say
        self.throughput, self.collapse = Throughput(), CollapseDetector()
        self._entry: _StepEntry | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None

    def add(self, number: int, epoch: int, output: StepOutput) -> None:
        """Begins the entry of step `number`."""
        loss, first = unwrap_loss(self.step.loss), self.step.processes.first
        beside = self._runs_beside(loss)
        # before the last entry is finished, which calls the loss
        known = self._of_loss(output, loss) if beside and first else {}
        self.finish()
        content = {"lr": output.lr, "images_per_second": self.throughput.rate(), "chunk_size": output.chunk_size}
        entry = self._entry = _StepEntry(number, epoch, content)
        if beside:
            entry.begin = partial(self._diagnose_beside, output, known, loss) if first else None
            if known.keys() - {"skipped"}:  # settings of the loss, which the next step changes
                self._begin(entry)
        else:
            self.step.flush()  # diagnostics synchronise anyway, and cannot make sense of NaN
            content |= diagnose(output.embeddings, output.labels, loss) if first else {}
        if self.step.device.type == "cuda":
            content["memory"] = torch.cuda.max_memory_allocated(self.step.device)
        self.throughput.reset()
        self._read_values(entry)
        if entry.values is not None and entry.begin is None:
            self._write()

    def write_arrived(self) -> None:
        """Writes the entry if all its numbers are there; call it after every step without an entry of its own."""
        if self._entry is None:
            return
        self._begin(self._entry)
        self._read_values(self._entry)
        if self._entry.values is not None and (self._entry.pending is None or self._entry.pending.done()):
            self._write()

    def finish(self) -> None:
        """Waits for the numbers of the entry and writes it; synchronises unless its loss has arrived."""
        if self._entry is not None:
            self._wait_for_values(self._entry)
            self._write()

    def abandon(self) -> None:
        """Writes the entry if its step was finite, and drops it otherwise: for a run that ends with an error."""
        # a GPU that has failed cannot tell, and nothing that goes wrong here is what ended the run
        with contextlib.suppress(Exception):
            # of several processes another may have ended, and a GPU would wait for it
            if self._entry is not None and self.step.processes.size == 1:
                self._wait_for_values(self._entry)
            if self._entry is not None and self._entry.values is not None:
                self._begin(self._entry)
                if self._entry.pending is not None and self._entry.pending.exception() is not None:
                    self._entry.pending = None  # what ended the run, such as a lack of memory, may prevent diagnostics
                self._write()
        self._entry = None

    def close(self) -> None:
        """Ends the thread; an exception that nobody expected may have left an entry."""
        self.abandon()
        if self._thread is not None:
            self._thread.shutdown()

    def _begin(self, entry: _StepEntry) -> None:
        if entry.begin is not None:
            entry.pending, entry.begin = entry.begin(), None

    def _wait_for_values(self, entry: _StepEntry) -> None:
        self._read_values(entry)
        if entry.values is None:
            self.step.flush()
            self._read_values(entry)

    def _read_values(self, entry: _StepEntry) -> None:
        checked = self.step.guard.checked
        if entry.values is None and checked is not None and checked.step == entry.step:
            scale = self.step.scale()
            entry.values = {"loss": checked.loss, "gradient": checked.gradient_norm}
            entry.values |= {} if scale is None else {"scale": scale}

    def _write(self) -> None:
        entry, self._entry = self._entry, None
        assert entry is not None
        assert entry.values is not None, "the guard has checked the step"
        self._begin(entry)
        content = {**entry.values, **entry.content}
        if entry.pending is not None:
            content |= entry.pending.result()
        self.log("step", step=entry.step, epoch=entry.epoch, **content)
        collapse = self.collapse.check(content, unwrap_loss(self.step.loss))
        if collapse is not None:
            self.log("warning", step=entry.step, epoch=entry.epoch, message=collapse)
            self.say(f"warning: {collapse}")

    def _runs_beside(self, loss: Any) -> bool:
        """Whether diagnostics may run beside the rest of the step: not if they read parameters, which it changes."""
        own = hasattr(loss, "diagnose") or (isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None)
        return self.step.device.type == "cuda" and not own

    def _of_loss(self, output: StepOutput, loss: Any) -> dict[str, float | Tensor]:
        """What the loss knows of this step, read on the stream of diagnostics."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagnostics")
            self._stream = torch.cuda.Stream(self.step.device) if output.embeddings.is_cuda else None
        if self._stream is not None and output.ranked is not None:
            self._stream.wait_event(output.ranked)
        with torch.cuda.stream(self._stream):
            return of_loss(output.labels, loss)

    def _diagnose_beside(
        self, output: StepOutput, known: Mapping[str, float | Tensor], loss: Any
    ) -> "Future[dict[str, float]]":
        """The numbers of `diagnose`. An error is raised when the entry is written: NaN in the step is reported first."""
        assert self._thread is not None, "what the loss knows comes first"
        on_gpu = output.embeddings.is_cuda
        try:
            with torch.cuda.stream(self._stream):
                embeddings = unit_rows(output.embeddings)
                some = embeddings[:MOST_ROWS_FOR_SPREAD]
                rows = torch.empty(some.shape, dtype=some.dtype, pin_memory=on_gpu)
                rows.copy_(some, non_blocking=True)
                try:
                    numbers = in_batch(embeddings, output.labels, loss)
                    numbers |= {name: float(value) for name, value in known.items()}
                finally:
                    if self._stream is not None:
                        # `rows` are there, and another stream may use the memory of the embeddings again
                        self._stream.synchronize()
        except (RuntimeError, ValueError) as error:
            failed: Future[dict[str, float]] = Future()
            failed.set_exception(error)
            return failed
        return self._thread.submit(lambda: {**numbers, **spread(rows)})
