"""Train a small network on the built-in glyphs, once with each of several losses and from the same initial weights.

Training and test characters are disjoint: the table shows how well the network tells apart characters that it never saw.
The report that follows shows what the queries retrieve, in pictures.
"""

import copy
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rankgrad as rg
from rankgrad._messages import format_duration, plural, table
from rankgrad.cli.parser import Parser
from rankgrad.cli.show_commands import report
from rankgrad.data.readers import read
from rankgrad.data.samplers import ClassBalanced
from rankgrad.data.seeds import generator
from rankgrad.data.table import Table
from rankgrad.runs.retrieval_evaluation import NEIGHBOURS, RetrievalEvaluation
from rankgrad.train.loop import fit
from rankgrad.train.processes import ALONE
from rankgrad.train.settings import TrainSettings

CLASSES_PER_BATCH, PER_CLASS = 96, 4
LEARNING_RATE = 4e-3
METRICS = ("R@1", "R@10", "mAP")

# images embedded at once
CHUNK = 512


class GlyphBatches:
    """Class-balanced, augmented batches for `fit`; what step s of epoch e holds is a function of (seed, e, s)."""

    def __init__(self, table: Table, seed: int) -> None:
        classes = min(CLASSES_PER_BATCH, table.num_classes)
        self.sampler = ClassBalanced(table.labels, classes * PER_CLASS, PER_CLASS, seed=seed)
        self.table, self.seed = table, seed

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for step, batch in enumerate(self.sampler):
            if step >= start:
                images = augment(as_input(self.table, batch), generator(self.seed, "augment", self.sampler.epoch, step))
                yield step, torch.tensor(batch), images, torch.from_numpy(self.table.labels[batch])


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


def as_input(table: Table, rows: list[int] | slice) -> Tensor:
    """Images of the table as [N, 1, H, W] floats in [0, 1]."""
    assert table.pixels is not None, "glyphs are drawn, not read from files"
    return torch.from_numpy(table.pixels[rows]).unsqueeze(1) / 255


@torch.no_grad()
def evaluate(model: nn.Module, table: Table) -> RetrievalEvaluation:
    """Every image in turn is the query against all others."""
    chunks = [slice(start, start + CHUNK) for start in range(0, len(table), CHUNK)]
    embeddings = torch.cat([model.eval()(as_input(table, chunk)) for chunk in chunks]).numpy()
    result = rg.evaluate(embeddings, table.labels, categories=table.categories, ks=(1, 10), neighbours=NEIGHBOURS)
    return RetrievalEvaluation("test", table, embeddings, result, result.protocol.name, ALONE)


def train(model: nn.Module, loss: nn.Module, batches: GlyphBatches, folder: Path, steps: int) -> None:
    """Train `model` in place."""
    settings = TrainSettings(
        steps=steps,
        optimizer="adamw",
        lr=LEARNING_RATE,
        weight_decay=0.01,
        schedule="cosine",
        warmup_steps=round(0.3 * steps),
        channels_last=False,
        checkpoint_every=steps,
        log_every=max(1, steps // 20),
        seed=batches.seed,
    )
    fit(model, loss, batches, settings, folder)


def main(arguments: list[str]) -> int:
    """Train once per loss, print one table and write one report."""
    parser = Parser("rankgrad demo", "Train a small network on the built-in glyphs with several losses and compare them.")
    parser.add_argument("--steps", metavar="N", type=int, default=300, help="training steps per loss [%(default)s]")
    parser.add_argument("--classes", metavar="N", type=int, help="use only this many classes of each split, for a quick look")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of weights, batches and augmentation [%(default)s]"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for runs and report [runs/demo, or the next that is free]"
    )
    options = parser.parse(arguments)
    for name, least in (("steps", 1), ("classes", 2), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    out: Path = options.out or next_free(Path("runs", "demo"))
    if out.exists():
        parser.error(f"{out} already exists: choose another folder with --out")

    train_set, test_set = (read("glyphs", None).splits[split].subset(options.classes or 0) for split in ("train", "test"))
    print(f"glyphs: {describe(train_set)} to train on, {describe(test_set)} to test on, no character in both", flush=True)
    torch.manual_seed(options.seed)
    untrained = small_embedder()
    folders, rows = list[Path](), list[list[str]]()
    for loss in (None, rg.RecallAtKLoss(), rg.SmoothAPLoss(), rg.FastAPLoss(), rg.RamboRecallLoss()):
        name, model, start = "untrained" if loss is None else type(loss).__name__, copy.deepcopy(untrained), time.perf_counter()
        folder = out / name
        if loss is not None:
            print(f"{name}: {plural(options.steps, 'step')}", flush=True)
            train(model, loss, GlyphBatches(train_set, options.seed), folder, options.steps)
        found = evaluate(model, test_set)
        (folder / "eval" / "test").mkdir(parents=True)
        found.write(folder / "eval" / "test", {})
        folders.append(folder)
        duration = "" if loss is None else format_duration(time.perf_counter() - start)
        rows.append([name, *(f"{100 * found.metrics[metric]:.1f}" for metric in METRICS), duration])
    print(f"\n{table(['test characters', *METRICS, 'time'], rows, align='lrrrr')}\n\nreport: ", end="", flush=True)
    return report([*map(str, folders), "--out", str(out / "report.html")])


def next_free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3 ... that does not exist."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def describe(table: Table) -> str:
    """`1,304 characters (10,432 drawings)`."""
    return f"{plural(table.num_classes, 'character')} ({plural(len(table), 'drawing')})"
