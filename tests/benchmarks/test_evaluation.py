"""The benchmark command on a small set, the limits it sets its evaluators, and the memory that an evaluation announces."""

import csv
import time

import pytest
import torch
from benchmarks import evaluation
from benchmarks.measure import in_child
from benchmarks.synthetic import ragged_batch
from eval.memory_probe import announced_and_taken


def test_all_ways_find_the_same_values(monkeypatch):
    monkeypatch.setattr(evaluation, "QUERY_CHUNK", 70)
    embeddings, labels = ragged_batch(220, 16, 6)
    found = {name: evaluator.function(embeddings, labels) for name, evaluator in evaluation.EVALUATORS.items()}
    for values in found.values():
        shared = {metric: found["ours"][metric] for metric in values if metric in found["ours"]}
        assert {"R@1", "mAP"} <= set(shared)
        assert {metric: values[metric] for metric in shared} == pytest.approx(shared, abs=1e-5)


def test_a_run_prints_a_table_and_appends_rows(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    arguments = [
        "--quick",
        "--sizes",
        "200",
        "--dim",
        "8",
        "--seconds",
        "0.01",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--csv",
        str(file),
    ]
    assert evaluation.main([*arguments, "--formulations", "ours; accuracy-calculator"]) == 0
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["formulation"] for row in rows] == ["ours", "accuracy-calculator"]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert float(rows[1]["value_difference"]) < 1e-3
    assert "N = 200; ours announces" in capsys.readouterr().out


def test_an_evaluator_that_disagrees_fails_the_run(monkeypatch, capsys):
    def measured(name, count, settings):
        return evaluation.EvaluationMeasurement(name=name, count=count, values={"mAP": 0.5 if name == "ours" else 0.6})

    monkeypatch.setattr(evaluation, "_measure", measured)
    assert evaluation.main(["--quick", "--device", "cpu"]) == 1
    assert "accuracy-calculator differs from ours by 0.1000" in capsys.readouterr().out


def test_an_evaluator_past_the_time_limit_is_stopped():
    settings = evaluation.EvaluationSettings(8, 4, "cpu", 1, seconds=0.1, limit=0.5, memory_limit=1e10)
    start = time.perf_counter()
    assert evaluation._measure("ours", 200, settings).note == "stopped after 0 s"
    assert time.perf_counter() - start < 5


def test_what_would_not_fit_is_not_tried():
    settings = evaluation.EvaluationSettings(8, 4, "cpu", 1, seconds=0.1, limit=60, memory_limit=1e9)
    assert evaluation._measure("accuracy-calculator", 20_000, settings).note == "skipped: needs about 30.4 GB"
    assert evaluation._measure("torchmetrics, query by query", 20_000, settings).note.startswith("skipped above 5000 items")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--formulations", "faiss"], "choose from ours; accuracy-calculator"),
        (["--sizes", "many"], "whole numbers with commas between wanted, got many"),
        (["--sizes", "5"], "at least two classes of 10"),
        (["--device", "cuda:7"], "sees no GPU here"),
    ],
)
def test_wrong_flags_are_named(arguments, match, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        evaluation.main(arguments)
    assert stopped.value.code == 2
    assert match in capsys.readouterr().err


def test_no_more_memory_is_taken_than_announced():
    # compared one by one, and counted through tables
    limit = 90 * 2**20
    for announced, taken, all_scores in in_child(announced_and_taken, 6000, (8, 300), limit):
        assert taken <= announced <= limit
        assert taken < all_scores / 1.5
