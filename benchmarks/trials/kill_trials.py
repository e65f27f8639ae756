"""Runs of one process, killed and resumed; a run that lost nothing is the one that nobody killed, to the last bit."""

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trials.run_lifecycle import (
    LONGEST_LIFE,
    STAGES,
    Life,
    Process,
    Watch,
    complaints_after_kill,
    differences,
    moment,
    outcome,
    stage,
)
from benchmarks.trials.tiny_run import VARIANTS, arguments, make_data

EPOCHS, CHECKPOINT_EVERY = 10, 3
AIMS = ("step", "evaluation", "checkpoint", "step", "evaluation", "checkpoint", "pointer", "test", "start", "any moment")


def kill_one(process: Process, watch: Watch, aim: str, rng: random.Random, seconds: float, before: int) -> Life:
    """Kills a process of the run when it is where `aim` says; the run had been started or resumed `before` times."""
    deadline = time.monotonic() + LONGEST_LIFE
    reached = moment(aim, watch, before, rng, seconds, 0.8 * seconds)
    try:
        while process.poll() is None and time.monotonic() < deadline and not next(reached):
            watch.look()
        hung = time.monotonic() >= deadline
    finally:
        process.kill()
    watch.look()
    life = Life(aim)
    if hung:
        life.problems.append(f"hung for {LONGEST_LIFE:.0f} s")
    elif process.status == -signal.SIGKILL:
        life.hit = stage(watch, before)
    elif process.status:
        life.problems.append(f"ended by itself with status {process.status}: {process.last_words()}")
    return life


class Trials:
    """Kills runs until there were enough kills, and counts where they hit."""

    def __init__(self, root: Path, seed: int, *, aims: Sequence[str] = AIMS, forked: bool = False) -> None:
        self.root, self.rng, self.aims, self.forked = root, random.Random(seed), aims, forked
        self.data = make_data(root / "data")
        self.references: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.hits: Counter[tuple[str, str]] = Counter()
        self.runs, self.late = 0, 0
        self.failures: list[str] = []
        self._aims: list[str] = []

    @property
    def kills(self) -> int:
        return sum(self.hits.values())

    def refer(self, variants: Sequence[str]) -> None:
        """Train each variant once without a kill."""
        for variant in variants:
            began = time.monotonic()
            process = self.start(variant, self.never(variant))
            if process.wait():
                raise RuntimeError(f"{variant} could not be trained without a kill: {process.last_words()}")
            self.seconds[variant] = time.monotonic() - began
            self.references[variant] = outcome(self.never(variant))

    def never(self, variant: str) -> Path:
        """The folder of the run that nobody kills."""
        return self.root / f"never-{variant}"

    def start(self, variant: str, folder: Path) -> Process:
        """Starts the run, or resumes it where there is something to resume."""
        return Process(self.command(variant, folder), self.root / "said.txt", forked=self.forked)

    def command(self, variant: str, folder: Path) -> list[str]:
        """Arguments of `rankgrad`."""
        if (folder / "recipe.json").is_file():
            return ["train", "--resume", str(folder), "--device", "cpu", "--cache", "none", "--no-tensorboard"]
        return arguments(self.data, folder, variant, epochs=EPOCHS, checkpoint_every=CHECKPOINT_EVERY)

    def live(self, variant: str, watch: Watch, aim: str) -> Life:
        """A life of the run that a kill ends."""
        before = watch.lives()
        return kill_one(self.start(variant, watch.folder), watch, aim, self.rng, self.seconds[variant], before)

    def end(self, variant: str, folder: Path) -> list[str]:
        """The life that nobody kills; what is wrong with the run then."""
        process = self.start(variant, folder)
        if process.wait():
            return [f"could not be resumed, status {process.status}: {process.last_words()}"]
        return differences(outcome(folder), self.references[variant])

    def run_one(self, variant: str, kills: int) -> list[str]:
        """A run that is killed `kills` times and then ends; what was wrong with it."""
        folder = self.root / f"run-{self.runs}-{variant}"
        self.runs += 1
        watch, problems, done = Watch(folder), list[str](), 0
        while done < kills and not problems:
            life = self.live(variant, watch, self._aim())
            problems += life.problems
            if life.hit is None:
                # the process was faster than the kill: the run is over, or nearly
                self.late += 1
                break
            done += 1
            self.hits[variant, life.hit] += 1
            problems += complaints_after_kill(watch)
        if not problems:
            problems += self.end(variant, folder)
        if not problems:
            shutil.rmtree(folder)
        return [f"{folder.name} after {done} kills: {problem}" for problem in problems]

    def _aim(self) -> str:
        if not self._aims:
            self._aims = self.rng.sample(self.aims, len(self.aims))
        return self._aims.pop()

    def table(self) -> str:
        """Kills by stage and variant."""
        width = max(map(len, STAGES))
        lines = ["  ".join(["killed while".ljust(width), *(f"{variant:>8}" for variant in VARIANTS), "     all"])]
        for name in STAGES:
            counts = [self.hits[variant, name] for variant in VARIANTS]
            lines.append("  ".join([name.ljust(width), *(f"{count:8}" for count in (*counts, sum(counts)))]))
        totals = [sum(self.hits[variant, name] for name in STAGES) for variant in VARIANTS]
        return "\n".join([*lines, "  ".join(["all".ljust(width), *(f"{count:8}" for count in (*totals, self.kills))])])

    def remarks(self) -> list[str]:
        """What else was measured."""
        return []
