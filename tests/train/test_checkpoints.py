"""Checkpoints survive full disks, unwritable folders and curious readers."""

import errno
import json
import os
import resource

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from train.tiny_loop import Vectors, network, remembering

from rankgrad.train.checkpoints import CheckpointStore
from rankgrad.train.errors import TrainingError
from rankgrad.train.loop import fit
from rankgrad.train.settings import TrainSettings

SETTINGS = TrainSettings(epochs=2, lr=1e-2)


def save(run, step, model=None, **options):
    return run.save(model or nn.Linear(2, 2), {"step": step}, step=step, epoch=1, metrics={}, **options)


def names(run):
    return sorted(path.name for path in run.path.iterdir())


@pytest.fixture
def run(tmp_path):
    run = CheckpointStore(tmp_path / "deep" / "run" / "checkpoints")
    run.prepare()
    return run


def test_what_is_written_can_be_read_by_anybody(tmp_path):
    model, loss = network(), remembering()
    fit(model, loss, Vectors(), SETTINGS, tmp_path)
    last = tmp_path / "checkpoints" / json.loads((tmp_path / "checkpoints" / "last.json").read_text())["folder"]
    weights = load_file(last / "weights.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    state = CheckpointStore(tmp_path / "checkpoints").checkpoint().state()
    assert state["position"]["step"] == 10
    assert len(state["loss"]["_extra_state"]["past"]) == 2
    assert torch.equal(state["loss"]["_extra_state"]["past"][1][0], loss.past[1][0])


def test_tied_weights_and_shapes(run):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

    model, other = Tied(), Tied()
    save(run, 1, model).load_into(other)
    assert torch.equal(model.first.weight, other.first.weight)
    assert other.second.weight is other.first.weight
    with pytest.raises(ValueError, match=r"weights.safetensors does not fit this model: .*Missing key"):
        run.checkpoint().load_into(nn.Linear(3, 3))


def test_old_checkpoints_go_and_the_best_stays(run):
    best = {"folder": "step-00000002", "step": 2, "metrics": {"R@1": 0.5}}
    for step in range(1, 6):
        save(run, step, best=best if step >= 2 else None)
    assert names(run) == ["best.json", "last.json", "step-00000002", "step-00000004", "step-00000005"]
    assert run.checkpoint("best").state() == {"step": 2, "format": 2}
    assert run.checkpoint("last").state() == {"step": 5, "format": 2}
    assert run.pointer("best") == best


def test_continuing_from_before_the_best_forgets_it(run):
    for step in (1, 2):
        save(run, step, best={"folder": "step-00000002", "step": 2} if step == 2 else None)
    run.rewind_to(1, None)
    assert names(run) == ["last.json", "step-00000001"]


def test_leftovers_are_swept_away(run):
    save(run, 1)
    (run.path / ".writing-step-00000002").mkdir()
    (run.path / ".writing-step-00000002" / "state.safetensors").write_text("half")
    run.prepare()
    assert names(run) == ["last.json", "step-00000001"]


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_the_last_good_checkpoint(run, monkeypatch, call, number):
    save(run, 1)
    fsync, count = os.fsync, 0

    def failing(descriptor):
        nonlocal count
        count += 1
        if count == call:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    reason = "the disk or quota is full; .* Free some space" if number == errno.ENOSPC else "Input/output error; .* Check its"
    if call <= 7:  # three files, their folder, the rename, the pointer and its rename
        with pytest.raises(TrainingError, match=rf"cannot take the checkpoint of step 2: {reason}.*then resume"):
            save(run, 2)
    else:
        save(run, 2)
    monkeypatch.undo()
    found, _ = run.newest_good()
    assert found.state()["step"] in ((1,) if call <= 6 else (1, 2))
    assert not [name for name in names(run) if name.startswith(".writing-step")]


def test_a_file_that_may_not_grow_stops_the_run_with_one_sentence(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(Vectors):
        """In the second epoch files may no longer grow beyond 64 KiB, as on a disk that is almost full."""

        def iterate(self, start):
            for item in super().iterate(start):
                if (self.epoch, item[0]) == (1, 3):
                    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
                yield item

    big = nn.Sequential(network(), nn.Linear(8, 6000))
    try:
        with pytest.raises(TrainingError, match=r"the disk or quota is full; the last checkpoint is .*step-00000005"):
            fit(big, remembering(), Filling(), SETTINGS, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found, faults = store.newest_good()
    assert (found.step, faults) == (5, [])


@pytest.mark.parametrize("place", ["run", "checkpoints"])
def test_a_folder_that_cannot_be_made(tmp_path, place):
    if place == "run":
        (tmp_path / "run").write_text("a file")
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").write_text("a file")
    with pytest.raises(
        TrainingError, match=r"run/checkpoints cannot be created or written to: .*; no checkpoint was written yet. Check its"
    ):
        fit(network(), remembering(), Vectors(), SETTINGS, tmp_path / "run")


def test_missing_and_damaged_checkpoints_are_named(run):
    with pytest.raises(FileNotFoundError, match=r"best\.json is missing or unreadable: no best checkpoint"):
        run.checkpoint("best")
    save(run, 1)
    (run.path / "step-00000001" / "state.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"step-00000001 is damaged: state\.safetensors has 1 bytes instead of \d+"):
        run.checkpoint()
