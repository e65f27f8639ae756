import csv

import torch
from benchmarks.million_items import Sampled, main

SMALL = ["--items", "256", "--dim", "16", "--size", "16", "--chunk-size", "64", "--sample", "4", "--device", "cpu"]


def test_a_small_batch_goes_through_and_its_gradient_is_checked(capsys, tmp_path):
    assert main([*SMALL, "--csv", str(tmp_path / "rows.csv")]) == 0
    assert "256 items, high" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["precision"] for row in rows] == ["high", "fast"]
    assert 0 < float(rows[0]["gradient_error"]) < 1e-2
    assert rows[1]["gradient_error"] == ""


def test_a_wrong_gradient_is_noticed(monkeypatch):
    monkeypatch.setattr(
        "benchmarks.million_items.ranked",
        lambda loss, embeddings, labels, sample: Sampled(torch.tensor(0.5), torch.zeros_like(embeddings)),
    )
    assert main(SMALL) == 1
