"""What a run says about itself: JSON lines in its folder, and where wanted TensorBoard and Weights & Biases.

    {"kind": "step", "time": "2026-03-01T12:00:00+00:00", "step": 120, "epoch": 3, "loss": 0.31, ...}

Kinds: start, resume, step, epoch, eval, checkpoint, warning, end.
"""

import datetime as dt
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from rankgrad.train.errors import TrainingError, reason_of
from rankgrad.train.settings import TrainSettings

PACKAGES = ("rankgrad", "torch", "numpy", "torchvision", "timm", "safetensors", "triton")

# entries about work that a run resumed from an earlier step does again
REPEATED = frozenset({"step", "epoch", "eval", "checkpoint"})


class Tracker(Protocol):
    """Takes every entry of a journal."""

    def write(self, entry: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Stamps entries and hands them to trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def note(self, kind: str, *, step: int, epoch: int, **content: Any) -> None:
        stamp = dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")
        entry = {"kind": kind, "time": stamp, "step": step, "epoch": epoch, **content}
        for tracker in self.trackers:
            tracker.write(entry)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


class JsonLines:
    """One object a line, flushed line by line, so that a killed run loses at most the line being written.

    Args:
        path: continued if it exists.
        resume_at: step that the run continues from, 0 for a new one: what an earlier run noted of later steps is dropped,
            since it is done again, and so is a torn last line.
    """

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        self.path = path
        self._file: TextIO | None = None
        try:
            if path.exists():
                self._keep_until(resume_at)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._explained(error) from error

    def write(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(jsonable(entry), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._explained(error) from error

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # what a full disk left in the buffer
                raise self._explained(error) from error

    def _keep_until(self, step: int) -> None:
        kept = [entry for entry in entries(self.path) if entry["kind"] not in REPEATED or entry["step"] <= step]
        unfinished = self.path.with_name(f".writing-{self.path.name}")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in kept)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)

    def _explained(self, error: OSError) -> TrainingError:
        return TrainingError(f"{self.path} cannot be written: {reason_of(error)}")


class TensorBoard:
    """Curves of all numbers, in RUN/tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, entry: Mapping[str, Any]) -> None:
        for name, value in _numbers(entry):
            self._writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The same numbers at Weights & Biases. A resumed run continues its curves, told apart by the run folder's name."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        identity = folder.resolve().name
        self._run: Any = wandb.init(
            project=project, name=identity, id=identity, dir=str(folder), config=dict(config), resume="allow"
        )

    def write(self, entry: Mapping[str, Any]) -> None:
        numbers = dict(_numbers(entry))
        if numbers:
            self._run.log(numbers, step=entry["step"])

    def close(self) -> None:
        self._run.finish()


def open_journal(path: Path, settings: TrainSettings, *, resume_at: int = 0) -> Journal:
    """The journal of the run in the folder of `path`, with the trackers that `settings` want."""
    installed = {name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is not None}
    if settings.tensorboard == "on" and "tensorboard" not in installed:
        raise ModuleNotFoundError("tensorboard='on' needs the package: pip install 'rankgrad[tensorboard]'", name="tensorboard")
    if settings.wandb and "wandb" not in installed:
        raise ModuleNotFoundError(f"wandb={settings.wandb!r} needs the package: pip install wandb", name="wandb")
    trackers: list[Tracker] = [JsonLines(path, resume_at=resume_at)]
    if settings.tensorboard != "off" and "tensorboard" in installed:
        trackers.append(TensorBoard(path.parent / "tensorboard"))
    if settings.wandb:
        trackers.append(WeightsAndBiases(settings.wandb, path.parent, settings.as_dict()))
    return Journal(trackers)


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a journal in order; a line that was torn by a crash is left out."""
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
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    versions = {"python": platform.python_version(), **{name: installed[name] for name in PACKAGES if name in installed}}
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
    return {"versions": versions, "hardware": hardware, "command": sys.argv}


def _numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What can be drawn as a curve, named kind/name; metrics of an evaluation are split/name."""
    kind = entry["kind"]
    content = {f"{entry['split']}/{k}": v for k, v in entry.get("metrics", {}).items()} if kind == "eval" else {}
    if kind == "step":
        content = {f"train/{k}": v for k, v in entry.items() if k not in ("kind", "time", "step")}
    for name, value in content.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def jsonable(value: Any) -> Any:
    """As JSON knows it: no tuples, paths or tensors, and NaN and infinities as words."""
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
