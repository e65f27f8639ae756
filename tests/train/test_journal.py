"""The journal, and the progress on a terminal and elsewhere."""

import io
import json
import math
import os
import sys

import pytest
import torch

from rankgrad import _messages
from rankgrad._messages import Progress
from rankgrad.train.errors import TrainingError
from rankgrad.train.journal import Journal, JsonLines, entries, provenance


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_entries_are_stamped_and_plain(tmp_path):
    path = tmp_path / "journal.jsonl"
    notes = Journal([JsonLines(path)])
    notes.log("step", step=3, epoch=1, loss=torch.tensor(0.5), lr=math.inf, ks=(1, 2), root=tmp_path, none=None)
    notes.close()
    (entry,) = written(path)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "kind": "step", "step": 3, "epoch": 1, "loss": 0.5, "lr": "inf", "ks": [1, 2], "root": str(tmp_path), "none": None,
    }  # fmt: skip


def test_a_resumed_journal_tells_one_story(tmp_path):
    path = tmp_path / "journal.jsonl"
    notes = Journal([JsonLines(path)])
    notes.log("start", step=0, epoch=1)
    for step in range(1, 6):
        notes.log("step", step=step, epoch=1)
    notes.log("warning", step=5, epoch=1, message="kept, since it happened")
    notes.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # torn by a crash
    notes = Journal([JsonLines(path, resume_at=3)])
    notes.log("resume", step=3, epoch=1)
    notes.log("step", step=4, epoch=1)
    notes.close()
    story = [(entry["kind"], entry["step"]) for entry in written(path)]
    assert story == [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("warning", 5), ("resume", 3), ("step", 4)]
    assert [entry["step"] for entry in entries(path)] == [step for _, step in story]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a full disk")  # noqa: PTH110
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    lines = JsonLines.__new__(JsonLines)
    lines.path = tmp_path / "journal.jsonl"
    lines._file = lines.path.open("w")
    with pytest.raises(TrainingError, match=r"journal\.jsonl cannot be written: the disk or quota is full"):
        lines.write({"kind": "step"})
    with pytest.raises(TrainingError, match="the disk or quota is full"):
        lines.close()


def test_provenance_names_versions_and_hardware():
    found = provenance(torch.device("cpu"))
    assert {"python", "torch", "numpy", "rankgrad"} <= found["versions"].keys()
    assert found["hardware"]["cpus"] >= 1
    assert found["command"] == sys.argv


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with Progress(4, "training", unit="steps", stream=stream) as bar:
        for _ in range(4):
            bar.advance(note="loss 0.5")
        bar.say("epoch 1")
    assert "4/4" in stream.getvalue()
    assert "loss 0.5" in stream.getvalue()
    assert "epoch 1" in stream.getvalue()


def test_elsewhere_there_are_lines_now_and_then(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(_messages.time, "perf_counter", lambda: next(clock))
    stream = io.StringIO()
    with Progress(100, "training", unit="steps", done=50, stream=stream) as lines:
        for step in range(25):
            lines.advance(note="loss 0.5" if step == 5 else "")
        lines.say("epoch 1")
    assert stream.getvalue().splitlines() == [
        "training: 60 of 100 steps, loss 0.5, 0:40 left",
        "training: 70 of 100 steps, loss 0.5, 0:30 left",
        "epoch 1",
    ]


def test_nothing_is_said_when_nothing_is_wanted():
    for stream in (Terminal(), io.StringIO()):
        with Progress(1, "embedding", unit="batches", shown=False, stream=stream) as silent:
            silent.advance()
            silent.say("a word")
        assert stream.getvalue() == ""
