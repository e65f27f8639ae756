"""Trains for minutes in one process, with evaluations and checkpoints all the time, and watches what the process holds.

    python -m benchmarks.trials.soak --minutes 10

Resident memory, memory of the GPU where there is one, open files and threads are read every half second. After a warm-up the
slope of each is found: memory that grows faster than `--limit`, or files or threads that become more, are a leak. At the end
the run is asked to stop, as by Ctrl-C, and must do so politely.
"""

import argparse
import contextlib
import io
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.trials.tiny_run import VARIANTS, arguments, make_data
from rankgrad.cli import main as rankgrad
from rankgrad.train.journal import entries

EVERY = 0.5
# share of the time in which allocators, caches and lazy imports fill up
WARM_UP = 0.3
MIB = 2**20
INTERRUPTED = 130


def resident() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() / MIB


def on_gpu() -> float:
    """MiB that tensors take on the GPU."""
    return torch.cuda.memory_allocated() / MIB if torch.cuda.is_available() else 0.0


def open_files() -> float:
    """How many there are."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (counts, and needs no paths)


def threads() -> float:
    """How many there are."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 (the same)


FIGURES: Mapping[str, tuple[Callable[[], float], str]] = {
    "resident memory": (resident, "MiB"),
    "GPU memory": (on_gpu, "MiB"),
    "open files": (open_files, ""),
    "threads": (threads, ""),
}


@dataclass
class Watched:
    """Figures over time."""

    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def look(self) -> None:
        self.times.append(time.monotonic())
        for name, (read, _) in FIGURES.items():
            self.values[name].append(read())

    def after_warm_up(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Minutes and values."""
        minutes = (np.array(self.times) - self.times[0]) / 60
        kept = minutes >= WARM_UP * minutes[-1]
        return minutes[kept], np.array(self.values[name])[kept]

    def slope(self, name: str) -> float:
        """Per minute, after the warm-up.

        The median of the slopes between all pairs of a few dozen times: outliers, and a jump near either end, are no leak.
        """
        minutes, values = self.after_warm_up(name)
        chosen = np.unique(np.linspace(0, len(minutes) - 1, 60).round().astype(int))
        minutes, values = minutes[chosen], values[chosen]
        first, second = np.triu_indices(len(minutes), 1)
        return float(np.median((values[second] - values[first]) / (minutes[second] - minutes[first])))

    def leaks(self, limit: float) -> list[str]:
        """What has grown: memory by more than `limit` MiB a minute, anything else at all."""
        found = []
        for name, (_, unit) in FIGURES.items():
            _, values = self.after_warm_up(name)
            if unit and self.slope(name) > limit:
                found.append(f"{name} grows by {self.slope(name):.2f} {unit} a minute, more than {limit:g}")
            # the highest of the last third beyond the highest of the first: what comes and goes is no leak
            third = max(len(values) // 3, 1)
            if not unit and values[-third:].max() > values[:third].max() and self.slope(name) > 0:
                found.append(f"{name} become more: {values[:third].max():.0f}, then {values[-third:].max():.0f}")
        return found

    def table(self) -> str:
        width = max(map(len, FIGURES))
        lines = [f"{'after the warm-up':{width}}      first       last    highest   a minute"]
        for name, (_, unit) in FIGURES.items():
            _, values = self.after_warm_up(name)
            shown = (values[0], values[-1], values.max())
            lines.append(
                f"{name:{width}} " + "".join(f"{value:10.1f} " for value in shown) + f"{self.slope(name):+10.3f} {unit}"
            )
        return "\n".join(lines)


def soak(root: Path, seconds: float, variant: str = "memory") -> tuple[Watched, int, Path]:
    """Trains until the time is up; what was seen, the status of the command and the run's folder."""
    data = make_data(root / "data")
    folder = root / "run"
    command = arguments(data, folder, variant, epochs=10**6, checkpoint_every=7)
    watched, over = Watched(), threading.Event()

    def watch() -> None:
        # the time begins with the first checkpoint: then all is loaded, and the command hears signals
        while not (folder / "checkpoints" / "last.json").exists():
            if over.wait(EVERY):
                return
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            watched.look()
            if over.wait(EVERY):
                return
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = rankgrad(command)
    finally:
        over.set()
        watcher.join()
    return watched, status, folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print the figures, return 1 if something grows or the run did not stop as it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trials.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long [10]")
    parser.add_argument("--limit", type=float, default=0.5, help="MiB a minute by which memory may grow [0.5]")
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="memory", help="which loss and optimizer [memory]")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rankgrad-soak-") as temporary:
        watched, status, folder = soak(Path(temporary), 60 * given.minutes, given.variant)
        journal = list(entries(folder / "journal.jsonl"))
    steps, tests, saved = (sum(entry["kind"] == kind for entry in journal) for kind in ("step", "eval", "checkpoint"))
    done = f"{steps:,} steps, {tests:,} evaluations, {saved:,} checkpoints"
    print(f"{given.minutes:g} minutes: {done}, {len(watched.times):,} looks")
    print(f"\n{watched.table()}\n")
    problems = watched.leaks(given.limit)
    if status != INTERRUPTED or journal[-1].get("reason") != "interrupted":
        problems.append(f"the run did not stop when asked to: status {status}, last entry {journal[-1].get('kind')}")
    print("\n".join(problems) or "nothing grows")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
