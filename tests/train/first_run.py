"""Twelve runs of tf_efficientnet_lite0 in one process, loaded by a thread: all are recorded, and memory stays constant.

python first_run.py SIZE CHUNK_SIZE
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

import rankgrad as rg
from rankgrad.data.prefetch import prefetch
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings

BATCH, CLASSES, RUNS, STEPS = 400, 100, 12, 6


class PinnedBatches:
    """Random images that a thread pins ahead of use, as image batches do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return STEPS

    def make(self, step: int) -> torch.Tensor:
        pixels = np.random.default_rng(step).integers(0, 256, (BATCH, 3, self.size, self.size), dtype=np.uint8)
        return torch.from_numpy(pixels).pin_memory()

    def iterate(self, start: int):
        labels = torch.arange(BATCH) % CLASSES
        for step, images in prefetch(self.make, range(start, STEPS), threads=1, ahead=2):
            yield step, torch.arange(BATCH), images.to("cuda", non_blocking=True), labels.to("cuda")


class Lite0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = timm.create_model("tf_efficientnet_lite0", num_classes=64)

    def train(self, mode: bool = True) -> "Lite0":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.trunk(images.float() / 127.5 - 1).float(), dim=1)


def main(size: int, chunk_size: int) -> None:
    allocated = []
    for run in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainSettings(steps=STEPS, precision="bf16", chunk_size=chunk_size)
            fit(Lite0(), rg.RecallAtKLoss(), PinnedBatches(size), settings, folder, device="cuda")
            entries = [json.loads(line) for line in (Path(folder) / "journal.jsonl").read_text().splitlines()]
        warnings = [entry["message"] for entry in entries if entry["kind"] == "warning"]
        allocated.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        print(
            f"run {run + 1}: {allocated[-1][0] / 2**20:.1f} MiB allocated, {allocated[-1][1] / 2**20:.1f} MiB reserved",
            warnings,
        )
        assert not warnings, warnings
    assert allocated[-1][0] <= allocated[0][0], "memory grows"
    assert allocated[-1][1] <= allocated[0][1] + 2**26, "the pools grow"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
