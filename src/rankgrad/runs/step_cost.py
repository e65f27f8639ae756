"""The cost of a training step on this machine: time and memory of its stages, and the chunk size to use.

    print(measure_step(model, loss, make_batch, settings, device="cuda", steps_per_epoch=14))

Chunks are measured from small to large until memory or time runs out; larger ones are extrapolated.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad._checks import check_positive
from rankgrad._device import available_bytes
from rankgrad._messages import format_bytes, format_duration, table
from rankgrad.runs.task import Task
from rankgrad.train.activation_budget import BACKWARD_FACTOR, PROBE, SHARE, count_saved_bytes, graph_bytes
from rankgrad.train.batch_tree import num_rows, select_rows
from rankgrad.train.gradient_check import live_batch_norms
from rankgrad.train.large_batch import LargeBatch, Loss
from rankgrad.train.settings import AUTOCAST, TrainSettings
from rankgrad.train.snapshot import BufferSnapshot, LossSnapshot, RngSnapshot
from rankgrad.train.train_step import make_optimizer


@dataclass(frozen=True)
class ChunkCost:
    """Time and peak memory of a chunk size.

    Attributes:
        chunk_size: images per forward pass.
        batch_size: images of the batch.
        forward: seconds of a forward pass without a graph.
        forward_backward: seconds of a forward pass with a graph and its backward pass.
        memory: peak bytes of the latter.
        measured: False if extrapolated from a smaller chunk.
    """

    chunk_size: int
    batch_size: int
    forward: float
    forward_backward: float
    memory: int
    measured: bool = True

    @property
    def chunks(self) -> int:
        return -(-self.batch_size // self.chunk_size)

    @property
    def without_graph(self) -> float:
        """Seconds of all passes without a graph, which a single chunk does not need."""
        return self.forward * self.chunks if self.chunks > 1 else 0.0

    @property
    def with_graph(self) -> float:
        """Seconds of all passes with a graph."""
        return self.forward_backward * self.chunks

    def scaled_to(self, size: int) -> "ChunkCost":
        """What a larger chunk will cost if all grows in proportion."""
        factor = size / self.chunk_size
        return ChunkCost(
            size,
            self.batch_size,
            factor * self.forward,
            factor * self.forward_backward,
            int(factor * self.memory),
            measured=False,
        )

    def fits(self, available: int | None) -> bool:
        return available is None or self.memory <= available


@dataclass(frozen=True)
class StepCost:
    """The cost of a step; `str()` is a table.

    Attributes:
        batch_size: images in a batch.
        device: where it was measured.
        available: usable bytes, None if unknown.
        load: seconds to load a batch.
        loss: seconds of the loss and its gradient with respect to the embeddings.
        loss_memory: bytes of the loss.
        optimizer: seconds of the optimizer step.
        optimizer_memory: bytes of gradients and optimizer state.
        tried: chunk sizes, ascending.
        chosen: the one to use.
        steps_per_epoch: 0 if unknown.
    """

    batch_size: int
    device: str
    available: int | None
    load: float
    loss: float
    loss_memory: int
    optimizer: float
    optimizer_memory: int
    tried: tuple[ChunkCost, ...]
    chosen: ChunkCost
    steps_per_epoch: int = 0

    @property
    def chunk_size(self) -> int:
        return self.chosen.chunk_size

    @property
    def step_seconds(self) -> float:
        """Seconds of a step with the chosen chunk; the next batch is loaded meanwhile."""
        return max(self.load, self.compute_seconds(self.chosen))

    def compute_seconds(self, cost: ChunkCost) -> float:
        """Seconds of a step with such chunks, without loading; no activations are kept."""
        return cost.without_graph + cost.with_graph + self.loss + self.optimizer

    def __str__(self) -> str:
        best = self.chosen
        limit = "" if self.available is None else f", {format_bytes(self.available)} to use"
        stages: list[tuple[str, float, int | None]] = [
            ("load", self.load, None),
            ("forward without graph", best.without_graph, None),
            ("loss and its gradient", self.loss, self.loss_memory),
            ("forward and backward", best.with_graph, best.memory),
            ("optimizer", self.optimizer, self.optimizer_memory),
        ]
        rows = [
            [name, format_duration(seconds), "" if memory is None else format_bytes(memory), ""]
            for name, seconds, memory in stages
        ]
        rows.append(["step", format_duration(self.step_seconds), "", f"{self.batch_size / self.step_seconds:,.0f} images/s"])
        chunks = []
        for cost in self.tried:
            remarks = {
                "estimated": not cost.measured,
                "does not fit": not cost.fits(self.available),
                "<- chosen": cost == best,
            }
            remark = "  ".join(text for text, applies in remarks.items() if applies)
            step = format_duration(self.compute_seconds(cost))
            chunks.append([f"{cost.chunk_size:,}", f"{cost.chunks:,}", step, format_bytes(cost.memory), remark])
        lines = [
            f"batch of {self.batch_size:,} images on {self.device}{limit}",
            "",
            table(["stage", "time", "memory", ""], rows, align="lrrl"),
            "",
            table(["chunk", "chunks", "step", "memory", ""], chunks, align="rrrrl"),
        ]
        if self.steps_per_epoch:
            total = format_duration(self.steps_per_epoch * self.step_seconds)
            lines += ["", f"an epoch of {self.steps_per_epoch:,} steps takes {total}, evaluation not counted"]
        return "\n".join(lines)


def measure_step(
    model: nn.Module,
    loss: Loss,
    make_batch: Callable[[], tuple[Any, Tensor]],
    settings: TrainSettings,
    device: torch.device | str = "cpu",
    *,
    param_groups: Sequence[dict[str, Any]] | None = None,
    steps_per_epoch: int = 0,
    patience: float = 60.0,
    warm_up: int = 1,
    jitter: bool = True,
) -> StepCost:
    """Measure the stages of a step and choose a chunk size. Model and loss are left as they were, without gradients.

    Args:
        model: maps images to embeddings.
        loss: maps embeddings and labels to a scalar.
        make_batch: returns images and labels as in training.
        settings: precision, optimizer and so on.
        device: where to measure.
        param_groups: parameter groups, by default all parameters in one.
        steps_per_epoch: for the time of an epoch; 0 leaves it out.
        patience: approximate limit of the measurement in seconds; what would take longer is estimated.
        warm_up: calls of the loss before it is measured.
        jitter: perturb the outputs that stand for those of a whole batch, so that no two are equal.
    """
    check_positive(patience, name="patience", caller="measure_step")
    device = torch.device(device)
    was_training = model.training
    model.to(device).train()
    if isinstance(loss, nn.Module):
        loss.to(device).train()
    before, buffers, memory = RngSnapshot.of(device), BufferSnapshot.of(model), LossSnapshot.of(loss)
    began = time.perf_counter()
    images, labels = make_batch()
    load = time.perf_counter() - began
    large = LargeBatch(model, loss, 0, autocast=AUTOCAST[settings.precision])
    meter = _StepMeter(large, images, device)
    try:
        # live batch norm needs the whole batch in one chunk
        sizes = [meter.items] if live_batch_norms(model) else _sizes(meter.items)
        tried = tuple(_costs(meter, sizes, patience, available_bytes(device)))
        loss_seconds, loss_memory = meter.loss(meter.embeddings(jitter=jitter), labels.to(device), warm_up)
        param_groups = param_groups or [{"params": list(model.parameters())}]
        optimizer_seconds, optimizer_memory = meter.optimizer(param_groups, settings)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        model.train(was_training)
        buffers.restore()
        memory.restore()
        before.restore()
    free = available_bytes(device)
    # gradients and optimizer state stay while chunks go through; the loss has come and gone by then
    room = None if free is None else int(SHARE.get(device.type, 0.5) * free) - optimizer_memory
    fitting = [cost for cost in tried if cost.fits(room)] or [tried[0]]
    return StepCost(
        batch_size=meter.items,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads",
        available=room,
        load=load,
        loss=loss_seconds,
        loss_memory=loss_memory,
        optimizer=optimizer_seconds,
        optimizer_memory=optimizer_memory,
        tried=tried,
        chosen=min(fitting, key=lambda cost: cost.without_graph + cost.with_graph),
        steps_per_epoch=steps_per_epoch,
    )


class _StepMeter:
    """Runs parts of a step and looks at clock and memory."""

    def __init__(self, large: LargeBatch, images: Any, device: torch.device) -> None:
        self.large, self.images, self.device = large, images, device
        self.model, self.items = large.model, num_rows(images)

    def embed(self, size: int) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.large.autocast, enabled=self.large.autocast is not None):
            output: Tensor = self.model(select_rows(self.images, slice(0, size), self.device))
        return output

    @torch.no_grad()
    def embeddings(self, *, jitter: bool) -> Tensor:
        """Outputs for a whole batch, from those of a few images."""
        few = self.embed(min(PROBE, self.items)).float()
        many = few.repeat(-(-self.items // len(few)), 1)[: self.items]
        if not jitter:
            return many
        return torch.nn.functional.normalize(many + torch.randn_like(many) / many.shape[1] ** 0.5, dim=1)

    def cost(self, size: int) -> ChunkCost:
        with torch.no_grad():
            forward = self._timed(lambda: self.embed(size))
        if self.device.type == "cuda":
            needed = self._peak(lambda: self._backward(size))
        else:
            needed = int(BACKWARD_FACTOR * graph_bytes(self.large, self.images, size))
        return ChunkCost(size, self.items, forward, self._timed(lambda: self._backward(size)), needed)

    def loss(self, embeddings: Tensor, labels: Tensor, warm_up: int) -> tuple[float, int]:
        leaf = embeddings.requires_grad_()

        def once() -> None:
            with torch.autocast(self.device.type, dtype=self.large.autocast, enabled=self.large.autocast is not None):
                value = self.large.loss(leaf, labels)
            value.backward()

        for _ in range(warm_up):  # kernels are compiled
            once()
        seconds = self._timed(once)
        if self.device.type == "cuda":
            return seconds, self._peak(once)
        with count_saved_bytes(self.model, [leaf]) as counter:
            self.large.loss(leaf, labels)
        return seconds, counter.total

    def optimizer(self, param_groups: Sequence[dict[str, Any]], settings: TrainSettings) -> tuple[float, int]:
        """A step with a learning rate of 0 costs as much as any and changes nothing."""
        optimizer = make_optimizer([{**group, "lr": 0.0} for group in param_groups], settings)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the state
        seconds = self._timed(optimizer.step)
        state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return seconds, sum(t.numel() * t.element_size() for t in (*parameters, *state))

    def _backward(self, size: int) -> None:
        with torch.enable_grad():
            output = self.embed(size)
            output.backward(torch.ones_like(output))

    def _timed(self, call: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - began

    def _peak(self, call: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _costs(meter: _StepMeter, sizes: Sequence[int], patience: float, free: int | None) -> Iterator[ChunkCost]:
    """The cost of each size, ascending; measured as long as memory and patience last, then estimated."""
    began = time.perf_counter()
    meter.cost(sizes[0])  # the first pass of a process is slower than any other
    last: ChunkCost | None = None
    for size in sizes:
        guess = None if last is None else last.scaled_to(size)
        if guess is not None:
            # forward, graph and forward again, backward
            ahead = guess.forward + 2 * guess.forward_backward
            too_large = free is not None and guess.memory > SHARE.get(meter.device.type, 0.5) * free
            if too_large or time.perf_counter() - began + ahead > patience:
                yield guess
                continue
        try:
            last = meter.cost(size)
        except torch.OutOfMemoryError:
            if guess is None:
                raise
            yield guess
        else:
            yield last


def _sizes(items: int) -> list[int]:
    """Halves of the batch down to a few images, ascending."""
    sizes = [items]
    while sizes[-1] > PROBE:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes[::-1]


def step_cost_of(task: Task) -> StepCost:
    """What a training step of a task costs; with data the batches are real, and the time of an epoch is told too."""
    # neither time nor memory depends on the weights, so nothing is downloaded
    model, loss = task.make_model(pretrained=False), task.make_loss()
    return measure_step(
        model,
        loss,
        task.sample_batch,
        task.recipe.train_settings(),
        task.context.device,
        param_groups=task.param_groups(model, loss),
        steps_per_epoch=len(task.make_batches()) if task.has_data else 0,
        # a memory makes the lists longer until it is full
        warm_up=1 + task.recipe.memory,
        jitter=task.outputs_are_embeddings,
    )
