"""`python -m benchmarks.performance`: tables and figures of the documentation from the rows in benchmarks/results.

A table stands between two comments, a figure inside a sentence too, so that neither is typed by hand; the text around them is
written as usual:

    <!-- table NAME -->
    ...
    <!-- end -->
    ... takes <!-- figure kernel recall_at_k/ours 65536 fast time -->39 ms<!-- end -->, ...

Tables:

    batch-sizes   time and memory of a loss on a GPU at every size, beside other formulations
    growth        powers of the batch size that time and memory grow with, fitted over all sizes
    fits          items of a batch that fit on other GPUs, from the measured bytes of an item
    first-call    seconds of the first call of a loss, in which its kernels are compiled
    other-gpus    what the kernels need on GPUs that were not there
    rates         images per second of training by stage
    million       one step on a million items
    cpu           losses on a CPU
    evaluation    `rankgrad.evaluate` on a CPU beside other libraries

Figures:

    kernel ROW SIZE PRECISION WHAT    a row of the kernels, SIZE as N or N/RELEVANT; WHAT of `KERNEL_FIGURES`
    kernel-dates                      when the rows of the tables were measured
    rate STAGE MODEL BATCH CUT        images per second; CUT is whole, auto or none
    share STAGE MODEL BATCH CUT       the same as a share of the bare loop
    million PRECISION                 seconds of a step on a million items
    loss NAME FORMULATION N THREADS   a loss on a CPU, as measured last
    evaluation N THREADS MACHINE      `rankgrad.evaluate` on the last CPU whose name begins so
    cars METRIC LABEL                 percent, the mean over seeds of a line of `rankgrad study cars`
    cars-published METRIC LABEL       likewise, of `rankgrad study cars-published`
    omniglot-losses METRIC LABEL      likewise, of `rankgrad study omniglot-losses`
"""

import argparse
import csv
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.plot import ENDS
from benchmarks.rate_cases import PREPARING, STAGES
from rankgrad._files import replace_file
from rankgrad._messages import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    *(ROOT / "docs" / f"{page}.md" for page in ("performance", "evaluation", "large_batch", "distributed", "choose")),
    ROOT / "README.md",
)
TABLE = re.compile(r"(?<=<!-- table )(?P<name>[a-z-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(?<=<!-- figure )(?P<words>[^<>]+) -->[^<>]*(?=<!-- end -->)")

GPU = "nvidia-h200"
LOSSES = {
    "recall_at_k": "RS@k", "smooth_ap": "Smooth-AP", "fast_ap": "FastAP", "rambo_recall": "RaMBO recall",
    "rambo_ap": "RaMBO AP",
}  # fmt: skip
NETWORKS = {"resnet50": "ResNet-50", "lite0": "EfficientNet-Lite0"}
# sizes from which on the GPU is busy, and not the host
BUSY = 16_384
# share of a GPU's memory that a batch may take beside a network and what libraries hold
BATCH_SHARE = 0.8
MEMORIES = (16, 24, 48, 80)
DIMENSIONS = (128, 512, 2048)

Row = Mapping[str, str]


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or with --check say whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    options = parser.parse_args(arguments)
    current = True
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        text = filled(before, RESULTS)
        if options.check:
            print(f"{page} is {'up to date' if text == before else 'not what python -m benchmarks.performance writes'}")
            current = current and text == before
        else:
            replace_file(page, text)
            print(page)
    return 0 if current else 1


def filled(page: str, results: Path) -> str:
    """The page with its tables and figures made again."""

    def rows_of(file: str) -> list[dict[str, str]]:
        with (results / f"{file}.csv").open(newline="", encoding="utf-8") as opened:
            return list(csv.DictReader(opened))

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        file, make = TABLES[name]
        return f"{name} -->\n{make(rows_of(file))}\n"

    def figure(match: re.Match[str]) -> str:
        name, *words = match["words"].split()
        if name not in FIGURES:
            raise ValueError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
        file, make = FIGURES[name]
        return f"{match['words']} -->{make(rows_of(file), *words)}"

    first = re.search(r"^\s*<!-- figure (.*?) -->", page, re.MULTILINE)
    if first is not None:
        raise ValueError(f"a comment that begins a line ends the paragraph: put a word before the figure {first[1]!r}")
    return FIGURE.sub(figure, TABLE.sub(table, page))


def kernel(rows: Sequence[Row], name: str, size: str, precision: str, what: str) -> str:
    """The last row of a name, size and precision with 512 dimensions, or of a list."""
    n, _, relevant = size.partition("/")
    wanted = (name, n, relevant or "3", precision)
    found = [
        row for row in rows if (row["row"], row["N"], row["relevant"], row["precision"]) == wanted and row["d"] in ("512", "1")
    ]
    if not found or not found[-1]["ms"]:
        raise ValueError(f"there is no measured row {name} of size {size} with precision {precision}")
    return KERNEL_FIGURES[what](float(found[-1]["ms"]), float(found[-1]["MB"] or 0), int(n))


def kernel_dates(rows: Sequence[Row]) -> str:
    """The days on which the rows that the tables show were measured."""
    days = sorted({row["date"][:10] for row in _latest(rows).values()})
    return days[0] if len(set(days)) == 1 else f"{days[0]} to {days[-1]}"


def cars(rows: Sequence[Row], metric: str, *label: str) -> str:
    """The mean over seeds on the test classes."""
    values = [float(row[metric]) for row in rows if row["split"] == "test" and row["label"] == " ".join(label)]
    if not values:
        raise ValueError(f"there is no test of {' '.join(label)} on Cars196")
    return f"{100 * statistics.fmean(values):.1f}"


def rate(rows: Sequence[Row], stage: str, model: str, batch: str, cut: str) -> str:
    """Images per second of the last row of a stage."""
    return f"{_last_rate(rows, stage, model, batch, cut):,}"


def share(rows: Sequence[Row], stage: str, model: str, batch: str, cut: str) -> str:
    """The same as a share of the bare loop on whole batches of that size."""
    return f"{100 * _last_rate(rows, stage, model, batch, cut) / _last_rate(rows, 'bare', model, batch, 'whole'):.0f}%"


def _last_rate(rows: Sequence[Row], stage: str, model: str, batch: str, cut: str) -> int:
    wanted = (stage, model, batch)
    found = [row for row in rows if (row["stage"], row["model"], row["batch"]) == wanted and row["cut"].endswith(cut)]
    if not found or not found[-1]["images_per_second"]:
        raise ValueError(f"there is no measured row {stage} {model} of batch {batch}, {cut}")
    return int(found[-1]["images_per_second"])


def million_seconds(rows: Sequence[Row], precision: str) -> str:
    """Seconds of the last step."""
    return f"{float([row for row in rows if row['precision'] == precision][-1]['seconds']):.1f} s"


def cpu_loss(rows: Sequence[Row], loss: str, formulation: str, n: str, threads: str) -> str:
    """Time of the last row."""
    wanted = (loss, formulation, n, threads)
    found = [row for row in rows if (row["loss"], row["formulation"], row["N"], row["threads"]) == wanted]
    if not found or not found[-1]["seconds"]:
        raise ValueError(f"there is no measured row {formulation} of {loss} at {n} with {threads} threads")
    return _seconds(1e3 * float(found[-1]["seconds"]))


def evaluation_time(rows: Sequence[Row], n: str, threads: str, machine: str) -> str:
    """Time of the last row on a machine."""
    wanted = ("ours", n, threads)
    found = [
        row for row in rows if (row["formulation"], row["N"], row["threads"]) == wanted and row["machine"].startswith(machine)
    ]
    if not found:
        raise ValueError(f"there is no measured evaluation of {n} items with {threads} threads on {machine}")
    return _seconds(1e3 * float(found[-1]["seconds"]))


def batch_sizes(rows: Sequence[Row]) -> str:
    """RS@k with 3 relevant items and 512 dimensions."""
    columns = {
        "fast": ("recall_at_k/ours", "fast"), "high": ("recall_at_k/ours", "high"),
        "dense, float32": ("recall_at_k/dense", "float32"),
        "chunked, `torch.compile`, float16": ("recall_at_k/chunked", "float16"),
        "matrix products alone": ("products/floor", "float16"),
    }  # fmt: skip
    found = _latest(rows)
    sizes = sorted({n for (name, _, n) in found if name == "recall_at_k/ours"})
    cells = [[f"{n:,}", *(_kernel_cell(found.get((*column, n))) for column in columns.values())] for n in sizes]
    return markdown_table(["batch size", *columns], cells)


def errors(rows: Sequence[Row]) -> str:
    """Value and gradient of every loss against float64, beside plain torch at the same precision."""
    found = {(row["loss"], row["precision"]): row for row in rows}
    cells = []
    for loss, title in LOSSES.items():
        mine = [found[loss, precision] for precision in ("fast", "high")]
        columns = (("value", "gradient"), ("plain_value", "plain_gradient"))
        cells.append([title, *(", ".join(row[name] for name in names) for row in mine for names in columns)])
    titles = ["fast: value, gradient", "plain torch on float16", "high: value, gradient", "plain torch in float32"]
    return markdown_table(["loss", *titles], cells)


def growth(rows: Sequence[Row]) -> str:
    """Least squares of the logarithms."""
    found = _latest(rows)
    cells = []
    for loss, title in LOSSES.items():
        for precision in ("fast", "high"):
            mine = {n: row for (name, kind, n), row in found.items() if (name, kind) == (f"{loss}/ours", precision)}
            times = {n: float(row["ms"]) for n, row in sorted(mine.items()) if row["ms"]}
            memory = {n: float(row["MB"]) for n, row in sorted(mine.items()) if row["MB"]}
            busy = {n: ms for n, ms in times.items() if n >= BUSY}
            if min(len(busy), len(memory)) < 2:
                continue
            sizes = f"{min(times):,} to {max(times):,}"
            cells.append([f"{title}, {precision}", sizes, *(f"N^{power(values):.2f}" for values in (times, busy, memory))])
    return markdown_table(["loss", "batch sizes", "time", f"time from {BUSY:,} on", "memory"], cells)


def power(values: Mapping[int, float]) -> float:
    """A of values ~ N^a."""
    return float(np.polyfit(np.log(list(values)), np.log(list(values.values())), 1)[0])


def fits(rows: Sequence[Row]) -> str:
    """Bytes of an item as measured at the largest size of each dimension, with the embeddings and their gradient."""
    largest: dict[tuple[int, str], tuple[int, float]] = {}
    for row in rows:
        measured = row["row"] == "recall_at_k/ours" and row["relevant"] == "3" and row["MB"] and row["N"].isdecimal()
        if measured and int(row["d"]) in DIMENSIONS:
            key, n = (int(row["d"]), row["precision"]), int(row["N"])
            if n >= largest.get(key, (0, 0.0))[0]:
                largest[key] = n, float(row["MB"]) * 1e6
    cells = []
    for (dim, precision), (n, memory) in sorted(largest.items()):
        each = memory / n + 2 * 4 * dim
        cells.append(
            [str(dim), precision, f"{each / 1e3:.1f} kB", *(_items(gb * 2**30 * BATCH_SHARE / each) for gb in MEMORIES)]
        )
    return markdown_table(["dimensions", "precision", "an item takes", *(f"{gb} GB" for gb in MEMORIES)], cells)


def _items(count: float) -> str:
    """Two digits, rounded down."""
    unit = 10 ** max(math.floor(math.log10(count)) - 1, 0)
    return f"{int(count // unit * unit):,}"


def first_call(rows: Sequence[Row]) -> str:
    """Seconds of the last row of each loss and precision, beside one with kernels compiled one by one where there is any."""
    found = {(row["loss"], row["precision"], row["kernels"]): row for row in rows}
    columns = {
        "first call": ("at the same time", "first call"),
        "kernels one by one": ("one by one", "first call"),
        "kernels on disk": ("at the same time", "with a filled cache"),
    }
    measured = {kernels for *_, kernels in found}
    columns = {title: column for title, column in columns.items() if column[0] in measured}
    cells = []
    for loss, precision in dict.fromkeys((row["loss"], row["precision"]) for row in rows):
        shown = (found.get((loss, precision, kernels), {}).get(name) for kernels, name in columns.values())
        cells.append([f"{LOSSES[loss]}, {precision}", *(f"{float(seconds):.1f} s" if seconds else "" for seconds in shown)])
    return markdown_table(["loss", *columns], cells)


def other_gpus(rows: Sequence[Row]) -> str:
    """The kernels with the most needs of each card."""
    cells = []
    for card in dict.fromkeys(row["card"] for row in rows):
        mine = [row for row in rows if row["card"] == card]
        most = max(mine, key=lambda row: int(row["shared"]))
        spilling = [f"{row['kernel']} {row['spilled']} bytes" for row in mine if int(row["spilled"])]
        cells.append(
            [
                card, f"{int(mine[0]['limit']):,}", f"{int(most['shared']):,} ({most['kernel']})",
                max((row["registers"] for row in mine), key=int), ", ".join(spilling) or "none",
            ]
        )  # fmt: skip
    return markdown_table(["GPU", "shared memory it has", "most that a kernel takes", "registers", "spilled"], cells)


def rates(rows: Sequence[Row]) -> str:
    """Rows by stage, batch and cut, a column for each network; shares of the bare loop beside them."""
    networks = list(dict.fromkeys((row["model"], row["pixels"]) for row in rows))
    stages = sorted(
        {(row["stage"], row["batch"], row["cut"]) for row in rows}, key=lambda row: (STAGES.index(row[0]), int(row[1]), row[2])
    )
    found = {(row["model"], row["pixels"], row["stage"], row["batch"], row["cut"]): row for row in rows}
    cells = []
    for stage, batch, cut in stages:
        whole = "whole, compiled" if cut.endswith("compiled") else "whole"
        limits = ((*network, "bare", images_in_pass(batch, cut), whole) for network in networks)
        shown = (
            _rate(found.get((*network, stage, batch, cut)), found.get(limit))
            for network, limit in zip(networks, limits, strict=True)
        )
        cells.append([stage, "" if batch == "0" else f"{int(batch):,}", cut, *shown])
    header = [f"{NETWORKS.get(model, model)}, {pixels} px" for model, pixels in networks]
    return markdown_table(["stage", "batch", "cut", *header], cells)


def images_in_pass(batch: str, cut: str) -> str:
    """Images that go through the network at once."""
    chunk = re.match(r"chunks of (\d+)", cut)
    return chunk[1] if chunk else batch


def _rate(row: Row | None, limit: Row | None) -> str:
    if row is None or not row["images_per_second"]:
        return row["note"] if row else ""
    rate, note = int(row["images_per_second"]), f", {row['note']}" if row["note"] else ""
    if limit is None or not limit["images_per_second"] or row["stage"] in ("bare", *PREPARING):
        return f"{rate:,}{note}"
    return f"{rate:,} ({100 * rate / int(limit['images_per_second']):.0f}%){note}"


def million(rows: Sequence[Row]) -> str:
    """Time, memory and errors of each precision."""
    latest = {(row["items"], row["precision"]): row for row in rows}
    cells = [
        [
            f"{int(row['items']):,}", row["precision"], f"{float(row['seconds']):.1f} s",
            f"{int(row['peak_bytes']) / 1e9:.1f} GB", row["gradient_error"], row["float32_gradient_error"],
        ]
        for row in latest.values()
    ]  # fmt: skip
    return markdown_table(
        ["items", "precision", "one step", "memory", "error of the gradient", "of a dense computation in float32"], cells
    )


def cpu(rows: Sequence[Row]) -> str:
    """Every loss, size and way as it was measured last with one thread."""
    rows = [row for row in rows if row["threads"] == "1"]
    names = list(dict.fromkeys(row["formulation"] for row in rows))
    found = {(row["loss"], int(row["N"]), row["formulation"]): row for row in rows}
    places = sorted({(list(LOSSES).index(loss), loss, n) for loss, n, _ in found})
    cells = [[f"{LOSSES[loss]}, {n:,}", *(_cpu_cell(found.get((loss, n, name))) for name in names)] for _, loss, n in places]
    return markdown_table(["loss, batch size", *("rankgrad" if name == "ours" else name for name in names)], cells)


def evaluation(rows: Sequence[Row]) -> str:
    """Every size and way as it was measured last with one thread."""
    rows = [row for row in rows if row["threads"] == "1"]
    found = {(int(row["N"]), row["formulation"]): row for row in rows}
    names = list(dict.fromkeys(row["formulation"] for row in rows))
    sizes = sorted({n for n, _ in found})
    cells = [[f"{n:,}", *(_cpu_cell(found.get((n, name))) for name in names)] for n in sizes]
    return markdown_table(["items", *("`rg.evaluate`" if name == "ours" else name for name in names)], cells)


def _cpu_cell(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["core_seconds"]:
        return row["note"].removeprefix("skipped: ")
    return f"{_seconds(1e3 * float(row['core_seconds']))}, {_bytes(float(row['peak_bytes']) / 1e6)}"


def _latest(rows: Iterable[Row]) -> dict[tuple[str, str, int], Row]:
    """By name, precision and size, with 3 relevant items and 512 dimensions."""
    return {
        (row["row"], row["precision"], int(row["N"])): row
        for row in rows
        if row["N"].isdecimal() and (row["relevant"], row["d"]) == ("3", "512")
    }


def _kernel_cell(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["ms"]:
        return "out of memory" if row["note"].startswith(ENDS) else row["note"]
    return _seconds(float(row["ms"])) + (f", {_bytes(float(row['MB']))}" if row["MB"] else "")


def _seconds(ms: float) -> str:
    return f"{_two_digits(ms)} ms" if ms < 1000 else f"{_two_digits(ms / 1e3)} s"


def _bytes(mb: float) -> str:
    return f"{mb:.0f} MB" if mb < 1000 else f"{_two_digits(mb / 1e3)} GB"


def _two_digits(value: float) -> str:
    """At least two digits that matter."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


# by milliseconds, megabytes and items. Of 64 processes each computes a 64th of the scores, but for both directions on its own,
# and holds all embeddings and their gradient
KERNEL_FIGURES: dict[str, Callable[[float, float, int], str]] = {
    "time": lambda ms, mb, n: _seconds(ms),
    "memory": lambda ms, mb, n: _bytes(mb),
    "time-of-64": lambda ms, mb, n: _seconds(ms * 2 / 64),
    "memory-of-64": lambda ms, mb, n: _bytes(mb + 8 * n * 512 / 1e6),
}
FIGURES: dict[str, tuple[str, Callable[..., str]]] = {
    "kernel": (f"kernels-{GPU}", kernel),
    "kernel-dates": (f"kernels-{GPU}", kernel_dates),
    "rate": (f"training-rates-{GPU}", rate),
    "share": (f"training-rates-{GPU}", share),
    "million": (f"million-items-{GPU}", million_seconds),
    "loss": ("losses-cpu", cpu_loss),
    "evaluation": ("evaluation-cpu", evaluation_time),
    "cars": (f"cars-{GPU}", cars),
    "cars-published": (f"cars-published-{GPU}", cars),
    "omniglot-losses": (f"omniglot-losses-{GPU}", cars),
}
TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "batch-sizes": (f"kernels-{GPU}", batch_sizes),
    "errors": (f"kernels-{GPU}-errors", errors),
    "growth": (f"kernels-{GPU}", growth),
    "fits": (f"kernels-{GPU}", fits),
    "first-call": (f"first-call-{GPU}", first_call),
    "other-gpus": ("other-gpus", other_gpus),
    "rates": (f"training-rates-{GPU}", rates),
    "million": (f"million-items-{GPU}", million),
    "cpu": ("losses-cpu", cpu),
    "evaluation": ("evaluation-cpu", evaluation),
}


if __name__ == "__main__":
    sys.exit(main())
