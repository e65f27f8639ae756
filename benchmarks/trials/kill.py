"""Kill `rankgrad train` with SIGKILL at random points, resume it, and compare it with an uninterrupted run.

    python -m benchmarks.trials.kill --trials 50
    python -m benchmarks.trials.kill --trials 18 --processes 2

A run is killed one to four times, then left to end. Kill points are drawn in turn: starting, stepping, evaluating, writing a
checkpoint, the final test, any moment. Where a kill did hit is read from the files of the dead process. After every kill the
checkpoint that `last.json` names must be complete and no older than any that it was ever seen to name. At the end weights,
state, pointers, losses, metrics and test results must equal those of the uninterrupted run bit for bit.

Every attempt is a process of its own: a new interpreter, or with `--forked` a fork of this one, which has torch loaded already
and saves some seconds each. With `--processes` one rank of several is killed, also while images are decoded, and the job must
end; see `benchmarks.trials.kill_rank_trials`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trials.kill_rank_trials import RANK_KILL_POINTS, KillRankTrials
from benchmarks.trials.kill_trials import EPOCHS, KILL_POINTS, KillTrials
from benchmarks.trials.tiny_run import VARIANTS

MOST_KILLS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print the table, return 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trials.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50, help="kills [50]")
    parser.add_argument("--seed", type=int, default=0, help="of where they shall hit [0]")
    parser.add_argument("--variant", choices=tuple(VARIANTS), action="append", help="only this loss; may be repeated [all]")
    parser.add_argument(
        "--kill-point",
        choices=sorted({*KILL_POINTS, *RANK_KILL_POINTS}),
        action="append",
        help="only there; may be repeated [all]",
    )
    parser.add_argument("--processes", type=int, default=1, help="of a run; one rank of several is killed [1]")
    parser.add_argument("--forked", action="store_true", help="fork the processes, which is faster")
    parser.add_argument("--out", type=Path, help="folder that failed runs stay in [a temporary one]")
    given = parser.parse_args(arguments)
    if given.trials < 1:
        parser.error(f"--trials must be at least 1, got {given.trials}")
    if given.processes > 1 and given.forked:
        parser.error("--forked is for one process: several are started by torchrun")
    known = KILL_POINTS if given.processes == 1 else RANK_KILL_POINTS
    kill_points = given.kill_point or known
    if not set(kill_points) <= set(known):
        parser.error(f"--kill-point must be one of {', '.join(dict.fromkeys(known))} with --processes {given.processes}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankgrad-kill-") as temporary:
        root = given.out or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        trials = (
            KillRankTrials(root, given.seed, kill_points=kill_points, processes=given.processes)
            if given.processes > 1
            else KillTrials(root, given.seed, kill_points=kill_points, forked=given.forked)
        )
        variants = given.variant or tuple(VARIANTS)
        trials.run_references(variants)
        whole = ", ".join(f"{variant} {seconds:.1f} s" for variant, seconds in trials.seconds.items())
        print(
            f"uninterrupted: {whole}; {len(trials.references[variants[0]]['losses'])} steps, {EPOCHS} evaluations", flush=True
        )
        while trials.kills < given.trials:
            variant = variants[trials.runs % len(variants)]
            kills = min(trials.rng.randint(1, MOST_KILLS), given.trials - trials.kills)
            found = trials.run_one(variant, kills)
            trials.failures += found
            print(
                f"{trials.kills} of {given.trials} kills, {variant}: {'; '.join(found) or 'same as uninterrupted'}", flush=True
            )
            if given.out is None and found:
                print(f"give --out DIR to keep it; the run was number {trials.runs} of seed {given.seed}", flush=True)
    print("\n".join(["", trials.table(), "", *trials.remarks()]))
    print(
        f"{trials.kills} kills in {trials.runs} runs, each resumed and compared; {trials.late} came after the end; "
        f"{len(trials.failures)} runs lost something; {time.monotonic() - began:.0f} s"
    )
    return 1 if trials.failures else 0


if __name__ == "__main__":
    sys.exit(main())
