"""Wrong input through the real command in a process of its own: one sentence on standard error, status 2, no traceback."""

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trials.bad_artifacts import Runs
from benchmarks.trials.bad_datasets import LAYOUTS, Trees
from benchmarks.trials.bad_images import BAD
from benchmarks.trials.corruption import malformed_lines, malicious_pickle, put
from benchmarks.trials.fuzz_case import Case, RefusedByCommandError
from benchmarks.trials.tiny_run import COMMAND

# a process begins with the import of torch
SECONDS = 120.0
PLACE = ("--device", "cpu", "--cache", "none")
WRONG_FLAGS = (
    *(("--lr", "fast"), ("--lr=nan",), ("--size", "9" * 50), ("--batch-size=-4",), ("--batch-size", "9"), ("--ks", "1,x")),
    *(
        ("--bacth-size", "4"),
        ("--loss", "fastpa"),
        ("--epochs=--",),
        ("--device", "abacus"),
        ("--flip=maybe",),
        ("--workers", "0"),
    ),
)


class Commands:
    """Cases whose `call` runs a process and raises what it says."""

    name = "commands"

    def __init__(self, good: Trees, runs: Runs) -> None:
        self.good, self.runs = good, runs
        self._makers = (self._flags, self._lists, self._images, self._weights, self._recipe_file, self._embeddings)

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        folder.mkdir()
        arguments, what, names = rng.choice(self._makers)(rng, folder, canary)
        return Case(f"rankgrad {arguments[0]}: {what}", lambda: run(arguments), names, refused=True, seconds=SECONDS)

    def _flags(self, rng: random.Random, folder: Path, canary: Path) -> tuple[Sequence[str], str, Sequence[str]]:
        flags = rng.choice(WRONG_FLAGS)
        name = flags[0].partition("=")[0]
        arguments = ["train", "--data", str(folder), *PLACE, "--out", str(folder / "out"), *flags]
        return arguments, " ".join(flags), (name, name.removeprefix("--").replace("-", "_"))

    def _lists(self, rng: random.Random, folder: Path, canary: Path) -> tuple[Sequence[str], str, Sequence[str]]:
        name = rng.choice(("sop", "inshop", "cub", "csv"))
        root = self.good.copy(name, folder)
        path = root / LAYOUTS[name].lists[0]
        lines = path.read_text(encoding="utf-8").splitlines()
        while True:
            what, content, refused = malformed_lines(lines, rng, LAYOUTS[name].separator)
            if refused:
                break
        put(path, content)
        arguments = rng.choice((["check-data", name, str(root), "--partial"], self._training(root, folder, "--data-set", name)))
        return arguments, f"{path.name}, {what}", (path.name,)

    def _images(self, rng: random.Random, folder: Path, canary: Path) -> tuple[Sequence[str], str, Sequence[str]]:
        root = self.good.copy("folder", folder)
        path = rng.choice(sorted(root.rglob("train/*/*.png")))
        what = rng.choice(tuple(BAD))
        put(path, BAD[what](rng))
        return self._training(root, folder), f"{path.name}, {what}", (path.name,)

    def _weights(self, rng: random.Random, folder: Path, canary: Path) -> tuple[Sequence[str], str, Sequence[str]]:
        path = folder / f"found.{rng.choice(('pt', 'pth', 'safetensors'))}"
        what = rng.choice(("a program", "noise"))
        put(path, malicious_pickle(canary, rng) if what == "a program" else rng.randbytes(500))
        return self._training(self.good.copy("folder", folder), folder, "--weights", str(path)), what, (path.name,)

    def _recipe_file(self, rng: random.Random, folder: Path, canary: Path) -> tuple[Sequence[str], str, Sequence[str]]:
        run_folder = self.runs.run(folder / "run")
        put(run_folder / "recipe.json", rng.choice((b"", b"{", b"[" * 100_000, b'{"name": 1}', b"\xff", b"null")))
        arguments = rng.choice((["eval", str(run_folder)], ["train", "--resume", str(run_folder)]))
        return [*arguments, *PLACE], "recipe.json", ("recipe.json",)

    def _embeddings(self, rng: random.Random, folder: Path, canary: Path) -> tuple[Sequence[str], str, Sequence[str]]:
        place = self.runs.embeddings(folder / "embedded", "csv")
        path = place / "embeddings.npy"
        content = path.read_bytes()
        what, changed = rng.choice((("cut", content[: len(content) // 2]), ("noise", rng.randbytes(400)), ("empty", b"")))
        put(path, changed)
        return ["index", str(place)], f"{path.name}, {what}", (path.name, str(place))

    def _training(self, root: Path, folder: Path, *more: str) -> list[str]:
        small = ("--trunk", "convnet", "--weights", "none", "--size", "24", "--per-class", "2", "--epochs", "1", "--partial")
        return ["train", "--data", str(root), *small, *more, *PLACE, "--no-tensorboard", "--out", str(folder / "out")]


def run(arguments: Sequence[str]) -> None:
    """The command in a process; raises its sentence where it refuses, and anything else where it does anything else."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    if "Traceback" in done.stderr or done.returncode not in (0, 2):
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-600:]}")
    if done.returncode == 2:
        raise RefusedByCommandError(done.stderr)
