"""One optimizer step, however many chunks it takes and however often memory runs out on the way."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.runs.step_cost import PROBE, choose_chunk
from rankgrad.train.checkpoints import unwrapped
from rankgrad.train.gradient_check import live_batch_norms
from rankgrad.train.graphed_model import GraphedPass
from rankgrad.train.large_batch import LargeBatch, len_of
from rankgrad.train.optimizers import make_optimizer, schedule, set_learning_rate
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.protocols import Gathering, Loss, undivided
from rankgrad.train.settings import AUTOCAST, TrainSettings
from rankgrad.train.sharding import divided_like, fetch, give, is_divided, refuse_local_statistics, spread, whole
from rankgrad.train.snapshot import LossState
from rankgrad.train.watch import FiniteWatch, NotFiniteError

# a scaled loss whose scale has fallen this far overflows at every step
LEAST_SCALE = 2.0**-10


class OutOfMemoryError(RuntimeError):
    """A batch does not fit in memory however it is cut."""


@dataclass(frozen=True)
class Taken:
    """A step that was taken, by all processes together; nobody has waited for its tensors."""

    loss: Tensor
    gradient: Tensor
    lr: float
    chunk_size: int
    embeddings: Tensor
    labels: Tensor


class Stepper:
    """Model, loss and optimizer, and all of their state but the model's.

    Args:
        model: moved to `device`.
        loss: moved too, if it is a module.
        settings: optimizer, schedule, precision, chunks.
        groups: parameter groups, by default all parameters of model and loss.
        steps_per_epoch: of the schedule.
        device: where to train.
        processes: those that take each step together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: TrainSettings,
        groups: Sequence[dict[str, Any]] | None,
        *,
        steps_per_epoch: int,
        device: torch.device,
        processes: Processes = ALONE,
    ) -> None:
        if processes.size > 1 and not isinstance(loss, Gathering):
            raise ValueError(
                f"fit: with {processes.size} processes the loss must rank against all of them: wrap it in DistributedRankLoss"
            )
        if processes.size > 1 and settings.parallel == "fsdp" and settings.precision == "fp16":
            raise ValueError("fit: parallel 'fsdp' has no scaled loss for precision 'fp16': train with 'bf16', or with 'ddp'")
        self.processes = processes
        self.model, self.loss, self.settings, self.device = model, loss, settings, device
        model.to(device)
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)
        if isinstance(loss, nn.Module):
            loss.to(device).train()
        if groups is None:
            groups = [{"params": [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]}]
        if settings.compile:
            model.compile()
        self._trained, groups = spread(model, groups, settings.parallel, processes)
        self.optimizer = make_optimizer(groups, settings)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._factor = schedule(settings, steps_per_epoch)
        self._scaler = torch.amp.GradScaler(device.type) if settings.precision == "fp16" else None
        # the overflow of a scaled gradient is the scaler's business
        self._watch = FiniteWatch(gradients=self._scaler is None)
        self._chunk_is_chosen = settings.chunk_size != "auto"
        chunk_size = 0 if settings.chunk_size == "auto" else settings.chunk_size
        autocast = AUTOCAST[settings.precision]
        self._large = LargeBatch(self._trained, loss, chunk_size, settings.keep, autocast, processes=processes)
        graphs = settings.cuda_graphs and not settings.compile and device.type == "cuda" and processes.size == 1
        self._graphed = GraphedPass(model, autocast) if graphs else None

    def train(self) -> None:
        """Puts the network into training mode."""
        self.model.train()
        self._trained.train()
        if self.processes.size > 1:
            refuse_local_statistics(self._trained)

    def release(self) -> None:
        """Leaves the model as it was handed in: a recorded pass belongs to these weights and this place of them."""
        if self._graphed is not None:
            self._graphed.give_up()

    def fetch(self) -> None:
        """Brings the weights to the model that was handed in; all processes must call it."""
        fetch(self.model, self._trained)

    def weights(self) -> dict[str, Any]:
        """Of the network, undivided; all processes must call it."""
        weights: dict[str, Any] = whole(unwrapped(self._trained).state_dict())
        return weights

    def take(self, step: int, seed: int, indices: Tensor, images: Any, labels: Tensor, *, warn: Callable[..., None]) -> Taken:
        """Takes step `step`, counted from 0, with torch's generators at `seed`."""
        set_learning_rate(self.optimizer, self._factor(step))
        if self.settings.channels_last and isinstance(images, Tensor) and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        labels = labels.to(self.device, non_blocking=True)
        value = self._gradients(step, seed, images, labels, warn)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        length = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip or math.inf))
        self._watch.see(step + 1, indices, value, length)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        gathered = self.loss.gathered if isinstance(self.loss, Gathering) else None
        embeddings, all_labels = gathered or (self._large.embeddings, labels)
        return Taken(
            loss=value,
            gradient=length,
            lr=self.optimizer.param_groups[0]["lr"],
            chunk_size=self._large.chunk_size or len(labels),
            embeddings=embeddings,
            labels=all_labels,
        )

    def settle(self) -> None:
        """Waits until all steps so far are known to have been finite."""
        self._watch.settle()

    def scale(self) -> float | None:
        """Of the loss under fp16, which waits for the device; raises where it has collapsed."""
        if self._scaler is None:
            return None
        scale = float(self._scaler.get_scale())
        if scale < LEAST_SCALE:
            raise NotFiniteError(
                f"gradients overflow float16 at every step (the loss scale fell to {scale:.1e}): train with precision 'bf16' "
                "or 'float32'"
            )
        return scale

    def state(self) -> dict[str, Any]:
        """The same whichever number of processes asks for it; all of them must."""
        loss = undivided(self.loss)
        return {
            "optimizer": whole(self.optimizer.state_dict()),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "loss": loss.state_dict() if isinstance(loss, nn.Module) else None,
            "chunk_size": self._large.chunk_size if self._chunk_is_chosen else None,
        }

    def restore(self, state: Mapping[str, Any], *, with_chunk_size: bool) -> None:
        give(self.model, self._trained)
        self.optimizer.load_state_dict(divided_like(state["optimizer"], self.parameters))
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        loss = undivided(self.loss)
        if isinstance(loss, nn.Module):
            loss.load_state_dict(state["loss"])
        if with_chunk_size and state["chunk_size"] is not None:
            self._large.chunk_size, self._chunk_is_chosen = state["chunk_size"], True

    def _gradients(self, step: int, seed: int, images: Any, labels: Tensor, warn: Callable[..., None]) -> Tensor:
        """The loss, its gradients left in the parameters; a pass that runs out of memory is repeated in smaller chunks."""
        if not self._chunk_is_chosen:
            self._large.chunk_size = self._chosen_chunk(images)
            self._chunk_is_chosen = True
        if self._graphed is not None:
            whole = self._large.chunk_size in (0, len_of(images))
            trouble = self._graphed.before_step(images, whole=whole)
            if trouble is not None:
                warn("the network could not be recorded as CUDA graphs and runs layer by layer", detail=trouble)
        memory = LossState.of(self.loss)
        while True:
            torch.manual_seed(seed)
            try:
                return self._large(images, labels, scale=1.0 if self._scaler is None else self._scaler.scale)
            except torch.OutOfMemoryError as error:
                detail = str(error).partition("\n")[0]
            # here, where the failed pass is no longer held by its traceback
            for parameter in self.parameters:
                parameter.grad = None
            memory.restore()
            remedy = self._shrunk(step, len_of(images))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            warn(f"out of memory at step {step + 1}, which is repeated: {remedy}", detail=detail)

    def _chosen_chunk(self, images: Any) -> int:
        """What fits on every process, 0 for all."""
        items = len_of(images)
        least = -self.processes.largest(-items)
        if least <= PROBE and is_divided(self._trained):
            return 0  # all processes look for a chunk, or none
        fitting = -self.processes.largest(-(choose_chunk(self._large, images) or items))
        return 0 if fitting >= least else fitting

    def _shrunk(self, step: int, items: int) -> str:
        self.release()
        live = live_batch_norms(self.model)
        remedy = None if live else self._large.shrink(items)
        if remedy is None:
            reason = (
                f"and batch normalisation in training mode ({live[0]}, ...) does not allow smaller chunks: "
                "use a smaller batch or batch_norm='frozen'"
                if live
                else "even one image at a time: use a smaller batch, smaller images or a smaller model"
            )
            raise OutOfMemoryError(f"out of memory at step {step + 1} with {items} images, {reason}")
        return remedy
