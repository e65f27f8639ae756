"""The comparison of learning to rank: its lists, its LambdaRank, that it runs, and that the page holds its results."""

import math

import pytest
import torch
from benchmarks import learning_to_rank as ltr


def test_lists_are_the_same_every_time_and_have_all_grades():
    first, again = (ltr.make_lists("steps", "train", 20) for _ in range(2))
    assert torch.equal(first.features, again.features)
    assert set(first.grades.tolist()) == {0, 1, 2, 3, 4}
    assert min(first.sizes) >= 10
    assert sum(first.sizes) == len(first.features)
    assert not torch.equal(ltr.make_lists("steps", "test", 20).features[:10], first.features[:10])


def test_lambdarank_by_its_definition():
    scores = torch.tensor([0.3, -0.2, 0.9, 0.1, 0.4], dtype=torch.float64, requires_grad=True)
    gains, sizes, sigma = torch.tensor([3.0, 0.0, 1.0, 0.0, 7.0], dtype=torch.float64), [3, 2], 2.0
    value = ltr.lambdarank(sigma)(scores, ltr.Lists(torch.zeros(5, 1), gains, sizes))
    total = 0.0
    for s, g in zip(scores.detach().split(sizes), gains.split(sizes), strict=True):
        rank = s.argsort(descending=True).argsort() + 1
        best = sorted(g.tolist(), reverse=True)
        ideal = sum(gain / math.log2(place + 1) for place, gain in enumerate(best, start=1))
        for i in range(len(s)):
            for j in range(len(s)):
                if g[i] > g[j]:
                    change = abs((g[i] - g[j]) * (1 / math.log2(rank[i] + 1) - 1 / math.log2(rank[j] + 1))) / ideal
                    total += float(change) * math.log1p(math.exp(-sigma * float(s[i] - s[j]))) / len(sizes)
    assert value.item() == pytest.approx(total, rel=1e-12)
    value.backward()
    assert scores.grad[0] < 0 < scores.grad[1]


def test_methods_are_compared_on_lists_they_have_not_seen(monkeypatch):
    pytest.importorskip("lightgbm")
    monkeypatch.setattr(ltr, "settings_of", lambda method, all_of=ltr.settings_of: all_of(method)[-1:])
    monkeypatch.setattr(ltr, "SEEDS", (0, 1))
    methods = [ltr.LIGHTGBM, ltr.LAMBDARANK, "UpperBound x NDCG"]
    rows = ltr.compare("smooth", methods, {"train": 60, "validation": 30, "test": 40}, epochs=2)
    assert [row["seed"] for row in rows] == ["0", "1", "mean"] * 3
    assert all(0.3 < float(row[ltr.METRIC]) < 1 for row in rows)
    means = {row["method"]: row for row in rows if row["seed"] == "mean"}
    assert float(means[ltr.LAMBDARANK]["difference"]) == 0
    assert float(means[ltr.LIGHTGBM][ltr.METRIC]) - float(means[ltr.LAMBDARANK][ltr.METRIC]) == pytest.approx(
        float(means[ltr.LIGHTGBM]["difference"]), abs=2e-4
    )


def test_the_page_holds_the_results():
    text = ltr.PAGE.read_text(encoding="utf-8")
    assert text.partition(ltr.BEGIN)[2].partition(ltr.END)[0].strip() == ltr.page_table(ltr.RESULTS)
