"""Images per second of a training step: the whole batch at once, and in chunks that are kept or repeated.

    python -m benchmarks.chunk_rates
    python -m benchmarks.chunk_rates --model lite0 --size 112 --batch 400 --chunk 100

Random weights and images, bf16, frozen batch normalisation, through `TrainStep` as `rankgrad train` uses it: loader aside, the
rate is that of a run. Needs a GPU (`--device cpu --steps 2 --warm-up 1` shows that it works).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import rankgrad as rg
from rankgrad._messages import format_bytes, table
from rankgrad.models import ModelSpec, build_model
from rankgrad.train.settings import TrainSettings
from rankgrad.train.train_step import TrainStep

TRUNKS = {"resnet50": "resnet50", "lite0": "tf_efficientnet_lite0", "convnet": "convnet"}
PER_CLASS = 4


@dataclass(frozen=True)
class ChunkCase:
    """One row: a batch, how it is cut, how many chunks are kept, and whether the network goes through `torch.compile`."""

    model: str
    size: int
    batch: int
    chunk: int = 0
    keep: str = "auto"
    compiled: bool = False

    @property
    def cut(self) -> str:
        cut = f"chunks of {self.chunk}, keep {self.keep}" if self.chunk else "whole"
        return f"{cut}, compiled" if self.compiled else cut


CASES = [
    case
    for model, size in (("resnet50", 224), ("lite0", 112), ("lite0", 160))
    for case in (
        ChunkCase(model, size, 128),
        ChunkCase(model, size, 400),
        ChunkCase(model, size, 400, 100),
        ChunkCase(model, size, 400, 100, "none"),
    )
]


def rate(case: ChunkCase, device: torch.device, *, steps: int, warm_up: int) -> tuple[float, int, str]:
    """Images per second of `steps` steps in a row after `warm_up`, peak memory, warnings."""
    torch.manual_seed(0)
    spec = ModelSpec(trunk=TRUNKS[case.model], dim=512, weights="none", batch_norm="frozen")
    settings = TrainSettings(
        steps=steps + warm_up,
        precision="bf16" if device.type == "cuda" else "float32",
        chunk_size=case.chunk,
        keep=0 if case.keep == "none" else "auto",
        compile=case.compiled,
    )
    said: list[str] = []
    step = TrainStep(
        build_model(spec), rg.RecallAtKLoss(), settings, None, steps_per_epoch=steps + warm_up, device=device
    )  # fmt: skip
    step.train()
    images = torch.randint(0, 256, (case.batch, 3, case.size, case.size), dtype=torch.uint8, device=device)
    labels = torch.arange(case.batch, device=device) // PER_CLASS
    began = 0.0
    for i in range(steps + warm_up):
        if i == warm_up:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            _synchronize(device)
            began = time.perf_counter()
        step(i, i, torch.arange(case.batch), images, labels, warn=lambda message, **_: said.append(message))
    _synchronize(device)
    seconds = time.perf_counter() - began
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    step.release()
    return steps * case.batch / seconds, memory, "; ".join(said)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunk_rates", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="where to measure [cuda]")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each row [20]")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before these [5]")
    parser.add_argument("--model", choices=tuple(TRUNKS), help="one model instead of the standard rows")
    parser.add_argument("--size", type=int, default=224, help="with --model: height and width of the images [224]")
    parser.add_argument("--batch", type=int, default=400, help="with --model: images in a batch [400]")
    parser.add_argument("--chunk", type=int, default=100, help="with --model: images in a chunk [100]")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    cases = CASES
    if given.model:
        model, size, batch = given.model, given.size, given.batch
        cases = [
            ChunkCase(model, size, batch),
            ChunkCase(model, size, batch, given.chunk),
            ChunkCase(model, size, batch, given.chunk, "none"),
        ]
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device), f"torch {torch.__version__}, rankgrad {rg.__version__}")
    rows, base = [], 0.0
    for case in cases:
        found, memory, said = rate(case, device, steps=given.steps, warm_up=given.warm_up)
        base = base if case.chunk or case.batch != cases[0].batch else found
        share = f"{100 * found / base:.0f}%"
        rows.append([case.model, str(case.size), str(case.batch), case.cut, f"{found:,.0f}", share, format_bytes(memory), said])
        print(f"{case.model} {case.size} px, batch {case.batch}, {case.cut}: {found:,.0f} images/s", flush=True)
    print()
    print(table(["model", "pixels", "batch", "cut", "images/s", "of whole", "memory", "warnings"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
