"""Measures the rows of `python -m benchmarks.kernels`, one after the other, and says which targets they meet."""

import argparse
import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import rankgrad
from benchmarks.baselines import dense_baseline
from benchmarks.baselines.chunked import chunked_formulation, products_only
from benchmarks.baselines.dense import UnavailableError
from benchmarks.baselines.sorts import six_argsorts_ap, two_sorts_ap
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.kernel_cases import PRECISIONS, TINY, Batch, Case, Shape, Sizes, Target, make_batch, vector_target
from benchmarks.measure import GB, MB, Call, Timing, free_memory, peak_memory, provenance, timed
from benchmarks.presets import AP_LAM, AP_MARGIN, PRESETS

BACKEND = "triton"
VALUE_TOLERANCE = 1e-5  # relative or absolute, whichever is larger
LIST_TOLERANCE = 1e-2  # of RaMBO's gradient of a list, in which rounding moves single items by a rank
FIRST_CALL = 20.0  # seconds that a first call may take
SLOW = 1.0  # seconds of a call from which on it is repeated as seldom as possible
MOST_REPETITIONS = 300
FREE_SHARE = 0.97
FLOOR_TILE = 2**31  # scores that exist at once when only products are timed
FLOOR_ROWS = 8192
FLOOR_WHOLE = 2**32  # pairs up to which all queries take part


@dataclass(frozen=True)
class KernelMeasurement:
    """What a row took: seconds, bytes beyond the inputs and their gradient, seconds of the first call."""

    timing: Timing
    memory: int
    first_call: float


class NotMeasuredError(Exception):
    """The row has no number, and this is why."""


def loss_of(loss: str, *, backend: str = "", precision: str = "auto", unit: bool = False) -> torch.nn.Module:
    """A loss with the settings that all formulations share."""
    module = PRESETS[loss](backend or BACKEND)
    module.precision, module.normalize = precision, not unit  # type: ignore[assignment]
    return module


def measured(call: Call, device: torch.device, seconds: float, uncaptured: Call | None = None) -> KernelMeasurement:
    """Time and peak memory of a call that may compile at first.

    The memory of a call that is replayed from a graph belongs to the graph and is not seen; `uncaptured` is the same call
    without one.
    """
    start = time.perf_counter()
    memory = peak_memory(call, device)
    first = time.perf_counter() - start
    one = timed(call, device)
    if one < SLOW:
        one = timed(call, device)  # the second call of a shape was captured, which takes a tenth of a second
        # without what libraries took for themselves when they were first called
        memory = peak_memory(uncaptured or call, device)
    repetitions = min(MOST_REPETITIONS, int(seconds / max(one, 1e-9)))
    samples = [timed(call, device) for _ in range(repetitions)]
    return KernelMeasurement(Timing.of(samples if repetitions >= 5 else [one, *samples]), memory, first)


class KernelRunner:
    """One run of the command: its options, what it has measured, what went wrong."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device, self.seconds = device, options.seconds
        self.label_device = torch.device("cpu") if options.host_labels else device
        self.sizes = TINY if options.cpu_check else Sizes()
        self.compiling = not options.cpu_check
        self.slack = 100 if options.cpu_check else 1  # the errors of a few queries do not average out
        self.limit = options.memory_limit * GB or FREE_SHARE * free_memory(device)
        origin = provenance(device)
        self.origin = {
            "gpu": origin["machine"],
            "driver": origin["driver"],
            "torch": origin["torch"],
            "triton": _triton_version(),
            "rankgrad": origin["rankgrad"],
            "commit": origin["commit"] or options.commit,
            "date": origin["date"],
        }
        name = re.sub(r"[^a-z0-9]+", "-", origin["machine"].lower()).strip("-")
        default = None if options.cpu_check else Path("benchmarks", "results", f"kernels-{name}.csv")
        self.csv: Path | None = options.csv or default
        self.measurements: dict[Case, KernelMeasurement] = {}
        self.wrong: dict[tuple[str, str], str] = {}  # loss and precision, and what the check found
        self.broken: list[Case] = []
        self.verdicts: dict[Case, str] = {}
        self.batch = functools.lru_cache(maxsize=1)(self._batch)

    def _batch(self, shape: Shape) -> Batch:
        return make_batch(shape, self.device, self.label_device)

    def run(self, cases: list[Case]) -> int:
        """Checks, measures and prints these rows; returns the exit status."""
        start = time.perf_counter()
        print(", ".join(f"{name} {value}" for name, value in self.origin.items() if value))
        self._check(cases)
        where = f", also in {self.csv}" if self.csv else ""
        print(f"\nforward + backward, float32 leaves, targets for one H200, baselines up to {self.limit / GB:.0f} GB{where}")
        print("ms: median (20 % to 80 %); MB: peak beyond the inputs and their gradient\n")
        print(_line({name: name for name in COLUMNS}, COLUMNS))
        shape = None
        for case in cases:
            if shape not in (None, case.shape):
                print()
            shape = case.shape
            self._row(case)
        self._summary(time.perf_counter() - start)
        return 1 if self.wrong or self.broken else 0

    def _summary(self, wall: float) -> None:
        missed = {case: verdict for case, verdict in self.verdicts.items() if verdict != "met"}
        print(f"\n{len(self.verdicts) - len(missed)} targets met, {len(missed)} missed, {wall:.0f} s")
        for case, verdict in missed.items():
            print(f"  {case.key}: {verdict}")
        for (loss, precision), complaint in self.wrong.items():
            print(f"  wrong: {loss} {precision}: {complaint}")
        for case in self.broken:
            print(f"  broken: {case.key}")
        sys.stdout.flush()

    # before anything is timed

    def _check(self, cases: list[Case]) -> None:
        """Prints how far each loss in each precision is from float64, and plain torch in the same precision."""
        wanted = dict.fromkeys((case.loss, case.precision) for case in cases if case.what == "ours")
        pairs = [(loss, precision) for loss, precision in wanted if precision in PRECISIONS]
        if pairs:
            print(f"\nerror against float64 at N = {self.sizes.check}: of the value, relative of the gradient; beside each")
            print("that of plain torch at the same precision (float32; for fast of embeddings rounded to float16)")
            print(_line({name: name for name in CHECK_COLUMNS}, CHECK_COLUMNS))
        for loss, precision in pairs:
            found = self._check_loss(loss, precision)
            print(_line(found, CHECK_COLUMNS), flush=True)
            if self.csv and "gradient" in found:
                record = {"N": self.sizes.check, **{ERROR_NAMES.get(name, name): found[name] for name in CHECK_COLUMNS}}
                append_csv(self.csv.with_name(f"{self.csv.stem}-errors.csv"), [self.origin | record])
        if ("rambo_ap", "float32") in wanted:
            print(f"\none list of {10 * self.sizes.check} scores, differences from two sorts in float64")
            print(text_table(self._check_vector()), flush=True)

    def _check_loss(self, loss: str, precision: str) -> dict[str, str]:
        batch = make_batch(Shape(self.sizes.check, dim=self.sizes.dim), self.device, self.label_device)
        (embeddings,), (labels,) = batch.leaves, batch.labels
        row = {"loss": loss, "precision": precision}
        try:
            value, gradient = _value_and_gradient(loss_of(loss, backend="tiled"), embeddings.double(), labels)
            inputs = embeddings.half().float() if precision == "fast" else embeddings
            plain_value, plain = _value_and_gradient(loss_of(loss, backend="tiled"), inputs, labels)
            module = loss_of(loss, precision=precision)
            start = time.perf_counter()
            first = _value_and_gradient(module, embeddings, labels)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            first_call = time.perf_counter() - start
            again = _value_and_gradient(module, embeddings, labels)
        except Exception as problem:  # the other losses can still be checked, and the exit status tells
            if self._device_is_lost():
                raise
            self.wrong[loss, precision] = f"broken: {type(problem).__name__}: {_first_line(problem)}"
            return row | {"verdict": self.wrong[loss, precision]}
        scale = max(1.0, abs(float(value)))
        value_error, plain_value_error = (abs(float(v.double() - value)) / scale for v in (first[0], plain_value))
        error, plain_error = _relative(first[1], gradient), _relative(plain, gradient)
        complaints = []
        if not value_error <= VALUE_TOLERANCE * self.slack:
            complaints.append(f"value off by {value_error:.0e}")
        if not error <= 2 * plain_error * self.slack:
            complaints.append(f"gradient {error / max(plain_error, 1e-30):.1f}x as far off as plain torch")
        if not all(torch.equal(one, other) for one, other in zip(first, again, strict=True)):
            complaints.append("other bits the second time")
        if first_call > FIRST_CALL:
            complaints.append(f"first call took {first_call:.0f} s")
        if complaints:
            self.wrong[loss, precision] = ", ".join(complaints)
        return row | {
            "value": f"{value_error:.1e}",
            "plain": f"{plain_value_error:.1e}",
            "gradient": f"{error:.1e}",
            "plain ": f"{plain_error:.1e}",
            "first call": f"{first_call:.1f} s",
            "verdict": self.wrong.get((loss, precision), "ok"),
        }

    def _check_vector(self) -> list[dict[str, str]]:
        batch = make_batch(Shape(10 * self.sizes.check, "10%", 1, "vector"), self.device, self.device)
        (scores,), (relevance,) = batch.leaves, batch.labels
        true_value, true_gradient = two_sorts_ap(scores.detach().double(), relevance)
        rows = []
        for what in ("ours", "two-sorts", "six-argsorts"):
            try:
                value, gradient = vector_call(what, batch)()
                value_error, error = abs(float(value - true_value)), _relative(gradient, true_gradient)
                errors = {"value": f"{value_error:.1e}", "gradient": f"{error:.1e}"}
                good = value_error <= VALUE_TOLERANCE and error <= LIST_TOLERANCE
                verdict = "ok" if good else f"value off by {value_error:.0e}, gradient by {error:.0e}"
            except Exception as problem:  # the other formulations can still be checked, and the exit status tells
                if self._device_is_lost():
                    raise
                errors = {"value": "", "gradient": ""}
                verdict = f"broken: {type(problem).__name__}: {_first_line(problem)}"
            if what == "ours" and verdict != "ok":
                self.wrong["rambo_ap", "float32"] = verdict
            rows.append({"formulation": what, **errors, "verdict": verdict})
        return rows

    # one row after another

    def _row(self, case: Case) -> None:
        """Measures a row, prints it and adds it to the file."""
        found, notes = None, []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            found, note = self._floor(case.shape) if case.what == "floor" else (self._measure(case), "")
            notes.append(note)
        except NotMeasuredError as reason:
            notes.append(str(reason))
        except torch.OutOfMemoryError:
            notes.append("out of memory")
            if case.what == "ours":
                self.broken.append(case)
        except Exception as problem:  # the other rows can still be measured, and the exit status tells
            if self._device_is_lost():
                raise
            notes.append(f"broken: {type(problem).__name__}: {_first_line(problem)}")
            self.broken.append(case)
        target = self._target(case)
        if found:
            self.measurements[case] = found
            if target:
                self.verdicts[case] = target.verdict(found.timing.median * 1e3, found.memory / MB)
                notes.insert(0, self.verdicts[case])
            if case.what == "ours" and found.first_call > FIRST_CALL:
                notes.append(f"first call took {found.first_call:.0f} s")
        else:
            gc.collect()  # tensors that the error still held
            if target:
                self.verdicts[case] = "missed: not measured"
        if case.what == "ours" and (complaint := self.wrong.get((case.loss, case.precision))):
            notes.append(f"check: {complaint}")
        if case.what == "ours" and self.label_device != self.device:
            notes.append("labels on the host")
        self._write(case, found, target, "; ".join(filter(None, notes)))

    def _device_is_lost(self) -> bool:
        """After an error inside a kernel nothing runs on a GPU any more."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _write(self, case: Case, found: KernelMeasurement | None, target: Target | None, note: str) -> None:
        shape = case.shape
        low, median, high = (found.timing.low, found.timing.median, found.timing.high) if found else (None, None, None)
        # a floor needs no memory of its own
        memory = None if found is None or case.what == "floor" else found.memory
        record: dict[str, object] = {
            "row": case.row,
            "N": shape.text,
            "relevant": shape.relevant,
            "d": shape.dim,
            "precision": case.precision,
            "ms": _rounded(median, 1e3),
            "ms20": _rounded(low, 1e3),
            "ms80": _rounded(high, 1e3),
            "MB": _rounded(memory, 1 / MB),
            "target": str(target or ""),
            "note": note,
        }
        spread = f"({record['ms20']} - {record['ms80']})" if found else ""
        print(_line({name: str(value) for name, value in record.items()} | {"20% - 80%": spread}, COLUMNS), flush=True)
        if self.csv:
            append_csv(self.csv, [self.origin | record])

    def _target(self, case: Case) -> Target | None:
        if case.what != "ours" or case.shape.kind != "vector":
            return case.target
        shape = case.shape
        two_sorts = self.measurements.get(Case(case.loss, "two-sorts", shape, case.precision))
        if two_sorts is None:
            return None
        return vector_target(shape, two_sorts.timing.median * 1e3, two_sorts.memory / MB)

    def _measure(self, case: Case) -> KernelMeasurement:
        shape = case.shape
        if case.what == dense_baseline(case.loss).name:
            estimate = torch.float32.itemsize * dense_baseline(case.loss).numbers(shape.queries, int(shape.relevant))
            if estimate > self.limit:
                raise NotMeasuredError(f"over the limit: needs about {estimate / GB:.0f} GB")
        batch = self.batch(shape)
        uncaptured = self._call(case, batch, cuda_graphs=False) if case.what == "ours" else None
        found = measured(self._call(case, batch), self.device, self.seconds, uncaptured)
        return KernelMeasurement(found.timing, max(0, found.memory - batch.gradient_bytes), found.first_call)

    def _call(self, case: Case, batch: Batch, *, cuda_graphs: bool = True) -> Call:
        if case.shape.kind == "vector":
            return vector_call(case.what, batch, cuda_graphs=cuda_graphs)
        if case.what == "ours":
            module = loss_of(case.loss, precision=case.precision, unit=case.shape.kind == "unit")
            module.cuda_graphs = cuda_graphs  # type: ignore[assignment]
            return lambda: torch.autograd.grad(module(*batch.arguments), batch.leaves)
        function = dense_baseline(case.loss).function
        if case.what == "chunked":
            # each size is compiled for itself, and beyond a few of them torch would give up and run uncompiled
            torch.compiler.reset()
            function = chunked_formulation(case.loss, compiling=self.compiling)
        labels = batch.labels[0].to(self.device)

        def call() -> object:
            try:
                value = function(batch.leaves[0], labels, case.shape.per_class)
                return torch.autograd.grad(value, batch.leaves)
            except UnavailableError as reason:
                raise NotMeasuredError(f"skipped: {_first_line(reason)}") from None

        return call

    def _floor(self, shape: Shape) -> tuple[KernelMeasurement, str]:
        """The products alone; where all of them would take long, those of some queries, scaled."""
        batch = self.batch(shape)
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        # small enough that no sum leaves the range of float16
        low = [(normalize(leaf.detach()) / 8).to(dtype) for leaf in batch.leaves]
        queries, candidates = low[0], low[-1]
        rows = min(FLOOR_ROWS, max(1, FLOOR_TILE // len(candidates)))
        whole = shape.pairs <= FLOOR_WHOLE
        some = queries if whole else queries[:rows]
        found = measured(lambda: products_only(some, candidates, rows), self.device, self.seconds)
        rate = 6 * len(some) * len(candidates) * shape.dim / found.timing.median / 1e12
        timing = found.timing.scaled(len(queries) / len(some))
        note = f"{rate:.0f} TFLOP/s" + ("" if whole else f", computed from {len(some)} queries")
        return KernelMeasurement(timing, 0, found.first_call), note


def vector_call(what: str, batch: Batch, *, cuda_graphs: bool = True) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that gives the AP loss of one list and its gradient: "ours", "two-sorts" or "six-argsorts"."""
    (scores,), (relevance,) = batch.leaves, batch.labels
    if what == "ours":
        loss = rankgrad.RamboAPLoss(lam=AP_LAM, margin=AP_MARGIN, cuda_graphs=cuda_graphs)

        def call() -> tuple[Tensor, Tensor]:
            value = loss.from_scores(scores, relevance)
            return value.detach(), torch.autograd.grad(value, scores)[0]

        return call
    function = two_sorts_ap if what == "two-sorts" else six_argsorts_ap
    detached = scores.detach()
    return lambda: function(detached, relevance)


def _value_and_gradient(loss: torch.nn.Module, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = embeddings.detach().requires_grad_()
    value = loss(leaf, labels)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def _relative(gradient: Tensor, true_gradient: Tensor) -> float:
    difference = gradient.double() - true_gradient.double()
    return float(difference.norm() / true_gradient.double().norm().clamp(min=1e-300))


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [""])[0][:200]


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


COLUMNS = {
    "row": 31,
    "N": 12,
    "relevant": 9,
    "d": 5,
    "precision": 10,
    "ms": 9,
    "20% - 80%": 20,
    "MB": 9,
    "target": 21,
    "note": 0,
}
CHECK_COLUMNS = {
    "loss": 13,
    "precision": 10,
    "value": 8,
    "plain": 8,
    "gradient": 9,
    "plain ": 8,
    "first call": 11,
    "verdict": 0,
}
# what the file of errors calls otherwise
ERROR_NAMES = {"plain": "plain_value", "plain ": "plain_gradient", "first call": "first_call"}
LEFT = ("row", "loss", "precision", "20% - 80%", "target", "note", "verdict")


def _line(cells: Mapping[str, str], columns: Mapping[str, int]) -> str:
    """A line of a table, whose columns have fixed widths: the rows to come are not known."""
    texts = ((name, cells.get(name, ""), width) for name, width in columns.items())
    return " ".join(text.ljust(width) if name in LEFT else text.rjust(width) for name, text, width in texts).rstrip()


def _rounded(number: float | None, factor: float) -> str:
    """Four digits, without an exponent."""
    if number is None:
        return ""
    number *= factor
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"
