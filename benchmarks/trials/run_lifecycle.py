"""The lifecycle of a run: started, observed from outside until a kill point, killed, resumed, and compared at the end."""

import contextlib
import hashlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch  # noqa: F401 (loaded once, before any fork)
import torch
import torch._dynamo

import rankgrad.runs.pipeline  # noqa: F401 (loaded once, before any fork)
from benchmarks.trials.tiny_run import COMMAND
from rankgrad.cli import main as rankgrad_command
from rankgrad.train.checkpoints import MANIFEST, UNFINISHED, CheckpointStore
from rankgrad.train.errors import TrainingError
from rankgrad.train.journal import entries

# an attempt of this run takes some seconds; one that takes minutes hangs
TIMEOUT = 300.0
THREADS = torch.get_num_threads()
STAGES = (
    "starting",
    "decoding images",
    "stepping",
    "evaluating",
    "about to write a checkpoint",
    "writing a checkpoint",
    "between checkpoint and pointer",
    "writing a pointer",
    "deleting old checkpoints",
    "final test",
)


class Observer:
    """What can be seen of a run from outside while it goes on; of decoding, if it has a cache of its own."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder, self.cache = folder, cache
        self.checkpoints = folder / "checkpoints"
        self.named = 0
        """The highest step that last.json was seen to name."""

    def update(self) -> None:
        pointer = CheckpointStore(self.folder / "checkpoints").pointer("last")
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

    def decoding(self) -> bool:
        """Whether decoded images are being written."""
        return self.cache is not None and any(self.cache.glob(".writing-*"))

    def starts(self) -> int:
        """How often the run was started or resumed."""
        with contextlib.suppress(FileNotFoundError):
            return sum(entry["kind"] in ("start", "resume") for entry in entries(self.folder / "journal.jsonl"))
        return 0


@dataclass
class Attempt:
    """A run from its start or resumption to a kill."""

    kill_point: str
    hit: str | None = None
    """Where the kill hit; None where the run had ended before."""
    problems: list[str] = field(default_factory=list)


class Process:
    """`rankgrad` with some arguments: a new interpreter, or a fork of this one. What it prints goes to a file."""

    def __init__(
        self, arguments: Sequence[str], output: Path, *, forked: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self._output = output
        if forked:
            # a fork of a process that has threads for its sums would wait for them, which are not there
            torch.set_num_threads(1)
            self.number = os.fork()
            if self.number == 0:
                _run_forked(arguments, output)
        else:
            with output.open("wb") as file:
                actions = [(os.POSIX_SPAWN_DUP2, file.fileno(), descriptor) for descriptor in (1, 2)]
                self.number = os.posix_spawn(
                    COMMAND[0], [*COMMAND, *arguments], {**os.environ, **(environment or {})}, file_actions=actions
                )
        self.status: int | None = None

    def poll(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it runs."""
        if self.status is None:
            number, status = os.waitpid(self.number, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if number else None
        return self.status

    def kill(self) -> None:
        """At once; one that has ended keeps its status."""
        if self.poll() is None:
            os.kill(self.number, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])

    def wait(self, seconds: float = TIMEOUT) -> int | None:
        """Until it ends; an attempt that takes minutes hangs and is ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        return self.status

    def output(self) -> str:
        """All that it printed."""
        return self._output.read_text(encoding="utf-8", errors="replace").strip()

    def last_output(self) -> str:
        """The end of what it printed."""
        return self.output()[-500:]


def _run_forked(arguments: Sequence[str], output: Path) -> NoReturn:
    """Run in a fork; nothing of its parent's is cleaned up at its end."""
    status = 1
    try:
        torch.set_num_threads(THREADS)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = rankgrad_command(list(arguments))
    except BaseException:  # noqa: BLE001 (the parent shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def await_kill_point(
    kill_point: str, observer: Observer, starts: int, rng: random.Random, seconds: float, starting: float
) -> Iterator[bool]:
    """Yield False until the kill point is reached. It lasts milliseconds, so this polls without pause.

    Args:
        kill_point: where the kill shall hit, one of `KILL_POINTS` or `RANK_KILL_POINTS`.
        observer: of the run.
        starts: how often it had been started or resumed before.
        rng: draws how long to wait.
        seconds: that a whole attempt takes.
        starting: seconds until it steps.
    """
    began = time.monotonic()
    if kill_point in ("any moment", "start"):
        until = began + rng.uniform(0.0, seconds if kill_point == "any moment" else starting)
        while time.monotonic() < until:
            time.sleep(0.002)
            yield False
    elif kill_point == "decode":
        yield from _seen(observer.decoding)
    else:
        # how much of the run is to pass before the kill; a run that is nearly over may end first
        skipped = 0 if kill_point == "test" else rng.randrange(12)
        yield from _seen(lambda: observer.starts() > starts)
        for _ in range(skipped):
            size = observer.size()
            yield from _seen(lambda size=size: observer.size() != size)
        signs: dict[str, Callable[[], bool]] = {
            "step": lambda: observer.last_entry().get("kind") in ("step", "checkpoint", "resume"),
            "evaluation": lambda: observer.last_entry().get("kind") == "epoch",
            "checkpoint": lambda: bool(observer.unfinished()),
            "pointer": lambda: any(name.endswith((".json", "-deleted")) for name in observer.unfinished()),
            "test": lambda: observer.last_entry().get("kind") == "end",
        }
        yield from _seen(signs[kill_point])
        # an evaluation takes 10 ms here, a checkpoint and a step 20 each, the final test 200
        longest = {"evaluation": 0.008, "checkpoint": 0.015, "pointer": 0.0, "step": 0.02, "test": 0.15}[kill_point]
        until = time.monotonic() + rng.uniform(0.0, longest)
        while time.monotonic() < until:
            yield False
    while True:
        yield True


def _seen(sign: Callable[[], bool]) -> Iterator[bool]:
    while not sign():
        time.sleep(0.0005)
        yield False


def stage(observer: Observer, starts: int) -> str:
    """What the run is doing, or a dead one was doing, from its files."""
    left = observer.unfinished()
    if any(name.endswith("-deleted") for name in left):
        return "deleting old checkpoints"
    if any(name.endswith(".json") for name in left):
        return "writing a pointer"
    if any("step-" in name for name in left):
        return "writing a checkpoint"
    steps = [int(path.name.removeprefix("step-")) for path in observer.checkpoints.glob("step-*")]
    pointer = CheckpointStore(observer.folder / "checkpoints").pointer("last")
    if steps and max(steps) > (int(pointer["step"]) if pointer else 0):
        return "between checkpoint and pointer"
    if observer.decoding():
        return "decoding images"
    if observer.starts() == starts:
        return "starting"
    kind = str(observer.last_entry()["kind"])
    doing = {"epoch": "evaluating", "eval": "about to write a checkpoint", "end": "final test"}
    return doing.get(kind, "stepping")


def complaints_after_kill(observer: Observer) -> list[str]:
    """What a kill has cost; nothing if all is well."""
    run = CheckpointStore(observer.folder / "checkpoints")
    try:
        found, faults = run.newest_good()
    except TrainingError as error:
        return [str(error)]
    problems = [f"a checkpoint is damaged: {fault}" for fault in faults]
    step = 0 if found is None else found.step
    if step < observer.named:
        problems.append(f"last.json named step {observer.named}, what is left is of step {step}")
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
        **{name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.name != MANIFEST},
    }


def differences(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Where a run is not like the one that was never killed."""
    return [f"{key} is not the same" for key in sorted(run.keys() | reference.keys()) if run.get(key) != reference.get(key)]
