import csv
import os
import signal

import pytest
from benchmarks.rate_cases import all_cases
from benchmarks.training_rates import _MEASURES, main

from rankgrad.train.loop import _Training


def test_every_row_comes_after_the_limit_it_is_compared_with():
    seen = set()
    for case in all_cases():
        if case.stage == "bare":
            seen.add((case.model, case.batch))
        if case.stage in {"step", "train", "metric-learning"}:
            assert (case.model, case.images_in_pass) in seen


def _rows(path, only):
    status = main(["--device", "cpu", "--smallest", "--only", only, "--csv", str(path)])
    with path.open() as file:
        return status, list(csv.DictReader(file))


def test_the_smallest_rows_run_and_are_written_as_they_come(tmp_path):
    status, rows = _rows(tmp_path / "a.csv", "^(decode|augment|bare|step).* (0|16) ")
    assert status == 0
    assert [row["stage"] for row in rows] == ["decode", "augment", "bare", "step", "step", "step"]
    assert all(int(row["images_per_second"]) > 0 for row in rows)
    assert rows[2]["of_bare"] == "1.000"


def test_a_row_that_fails_has_a_note_and_the_others_are_measured(tmp_path, monkeypatch):
    def fail(case, machine):
        raise RuntimeError("no room\nfor details")

    monkeypatch.setitem(_MEASURES, "step", fail)
    status, rows = _rows(tmp_path / "a.csv", "^(step|bare).* 16 whole")
    assert status == 1
    assert [(row["stage"], row["note"]) for row in rows] == [("bare", ""), ("step", "RuntimeError: no room")]
    assert rows[1]["images_per_second"] == ""


def test_a_pattern_that_matches_nothing_names_the_rows(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "decode resnet50 224" in capsys.readouterr().err


def test_a_signal_ends_the_benchmark_and_is_no_failure_of_training(monkeypatch):
    train_one = _Training._train_step

    def stopped(self, *batch):
        train_one(self, *batch)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(_Training, "_train_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        main(["--device", "cpu", "--smallest", "--only", "train.* 8 whole"])
