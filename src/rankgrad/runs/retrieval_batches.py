"""Batches of images for retrieval: the sampler of a recipe, training batches, and images in order."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.data.category_samplers import CategoryHalf, CategoryHard
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import BatchSampler, ClassBalanced, Sequential, WholeClass, class_sizes
from rankgrad.data.table import Table
from rankgrad.data.text_batches import TextBatches, TokenizedTexts
from rankgrad.runs.data_cache import Split
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.task import RunContext

# the batch of RS@k: the largest that has been shown to help
LARGEST_BATCH = 4000
# bytes of a batch of pixels that may be on the device: RS@k's 4,000 images of 224 x 224 are 0.6 GB
LARGEST_BATCH_BYTES = 2**32
# images that are embedded at once without a gradient
EMBEDDING_BATCH = 256


class SubsetSampler:
    """A sampler over some rows of a table, which yields rows of the whole."""

    def __init__(self, sampler: BatchSampler, rows: NDArray[np.int64]) -> None:
        self.sampler, self.rows = sampler, rows

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            yield self.rows[batch].tolist()

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def make_sampler(recipe: RetrievalRecipe, table: Table) -> BatchSampler:
    """The sampler of `recipe` over the images of `table`."""
    per_class = recipe.per_class or None
    if recipe.sampler in ("category-hard", "category-half"):
        if table.categories is None:
            raise ValueError(
                f"--sampler {recipe.sampler} needs categories, and {table.name} has none: "
                "use --sampler class-balanced or whole-class"
            )
        if recipe.sampler == "category-half":
            return CategoryHalf(table.labels, table.categories, recipe.batch_size, seed=recipe.seed, per_class=per_class)
        return CategoryHard(
            table.labels,
            table.categories,
            recipe.batch_size,
            batches_per_pair=recipe.batches_per_pair,
            seed=recipe.seed,
            per_class=per_class,
        )
    if recipe.sampler == "whole-class":
        return WholeClass(table.labels, recipe.batch_size, seed=recipe.seed)
    return ClassBalanced(table.labels, recipe.batch_size or largest_batch(recipe, table), recipe.per_class, seed=recipe.seed)


def largest_batch(recipe: RetrievalRecipe, table: Table) -> int:
    """`per_class` images of every class that has that many, `LARGEST_BATCH` at most."""
    usable = int((class_sizes(table.labels) >= recipe.per_class).sum())
    if usable < 2:
        raise ValueError(
            f"{table.name} has {usable} classes with at least {recipe.per_class} images, and 2 are needed: lower --per-class"
        )
    return min(usable, LARGEST_BATCH // recipe.per_class) * recipe.per_class


def fitting_batch(recipe: RetrievalRecipe, table: Table) -> int:
    """The largest batch that the sampler of `recipe` can fill from `table`; 0 if none."""
    if recipe.sampler == "class-balanced":
        return ClassBalanced.largest_batch(table.labels, recipe.per_class)
    if recipe.sampler == "whole-class":
        return WholeClass.largest_batch(table.labels)
    if table.categories is None:
        return 0
    return CategoryHard.largest_batch(table.labels, table.categories, recipe.per_class or None)


def memory_format_of(recipe: RetrievalRecipe) -> torch.memory_format:
    """Of the network and of its crops in training."""
    return torch.channels_last if recipe.channels_last else torch.contiguous_format


def training_batches(recipe: RetrievalRecipe, split: Split, context: RunContext) -> ImageBatches | TextBatches:
    """Batches on the device, unless they would fill it: then chunks are moved there one by one."""
    sampler = make_sampler(recipe, split.selected)
    sampler = sampler if split.rows is None else SubsetSampler(sampler, split.rows)
    shard = (context.processes.rank, context.processes.size)
    if isinstance(split.images, TokenizedTexts):
        texts = TextBatches(split.images, split.table.labels, sampler, context.device, shard=shard)
        texts.item_names = split.table.texts
        return texts
    images = recipe.batch_size or largest_batch(recipe, split.selected)
    batches = ImageBatches(
        split.images,
        split.table.labels,
        sampler,
        Augment(recipe.crop, flip=recipe.flip, share=recipe.size / recipe.stored, scale=(recipe.crop_scale, 1.0)),
        recipe.size,
        recipe.seed,
        context.device if 3 * images * recipe.size**2 <= LARGEST_BATCH_BYTES * context.processes.size else "cpu",
        context.workers or 0,
        memory_format=memory_format_of(recipe),
        shard=shard,
    )
    batches.item_names = split.table.paths
    return batches


def ordered_batches(
    recipe: RetrievalRecipe, split: Split, context: RunContext, rows: NDArray[np.int64] | None = None
) -> "RenumberedBatches":
    """The center crop of each image, or each text, in the order of `rows` of the table, by default the selected ones."""
    rows = split.rows if rows is None else rows
    at_once = EMBEDDING_BATCH
    if isinstance(recipe.chunk_size, int) and recipe.chunk_size:
        at_once = min(at_once, recipe.chunk_size)
    in_order = Sequential(len(split.table) if rows is None else len(rows), at_once)
    sampler = in_order if rows is None else SubsetSampler(in_order, rows)
    if isinstance(split.images, TokenizedTexts):
        return RenumberedBatches(TextBatches(split.images, split.table.labels, sampler, context.device))
    batches = ImageBatches(
        split.images,
        split.table.labels,
        sampler,
        Augment("center", share=recipe.size / recipe.stored),
        recipe.size,
        device=context.device,
        workers=context.workers or 0,
    )
    return RenumberedBatches(batches)


class RenumberedBatches:
    """Batches whose items are numbered in the order they come, whichever rows of a table they are."""

    def __init__(self, batches: ImageBatches | TextBatches) -> None:
        self.batches, self.noun = batches, batches.noun

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]:
        count = 0
        for step, indices, images, labels in self.batches.iterate(start):
            yield step, torch.arange(count, count + len(indices)), images, labels
            count += len(indices)
