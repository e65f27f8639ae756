"""TensorBoard, Weights & Biases, trackio and MLflow get the numbers of a journal."""

import sys
import types
from typing import ClassVar

import pytest

from rankgrad.integrations import trackers
from rankgrad.integrations.trackers import make_trackers
from rankgrad.train.journal import Journal


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    curves = []

    class Writer:
        def __init__(self, folder):
            curves.append(folder)

        def add_scalar(self, name, value, step):
            curves.append((name, value, step))

        def close(self):
            curves.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    notes = Journal(make_trackers(tmp_path))
    notes.log("step", step=2, epoch=1, loss=0.25, note="words are no curve")
    notes.log("eval", step=5, epoch=1, split="test", metrics={"R@1": 0.5})
    notes.log("warning", step=5, epoch=1, message="no curve either")
    notes.close()
    assert curves == [
        str(tmp_path / "tensorboard"),
        ("train/epoch", 1.0, 2),
        ("train/loss", 0.25, 2),
        ("test/R@1", 0.5, 5),
        "closed",
    ]


def test_weights_and_biases_gets_the_same(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((numbers, step))

        def finish(self):
            calls.append("finished")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=True))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    notes = Journal(make_trackers(tmp_path, tensorboard="off", wandb="retrieval"))
    notes.log("start", step=0, epoch=1, settings={"epochs": 1})
    notes.log("step", step=2, epoch=1, loss=0.25)
    notes.log("warning", step=2, epoch=1, message="nothing to log")
    notes.close()
    assert calls[0]["project"] == "retrieval"
    assert calls[0]["resume"] == "allow"
    assert calls[0]["config"] == {"epochs": 1}
    assert calls[1:] == [({"train/epoch": 1.0, "train/loss": 0.25}, 2), "finished"]


def test_trackio_gets_the_same(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: calls.append((numbers, step)), finish=lambda: calls.append("finished")
    )

    def init(**options):
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init, __spec__=True))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    notes = Journal(make_trackers(tmp_path, tensorboard="off", trackio="retrieval"))
    notes.log("start", step=0, epoch=1, settings={"epochs": 1})
    notes.log("eval", step=2, epoch=1, split="test", metrics={"R@1": 0.5})
    notes.close()
    assert calls[0] == {"project": "retrieval", "name": tmp_path.name, "config": {"epochs": 1}, "resume": "allow"}
    assert calls[1:] == [({"test/R@1": 0.5}, 2), "finished"]


class _Client:
    """What is used of mlflow.MlflowClient, in memory."""

    runs: ClassVar[dict] = {}

    def get_experiment_by_name(self, name):
        return None if not self.runs else types.SimpleNamespace(experiment_id=name)

    def create_experiment(self, name):
        return name

    def search_runs(self, experiments):
        return [run for run in self.runs.values() if run.experiment in experiments]

    def create_run(self, experiment, run_name, tags):
        made = types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=run_name), data=types.SimpleNamespace(tags=tags), experiment=experiment
        )
        made.logged, made.status = [], "RUNNING"
        self.runs[run_name] = made
        return made

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    def log_batch(self, run_id, metrics=(), params=()):
        self.runs[run_id].logged += [*metrics, *params]

    def set_terminated(self, run_id):
        self.runs[run_id].status = "FINISHED"


def test_mlflow_gets_the_same_and_a_resumed_run_continues(tmp_path, monkeypatch):
    entities = types.SimpleNamespace(
        Metric=lambda key, value, _, step: (key, value, step), Param=lambda key, value: (key, value)
    )
    monkeypatch.setattr(_Client, "runs", {})
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=_Client, __spec__=True))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    for step in (1, 2):
        notes = Journal(make_trackers(tmp_path, tensorboard="off", mlflow="retrieval"))
        notes.log("start", step=0, epoch=1, settings={"epochs": 1})
        notes.log("eval", step=step, epoch=1, split="test", metrics={"R@1": 0.5})
        notes.close()
    (run,) = _Client.runs.values()
    assert run.status == "FINISHED"
    assert run.logged == [("epochs", "1"), ("test/R_at_1", 0.5, 1), ("test/R_at_1", 0.5, 2)]


def test_the_real_mlflow_takes_it(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    for step in (1, 2):
        notes = Journal(make_trackers(tmp_path / "run", tensorboard="off", mlflow="retrieval"))
        notes.log("start", step=0, epoch=1, settings={"epochs": 1})
        notes.log("eval", step=step, epoch=1, split="test", metrics={"R@1": 0.5 * step})
        notes.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("retrieval").experiment_id])
    assert run.data.metrics == {"test/R_at_1": 1.0}
    assert run.data.params == {"epochs": "1"}


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"tensorboard": "on"}, "tensorboard"),
        ({"wandb": "x"}, "wandb"),
        ({"trackio": "x"}, "trackio"),
        ({"mlflow": "x"}, "mlflow"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, settings, package):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install .*{package}"):
        make_trackers(tmp_path, **settings)
