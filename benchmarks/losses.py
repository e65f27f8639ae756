"""`rankgrad bench losses`: forward and backward of every loss beside the formulations it replaces."""

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import rankgrad
from benchmarks import baselines
from benchmarks.baselines import RIVALS, SAMPLED_QUERIES, Formulation, Rival
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import (
    Timing,
    free_memory,
    in_child,
    peak_memory,
    provenance,
    share_of_others,
    timed_in_turns,
)
from benchmarks.synthetic import hard_batch

PRESETS: dict[str, Callable[[str], torch.nn.Module]] = {
    "recall_at_k": lambda backend: rankgrad.RecallAtKLoss(
        ks=baselines.KS, tau_rank=baselines.TAU_RANK, tau_cut=baselines.TAU_CUT, backend=backend
    ),
    "smooth_ap": lambda backend: rankgrad.SmoothAPLoss(tau=baselines.TAU_RANK, backend=backend),
    "fast_ap": lambda backend: rankgrad.FastAPLoss(num_bins=baselines.BINS, backend=backend),
    "rambo_recall": lambda backend: rankgrad.RamboRecallLoss(
        lam=baselines.RECALL_LAM, margin=baselines.RECALL_MARGIN, weighting="loglog", backend=backend
    ),
    "rambo_ap": lambda backend: rankgrad.RamboAPLoss(lam=baselines.AP_LAM, margin=baselines.AP_MARGIN, backend=backend),
}
FORMULATIONS = ("ours", *dict.fromkeys(rival.name for rival in RIVALS))
CHECK_CLASSES, CHECK_DIM = 16, 32
# float32 through a sigmoid of slope 1 / tau = 100 stays far below these, another convention far above
VALUE_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3
FREE_SHARE = 0.6
QUIET = 0.05  # more of the CPU than this in other hands, and the times are not to be trusted
GB, MB = 1e9, 1e6
SIZES = "512,1024,2048,4096,8192"
QUICK = {"sizes": "256,512", "seconds": 0.2, "formulations": "ours,dense,query-loop,pml,sorted-rows"}


@dataclass(frozen=True)
class Setup:
    """What all cells of a run share."""

    dim: int
    per_class: int
    device: torch.device
    memory_limit: float
    seconds: float

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        return hard_batch(count, self.dim, self.per_class, device=self.device)


@dataclass(frozen=True)
class Error:
    """How far a formulation is from the float64 definition: the value absolutely, the gradient relatively."""

    value: float
    gradient: float

    def tolerable(self) -> bool:
        return self.value < VALUE_TOLERANCE and self.gradient < GRADIENT_TOLERANCE


@dataclass(frozen=True)
class Cell:
    """What one formulation took at one batch size; None where it was not measured, and the note says why."""

    rival: Rival
    count: int
    error: Error
    memory: int | None = None
    timing: Timing | None = None
    note: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a formulation computes another loss than it says."""
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    limit = options.memory_limit * GB or FREE_SHARE * free_memory(device)
    setup = Setup(options.dim, options.per_class, device, limit, options.seconds)
    origin = provenance(device)
    print(", ".join(f"{name} {value}" for name, value in origin.items() if value))
    print(f"forward + backward, float32, d = {setup.dim}, {setup.per_class} per class in random order")
    print(f"memory: peak above what was held before the call, the gradient included; limit {limit / GB:.1f} GB")

    chosen = [rival for rival in _catalogue() if rival.loss in options.losses and rival.name in options.formulations]
    errors = _check(chosen, setup)
    if failed := [rival for rival, error in errors.items() if not (rival.differs or error.tolerable())]:
        print("nothing is timed: wrong are " + ", ".join(f"{rival.loss} {rival.name}" for rival in failed))
        return 1
    before: list[Cell] = []
    for count in options.sizes:
        cells, others = _measure(errors, count, setup)
        records = [_record(cell, cells, before) for cell in cells]
        print(f"\nN = {count}")
        if others and others > QUIET:
            print(f"other processes took {others:.0%} of the CPU meanwhile: repeat this on a quiet machine")
        print(text_table([_text(record) for record in records]), flush=True)
        if options.csv:
            shape = {"device": device.type, "dtype": "float32", "dim": setup.dim, "per_class": setup.per_class}
            append_csv(options.csv, [origin | shape | record | {"share_of_others": others} for record in records])
        before = cells
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rankgrad bench losses", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="two small sizes and short timings, where no other flag says otherwise")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add("--sizes", default=SIZES, metavar="N,N", help="batch sizes (default: %(default)s)")
    add("--dim", type=int, default=512, help="embedding size (default: %(default)s)")
    add("--per-class", type=int, default=4, metavar="M", help="batch items of each class (default: %(default)s)")
    add("--losses", default=",".join(PRESETS), metavar="A,B", help="of %(default)s")
    add("--formulations", default=",".join(FORMULATIONS), metavar="A,B", help="of %(default)s")
    add("--seconds", type=float, default=2.0, help="time for the repetitions of each cell (default: %(default)s)")
    add("--threads", type=int, default=0, help="threads of torch on the CPU; 0 leaves it the choice")
    add("--memory-limit", type=float, default=0, metavar="GB", help="skip what needs more; 0: 60 %% of what is free")
    add("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    for name, known in (("losses", tuple(PRESETS)), ("formulations", FORMULATIONS)):
        names = getattr(options, name).split(",")
        if unknown := set(names) - set(known):
            parser.error(f"--{name}: choose from {', '.join(known)}, got {', '.join(sorted(unknown))}")
        setattr(options, name, names)
    try:
        options.sizes = sorted(int(size) for size in options.sizes.split(","))
    except ValueError:
        parser.error(f"--sizes: whole numbers with commas between wanted, got {options.sizes}")
    if options.per_class < 2 or any(size < 2 * options.per_class or size % options.per_class for size in options.sizes):
        parser.error(f"--sizes: at least two classes of {options.per_class} >= 2 items wanted, got {options.sizes}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch {torch.__version__} sees no GPU here")
    return options


def _catalogue() -> list[Rival]:
    """Every formulation, loss by loss, ours first. Ours holds a tile at a time, so it is never too large."""
    ours = [Rival(loss, "ours", _ours(loss, "auto"), lambda n, p: 0) for loss in PRESETS]
    return sorted([*ours, *RIVALS], key=lambda rival: list(PRESETS).index(rival.loss))


def _ours(loss: str, backend: str) -> Formulation:
    module = PRESETS[loss](backend)
    return lambda embeddings, labels, per_class: module(embeddings, labels)


def _value_and_gradient(function: Formulation, batch: tuple[Tensor, Tensor], per_class: int) -> tuple[Tensor, Tensor]:
    embeddings = batch[0].detach().requires_grad_()
    value = function(embeddings, batch[1], per_class)
    return value.detach(), torch.autograd.grad(value, embeddings)[0]


def _check(chosen: Sequence[Rival], setup: Setup) -> dict[Rival, Error]:
    """Prints and returns the error of each formulation that runs here."""
    count = CHECK_CLASSES * setup.per_class
    batch = replace(setup, dim=CHECK_DIM).batch(count)
    double = (batch[0].cpu().double(), batch[1].cpu())
    truths = {
        loss: _value_and_gradient(_ours(loss, "reference"), double, setup.per_class)
        for loss in {rival.loss for rival in chosen}
    }
    errors: dict[Rival, Error] = {}
    rows = []
    for rival in chosen:
        row = {"loss": rival.loss, "formulation": rival.name, "value": "", "gradient": "", "note": rival.differs}
        rows.append(row)
        try:
            value, gradient = _value_and_gradient(rival.function, batch, setup.per_class)
        except (ImportError, baselines.UnavailableError) as problem:
            row["note"] = f"left out: {str(problem).strip().splitlines()[0]}"
            continue
        true_value, true_gradient = truths[rival.loss]
        difference = gradient.cpu().double() - true_gradient
        error = Error(abs(value.item() - true_value.item()), (difference.norm() / true_gradient.norm()).item())
        row.update({"value": f"{error.value:.0e}", "gradient": f"{error.gradient:.0e}"})
        errors[rival] = error
    print(f"\nerror against the float64 definition at N = {count}: of the value, relative of the gradient")
    print(text_table(rows), flush=True)
    return errors


def _measure(errors: dict[Rival, Error], count: int, setup: Setup) -> tuple[list[Cell], float | None]:
    """The cells and the share of the CPU that others took. Memory first: what turns out not to fit is not timed."""
    cells = [_with_memory(Cell(rival, count, error, note=rival.differs), setup) for rival, error in errors.items()]
    batch = setup.batch(count)
    running = [cell for cell in cells if cell.memory is not None]
    calls = [functools.partial(_value_and_gradient, _timed_function(cell), batch, setup.per_class) for cell in running]
    timings, others = share_of_others(lambda: timed_in_turns(calls, setup.device, setup.seconds))
    timed = {cell.rival: _with_timing(cell, timing) for cell, timing in zip(running, timings, strict=True)}
    return [timed.get(cell.rival, cell) for cell in cells], others


def _with_memory(cell: Cell, setup: Setup) -> Cell:
    rival = cell.rival
    estimate = torch.float32.itemsize * rival.numbers(cell.count, setup.per_class - 1)
    if estimate > setup.memory_limit:
        return replace(cell, note=f"skipped: needs about {estimate / GB:.1f} GB")
    try:
        if setup.device.type == "cpu":
            memory = in_child(_memory_in_child, rival.loss, rival.name, cell.count, setup, torch.get_num_threads())
        else:
            memory = _memory(rival, cell.count, setup)
    except (BrokenProcessPool, torch.OutOfMemoryError):
        return replace(cell, note=f"ran out of memory, {estimate / GB:.1f} GB were expected")
    return replace(cell, memory=memory)


def _memory_in_child(loss: str, name: str, count: int, setup: Setup, threads: int) -> int:
    torch.set_num_threads(threads)
    rival = next(rival for rival in _catalogue() if (rival.loss, rival.name) == (loss, name))
    return _memory(rival, count, setup)


def _memory(rival: Rival, count: int, setup: Setup) -> int:
    call = functools.partial(_value_and_gradient, rival.function, setup.batch(count), setup.per_class)
    call()  # what it loads and compiles once is not what a training step needs
    return peak_memory(call, setup.device)


def _is_sampled(cell: Cell) -> bool:
    return cell.rival.sample is not None and cell.count > SAMPLED_QUERIES


def _timed_function(cell: Cell) -> Formulation:
    return cell.rival.sample if cell.rival.sample and _is_sampled(cell) else cell.rival.function


def _with_timing(cell: Cell, timing: Timing) -> Cell:
    if not _is_sampled(cell):
        return replace(cell, timing=timing)
    note = f"time of {SAMPLED_QUERIES} queries, scaled to {cell.count}"
    return replace(cell, timing=timing.scaled(cell.count / SAMPLED_QUERIES), note=note)


def _record(cell: Cell, cells: Iterable[Cell], before: Iterable[Cell]) -> dict[str, object]:
    """A line of the CSV file, with the ratios to ours and the powers of N that describe the growth since `before`."""
    rival, timing = cell.rival, cell.timing
    ours = next((other for other in cells if (other.rival.loss, other.rival.name) == (rival.loss, "ours")), None)
    smaller = next((other for other in before if other.rival is rival), None)

    def ratio(other: Cell | None, quantity: Callable[[Cell], float | None]) -> float | None:
        mine, theirs = quantity(cell), quantity(other) if other else None
        return mine / theirs if mine and theirs and min(mine, theirs) > 0 else None

    def power(quantity: Callable[[Cell], float | None]) -> float | None:
        growth = ratio(smaller, quantity)
        return math.log(growth) / math.log(cell.count / smaller.count) if smaller and growth else None

    def seconds(other: Cell) -> float | None:
        return other.timing.median if other.timing else None

    def memory(other: Cell) -> float | None:
        return other.memory

    return {
        "loss": rival.loss,
        "formulation": rival.name,
        "N": cell.count,
        "seconds": timing and timing.median,
        "seconds_20": timing and timing.low,
        "seconds_80": timing and timing.high,
        "repetitions": timing and timing.repetitions,
        "peak_bytes": cell.memory,
        "time_ratio": ratio(ours, seconds),
        "memory_ratio": ratio(ours, memory),
        "time_power": power(seconds),
        "memory_power": power(memory),
        "value_error": cell.error.value,
        "gradient_error": cell.error.gradient,
        "note": cell.note,
    }


def _text(record: dict[str, object]) -> dict[str, str]:
    def number(name: str, unit: float = 1.0, decimals: int | None = None) -> str:
        value = record[name]
        if not isinstance(value, (int, float)):
            return ""
        scaled = value / unit
        if decimals is None:  # three significant digits, but no exponent
            decimals = max(0, 2 - math.floor(math.log10(abs(scaled)))) if scaled else 0
        return f"{scaled:.{decimals}f}"

    return {
        "loss": str(record["loss"]),
        "formulation": str(record["formulation"]),
        "ms": number("seconds", 1e-3),
        "20%": number("seconds_20", 1e-3),
        "80%": number("seconds_80", 1e-3),
        "time/ours": number("time_ratio", decimals=2),
        "MB": number("peak_bytes", MB),
        "MB/ours": number("memory_ratio", decimals=2),
        "time ~N^": number("time_power", decimals=2),
        "MB ~N^": number("memory_power", decimals=2),
        "note": str(record["note"]),
    }
