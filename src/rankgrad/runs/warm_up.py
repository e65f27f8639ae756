"""The kernels of a loss are compiled while data and network are read, so that the first step does not wait for them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.train.loop import Batches


def warm_up(loss: nn.Module, items: int, per_class: int, dim: int, device: torch.device, autocast: torch.dtype | None) -> None:
    """Call a loss forward and backward on random embeddings of the shape that training will have."""
    generator = torch.Generator().manual_seed(0)  # those of the run are not touched
    embeddings = torch.randn(items, dim, generator=generator).to(device).requires_grad_()
    labels = torch.arange(items, device=device) // per_class
    # a new thread starts with the first GPU as its current one
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            value = loss(embeddings, labels)
        torch.autograd.grad(value, embeddings)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class InBackground:
    """Runs a function in a thread; `wait` returns when it has ended.

    An exception is dropped: what is done ahead of time will be done again when it is needed, and raise there. A process that
    ends early waits for the thread: one that is ended inside a compiler aborts the process.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.thread = threading.Thread(target=self._run, name="warm-up", daemon=False)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self.function()

    def wait(self) -> None:
        self.thread.join()


class BatchesAfter:
    """Batches of which the first is handed out when `wait` has returned; it is prepared meanwhile.

    A network may be captured in its first step, which nothing else on the GPU may disturb.
    """

    def __init__(self, batches: Batches, wait: Callable[[], None]) -> None:
        self.batches, self.wait = batches, wait
        self.item_names: Sequence[str] | None = getattr(batches, "item_names", None)
        self.noun: str = getattr(batches, "noun", "image")

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]:
        for batch in self.batches.iterate(start):
            self.wait()
            yield batch
