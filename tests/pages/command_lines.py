"""Command lines of the pages, run in this process and in a short form.

A line that starts with `rankgrad` runs as it stands, plus what `SHORT` adds to make it a matter of a second. Other programs
are not started: that what they name exists is checked instead.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from rankgrad.cli import main

ROOT = Path(__file__).parents[2]
# added to a command, by the words it begins with, so that it takes a second
SHORT = {
    "demo": ["--steps", "1", "--classes", "8"],
    "train": ["--debug"],
    "sweep": ["--debug"],
    "study": ["--debug"],
    "check-data": ["--partial"],
    "detect train": ["--debug"],
    "detect study": ["--debug"],
}
# they resume a run, whose size is fixed
UNCHANGED = ("--resume",)


def lines_of(block: str) -> Iterator[str]:
    """Commands of a block, continued lines joined, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split(" #")[0].strip()
        if command and not command.startswith("#"):
            yield command


def run(line: str) -> None:
    """Run one line, or check it."""
    words = shlex.split(line)
    environment = [word for word in words if re.match(r"[A-Z_]+=", word)]
    program, *arguments = words[len(environment) :]
    assert program in PROGRAMS, f"a page shows a command that no test knows: {line}"
    PROGRAMS[program](arguments)


def _rankgrad(arguments: list[str]) -> None:
    short: list[str] = []
    if not set(arguments) & {*UNCHANGED, "--help", "--debug"}:
        short = next((extra for verb, extra in SHORT.items() if arguments[: len(verb.split())] == verb.split()), [])
    try:
        status = main([*arguments, *short])
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    assert status == 0, f"rankgrad {shlex.join([*arguments, *short])} ended with {status}"


def _python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, f"there is no module {arguments[1]}"
        if arguments[1].startswith("rankgrad"):
            _rankgrad(arguments[2:])
    else:
        # tests/test_examples.py runs them
        assert (ROOT / arguments[0]).is_file(), f"there is no {arguments[0]}"


def _torchrun(arguments: list[str]) -> None:
    # several machines are not at hand; the launcher itself is tested in tests/distributed
    assert "rankgrad.cli" in arguments or any((ROOT / word).is_file() for word in arguments if word.endswith(".py"))


def _make(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(arguments) <= set(targets), f"the Makefile has no {arguments}"


def _pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    known = re.findall(
        r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1], re.MULTILINE
    )
    wanted = [name for word in arguments for found in re.findall(r"\[([\w,-]+)\]", word) for name in found.split(",")]
    assert set(wanted) <= set(known), f"pyproject.toml has no extra {set(wanted) - set(known)}"


def _nothing(arguments: list[str]) -> None:
    """`cd`, `git clone`: nothing to check."""


PROGRAMS = {
    "rankgrad": _rankgrad,
    "python": _python,
    "torchrun": _torchrun,
    "make": _make,
    "pip": _pip,
    "cd": _nothing,
}
