"""Pass malformed files and settings to the library's entry points and judge every answer.

    python -m benchmarks.trials.fuzz --cases 1200 --commands 36

Each case is either handled or ends in an error that names the file or the flag: no other exception, no hang, nothing executed
from a file. A case is a function of (seed, kind, number): `--kind lists --number 17` repeats one and shows what it says.
"""

import argparse
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.trials.bad_artifacts import Checkpoints, RecipeFiles, Runs, Weights
from benchmarks.trials.bad_commands import Commands
from benchmarks.trials.bad_datasets import Annotations, Folders, Lists, Trees
from benchmarks.trials.bad_images import Landmarks, Pictures
from benchmarks.trials.bad_outputs import Embeddings, Reports
from benchmarks.trials.bad_settings import Flags
from benchmarks.trials.fuzz_case import Kind, Verdict, judge
from rankgrad._messages import table

# memory that a case may ask for beyond what the process has; a file that wants more has lied about its size
MEMORY = 6 << 30
OUTCOMES = ("handled", "clear error")


# how the cases are divided; those through a process of `rankgrad` take seconds each, so their number is asked for apart
SHARES = {
    "lists": 6,
    "annotations": 3,
    "folders": 2,
    "images": 5,
    "landmarks": 1,
    "weights": 3,
    "checkpoints": 3,
    "recipe files": 3,
    "reports": 3,
    "embeddings": 3,
    "flags": 4,
    "commands": 0,
}


def kinds(root: Path) -> dict[str, Kind]:
    """What makes the cases of each kind; good files to begin with are written below `root` when they are needed."""
    good, runs = Trees(root / "good"), Runs(root / "runs")
    found: list[Kind] = [
        *(Lists(good), Annotations(good), Folders(good), Pictures(), Landmarks(), Weights(), Checkpoints(runs)),
        *(RecipeFiles(runs), Reports(runs), Embeddings(runs), Flags(), Commands(good, runs)),
    ]
    return {kind.name: kind for kind in found}


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
        rows = []
        for name in (*names, "all"):
            counts = [sum(self.counts[kind, column] for kind in names if name in (kind, "all")) for column in columns]
            rows.append([name, str(sum(counts)), *map(str, counts)])
        return table(["kind", "cases", *columns], rows)


def run_cases(root: Path, cases: Mapping[str, int], seed: int) -> Tally:
    """So many of each kind."""
    tally, found = Tally(), kinds(root)
    for name, count in cases.items():
        for number in range(count):
            tally.add(name, number, *run_case(found[name], number, seed, root))
    return tally


def divided(cases: int, commands: int) -> dict[str, int]:
    """`cases` divided among the kinds, and `commands` of those that take a process each."""
    counts = {name: -(-cases * share // sum(SHARES.values())) for name, share in SHARES.items()}
    return {**counts, "commands": commands}


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
    if given.kind not in (None, *SHARES) or (given.kind is None and given.number is not None):
        parser.error(f"--kind must be one of {', '.join(SHARES)}, got {given.kind!r}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankgrad-fuzz-") as temporary:
        root = Path(temporary)
        if given.number is not None:
            what, verdict = run_case(kinds(root)[given.kind], given.number, given.seed, root)
            print(f"{what}\n{verdict.outcome}: {verdict.fault or 'as it should be'}\n{verdict.message}")
            return 1 if verdict.fault else 0
        _limit_memory()
        counts = divided(given.cases, given.commands) if given.kind is None else {given.kind: given.cases}
        tally = run_cases(root, counts, given.seed)
    for failure in tally.failures:
        print(failure)
    print(f"\n{tally.table()}\n\nseed {given.seed}, {len(tally.failures)} failures, {time.monotonic() - began:.0f} s")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
