"""Settings check themselves; learning rates follow closed forms."""

import dataclasses
import math

import pytest
import torch

from rankgrad.train.settings import MUTABLE_ON_RESUME, TrainSettings
from rankgrad.train.train_step import make_optimizer, schedule, set_learning_rate

PER_EPOCH = 7


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"epochs": 5}, lambda s: 1.0),
        ({"epochs": 9, "schedule": "step", "milestones": (2, 5), "gamma": 0.3}, lambda s: 0.3 ** ((s >= 14) + (s >= 35))),
        ({"epochs": 5, "schedule": "exponential", "gamma": math.exp(-0.01)}, lambda s: math.exp(-0.01 * (s // 7))),
        ({"steps": 30, "schedule": "cosine"}, lambda s: 0.5 + 0.5 * math.cos(math.pi * s / 30)),
        ({"epochs": 5, "warmup_steps": 4}, lambda s: min(1, (s + 1) / 4)),
        ({"epochs": 5, "warmup_epochs": 0.5}, lambda s: min(1, (s + 1) / 4)),
        ({"epochs": 1, "warmup_epochs": 1.0}, lambda s: min(1, (s + 1) / 3)),
        ({"epochs": 1, "steps": 4, "warmup_epochs": 6.0}, lambda s: min(1, (s + 1) / 2)),
        ({"epochs": 1, "steps": 1, "warmup_epochs": 1.0}, lambda s: 1.0),
        (
            {"epochs": 5, "steps": 24, "schedule": "cosine", "warmup_steps": 4},
            lambda s: (s + 1) / 4 if s < 4 else 0.5 + 0.5 * math.cos(math.pi * (s - 4) / 20),
        ),
    ],
)
def test_schedules_follow_their_closed_form(settings, wanted):
    factor = schedule(TrainSettings(**settings), PER_EPOCH)
    total = TrainSettings(**settings).total_steps(PER_EPOCH)
    assert [factor(step) for step in range(total)] == pytest.approx([wanted(step) for step in range(total)], abs=1e-12)


def test_schedules_agree_with_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3)
    ours = schedule(TrainSettings(epochs=9, schedule="step", milestones=(2, 5), gamma=0.3), PER_EPOCH)
    for epoch in range(9):
        assert ours(epoch * PER_EPOCH) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_groups_keep_their_proportions():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5}, {"params": [torch.nn.Parameter(torch.zeros(1))]}]
    optimizer = make_optimizer(groups, TrainSettings(epochs=1, lr=0.1, optimizer="sgd"))
    for factor in (1.0, 0.3, 0.5):
        set_learning_rate(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * factor, 0.1 * factor])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "give epochs or steps, got neither"),
        ({"epochs": -1}, ValueError, "epochs must be at least 0, got -1"),
        ({"epochs": 1.5}, TypeError, "epochs must be an integer, got 1.5"),
        ({"epochs": 1, "optimizer": "lion"}, ValueError, "optimizer must be one of 'adam', 'adamw', 'sgd', got 'lion'"),
        ({"epochs": 1, "precision": "fp8"}, ValueError, "precision must be one of 'float32', 'bf16', 'fp16', got 'fp8'"),
        ({"epochs": 1, "lr": 0}, ValueError, "lr must be a finite number above 0, got 0"),
        ({"epochs": 1, "schedule": "step"}, ValueError, "schedule.*step.* needs .*milestones"),
        ({"epochs": 1, "milestones": (3,)}, ValueError, "milestones.*constant"),
        ({"epochs": 9, "schedule": "step", "milestones": (3, 2)}, ValueError, r"`milestones` must ascend, got 3, 2"),
        (
            {"epochs": 1, "warmup_steps": 1, "warmup_epochs": 1},
            ValueError,
            "in steps or in epochs, got 1 and 1",
        ),
        ({"epochs": 1, "betas": (0.9, 1.0)}, ValueError, r"betas must be two numbers in \[0, 1\)"),
        ({"epochs": 1, "momentum": 1.0}, ValueError, "momentum must be below 1"),
        ({"epochs": 1, "chunk_size": "half"}, TypeError, "chunk_size must be an integer, got 'half'"),
        ({"epochs": 1, "keep": -1}, ValueError, "keep must be at least 0"),
        ({"epochs": 1, "log_every": 0}, ValueError, "log_every must be at least 1"),
    ],
)
def test_settings_check_themselves(settings, error, message):
    with pytest.raises(error, match=message):
        TrainSettings(**settings)


def test_every_field_is_compared_unless_it_is_free_to_change():
    base = TrainSettings(epochs=5, schedule="step", milestones=(1,))
    others = {
        "epochs": 4, "steps": 9, "optimizer": "sgd", "lr": 1.0, "weight_decay": 1.0, "betas": (0.5, 0.5), "eps": 1.0,
        "momentum": 0.5, "schedule": "cosine", "milestones": (2,), "gamma": 0.5, "warmup_steps": 1, "warmup_epochs": 1.0,
        "clip": 1.0, "precision": "bf16", "compile": True, "channels_last": False, "metric": "mAP", "seed": 1,
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(TrainSettings)}
    assert others.keys() | MUTABLE_ON_RESUME == fields
    assert not others.keys() & MUTABLE_ON_RESUME
    for name, value in others.items():
        changes = {name: value, **({"milestones": ()} if name == "schedule" else {})}
        differences = dataclasses.replace(base, **changes).differences(base.as_dict())
        assert any(difference.startswith(f"{name} was ") for difference in differences), name
    assert base.differences(base.as_dict()) == []
    assert dataclasses.replace(base, epochs=6).differences(base.as_dict()) == []
