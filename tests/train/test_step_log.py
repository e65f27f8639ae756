"""Entries of steps that come late, as on a GPU, are those that come at once."""

import functools
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from train.tiny_loop import Vectors, batch, network, remembering

import rankgrad as rg
from rankgrad.train import step_log, train_step
from rankgrad.train.errors import NotFiniteError, TrainingError
from rankgrad.train.loop import fit
from rankgrad.train.meters import NaNGuard
from rankgrad.train.processes import Processes
from rankgrad.train.settings import TrainSettings
from rankgrad.train.step_log import StepLog

CLOCKS = {"time", "seconds", "images_per_second"}


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(train_step, "NaNGuard", lambda late, **others: NaNGuard(late=True, **others))
    monkeypatch.setattr(StepLog, "_runs_beside", lambda self, loss: not list(loss.parameters()))


def journal(folder, model=None, loss=None, *, log_every=3):
    settings = TrainSettings(epochs=2, lr=1e-2, log_every=log_every, checkpoint_every=4, keep=0)
    try:
        fit(network() if model is None else model, loss or remembering(), Vectors(), settings, folder)
    finally:
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines if line["kind"] != "start"]


@pytest.mark.parametrize("log_every", [1, 3])
@pytest.mark.parametrize(
    "loss",
    [
        remembering,
        functools.partial(rg.RecallAtKLoss, learn_tau=True),
        functools.partial(rg.RecallAtKLoss, tau_end=0.2),
    ],
    ids=["memory", "learned", "scheduled"],
)
def test_late_entries_are_those_that_come_at_once(tmp_path, request, loss, log_every):
    at_once = journal(tmp_path / "at once", loss=loss(), log_every=log_every)
    request.getfixturevalue("late")
    assert journal(tmp_path / "late", loss=loss(), log_every=log_every) == at_once
    steps = [entry["step"] for entry in at_once if entry["kind"] == "step"]
    assert steps == (list(range(1, 11)) if log_every == 1 else [1, 3, 6, 9, 10])


def test_an_entry_is_written_when_its_numbers_are_there_and_not_waited_for(tmp_path, late, monkeypatch):
    written_at = {}
    train_one = train_step.TrainStep.__call__

    def counted(self, step, *args, **options):
        counted.step = step + 1
        return train_one(self, step, *args, **options)

    write = StepLog._write
    monkeypatch.setattr(train_step.TrainStep, "__call__", counted)
    monkeypatch.setattr(StepLog, "_write", lambda self: (written_at.update({self._entry.step: counted.step}), write(self)))
    journal(tmp_path, log_every=2)
    # those of a step that is followed by a checkpoint or ends an epoch are waited for
    assert written_at[4] == 4
    assert written_at[10] == 10
    assert written_at[1] > 1
    assert written_at[6] > 6


class NotFiniteAt(nn.Module):
    """A loss that becomes infinite at one call."""

    def __init__(self, call):
        super().__init__()
        self.loss, self.left = rg.FastAPLoss(), call

    def forward(self, embeddings, labels):
        self.left -= 1
        return self.loss(embeddings, labels) * (math.inf if self.left == 0 else 1.0)


@pytest.mark.parametrize(("bad", "known"), [(3, [1]), (4, [1, 3]), (6, [1, 3])])
def test_a_step_that_is_not_finite_has_no_entry_and_the_ones_before_have_theirs(tmp_path, late, bad, known):
    with pytest.raises(TrainingError, match=f"step {bad}: the loss is"):
        journal(tmp_path, loss=NotFiniteAt(bad))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == known
    assert lines[-1]["reason"] == "error"


class NaNAt(nn.Module):
    """A network whose embeddings become NaN at one pass."""

    def __init__(self, call):
        super().__init__()
        self.body, self.left = network(dropout=0.0), call

    def forward(self, images):
        self.left -= 1
        return self.body(images) * (math.nan if self.left == 0 else 1.0)


@pytest.mark.parametrize("loss", [rg.FastAPLoss, rg.RecallAtKLoss, rg.RamboAPLoss, remembering])
def test_embeddings_that_are_nan_are_reported_and_not_their_diagnostics(tmp_path, late, loss):
    with pytest.raises(TrainingError, match=r"step 3: .* (is|are) (nan|inf|NaN)"):
        journal(tmp_path, model=NaNAt(3), loss=loss())


class FailsAt(nn.Module):
    """A network that raises at one pass."""

    def __init__(self, call, error):
        super().__init__()
        self.body, self.left, self.error = network(), call, error

    def forward(self, images):
        self.left -= 1
        if self.left == 0:
            raise self.error("no more")
        return self.body(images)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_the_last_complete_step_before_an_error_has_its_entry(tmp_path, late, error):
    with pytest.raises(error, match="no more"):
        journal(tmp_path, model=FailsAt(4, error))
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 3]
    assert (lines[-1]["kind"] == "end") == (error is ValueError)


class RefusesLater(rg.RecallAtKLoss):
    """A loss that takes scores once, as of a GPU that runs out of memory later."""

    def from_scores(self, scores, relevance, **options):
        if hasattr(self, "has_taken"):
            raise torch.OutOfMemoryError("no memory")
        self.has_taken = True
        return super().from_scores(scores, relevance, **options)


def test_the_last_complete_step_before_an_error_has_its_entry_also_without_diagnostics(tmp_path, late):
    with pytest.raises(ValueError, match="no more"):
        journal(tmp_path, model=FailsAt(4, ValueError), loss=RefusesLater())
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [(line["step"], "spread" in line) for line in lines if line["kind"] == "step"] == [(1, True), (3, False)]


class RefusesScores(rg.RecallAtKLoss):
    def from_scores(self, scores, relevance, **options):
        raise ValueError("these scores cannot be ranked")


def calls_until_error(rank, loss, bad, scales):
    """The calls of a process until it raises, where every step is logged and step `bad` is not finite."""
    calls, guard = [], NaNGuard(late=True, gradients=True)

    def scale():
        calls.append("scale")
        if scales[len(calls)] == 0:
            raise NotFiniteError("the scale has collapsed")

    step = SimpleNamespace(
        processes=Processes(rank, 2), device=torch.device("cpu"), loss=loss, guard=guard, flush=guard.flush, scale=scale
    )
    log = StepLog(step, lambda *args, **content: None, lambda message: None)
    try:
        for number in range(1, 6):
            indices, images, labels = batch(0, number)
            calls.append(f"step {number}")
            guard.add(number, indices, torch.tensor(math.nan if number == bad else 1.0), torch.tensor(1.0))
            log.write_arrived()
            calls.append(f"entry {number}")
            log.add(number, 1, train_step.StepOutput(torch.tensor(1.0), torch.tensor(1.0), 0.1, 0, images, labels, None))
    except NotFiniteError as error:
        calls.append(error.fact)
    finally:
        log.close()
    return calls


@pytest.mark.parametrize(
    ("loss", "bad", "scales"),
    [
        (rg.RecallAtKLoss, 3, [1] * 99),
        (functools.partial(rg.RecallAtKLoss, learn_tau=True), 3, [1] * 99),
        (RefusesScores, 1, [1] * 99),
        (rg.RecallAtKLoss, None, [1] * 6 + [0] * 99),
    ],
    ids=["beside", "waits", "no diagnostics", "scale"],
)
def test_all_processes_find_an_error_at_the_same_point(late, monkeypatch, loss, bad, scales):
    # what the first process computes beside takes longer than a step
    monkeypatch.setattr(step_log, "spread", lambda rows: time.sleep(0.05) or {})
    first, other = (calls_until_error(rank, loss(), bad, scales) for rank in (0, 1))
    assert first == other
    assert "the" in first[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "loss", [rg.RecallAtKLoss, functools.partial(rg.RecallAtKLoss, learn_tau=True)], ids=["plain", "learned"]
)
def test_entries_on_a_gpu_come_in_order_and_are_those_of_a_run_that_waits(tmp_path, monkeypatch, loss):
    def steps(folder):
        torch.manual_seed(0)
        settings = TrainSettings(epochs=3, lr=1e-2, log_every=2, keep=0)
        fit(network(dropout=0.0), loss(), Vectors(), settings, folder, device="cuda")
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
        return [line for line in lines if line["kind"] == "step"]

    beside = steps(tmp_path / "beside")
    monkeypatch.setattr(StepLog, "_runs_beside", lambda self, loss: False)
    waiting = steps(tmp_path / "waiting")
    assert [entry["step"] for entry in beside] == [1, 2, 4, 6, 8, 10, 12, 14, 15]
    for ours, theirs in zip(beside, waiting, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("loss", "gradient", "batch_mAP", "spread", "effective_rank", "pairs_with_gradient"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_run_on_another_gpu_than_the_current_one_logs_the_numbers_of_the_first(tmp_path):
    def losses(device):
        torch.manual_seed(0)
        fit(
            network(dropout=0.0),
            rg.RecallAtKLoss(),
            Vectors(),
            TrainSettings(epochs=1, log_every=1),
            tmp_path / device,
            device=device,
        )
        lines = [json.loads(line) for line in (tmp_path / device / "journal.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "step"]

    with torch.cuda.device(0):
        assert losses("cuda:1") == pytest.approx(losses("cuda:0"), rel=1e-5)
