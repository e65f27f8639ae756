"""What decides a training run besides model, loss and data."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from rankgrad._checks import check_choice, check_count, check_not_negative, check_positive
from rankgrad.train.sharding import PARALLELS, Parallel

Optimizer: TypeAlias = Literal["adam", "adamw", "sgd"]
Schedule: TypeAlias = Literal["constant", "step", "cosine", "exponential"]
Precision: TypeAlias = Literal["float32", "bf16", "fp16"]
Keep: TypeAlias = int | Literal["auto"]

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "step", "cosine", "exponential")
AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# what a resumed run may change: it decides how often something is written or shown, or how a step is cut, but not
# which step it is
FREE_TO_CHANGE = frozenset(
    {
        "cuda_graphs",
        "log_every",
        "checkpoint_every",
        "evaluate_every",
        "patience",
        "keep_last",
        "chunk_size",
        "keep",
        "parallel",
        "tensorboard",
        "wandb",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of `fit`, checked when they are made.

    Attributes:
        epochs: passes over the batches, 0 for no limit. One of `epochs` and `steps` is above 0; of two the first to be
            reached ends the run.
        steps: optimizer steps, one for each batch, 0 for no limit.
        optimizer: "adam", "adamw" or "sgd".
        lr: learning rate of the parameter groups that bring none.
        weight_decay: the same for weight decay.
        betas: of Adam and AdamW.
        eps: of Adam and AdamW.
        momentum: of SGD.
        schedule: what multiplies all learning rates: "constant", "step" (`gamma` at each of the `milestones`), "cosine"
            (over the whole run, by step), "exponential" (`gamma` every epoch).
        milestones: epochs at which "step" multiplies.
        gamma: the factor of "step" and "exponential".
        warmup_steps: steps over which all learning rates grow linearly from 0.
        warmup_epochs: the same in epochs, fractions allowed; one of the two.
        clip: longest gradient over all parameters together, 0 for any length.
        precision: "float32", or autocast to "bf16" or "fp16" (the latter with a scaled loss).
        compile: `torch.compile` for the model.
        cuda_graphs: record the model's pass over a batch of one chunk on a GPU, so that the host does not launch every layer.
        channels_last: memory format of model and images.
        chunk_size: images that go through the model at once; 0 for the whole batch, "auto" for what memory allows.
        keep: chunks whose first forward pass is kept for the backward pass, see `LargeBatch`.
        evaluate_every: epochs between evaluations, 0 for none but the one at the end.
        metric: name among an evaluator's metrics that decides on the best checkpoint, larger is better.
        patience: evaluations without a better metric after which the run ends, 0 for never.
        log_every: steps between journal entries with diagnostics.
        checkpoint_every: steps between checkpoints, 0 for the end of every epoch.
        keep_last: checkpoints that stay besides the best one.
        seed: of all randomness.
        parallel: with several processes, "ddp" (each has a copy of the model) or "fsdp" (parameters, gradients and optimizer
            state are divided among them, FSDP2).
        tensorboard: "auto" writes curves where the package is installed, "on" insists, "off" does not.
        wandb: project at Weights & Biases, empty for none.
    """

    epochs: int = 0
    steps: int = 0
    optimizer: Optimizer = "adam"
    lr: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: Schedule = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.3
    warmup_steps: int = 0
    warmup_epochs: float = 0.0
    clip: float = 0.0
    precision: Precision = "float32"
    compile: bool = False
    cuda_graphs: bool = True
    channels_last: bool = True
    chunk_size: int | Literal["auto"] = 0
    keep: Keep = "auto"
    evaluate_every: int = 1
    metric: str = "R@1"
    patience: int = 0
    log_every: int = 10
    checkpoint_every: int = 0
    keep_last: int = 2
    seed: int = 0
    parallel: Parallel = "ddp"
    tensorboard: Literal["auto", "on", "off"] = "auto"
    wandb: str = ""

    def __post_init__(self) -> None:
        caller = type(self).__name__
        for name in ("epochs", "steps", "warmup_steps", "evaluate_every", "patience", "checkpoint_every", "seed"):
            check_count(getattr(self, name), name=name, caller=caller, least=0)
        for name in ("log_every", "keep_last"):
            check_count(getattr(self, name), name=name, caller=caller)
        for name in ("lr", "eps", "gamma"):
            check_positive(getattr(self, name), name=name, caller=caller)
        for name in ("weight_decay", "momentum", "warmup_epochs", "clip"):
            check_not_negative(getattr(self, name), name=name, caller=caller)
        check_choice(self.optimizer, OPTIMIZERS, name="optimizer", caller=caller)
        check_choice(self.schedule, SCHEDULES, name="schedule", caller=caller)
        check_choice(self.precision, AUTOCAST, name="precision", caller=caller)
        check_choice(self.parallel, PARALLELS, name="parallel", caller=caller)
        check_choice(self.tensorboard, ("auto", "on", "off"), name="tensorboard", caller=caller)
        for name in ("chunk_size", "keep"):
            if getattr(self, name) != "auto":
                check_count(getattr(self, name), name=name, caller=caller, least=0)
        self._check_combinations(caller)

    def _check_combinations(self, caller: str) -> None:
        if not self.epochs and not self.steps:
            raise ValueError(f"{caller}: epochs or steps must be above 0, got neither")
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError(
                f"{caller}: give the warm-up in steps or in epochs, got {self.warmup_steps} and {self.warmup_epochs:g}"
            )
        if self.schedule == "step" and not self.milestones:
            raise ValueError(f"{caller}: `schedule='step'` needs `milestones`, the epochs at which the learning rate falls")
        if self.schedule != "step" and self.milestones:
            raise ValueError(f"{caller}: `milestones` are for `schedule='step'`, got `schedule={self.schedule!r}`")
        for milestone in self.milestones:
            check_count(milestone, name="milestones", caller=caller)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"{caller}: `milestones` must ascend, got {', '.join(map(str, self.milestones))}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"{caller}: betas must be two numbers in [0, 1), got {self.betas!r}")
        if self.momentum >= 1:
            raise ValueError(f"{caller}: momentum must be below 1, got {self.momentum!r}")

    def total_steps(self, steps_per_epoch: int) -> int:
        limits = [limit for limit in (self.steps, self.epochs * steps_per_epoch) if limit]
        return min(limits)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON knows them: tuples are lists."""
        return {
            field.name: list(value) if isinstance(value := getattr(self, field.name), tuple) else value
            for field in dataclasses.fields(self)
        }

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What stands against continuing a run that was started with the settings `saved`, one phrase each."""
        differences = []
        for name, value in self.as_dict().items():
            before = saved.get(name)
            if name in FREE_TO_CHANGE or value == before:
                continue
            # a longer run is the same run as far as the first one went, unless its schedule stretches with it
            lengthens = name in ("epochs", "steps") and self.schedule != "cosine"
            if lengthens and before is not None and (value == 0 or 0 < before < value):
                continue
            differences.append(f"{name} was {before!r} and is {value!r}")
        return differences
