"""`python -m benchmarks.text_study`: rank losses and sentence-transformers' own, on intents, under one budget.

    python -m benchmarks.text_study --data DIR --model MODEL --csv FILE          # runs what FILE does not have yet
    python -m benchmarks.text_study --csv FILE --report docs/evidence_text.md    # the tables of FILE

DIR holds banking77_train.csv, banking77_test.csv and clinc150_data_full.json; MODEL is a folder of sentence-transformers.
"""

import argparse
import csv
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from benchmarks.csv_rows import append_csv
from benchmarks.measure import provenance
from benchmarks.text.intents import DATA
from benchmarks.text.losses import LOSSES, MINI_BATCH
from benchmarks.text.report import Row, chosen_settings, report, tried_rates
from benchmarks.text.training import Place, Run, train_and_evaluate

RATES = (3e-5, 1e-4, 3e-4)
LOWER_RATES = (1e-5, 3e-6)  # where the lowest was the best
BATCH = 512
BATCHES = (64, 256, 1024, 4096)
BY_BATCH = ("RecallAtKLoss", "SmoothAPLoss", "MultipleNegativesRankingLoss", "BatchHardSoftMarginTripletLoss")
CACHED = ("RecallAtKLoss", "SmoothAPLoss", "MultipleNegativesRankingLoss")
QUICK = {"texts": 64, "batch": 32, "batches": "64", "seeds": 1, "max_length": 16}


def main(arguments: list[str] | None = None) -> int:
    """Run the study or write its tables."""
    options = _options(arguments)
    if options.data:
        place = Place(options.data, options.model, options.device, options.max_length)
        with Runner(place, options.csv, options.workers, options.time_limit) as runner:
            runner.run(first_runs(options.texts, options.batch))
            while runner.run(lower_runs(read(options.csv), options.texts, options.batch)):
                pass
            if not runner.late:
                runner.run(later_runs(read(options.csv), options.texts, options.batch, options.batches, options.seeds))
            if runner.late:
                print(f"--time-limit {options.time_limit:g} is over: the same command continues")
    if options.report:
        options.report.write_text(report(read(options.csv), first_rate=RATES[0]) + "\n", encoding="utf-8")
    return 0


def first_runs(texts: int, batch: int) -> list[Run]:
    """The untrained model, and every loss, setting and rate on the validation intents."""
    untrained = [Run("untrained", data, split, "", "", 0.0, 0, 0, 0, 0) for data in DATA for split in ("disjoint", "published")]
    return untrained + [
        Run("choice", data, "validation", name, setting, lr, batch, 0, 0, texts)
        for data in DATA
        for name, loss in LOSSES.items()
        for setting in loss.settings
        for lr in RATES
    ]


def lower_runs(rows: Sequence[Row], texts: int, batch: int) -> list[Run]:
    """The next lower rate for each loss whose chosen rate is the lowest that was tried with the chosen setting."""
    found = []
    for (data, name), (setting, lr) in chosen_settings(rows).items():
        below = [rate for rate in LOWER_RATES if rate < lr]
        if below and lr == min(tried_rates(rows, data, name, setting)):
            found.append(Run("choice", data, "validation", name, setting, max(below), batch, 0, 0, texts))
    return found


def later_runs(rows: Sequence[Row], texts: int, batch: int, batches: Sequence[int], seeds: int) -> list[Run]:
    """Every loss with what was chosen for it, on both splits; cached forms; other batch sizes at the best of `RATES`."""
    found: dict[Run, None] = {}  # a set that keeps its order
    for key, (setting, lr) in chosen_settings(rows).items():
        data, name = key
        for seed in range(seeds):
            base = Run("loss", data, "disjoint", name, setting, lr, batch, 0, seed, texts)
            found |= dict.fromkeys([base, replace(base, split="published")])
            if name in CACHED:
                found[replace(base, stage="cached", mini_batch=batch // 4)] = None
            if name in BY_BATCH:
                first_setting, first_lr = chosen_settings(rows, lowest=RATES[0])[key]
                first = replace(base, setting=first_setting, lr=first_lr)
                found |= dict.fromkeys([first, *(_resized(first, size) for size in batches)])
    # a study that is cut short has the most telling runs
    order = [("loss", "disjoint"), ("loss", "published"), ("cached", "disjoint"), ("batch", "disjoint")]
    return sorted(found, key=lambda run: (order.index((run.stage, run.split)), run.seed, -run.batch, run.data))


def _resized(base: Run, size: int) -> Run:
    # the rule for Adam: the rate goes with the root of the batch size
    lr = float(f"{base.lr * (size / base.batch) ** 0.5:.3g}")
    return replace(base, stage="batch", lr=lr, batch=size, mini_batch=MINI_BATCH if size > MINI_BATCH else 0)


class Runner:
    """Runs that the CSV file does not have yet, some at a time, each written as it ends.

    Args:
        place: data, model, device.
        path: the CSV file.
        workers: processes; a small batch leaves most of a GPU to others.
        time_limit: seconds after which no further run is started, 0 for no limit.
    """

    def __init__(self, place: Place, path: Path, workers: int, time_limit: float) -> None:
        self.place, self.path, self.time_limit = place, path, time_limit
        self.origin = provenance(torch.device(place.device))
        self._started, self._workers = time.monotonic(), workers
        self._pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def late(self) -> bool:
        return bool(self.time_limit) and time.monotonic() - self._started > self.time_limit

    def run(self, runs: Iterable[Run]) -> int:
        """The number of runs that were done."""
        known = {_key(row) for row in read(self.path)} if self.path.exists() else set()
        missing = [run for run in runs if _key(_text(run)) not in known]
        running: dict[Future[dict[str, object]], Run] = {}
        done, total = 0, len(missing)
        while running or (missing and not self.late):
            while missing and len(running) < self._workers and not self.late:
                run = missing.pop(0)
                running[self._pool.submit(train_and_evaluate, run, self.place)] = run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, found = running.pop(future), future.result()
                append_csv(self.path, [_text(run) | found | self.origin])
                done += 1
                print(f"{done}/{total} {self._told(run)}: mAP {found['mAP']}, {found['seconds']} s", flush=True)
        return done

    @staticmethod
    def _told(run: Run) -> str:
        return f"{run.stage} {run.data} {run.split} {run.loss} {run.setting} lr {run.lr:g} batch {run.batch} seed {run.seed}"


def read(path: Path) -> list[Row]:
    """Rows of the study's CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _text(run: Run) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(run).items()}


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[field.name] for field in fields(Run))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.text_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--csv", type=Path, required=True, metavar="FILE", help="rows of finished runs; those it has are not run again")
    add("--data", type=Path, metavar="DIR", help="folder of the data; without it nothing is run")
    add("--model", type=Path, metavar="DIR", help="folder of a sentence encoder")
    add("--report", type=Path, metavar="FILE", help="write the tables as Markdown")
    add("--quick", action="store_true", help="a few steps of each run, to see that all of it works")
    add("--texts", type=int, default=40_960, metavar="N", help="texts that each run is trained on (default: %(default)s)")
    add("--batch", type=int, default=BATCH, metavar="N", help="batch size (default: %(default)s)")
    add("--batches", default=",".join(map(str, BATCHES)), metavar="N,N", help="further batch sizes (default: %(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each line (default: %(default)s)")
    add("--max-length", type=int, default=32, metavar="N", help="tokens of a text at most (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add("--workers", type=int, default=1, metavar="N", help="runs at the same time (default: %(default)s)")
    add("--time-limit", type=float, default=0, metavar="S", help="start no run after so many seconds")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    if options.data and not options.model:
        parser.error("--data needs --model")
    try:
        options.batches = [int(size) for size in options.batches.split(",")]
    except ValueError:
        parser.error(f"--batches: whole numbers with commas between wanted, got {options.batches}")
    return options


if __name__ == "__main__":
    sys.exit(main())
