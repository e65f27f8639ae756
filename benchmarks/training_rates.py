"""Images per second of training by stage, from image files to weights, beside bare loops of torch.

    python -m benchmarks.training_rates --csv rates.csv
    python -m benchmarks.training_rates --data photos --only 'lite0.*400'

    decode        JPEG files to pixels, all threads
    augment       crops and flips of decoded images on the device
    bare          torch alone on a resident batch: forward, backward, optimizer, no loss over the batch. The limit
    step          `TrainStep` as `rankgrad train` uses it, the rank loss included; whole or in chunks
    train         `rankgrad train` from files on disk: the epochs after the first
    metric-learning   the loop of a user of pytorch-metric-learning: ImageFolder, torchvision's transforms, DataLoader

Random weights, bf16, frozen batch normalisation. Without --data, images of smoothed noise are written first. Needs a GPU for
figures that mean something; `--device cpu --smallest` shows that it works.
"""

import argparse
import csv
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.chunk_rates import PER_CLASS, TRUNKS, ChunkCase, rate
from rankgrad._messages import table
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_files import ImageDecoder, map_images
from rankgrad.data.image_store import ImageBuffer, bytes_needed
from rankgrad.data.preprocessing import Augment
from rankgrad.data.readers import read
from rankgrad.data.samplers import ClassBalanced
from rankgrad.models import ModelSpec, build_model

STAGES = ("decode", "augment", "bare", "step", "train", "metric-learning")
MODELS = (("resnet50", 224), ("lite0", 112))
BATCHES = (128, 400, 4000)
# images in a pass of the network where the whole batch does not fit or is not wanted
CHUNK = 100
LARGEST_WHOLE = 400


@dataclass(frozen=True)
class RateCase(ChunkCase):
    """One row of the table: a stage of a batch."""

    stage: str = "step"

    @property
    def key(self) -> str:
        return f"{self.stage} {self.model} {self.size} {self.batch} {self.cut}"


def all_cases(
    models: Sequence[tuple[str, int]] = MODELS, batches: Sequence[int] = BATCHES, chunk: int = CHUNK
) -> list[RateCase]:
    """The rows, stage by stage for each network."""
    cases = []
    for model, size in models:
        cases += [RateCase(model, size, 0, stage="decode"), RateCase(model, size, batches[0], stage="augment")]
        for batch in batches:
            whole = [RateCase(model, size, min(batch, LARGEST_WHOLE), stage="bare")]
            if batch <= LARGEST_WHOLE:
                whole += [RateCase(model, size, batch, stage=stage) for stage in ("step", "train", "metric-learning")]
            cut = [RateCase(model, size, batch, chunk, keep) for keep in ("auto", "none")] if batch > chunk else []
            cases += whole + cut
    return list(dict.fromkeys(cases))


@dataclass(frozen=True)
class Machine:
    """Where and on what to measure, and how long."""

    data: Path
    device: torch.device
    steps: int
    warm_up: int

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def per_second(self, step: Callable[[], object], images: int) -> float:
        """Images per second: the median over `steps` calls after `warm_up`."""
        seconds = []
        for _ in range(self.warm_up + self.steps):
            self.wait()
            began = time.perf_counter()
            step()
            self.wait()
            seconds.append(time.perf_counter() - began)
        return images / statistics.median(seconds[self.warm_up :])

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def measure(case: RateCase, machine: Machine) -> float:
    """Images per second of one row."""
    torch.manual_seed(0)
    found: float = _MEASURES[case.stage](case, machine)
    return found


def _decode(case: RateCase, machine: Machine) -> float:
    images = read("folder", machine.data).splits["train"]
    decoder = ImageDecoder(images, _stored_side(case), square=False)
    began = time.perf_counter()
    decoded = sum(1 for _ in map_images(decoder.planes, range(len(images)), None))
    return decoded / (time.perf_counter() - began)


def _augment(case: RateCase, machine: Machine) -> float:
    side = _stored_side(case)
    shapes = torch.tensor((side, side * 4 // 3)).repeat(case.batch, 1)
    pixels = torch.randint(0, 256, (bytes_needed(shapes),), dtype=torch.uint8)
    labels = np.arange(case.batch) // PER_CLASS
    buffer = ImageBuffer(pixels, shapes).to(machine.device)
    sampler = ClassBalanced(labels, case.batch, PER_CLASS)
    batches = ImageBatches(buffer, labels, sampler, Augment("resized", flip=True), case.size, device=machine.device)
    batches.set_epoch(0)
    return machine.per_second(lambda: next(batches.iterate(0)), case.batch)


def _bare(case: RateCase, machine: Machine) -> float:
    model = _network(case).to(machine.device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=machine.device.type == "cuda")
    images = torch.randn(case.batch, 3, case.size, case.size, device=machine.device)
    images = images.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with machine.autocast():
            embeddings = model(images)
        embeddings.float().square().mean().backward()
        optimizer.step()

    return machine.per_second(step, case.batch)


def _step(case: RateCase, machine: Machine) -> float:
    return rate(case, machine.device, steps=machine.steps, warm_up=machine.warm_up)[0]


def _train(case: RateCase, machine: Machine) -> float:
    """The rate of whole epochs after the first, which compiles, records and decodes."""
    from rankgrad.cli import main as command_line

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = {
            "data": machine.data, "out": run, "cache": Path(folder) / "cache", "device": machine.device,
            "trunk": TRUNKS[case.model], "weights": "none", "batch-norm": "frozen", "size": case.size,
            "batch-size": case.batch, "per-class": PER_CLASS, "epochs": 4, "chunk-size": 0,
            "precision": "bf16" if machine.device.type == "cuda" else "float32",
        }  # fmt: skip
        if command_line(["train", *(f"--{name}={value}" for name, value in settings.items())]):
            raise RuntimeError("rankgrad train failed; it says above why")
        entries = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    epochs = [entry for entry in entries if entry["kind"] == "epoch" and entry["epoch"] > 1]
    return float(statistics.median(entry["steps"] * case.batch / entry["seconds"] for entry in epochs))


def _metric_learning(case: RateCase, machine: Machine) -> float:
    from pytorch_metric_learning import losses, samplers
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    prepared = transforms.Compose(
        [
            transforms.RandomResizedCrop(case.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    images = datasets.ImageFolder(str(machine.data), prepared)
    steps = machine.steps + machine.warm_up
    sampler = samplers.MPerClassSampler(images.targets, PER_CLASS, case.batch, length_before_new_iter=case.batch * (steps + 1))
    workers = min(torch.multiprocessing.cpu_count(), 16)
    loader = DataLoader(images, case.batch, sampler=sampler, num_workers=workers, pin_memory=machine.device.type == "cuda")
    batches = iter(loader)
    model = _network(case).to(machine.device).train()
    loss, optimizer = losses.MultiSimilarityLoss(), torch.optim.AdamW(model.parameters())

    def step() -> None:
        pixels, labels = next(batches)
        optimizer.zero_grad()
        with machine.autocast():
            embeddings = model(pixels.to(machine.device, non_blocking=True))
        loss(embeddings.float(), labels.to(machine.device)).backward()
        optimizer.step()

    return machine.per_second(step, case.batch)


_MEASURES: dict[str, Callable[[RateCase, Machine], float]] = dict(
    zip(STAGES, (_decode, _augment, _bare, _step, _train, _metric_learning), strict=True)
)


def _network(case: RateCase) -> nn.Module:
    return build_model(ModelSpec(trunk=TRUNKS[case.model], dim=512, weights="none", batch_norm="frozen"))


def _stored_side(case: RateCase) -> int:
    return case.size * 256 // 224


def write_images(folder: Path, classes: int, per_class: int, side: int) -> None:
    """JPEG files of smoothed noise in folder/CLASS, about as large as photographs of this size."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"{label:03}").mkdir(parents=True)
        for number in range(per_class):
            coarse = generator.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
            picture.save(folder / f"{label:03}" / f"{number}.jpg", quality=90)


def rows_of(cases: Sequence[RateCase], machine: Machine) -> Iterator[dict[str, Any]]:
    """One row after the other, as it is measured; `of_bare` is the share of the bare loop of the same network."""
    limits: dict[tuple[str, int], float] = {}
    for case in cases:
        found = measure(case, machine)
        key = (case.model, min(case.batch, LARGEST_WHOLE))
        if case.stage == "bare":
            limits[key] = found
        share = f"{found / limits[key]:.3f}" if key in limits else ""
        yield {
            "stage": case.stage, "model": case.model, "pixels": case.size, "batch": case.batch, "cut": case.cut,
            "images_per_second": f"{found:.0f}", "of_bare": share,
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; with --csv each row is written as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_rates", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of images, DIR/CLASS/image.jpg [noise is written]")
    parser.add_argument("--device", default="cuda", help="where to measure [cuda]")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose name this regular expression finds")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each row [15]")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before these [5]")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    parser.add_argument("--smallest", action="store_true", help="tiny images and batches, one step of each, to try the command")
    given = parser.parse_args(arguments)
    cases = all_cases((("convnet", 32),), (16, 32), 8) if given.smallest else all_cases()
    chosen = [case for case in cases if re.search(given.only, case.key)]
    if not chosen:
        parser.error(f"--only: no row matches {given.only!r}; there are: {'; '.join(case.key for case in cases)}")
    with tempfile.TemporaryDirectory() as folder:
        data = given.data
        if data is None:
            data = Path(folder) / "images"
            write_images(data, *((16, 6, 40) if given.smallest else (200, 40, 256)))
        steps, warm_up = (1, 1) if given.smallest else (given.steps, given.warm_up)
        machine = Machine(data, torch.device(given.device), steps, warm_up)
        rows: list[dict[str, Any]] = []
        for row in rows_of(chosen, machine):
            rows.append(row)
            print(*row.values(), sep=", ", flush=True)
            if given.csv:
                with given.csv.open("w", newline="") as file:
                    writer = csv.DictWriter(file, row.keys())
                    writer.writeheader()
                    writer.writerows(rows)
    print()
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
