"""Settings of a training run: everything but model, loss and data."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from rankgrad._checks import check_choice, check_count, check_not_negative, check_positive
from rankgrad.train.sharding import Parallel

Optimizer: TypeAlias = Literal["adam", "adamw", "sgd"]
Schedule: TypeAlias = Literal["constant", "step", "cosine", "exponential"]
Precision: TypeAlias = Literal["float32", "bf16", "fp16"]
Keep: TypeAlias = int | Literal["auto"]

AUTOCAST: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# settings that a resumed run may change: how often something is written or shown, or how a step is computed, but not its result
MUTABLE_ON_RESUME = frozenset(
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
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of `fit`, validated on construction.

    Attributes:
        epochs: passes over the batches. Set `epochs`, `steps` or both; the first limit reached ends the run. 0 epochs, without
            `steps`, train nothing: the untrained model is evaluated and saved.
        steps: optimizer steps, one per batch, 0 for no limit.
        optimizer: "adam", "adamw" or "sgd".
        lr: learning rate of parameter groups without their own.
        weight_decay: weight decay of parameter groups without their own.
        betas: of Adam and AdamW.
        eps: of Adam and AdamW.
        momentum: of SGD.
        schedule: what multiplies all learning rates: "constant", "step" (`gamma` at each of the `milestones`), "cosine"
            (over the whole run, by step), "exponential" (`gamma` every epoch).
        milestones: epochs at which "step" multiplies.
        gamma: the factor of "step" and "exponential".
        warmup_steps: steps over which all learning rates grow linearly from 0.
        warmup_epochs: the same in epochs, fractions allowed; one of the two. Half of a run that is no longer than that.
        clip: largest gradient norm over all parameters, 0 for no clipping.
        precision: "float32", or autocast to "bf16" or "fp16" (the latter with a scaled loss).
        compile: compile the model with `torch.compile`.
        cuda_graphs: record the model's passes as CUDA graphs, so that the host does not launch every layer.
        channels_last: memory format of model and images.
        chunk_size: images per forward pass; 0 for the whole batch, "auto" for what fits in memory.
        keep: chunks whose activations are kept from the first pass for the backward pass, see `LargeBatch`.
        evaluate_every: epochs between evaluations, 0 for one at the end only.
        metric: metric of the evaluator that selects the best checkpoint; larger is better.
        patience: stop after this many evaluations without improvement, 0 for never.
        log_every: steps between journal entries with diagnostics.
        checkpoint_every: steps between checkpoints; 0: after an epoch, for at most a tenth of the time.
        keep_last: number of checkpoints kept besides the best.
        seed: of all randomness.
        parallel: with several processes, "ddp" (each has a copy of the model) or "fsdp" (parameters, gradients and optimizer
            state are sharded, FSDP2).
    """

    epochs: int | None = None
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

    def __post_init__(self) -> None:
        caller = type(self).__name__
        if self.epochs is not None:
            check_count(self.epochs, name="epochs", caller=caller, least=0)
        for name in ("steps", "warmup_steps", "evaluate_every", "patience", "checkpoint_every", "seed"):
            check_count(getattr(self, name), name=name, caller=caller, least=0)
        for name in ("log_every", "keep_last"):
            check_count(getattr(self, name), name=name, caller=caller)
        for name in ("lr", "eps", "gamma"):
            check_positive(getattr(self, name), name=name, caller=caller)
        for name in ("weight_decay", "momentum", "warmup_epochs", "clip"):
            check_not_negative(getattr(self, name), name=name, caller=caller)
        check_choice(self.optimizer, get_args(Optimizer), name="optimizer", caller=caller)
        check_choice(self.schedule, get_args(Schedule), name="schedule", caller=caller)
        check_choice(self.precision, get_args(Precision), name="precision", caller=caller)
        check_choice(self.parallel, get_args(Parallel), name="parallel", caller=caller)
        for name in ("chunk_size", "keep"):
            if getattr(self, name) != "auto":
                check_count(getattr(self, name), name=name, caller=caller, least=0)
        self._check_combinations(caller)

    def _check_combinations(self, caller: str) -> None:
        if self.epochs is None and not self.steps:
            raise ValueError(f"{caller}: give epochs or steps, got neither")
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
        """Optimizer steps of the whole run."""
        limits = [limit for limit in (self.steps, (self.epochs or 0) * steps_per_epoch) if limit]
        return min(limits, default=0)

    def total_warmup_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps over which learning rates grow."""
        warmup = self.warmup_steps or round(self.warmup_epochs * steps_per_epoch)
        total = self.total_steps(steps_per_epoch)
        if not total or warmup < total:
            return warmup
        if self.warmup_steps:
            raise ValueError(
                f"fit: warm-up must be shorter than the run of {total} steps, got {warmup} steps: lower warmup_steps or train "
                "for longer"
            )
        return total // 2

    def as_dict(self) -> dict[str, Any]:
        """All fields in JSON types: tuples become lists."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {"epochs": self.epochs or 0}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def differences(self, saved: Mapping[str, Any], *, changes_with_length: bool = False) -> list[str]:
        """Why a run started with the settings `saved` cannot be continued with these, one phrase per setting.

        Args:
            saved: from `as_dict`.
            changes_with_length: whether something else than the learning rate follows a schedule over the whole run.
        """
        differences = []
        for name, value in self.as_dict().items():
            before = saved.get(name)
            if name in MUTABLE_ON_RESUME or value == before:
                continue
            # a longer run has the same first steps, unless its schedule depends on the length
            lengthens = name in ("epochs", "steps") and self.schedule != "cosine" and not changes_with_length
            if lengthens and before is not None and (value == 0 or 0 < before < value):
                continue
            differences.append(f"{name} was {before!r} and is {value!r}")
        return differences
