"""The demo: a small network learns the built-in glyphs, once with each of several losses, from the same first weights.

Training and test characters are disjoint: the table says how well the network tells characters apart that it never saw.
"""

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import rankgrad as rg
from rankgrad.data.glyphs import Glyphs, load_glyphs

CLASSES_PER_BATCH, IMAGES_PER_CLASS = 96, 4
LEARNING_RATE = 4e-3

# images embedded or scored at once: 512 queries against 10,000 images are 20 MB of scores
CHUNK = 512


@dataclass(frozen=True)
class Quality:
    """Percentages over all test images, each in turn the query against all others."""

    recall_at_1: float
    recall_at_10: float
    mean_average_precision: float


def small_embedder() -> nn.Module:
    """224,000 weights, [N, 1, 32, 32] -> [N, 64]. With group norm an embedding does not depend on its batch."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 64))


def train(model: nn.Module, loss: nn.Module, glyphs: Glyphs, *, steps: int, seed: int) -> None:
    """Change `model` in place: AdamW and one cycle of the learning rate over class-balanced, augmented batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step, batch in enumerate(balanced_batches(glyphs.labels, steps, seed), start=1):
        images = augment(as_input(glyphs.images[batch]), generator)
        value = loss(model(images), torch.from_numpy(glyphs.labels[batch]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        show_progress(type(loss).__name__, step, steps, value.item(), time.perf_counter() - start)


def balanced_batches(labels: NDArray[np.int64], steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Indices of `steps` batches: distinct classes (all, if there are fewer than wanted), distinct images of each."""
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(steps):
        classes = rng.choice(len(members), min(CLASSES_PER_BATCH, len(members)), replace=False)
        yield np.concatenate([rng.choice(members[c], IMAGES_PER_CLASS, replace=False) for c in classes])


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, zoom and shift every image a little: standard deviations 0.1 rad, 10% and 5% of half the image."""
    deviation = torch.tensor([0.1, 0.1, 0.05, 0.05])
    angle, zoom, right, down = (torch.randn(len(images), 4, generator=generator) * deviation).unbind(dim=1)
    cos, sin = (1 + zoom) * angle.cos(), (1 + zoom) * angle.sin()
    maps = torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def as_input(images: NDArray[np.uint8]) -> Tensor:
    """[N, H, W] bytes -> [N, 1, H, W] floats in [0, 1]."""
    return torch.from_numpy(images).unsqueeze(1) / 255


def evaluate(model: nn.Module, glyphs: Glyphs) -> Quality:
    """Rank all images for each image as the query, itself left out by its index; a tie counts against the match."""
    with torch.inference_mode():
        parts = [
            F.normalize(model(as_input(images))) for images in np.split(glyphs.images, range(CHUNK, len(glyphs.images), CHUNK))
        ]
    embeddings = torch.cat(parts).numpy()
    if not np.isfinite(embeddings).all():
        raise FloatingPointError("the network gives embeddings that are not finite: its training has diverged")
    # [N, M] indices of the M images of each image's class: every class has equally many
    members = np.argsort(glyphs.labels, kind="stable").reshape(len(glyphs.class_names), -1)[glyphs.labels]
    first, precision = [], []
    for start in range(0, len(embeddings), CHUNK):
        queries = np.arange(start, min(start + CHUNK, len(embeddings)))
        scores = embeddings[queries] @ embeddings.T
        scores[np.arange(len(queries)), queries] = -np.inf
        matches = members[queries][members[queries] != queries[:, None]].reshape(len(queries), -1)
        thresholds = np.take_along_axis(scores, matches, axis=1)
        ranks = np.stack([np.count_nonzero(scores >= t[:, None], axis=1) for t in thresholds.T], axis=1)
        ranks.sort(axis=1)
        first.append(ranks[:, 0])
        precision.append((np.arange(1, ranks.shape[1] + 1) / ranks).mean(axis=1))
    best = np.concatenate(first)
    return Quality(*(100 * float(np.mean(hit)) for hit in (best <= 1, best <= 10, np.concatenate(precision))))


def show_progress(name: str, step: int, steps: int, value: float, seconds: float) -> None:
    """One line that moves on a terminal; elsewhere a line at each quarter."""
    line = f"{name:16} step {step:4}/{steps}  loss {value:.3f}  {seconds:5.1f} s"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step == steps or step % max(1, steps // 4) == 0:
        print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Train once per loss and print one table."""
    parser = argparse.ArgumentParser(prog="rankgrad demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps per loss (default: %(default)s)")
    parser.add_argument("--classes", type=int, help="use only so many classes of each split, for a quick look")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and distortions (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("classes", 2), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")

    train_set, test_set = (first_classes(load_glyphs(split, seed=options.seed), options.classes) for split in ("train", "test"))
    print(f"glyphs: {described(train_set)} to train on, {described(test_set)} to test on, no character in both")
    torch.manual_seed(options.seed)
    untrained = small_embedder()
    rows = [("untrained", evaluate(untrained, test_set), "")]
    for loss in (rg.RecallAtKLoss(), rg.SmoothAPLoss(), rg.FastAPLoss(), rg.RamboRecallLoss()):
        model, start = copy.deepcopy(untrained), time.perf_counter()
        train(model, loss, train_set, steps=options.steps, seed=options.seed)
        rows.append((type(loss).__name__, evaluate(model, test_set), f"{time.perf_counter() - start:.0f} s"))
    print(f"\n{'test characters':16} {'R@1':>6} {'R@10':>6} {'mAP':>6} {'time':>6}")
    for name, quality, seconds in rows:
        cells = (quality.recall_at_1, quality.recall_at_10, quality.mean_average_precision)
        print(f"{name:16} {' '.join(f'{cell:6.1f}' for cell in cells)} {seconds:>6}".rstrip())
    return 0


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


def described(glyphs: Glyphs) -> str:
    """How many classes and images, in words."""
    return f"{len(glyphs.class_names)} characters ({len(glyphs.images)} drawings)"
