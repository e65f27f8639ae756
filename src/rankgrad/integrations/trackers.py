"""Experiment trackers for the journal of a run: TensorBoard, Weights & Biases, trackio and MLflow."""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
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

    library = "wandb"

    def __init__(self, project: str, run: Path) -> None:
        self.project, self.folder = project, run
        self._run: Any = None

    def _own_options(self, name: str) -> dict[str, Any]:
        return {"id": name, "dir": str(self.folder)}

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._run is None:
            name = self.folder.resolve().name
            self._run = importlib.import_module(self.library).init(
                project=self.project,
                name=name,
                config=dict(entry.get("settings", {})),
                resume="allow",
                **self._own_options(name),
            )
        numbers = dict(scalars(entry))
        if numbers:
            self._run.log(numbers, step=entry["step"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackio(WeightsAndBiases):
    """The same numbers in trackio, whose calls are those of Weights & Biases."""

    library = "trackio"

    def _own_options(self, name: str) -> dict[str, Any]:
        return {}


class MLflow:
    """The same numbers in MLflow, where MLFLOW_TRACKING_URI says. A resumed run continues the one of its folder."""

    TAG = "rankgrad.folder"

    def __init__(self, experiment: str, run: Path) -> None:
        self.experiment, self.folder = experiment, run
        self._client: Any = None
        self._run = ""

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._client is None:
            self._open(entry)
        from mlflow.entities import Metric

        # a name may not contain @
        numbers = [(name.replace("@", "_at_"), value) for name, value in scalars(entry)]
        if numbers:
            now = int(1000 * time.time())
            metrics = [Metric(name, value, now, entry["step"]) for name, value in numbers]
            self._client.log_batch(self._run, metrics=metrics)

    def _open(self, entry: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, folder = MlflowClient(), str(self.folder.resolve())
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
        runs = self._client.search_runs([experiment])
        known = [run.info.run_id for run in runs if run.data.tags.get(self.TAG) == folder]
        if known:
            self._run = known[0]
            self._client.update_run(self._run, status="RUNNING")
            return
        name = self.folder.resolve().name
        self._run = self._client.create_run(experiment, run_name=name, tags={self.TAG: folder}).info.run_id
        params = [Param(key, str(value)) for key, value in entry.get("settings", {}).items()]
        if params:
            self._client.log_batch(self._run, params=params)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run)


def make_trackers(
    run: Path, *, tensorboard: UseTensorBoard = "auto", wandb: str = "", trackio: str = "", mlflow: str = ""
) -> list[Tracker]:
    """Trackers of the run in a folder.

    Args:
        run: folder of the run.
        tensorboard: "auto" writes curves if the package is installed, "on" requires it, "off" does not.
        wandb: project at Weights & Biases, empty for none.
        trackio: project of trackio, empty for none.
        mlflow: experiment of MLflow, empty for none.

    Raises:
        ModuleNotFoundError: a package that is required is not installed.
    """
    named: dict[str, tuple[str, Callable[[str, Path], Tracker]]] = {
        "wandb": (wandb, WeightsAndBiases),
        "trackio": (trackio, Trackio),
        "mlflow": (mlflow, MLflow),
    }
    installed = {name for name in ("tensorboard", *named) if importlib.util.find_spec(name) is not None}
    if tensorboard == "on" and "tensorboard" not in installed:
        raise ModuleNotFoundError("--tensorboard on needs the package tensorboard: pip install tensorboard", name="tensorboard")
    for package, (project, _) in named.items():
        if project and package not in installed:
            raise ModuleNotFoundError(f"--{package} {project} needs the package {package}: pip install {package}", name=package)
    trackers: list[Tracker] = []
    if tensorboard != "off" and "tensorboard" in installed:
        trackers.append(TensorBoard(run))
    trackers += [make(project, run) for project, make in named.values() if project]
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
