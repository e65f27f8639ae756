"""A training run of a second or two that still has everything a run can lose: what kill and soak start."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import fake_datasets

# the command `rankgrad`, also where its script is not installed
COMMAND = (sys.executable, "-c", "import sys; from rankgrad.cli import main; sys.exit(main())")

# each has another kind of state in its checkpoints
VARIANTS: Mapping[str, Sequence[str]] = {
    "memory": ("--loss", "rambo-recall", "--memory", "2", "--chunk-size", "5", "--keep", "1", "--lr", "1e-4"),
    "simix": ("--loss", "recall-at-k", "--simix", "--optimizer", "sgd", "--lr", "0.01"),
    # a small rate: another number of processes rounds otherwise, and a large one would show that after twenty steps
    "schedule": (
        *("--loss", "fastap", "--schedule", "step", "--milestones", "3,7", "--warmup-steps", "5", "--clip", "0.5"),
        *("--lr", "1e-4"),
    ),
}
SMALL = (
    *("--trunk", "convnet", "--weights", "none", "--size", "24", "--dim", "16", "--batch-norm", "frozen"),
    *("--batch-size", "24", "--per-class", "3", "--validation", "half", "--evaluate-every", "1"),
    *("--log-every", "1", "--device", "cpu", "--cache", "none", "--no-tensorboard"),
)


def make_data(folder: Path, *, classes: int = 48) -> Path:
    """Striped images, so many classes that a few epochs do not solve them and the best checkpoint changes."""
    return fake_datasets.build("folder", folder, classes=classes, per_class=4)


def arguments(data: Path, out: Path, variant: str, *, epochs: int, checkpoint_every: int) -> list[str]:
    """Of `rankgrad` for a new run."""
    limits = ("--epochs", str(epochs), "--checkpoint-every", str(checkpoint_every))
    return ["train", "--data", str(data), "--out", str(out), *SMALL, *limits, *VARIANTS[variant]]
