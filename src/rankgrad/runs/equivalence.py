"""Whether several processes compute the loss, gradients and metrics of one, on a small batch of a recipe in float64."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad.data.samplers import Sequential
from rankgrad.eval import evaluate, evaluate_sharded
from rankgrad.losses.distributed import DistributedRankLoss
from rankgrad.runs.data_cache import Split
from rankgrad.runs.retrieval_batches import SubsetSampler
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.train.batch_tree import select_rows
from rankgrad.train.large_batch import LargeBatch
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.sharding import check_batch_norm_is_synchronised, full_tensors, wrap_model

# of float64, whose sums may be in another order
TOLERANCE = 1e-9
# pixels: the comparison does not depend on it, and float64 on a CPU is slow
LARGEST_SIDE = 64
MOST_PER_CLASS = 3
# of the longest gradient: a shorter one is compared with this, since that of an attention's key bias is 0 but for rounding
NOISE = 1e-4


@dataclass(frozen=True)
class Equivalence:
    """How several processes compare with one.

    Attributes:
        processes: number of processes.
        counts: images of each.
        loss: of one process and of several.
        gradient: largest relative difference of a parameter's gradient, and the parameter's name.
        parameters: number of parameters compared.
        metrics: of the batch's embeddings, by one process and by several.
        agrees: whether all differences are within rounding.
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


def compare_processes(task: RetrievalTask, *, images: int) -> Equivalence:
    """Compare the processes of the task's context with one; all of them call this, and the first computes the batch alone too.

    Args:
        task: what to compute.
        images: of the batch.
    """
    processes = task.context.processes
    pixels, labels = _batch(task, images)
    if len(labels) < processes.size:
        raise ValueError(
            f"a batch of {task.recipe.name} has {len(labels)} images, too few for {processes.size} processes: lower --processes"
        )
    together = _compute(task, pixels, labels, processes)
    alone = processes.on_first(lambda: _compute(task, pixels, labels, ALONE))
    # the first process knows the metrics of all
    metrics = processes.on_first(lambda: {name: (value, together.metrics[name]) for name, value in alone.metrics.items()})
    least = NOISE * max((float(gradient.norm()) for gradient in alone.gradients.values()), default=0.0)
    differences = {
        name: _difference(together.gradients[name], gradient, least) for name, gradient in alone.gradients.items()
    }  # fmt: skip
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


def _batch(task: RetrievalTask, images: int) -> tuple[Any, Tensor]:
    """The first images of the recipe's first batch, a few of each class, all of them on every process."""
    small = task.recipe
    if not small.is_text:
        small = replace(small, size=min(small.size, LARGEST_SIDE), stored_side=0, train_side=0)
    alone = RetrievalTask(small, replace(task.context, processes=ALONE), task.data)
    split, _ = task.data.training(small)
    rows = _few_of_each(next(iter(alone.make_batches().sampler)), split, images)
    batches = alone.make_batches()
    batches.sampler = SubsetSampler(Sequential(len(rows), len(rows)), rows)
    _, _, inputs, labels = next(batches.iterate(0))
    return inputs.double() if isinstance(inputs, Tensor) else inputs, labels


def _few_of_each(batch: list[int], split: Split, images: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    rows = np.array(batch)
    labels = split.table.labels[rows]
    position = np.array([int((labels[:i] == label).sum()) for i, label in enumerate(labels)])
    chosen = np.flatnonzero(position < MOST_PER_CLASS)[:images]
    if len(chosen) < images:
        chosen = np.arange(min(images, len(rows)))
    return rows[chosen]


def _compute(task: RetrievalTask, inputs: Any, labels: Tensor, processes: Processes) -> _Computed:
    recipe, context = task.recipe, task.context
    plain = task.make_model(pretrained=False).double()
    if context.processes.size > 1:
        check_batch_norm_is_synchronised(plain)
    _disable_dropout(plain)
    model, _ = wrap_model(plain, [], context.parallel, processes)
    loss = task.local_loss()
    own = processes.shard(len(labels))
    # half of a shard at a time, so that chunks are compared too
    largest = -(-len(labels) // context.processes.size)
    chunk = -(-largest // 2) if len(labels) >= 2 * context.processes.size else 0
    wrapped = DistributedRankLoss(loss) if processes.size > 1 else loss
    step = LargeBatch(model, wrapped, chunk, keep=1, processes=processes)
    torch.manual_seed(recipe.seed)
    if recipe.memory:
        step(inputs[own].flip(3) if isinstance(inputs, Tensor) else select_rows(inputs, own), labels[own])  # fills the memory
        model.zero_grad(set_to_none=True)
        torch.manual_seed(recipe.seed)
    value = step(select_rows(inputs, own), labels[own])
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


def _disable_dropout(model: nn.Module) -> None:
    """Random layers draw differently on every process and are not compared."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            module.eval()
            # attention reads the probability and not the mode of its dropout layer
            if isinstance(module, nn.Dropout):
                module.p = 0.0


def _difference(value: Tensor, reference: Tensor, least: float) -> float:
    length = max(float(reference.norm()), least)
    return float((value - reference).norm()) / length if length else float(value.norm())
