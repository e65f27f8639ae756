"""The processes of a run: started by torchrun, known by its environment, agreeing where they must.

    with joined(torch.device("cpu")) as processes:
        fit(model, loss, batches, ..., processes=processes)

A process that is alone is a run of one process, and everything here is then free.
"""

import contextlib
import datetime as dt
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.train.errors import LostProcessError
from rankgrad.train.protocols import Batches

Answer = TypeVar("Answer")

# how long a process waits for the others, which may be decoding a large data set; one that is gone is noticed at once
PATIENCE = dt.timedelta(hours=2)

# sent at once
BLOCK_BYTES = 2**26


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    Attributes:
        rank: from 0; the process 0 writes files and speaks.
        size: how many there are.
        device: of this process.
        control: a group on CPUs for what processes agree on, so that nobody waits for a GPU; None where a process is alone.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a device cannot change)
    control: Any = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def own(self, items: int) -> slice:
        """This process's share of a row of items: contiguous, and not larger than another by more than one."""
        return slice(*(items * edge // self.size for edge in (self.rank, self.rank + 1)))

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return self.largest(int(flag)) > 0

    def largest(self, number: int) -> int:
        """The largest of all processes' numbers."""
        if self.size == 1:
            return number
        value = torch.tensor(number)
        with explained():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return int(value)

    def from_first(self, call: Callable[[], Answer]) -> Answer:
        """What `call` gives on the first process, which alone makes it; if it raises there, it raises on all."""
        if self.size == 1:
            return call()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = call()
            except Exception as error:  # noqa: BLE001 (all processes raise it)
                outcome[1] = error
        with explained():
            dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise outcome[1]
        answer: Answer = outcome[0]
        return answer

    def first_goes_first(self, call: Callable[[], Answer]) -> Answer:
        """`call` of every process, the others after the first: they find in the cache what it has put there."""
        answers = [call()] if self.first else []
        self.any(False)
        return answers[0] if answers else call()

    def gather(self, value: Answer) -> list[Answer]:
        """Every process's value, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with explained():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def sent_to_first(self, rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """On the first process the rows of all, in the order of the ranks, block by block; the others only send theirs."""
        counts = self.gather(len(rows))
        step = max(BLOCK_BYTES // max(rows[:1].nbytes, 1), 1)
        for owner, count in enumerate(counts):
            for start in range(0, count, step):
                block = torch.empty((min(step, count - start), *rows.shape[1:]), dtype=torch.from_numpy(rows[:0].copy()).dtype)
                if owner == self.rank:
                    block = torch.from_numpy(np.array(rows[start : start + step]))
                with explained():
                    if owner and self.rank == owner:
                        dist.send(block, 0, group=self.control)
                    if owner and self.first:
                        dist.recv(block, owner, group=self.control)
                if self.first:
                    yield block.numpy()


ALONE = Processes()


class Shared:
    """The share of one process in batches that all processes iterate alike.

    `data.loading.Batches` can do this without making the pixels of the others; this is for any other source of batches.
    """

    def __init__(self, batches: Batches, processes: Processes) -> None:
        self.batches, self.processes = batches, processes

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]:
        for step, indices, images, labels in self.batches.iterate(start):
            own = self.processes.own(len(labels))
            yield step, indices[own], _rows(images, own), labels[own]


def _rows(tree: Any, own: slice) -> Any:
    if isinstance(tree, Tensor):
        return tree[own]
    if isinstance(tree, dict):
        return {key: _rows(value, own) for key, value in tree.items()}
    return type(tree)(_rows(value, own) for value in tree) if isinstance(tree, (list, tuple)) else tree


def launched() -> bool:
    """Whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def leave(status: int) -> NoReturn:
    """Ends one of several processes whose work is done and written.

    Python's own end takes torch's libraries apart while the other processes may still be connected, and now and then a
    thread of theirs aborts the process then: whoever started it would report a finished run as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def joined(device: torch.device, *, patience: dt.timedelta = PATIENCE) -> Iterator[Processes]:
    """The process group of torchrun's environment, gloo on CPUs and nccl on GPUs; left again at a good end.

    Without torchrun the process is alone, and inside a group that exists already that one is used and kept.

    Args:
        device: "cpu", or "cuda" for the GPU with the process's number on its machine.
        patience: how long one process waits for another.
    """
    if dist.is_available() and dist.is_initialized():
        yield _member(device, patience)
        return
    if not launched():
        yield Processes(device=device)
        return
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        check_local(local)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=patience, device_id=device if on_gpu else None)
    yield _member(device, patience)
    # only at a good end: with processes that are gone, leaving would wait for them
    dist.destroy_process_group()


def check_local(local: int) -> None:
    """Refuses more processes than GPUs: two on one would each take its memory."""
    there = torch.cuda.device_count()
    if local >= there:
        raise ValueError(f"process {local} of this machine has no GPU, there are {there}: start at most {there} processes")


def _member(device: torch.device, patience: dt.timedelta) -> Processes:
    size = dist.get_world_size()
    check_count(size, name="processes", caller="joined")
    control = dist.new_group(backend="gloo", timeout=patience) if dist.get_backend() != "gloo" else dist.group.WORLD
    return Processes(dist.get_rank(), size, device, control)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A collective that failed because another process is gone is said to have."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LostProcessError(f"another process of the run has ended ({_first_line(error)})") from error


def is_lost(error: BaseException) -> bool:
    """Whether an error comes from a process that can no longer be reached."""
    known = tuple(
        kind for name in ("DistBackendError", "DistNetworkError", "DistStoreError") if (kind := getattr(dist, name, None))
    )
    return isinstance(error, (LostProcessError, *known)) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rpartition("] ")[2][:160]
