"""The benchmark of errors among many candidates, on few."""

import csv

import pytest

pytest.importorskip("triton")
from benchmarks import errors_at_size


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_grids_and_pairs_are_both_measured_against_float64(tmp_path):
    file = tmp_path / "errors.csv"
    small = [
        "--candidates",
        "40",
        "--losses",
        "smooth_ap",
        "--queries",
        "2",
        "--relevant",
        "9",
        "--dim",
        "8",
        "--device",
        "cpu",
    ]
    assert errors_at_size.main([*small, "--csv", str(file)]) == 0
    rows = {(row["precision"], row["way"]): row for row in csv.DictReader(file.read_text().splitlines())}
    assert set(rows) == {("float32", "torch"), *((p, w) for p in ("high", "fast") for w in ("each pair", "grid"))}
    assert all(0 < float(row["gradient of queries"]) < 0.1 for row in rows.values())
    assert float(rows["high", "grid"]["gradient of queries"]) < 1e-4
    assert rows["fast", "grid"]["gradient of queries"] != rows["fast", "each pair"]["gradient of queries"]


def test_more_relevant_items_than_candidates_are_refused():
    with pytest.raises(ValueError, match="need more than 10 candidates"):
        errors_at_size.main(["--candidates", "10", "--queries", "2", "--relevant", "9", "--device", "cpu"])
