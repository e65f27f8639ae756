"""Hands wrong files and settings to the library's public doors and judges every answer.

    python -m benchmarks.trials.fuzz --cases 1200 --commands 36

Each case is either handled or ends in an error that names the file or the flag: no other exception, no hang, nothing executed from a
file. A case is a function of (seed, kind, number): `--kind lists --number 17` repeats one and shows what it says.
"""

import argparse
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trials.cases import Kind, Verdict, judge
from benchmarks.trials.listed import Annotations, Folders, Lists, Trees
from benchmarks.trials.pictures import Pictures
from benchmarks.trials.settings import Flags
from benchmarks.trials.stored import Checkpoints, Embeddings, RecipeFiles, Reports, Runs, Weights

# memory that a case may ask for beyond what the process has; a file that wants more has lied about its size
MEMORY = 6 << 30
OUTCOMES = ("handled", "clear error")


def kinds(root: Path) -> dict[str, tuple[Kind, int]]:
    """Every kind with its share of the cases."""
    good, runs = Trees(root / "good"), Runs(root / "runs")
    found: list[tuple[Kind, int]] = [
        (Lists(good), 6),
        (Annotations(good), 3),
        (Folders(good), 2),
        (Pictures(), 5),
        (Weights(), 3),
        (Checkpoints(runs), 3),
        (RecipeFiles(runs), 3),
        (Reports(runs), 3),
        (Embeddings(runs), 3),
        (Flags(), 4),
    ]
    return {kind.name: (kind, share) for kind, share in found}


def run_case(kind: Kind, number: int, seed: int, root: Path) -> tuple[str, Verdict]:
    """What a case is, and how it ended."""
    folder, canary = root / "case", root / "canary"
    try:
        case = kind.case(random.Random(f"{seed} {kind.name} {number}"), folder, canary)
        return case.what, judge(case, canary)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Tally:
    """How the cases of each kind ended."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []

    def add(self, kind: str, number: int, what: str, verdict: Verdict) -> None:
        self.counts[kind, verdict.outcome] += 1
        if verdict.fault:
            said = f": {' '.join(verdict.message.split())[:300]!r}" if verdict.message else ""
            self.failures.append(f"{kind} {number}, {what}: {verdict.fault}{said}")

    def table(self) -> str:
        """Kinds down, outcomes across."""
        names = list(dict.fromkeys(kind for kind, _ in self.counts))
        bad = [outcome for outcome in dict.fromkeys(outcome for _, outcome in self.counts) if outcome not in OUTCOMES]
        columns = (*OUTCOMES, *bad)
        width = max(map(len, names))
        lines = ["  ".join(["kind".ljust(width), "cases", *columns])]
        for name in (*names, "all"):
            counts = [sum(self.counts[kind, column] for kind in names if name in (kind, "all")) for column in columns]
            numbers = (f"{count:{len(column)}}" for count, column in zip(counts, columns, strict=True))
            lines.append("  ".join([name.ljust(width), f"{sum(counts):5}", *numbers]))
        return "\n".join(lines)


def run_cases(root: Path, cases: int, seed: int, only: str | None = None) -> Tally:
    """`cases` of all kinds, by their shares, or of one kind."""
    tally = Tally()
    found = kinds(root)
    total = sum(share for name, (_, share) in found.items() if only in (None, name))
    for name, (kind, share) in found.items():
        if only in (None, name):
            for number in range(-(-cases * share // total)):
                tally.add(name, number, *run_case(kind, number, seed, root))
    return tally


def _limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the counts and every failure, return 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trials.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1200, help="about how many, in this process [1200]")
    parser.add_argument("--commands", type=int, default=36, help="how many more, each through a process of `rankgrad` [36]")
    parser.add_argument("--seed", type=int, default=0, help="of everything [0]")
    parser.add_argument("--kind", help="only cases of this kind")
    parser.add_argument("--number", type=int, help="only this case of the kind, and show what it says")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankgrad-fuzz-") as temporary:
        root = Path(temporary)
        if given.number is not None:
            what, verdict = run_case(kinds(root)[given.kind][0], given.number, given.seed, root)
            print(f"{what}\n{verdict.outcome}: {verdict.fault or 'as it should be'}\n{verdict.message}")
            return 1 if verdict.fault else 0
        _limit_memory()
        tally = run_cases(root, given.cases, given.seed, given.kind)
    for failure in tally.failures:
        print(failure)
    print(f"\n{tally.table()}\n\nseed {given.seed}, {len(tally.failures)} failures, {time.monotonic() - began:.0f} s")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
