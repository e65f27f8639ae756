"""Time, peak memory and provenance of a call, on the CPU and on a GPU."""

import contextlib
import ctypes
import datetime as dt
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import rankgrad
from rankgrad._device import available_bytes

Call = Callable[[], object]
Result = TypeVar("Result")
GB, MB = 1e9, 1e6
QUIET = 0.05  # share of the CPU taken by other processes above which times are not to be trusted


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, the 20 % and 80 % quantiles, and of how many repetitions.

    `core_seconds`: processor time of this process, the least of all repetitions, which other processes hardly change.
    """

    median: float
    low: float
    high: float
    repetitions: int
    core_seconds: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], core_seconds: Sequence[float] = ()) -> "Timing":
        ordered = sorted(seconds)
        last = len(ordered) - 1
        quantiles = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
        return cls(statistics.median(ordered), *quantiles, len(ordered), min(core_seconds, default=None))

    def scaled(self, factor: float) -> "Timing":
        cores = None if self.core_seconds is None else self.core_seconds * factor
        return Timing(self.median * factor, self.low * factor, self.high * factor, self.repetitions, cores)


@dataclass(frozen=True)
class Measurement:
    """What a call took; None where it was not measured, and the note says why."""

    timing: Timing | None = None
    memory: int | None = None
    note: str = ""


def timed(call: Call, device: torch.device) -> float:
    """Seconds of one call; on a GPU between two events, so that the host's own wait is not in it."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def timed_in_turns(calls: Sequence[Call], device: torch.device, seconds: float, rounds: int = 5) -> list[Timing]:
    """Time calls in turns, so that a noisy minute of the machine falls on all of them.

    Each gets about `seconds`, spread evenly over the rounds; one that is slower than that still runs three times.
    """
    for call in calls:
        call()  # compiles, loads libraries, grows thread pools
    samples = [[timed_with_cores(call, device)] for call in calls]
    repeats = [max(1, int(seconds / rounds / sample[0][0])) for sample in samples]
    for turn in range(rounds):
        for call, sample, repeat in zip(calls, samples, repeats, strict=True):
            if sample[0][0] < seconds or turn in (0, rounds // 2):
                sample.extend(timed_with_cores(call, device) for _ in range(repeat))
    return [Timing.of(*zip(*sample, strict=True)) for sample in samples]


def timed_with_cores(call: Call, device: torch.device) -> tuple[float, float]:
    """Seconds of one call, and seconds of processor time in all threads of this process."""
    began = time.process_time()
    seconds = timed(call, device)
    return seconds, time.process_time() - began


def share_of_others(call: Callable[[], Result]) -> tuple[Result, float | None]:
    """The call's result, and the share of the CPU that other processes took meanwhile; None where nothing tells.

    Calls made of many short parallel parts wait at the end of each for the slowest thread: on a machine where others
    take a core, they are slowed down many times more than a few long parts are.
    """
    start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    result = call()
    wall, busy_after, own = time.perf_counter() - start, _busy_seconds(), _own_seconds() - own
    if busy is None or busy_after is None:
        return result, None
    return result, max(0.0, busy_after - busy - own) / wall / (os.cpu_count() or 1)


def busy_note(share: float | None) -> str:
    """A warning where other processes took more than `QUIET` of the CPU, else nothing."""
    return f"other processes took {share:.0%} of the CPU" if share and share > QUIET else ""


def _own_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_memory(call: Call, device: torch.device) -> int:
    """Bytes that the call needs at its worst moment beyond what was held before it.

    On a GPU what torch's allocator handed out. On the CPU the resident memory of this process, which only a process
    of its own shows cleanly: see `in_child`.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _return_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
    except OSError:
        before = _resource_peak()  # a mark that cannot be set back: right in a fresh process, else too small
        call()
        return _resource_peak() - before
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def in_child(function: Callable[..., Result], *arguments: Any) -> Result:
    """The function's result, computed in a fresh process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device; half of the machine's memory where the system does not tell."""
    known = available_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if known is None else known


def provenance(device: torch.device) -> dict[str, str]:
    """Where, when and with what a number was measured."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        if device.type == "cuda"
        else "",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "rankgrad": rankgrad.__version__,
        "commit": _commit(),
    }


def _return_freed_memory() -> None:
    """Gives the heap's free pages back to the system: reused by the call, they would hide a part of its peak."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine started."""
    try:
        user, nice, system, _idle, _wait, *rest = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    except OSError:
        return None
    return sum(map(int, (user, nice, system, *rest))) / os.sysconf("SC_CLK_TCK")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _resource_peak() -> int:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _commit() -> str:
    """The commit of the source that runs, marked where the working tree has changed since; empty outside git."""
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
