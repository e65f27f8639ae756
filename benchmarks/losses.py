"""`python -m benchmarks.losses`: forward and backward of every loss beside the formulations it replaces."""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines import BASELINES, SAMPLED_QUERIES, Baseline
from benchmarks.baselines.chunked import Formulation
from benchmarks.baselines.dense import UnavailableError
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import (
    GB,
    MB,
    Measurement,
    Timing,
    busy_note,
    free_memory,
    in_child,
    peak_memory,
    provenance,
    share_of_others,
    timed_in_turns,
)
from benchmarks.presets import PRESETS
from benchmarks.synthetic import hard_batch

FORMULATIONS = ("ours", *dict.fromkeys(baseline.name for baseline in BASELINES))
CHECK_CLASSES, CHECK_DIM = 16, 32
# float32 through a sigmoid of slope 1 / tau = 100 stays far below these, another convention far above
VALUE_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3
FREE_SHARE = 0.6
SIZES = "512,1024,2048,4096,8192"
QUICK = {"sizes": "256,512", "seconds": 0.2, "formulations": "ours,dense,query-loop,pml,sorted-rows"}


@dataclass(frozen=True)
class LossSettings:
    """What all measurements of a run share."""

    dim: int
    per_class: int
    device: torch.device
    memory_limit: float
    seconds: float

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        return hard_batch(count, self.dim, self.per_class, device=self.device)


@dataclass(frozen=True)
class NumericalError:
    """How far a formulation is from the float64 definition: the value absolutely, the gradient relatively."""

    value: float
    gradient: float

    def tolerable(self) -> bool:
        return self.value < VALUE_TOLERANCE and self.gradient < GRADIENT_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class LossMeasurement(Measurement):
    """What one formulation took at one batch size."""

    baseline: Baseline
    count: int
    error: NumericalError


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a formulation computes another loss than it says."""
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    limit = options.memory_limit * GB or FREE_SHARE * free_memory(device)
    settings = LossSettings(options.dim, options.per_class, device, limit, options.seconds)
    origin = provenance(device)
    print(", ".join(f"{name} {value}" for name, value in origin.items() if value))
    print(f"forward + backward, float32, d = {settings.dim}, {settings.per_class} per class in random order")
    print(f"memory: peak above what was held before the call, the gradient included; limit {limit / GB:.1f} GB")

    chosen = [
        baseline for baseline in _catalogue() if baseline.loss in options.losses and baseline.name in options.formulations
    ]
    errors = _check(chosen, settings)
    if failed := [baseline for baseline, error in errors.items() if not (baseline.differs or error.tolerable())]:
        print("nothing is timed, these are wrong: " + ", ".join(f"{baseline.loss} {baseline.name}" for baseline in failed))
        return 1
    before: list[LossMeasurement] = []
    for count in options.sizes:
        measurements, others = _measure(errors, count, settings)
        records = [_record(measured, measurements, before) for measured in measurements]
        print(f"\nN = {count}")
        if note := busy_note(others):
            print(f"{note}: repeat this on a quiet machine")
        print(text_table([_text(record) for record in records]), flush=True)
        if options.csv:
            shape = {"device": device.type, "dtype": "float32", "dim": settings.dim, "per_class": settings.per_class}
            append_csv(options.csv, [origin | shape | record | {"share_of_others": others} for record in records])
        before = measurements
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="two small sizes and short timings, where no other flag says otherwise")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add("--sizes", default=SIZES, metavar="N,N", help="batch sizes (default: %(default)s)")
    add("--dim", type=int, default=512, help="embedding size (default: %(default)s)")
    add("--per-class", type=int, default=4, metavar="M", help="batch items of each class (default: %(default)s)")
    add("--losses", default=",".join(PRESETS), metavar="A,B", help="of %(default)s")
    add("--formulations", default=",".join(FORMULATIONS), metavar="A,B", help="of %(default)s")
    add("--seconds", type=float, default=2.0, help="time for the repetitions of each row (default: %(default)s)")
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


def _catalogue() -> list[Baseline]:
    """Every formulation, loss by loss, ours first. Ours holds a tile at a time, so it is never too large."""
    ours = [Baseline(loss, "ours", _ours(loss, "auto"), lambda n, p: 0) for loss in PRESETS]
    return sorted([*ours, *BASELINES], key=lambda baseline: list(PRESETS).index(baseline.loss))


def _ours(loss: str, backend: str) -> Formulation:
    module = PRESETS[loss](backend)
    return lambda embeddings, labels, per_class: module(embeddings, labels)


def _value_and_gradient(function: Formulation, batch: tuple[Tensor, Tensor], per_class: int) -> tuple[Tensor, Tensor]:
    embeddings = batch[0].detach().requires_grad_()
    value = function(embeddings, batch[1], per_class)
    return value.detach(), torch.autograd.grad(value, embeddings)[0]


def _check(chosen: Sequence[Baseline], settings: LossSettings) -> dict[Baseline, NumericalError]:
    """Prints and returns the error of each formulation that runs here."""
    count = CHECK_CLASSES * settings.per_class
    batch = replace(settings, dim=CHECK_DIM).batch(count)
    double = (batch[0].cpu().double(), batch[1].cpu())
    truths = {
        loss: _value_and_gradient(_ours(loss, "reference"), double, settings.per_class)
        for loss in {baseline.loss for baseline in chosen}
    }
    errors: dict[Baseline, NumericalError] = {}
    rows = []
    for baseline in chosen:
        row = {"loss": baseline.loss, "formulation": baseline.name, "value": "", "gradient": "", "note": baseline.differs}
        rows.append(row)
        try:
            value, gradient = _value_and_gradient(baseline.function, batch, settings.per_class)
        except (ImportError, UnavailableError) as problem:
            row["note"] = f"left out: {str(problem).strip().splitlines()[0]}"
            continue
        true_value, true_gradient = truths[baseline.loss]
        difference = gradient.cpu().double() - true_gradient
        error = NumericalError(abs(value.item() - true_value.item()), (difference.norm() / true_gradient.norm()).item())
        row.update({"value": f"{error.value:.0e}", "gradient": f"{error.gradient:.0e}"})
        errors[baseline] = error
    print(f"\nerror against the float64 definition at N = {count}: of the value, relative of the gradient")
    print(text_table(rows), flush=True)
    return errors


def _measure(
    errors: dict[Baseline, NumericalError], count: int, settings: LossSettings
) -> tuple[list[LossMeasurement], float | None]:
    """The measurements and the share of the CPU that others took. Memory first: what turns out not to fit is not timed."""
    measurements = [
        _with_memory(LossMeasurement(baseline=baseline, count=count, error=error, note=baseline.differs), settings)
        for baseline, error in errors.items()
    ]
    batch = settings.batch(count)
    running = [measured for measured in measurements if measured.memory is not None]
    calls = [
        functools.partial(_value_and_gradient, _timed_function(measured), batch, settings.per_class) for measured in running
    ]
    timings, others = share_of_others(lambda: timed_in_turns(calls, settings.device, settings.seconds))
    timed = {measured.baseline: _with_timing(measured, timing) for measured, timing in zip(running, timings, strict=True)}
    return [timed.get(measured.baseline, measured) for measured in measurements], others


def _with_memory(measured: LossMeasurement, settings: LossSettings) -> LossMeasurement:
    baseline = measured.baseline
    estimate = torch.float32.itemsize * baseline.numbers(measured.count, settings.per_class - 1)
    if estimate > settings.memory_limit:
        return replace(measured, note=f"skipped: needs about {estimate / GB:.1f} GB")
    try:
        if settings.device.type == "cpu":
            memory = in_child(_memory_in_child, baseline.loss, baseline.name, measured.count, settings, torch.get_num_threads())
        else:
            memory = _memory(baseline, measured.count, settings)
    except (BrokenProcessPool, torch.OutOfMemoryError):
        return replace(measured, note=f"ran out of memory, {estimate / GB:.1f} GB were expected")
    return replace(measured, memory=memory)


def _memory_in_child(loss: str, name: str, count: int, settings: LossSettings, threads: int) -> int:
    torch.set_num_threads(threads)
    baseline = next(baseline for baseline in _catalogue() if (baseline.loss, baseline.name) == (loss, name))
    return _memory(baseline, count, settings)


def _memory(baseline: Baseline, count: int, settings: LossSettings) -> int:
    call = functools.partial(_value_and_gradient, baseline.function, settings.batch(count), settings.per_class)
    call()  # what it loads and compiles once is not what a training step needs
    return peak_memory(call, settings.device)


def _is_sampled(measured: LossMeasurement) -> bool:
    return measured.baseline.sample is not None and measured.count > SAMPLED_QUERIES


def _timed_function(measured: LossMeasurement) -> Formulation:
    return measured.baseline.sample if measured.baseline.sample and _is_sampled(measured) else measured.baseline.function


def _with_timing(measured: LossMeasurement, timing: Timing) -> LossMeasurement:
    if not _is_sampled(measured):
        return replace(measured, timing=timing)
    note = f"time of {SAMPLED_QUERIES} queries, scaled to {measured.count}"
    return replace(measured, timing=timing.scaled(measured.count / SAMPLED_QUERIES), note=note)


def _record(
    measured: LossMeasurement, measurements: Iterable[LossMeasurement], before: Iterable[LossMeasurement]
) -> dict[str, object]:
    """A line of the CSV file, with the ratios to ours and the powers of N that describe the growth since `before`."""
    baseline, timing = measured.baseline, measured.timing
    ours = next(
        (other for other in measurements if (other.baseline.loss, other.baseline.name) == (baseline.loss, "ours")), None
    )
    smaller = next((other for other in before if other.baseline is baseline), None)

    def ratio(other: LossMeasurement | None, quantity: Callable[[LossMeasurement], float | None]) -> float | None:
        mine, theirs = quantity(measured), quantity(other) if other else None
        return mine / theirs if mine and theirs and min(mine, theirs) > 0 else None

    def power(quantity: Callable[[LossMeasurement], float | None]) -> float | None:
        growth = ratio(smaller, quantity)
        return math.log(growth) / math.log(measured.count / smaller.count) if smaller and growth else None

    def seconds(other: LossMeasurement) -> float | None:
        return other.timing.median if other.timing else None

    def memory(other: LossMeasurement) -> float | None:
        return other.memory

    return {
        "loss": baseline.loss,
        "formulation": baseline.name,
        "N": measured.count,
        "seconds": timing and timing.median,
        "seconds_20": timing and timing.low,
        "seconds_80": timing and timing.high,
        "core_seconds": timing and timing.core_seconds,
        "repetitions": timing and timing.repetitions,
        "peak_bytes": measured.memory,
        "time_ratio": ratio(ours, seconds),
        "memory_ratio": ratio(ours, memory),
        "time_power": power(seconds),
        "memory_power": power(memory),
        "value_error": measured.error.value,
        "gradient_error": measured.error.gradient,
        "note": measured.note,
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
        "core-ms": number("core_seconds", 1e-3),
        "time/ours": number("time_ratio", decimals=2),
        "MB": number("peak_bytes", MB),
        "MB/ours": number("memory_ratio", decimals=2),
        "time ~N^": number("time_power", decimals=2),
        "MB ~N^": number("memory_power", decimals=2),
        "note": str(record["note"]),
    }


if __name__ == "__main__":
    sys.exit(main())
