"""TensorBoard and Weights & Biases get the numbers of a journal."""

import sys
import types

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


@pytest.mark.parametrize(("settings", "package"), [({"tensorboard": "on"}, "tensorboard"), ({"wandb": "x"}, "wandb")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, settings, package):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install .*{package}"):
        make_trackers(tmp_path, **settings)
