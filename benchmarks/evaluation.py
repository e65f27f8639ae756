"""`python -m benchmarks.evaluation`: every metric of a test set over whole lists, beside the libraries commonly used for it."""

import argparse
import functools
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import (
    GB,
    MB,
    Measurement,
    Timing,
    busy_note,
    free_memory,
    peak_memory,
    provenance,
    share_of_others,
    timed_with_cores,
)
from benchmarks.synthetic import ragged_batch
from rankgrad.eval import evaluate, expected_memory

Values: TypeAlias = Mapping[str, float]

KS = (1, 10, 100, 1000)
WARM_UP = 200  # items of a first call, which loads libraries
QUERY_CHUNK = 500
# a handful of items swap places in float32, another convention moves thousands
TOLERANCE = 1e-3
FREE_SHARE = 0.6
SIZES = "5000,20000,60502"  # the last is the test set of Stanford Online Products
QUICK = {"sizes": "600", "seconds": 0.2, "limit": 60.0}


def ours(embeddings: Tensor, labels: Tensor) -> Values:
    """R@k, mAP, mAP@R and all other metrics."""
    return evaluate(embeddings, labels, ks=KS)


def accuracy_calculator(embeddings: Tensor, labels: Tensor) -> Values:
    """pytorch-metric-learning with faiss, all queries in one call and the whole list asked for."""
    return _accuracy(normalize(embeddings), labels, len(labels))


def accuracy_calculator_in_chunks(embeddings: Tensor, labels: Tensor) -> Values:
    """The same a few queries at a time, as one does when the one call does not fit."""
    unit = normalize(embeddings)
    chunks = [slice(start, start + QUERY_CHUNK) for start in range(0, len(labels), QUERY_CHUNK)]
    size = torch.bincount(labels.cpu())[labels.cpu()]
    weights = [int((size[chunk] > 1).sum()) for chunk in chunks]
    # the queries are to be the first of the references
    parts = [
        _accuracy(unit.roll(-chunk.start, 0), labels.roll(-chunk.start), len(labels[chunk]))
        for chunk, weight in zip(chunks, weights, strict=True)
        if weight
    ]
    weights = [weight for weight in weights if weight]
    return {
        name: math.fsum(part[name] * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)
        for name in parts[0]
    }


def _accuracy(unit: Tensor, labels: Tensor, queries: int) -> dict[str, float]:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = {
        "precision_at_1": "R@1",
        "r_precision": "RP",
        "mean_average_precision": "mAP",
        "mean_average_precision_at_r": "mAP@R",
        "mean_reciprocal_rank": "MRR",
    }
    calculator = AccuracyCalculator(include=tuple(names), k=len(labels) - 1, device=unit.device)
    found = calculator.get_accuracy(unit[:queries], labels[:queries], unit, labels, ref_includes_query=True)
    return {ours: float(found[theirs]) for theirs, ours in names.items()}


def torchmetrics_loop(embeddings: Tensor, labels: Tensor) -> Values:
    """The functions of torchmetrics in a loop over queries; scores are lifted above 0, below which it drops relevant items."""
    from torchmetrics.functional import retrieval

    unit = normalize(embeddings)
    totals = dict.fromkeys([*(f"R@{k}" for k in KS), "mAP", "RP", "MRR"], 0.0)
    queries = 0
    for query, label in enumerate(labels):
        others = torch.arange(len(labels), device=labels.device) != query
        scores, relevant = (unit @ unit[query] + 2)[others], (labels == label)[others]
        if not relevant.any():
            continue
        queries += 1
        for k in KS:
            totals[f"R@{k}"] += float(retrieval.retrieval_hit_rate(scores, relevant, top_k=k))
        totals["mAP"] += float(retrieval.retrieval_average_precision(scores, relevant))
        totals["RP"] += float(retrieval.retrieval_r_precision(scores, relevant))
        totals["MRR"] += float(retrieval.retrieval_reciprocal_rank(scores, relevant))
    return {name: total / queries for name, total in totals.items()}


@dataclass(frozen=True)
class Evaluator:
    """A way to evaluate, and the bytes it needs for n items, for those that are not to be tried at any size."""

    function: Callable[[Tensor, Tensor], Values]
    bytes_of: Callable[[int], float] = lambda n: 0
    most: float = math.inf  # items


EVALUATORS = {
    "ours": Evaluator(ours),
    # faiss keeps a float and an index of every pair, and the metrics make some eight integers of each
    "accuracy-calculator": Evaluator(accuracy_calculator, lambda n: 76 * n**2),
    "accuracy-calculator, 500 queries at a time": Evaluator(accuracy_calculator_in_chunks, lambda n: 76 * n * QUERY_CHUNK),
    "torchmetrics, query by query": Evaluator(torchmetrics_loop, most=5000),
}


@dataclass(frozen=True)
class EvaluationSettings:
    """What all measurements of a run share."""

    dim: int
    most: int
    device: str
    threads: int
    seconds: float
    limit: float
    memory_limit: float

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        return ragged_batch(count, self.dim, self.most, device=self.device)


@dataclass(frozen=True, kw_only=True)
class EvaluationMeasurement(Measurement):
    """What one evaluator took at one size, and what it found."""

    name: str
    count: int
    values: Values = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 if two ways disagree about a metric."""
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    limit = options.memory_limit * GB or FREE_SHARE * free_memory(device)
    settings = EvaluationSettings(
        options.dim, options.most, options.device, torch.get_num_threads(), options.seconds, options.limit, limit
    )
    origin = provenance(device)
    print(", ".join(f"{name} {value}" for name, value in origin.items() if value))
    print(f"all-vs-all, whole lists, d = {settings.dim}, 1 to {settings.most} per class; each way in a process of its own")
    print(f"memory: peak above the embeddings; limits {limit / GB:.1f} GB and {settings.limit:.0f} s")
    agreed = True
    for count in options.sizes:
        announced = expected_memory(*settings.batch(count))
        measurements, others = [], []
        for name in options.formulations:
            measured, share = share_of_others(functools.partial(_measure, name, count, settings))
            measurements.append(measured)
            others.append(share)
        records = [_record(measured, measurements, share) for measured, share in zip(measurements, others, strict=True)]
        print(f"\nN = {count}; ours announces {announced / MB:.0f} MB")
        print(text_table([_text(record) for record in records]), flush=True)
        for record in records:
            if isinstance(difference := record["value_difference"], float) and difference > TOLERANCE:
                agreed = False
                print(f"{record['formulation']} differs from ours by {difference:.4f}")
        if options.csv:
            shape = {"device": device.type, "dim": settings.dim, "most_per_class": settings.most, "announced_bytes": announced}
            append_csv(options.csv, [origin | shape | record for record in records])
    return 0 if agreed else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one small size and short timings, where no other flag says otherwise")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add("--sizes", default=SIZES, metavar="N,N", help="items, all queries and candidates (default: %(default)s)")
    add("--dim", type=int, default=512, help="embedding size (default: %(default)s)")
    add("--most", type=int, default=10, metavar="M", help="most items of a class (default: %(default)s)")
    add("--formulations", default="; ".join(EVALUATORS), metavar="A;B", help="of %(default)s")
    add("--seconds", type=float, default=5.0, help="time for the repetitions of each row (default: %(default)s)")
    add("--limit", type=float, default=600.0, metavar="S", help="stop what takes longer than this (default: %(default)s)")
    add("--threads", type=int, default=0, help="threads of torch on the CPU; 0 leaves it the choice")
    add("--memory-limit", type=float, default=0, metavar="GB", help="skip what needs more; 0: 60 %% of what is free")
    add("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    options.formulations = [name.strip() for name in options.formulations.split(";")]
    if unknown := set(options.formulations) - set(EVALUATORS):
        parser.error(f"--formulations: choose from {'; '.join(EVALUATORS)}, got {'; '.join(sorted(unknown))}")
    try:
        options.sizes = sorted(int(size) for size in options.sizes.split(","))
    except ValueError:
        parser.error(f"--sizes: whole numbers with commas between wanted, got {options.sizes}")
    if options.most < 2 or options.sizes[0] < 2 * options.most:
        parser.error(f"--sizes: at least two classes of {options.most} >= 2 items wanted, got {options.sizes}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch {torch.__version__} sees no GPU here")
    return options


def _measure(name: str, count: int, settings: EvaluationSettings) -> EvaluationMeasurement:
    evaluator = EVALUATORS[name]
    if count > evaluator.most:
        return EvaluationMeasurement(
            name=name, count=count, note=f"skipped above {evaluator.most:.0f} items: would take minutes to hours"
        )
    if (needed := evaluator.bytes_of(count)) > settings.memory_limit:
        return EvaluationMeasurement(name=name, count=count, note=f"skipped: needs about {needed / GB:.1f} GB")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(name, count, settings, sender))
    child.start()
    sender.close()
    try:
        if not receiver.poll(settings.limit):
            return EvaluationMeasurement(name=name, count=count, note=f"stopped after {settings.limit:.0f} s")
        found: EvaluationMeasurement = receiver.recv()
        return found
    except EOFError:
        return EvaluationMeasurement(name=name, count=count, note="its process ended without an answer")
    finally:
        child.kill()
        child.join()


def _in_child(name: str, count: int, settings: EvaluationSettings, sender: Connection) -> None:
    torch.set_num_threads(settings.threads)
    device, function = torch.device(settings.device), EVALUATORS[name].function
    try:
        function(*settings.batch(WARM_UP))
        batch = settings.batch(count)
        if device.type == "cpu":
            _bound(int(settings.memory_limit))
        values: list[Values] = []
        start, cores = time.perf_counter(), time.process_time()
        memory = peak_memory(lambda: values.append(dict(function(*batch))), device)
        first = time.perf_counter() - start, time.process_time() - cores
        # what is slower than the time for repetitions is not run again: its first call is the measurement
        samples = [first] if first[0] > settings.seconds else [
            timed_with_cores(lambda: function(*batch), device) for _ in range(max(3, int(settings.seconds / first[0])))
        ]  # fmt: skip
        timing = Timing.of(*zip(*samples, strict=True))
        sender.send(EvaluationMeasurement(name=name, count=count, timing=timing, memory=memory, values=values[0]))
    except ImportError as problem:
        sender.send(EvaluationMeasurement(name=name, count=count, note=f"left out: {problem}"))
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as problem:
        sender.send(EvaluationMeasurement(name=name, count=count, note=f"failed: {str(problem).strip().splitlines()[0]}"))


def _bound(limit: int) -> None:
    """No more memory than this from here on: whoever wants more gets an error and the machine goes on."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _record(measured: EvaluationMeasurement, measurements: list[EvaluationMeasurement], others: float | None) -> dict[str, Any]:
    """A line of the CSV file, with the ratios to ours and the largest difference of a metric from ours."""
    own = next((other for other in measurements if other.name == "ours"), None)
    timing, shared = measured.timing, set(measured.values) & set(own.values if own else ())
    return {
        "formulation": measured.name,
        "N": measured.count,
        "seconds": timing and timing.median,
        "seconds_20": timing and timing.low,
        "seconds_80": timing and timing.high,
        "core_seconds": timing and timing.core_seconds,
        "repetitions": timing and timing.repetitions,
        "peak_bytes": measured.memory,
        "time_ratio": timing.median / own.timing.median if timing and own and own.timing else None,
        "memory_ratio": measured.memory / own.memory if measured.memory and own and own.memory else None,
        "R@1": measured.values.get("R@1"),
        "mAP": measured.values.get("mAP"),
        "mAP@R": measured.values.get("mAP@R"),
        "value_difference": max(abs(measured.values[m] - own.values[m]) for m in shared) if own and shared else None,
        "share_of_others": others,
        "note": measured.note,
    }


def _text(record: Mapping[str, Any]) -> dict[str, str]:
    def number(name: str, decimals: int, unit: float = 1.0) -> str:
        return "" if record[name] is None else f"{record[name] / unit:.{decimals}f}"

    return {
        "formulation": record["formulation"],
        "s": number("seconds", 3),
        "core-s": number("core_seconds", 3),
        "time/ours": number("time_ratio", 1),
        "MB": number("peak_bytes", 0, MB),
        "MB/ours": number("memory_ratio", 1),
        "R@1": number("R@1", 5),
        "mAP": number("mAP", 5),
        "mAP@R": number("mAP@R", 5),
        "largest difference": "" if record["value_difference"] is None else f"{record['value_difference']:.0e}",
        "note": "; ".join(filter(None, (record["note"], busy_note(record["share_of_others"])))),
    }


if __name__ == "__main__":
    sys.exit(main())
