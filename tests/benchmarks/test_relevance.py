"""The benchmark of kinds of relevance on a small batch."""

import csv

import torch
from benchmarks import relevance


def test_rows_are_printed_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(relevance, "in_child", lambda function, *arguments: function(*arguments))
    before = torch.get_num_threads()
    file = tmp_path / "relevance.csv"
    assert relevance.main(["--items", "64", "--dim", "4", "--device", "cpu", "--seconds", "0.01", "--csv", str(file)]) == 0
    torch.set_num_threads(before)
    assert "both ways, two calls" in capsys.readouterr().out
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["relevance"] for row in rows] == ["labels", "pairs", "levels", "both ways", "both ways, two calls"]
    assert all(float(row["milliseconds"]) > 0 for row in rows)
