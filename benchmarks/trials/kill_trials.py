"""Runs of one process, killed and resumed; one that lost nothing equals the uninterrupted run bit for bit."""

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trials.run_lifecycle import (
    STAGES,
    TIMEOUT,
    Attempt,
    Observer,
    Process,
    await_kill_point,
    complaints_after_kill,
    differences,
    outcome,
    stage,
)
from benchmarks.trials.tiny_run import VARIANTS, arguments, make_data
from rankgrad._messages import table

EPOCHS, CHECKPOINT_EVERY = 10, 3
KILL_POINTS = ("step", "evaluation", "checkpoint", "step", "evaluation", "checkpoint", "pointer", "test", "start", "any moment")


def kill_one(process: Process, observer: Observer, kill_point: str, rng: random.Random, seconds: float, before: int) -> Attempt:
    """Kills a process of the run when it is where `kill_point` says; the run had been started or resumed `before` times."""
    deadline = time.monotonic() + TIMEOUT
    reached = await_kill_point(kill_point, observer, before, rng, seconds, 0.8 * seconds)
    try:
        while process.poll() is None and time.monotonic() < deadline and not next(reached):
            observer.update()
        hung = time.monotonic() >= deadline
    finally:
        process.kill()
    observer.update()
    attempt = Attempt(kill_point)
    if hung:
        attempt.problems.append(f"hung for {TIMEOUT:.0f} s")
    elif process.status == -signal.SIGKILL:
        attempt.hit = stage(observer, before)
    elif process.status:
        attempt.problems.append(f"ended by itself with status {process.status}: {process.last_output()}")
    return attempt


class KillTrials:
    """Kills runs until there were enough kills, and counts where they hit."""

    def __init__(self, root: Path, seed: int, *, kill_points: Sequence[str] = KILL_POINTS, forked: bool = False) -> None:
        self.root, self.rng, self.kill_points, self.forked = root, random.Random(seed), kill_points, forked
        self.data = make_data(root / "data")
        self.references: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.hits: Counter[tuple[str, str]] = Counter()
        self.runs, self.late = 0, 0
        self.failures: list[str] = []
        self._remaining: list[str] = []

    @property
    def kills(self) -> int:
        return sum(self.hits.values())

    def run_references(self, variants: Sequence[str]) -> None:
        """Train each variant once without a kill."""
        for variant in variants:
            began = time.monotonic()
            process = self.start(variant, self.reference_folder(variant))
            if process.wait():
                raise RuntimeError(f"{variant} could not be trained without a kill: {process.last_output()}")
            self.seconds[variant] = time.monotonic() - began
            self.references[variant] = outcome(self.reference_folder(variant))

    def reference_folder(self, variant: str) -> Path:
        """The folder of the uninterrupted run."""
        return self.root / f"reference-{variant}"

    def start(self, variant: str, folder: Path) -> Process:
        """Starts the run, or resumes it where there is something to resume."""
        return Process(self.command(variant, folder), self.root / "output.txt", forked=self.forked)

    def command(self, variant: str, folder: Path) -> list[str]:
        """Arguments of `rankgrad`."""
        if (folder / "recipe.json").is_file():
            return ["train", "--resume", str(folder), "--device", "cpu", "--cache", "none", "--no-tensorboard"]
        return arguments(self.data, folder, variant, epochs=EPOCHS, checkpoint_every=CHECKPOINT_EVERY)

    def attempt(self, variant: str, observer: Observer, kill_point: str) -> Attempt:
        """One attempt, which a kill ends."""
        before = observer.starts()
        return kill_one(self.start(variant, observer.folder), observer, kill_point, self.rng, self.seconds[variant], before)

    def end(self, variant: str, folder: Path) -> list[str]:
        """The last attempt, which is not killed; what is wrong with the run then."""
        process = self.start(variant, folder)
        if process.wait():
            return [f"could not be resumed, status {process.status}: {process.last_output()}"]
        return differences(outcome(folder), self.references[variant])

    def run_one(self, variant: str, kills: int) -> list[str]:
        """A run that is killed `kills` times and then ends; what was wrong with it."""
        folder = self.root / f"run-{self.runs}-{variant}"
        self.runs += 1
        observer, problems, done = Observer(folder), list[str](), 0
        while done < kills and not problems:
            attempt = self.attempt(variant, observer, self._next_kill_point())
            problems += attempt.problems
            if attempt.hit is None:
                # the process was faster than the kill: the run is over, or nearly
                self.late += 1
                break
            done += 1
            self.hits[variant, attempt.hit] += 1
            problems += complaints_after_kill(observer)
        if not problems:
            problems += self.end(variant, folder)
        if not problems:
            shutil.rmtree(folder)
        return [f"{folder.name} after {done} kills: {problem}" for problem in problems]

    def _next_kill_point(self) -> str:
        if not self._remaining:
            self._remaining = self.rng.sample(self.kill_points, len(self.kill_points))
        return self._remaining.pop()

    def table(self) -> str:
        """Kills by stage and variant."""
        counts = {name: [self.hits[variant, name] for variant in VARIANTS] for name in STAGES}
        counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
        return table(
            ["killed while", *VARIANTS, "all"], [[name, *map(str, row), str(sum(row))] for name, row in counts.items()]
        )

    def remarks(self) -> list[str]:
        """What else was measured."""
        return []
