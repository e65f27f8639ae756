"""Images per second of training by stage, from image files to weights, beside bare loops of torch.

    python -m benchmarks.training_rates --csv rates.csv
    python -m benchmarks.training_rates --data photos --only 'lite0.*400'

    decode        JPEG files to the cache of decoded images, on all cores
    augment       crops and flips of decoded images on the device
    bare          torch alone on a resident batch of pixels: forward, backward and fused AdamW of the same network, channels
                  last, captured as one CUDA graph; no loss over the batch, no data. The limit
    step          `TrainStep` as `rankgrad train` uses it on a resident batch, the rank loss included; whole or in chunks
    train         `rankgrad train` from files on disk: sampling, augmentation and journal included, in its second epoch; the
                  first decodes, compiles and records
    metric-learning   the loop of a user of pytorch-metric-learning: ImageFolder, torchvision's transforms, DataLoader with a
                  worker per core, Multi-Similarity loss, the same network, autocast

Random weights, bf16, frozen batch normalisation. cuDNN chooses its algorithms without a search
(`torch.backends.cudnn.benchmark`), which may end otherwise in another run and give other last bits. Steps are timed in a row,
as they follow each other in training. `of_bare` is the share of the bare loop with as many images in a pass of the network.
Without --data, images of smoothed noise, 500 x 375 pixels, are written first. Needs a GPU for figures that mean something;
`--device cpu --smallest` shows that it works.
"""

import argparse
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

import rankgrad as rg
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import provenance
from benchmarks.rate_cases import PREPARING, STAGES, RateCase, all_cases
from rankgrad._device import release_memory
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_cache import open_images
from rankgrad.data.image_store import ImageBuffer, bytes_needed
from rankgrad.data.prefetch import default_threads
from rankgrad.data.preprocessing import Augment
from rankgrad.data.readers import read
from rankgrad.data.samplers import ClassBalanced
from rankgrad.models import Embedder, ModelSpec, build_model
from rankgrad.train.settings import TrainSettings
from rankgrad.train.train_step import TrainStep

PER_CLASS = 4
TRUNKS = {"resnet50": "resnet50", "lite0": "tf_efficientnet_lite0", "convnet": "convnet"}
# images on disk: classes, images of a class, height; a batch of 4,000 has 4 of each class
ON_DISK = (1000, 8, 375)
# files of these with contents of their own, the others are links; and how many the rate of decoding is measured on
DISTINCT, DECODED = 2000, 8000


@dataclass(frozen=True)
class Machine:
    """Where and on what to measure, and how long."""

    data: Path
    cache: Path
    device: torch.device
    steps: int
    warm_up: int

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def steps_of(self, batch: int) -> int:
        """Steps to measure; of large batches fewer."""
        return max(self.steps * 400 // max(batch, 400), min(self.steps, 3))

    def per_second(self, step: Callable[[], object], images: int) -> float:
        """Images per second of `steps` calls in a row after `warm_up`."""
        for _ in range(self.warm_up):
            step()
        self.wait()
        began = time.perf_counter()
        for _ in range(self.steps):
            step()
        self.wait()
        return self.steps * images / (time.perf_counter() - began)

    @property
    def train_images(self) -> Path:
        return self.data / "train" if (self.data / "train").is_dir() else self.data

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False)


Found: TypeAlias = tuple[float, str]
"""Images per second, and a remark."""


def measure(case: RateCase, machine: Machine) -> Found:
    """One row."""
    torch.manual_seed(0)
    return _MEASURES[case.stage](case, machine)


def _decode(case: RateCase, machine: Machine) -> Found:
    images = read("folder", machine.data).splits["train"]
    images = images.select(range(min(len(images), DECODED)))
    with tempfile.TemporaryDirectory() as cache:
        began, busy = time.perf_counter(), _busy()
        open_images(images, side=_stored_side(case), square=False, cache=Path(cache), progress=False)
        seconds = time.perf_counter() - began
    return len(images) / seconds, f"{(_busy() - busy) / seconds:.1f} cores busy"


def _busy() -> float:
    """Seconds of processor time of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def _augment(case: RateCase, machine: Machine) -> Found:
    side = _stored_side(case)
    shapes = torch.tensor((side, side * 4 // 3)).repeat(case.batch, 1)
    pixels = torch.randint(0, 256, (bytes_needed(shapes),), dtype=torch.uint8)
    labels = np.arange(case.batch) // PER_CLASS
    buffer = ImageBuffer(pixels, shapes).to(machine.device)
    sampler = ClassBalanced(labels, case.batch, PER_CLASS)
    batches = ImageBatches(buffer, labels, sampler, Augment("resized", flip=True), case.size, device=machine.device)
    batches.set_epoch(0)
    return machine.per_second(lambda: next(batches.iterate(0)), case.batch), ""


def _bare(case: RateCase, machine: Machine) -> Found:
    on_gpu = machine.device.type == "cuda"
    model = _network(case).to(machine.device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu, capturable=on_gpu)
    images = torch.randint(0, 256, (case.batch, 3, case.size, case.size), dtype=torch.uint8, device=machine.device)
    images = images.contiguous(memory_format=torch.channels_last)
    if case.compiled:
        model.compile()
    # embeddings have length 1, so that a sum of their squares would have no gradient
    direction = torch.randn(model.dim, device=machine.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with machine.autocast():
            embeddings = model(images)
        (embeddings @ direction).mean().backward()
        optimizer.step()

    return machine.per_second(captured(step) if on_gpu else step, case.batch), ""


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A step as one CUDA graph, as torch's manual captures a whole network: the host then launches nothing else."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def _step(case: RateCase, machine: Machine) -> Found:
    warm_up, steps = machine.warm_up, machine.steps_of(case.batch)
    settings = TrainSettings(
        steps=warm_up + steps,
        precision="bf16" if machine.device.type == "cuda" else "float32",
        chunk_size=case.chunk,
        keep=0 if case.keep == "none" else "auto",
        compile=case.compiled,
    )
    train_step = TrainStep(
        _network(case), rg.RecallAtKLoss(), settings, None, steps_per_epoch=settings.steps, device=machine.device
    )  # fmt: skip
    train_step.train()
    images = torch.randint(0, 256, (case.batch, 3, case.size, case.size), dtype=torch.uint8, device=machine.device)
    indices, labels = torch.arange(case.batch), torch.arange(case.batch, device=machine.device) // PER_CLASS
    said: list[str] = []
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        train_step(number, number, indices, images, labels, warn=lambda message, **_: said.append(message))

    found = replace(machine, steps=steps).per_second(step, case.batch)
    train_step.release()
    return found, "; ".join(said)


def _train(case: RateCase, machine: Machine) -> Found:
    """The rate of the second epoch; the first compiles, records and decodes."""
    from rankgrad.cli import INTERRUPTED
    from rankgrad.cli import main as command_line

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = {
            "data": machine.data, "out": run, "cache": machine.cache, "device": machine.device,
            "trunk": TRUNKS[case.model], "weights": "none", "batch-norm": "frozen", "size": case.size,
            "batch-size": case.batch, "per-class": PER_CLASS, "chunk-size": case.chunk,
            "keep": 0 if case.keep == "none" else "auto", "evaluate-every": 0, "epochs": 2,
            "precision": "bf16" if machine.device.type == "cuda" else "float32",
        }  # fmt: skip
        status = command_line(["train", *(f"--{name}={value}" for name, value in settings.items())])
        if status == INTERRUPTED:  # by a signal, which ends the benchmark as well
            raise KeyboardInterrupt
        if status:
            raise RuntimeError("rankgrad train failed; it says above why")
        entries = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    epoch = next(entry for entry in entries if entry["kind"] == "epoch" and entry["epoch"] == 2)
    said = "; ".join(entry["message"] for entry in entries if entry["kind"] == "warning")
    return epoch["steps"] * case.batch / epoch["seconds"], said


def _metric_learning(case: RateCase, machine: Machine) -> Found:
    from pytorch_metric_learning import losses, samplers
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    prepared = transforms.Compose(
        [
            transforms.RandomResizedCrop(case.size),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),  # the network normalises pixels
        ]
    )
    images = datasets.ImageFolder(str(machine.train_images), prepared)
    workers = default_threads()
    # what the workers have prepared before the first step ends is not what they can keep up
    ahead = 2 * workers
    steps = ahead + machine.steps
    sampler = samplers.MPerClassSampler(images.targets, PER_CLASS, case.batch, length_before_new_iter=case.batch * (steps + 1))
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

    for _ in range(ahead):
        step()
    machine.wait()
    began = time.perf_counter()
    for _ in range(machine.steps):
        step()
    machine.wait()
    return machine.steps * case.batch / (time.perf_counter() - began), ""


_MEASURES: dict[str, Callable[[RateCase, Machine], Found]] = dict(
    zip(STAGES, (_decode, _augment, _bare, _step, _train, _metric_learning), strict=True)
)


def _network(case: RateCase) -> Embedder:
    return build_model(ModelSpec(trunk=TRUNKS[case.model], dim=512, weights="none", batch_norm="frozen"))


def _stored_side(case: RateCase) -> int:
    return case.size * 256 // 224


def write_images(folder: Path, classes: int, per_class: int, side: int) -> None:
    """JPEG files of smoothed noise in folder/train/CLASS, a few classes in folder/test; those after `DISTINCT` are links."""
    from PIL import Image

    def write(path: Path, seed: int) -> None:
        generator = np.random.default_rng(seed)
        coarse = generator.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
        picture.save(path, quality=90)

    folders = [folder / "train" / f"{label:04}" for label in range(classes)]
    folders += [folder / "test" / f"{classes + label:04}" for label in range(8)]
    for path in folders:
        path.mkdir(parents=True)
    files = [path / f"{number}.jpg" for path in folders for number in range(per_class)]
    with ThreadPoolExecutor(default_threads()) as pool:
        list(pool.map(write, files[:DISTINCT], range(DISTINCT)))
    for number, path in enumerate(files[DISTINCT:]):
        path.hardlink_to(files[number % DISTINCT])


def rows_of(cases: Sequence[RateCase], machine: Machine) -> Iterator[dict[str, Any]]:
    """One row after the other, as it is measured; one that fails has a note."""
    limits: dict[tuple[str, int, bool], float] = {}
    for case in cases:
        found, note = 0.0, ""
        try:
            found, note = measure(case, machine)
        except (RuntimeError, ImportError, OSError) as problem:
            note = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
        key = (case.model, case.images_in_pass, case.compiled)
        if case.stage == "bare":
            limits[key] = found
        yield {
            "stage": case.stage, "model": case.model, "pixels": case.size, "batch": case.batch, "cut": case.cut,
            "images_per_second": f"{found:.0f}" if found else "",
            "of_bare": f"{found / limits[key]:.3f}" if found and limits.get(key) and case.stage not in PREPARING else "",
            "note": note,
        }  # fmt: skip
        release_memory(machine.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; with --csv each row is written as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_rates", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of images, DIR/train/CLASS/image.jpg and DIR/test [noise is written]")
    parser.add_argument("--device", default="cuda", help="where to measure [cuda]")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="rows whose name this regular expression finds; those of a second later",
    )
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each row [15]")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before these [3]")
    parser.add_argument(
        "--compiled", action="store_true", help="instead, bare loop and step with torch.compile, which takes minutes"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    parser.add_argument("--smallest", action="store_true", help="tiny images and batches, one step of each, to try the command")
    given = parser.parse_args(arguments)
    sizes: Any = ((("convnet", 32),), (8, 16), ((16, 8),)) if given.smallest else ()
    cases = all_cases(*sizes, compiled=given.compiled)
    patterns = given.only or [""]
    chosen = list(dict.fromkeys(case for pattern in patterns for case in cases if re.search(pattern, case.key)))
    if not chosen:
        parser.error(f"--only: no row matches {' or '.join(patterns)}; there are: {'; '.join(case.key for case in cases)}")
    with tempfile.TemporaryDirectory() as folder:
        data = given.data
        if data is None:
            data = Path(folder) / "images"
            write_images(data, *((16, 6, 40) if given.smallest else ON_DISK))
        steps, warm_up = (1, 1) if given.smallest else (given.steps, given.warm_up)
        machine = Machine(data, Path(folder) / "decoded", torch.device(given.device), steps, warm_up)
        origin = provenance(machine.device)
        rows: list[dict[str, Any]] = []
        for row in rows_of(chosen, machine):
            rows.append(row)
            print(*row.values(), sep=", ", flush=True)
            if given.csv:
                append_csv(given.csv, [origin | row])
    print()
    print(text_table([{name: str(value) for name, value in row.items()} for row in rows]))
    return 0 if all(row["images_per_second"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
