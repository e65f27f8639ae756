"""The scaling benchmark: real processes once, its arithmetic with given times."""

import csv

import pytest
from benchmarks import distributed


def test_processes_are_measured_and_find_the_loss_of_one():
    settings = distributed.DistributedSettings(items=48, dim=8, per_class=4, side=8, chunk_size=10, seconds=0.0)
    measurements = distributed._measured(settings, 2)
    assert [(one["what"], one["processes"]) for one in measurements] == [("loss alone", 2), ("whole step", 2)]
    assert all(one["seconds"] > 0 and one["repetitions"] >= 3 for one in measurements)
    alone = [make(settings, 0, 1)() for make in (distributed._loss_alone, distributed._whole_step)]
    assert [one["loss"] for one in measurements] == pytest.approx(alone, abs=distributed.TOLERANCE)
    assert all(0.05 < loss < 0.999 for loss in alone), "saturated losses would agree by accident"


def test_efficiency_is_speed_up_over_the_cores_that_can_help(monkeypatch, capsys, tmp_path):
    times, losses = {1: 8.0, 2: 5.0, 4: 4.0}, {1: 0.5, 2: 0.5, 4: 0.5}

    def measured(settings, processes):
        spread = {"seconds_20": 1.0, "seconds_80": 1.0, "repetitions": 3}
        return [
            {"what": "loss alone", "processes": processes, "seconds": times[processes], **spread, "loss": losses[processes]}
        ]

    monkeypatch.setattr(distributed, "_measured", measured)
    monkeypatch.setattr(distributed.os, "cpu_count", lambda: 2)
    file = tmp_path / "rows.csv"
    assert distributed.main(["--csv", str(file)]) == 0
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["speed_up"]) for row in rows] == [1, 1.6, 2]
    assert [float(row["efficiency"]) for row in rows] == [1, 0.8, 1]
    losses[4] = 0.6
    assert distributed.main([]) == 1
    assert "loss alone: 4 processes find a loss of 0.600000, 1 another" in capsys.readouterr().out


def test_no_processes_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        distributed.main(["--processes", "0,2"])
    assert "--processes must be numbers of at least 1, got 0,2" in capsys.readouterr().err
