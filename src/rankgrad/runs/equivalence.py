"""One small batch of a recipe by one process and by several: do loss, gradients and metrics agree?"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

import rankgrad as rg
from rankgrad.data.samplers import Sequential
from rankgrad.eval import evaluate, evaluate_sharded
from rankgrad.runs.data_cache import DataCache, RunContext, Split
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.runs.retrieval_task import SubsetSampler, make_batches
from rankgrad.runs.task_losses import make_loss
from rankgrad.runs.task_models import make_model
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.sharding import check_batch_norm_is_synchronised, full_tensors, wrap_model

# what float64 may differ by in another order of sums
TOLERANCE = 1e-9
# pixels: the question does not depend on it, and float64 on a CPU is slow
LARGEST_SIDE = 64
MOST_PER_CLASS = 3


@dataclass(frozen=True)
class Equivalence:
    """How several processes compare with one.

    Attributes:
        processes: how many.
        counts: images of each.
        loss: by one process and by several.
        gradient: largest relative difference of any parameter's gradient, and which parameter's.
        parameters: how many were compared.
        metrics: of the batch's embeddings, by one process and by several.
        agrees: whether all differences are those of rounding.
    """

    processes: int
    counts: tuple[int, ...]
    loss: tuple[float, float]
    gradient: tuple[float, str]
    parameters: int
    metrics: dict[str, tuple[float, float]]
    agrees: bool

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {one:.4f} / {many:.4f}" for name, (one, many) in self.metrics.items())
        worst, where = self.gradient
        return "\n".join(
            [
                f"1 process against {self.processes} ({' + '.join(map(str, self.counts))} images), float64",
                f"loss      {self.loss[0]:.12f} / {self.loss[1]:.12f}, difference {abs(self.loss[0] - self.loss[1]):.1e}",
                f"gradient  largest relative difference of {self.parameters} tensors {worst:.1e} ({where})",
                f"metrics   {shown}",
                f"they {'agree' if self.agrees else 'DO NOT agree'} (to {TOLERANCE:.0e})",
            ]
        )


@dataclass(frozen=True)
class _Computed:
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def compare(recipe: Recipe, context: RunContext, *, images: int) -> Equivalence:
    """Called by all processes; the first computes the batch alone too."""
    processes = context.processes
    pixels, labels = _batch(recipe, DataCache(context), images)
    if len(labels) < processes.size:
        raise ValueError(f"a batch of {recipe.name} has {len(labels)} images, which {processes.size} processes cannot share")
    together = _computed(recipe, context, pixels, labels, processes)
    alone = processes.on_first(lambda: _computed(recipe, context, pixels, labels, ALONE))
    # the metrics of all are known to the first
    metrics = processes.on_first(lambda: {name: (value, together.metrics[name]) for name, value in alone.metrics.items()})
    differences = {name: _difference(together.gradients[name], gradient) for name, gradient in alone.gradients.items()}
    worst = max(differences, key=lambda name: differences[name])
    close = abs(alone.loss - together.loss) <= TOLERANCE and differences[worst] <= TOLERANCE
    return Equivalence(
        processes=processes.size,
        counts=tuple(processes.gather(len(labels[processes.shard(len(labels))]))),
        loss=(alone.loss, together.loss),
        gradient=(differences[worst], worst),
        parameters=len(differences),
        metrics=metrics,
        agrees=processes.on_first(lambda: close and all(one == many for one, many in metrics.values())),
    )


def _batch(recipe: Recipe, data: DataCache, images: int) -> tuple[Tensor, Tensor]:
    """The first images of the recipe's first batch, a few of each class, whole on every process."""
    small = replace(recipe, size=min(recipe.size, LARGEST_SIDE), stored_side=0)
    split, _ = data.training(small)
    rows = _few_of_each(next(iter(make_batches(small, split, replace(data.context, processes=ALONE)).sampler)), split, images)
    batches = make_batches(small, split, replace(data.context, processes=ALONE))
    batches.sampler = SubsetSampler(Sequential(len(rows), len(rows)), rows)
    batch = next(batches.iterate(0))
    return batch.images.double(), batch.labels


def _few_of_each(batch: list[int], split: Split, images: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    rows = np.array(batch)
    labels = split.table.labels[rows]
    place = np.array([int((labels[:i] == label).sum()) for i, label in enumerate(labels)])
    chosen = np.flatnonzero(place < MOST_PER_CLASS)[:images]
    if len(chosen) < images:
        chosen = np.arange(min(images, len(rows)))
    return rows[chosen]


def _computed(recipe: Recipe, context: RunContext, pixels: Tensor, labels: Tensor, processes: Processes) -> _Computed:
    plain = make_model(replace(recipe, weights="none"), torch.device("cpu")).double()
    if context.processes.size > 1:
        check_batch_norm_is_synchronised(plain)
    _without_dropout(plain)
    model, _ = wrap_model(plain, [], context.parallel, processes)
    loss = make_loss(recipe)
    own = processes.shard(len(labels))
    # half of a share at a time, so that chunks take part in the comparison
    largest = -(-len(labels) // context.processes.size)
    chunk = -(-largest // 2) if len(labels) >= 2 * context.processes.size else 0
    wrapped = rg.DistributedRankLoss(loss) if processes.size > 1 else loss
    step = rg.LargeBatch(model, wrapped, chunk, keep=1, processes=processes)
    torch.manual_seed(recipe.seed)
    if recipe.memory:
        step(pixels[own].flip(3), labels[own])  # something to remember
        model.zero_grad(set_to_none=True)
        torch.manual_seed(recipe.seed)
    value = step(pixels[own], labels[own])
    gradients = {
        name.removeprefix("module."): full_tensors(parameter.grad).detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    ks = (1, 10)
    if processes.size > 1:
        result = evaluate_sharded(step.embeddings, labels[own], ks=ks)
    else:
        result = evaluate(step.embeddings, labels, ks=ks)
    metrics = {} if result is None else {name: result[name] for name in ("R@1", "mAP", "mAP@R")}
    return _Computed(float(value), gradients, metrics)


def _without_dropout(model: nn.Module) -> None:
    """Random layers draw their own on every process and are no part of the comparison."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            module.eval()


def _difference(value: Tensor, reference: Tensor) -> float:
    length = float(reference.norm())
    return float((value - reference).norm()) / length if length else float(value.norm())
