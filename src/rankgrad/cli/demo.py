"""Train a small network on the built-in glyphs, once with each of several losses and from the same initial weights.

Training and test characters are disjoint: the table shows how well the network tells apart characters that it never saw.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import rankgrad as rg
from rankgrad._messages import format_duration, plural, table
from rankgrad.data.glyphs import Glyphs, load_glyphs
from rankgrad.data.samplers import ClassBalanced
from rankgrad.data.seeds import generator
from rankgrad.eval import Result
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings

CLASSES_PER_BATCH, PER_CLASS = 96, 4
LEARNING_RATE = 4e-3
METRICS = ("R@1", "R@10", "mAP")

# images embedded at once
CHUNK = 512


class GlyphBatches:
    """Class-balanced, augmented batches for `fit`; what step s of epoch e holds is a function of (seed, e, s)."""

    def __init__(self, glyphs: Glyphs, seed: int) -> None:
        classes = min(CLASSES_PER_BATCH, len(glyphs.class_names))
        self.sampler = ClassBalanced(glyphs.labels, classes * PER_CLASS, PER_CLASS, seed=seed)
        self.glyphs, self.seed = glyphs, seed

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for step, batch in enumerate(self.sampler):
            if step >= start:
                images = as_input(self.glyphs.images[batch])
                images = augment(images, generator(self.seed, "augment", self.sampler.epoch, step))
                yield step, torch.tensor(batch), images, torch.from_numpy(self.glyphs.labels[batch])


def small_embedder() -> nn.Module:
    """A network of 224,000 weights, [N, 1, 32, 32] -> [N, 64]. With group norm an embedding does not depend on its batch."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 64))


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, scale and shift every image: standard deviations 0.1 rad, 10% and 5% of half the image."""
    deviation = torch.tensor([0.1, 0.1, 0.05, 0.05])
    angle, zoom, right, down = (torch.randn(len(images), 4, generator=generator) * deviation).unbind(dim=1)
    cos, sin = (1 + zoom) * angle.cos(), (1 + zoom) * angle.sin()
    maps = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def as_input(images: NDArray[np.uint8]) -> Tensor:
    """[N, H, W] bytes -> [N, 1, H, W] floats in [0, 1]."""
    return torch.from_numpy(images).unsqueeze(1) / 255


@torch.no_grad()
def evaluate(model: nn.Module, glyphs: Glyphs) -> Result:
    """Every image in turn is the query against all others."""
    parts = [model(as_input(images)) for images in np.split(glyphs.images, range(CHUNK, len(glyphs.images), CHUNK))]
    return rg.evaluate(torch.cat(parts), torch.from_numpy(glyphs.labels), ks=(1, 10))


def train(model: nn.Module, loss: nn.Module, data: GlyphBatches, test_set: Glyphs, folder: Path, steps: int) -> Result:
    """Train `model` in place and evaluate it."""
    settings = TrainSettings(
        steps=steps,
        optimizer="adamw",
        lr=LEARNING_RATE,
        weight_decay=0.01,
        schedule="cosine",
        warmup_steps=round(0.3 * steps),
        channels_last=False,
        checkpoint_every=steps,
        log_every=max(1, steps // 10),
        seed=data.seed,
    )
    fit(model, loss, data, settings, folder)
    return evaluate(model.eval(), test_set)


def main(arguments: list[str] | None = None) -> int:
    """Train once per loss and print one table."""
    parser = argparse.ArgumentParser(prog="rankgrad demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps per loss (default: %(default)s)")
    parser.add_argument("--classes", type=int, help="use only this many classes of each split, for a quick look")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and augmentation (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("classes", 2), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")

    train_set, test_set = (first_classes(load_glyphs(split, seed=options.seed), options.classes) for split in ("train", "test"))
    print(f"glyphs: {describe(train_set)} to train on, {describe(test_set)} to test on, no character in both", flush=True)
    torch.manual_seed(options.seed)
    untrained = small_embedder()
    rows = [row("untrained", evaluate(untrained, test_set))]
    with tempfile.TemporaryDirectory(prefix="rankgrad-demo-") as folder:
        for loss in (rg.RecallAtKLoss(), rg.SmoothAPLoss(), rg.FastAPLoss(), rg.RamboRecallLoss()):
            name, model, start = type(loss).__name__, copy.deepcopy(untrained), time.perf_counter()
            print(f"{name}: {plural(options.steps, 'step')}", flush=True)
            result = train(model, loss, GlyphBatches(train_set, options.seed), test_set, Path(folder, name), options.steps)
            rows.append(row(name, result, format_duration(time.perf_counter() - start)))
    print(f"\n{table(['test characters', *METRICS, 'time'], rows)}")
    return 0


def row(name: str, result: Result, duration: str = "") -> list[str]:
    """A line of the table, in percent."""
    return [name, *(f"{100 * result[metric]:.1f}" for metric in METRICS), duration]


def first_classes(glyphs: Glyphs, classes: int | None) -> Glyphs:
    """The part of `glyphs` with its first `classes` classes."""
    if classes is None:
        return glyphs
    kept = glyphs.labels < classes
    return replace(
        glyphs,
        images=glyphs.images[kept],
        labels=glyphs.labels[kept],
        categories=glyphs.categories[kept],
        class_names=glyphs.class_names[:classes],
    )


def describe(glyphs: Glyphs) -> str:
    """`1,300 characters (10,400 drawings)`."""
    return f"{plural(len(glyphs.class_names), 'character')} ({plural(len(glyphs.images), 'drawing')})"
