"""`rankgrad bench kernels`: the fused kernels against their targets, other formulations and the matrix products alone.

Every loss is first compared with float64, then forward + backward is timed at every size. A row is printed and added
to the CSV file as soon as it is measured, so that an interrupted run keeps what it has.
"""

import argparse
import functools
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import rankgrad
from benchmarks import baselines
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.kernel_cases import (
    PRECISIONS,
    TINY,
    Batch,
    Case,
    Shape,
    Sizes,
    Target,
    all_cases,
    dense_rival,
    make_batch,
    quick_cases,
    vector_target,
)
from benchmarks.losses import PRESETS
from benchmarks.measure import Call, Timing, free_memory, peak_memory, provenance, timed

BACKEND = "triton"
VALUE_TOLERANCE = 1e-5  # relative or absolute, whichever is larger
MOVED_TOLERANCE = 1e-2  # of RaMBO's gradient of a list, in which rounding moves single items by a rank
FIRST_CALL = 20.0  # seconds that a first call may take
SLOW = 1.0  # seconds of a call from which on it is repeated as seldom as possible
MOST_REPETITIONS = 300
FREE_SHARE = 0.97
FLOOR_TILE = 2**31  # scores that exist at once when only products are timed
FLOOR_ROWS = 8192
FLOOR_WHOLE = 2**32  # pairs up to which all queries take part
GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class Cell:
    """What was measured: seconds, bytes beyond the inputs and their gradient, seconds of the first call."""

    timing: Timing
    memory: int
    first: float


class NotMeasuredError(Exception):
    """The row has no number, and this is why."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a loss is wrong or a row broke, 2 where it cannot run."""
    options = _options(arguments)
    cases = _chosen(options)
    if options.list:
        print(*(case.key for case in cases), sep="\n")
        return 0
    if options.cpu_check:
        if os.environ.get("TRITON_INTERPRET") != "1":
            return _refuse("--cpu-check runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1")
        device = torch.device("cpu")
    else:
        if not torch.cuda.is_available():
            return _refuse(f"torch {torch.__version__} sees no GPU here; --cpu-check tries the command without one")
        device = torch.device("cuda", torch.cuda.current_device())
    if find_spec("triton") is None:
        return _refuse("the kernels need triton, which is not installed")
    return Run(options, device).over(cases)


def _refuse(reason: str) -> int:
    print(f"rankgrad bench kernels: {reason}", file=sys.stderr)
    return 2


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rankgrad bench kernels", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few rows with short timings, about a minute")
    add("--huge", action="store_true", help="a million items too")
    add("--only", metavar="PATTERN", help="rows whose name (see --list) this regular expression finds")
    add("--list", action="store_true", help="print the names of the rows and measure nothing")
    add("--seconds", type=float, help="time for the repetitions of each row (default: 0.4, 0.15 with --quick)")
    add("--csv", type=Path, metavar="FILE", help="append here (default: benchmarks/results/kernels-GPU.csv)")
    add("--memory-limit", type=float, default=0, metavar="GB", help="skip rivals that need more; 0: what is free")
    add("--host-labels", action="store_true", help="leave the labels on the CPU, which spares a wait for the GPU")
    add("--commit", default="", help="note this commit where git cannot tell it")
    add("--cpu-check", action="store_true", help="try the command on tiny sizes without a GPU, needs TRITON_INTERPRET=1")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 0.0 if options.cpu_check else 0.15 if options.quick else 0.4
    try:
        re.compile(options.only or "")
    except re.error as problem:
        parser.error(f"--only: {options.only!r} is no regular expression: {problem}")
    if not _chosen(options):
        parser.error(f"--only: no row matches {options.only!r}; --list names them")
    return options


def _chosen(options: argparse.Namespace) -> list[Case]:
    sizes = TINY if options.cpu_check else Sizes()
    cases = quick_cases(sizes) if options.quick else all_cases(sizes, huge=options.huge)
    return [case for case in dict.fromkeys(cases) if re.search(options.only or "", case.key)]


def loss_of(loss: str, *, backend: str = "", precision: str = "auto", unit: bool = False) -> torch.nn.Module:
    """A loss with the settings that all formulations share."""
    module = PRESETS[loss](backend or BACKEND)
    module.precision, module.normalize = precision, not unit  # type: ignore[assignment]
    return module


def measured(call: Call, device: torch.device, seconds: float, uncaptured: Call | None = None) -> Cell:
    """Time and peak memory of a call that may compile at first.

    The memory of a call that is replayed from a graph belongs to the graph and is not seen; `uncaptured` is the same call
    without one.
    """
    start = time.perf_counter()
    memory = peak_memory(call, device)
    first = time.perf_counter() - start
    one = timed(call, device)
    if one < SLOW:
        # without what libraries took for themselves when they were first called
        memory = peak_memory(uncaptured or call, device)
    repetitions = min(MOST_REPETITIONS, int(seconds / max(one, 1e-9)))
    samples = [timed(call, device) for _ in range(repetitions)]
    return Cell(Timing.of(samples if repetitions >= 5 else [one, *samples]), memory, first)


class Run:
    """One run of the command: what it was asked for, what it has measured, what went wrong."""

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
        self.cells: dict[Case, Cell] = {}
        self.wrong: dict[tuple[str, str], str] = {}  # loss and precision, and what the check found
        self.broken: list[Case] = []
        self.verdicts: dict[Case, str] = {}
        self.batch = functools.lru_cache(maxsize=1)(self._batch)

    def _batch(self, shape: Shape) -> Batch:
        return make_batch(shape, self.device, self.label_device)

    def over(self, cases: list[Case]) -> int:
        """Checks, measures and prints these rows; returns the exit status."""
        start = time.perf_counter()
        print(", ".join(f"{name} {value}" for name, value in self.origin.items() if value))
        self._check(cases)
        where = f", also in {self.csv}" if self.csv else ""
        print(f"\nforward + backward, float32 leaves, targets for one H200, rivals up to {self.limit / GB:.0f} GB{where}")
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
            print(_line(self._check_loss(loss, precision), CHECK_COLUMNS), flush=True)
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
        true_value, true_gradient = baselines.two_sorts_ap(scores.detach().double(), relevance)
        rows = []
        for what in ("ours", "two-sorts", "six-argsorts"):
            try:
                value, gradient = _vector_call(what, batch)()
                value_error, error = abs(float(value - true_value)), _relative(gradient, true_gradient)
                errors = {"value": f"{value_error:.1e}", "gradient": f"{error:.1e}"}
                good = value_error <= VALUE_TOLERANCE and error <= MOVED_TOLERANCE
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
        cell, notes = None, []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            cell, note = self._floor(case.shape) if case.what == "floor" else (self._cell(case), "")
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
        if cell:
            self.cells[case] = cell
            if target:
                self.verdicts[case] = target.verdict(cell.timing.median * 1e3, cell.memory / MB)
                notes.insert(0, self.verdicts[case])
            if case.what == "ours" and cell.first > FIRST_CALL:
                notes.append(f"first call took {cell.first:.0f} s")
        else:
            gc.collect()  # tensors that the error still held
            if target:
                self.verdicts[case] = "missed: not measured"
        if case.what == "ours" and (complaint := self.wrong.get((case.loss, case.precision))):
            notes.append(f"check: {complaint}")
        if case.what == "ours" and self.label_device != self.device:
            notes.append("labels on the host")
        self._write(case, cell, target, "; ".join(filter(None, notes)))

    def _device_is_lost(self) -> bool:
        """After an error inside a kernel nothing runs on a GPU any more."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _write(self, case: Case, cell: Cell | None, target: Target | None, note: str) -> None:
        shape = case.shape
        low, median, high = (cell.timing.low, cell.timing.median, cell.timing.high) if cell else (None, None, None)
        # a floor needs no memory of its own
        memory = None if cell is None or case.what == "floor" else cell.memory
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
        spread = f"({record['ms20']} - {record['ms80']})" if cell else ""
        print(_line({name: str(value) for name, value in record.items()} | {"20% - 80%": spread}, COLUMNS), flush=True)
        if self.csv:
            append_csv(self.csv, [self.origin | record])

    def _target(self, case: Case) -> Target | None:
        if case.what != "ours" or case.shape.kind != "vector":
            return case.target
        shape = case.shape
        two_sorts = self.cells.get(Case(case.loss, "two-sorts", shape, case.precision))
        if two_sorts is None:
            return None
        return vector_target(shape, two_sorts.timing.median * 1e3, two_sorts.memory / MB)

    def _cell(self, case: Case) -> Cell:
        shape = case.shape
        if case.what == dense_rival(case.loss).name:
            estimate = torch.float32.itemsize * dense_rival(case.loss).numbers(shape.queries, int(shape.relevant))
            if estimate > self.limit:
                raise NotMeasuredError(f"over the limit: needs about {estimate / GB:.0f} GB")
        batch = self.batch(shape)
        uncaptured = self._call(case, batch, cuda_graphs=False) if case.what == "ours" else None
        cell = measured(self._call(case, batch), self.device, self.seconds, uncaptured)
        return Cell(cell.timing, max(0, cell.memory - batch.gradient_bytes), cell.first)

    def _call(self, case: Case, batch: Batch, *, cuda_graphs: bool = True) -> Call:
        if case.shape.kind == "vector":
            return _vector_call(case.what, batch, cuda_graphs=cuda_graphs)
        if case.what == "ours":
            module = loss_of(case.loss, precision=case.precision, unit=case.shape.kind == "unit")
            module.cuda_graphs = cuda_graphs  # type: ignore[assignment]
            return lambda: torch.autograd.grad(module(*batch.arguments), batch.leaves)
        function = dense_rival(case.loss).function
        if case.what == "chunked":
            # each size is compiled for itself, and beyond a few of them torch would give up and run uncompiled
            torch.compiler.reset()
            function = baselines.chunked_formulation(case.loss, compiling=self.compiling)
        labels = batch.labels[0].to(self.device)

        def call() -> object:
            try:
                value = function(batch.leaves[0], labels, case.shape.per_class)
                return torch.autograd.grad(value, batch.leaves)
            except baselines.UnavailableError as reason:
                raise NotMeasuredError(f"skipped: {_first_line(reason)}") from None

        return call

    def _floor(self, shape: Shape) -> tuple[Cell, str]:
        """The products alone; where all of them would take long, those of some queries, scaled."""
        batch = self.batch(shape)
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        # small enough that no sum leaves the range of float16
        low = [(normalize(leaf.detach()) / 8).to(dtype) for leaf in batch.leaves]
        queries, candidates = low[0], low[-1]
        rows = min(FLOOR_ROWS, max(1, FLOOR_TILE // len(candidates)))
        whole = shape.pairs <= FLOOR_WHOLE
        some = queries if whole else queries[:rows]
        cell = measured(lambda: baselines.products_only(some, candidates, rows), self.device, self.seconds)
        rate = 6 * len(some) * len(candidates) * shape.dim / cell.timing.median / 1e12
        timing = cell.timing.scaled(len(queries) / len(some))
        note = f"{rate:.0f} TFLOP/s" + ("" if whole else f", computed from {len(some)} queries")
        return Cell(timing, 0, cell.first), note


def _vector_call(what: str, batch: Batch, *, cuda_graphs: bool = True) -> Callable[[], tuple[Tensor, Tensor]]:
    (scores,), (relevance,) = batch.leaves, batch.labels
    if what == "ours":
        loss = rankgrad.RamboAPLoss(lam=baselines.AP_LAM, margin=baselines.AP_MARGIN, cuda_graphs=cuda_graphs)

        def call() -> tuple[Tensor, Tensor]:
            value = loss.from_scores(scores, relevance)
            return value.detach(), torch.autograd.grad(value, scores)[0]

        return call
    function = baselines.two_sorts_ap if what == "two-sorts" else baselines.six_argsorts_ap
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


if __name__ == "__main__":
    sys.exit(main())
