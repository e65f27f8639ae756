"""Kills `rankgrad train` with SIGKILL at random points, resumes it, and holds it against a run that nobody killed.

    python -m benchmarks.trials.kill --trials 50

A run is killed one to four times, then left to end. Where a kill shall hit is drawn in turn from starting, stepping,
evaluating, writing a checkpoint, the final test and any moment; where it did hit is read from what the dead process left. After
every kill the checkpoint that `last.json` names must be whole and no older than any that it was ever seen to name. At the end
weights, state, pointers, losses, metrics and test results must be those of the run that was never killed, to the last bit.

Every life is a process of its own: a new interpreter, or with `--forked` a fork of this one, which has torch loaded already and
saves some seconds each.
"""

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch  # noqa: F401 (loaded once, before any fork)
import torch
import torch._dynamo
from benchmarks.trials.training import COMMAND, VARIANTS, arguments, make_data

import rankgrad.recipes.run  # noqa: F401 (loaded once, before any fork)
from rankgrad.cli import main as rankgrad_command
from rankgrad.train.checkpoints import MANIFEST, STATE, UNFINISHED, RunFolder
from rankgrad.train.errors import TrainingError
from rankgrad.train.journal import entries

EPOCHS, CHECKPOINT_EVERY = 10, 3
AIMS = ("step", "evaluation", "checkpoint", "step", "evaluation", "checkpoint", "pointer", "test", "start", "any moment")
MOST_KILLS = 4
# a life of this run takes some seconds; one that takes minutes hangs
LONGEST_LIFE = 300.0
STAGES = (
    "starting",
    "stepping",
    "evaluating",
    "about to write a checkpoint",
    "writing a checkpoint",
    "between checkpoint and pointer",
    "writing a pointer",
    "deleting old checkpoints",
    "final test",
)


class Watch:
    """What can be seen of a run from outside while it goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.named = 0
        """The highest step that last.json was seen to name."""

    def look(self) -> None:
        pointer = RunFolder(self.folder).pointer("last")
        if pointer is not None:
            self.named = max(self.named, int(pointer["step"]))

    def last_entry(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return max(enumerate(entries(self.folder / "journal.jsonl")), default=(0, {}), key=lambda pair: pair[0])[1]
        return {}

    def size(self) -> int:
        """Bytes of the journal, the cheapest sign of progress."""
        try:
            return (self.folder / "journal.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    def unfinished(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.checkpoints) if name.startswith(UNFINISHED))  # noqa: PTH208 (fast)
        return []

    def lives(self) -> int:
        """How often the run was started or resumed."""
        with contextlib.suppress(FileNotFoundError):
            return sum(entry["kind"] in ("start", "resume") for entry in entries(self.folder / "journal.jsonl"))
        return 0


@dataclass
class Life:
    """A process of a run."""

    aim: str
    hit: str | None = None
    """Where the kill hit; None where the process had ended before."""
    problems: list[str] = field(default_factory=list)


class Process:
    """`rankgrad` with some arguments: a new interpreter, or a fork of this one. What it prints goes to a file."""

    def __init__(self, arguments: Sequence[str], said: Path, *, forked: bool) -> None:
        self._said = said
        if forked:
            self.number = os.fork()
            if self.number == 0:
                _live(arguments, said)
        else:
            with said.open("wb") as file:
                actions = [(os.POSIX_SPAWN_DUP2, file.fileno(), descriptor) for descriptor in (1, 2)]
                self.number = os.posix_spawn(COMMAND[0], [*COMMAND, *arguments], os.environ, file_actions=actions)
        self.status: int | None = None

    def poll(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it lives."""
        if self.status is None:
            number, status = os.waitpid(self.number, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if number else None
        return self.status

    def kill(self) -> None:
        """At once; one that has ended keeps its status."""
        if self.poll() is None:
            os.kill(self.number, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])

    def wait(self) -> int | None:
        """Until it ends; a life that takes minutes hangs and is ended."""
        deadline = time.monotonic() + LONGEST_LIFE
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        return self.status

    def said(self) -> str:
        """The end of what it printed."""
        return self._said.read_text(encoding="utf-8", errors="replace").strip()[-500:]


def _live(arguments: Sequence[str], said: Path) -> NoReturn:
    """The life of a fork; nothing of its parent's is cleaned up at its end."""
    status = 1
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = rankgrad_command(list(arguments))
    except BaseException:  # noqa: BLE001 (the parent shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill_one(process: Process, watch: Watch, aim: str, rng: random.Random, seconds: float, before: int) -> Life:
    """Kills a process of the run when it is where `aim` says; the run had been started or resumed `before` times."""
    deadline = time.monotonic() + LONGEST_LIFE
    reached = _moment(aim, watch, before, rng, seconds)
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
        life.hit = _stage(watch, before)
    elif process.status:
        life.problems.append(f"ended by itself with status {process.status}: {process.said()}")
    return life


def _moment(aim: str, watch: Watch, lives: int, rng: random.Random, seconds: float) -> Iterator[bool]:
    """False until the moment to kill has come. What is aimed at lasts milliseconds, so this looks without pause."""
    began = time.monotonic()
    if aim in ("any moment", "start"):
        until = began + rng.uniform(0.0, seconds if aim == "any moment" else 0.8 * seconds)
        while time.monotonic() < until:
            time.sleep(0.002)
            yield False
    else:
        # how much of the run is to pass before the kill; a run that is nearly over may end first
        skipped = 0 if aim == "test" else rng.randrange(12)
        yield from _seen(lambda: watch.lives() > lives)
        for _ in range(skipped):
            size = watch.size()
            yield from _seen(lambda size=size: watch.size() != size)
        signs: dict[str, Callable[[], bool]] = {
            "step": lambda: watch.last_entry().get("kind") in ("step", "checkpoint", "resume"),
            "evaluation": lambda: watch.last_entry().get("kind") == "epoch",
            "checkpoint": lambda: bool(watch.unfinished()),
            "pointer": lambda: any(name.endswith((".json", "-deleted")) for name in watch.unfinished()),
            "test": lambda: watch.last_entry().get("kind") == "end",
        }
        yield from _seen(signs[aim])
        # an evaluation takes 10 ms here, a checkpoint and a step 20 each, the final test 200
        longest = {"evaluation": 0.008, "checkpoint": 0.015, "pointer": 0.0, "step": 0.02, "test": 0.15}[aim]
        until = time.monotonic() + rng.uniform(0.0, longest)
        while time.monotonic() < until:
            yield False
    while True:
        yield True


def _seen(sign: Callable[[], bool]) -> Iterator[bool]:
    while not sign():
        time.sleep(0.0005)
        yield False


def _stage(watch: Watch, lives: int) -> str:
    """What the dead process was doing, from what it left."""
    left = watch.unfinished()
    if any(name.endswith("-deleted") for name in left):
        return "deleting old checkpoints"
    if any(name.endswith(".json") for name in left):
        return "writing a pointer"
    if any("step-" in name for name in left):
        return "writing a checkpoint"
    steps = [int(path.name.removeprefix("step-")) for path in watch.checkpoints.glob("step-*")]
    pointer = RunFolder(watch.folder).pointer("last")
    if steps and max(steps) > (int(pointer["step"]) if pointer else 0):
        return "between checkpoint and pointer"
    if watch.lives() == lives:
        return "starting"
    kind = str(watch.last_entry()["kind"])
    doing = {"epoch": "evaluating", "eval": "about to write a checkpoint", "end": "final test"}
    return doing.get(kind, "stepping")


def complaints_after_kill(watch: Watch) -> list[str]:
    """What a kill has cost; nothing if all is well."""
    run = RunFolder(watch.folder)
    try:
        found, faults = run.newest_good()
    except TrainingError as error:
        return [str(error)]
    problems = [f"a checkpoint is damaged: {fault}" for fault in faults]
    step = 0 if found is None else found.step
    if step < watch.named:
        problems.append(f"last.json named step {watch.named}, what is left is of step {step}")
    if found is not None:
        found.weights()
        found.state()
    return problems


def outcome(folder: Path) -> dict[str, Any]:
    """All that two equal runs must agree in."""
    journal = list(entries(folder / "journal.jsonl"))
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    # it has times in it, and says how often the run was resumed
    del files["journal.jsonl"]
    return {
        "losses": [(entry["step"], entry["loss"], entry["gradient"]) for entry in journal if entry["kind"] == "step"],
        "evaluations": [(entry["step"], entry["metrics"]) for entry in journal if entry["kind"] == "eval"],
        "epochs": [(entry["step"], entry["epoch"]) for entry in journal if entry["kind"] == "epoch"],
        "end": [(entry["step"], entry["reason"]) for entry in journal if entry["kind"] == "end"][-1:],
        **{name: _fingerprint(path) for name, path in files.items() if path.name != MANIFEST},
    }


def _fingerprint(path: Path) -> str:
    """Of a file's content; of state.pt what it says, since pickle may say the same in other bytes."""
    digest = hashlib.sha256()
    if path.name == STATE:
        for part in _flat(torch.load(path, weights_only=True)):
            digest.update(part)
    else:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.contiguous().numpy().tobytes()
    elif isinstance(value, (dict, list, tuple)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for item in value.items() if isinstance(value, dict) else value:
            yield from _flat(item)
    else:
        yield repr(value).encode()


def differences(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Where a run is not like the one that was never killed."""
    return [f"{key} is not the same" for key in sorted(run.keys() | reference.keys()) if run.get(key) != reference.get(key)]


class Trials:
    """Kills runs until there were enough kills, and counts where they hit."""

    def __init__(self, root: Path, seed: int, *, forked: bool = False) -> None:
        self.root, self.rng, self.forked = root, random.Random(seed), forked
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
            folder = self.root / f"never-{variant}"
            began = time.monotonic()
            process = self._start(variant, folder)
            if process.wait():
                raise RuntimeError(f"{variant} could not be trained without a kill: {process.said()}")
            self.seconds[variant] = time.monotonic() - began
            self.references[variant] = outcome(folder)

    def _start(self, variant: str, folder: Path) -> Process:
        """Starts the run, or resumes it where there is something to resume."""
        if (folder / "recipe.json").is_file():
            given = ["train", "--resume", str(folder), "--device", "cpu", "--cache", "none", "--no-tensorboard"]
        else:
            given = arguments(self.data, folder, variant, epochs=EPOCHS, checkpoint_every=CHECKPOINT_EVERY)
        return Process(given, self.root / "said.txt", forked=self.forked)

    def run_one(self, variant: str, kills: int) -> list[str]:
        """A run that is killed `kills` times and then ends; what was wrong with it."""
        folder = self.root / f"run-{self.runs}-{variant}"
        self.runs += 1
        watch, problems, done = Watch(folder), list[str](), 0
        while done < kills and not problems:
            before = watch.lives()
            process = self._start(variant, folder)
            life = kill_one(process, watch, self._aim(), self.rng, self.seconds[variant], before)
            problems += life.problems
            if life.hit is None:
                # the process was faster than the kill: the run is over, or nearly
                self.late += 1
                break
            done += 1
            self.hits[variant, life.hit] += 1
            problems += complaints_after_kill(watch)
        if not problems:
            process = self._start(variant, folder)
            if process.wait():
                problems.append(f"could not be resumed, status {process.status}: {process.said()}")
            else:
                problems += differences(outcome(folder), self.references[variant])
        if not problems:
            shutil.rmtree(folder)
        return [f"{folder.name} after {done} kills: {problem}" for problem in problems]

    def _aim(self) -> str:
        if not self._aims:
            self._aims = self.rng.sample(AIMS, len(AIMS))
        return self._aims.pop()

    def table(self) -> str:
        """Kills by stage and variant."""
        width = max(map(len, STAGES))
        lines = ["  ".join(["killed while".ljust(width), *(f"{variant:>8}" for variant in VARIANTS), "     all"])]
        for stage in STAGES:
            counts = [self.hits[variant, stage] for variant in VARIANTS]
            lines.append("  ".join([stage.ljust(width), *(f"{count:8}" for count in (*counts, sum(counts)))]))
        totals = [sum(self.hits[variant, stage] for stage in STAGES) for variant in VARIANTS]
        return "\n".join([*lines, "  ".join(["all".ljust(width), *(f"{count:8}" for count in (*totals, self.kills))])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print the table, return 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trials.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50, help="kills [50]")
    parser.add_argument("--seed", type=int, default=0, help="of where they shall hit [0]")
    parser.add_argument("--variant", choices=tuple(VARIANTS), action="append", help="only this loss; may be repeated [all]")
    parser.add_argument("--forked", action="store_true", help="fork the processes, which is faster")
    parser.add_argument("--out", type=Path, help="folder that failed runs stay in [a temporary one]")
    given = parser.parse_args(arguments)
    if given.trials < 1:
        parser.error(f"--trials must be at least 1, got {given.trials}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankgrad-kill-") as temporary:
        root = given.out or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        trials = Trials(root, given.seed, forked=given.forked)
        variants = given.variant or tuple(VARIANTS)
        trials.refer(variants)
        whole = ", ".join(f"{variant} {seconds:.1f} s" for variant, seconds in trials.seconds.items())
        print(f"never killed: {whole}; {len(trials.references[variants[0]]['losses'])} steps, {EPOCHS} evaluations", flush=True)
        while trials.kills < given.trials:
            variant = variants[trials.runs % len(variants)]
            kills = min(trials.rng.randint(1, MOST_KILLS), given.trials - trials.kills)
            found = trials.run_one(variant, kills)
            trials.failures += found
            print(f"{trials.kills} of {given.trials} kills, {variant}: {'; '.join(found) or 'as never killed'}", flush=True)
            if given.out is None and found:
                print(f"give --out DIR to keep it; the run was number {trials.runs} of seed {given.seed}", flush=True)
    print(f"\n{trials.table()}\n")
    print(
        f"{trials.kills} kills in {trials.runs} runs, each resumed and compared; {trials.late} came after the end; "
        f"{len(trials.failures)} runs lost something; {time.monotonic() - began:.0f} s"
    )
    return 1 if trials.failures else 0


if __name__ == "__main__":
    sys.exit(main())
