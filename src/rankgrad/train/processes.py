"""The processes of a run: started by torchrun, found in its environment, agreeing by collective calls on CPUs.

    with join(torch.device("cpu")) as processes:
        fit(model, loss, batches, ..., processes=processes)

Without torchrun the run has one process and every call here is free.
"""

import contextlib
import datetime as dt
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rankgrad._checks import check_count
from rankgrad.train.errors import LostProcessError
from rankgrad.train.heartbeat import heartbeats

Answer = TypeVar("Answer")

# how long a process waits for another, which may be decoding a large data set; one that has ended is noticed at once
TIMEOUT = dt.timedelta(hours=2)

# seconds after which the run ends because a process does not respond, for instance because it was stopped
SILENCE_LIMIT = 600.0

# rows are sent to the first process in blocks of this size
BLOCK_BYTES = 2**26


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    Attributes:
        rank: from 0; process 0 writes files and prints.
        size: number of processes.
        device: of this process.
        control: gloo group for collective calls on the CPU, which do not synchronise a GPU; None for a single process.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a device is immutable)
    control: Any = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def shard(self, items: int) -> slice:
        """This process's part of a row of items: contiguous, sizes differ by at most one."""
        return slice(*(items * edge // self.size for edge in (self.rank, self.rank + 1)))

    def all_any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process."""
        return self.all_max(int(flag)) > 0

    def all_max(self, number: int) -> int:
        """The largest `number` over all processes."""
        if self.size == 1:
            return number
        value = torch.tensor(number)
        with translate_errors():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return int(value)

    def on_first(self, call: Callable[[], Answer]) -> Answer:
        """Calls `call` on the first process and returns its answer, or raises its error, on all of them."""
        if self.size == 1:
            return call()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = call()
            except Exception as error:  # noqa: BLE001 (all processes raise it)
                outcome[1] = error
        with translate_errors():
            dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise outcome[1]
        answer: Answer = outcome[0]
        return answer

    def on_first_then_others(self, call: Callable[[], Answer]) -> Answer:
        """Calls `call` on every process, first on the first one: the others find what it has cached."""
        answers = [call()] if self.first else []
        self.all_any(False)
        return answers[0] if answers else call()

    def gather(self, value: Answer) -> list[Answer]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with translate_errors():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def gather_to_first(self, rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """On the first process, the rows of all in order of rank, block by block; the others send and get nothing."""
        counts = self.gather(len(rows))
        step = max(BLOCK_BYTES // max(rows[:1].nbytes, 1), 1)
        for owner, count in enumerate(counts):
            for start in range(0, count, step):
                block = torch.empty((min(step, count - start), *rows.shape[1:]), dtype=torch.from_numpy(rows[:0].copy()).dtype)
                if owner == self.rank:
                    block = torch.from_numpy(np.array(rows[start : start + step]))
                with translate_errors():
                    if owner and self.rank == owner:
                        dist.send(block, 0, group=self.control)
                    if owner and self.first:
                        dist.recv(block, owner, group=self.control)
                if self.first:
                    yield block.numpy()


ALONE = Processes()


def launched() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def exit_process(status: int) -> NoReturn:
    """Ends one of several processes after its work is done and written.

    Python's own shutdown unloads torch's libraries while other processes may still be connected, and occasionally one of their
    threads aborts the process: a finished run would be reported as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def join(device: torch.device, *, timeout: dt.timedelta = TIMEOUT, silence_limit: float = SILENCE_LIMIT) -> Iterator[Processes]:
    """Joins the process group of torchrun's environment, gloo on CPUs and nccl on GPUs; leaves it if nothing was raised.

    Without torchrun this is the only process. A group that exists already is used and kept.

    Args:
        device: "cpu", or "cuda" for the GPU with this process's local rank.
        timeout: how long a process waits for another that responds.
        silence_limit: seconds after which a process that does not respond is given up.
    """
    if dist.is_available() and dist.is_initialized():
        yield _member(device, timeout)
        return
    if not launched():
        yield Processes(device=device)
        return
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        check_local_rank(local)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None)
    member = _member(device, timeout)
    with heartbeats(member.rank, member.size, limit=silence_limit):
        yield member
    # only if nothing was raised: leaving waits for the other processes, which may have ended
    dist.destroy_process_group()


def check_local_rank(local: int) -> None:
    """Refuses more processes than GPUs: two on one would compete for its memory."""
    available = torch.cuda.device_count()
    if local >= available:
        raise ValueError(
            f"process {local} of this machine has no GPU: there are {available}, start at most {available} processes"
        )


def _member(device: torch.device, timeout: dt.timedelta) -> Processes:
    size = dist.get_world_size()
    check_count(size, name="processes", caller="join")
    control = dist.new_group(backend="gloo", timeout=timeout) if dist.get_backend() != "gloo" else dist.group.WORLD
    return Processes(dist.get_rank(), size, device, control)


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a request to stop after the current step; a second one ends the process.

    Signals are handled inside the context, in the main thread only.

    Args:
        grace: ignore repeated signals for this many seconds.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.name: str | None = None
        self.grace = grace
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore_handlers()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
            if not self.grace:
                self._restore_handlers()
        elif time.monotonic() - self._since > self.grace:
            self._restore_handlers()
            signal.raise_signal(number)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raises `LostProcessError` for a collective call that failed because another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        raise LostProcessError(f"another process of the run has ended ({_first_line(error)})") from error


def is_lost_process(error: BaseException) -> bool:
    """Whether an error comes from a process that can no longer be reached."""
    known = tuple(
        kind for name in ("DistBackendError", "DistNetworkError", "DistStoreError") if (kind := getattr(dist, name, None))
    )
    return isinstance(error, (LostProcessError, *known)) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rpartition("] ")[2][:160]
