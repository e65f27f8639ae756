"""`python -m benchmarks.relevance`: what kinds of relevance cost beside class labels, in time and memory.

    labels      classes of about eleven items, ranked against each other
    pairs       items with two labels each, about ten others share one; a sparse list
    levels      the same classes in super-classes of two, with gains
    both ways   two towers, image to text and text to image; the other row makes two calls

Forward + backward of Smooth-AP, rows in turns.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import rankgrad as rg
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import in_child, peak_memory, provenance, timed_in_turns

Call = Callable[[], None]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relevance", description=__doc__)
    add = parser.add_argument
    add("--items", type=int, default=4096, metavar="N", help="batch size (default: %(default)s)")
    add("--dim", type=int, default=64, metavar="D", help="dimensions (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--threads", type=int, default=1, help="threads on the CPU (default: %(default)s)")
    add("--seconds", type=float, default=2.0, help="time for each row (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    calls = calls_of(options.items, options.dim, device)
    for call in calls.values():
        call()
    timings = timed_in_turns(list(calls.values()), device, options.seconds)
    origin, rows = provenance(device), []
    for name, timing in zip(calls, timings, strict=True):
        # on a CPU only a process of its own shows the peak
        taken = memory_of(name, options.items, options.dim, device) if device.type == "cuda" else in_child(
            memory_of, name, options.items, options.dim, device
        )  # fmt: skip
        rows.append(
            {
                "relevance": name,
                "items": str(options.items),
                "dim": str(options.dim),
                "milliseconds": f"{1e3 * timing.median:.3g}",
                "megabytes": f"{taken / 1e6:.3g}",
            }
        )
    print(", ".join(f"{name} {value}" for name, value in origin.items() if value))
    print(text_table(rows))
    if options.csv:
        append_csv(options.csv, [{**row, **origin} for row in rows])
    return 0


def calls_of(items: int, dim: int, device: torch.device) -> dict[str, Call]:
    """Forward and backward with every kind of relevance."""
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.randn(items, dim, generator=rng).to(device) for _ in range(2))
    classes = torch.randint(max(items // 11, 1), (items,), generator=rng)
    tags = torch.randint(max(items // 3, 1), (items, 2), generator=rng).tolist()
    pairs = rg.Pairs.from_multilabel(tags)
    labels, ids = classes.to(device), torch.arange(items, device=device)
    loss = rg.SmoothAPLoss()
    both = rg.both_ways(loss)

    def step(value: Callable[..., Tensor], *tensors: Tensor) -> Call:
        def call() -> None:
            value(*(tensor.clone().requires_grad_() for tensor in tensors)).backward()

        return call

    on_device = rg.Pairs(pairs.query.to(device), pairs.item.to(device))
    levels = rg.Levels(torch.stack((labels // 2, labels), dim=1))
    return {
        "labels": step(lambda x: loss(x, labels), first),
        "pairs": step(lambda x: loss(x, relevance=on_device), first),
        "levels": step(lambda x: loss(x, relevance=levels), first),
        "both ways": step(lambda a, b: both(a, b, ids), first, second),
        "both ways, two calls": step(lambda a, b: (loss(a, ids, b, ids) + loss(b, ids, a, ids)) / 2, first, second),
    }


def memory_of(name: str, items: int, dim: int, device: torch.device) -> int:
    """Bytes of the second call; the first one loads what is loaded once."""
    torch.set_num_threads(1)
    calls_of(min(items, 600), dim, device)[name]()
    return peak_memory(calls_of(items, dim, device)[name], device)


if __name__ == "__main__":
    raise SystemExit(main())
