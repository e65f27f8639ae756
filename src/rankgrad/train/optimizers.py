"""The optimizer, and the learning rate as a pure function of the step, so that a resumed run has nothing to restore."""

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rankgrad.train.settings import TrainSettings

Factor = Callable[[int], float]


def make_optimizer(groups: Sequence[dict[str, Any]], settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of `settings` over parameter groups, which may bring their own `lr` and `weight_decay`.

    Each group's learning rate is also noted as `initial_lr`, which `set_learning_rate` multiplies.
    """
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("fit: groups must hold at least one parameter that requires a gradient, got none")
    common: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if all(p.is_cuda and p.is_floating_point() for group in groups for p in group["params"]):
        common["fused"] = True  # one launch instead of one for each tensor
    if settings.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=settings.momentum, **common)
    else:
        kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, betas=settings.betas, eps=settings.eps, **common)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Each group gets `factor` of the learning rate it started with."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def schedule(settings: TrainSettings, steps_per_epoch: int) -> Factor:
    """What multiplies all learning rates at a step, counted from 0.

    "step" and "exponential" change between epochs; "cosine" falls from 1 after warm-up to 0 at the end of the run.
    Warm-up multiplies on top: step s of w has (s + 1) / w.
    """
    warmup = settings.warmup_steps or round(settings.warmup_epochs * steps_per_epoch)
    total = settings.total_steps(steps_per_epoch)
    if warmup >= total and warmup:
        raise ValueError(f"fit: warm-up must be shorter than the run of {total} steps, got {warmup} steps")

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
