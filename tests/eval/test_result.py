"""What a `Result` says of the numbers it holds, and what it writes."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from eval.listwise_metrics import exact_batch

from rankgrad.eval import evaluate, revisited
from rankgrad.eval.result import bootstrap_intervals


@pytest.fixture
def result():
    embeddings, labels = exact_batch(80, classes=8)
    return evaluate(embeddings, labels, ks=(1, 5), categories=labels.div(3, rounding_mode="floor"), neighbours=4)


def test_it_reads_as_a_mapping_of_means(result):
    assert list(result)[:4] == ["R@1", "R@5", "mAP", "mAP@R"]
    assert len(result) == len(dict(result)) == len(list(result))
    for metric, column in result.columns.items():
        assert result[metric] == pytest.approx(result.per_query[column].mean())
    with pytest.raises(KeyError, match="'R@7' was not computed under all-vs-all: there are R@1, R@5"):
        result["R@7"]
    assert "R@1: " in repr(result)


def test_means_of_classes_and_categories(result):
    labels, precision = result.labels, result.per_query["average_precision"]
    by_class = result.by_class()
    assert set(by_class) == set(labels.tolist())
    for label, means in by_class.items():
        assert means["mAP"] == pytest.approx(precision[labels == label].mean())
        assert means["queries"] == (labels == label).sum()
    names = ("zero", "one")
    by_category = result.by_category(names)
    assert set(by_category) == {"unlabelled", "zero", "one"}
    assert by_category["one"]["mAP"] == pytest.approx(precision[result.categories == 1].mean())
    assert set(result.by_category()) == {"unlabelled", "0", "1"}


def test_what_needs_classes_or_categories_says_so():
    embeddings, labels = exact_batch(20)
    with pytest.raises(ValueError, match="no categories were given to the evaluation; pass categories="):
        evaluate(embeddings, labels).by_category()
    listed = revisited(embeddings[:2], embeddings[2:], [[0], [1]], [[2], [3]], [[], []])
    with pytest.raises(ValueError, match="the queries of roxford have no classes"):
        listed.by_class()
    with pytest.raises(ValueError, match="the queries of roxford have no classes"):
        listed.intervals(by="class")


def test_a_table_begins_with_the_protocol(result):
    lines = result.table(intervals=True).splitlines()
    assert lines[0] == f"all-vs-all: {result.coverage}"
    low, high = result.intervals()["mAP"]
    assert f"  mAP       {result['mAP']:.4f}  [{low:.4f}, {high:.4f}] at 95%" in lines


def test_intervals_hold_the_mean_narrow_with_queries_and_follow_their_seed(result):
    bounds = result.intervals(samples=300)
    assert set(bounds) == set(result) >= {"R@1", "mAP", "mAP@R", "RP", "MRR", "NDCG", "recall@5", "P@5"}
    assert all(low <= result[metric] <= high for metric, (low, high) in bounds.items())
    assert bounds == result.intervals(samples=300) != result.intervals(samples=300, seed=1)
    wide, narrow = (result.intervals(level, samples=300)["mAP"] for level in (0.99, 0.5))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        drawn = (rng.random((120, 1)) < 0.3).astype(float)
        low, high = bootstrap_intervals(drawn, np.arange(120), level=0.9, samples=200, seed=trial)[0]
        covered += low <= 0.3 <= high
    assert 0.82 < covered / 200 < 0.97  # 0.9, three standard deviations on both sides and some for 120 queries


def test_resampling_by_class_is_wider_where_a_class_succeeds_together():
    values = np.repeat(np.random.default_rng(0).random(40) < 0.5, 25)[:, None].astype(float)
    single = bootstrap_intervals(values, np.arange(1000), level=0.9, samples=300, seed=0)[0]
    whole = bootstrap_intervals(values, np.arange(1000) // 25, level=0.9, samples=300, seed=0)[0]
    # 25 copies of each value are worth one: 5 times the width
    assert (whole[1] - whole[0]) / (single[1] - single[0]) == pytest.approx(5, rel=0.25)


def test_missing_values_leave_the_resampled_mean():
    values = np.array([[1.0], [np.nan], [1.0], [np.nan]])
    assert bootstrap_intervals(values, np.arange(4), level=0.9, samples=50, seed=0).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"level": 1.0}, ValueError, "level must be above 0 and below 1, got 1.0"),
        ({"samples": 0}, ValueError, "samples must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"by": "item"}, ValueError, "by must be one of 'query', 'class'"),
    ],
)
def test_intervals_refuse(result, options, error, match):
    with pytest.raises(error, match=match):
        result.intervals(**options)


def test_files_hold_what_the_result_says(result, tmp_path):
    folder = tmp_path / "eval" / "test"
    result.save(folder, split="test", category_names=("zero", "one"), extra={"root": "images"})
    report = json.loads((folder / "result.json").read_text())
    assert (report["split"], report["protocol"], report["root"]) == ("test", "all-vs-all", "images")
    assert report["metrics"] == dict(result)
    assert {name: tuple(bounds) for name, bounds in report["intervals"].items()} == result.intervals()
    assert report["per_category"]["one"]["R@1"] == result.by_category(("zero", "one"))["one"]["R@1"]
    with np.load(folder / "queries.npz", allow_pickle=False) as queries:
        assert {"index", "label", "category", "first_rank", "average_precision", "r_precision"} <= set(queries.files)
        np.testing.assert_array_equal(queries["index"], result.query_index)
        assert queries["neighbours"].shape == queries["scores"].shape == (len(result.query_index), 4)
    result.save(folder)
    assert json.loads((folder / "result.json").read_text())["split"] == ""
    assert sorted(path.name for path in folder.iterdir()) == ["queries.npz", "result.json"]


def test_files_have_the_permissions_that_the_umask_leaves(result, tmp_path):
    before = os.umask(0o077)
    try:
        result.save(tmp_path / "eval", samples=5)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "eval").iterdir()} == {0o600}


def test_what_a_killed_process_left_is_removed_by_the_next_save(result, tmp_path):
    code = (
        "import os, sys, numpy as np, pathlib, rankgrad as rg\n"
        "np.savez = lambda *given, **named: os.kill(os.getpid(), 9)\n"
        "rg.evaluate(np.random.rand(8, 2), [0] * 8).save(pathlib.Path(sys.argv[1]), samples=5)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    result.save(tmp_path, samples=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["queries.npz", "result.json"]


def test_a_failed_write_leaves_the_former_file(result, tmp_path, monkeypatch):
    result.save(tmp_path, split="good")

    def full(*arguments, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        result.save(tmp_path, split="bad")
    assert json.loads((tmp_path / "result.json").read_text())["split"] == "good"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["queries.npz", "result.json"]


def test_the_mean_of_nothing_is_null_in_the_file(tmp_path):
    listed = revisited(torch.randn(1, 2), torch.randn(3, 2), [[0]], [[]], [[]])
    assert math.isnan(listed["mAP[hard]"])
    listed.save(tmp_path, samples=5)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"]["mAP[hard]"] is None


def test_intervals_are_bootstrapped_once(result, tmp_path, monkeypatch):
    from rankgrad.eval import result as module

    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        return bootstrap_intervals(*arguments, **options)

    monkeypatch.setattr(module, "bootstrap_intervals", counted)
    again = replace(result)
    first = again.intervals()
    again.save(tmp_path)
    first.clear()
    assert again.intervals()
    assert len(calls) == 1
    again.intervals(by="class")
    assert len(calls) == 2
