"""`python -m benchmarks.first_call`: what the first call of a loss costs in a process without compiled kernels.

Each loss runs in a fresh process with an empty Triton cache: seconds of the first forward and backward, of the second call,
and of every kernel that was compiled, variant by variant, which add up to more than the first call where they are compiled at
the same time. `--one-by-one` compiles them when they are launched. `--other-sizes` then calls the loss with further batch
sizes, which shows what a new shape compiles again. Needs a GPU and Triton 3.4.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import provenance
from benchmarks.presets import PRESETS
from benchmarks.synthetic import hard_batch

DIM, PER_CLASS = 512, 4


@dataclass
class FirstCall:
    """Seconds of a loss in one process, and (stage, kernel, seconds) of all it compiled."""

    loss: str
    precision: str
    forward: float = 0.0
    backward: float = 0.0
    second: float = 0.0
    again: float = 0.0  # first call in a later process, with the cache that this one filled
    compiled: list[tuple[str, str, float]] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call", description=__doc__)
    add = parser.add_argument
    add("--losses", default=",".join(PRESETS), metavar="A,B", help="of %(default)s")
    add("--precisions", default="fast,high", metavar="A,B", help="of %(default)s")
    add("--size", type=int, default=4096, metavar="N", help="batch size (default: %(default)s)")
    add("--other-sizes", default="", metavar="N,N", help="batch sizes called after the first")
    add("--one-by-one", action="store_true", help="compile a kernel when it is launched, not all of a loss at once")
    add("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU here, and only kernels are compiled")
    others = [int(size) for size in options.other_sizes.split(",") if size]
    origin = provenance(torch.device("cuda"))
    print(", ".join(f"{name} {value}" for name, value in origin.items() if value))
    together = "one by one" if options.one_by_one else "at the same time"
    print(f"N = {options.size}, d = {DIM}, {PER_CLASS} per class, kernels compiled {together}, seconds")
    found = []
    for loss in options.losses.split(","):
        for precision in options.precisions.split(","):
            with tempfile.TemporaryDirectory() as cache:
                settings = cache, loss, precision, options.one_by_one, options.size
                call = _in_fresh_process(_first_call, *settings, others)
                later = _in_fresh_process(_first_call, *settings, [])
            call.again = later.forward + later.backward
            found.append(call)
            print("\n" + text_table([_record(call)]))
            print(text_table([{"when": w, "kernel": k, "s": f"{s:.2f}"} for w, k, s in call.compiled]), flush=True)
    if options.csv:
        append_csv(options.csv, [origin | {"N": options.size, "kernels": together} | _record(call) for call in found])
    return 0


def _record(call: FirstCall) -> dict[str, str]:
    at_once = [seconds for when, _, seconds in call.compiled if when == "first call"]
    numbers = {
        "first call": call.forward + call.backward,
        "forward": call.forward,
        "backward": call.backward,
        "compiling": sum(at_once),
        "second call": call.second,
        "with a filled cache": call.again,
    }
    of_loss = {"loss": call.loss, "precision": call.precision, "variants": str(len(at_once))}
    return of_loss | {name: f"{seconds:.3f}" for name, seconds in numbers.items()}


def _in_fresh_process(function: Callable[..., FirstCall], *arguments: Any) -> FirstCall:
    """In a process that has imported torch and used no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "benchmarks.first_call"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _first_call(cache: str, name: str, precision: str, one_by_one: bool, size: int, other_sizes: list[int]) -> FirstCall:
    os.environ["TRITON_CACHE_DIR"] = cache
    from triton import knobs

    from rankgrad.ops.triton import first_call

    if one_by_one:
        first_call.compile_together = lambda *_: None
    call, stage = FirstCall(name, precision), "first call"

    def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            call.compiled.append((stage, src.name, times.total / 1e6))

    knobs.compilation.listener = listen
    loss = PRESETS[name]("triton")
    loss.precision = precision  # type: ignore[assignment]
    hard_batch(64, DIM, PER_CLASS, device=torch.device("cuda"))[0] @ torch.ones(DIM, 1, device="cuda")  # the libraries load
    call.forward, call.backward = _seconds(loss, size)
    call.second = sum(_seconds(loss, size))
    for other in other_sizes:
        stage = f"then N = {other}"
        _seconds(loss, other)
    return call


def _seconds(loss: torch.nn.Module, size: int) -> tuple[float, float]:
    embeddings, labels = hard_batch(size, DIM, PER_CLASS, device=torch.device("cuda"))
    embeddings.requires_grad_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    value = loss(embeddings, labels)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    value.backward()
    torch.cuda.synchronize()
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    sys.exit(main())
