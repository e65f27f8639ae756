"""Experiment trackers for the journal of a run: TensorBoard and Weights & Biases."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rankgrad.train.journal import Tracker

UseTensorBoard: TypeAlias = Literal["auto", "on", "off"]


class TensorBoard:
    """Curves of all numbers, in RUN/tensorboard; opened with the first entry."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "tensorboard"
        self._writer: Any = None

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        for name, value in scalars(entry):
            self._writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """The same numbers at Weights & Biases. A resumed run continues its curves, found by the name of the run folder."""

    def __init__(self, project: str, run: Path) -> None:
        self.project, self.folder = project, run
        self._run: Any = None

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._run is None:
            name = self.folder.resolve().name
            self._run = importlib.import_module("wandb").init(
                project=self.project,
                name=name,
                id=name,
                dir=str(self.folder),
                config=dict(entry.get("settings", {})),
                resume="allow",
            )
        numbers = dict(scalars(entry))
        if numbers:
            self._run.log(numbers, step=entry["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def make_trackers(run: Path, *, tensorboard: UseTensorBoard = "auto", wandb: str = "") -> list[Tracker]:
    """Trackers of the run in a folder.

    Args:
        run: folder of the run.
        tensorboard: "auto" writes curves if the package is installed, "on" requires it, "off" does not.
        wandb: project at Weights & Biases, empty for none.

    Raises:
        ModuleNotFoundError: a package that is required is not installed.
    """
    installed = {name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is not None}
    if tensorboard == "on" and "tensorboard" not in installed:
        raise ModuleNotFoundError("--tensorboard on needs the package tensorboard: pip install tensorboard", name="tensorboard")
    if wandb and "wandb" not in installed:
        raise ModuleNotFoundError(f"--wandb {wandb} needs the package wandb: pip install wandb", name="wandb")
    trackers: list[Tracker] = []
    if tensorboard != "off" and "tensorboard" in installed:
        trackers.append(TensorBoard(run))
    if wandb:
        trackers.append(WeightsAndBiases(wandb, run))
    return trackers


def scalars(entry: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of an entry that make curves: train/<name> of a step, <split>/<metric> of an evaluation."""
    kind = entry["kind"]
    content = {f"{entry['split']}/{k}": v for k, v in entry.get("metrics", {}).items()} if kind == "eval" else {}
    if kind == "step":
        content = {f"train/{k}": v for k, v in entry.items() if k not in ("kind", "time", "step")}
    for name, value in content.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
