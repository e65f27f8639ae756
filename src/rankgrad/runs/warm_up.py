"""Calls that launch the kernels of a run, so that they are compiled before they are needed.

Those of the loss are compiled while data and network are read, and the first step does not wait for them. `rankgrad compile`
makes all of these calls without running a kernel.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.data.image_store import ImageBuffer, bytes_needed
from rankgrad.eval import evaluate
from rankgrad.train.loop import Batches

# items to evaluate, and items of a class below and above the number from which on thresholds are searched
EVALUATED = 1024
PER_CLASS = 4, 64


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


def warm_up_evaluation(dim: int, device: torch.device) -> None:
    """Evaluate random embeddings in classes of few and of many items, which are counted by other kernels."""
    embeddings = torch.randn(EVALUATED, dim, generator=torch.Generator().manual_seed(0)).to(device)
    for per_class in PER_CLASS:
        evaluate(embeddings, torch.arange(EVALUATED) // per_class)


def warm_up_crops(size: int, memory_formats: Iterable[torch.memory_format], device: torch.device) -> None:
    """Crop one image as for a step of training, in its memory format, and as for an evaluation."""
    shapes = torch.tensor([[size, size]])
    images = ImageBuffer(torch.zeros(bytes_needed(shapes), dtype=torch.uint8, device=device), shapes)
    whole = torch.tensor([[0.0, 0.0, size, size]])
    for memory_format in memory_formats:
        images.crops(torch.zeros(1), whole, torch.zeros(1), size, dtype=torch.uint8, memory_format=memory_format)


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
