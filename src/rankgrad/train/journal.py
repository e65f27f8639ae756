"""The journal of a run: JSON lines in its folder, and every entry to trackers.

    {"kind": "step", "time": "2026-03-01T12:00:00+00:00", "step": 120, "epoch": 3, "loss": 0.31, ...}

Kinds: start, resume, step, epoch, eval, checkpoint, warning, end.
"""

import datetime as dt
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from rankgrad._files import write_error_reason
from rankgrad.train.errors import TrainingError

JOURNAL = "journal.jsonl"
PACKAGES = ("rankgrad", "torch", "numpy", "torchvision", "timm", "safetensors", "triton")

# entries about work that is repeated when a run resumes from an earlier step
REPEATED = frozenset({"step", "epoch", "eval", "checkpoint"})


class Tracker(Protocol):
    """Gets every entry of a journal, beginning with "start" or "resume"."""

    def write(self, entry: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Stamps entries and passes them to trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log(self, kind: str, *, step: int, epoch: int, **content: Any) -> None:
        stamp = dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")
        entry = {"kind": kind, "time": stamp, "step": step, "epoch": epoch, **content}
        for tracker in self.trackers:
            tracker.write(entry)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


class JsonLines:
    """One object per line, flushed line by line, so that a killed run loses at most the line being written.

    Args:
        path: appended to if it exists.
        resume_at: step that the run continues from, 0 for a new one: entries of later steps are dropped, since these steps are
            repeated, and so is an incomplete last line.
    """

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        self.path = path
        self._file: TextIO | None = None
        try:
            if path.exists():
                self._truncate(resume_at)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._error(error) from error

    def write(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(jsonable(entry), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # a full disk, with lines still in the buffer
                raise self._error(error) from error

    def _truncate(self, step: int) -> None:
        kept = [entry for entry in entries(self.path) if entry["kind"] not in REPEATED or entry["step"] <= step]
        unfinished = self.path.with_name(f".writing-{self.path.name}")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in kept)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)

    def _error(self, error: OSError) -> TrainingError:
        return TrainingError(f"{self.path} cannot be written: {write_error_reason(error)}")


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a journal in order; incomplete lines are skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("kind"), str) and type(entry.get("step")) is int:
                yield entry


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and command of this process."""
    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}
    return {"versions": dict(_versions()), "hardware": hardware, "command": sys.argv}


@cache
def _versions() -> Mapping[str, str]:
    """Read once: a sweep of short runs would spend much of its time on it."""
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: installed[name] for name in PACKAGES if name in installed}}


def jsonable(value: Any) -> Any:
    """`value` in JSON types: lists for tuples, strings for paths, NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, (str, int, bool, type(None))):
        return value
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)
