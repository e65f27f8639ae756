"""Batches of pixels for a trainer: sampler, augmentation and image source put together, made ahead of their use.

    batches = Batches(images, table.labels, ClassBalanced(table.labels, 392, 4), AUGMENTS["recall-at-k"], size=224)
    batches.set_epoch(3)
    for step, indices, pixels, labels in batches.iterate(start=120):
        ...

What step s of epoch e shows is a function of (seed, e, s) alone: the number of workers, the device and where a run was
interrupted make no difference.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rankgrad._checks import check_count
from rankgrad.data.image_files import Decoding, Item, UnreadableImageError, in_order, or_raise
from rankgrad.data.image_store import Images
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import BatchSampler, checked_integers
from rankgrad.data.seeds import generator

# batches made before they are asked for: one being used, one ready, one in the making
AHEAD = 2
# seconds between two looks of a worker whether its process still lives
LOOK = 0.5


class Batch(NamedTuple):
    """One step: `images` uint8 [B, 3, size, size] and `labels` on the device, `indices` (rows of the table) on the CPU."""

    step: int
    indices: Tensor
    images: Tensor
    labels: Tensor


class _Drawn(NamedTuple):
    """What a step will show: decided, and not yet made."""

    step: int
    indices: Tensor
    boxes: Tensor
    flip: Tensor

    def items(self) -> list[Item]:
        return list(zip(self.indices.tolist(), map(tuple, self.boxes.tolist()), self.flip.tolist(), strict=True))


class Batches:
    """The batches of an epoch, in order, from any position.

    Args:
        source: decoded `Images` (on the CPU, mapped from disk, or on the GPU) or `Decoding` (decodes the files every time).
        labels: one integer per image of the source.
        sampler: which images make a batch; `InOrder` for evaluation.
        augment: which part of an image is shown.
        size: height and width of the pixels.
        seed: of the augmentation; the sampler has its own.
        device: where images and labels end up.
        workers: processes that decode for a `Decoding` source; 0 decodes in a thread. Decoded images need none: one thread
            crops ahead on the CPU, and a GPU does it without anybody waiting.
        dtype: torch.uint8 (values rounded, as image files hold them) or torch.float32, 0 .. 255 both.
        part: (i, n) shows only the i-th of n contiguous parts of every batch, counted from 0: what one process of n needs.
            Which images, crops and flips there are is drawn for the whole batch, so that n makes no difference to them.
    """

    def __init__(
        self,
        source: Images | Decoding,
        labels: ArrayLike,
        sampler: BatchSampler,
        augment: Augment,
        size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        workers: int = 0,
        *,
        dtype: torch.dtype = torch.uint8,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        check_count(size, name="size", caller="Batches")
        check_count(workers, name="workers", caller="Batches", least=0)
        self.labels = torch.from_numpy(checked_integers(labels, name="labels", caller="Batches"))
        if len(self.labels) != len(source):
            raise ValueError(f"Batches: labels must be one per image, {len(source)} of them, got {len(self.labels)}")
        if isinstance(source, Decoding) and source.size != size:
            raise ValueError(f"Batches: size must be that of the Decoding source, {source.size}, got {size}")
        check_count(part[1], name="part[1]", caller="Batches")
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"Batches: part must be (i, n) with i from 0 to n - 1, got {part}")
        self.part = part
        self.source, self.sampler, self.augment = source, sampler, augment
        self.size, self.seed, self.device, self.workers, self.dtype = size, seed, torch.device(device), workers, dtype
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """What the next iteration shows."""
        check_count(epoch, name="epoch", caller="Batches.set_epoch", least=0)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """The batches of the epoch from step `start` on."""
        check_count(start, name="start", caller="Batches.iterate", least=0)
        self.sampler.set_epoch(self.epoch)
        self.sampler.load_state_dict({**self.sampler.state_dict(), "epoch": self.epoch, "position": start})
        # an iterator keeps the epoch it was made in, whatever is set later
        return self._run(self._drawn(enumerate(iter(self.sampler), start), self.epoch))

    def _run(self, steps: Iterator["_Drawn"]) -> Iterator[Batch]:
        for drawn, images in self._made(steps):
            yield Batch(drawn.step, drawn.indices, self._sent(images), self._sent(self.labels[drawn.indices]))

    def _drawn(self, steps: Iterator[tuple[int, list[int]]], epoch: int) -> Iterator["_Drawn"]:
        for step, batch in steps:
            indices = torch.tensor(batch)
            random = generator(self.seed, "augment", epoch, step)
            boxes, flip = self.augment.draw(self.source.shapes[indices], random)
            own = self._own(step, len(batch))
            yield _Drawn(step, indices[own], boxes[own], flip[own])

    def _own(self, step: int, items: int) -> slice:
        i, n = self.part
        if items < n:
            raise ValueError(f"Batches: the batch of step {step} has {items} images, which {n} processes cannot share")
        return slice(items * i // n, items * (i + 1) // n)

    def _made(self, steps: Iterator["_Drawn"]) -> Iterator[tuple["_Drawn", Tensor]]:
        if isinstance(self.source, Decoding):
            return _by_processes(self.source, steps, self) if self.workers else _ahead(self._decoded, steps)
        if self.source.device.type == "cpu":
            return _ahead(self._cropped, steps)
        # the device works on while the next step is prepared; nothing waits
        return ((drawn, self._cropped(drawn)) for drawn in steps)

    def _cropped(self, drawn: "_Drawn") -> Tensor:
        assert isinstance(self.source, Images)
        return self._pinned(self.source.crops(drawn.indices, drawn.boxes, drawn.flip, self.size, dtype=self.dtype))

    def _decoded(self, drawn: "_Drawn") -> Tensor:
        assert isinstance(self.source, Decoding)
        images = in_order(self.source.__getitem__, drawn.items(), None)
        return self._pinned(torch.stack([or_raise(image) for _, image in images]).to(self.dtype))

    def _pinned(self, images: Tensor) -> Tensor:
        return images.pin_memory() if self.device.type == "cuda" and images.device.type == "cpu" else images

    def _sent(self, values: Tensor) -> Tensor:
        return self._pinned(values).to(self.device, non_blocking=True)


def _ahead(make: Callable[[_Drawn], Tensor], steps: Iterator[_Drawn]) -> Iterator[tuple[_Drawn, Tensor]]:
    """`make` of each step in a thread, a few steps before they are asked for."""
    waiting: deque[tuple[_Drawn, Future[Tensor]]] = deque()

    def first() -> tuple[_Drawn, Tensor]:
        drawn, images = waiting.popleft()
        return drawn, images.result()

    pool = ThreadPoolExecutor(1)
    try:
        for drawn in steps:
            waiting.append((drawn, pool.submit(make, drawn)))
            if len(waiting) > AHEAD:
                yield first()
        while waiting:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)


class _Reporting(Dataset[Tensor | str]):
    """A source whose unreadable images are sentences.

    Raised in a worker they would come back as a page of traceback, and keep the other workers from ending at once.
    """

    def __init__(self, source: Decoding) -> None:
        self.source = source

    def __getitem__(self, item: Item) -> Tensor | str:
        try:
            return self.source[item]
        except UnreadableImageError as error:
            return str(error)


def _stacked(images: list[Tensor | str]) -> Tensor | str:
    """One tensor, or the first complaint."""
    complaints = [image for image in images if isinstance(image, str)]
    return complaints[0] if complaints else torch.stack([image for image in images if isinstance(image, Tensor)])


def _follow(worker: int) -> None:
    """Lets a worker end when its process does and not before.

    A terminal and torchrun send their signals to workers too, and a process that is to stop after its step would miss them.
    A worker that is just starting when its process is killed would never notice, and others seconds later; meanwhile it keeps
    the process's connections open, so that the other processes of a run wait for the dead one. A thread of multiprocessing
    would print how it noticed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has been started by a process"
    assert parent.pid is not None, "which runs"
    threading.Thread(target=_end_after, args=(parent.pid,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (ConnectionError, EOFError)):
            shown(kind, error, trace)

    sys.excepthook = hook


def _end_after(process: int) -> None:
    """Ends this process when another one has ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(LOOK)
    os._exit(1)


def _by_processes(source: Decoding, steps: Iterator[_Drawn], batches: Batches) -> Iterator[tuple[_Drawn, Tensor]]:
    """Decoded by worker processes; boxes are drawn here, so that it does not matter which process gets which."""
    asked: deque[_Drawn] = deque()

    def requests() -> Iterator[list[Item]]:
        for drawn in steps:
            asked.append(drawn)
            yield drawn.items()

    loader = DataLoader(
        _Reporting(source),
        batch_sampler=requests(),
        num_workers=batches.workers,
        collate_fn=_stacked,
        worker_init_fn=_follow,
        pin_memory=batches.device.type == "cuda",
        # its own, or the loader would draw from the global one
        generator=generator(batches.seed, "workers"),
    )
    for images in loader:
        if isinstance(images, str):
            raise UnreadableImageError(images)
        yield asked.popleft(), images.to(batches.dtype)
