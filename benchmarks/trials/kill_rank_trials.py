"""Runs of several processes of which one rank is killed.

Every job is a real `rankgrad train --processes N`, whose ranks decode with processes of their own. When one rank is gone the
whole job must end by itself within `SECONDS`, with a status that is not 0 and, as its last line, which rank it was, where the
last checkpoint is and how to go on; nothing that the job has started may live on.

The killed attempts of a run have N processes. The last one has N, or 1, or 2 N. With N the run must be the one that nobody
killed to the last bit. With another number it must be so up to the change. The first step after it must have the same loss but
for the rounding of one step, which no other batch would have, and so must the steps, metrics and weights that follow but for
what training makes of that rounding.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import job_processes
from safetensors.torch import load_file

from benchmarks.trials.kill_trials import KillTrials
from benchmarks.trials.run_lifecycle import TIMEOUT, Attempt, Observer, Process, await_kill_point, differences, outcome, stage
from rankgrad.train.checkpoints import WEIGHTS, CheckpointStore
from rankgrad.train.journal import entries

RANK_KILL_POINTS = ("start", "decode", "step", "evaluation", "checkpoint", "step", "test", "any moment")
# decodes images anew whenever they are shown, in processes that a rank starts; the others do it once, before they step
DECODES_ALWAYS = "simix"
# in which a job must have ended; torchrun gives a survivor 30 s to notice
SECONDS = 30.0
# in which what a killed rank had started must have noticed that it is alone
ORPHANED = 10.0
# set for a job, and so for all that it starts
MARK = "RANKGRAD_TRIAL"

# relative to a loss of another number of processes, float32: 2e-7 in the first step, up to 2e-3 after thirty. From a batch to
# the next it is 1e-3 at least and mostly 1e-1.
FIRST_STEP, LATER_STEPS = 1e-5, 1e-2
# relative to the norm of a tensor of weights, 4e-3 at most; and of a metric, of which an image in 96 is 1e-2
OF_WEIGHTS, OF_METRICS = 2e-2, 2e-2


class KillRankTrials(KillTrials):
    """Kills one rank of a run until there were enough kills."""

    def __init__(self, root: Path, seed: int, *, kill_points: Sequence[str], processes: int) -> None:
        super().__init__(root, seed, kill_points=kill_points)
        self.processes = processes
        self.longest, self.longest_orphan = 0.0, 0.0
        self.by_rank: Counter[int] = Counter()
        self.last_attempts: Counter[int] = Counter()
        self.furthest: dict[str, float] = {}
        self._numbers: list[int] = []
        self._attempts = 0

    def start(self, variant: str, folder: Path, processes: int | None = None) -> Process:
        given = [*self.command(variant, folder), "--processes", str(processes or self.processes), "--workers", "1"]
        # a new one for every attempt that is killed, so that each has images to decode; of two such flags the last counts
        given += ["--cache", str(self._cache)]
        if variant == DECODES_ALWAYS and "--resume" not in given:
            given += ["--decode", "always"]
        return Process(given, self.root / "output.txt", environment={MARK: str(folder)})

    @property
    def _cache(self) -> Path:
        return self.root / f"cache-{self._attempts}"

    def attempt(self, variant: str, observer: Observer, kill_point: str) -> Attempt:
        self._attempts += 1
        observer.cache = self._cache
        before = observer.starts()
        process = self.start(variant, observer.folder)
        try:
            return self._kill_rank(process, variant, observer, kill_point, before)
        finally:
            process.kill()

    def _kill_rank(self, process: Process, variant: str, observer: Observer, kill_point: str, before: int) -> Attempt:
        """Kills a rank when the run is where `kill_point` says, and sees how the job ends."""
        attempt, rank = Attempt(kill_point), self.rng.randrange(self.processes)
        there = _all_ranks(process, observer.folder, self.processes)
        if kill_point == "decode" and variant == DECODES_ALWAYS:
            kill_point = "step"
        # of a whole attempt, a part of which has passed
        reached = await_kill_point(
            kill_point, observer, before, self.rng, 0.8 * self.seconds[variant], 0.3 * self.seconds[variant]
        )
        deadline = time.monotonic() + TIMEOUT
        while process.poll() is None and time.monotonic() < deadline and not next(reached):
            observer.update()
        if time.monotonic() >= deadline:
            attempt.problems.append(f"hung for {TIMEOUT:.0f} s")
        doing = stage(observer, before)
        if not job_processes.killed(there[rank]):
            process.wait()
            return attempt
        struck = time.monotonic()
        process.wait(SECONDS)
        attempt.hit, took = doing, time.monotonic() - struck
        orphans = _ended_orphans(observer.folder)
        observer.update()
        self.by_rank[rank] += 1
        self.longest = max(self.longest, took)
        self.longest_orphan = max(self.longest_orphan, time.monotonic() - struck)
        problems = _complaints(process, rank, self.processes, observer)
        if took >= SECONDS:
            problems.append(f"the job had not ended after {SECONDS:.0f} s")
        if orphans:
            problems.append(f"{orphans} processes lived on")
        attempt.problems += [f"rank {rank} killed while {doing}: {problem}" for problem in problems]
        return attempt

    def end(self, variant: str, folder: Path) -> list[str]:
        if not self._numbers:
            self._numbers = self.rng.sample((1, self.processes, 2 * self.processes), 3)
        number = self._numbers.pop()
        self.last_attempts[number] += 1
        process = self.start(variant, folder, number)
        if process.wait():
            return [f"could not be resumed with {number} processes, status {process.status}: {process.last_output()}"]
        if number == self.processes:
            return differences(outcome(folder), self.references[variant])
        return self.distances(variant, folder)

    def distances(self, variant: str, folder: Path) -> list[str]:
        """Where a run that ended with another number of processes is too far from the one that nobody killed."""
        found, expected = outcome(folder), self.references[variant]
        problems = differences(
            {key: found[key] for key in ("epochs", "end")}, {key: expected[key] for key in ("epochs", "end")}
        )
        begun = [entry for entry in entries(folder / "journal.jsonl") if entry["kind"] in ("start", "resume")]
        changed_at = min(entry["step"] for entry in begun if entry["processes"] != self.processes)
        if [step for step, *_ in found["losses"]] != [step for step, *_ in expected["losses"]]:
            return [*problems, "other steps were made"]
        for (step, loss, _), (_, wanted, _) in zip(found["losses"], expected["losses"], strict=True):
            distance = abs(loss - wanted) / abs(wanted)
            if step <= changed_at:
                problems += [f"the loss of step {step} is not the same"] if distance else []
            else:
                first = step == changed_at + 1
                what, limit = ("first loss", FIRST_STEP) if first else ("later losses", LATER_STEPS)
                problems += self._too_far(what, f"the loss of step {step}", distance, limit)
        reference = self.reference_folder(variant)
        stores = (CheckpointStore(path / "checkpoints") for path in (folder, reference))
        ours, theirs = (load_file(store.checkpoint("last").folder / WEIGHTS) for store in stores)
        for name, weights in theirs.items():
            distance = float((ours[name] - weights).norm() / weights.norm().clamp(min=1e-6))
            problems += self._too_far("weights", name, distance, OF_WEIGHTS)
        pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(found["evaluations"], expected["evaluations"], strict=True)]
        if _best(folder) == _best(reference):
            # where an image more made another checkpoint the best, another one is tested
            pairs.append((_tested(folder), _tested(reference)))
        for metrics, wanted in pairs:
            for name, value in wanted.items():
                problems += self._too_far("metrics", name, abs(metrics[name] - value), OF_METRICS)
        return problems

    def _too_far(self, what: str, which: str, distance: float, limit: float) -> list[str]:
        self.furthest[what] = max(self.furthest.get(what, 0.0), distance)
        return [] if distance <= limit else [f"{which} is {distance:.1e} from that of {self.processes} processes"]

    def remarks(self) -> list[str]:
        by_rank = ", ".join(f"rank {rank} {self.by_rank[rank]}" for rank in range(self.processes))
        attempts = ", ".join(f"{self.last_attempts[number]} with {number}" for number in sorted(self.last_attempts))
        far = ", ".join(f"{what} {distance:.1e}" for what, distance in self.furthest.items())
        return [
            f"killed: {by_rank}; jobs ended at most {self.longest:.1f} s later, all they started {self.longest_orphan:.1f} s",
            f"last attempts: {attempts} processes; differences with another number than {self.processes}: {far or 'none'}",
        ]


def _all_ranks(process: Process, mark: Path, processes: int) -> dict[int, int]:
    """Process ids by rank, when all are there."""
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        found = job_processes.ranks(mark)
        if len(found) == processes:
            return found
        time.sleep(0.02)
    raise RuntimeError(f"{processes} ranks did not start: {process.last_output()}")


def _ended_orphans(mark: Path) -> int:
    """How many processes of a job that has ended do not end by themselves; they are helped."""
    deadline = time.monotonic() + ORPHANED
    while (found := job_processes.alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sum(map(job_processes.killed, found))


def _complaints(process: Process, rank: int, processes: int, observer: Observer) -> list[str]:
    """What is wrong with the output of a job that lost a rank."""
    run, output = CheckpointStore(observer.folder / "checkpoints"), process.output()
    begun = (observer.folder / "recipe.json").is_file()
    resume = f"Continue with: rankgrad train --resume {observer.folder} --processes {processes}"
    way = resume if begun else "Nothing of the run was written: start it again"
    expected = f"rankgrad train: rank {rank} of {processes} processes was ended by SIGKILL; {run.describe_last()}. {way}"
    problems = [] if process.status else ["the job's status is 0"]
    if not output.endswith(expected):
        problems.append(f"it should have printed {expected!r} and not {process.last_output()!r}")
    return problems + [f"it printed {word!r}: {output[-1500:]}" for word in ("Traceback", "terminate called") if word in output]


def _best(folder: Path) -> int | None:
    pointer = CheckpointStore(folder / "checkpoints").pointer("best")
    return None if pointer is None else int(pointer["step"])


def _tested(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "eval" / "test" / "result.json").read_text(encoding="utf-8"))["metrics"]
    return metrics
