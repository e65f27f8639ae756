"""One optimizer step: gradients in any number of chunks, optimizer, learning-rate schedule, recovery from lack of memory."""

import bisect
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rankgrad._device import release_memory
from rankgrad.train.activation_budget import PROBE, choose_chunk
from rankgrad.train.batch_tree import num_rows
from rankgrad.train.cpu_precision import check_cpu_precision
from rankgrad.train.errors import NotFiniteError, OutOfMemoryError, is_out_of_memory
from rankgrad.train.gradient_check import live_batch_norms
from rankgrad.train.graphed_model import GraphedModel
from rankgrad.train.large_batch import GatheringLoss, LargeBatch, Loss, unwrap_loss
from rankgrad.train.meters import NaNGuard
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.settings import AUTOCAST, TrainSettings
from rankgrad.train.sharding import (
    check_batch_norm_is_synchronised,
    full_tensors,
    gather_weights,
    is_sharded,
    load_weights,
    shard_like,
    unwrap_model,
    wrap_model,
)
from rankgrad.train.snapshot import LossSnapshot

Factor: TypeAlias = Callable[[int], float]

# below this scale of the loss, float16 gradients overflow at every step
LEAST_SCALE = 2.0**-10


@dataclass(frozen=True)
class StepOutput:
    """A step that all processes took together, with device tensors; reading them synchronises.

    `ranked` is recorded after the loss and before the backward pass of the model; None on a CPU.
    """

    loss: Tensor
    gradient: Tensor
    lr: float
    chunk_size: int
    embeddings: Tensor
    labels: Tensor
    ranked: torch.cuda.Event | None


class TrainStep:
    """Model, loss and optimizer; callable, takes one step.

    Args:
        model: moved to `device`.
        loss: moved too if it is a module.
        settings: optimizer, schedule, precision, chunks.
        param_groups: parameter groups, by default all parameters of model and loss.
        steps_per_epoch: for the schedule.
        device: where to train.
        processes: those that take each step together.
        item_names: names of the items that indices refer to, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: TrainSettings,
        param_groups: Sequence[dict[str, Any]] | None,
        *,
        steps_per_epoch: int,
        device: torch.device,
        processes: Processes = ALONE,
        item_names: Sequence[str] | None = None,
    ) -> None:
        if processes.size > 1 and not isinstance(loss, GatheringLoss):
            raise ValueError(
                f"fit: with {processes.size} processes the loss must rank against all of them: wrap it in DistributedRankLoss"
            )
        check_cpu_precision(device, settings.precision)
        if processes.size > 1 and settings.parallel == "fsdp" and settings.precision == "fp16":
            raise ValueError("fit: parallel 'fsdp' has no scaled loss for precision 'fp16': train with 'bf16', or with 'ddp'")
        self.processes = processes
        self.model, self.loss, self.settings, self.device = model, loss, settings, device
        model.to(device)
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)
        if isinstance(loss, nn.Module):
            loss.to(device).train()
        if param_groups is None:
            param_groups = [{"params": [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]}]
        if settings.compile:
            model.compile()
        self._trained, param_groups = wrap_model(model, param_groups, settings.parallel, processes)
        self.optimizer = make_optimizer(param_groups, settings)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._factor = schedule(settings, steps_per_epoch)
        self._last_step = max(settings.total_steps(steps_per_epoch) - 1, 1)
        self._scaler = torch.amp.GradScaler(device.type) if settings.precision == "fp16" else None
        # the scaler handles gradients that overflow
        self.guard = NaNGuard(late=device.type == "cuda", gradients=self._scaler is None, names=item_names)
        self._chunk_is_chosen = settings.chunk_size != "auto"
        chunk_size = 0 if settings.chunk_size == "auto" else settings.chunk_size
        autocast = AUTOCAST[settings.precision]
        self._large = LargeBatch(self._trained, loss, chunk_size, settings.keep, autocast, processes=processes)
        self._use_graphs = settings.cuda_graphs and not settings.compile and device.type == "cuda" and processes.size == 1
        self._steps = 0

    def train(self) -> None:
        """Puts the model into training mode."""
        self.model.train()
        self._trained.train()
        if self.processes.size > 1:
            check_batch_norm_is_synchronised(self._trained)

    def release(self) -> None:
        """Restores the model as it was passed in, without recorded graphs."""
        self._large.run_eagerly()
        clear = getattr(unwrap_loss(self.loss), "clear_graphs", None)
        if callable(clear):
            clear()
        release_memory(self.device)

    def gather_weights(self) -> None:
        """Copies the trained weights to the model that was passed in; a collective call."""
        gather_weights(self.model, self._trained)

    def weights(self) -> dict[str, Any]:
        """Full weights of the model; a collective call."""
        weights: dict[str, Any] = full_tensors(unwrap_model(self._trained).state_dict())
        return weights

    def __call__(
        self, step: int, seed: int, indices: Tensor, images: Any, labels: Tensor, *, warn: Callable[..., None]
    ) -> StepOutput:
        """Takes step `step`, counted from 0, with torch's generators seeded by `seed`."""
        set_learning_rate(self.optimizer, self._factor(step))
        self._set_progress(step / self._last_step)
        if self.settings.channels_last and isinstance(images, Tensor) and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        labels = labels.to(self.device, non_blocking=True)
        value = self._gradients(step, seed, indices, images, labels, warn)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        length = full_tensors(self._clip())
        self.guard.add(step + 1, indices, value, length)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        gathered = self.loss.gathered if isinstance(self.loss, GatheringLoss) else None
        embeddings, all_labels = gathered or (self._large.embeddings, labels)
        return StepOutput(
            loss=value,
            gradient=length,
            lr=self.optimizer.param_groups[0]["lr"],
            chunk_size=self._large.chunk_size or len(labels),
            embeddings=embeddings,
            labels=all_labels,
            ranked=self._large.ranked,
        )

    def _clip(self) -> Tensor:
        """The gradient norm, before it is clipped."""
        if self.settings.clip:
            return torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def _set_progress(self, done: float) -> None:
        """Tells the loss, and the losses inside it, how far training is, for schedules of their own."""
        for module in self._told_progress():
            module.set_progress(done)

    def _told_progress(self) -> list[Any]:
        modules = self.loss.modules() if isinstance(self.loss, nn.Module) else ()
        return [module for module in modules if callable(getattr(module, "set_progress", None))]

    def changes_with_length(self) -> bool:
        """Whether the loss follows a schedule over the whole run, so that a longer run has other first steps."""
        # every loss with a temperature is told the progress; only one with a tau_end is another one at the end
        first, last = (self._settings_of_loss(done) for done in (0.0, 1.0))
        return first != last

    def _settings_of_loss(self, done: float) -> list[Any]:
        """What the losses are like when this share of the steps is done; the next step sets them anew."""
        self._set_progress(done)
        # a loss that does not tell is assumed to change
        return [getattr(module, "changing_settings", lambda: done)() for module in self._told_progress()]

    def flush(self) -> None:
        """Checks that all steps so far were finite; synchronises."""
        self.guard.flush()

    def scale(self) -> float | None:
        """Scale of the loss under fp16; synchronises. Raises `NotFiniteError` if it has collapsed."""
        if self._scaler is None:
            return None
        scale = float(self._scaler.get_scale())
        if scale < LEAST_SCALE:
            raise NotFiniteError(
                f"gradients overflow float16 at every step (the loss scale fell to {scale:.1e}): use --precision bf16 "
                "or float32"
            )
        return scale

    def state(self) -> dict[str, Any]:
        """State besides the weights, independent of the number of processes; a collective call."""
        loss = unwrap_loss(self.loss)
        return {
            "optimizer": full_tensors(self.optimizer.state_dict()),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "loss": loss.state_dict() if isinstance(loss, nn.Module) else None,
            "chunk_size": self._large.chunk_size if self._chunk_is_chosen else None,
        }

    def restore(self, state: Mapping[str, Any], *, with_chunk_size: bool) -> None:
        load_weights(self.model, self._trained)
        self.optimizer.load_state_dict(shard_like(state["optimizer"], self.parameters))
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        loss = unwrap_loss(self.loss)
        if isinstance(loss, nn.Module):
            loss.load_state_dict(state["loss"])
        if with_chunk_size and state["chunk_size"] is not None:
            self._large.chunk_size, self._chunk_is_chosen = state["chunk_size"], True

    def _gradients(
        self, step: int, seed: int, indices: Tensor, images: Any, labels: Tensor, warn: Callable[..., None]
    ) -> Tensor:
        """Adds the gradients to the parameters and returns the loss; repeats in smaller chunks when memory runs out."""
        if not self._chunk_is_chosen:
            self._large.chunk_size = self._choose_chunk(images)
            self._chunk_is_chosen = True
        self._steps += 1
        # the first step compiles kernels and measures memory
        if self._use_graphs and self._steps == 2 and isinstance(images, Tensor):
            reason = self._large.record(GraphedModel(self.model, self._large.autocast), images, labels)
            if reason is not None:
                warn(f"the model could not be recorded as CUDA graphs and runs layer by layer: {reason}")
        memory = LossSnapshot.of(self.loss)
        while True:
            torch.manual_seed(seed)
            try:
                return self._large(images, labels, scale=1.0 if self._scaler is None else self._scaler.scale)
            except (RuntimeError, ValueError, IndexError, MemoryError) as error:
                if not is_out_of_memory(error):
                    self._check_embeddings(step, indices, error)
                    raise
                detail = str(error).partition("\n")[0]
            # outside the except clause: the traceback would keep the failed pass alive
            for parameter in self.parameters:
                parameter.grad = None
            memory.restore()
            remedy = self._shrink(step, num_rows(images))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            warn(f"out of memory at step {step + 1}, which is repeated: {remedy}", detail=detail)

    def _check_embeddings(self, step: int, indices: Tensor, error: Exception) -> None:
        """Explains an error of a loss that was given embeddings which are not finite."""
        embeddings = getattr(self._large, "embeddings", None)
        with contextlib.suppress(RuntimeError):  # a GPU that has failed cannot tell
            if embeddings is None or bool(torch.isfinite(embeddings).all()):
                return
            fact, images = f"step {step + 1}: the embeddings are NaN or infinite", self.guard.describe(indices)
            if self.processes.size == 1:
                raise NotFiniteError(fact, images) from error
            # the other processes may have raised something else, so nothing can be gathered from them
            raise NotFiniteError(f"{fact} on rank {self.processes.rank}; its part of the batch was images {images}") from error

    def _choose_chunk(self, images: Any) -> int:
        """Chunk size that fits on every process, 0 for the whole batch."""
        items = num_rows(images)
        least = -self.processes.all_max(-items)
        if least <= PROBE and is_sharded(self._trained):
            return 0  # either all processes measure, or none
        fitting = -self.processes.all_max(-(choose_chunk(self._large, images) or items))
        return 0 if fitting >= least else fitting

    def _shrink(self, step: int, items: int) -> str:
        live = live_batch_norms(self.model)
        remedy = "CUDA graphs are dropped" if self._large.run_eagerly() else None if live else self._large.shrink(items)
        if remedy is None:
            reason = (
                f"and batch normalisation in training mode ({live[0]}, ...) does not allow smaller chunks: "
                "use a smaller batch or --batch-norm frozen"
                if live
                else "even one image at a time: use a smaller batch, smaller images or a smaller model"
            )
            raise OutOfMemoryError(f"out of memory at step {step + 1} with {items} images, {reason}")
        return remedy


def make_optimizer(groups: Sequence[dict[str, Any]], settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of `settings`; parameter groups may have their own `lr` and `weight_decay`.

    The learning rate of each group is also stored as `initial_lr`, which `set_learning_rate` multiplies.
    """
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("fit: param_groups must hold at least one parameter that requires a gradient, got none")
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if all(p.is_cuda and p.is_floating_point() for group in groups for p in group["params"]):
        common["fused"] = True  # one launch instead of one per tensor
    if settings.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=settings.momentum, **common)
    else:
        kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, betas=settings.betas, eps=settings.eps, **common)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets each group's learning rate to `factor` times its initial one."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def schedule(settings: TrainSettings, steps_per_epoch: int) -> Factor:
    """Factor of all learning rates at a step, counted from 0; a pure function, so a resumed run has nothing to restore.

    "step" and "exponential" change between epochs; "cosine" falls from 1 after warm-up to 0 at the end of the run. During
    warm-up, step s of w is multiplied by (s + 1) / w.
    """
    warmup, total = settings.total_warmup_steps(steps_per_epoch), settings.total_steps(steps_per_epoch)

    def shape(step: int) -> float:
        epoch = step // steps_per_epoch
        if settings.schedule == "step":
            return float(settings.gamma ** bisect.bisect_right(settings.milestones, epoch))
        if settings.schedule == "exponential":
            return float(settings.gamma**epoch)
        if settings.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / (total - warmup)))
        return 1.0

    return lambda step: shape(step) * (min(1.0, (step + 1) / warmup) if warmup else 1.0)
