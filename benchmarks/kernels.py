"""`python -m benchmarks.kernels`: the fused kernels beside their targets, other formulations and the matrix products alone.

Every loss is first compared with float64, then forward + backward is timed at every size. A row is printed and added to the CSV
file as soon as it is measured, so that an interrupted run keeps what it has.
"""

import argparse
import csv
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.kernel_cases import TINY, Case, Sizes, all_cases, quick_cases
from benchmarks.kernel_runner import KernelRunner
from benchmarks.performance import growth


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a loss is wrong or a row broke, 2 where it cannot run."""
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
    runner = KernelRunner(options, device)
    status = runner.run(cases)
    if runner.csv is not None and runner.csv.is_file():
        with runner.csv.open(newline="") as file:
            print(f"\ngrowth over the sizes in {runner.csv}\n{growth(list(csv.DictReader(file)))}")
    return status


def _refuse(reason: str) -> int:
    print(f"python -m benchmarks.kernels: {reason}", file=sys.stderr)
    return 2


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few rows with short timings, about a minute")
    add("--huge", action="store_true", help="a million items too")
    add("--only", metavar="PATTERN", help="rows whose name (see --list) this regular expression finds")
    add("--list", action="store_true", help="print the names of the rows and measure nothing")
    add("--seconds", type=float, help="time for the repetitions of each row (default: 0.4, 0.15 with --quick)")
    add("--csv", type=Path, metavar="FILE", help="append here (default: benchmarks/results/kernels-GPU.csv)")
    add("--memory-limit", type=float, default=0, metavar="GB", help="skip baselines that need more; 0: what is free")
    add("--host-labels", action="store_true", help="leave the labels on the CPU, which spares a wait for the GPU")
    add("--commit", default="", help="note this commit where git cannot tell it")
    add("--cpu-check", action="store_true", help="try the command on tiny sizes without a GPU, needs TRITON_INTERPRET=1")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 0.0 if options.cpu_check else 0.15 if options.quick else 0.4
    try:
        re.compile(options.only or "")
    except re.error as problem:
        parser.error(f"--only: {options.only!r} is not a regular expression: {problem}")
    if not _chosen(options):
        parser.error(f"--only: no row matches {options.only!r}; --list names them")
    return options


def _chosen(options: argparse.Namespace) -> list[Case]:
    sizes = TINY if options.cpu_check else Sizes()
    cases = quick_cases(sizes) if options.quick else all_cases(sizes, huge=options.huge)
    return [case for case in dict.fromkeys(cases) if re.search(options.only or "", case.key)]


if __name__ == "__main__":
    sys.exit(main())
