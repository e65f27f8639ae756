"""`python -m benchmarks.distributed`: one batch on 1, 2, 4 processes of this machine, the loss alone and a whole step."""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import rankgrad
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import Timing, busy_note, provenance, share_of_others
from benchmarks.synthetic import hard_batch

TOLERANCE = 1e-5
"""By how much the loss of several processes may differ from that of one, in float32."""


@dataclass(frozen=True)
class DistributedSettings:
    """What all numbers of processes share. Each process has one thread, so that cores are what processes add."""

    items: int
    dim: int
    per_class: int
    side: int
    chunk_size: int
    seconds: float

    def shard(self, rank: int, size: int) -> tuple[slice, Tensor, Tensor]:
        embeddings, labels = hard_batch(self.items, self.dim, self.per_class)
        own = slice(*(self.items * edge // size for edge in (rank, rank + 1)))
        return own, embeddings, labels


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; returns 1 if processes disagree on the loss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes, the first is compared with [1,2,4]")
    parser.add_argument("--items", type=int, default=4096, help="of the batch of all processes together [4096]")
    parser.add_argument("--dim", type=int, default=512, help="of the embeddings [512]")
    parser.add_argument("--per-class", type=int, default=4, help="items of a class [4]")
    parser.add_argument("--side", type=int, default=16, help="pixels of the images of the whole step [16]")
    parser.add_argument("--chunk-size", type=int, default=256, help="images that go through the network at once [256]")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row, three repetitions at least [5]")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    given = parser.parse_args(arguments)
    counts = [int(part) for part in given.processes.split(",")]
    if min(counts) < 1:
        parser.error(f"--processes must be numbers of at least 1, got {given.processes}")
    settings = DistributedSettings(given.items, given.dim, given.per_class, given.side, given.chunk_size, given.seconds)
    cores = os.cpu_count() or 1
    rows: list[dict[str, Any]] = []
    first: dict[str, dict[str, Any]] = {}
    print(f"{settings.items:,} items, d = {settings.dim}, RecallAtKLoss, 1 thread per process, {cores} cores", flush=True)
    for count in counts:
        measurements, others = _watched(settings, count)
        for measured in measurements:
            base = first.setdefault(measured["what"], measured)
            speed_up = base["seconds"] / measured["seconds"]
            # a process without a core of its own cannot add to the speed
            possible = min(count, cores) / min(base["processes"], cores)
            rows.append({**measured, "speed_up": speed_up, "efficiency": speed_up / possible, "share_of_others": others})
    print(text_table([_text(row) for row in rows]))
    if given.csv:
        about = {"items": settings.items, "dim": settings.dim, "cores": cores, **provenance(torch.device("cpu"))}
        append_csv(given.csv, [{**row, **about} for row in rows])
    wrong = [row for row in rows if abs(row["loss"] - first[row["what"]]["loss"]) > TOLERANCE]
    for row in wrong:
        print(f"{row['what']}: {row['processes']} processes find a loss of {row['loss']:.6f}, {counts[0]} another")
    return 1 if wrong else 0


def _watched(settings: DistributedSettings, processes: int) -> tuple[list[dict[str, Any]], float | None]:
    """The measurements, and the share of the CPU that neither this process nor those it started took meanwhile."""
    began, before = time.perf_counter(), _seconds_of_children()
    measurements, others = share_of_others(lambda: _measured(settings, processes))
    if others is None:
        return measurements, None
    children = (_seconds_of_children() - before) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return measurements, max(0.0, others - children)


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measured(settings: DistributedSettings, processes: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (processes, settings, folder), nprocs=processes)
        measurements: list[dict[str, Any]] = json.loads((Path(folder) / "measurements.json").read_text())
    return measurements


def _work(rank: int, size: int, settings: DistributedSettings, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    measurements = []
    for what, make in (("loss alone", _loss_alone), ("whole step", _whole_step)):
        call = make(settings, rank, size)
        loss = call()
        timing = _timed(call, settings.seconds)
        spread = {"seconds_20": timing.low, "seconds_80": timing.high, "repetitions": timing.repetitions}
        measurements.append({"what": what, "processes": size, "seconds": timing.median, **spread, "loss": loss})
    if rank == 0:
        (Path(folder) / "measurements.json").write_text(json.dumps(measurements))
    dist.destroy_process_group()
    # Python's own end takes torch's libraries apart while the others may still be connected, and may abort then
    os._exit(0)


def _loss_alone(settings: DistributedSettings, rank: int, size: int) -> Callable[[], float]:
    """Forward and backward of the loss, from and to the embeddings."""
    own, embeddings, labels = settings.shard(rank, size)
    leaf = embeddings[own].clone().requires_grad_()
    loss = rankgrad.DistributedRankLoss(rankgrad.RecallAtKLoss())

    def call() -> float:
        leaf.grad = None
        value = loss(leaf, labels[own])
        value.backward()
        return float(value.detach())

    return call


def _whole_step(settings: DistributedSettings, rank: int, size: int) -> Callable[[], float]:
    """A small convolutional network in chunks, the loss, one exchange of gradients, and the optimizer."""
    own, _, labels = settings.shard(rank, size)
    generator = torch.Generator().manual_seed(0)
    shape = (settings.items, 3, settings.side, settings.side)
    # a class is a colour, so that there is something to rank by
    images = (torch.randn(shape, generator=generator) + 2 * torch.randn(settings.items, 3, 1, 1, generator=generator)[labels])[
        own
    ]
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, settings.dim),
    )
    model = nn.parallel.DistributedDataParallel(network) if size > 1 else network
    # a rate of 0: the loss stays what it is, and can be compared
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = rankgrad.DistributedRankLoss(rankgrad.RecallAtKLoss())
    step = rankgrad.LargeBatch(model, loss, settings.chunk_size, keep=0)

    def call() -> float:
        optimizer.zero_grad()
        value = step(images, labels[own])
        optimizer.step()
        return float(value)

    return call


def _timed(call: Callable[[], float], seconds: float) -> Timing:
    """Of all processes together: each repetition begins when the last of them is ready."""
    found: list[float] = []
    enough = torch.zeros(1)
    while not enough:
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        found.append(time.perf_counter() - began)
        # the first process decides for all
        enough.fill_(len(found) >= 3 and sum(found) >= seconds)
        dist.broadcast(enough, 0)
    return Timing.of(found)


def _text(row: dict[str, Any]) -> dict[str, str]:
    return {
        "what": row["what"],
        "processes": str(row["processes"]),
        "ms": f"{1e3 * row['seconds']:.1f}",
        "speed-up": f"{row['speed_up']:.2f}",
        "efficiency": f"{row['efficiency']:.2f}",
        "loss": f"{row['loss']:.6f}",
        "note": busy_note(row["share_of_others"]),
    }


if __name__ == "__main__":
    sys.exit(main())
