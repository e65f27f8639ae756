"""`python -m benchmarks.list_ap`: RaMBO's Table 6, the AP loss of one list of up to 100 million scores, forward and backward.

The paper's algorithm (a ranking is two argsorts) and ours in one run, on a CPU with one thread as in the paper and with all,
and on a GPU where there is one. The paper's own times, of one core of a Xeon at 2.2 GHz and of a V100, stand beside them.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rankgrad
from benchmarks.baselines import sorts
from benchmarks.csv_rows import append_csv, text_table
from benchmarks.measure import MB, Timing, free_memory, peak_memory, provenance, share_of_others, timed_in_turns
from benchmarks.presets import AP_LAM, AP_MARGIN

# 320k is the list of which the paper's text says that it takes less than 5 ms on a GPU
LENGTHS = "100k,320k,1M,10M,100M"
QUICK = {"lengths": "1k", "seconds": 0.02}
UNITS = {"k": 10**3, "M": 10**6}
# milliseconds of Table 6 by kind of device and length; "less than 5 ms" is from the text
PUBLISHED: dict[tuple[str, int], str] = {
    ("cpu", 10**5): "33",
    ("cpu", 10**6): "331",
    ("cpu", 10**7): "3860",
    ("cpu", 10**8): "36400",
    ("cuda", 10**5): "1.3",
    ("cuda", 320_000): "< 5",
    ("cuda", 10**6): "7",
    ("cuda", 10**7): "61",
    ("cuda", 10**8): "620",
}
# bytes of a score that the argsorts need at their worst moment: int64 orders, float ranks and what sorting takes
BYTES_EACH = 64
FREE_SHARE = 0.8
VALUE_TOLERANCE = 1e-4
# of the gradient, in which rounding lets single items pass each other or not; past 2**24 ranks in floats are no integers, and
# the differences of such ranks are noise
GRADIENT_TOLERANCE = 0.1
MOST_COMPARED = 10**7

Call = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """Where a row is measured."""

    device: torch.device
    threads: int

    @property
    def as_in_the_paper(self) -> bool:
        """The paper measured one core, or a GPU."""
        return self.device.type == "cuda" or self.threads == 1

    @property
    def title(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.threads} thread{'s' if self.threads > 1 else ''}"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 if two algorithms disagree."""
    options = _options(arguments)
    agreed = True
    threads_before = torch.get_num_threads()
    try:
        for setting in _settings(options):
            torch.set_num_threads(setting.threads)
            origin = provenance(setting.device)
            print(f"\n{setting.title}: " + ", ".join(f"{name} {value}" for name, value in origin.items() if value), flush=True)
            for length in options.lengths:
                found, agrees = _measured(length, setting, options)
                agreed = agreed and agrees
                if options.csv:
                    append_csv(options.csv, [origin | row for row in found])
                print(text_table([_text(row) for row in found]), flush=True)
    finally:
        torch.set_num_threads(threads_before)
    return 0 if agreed else 1


def make_list(length: int, share: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scores of a list and which are relevant: those lie higher, and the two overlap."""
    draws = torch.Generator(device).manual_seed(length)
    relevant = torch.rand(length, device=device, generator=draws) < share
    relevant[0] = True
    scores = torch.randn(length, device=device, generator=draws) + 1.5 * relevant
    return scores, relevant


def calls(scores: Tensor, relevant: Tensor) -> dict[str, Call]:
    """The algorithms by name, each giving value and gradient."""
    leaf = scores.clone().requires_grad_()
    loss = rankgrad.RamboAPLoss(lam=AP_LAM, margin=AP_MARGIN)

    def ours() -> tuple[Tensor, Tensor]:
        value = loss.from_scores(leaf, relevant)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return {
        "paper, six argsorts": functools.partial(sorts.six_argsorts_ap, scores, relevant),
        "two sorts": functools.partial(sorts.two_sorts_ap, scores, relevant),
        "ours": ours,
    }


def _measured(length: int, setting: Setting, options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    shape = {
        "device": setting.device.type,
        "setting": setting.title,
        "length": length,
        "relevant": options.relevant,
        "published_ms": PUBLISHED.get((setting.device.type, length), "") if setting.as_in_the_paper else "",
    }
    needed, free = BYTES_EACH * length, FREE_SHARE * free_memory(setting.device)
    if needed > free:
        note = f"skipped: needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        return [_row(shape, "all", None, None, None, None, note)], True
    scores, relevant = make_list(length, options.relevant, setting.device)
    algorithms = calls(scores, relevant)
    value, gradient = algorithms["ours"]()
    notes, agreed = {}, True
    for name, call in algorithms.items():
        other_value, other_gradient = call()
        compared = length <= MOST_COMPARED
        apart = abs(float(other_value) - float(value)), _apart(other_gradient, gradient) if compared else 0.0
        if not apart[0] <= VALUE_TOLERANCE or not apart[1] <= GRADIENT_TOLERANCE:
            agreed = False
            notes[name] = f"DISAGREES with ours: value by {apart[0]:.1e}, gradient by {apart[1]:.1e}"
        del other_value, other_gradient
    del gradient
    timings, busy = share_of_others(
        lambda: timed_in_turns(list(algorithms.values()), setting.device, options.seconds, options.rounds)
    )
    own = timings[list(algorithms).index("ours")]
    rows = []
    for (name, call), timing in zip(algorithms.items(), timings, strict=True):
        memory = peak_memory(call, setting.device) if setting.device.type == "cuda" else None
        rows.append(_row(shape, name, timing, timing.median / own.median, memory, busy, notes.get(name, "")))
    return rows, agreed


def _row(
    shape: dict[str, Any],
    name: str,
    timing: Timing | None,
    ratio: float | None,
    memory: int | None,
    busy: float | None,
    note: str,
) -> dict[str, Any]:
    return {
        **shape,
        "algorithm": name,
        "ms": timing and 1e3 * timing.median,
        "ms_20": timing and 1e3 * timing.low,
        "ms_80": timing and 1e3 * timing.high,
        "repetitions": timing and timing.repetitions,
        "time_ratio": ratio,
        "peak_bytes": memory,
        "share_of_others": busy,
        "note": note,
    }


def _text(row: dict[str, Any]) -> dict[str, str]:
    def number(name: str, digits: int, unit: float = 1.0) -> str:
        return "" if row[name] is None else f"{row[name] / unit:.{digits}g}"

    return {
        "length": f"{row['length']:,}",
        "algorithm": row["algorithm"],
        "ms": number("ms", 3),
        "time/ours": number("time_ratio", 3),
        "MB": number("peak_bytes", 4, MB),
        "Table 6, ms": row["published_ms"],
        "note": row["note"],
    }


def _apart(one: Tensor, two: Tensor) -> float:
    """Length of the difference of two gradients over the length of the second."""
    length = float(two.double().norm())
    difference = float((one.double() - two.double()).norm())
    return difference / length if length else (math.inf if difference else 0.0)


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    for device in options.devices:
        if device.type == "cuda":
            yield Setting(device, torch.get_num_threads())
        else:
            yield from (Setting(device, threads) for threads in options.threads)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.list_ap", description=__doc__)
    add = parser.add_argument
    known = "cpu,cuda" if torch.cuda.is_available() else "cpu"
    every = torch.get_num_threads()
    add("--quick", action="store_true", help="one short list and short timings, where no other flag says otherwise")
    add("--lengths", default=LENGTHS, metavar="N,N", help="scores in the list, k and M allowed (default: %(default)s)")
    add("--devices", default=known, metavar="A,B", help="cpu, cuda (default: %(default)s)")
    add("--threads", default=f"1,{every}" if every > 1 else "1", metavar="N,N", help="on the CPU (default: %(default)s)")
    add("--relevant", type=float, default=0.01, metavar="SHARE", help="of the scores that are relevant (default: %(default)s)")
    add("--seconds", type=float, default=5.0, help="time for each row (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns that the algorithms take (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    options.lengths = [_length(parser, text) for text in options.lengths.split(",")]
    options.devices = [_device(parser, text) for text in options.devices.split(",")]
    options.threads = _threads(parser, options.threads.split(","))
    if not 0 < options.relevant < 1:
        parser.error(f"--relevant must lie between 0 and 1, got {options.relevant}")
    if options.rounds < 1 or options.seconds <= 0:
        parser.error(f"--rounds and --seconds must be above 0, got {options.rounds} and {options.seconds}")
    return options


def _length(parser: argparse.ArgumentParser, text: str) -> int:
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdigit() or int(number) * unit < 2:
        parser.error(f"--lengths: numbers of at least 2 such as 100k or 10M wanted, got {text!r}")
    return int(number) * unit


def _device(parser: argparse.ArgumentParser, text: str) -> torch.device:
    if text not in ("cpu", "cuda"):
        parser.error(f"--devices: cpu and cuda are known, got {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        parser.error(f"--devices {text}: torch {torch.__version__} sees no GPU here")
    return torch.device(text)


def _threads(parser: argparse.ArgumentParser, texts: Sequence[str]) -> list[int]:
    if not all(text.isdigit() and int(text) for text in texts):
        parser.error(f"--threads: numbers of at least 1 with commas between wanted, got {','.join(texts)}")
    return list(dict.fromkeys(map(int, texts)))


if __name__ == "__main__":
    sys.exit(main())
