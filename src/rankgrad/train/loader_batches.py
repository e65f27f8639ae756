"""A `DataLoader` as batches of `fit`: the same batches whatever the number of workers and wherever a run resumes."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankgrad.data.seeds import derive, generator
from rankgrad.train.batch_tree import num_rows
from rankgrad.train.processes import Processes
from rankgrad.train.sharding import ShardedBatches

if TYPE_CHECKING:
    from rankgrad.train.loop import Batches

# of an item: step, position in the batch, index in the dataset
Key = tuple[int, int, int]


class LoaderBatches:
    """Batches of a `DataLoader` over a map-style dataset, in an order that is a function of (seed, epoch).

    Sampler, batch size, collate function and workers are those of the loader. What a dataset draws for an item, from torch,
    numpy or `random`, is a function of (seed, epoch, step, position), so a resumed run sees the images of one that was never
    stopped, without loading those before.

    Args:
        loader: yields (images, labels), where images may be a tensor or a tree of tensors, or a dict with the key "labels".
        seed: of order and augmentation.
    """

    def __init__(self, loader: "DataLoader[Any]", seed: int = 0) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise TypeError(
                "fit: batches must be a DataLoader over a dataset with indices and with a batch size, since a resumed run "
                "skips batches; for anything else write a class with set_epoch, __len__ and iterate(start)"
            )
        self.loader, self.seed, self.epoch = loader, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.loader)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]:
        """The batches of the epoch from step `start` on."""
        loader = self.loader
        order = self._order()
        keys = [[(step, i, index) for i, index in enumerate(batch)] for step, batch in enumerate(order)][start:]
        workers: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
        batches: DataLoader[Any] = DataLoader(
            _SeededItems(loader.dataset, self.seed, self.epoch),
            batch_sampler=keys,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator(self.seed, "workers", self.epoch),
            **workers,
        )
        for step, batch in enumerate(batches, start):
            images, labels = _images_and_labels(batch)
            if num_rows(images) != len(order[step]) or len(labels) != len(order[step]):
                raise ValueError(
                    f"fit: the batch of step {step} has {num_rows(images)} images and {len(labels)} labels for "
                    f"{len(order[step])} items of the dataset"
                )
            yield step, torch.tensor(order[step]), images, labels

    def _order(self) -> list[Sequence[int]]:
        """Indices of all batches of the epoch."""
        sampler: Any = self.loader.batch_sampler
        parts: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None), self.loader.sampler)
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
            own = getattr(part, "generator", None)
            if isinstance(own, torch.Generator):
                own.manual_seed(derive(self.seed, "order", self.epoch))
        with _seeded(derive(self.seed, "order", self.epoch)):
            return [list(batch) for batch in sampler]


def as_batches(batches: "Batches | DataLoader[Any]", seed: int, processes: Processes) -> "Batches":
    """Batches of `fit` from a `DataLoader`, sharded over several processes; anything else as it is."""
    if not isinstance(batches, DataLoader):
        return batches
    whole = LoaderBatches(batches, seed)
    return whole if processes.size == 1 else ShardedBatches(whole, processes)


class _SeededItems(Dataset[Any]):
    """A dataset whose items draw from generators that are seeded for each of them."""

    def __init__(self, dataset: "Dataset[Any]", seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitem__(self, key: Key) -> Any:
        step, position, index = key
        with _seeded(derive(self.seed, "item", self.epoch, step, position)):
            return self.dataset[index]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch (CPU), numpy and Python inside the context, and restores them."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 (the user's)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the same)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002 (the same)
        random.setstate(of_python)


def _images_and_labels(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise TypeError(
        f"fit: a DataLoader must yield (images, labels) or a dict with the key 'labels', got {type(batch).__name__}"
    )
