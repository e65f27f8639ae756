"""Kills training processes with SIGKILL at many points, resumes them, and prints what became of each as JSON.

    python kill_script.py FOLDER

One process imports torch; every run is a fork of it, so that a kill costs a fraction of a second.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch  # noqa: F401 (loaded once, before any fork)
import torch
import torch._dynamo  # the same: every optimizer loads it
from train.tiny_loop import Vectors, held_out, network, remembering

from rankgrad.train.checkpoints import CheckpointStore
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings

SETTINGS = TrainSettings(
    epochs=3,
    lr=1e-2,
    weight_decay=1e-3,
    schedule="step",
    milestones=(2,),
    warmup_steps=3,
    clip=0.5,
    chunk_size=7,
    keep=1,
    metric="margin",
    checkpoint_every=2,
    log_every=1,
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_at(owner: object, name: str, call: int, *, after: bool) -> None:
    """The `call`-th call of a function is the last thing the process does, or the last but one."""
    original, count = getattr(owner, name), 0

    def replaced(*args, **kwargs):
        nonlocal count
        count += 1
        if count == call and not after:
            die()
        result = original(*args, **kwargs)
        if count == call:
            die()
        return result

    setattr(owner, name, replaced)


class DyingNetwork(torch.nn.Module):
    """Dies in the forward pass of a step's second chunk."""

    def __init__(self, body: torch.nn.Module, call: int) -> None:
        super().__init__()
        self.body, self.calls_left = body, call

    def forward(self, images):
        self.calls_left -= 1
        if self.calls_left == 0:
            die()
        return self.body(images)


def train(folder: Path, *, model_call: int = 0, evaluation: int = 0) -> None:
    torch.set_num_threads(1)
    seen = 0

    def evaluator(model):
        nonlocal seen
        seen += 1
        if seen == evaluation:
            die()
        return held_out(model)

    fit(
        DyingNetwork(network(), model_call),
        remembering(),
        Vectors(),
        SETTINGS,
        folder,
        evaluators={"validation": evaluator},
        select="validation",
        resume=True,
    )


# 24 items in chunks of 7 are 4 chunks; 1 is kept, so a step has 4 + 3 forward passes
PASSES = 7


def scenarios() -> dict[str, list[Callable[[Path], None]]]:
    """Each a list of lives; the last one is allowed to end by itself."""
    found: dict[str, list[Callable[[Path], None]]] = {"never": []}
    for step in (1, 3, 6, 10, 15):
        found[f"in step {step}"] = [lambda folder, s=step: train(folder, model_call=PASSES * (s - 1) + 4)]
    for evaluation in (1, 3):
        found[f"in evaluation {evaluation}"] = [lambda folder, e=evaluation: train(folder, evaluation=e)]

    def with_fault(owner: object, name: str, call: int, after: bool) -> Callable[[Path], None]:
        def life(folder: Path) -> None:
            dying_at(owner, name, call, after=after)
            train(folder)

        return life

    for call in (1, 2, 3, 4, 5, 6, 7, 12):
        found[f"at fsync {call}"] = [with_fault(os, "fsync", call, after=False)]
    for call in (1, 3, 4):
        found[f"after rename {call}"] = [with_fault(Path, "rename", call, after=True)]
        found[f"before replace {call}"] = [with_fault(os, "replace", call, after=False)]
        found[f"after replace {call}"] = [with_fault(os, "replace", call, after=True)]
    for call in (1, 2):
        found[f"before pruning {call}"] = [with_fault(shutil, "rmtree", call + 3, after=False)]
    found["four times"] = [
        lambda folder: train(folder, model_call=PASSES * 2 + 3),
        with_fault(os, "fsync", 4, after=False),
        lambda folder: train(folder, model_call=PASSES * 5),
        lambda folder: train(folder, evaluation=2),
    ]
    return found


def forked(life: Callable[[Path], None], folder: Path, kill_after: float | None = None) -> int:
    """Exit code of a life: 0, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            life(folder)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fate(folder: Path, deaths: list[int], last: int) -> dict[str, object]:
    pointers = {which: CheckpointStore(folder / "checkpoints").pointer(which) for which in ("last", "best")}
    weights = folder / "checkpoints" / pointers["last"]["folder"] / "weights.safetensors"
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {
        "deaths": deaths,
        "exit": last,
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "pointers": pointers,
        "losses": [(entry["step"], entry["loss"]) for entry in journal if entry["kind"] == "step"],
        "folders": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def main(root: Path) -> None:
    results = {}
    began = time.perf_counter()
    for name, lives in scenarios().items():
        folder = root / name.replace(" ", "-")
        deaths = [forked(life, folder) for life in lives]
        results[name] = fate(folder, deaths, forked(train, folder))
        if name == "never":
            whole = time.perf_counter() - began
    for i, share in enumerate((0.2, 0.5, 0.8)):
        folder = root / f"timed-{i}"
        deaths = [forked(train, folder, kill_after=share * whole)]
        results[f"after {share} of the time"] = fate(folder, deaths, forked(train, folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
