"""Batches of pixels for training and evaluation: sampler, augmentation and images put together, prepared ahead of use.

    batches = ImageBatches(images, table.labels, ClassBalanced(table.labels, 392, 4), Augment("resized", flip=True), size=224)
    batches.set_epoch(3)
    for step, indices, pixels, labels in batches.iterate(start=120):
        ...

Step s of epoch e is a function of (seed, e, s) alone: the number of workers, the device and where a run was interrupted make
no difference.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rankgrad._checks import check_count
from rankgrad.data.image_files import UnreadableImageError, map_images, or_raise
from rankgrad.data.image_store import ImageBuffer, Item, OnDemandImages
from rankgrad.data.prefetch import prefetch
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import BatchSampler, checked_integers
from rankgrad.data.seeds import generator
from rankgrad.data.worker_process import init_worker

# batches prepared beyond the one in use: one ready, one in progress
AHEAD = 2


class Batch(NamedTuple):
    """One step: `images` uint8 [B, 3, size, size] and `labels` on the device, `indices` (rows of the table) on the CPU."""

    step: int
    indices: Tensor
    images: Tensor
    labels: Tensor


class BatchPlan(NamedTuple):
    """Which crops make a step."""

    step: int
    indices: Tensor
    boxes: Tensor
    flip: Tensor

    def items(self) -> list[Item]:
        return list(zip(self.indices.tolist(), map(tuple, self.boxes.tolist()), self.flip.tolist(), strict=True))


class ImageBatches:
    """The batches of an epoch, in order, from any position.

    Args:
        source: `ImageBuffer` (on the CPU, mapped from disk, or on a GPU) or `OnDemandImages` (decodes the files every time).
        labels: one integer per image of the source.
        sampler: which images make a batch; `Sequential` for evaluation.
        augment: which part of an image is cropped.
        size: height and width of the crops.
        seed: of the augmentation; the sampler has its own.
        device: where images and labels end up.
        workers: processes that decode `OnDemandImages`; 0 decodes in threads. An `ImageBuffer` needs none: one thread crops
            ahead on a CPU, and a stream of its own on a GPU.
        dtype: torch.uint8 (rounded, as in image files) or torch.float32; 0 .. 255 in both.
        memory_format: of the crops of an `ImageBuffer`, torch.channels_last for a network in that format.
        shard: (i, n) gives the i-th of n contiguous shards of every batch, counted from 0: what one process of n needs.
            Images, crops and flips are drawn for the whole batch, so they do not depend on n.

    Attributes:
        item_names: names of the images, for messages about a batch; None where they are not known.
    """

    item_names: Sequence[str] | None = None
    noun = "image"

    def __init__(
        self,
        source: ImageBuffer | OnDemandImages,
        labels: ArrayLike,
        sampler: BatchSampler,
        augment: Augment,
        size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        workers: int = 0,
        *,
        dtype: torch.dtype = torch.uint8,
        memory_format: torch.memory_format = torch.contiguous_format,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        check_count(size, name="size", caller="ImageBatches")
        check_count(workers, name="workers", caller="ImageBatches", least=0)
        self.labels = torch.from_numpy(checked_integers(labels, name="labels", caller="ImageBatches"))
        if len(self.labels) != len(source):
            raise ValueError(f"ImageBatches: labels must have one entry per image, {len(source)}, got {len(self.labels)}")
        if isinstance(source, OnDemandImages) and source.size != size:
            raise ValueError(f"ImageBatches: size must be that of its OnDemandImages, {source.size}, got {size}")
        check_count(shard[1], name="shard[1]", caller="ImageBatches")
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"ImageBatches: shard must be (i, n) with i from 0 to n - 1, got {shard}")
        self.shard = shard
        self.source, self.sampler, self.augment = source, sampler, augment
        self.size, self.seed, self.device, self.workers, self.dtype = size, seed, torch.device(device), workers, dtype
        self.memory_format = memory_format
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        check_count(epoch, name="epoch", caller="ImageBatches.set_epoch", least=0)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """The batches of the epoch from step `start` on."""
        check_count(start, name="start", caller="ImageBatches.iterate", least=0)
        self.sampler.set_epoch(self.epoch)
        self.sampler.load_state_dict({**self.sampler.state_dict(), "epoch": self.epoch, "position": start})
        # an iterator keeps the epoch it was made in, whatever is set later
        return self._run(self._plans(enumerate(iter(self.sampler), start), self.epoch))

    def _run(self, plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        for plan, images in self._pixels(plans):
            yield Batch(plan.step, plan.indices, self._to_device(images), self._to_device(self.labels[plan.indices]))

    def _plans(self, steps: Iterator[tuple[int, list[int]]], epoch: int) -> Iterator[BatchPlan]:
        for step, batch in steps:
            indices = torch.tensor(batch)
            random = generator(self.seed, "augment", epoch, step)
            boxes, flip = self.augment.draw(self.source.shapes[indices], random)
            rows = self._shard_of(step, len(batch))
            yield BatchPlan(step, indices[rows], boxes[rows], flip[rows])

    def _shard_of(self, step: int, items: int) -> slice:
        i, n = self.shard
        if items < n:
            raise ValueError(f"ImageBatches: the batch of step {step} has {items} images, too few for {n} processes")
        return slice(items * i // n, items * (i + 1) // n)

    def _pixels(self, plans: Iterator[BatchPlan]) -> Iterator[tuple[BatchPlan, Tensor]]:
        if isinstance(self.source, OnDemandImages):
            if self.workers:
                return _by_processes(self.source, plans, self)
            return prefetch(self._decode, plans, threads=1, ahead=AHEAD)
        if self.source.device.type == "cpu":
            return prefetch(self._crop, plans, threads=1, ahead=AHEAD)
        if self.source.device.type == "cuda":
            return self._cropped_beside(plans, self.source.device)
        return ((plan, self._crop(plan)) for plan in plans)

    def _cropped_beside(self, plans: Iterator[BatchPlan], gpu: torch.device) -> Iterator[tuple[BatchPlan, Tensor]]:
        """Crops on a stream of their own: they are made while the step before is still at work, and nothing synchronises."""
        stream = torch.cuda.Stream(gpu)
        stream.wait_stream(torch.cuda.current_stream(gpu))  # the images are there
        for plan in plans:
            with torch.cuda.stream(stream):
                images = self._crop(plan)
            used_on = torch.cuda.current_stream(gpu)
            used_on.wait_stream(stream)
            images.record_stream(used_on)
            yield plan, images

    def _crop(self, plan: BatchPlan) -> Tensor:
        assert isinstance(self.source, ImageBuffer)
        return self._pinned(
            self.source.crops(
                plan.indices, plan.boxes, plan.flip, self.size, dtype=self.dtype, memory_format=self.memory_format
            )
        )

    def _decode(self, plan: BatchPlan) -> Tensor:
        assert isinstance(self.source, OnDemandImages)
        images = map_images(self.source.__getitem__, plan.items(), None)
        return self._pinned(torch.stack([or_raise(image) for _, image in images]).to(self.dtype))

    def _pinned(self, images: Tensor) -> Tensor:
        return images.pin_memory() if self.device.type == "cuda" and images.device.type == "cpu" else images

    def _to_device(self, values: Tensor) -> Tensor:
        return self._pinned(values).to(self.device, non_blocking=True)


class _ReportedErrors(Dataset[Tensor | str]):
    """A source whose unreadable images are returned as messages.

    Raised in a worker, they would come back as a page of traceback and delay the end of the other workers.
    """

    def __init__(self, source: OnDemandImages) -> None:
        self.source = source

    def __getitem__(self, item: Item) -> Tensor | str:
        try:
            return self.source[item]
        except UnreadableImageError as error:
            return str(error)


def _stack_or_message(images: list[Tensor | str]) -> Tensor | str:
    """One tensor, or the first message."""
    messages = [image for image in images if isinstance(image, str)]
    return messages[0] if messages else torch.stack([image for image in images if isinstance(image, Tensor)])


def _by_processes(
    source: OnDemandImages, plans: Iterator[BatchPlan], batches: ImageBatches
) -> Iterator[tuple[BatchPlan, Tensor]]:
    """Decode in worker processes. Boxes are drawn here, so it does not matter which worker gets which item."""
    requested: deque[BatchPlan] = deque()

    def requests() -> Iterator[list[Item]]:
        for plan in plans:
            requested.append(plan)
            yield plan.items()

    loader = DataLoader(
        _ReportedErrors(source),
        batch_sampler=requests(),
        num_workers=batches.workers,
        collate_fn=_stack_or_message,
        worker_init_fn=init_worker,
        pin_memory=batches.device.type == "cuda",
        # its own generator, or the loader would draw from the global one
        generator=generator(batches.seed, "workers"),
    )
    for images in loader:
        if isinstance(images, str):
            raise UnreadableImageError(images)
        yield requested.popleft(), images.to(batches.dtype)
