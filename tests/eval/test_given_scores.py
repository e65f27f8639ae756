"""`evaluate_scores` against `evaluate` and against the definitions."""

import math

import numpy as np
import pytest
import torch
from eval.listwise_metrics import exact_batch, metrics, ranking

import rankgrad as rg

KS = (1, 3, 10)


def same_class(labels):
    relevance = labels[:, None] == labels
    others = ~torch.eye(len(labels), dtype=torch.bool)
    return relevance & others, others


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_scores_of_embeddings_give_what_the_embeddings_give(dtype, monkeypatch):
    monkeypatch.setattr("rankgrad.eval.given_scores.SORTED_NUMBERS", 500)  # several blocks
    embeddings, labels = exact_batch(60)
    relevance, others = same_class(labels)
    direct = rg.evaluate(embeddings, labels, ks=KS, normalize=False)
    found = rg.evaluate_scores((embeddings @ embeddings.T).to(dtype), relevance, others, ks=KS, labels=labels)
    assert set(direct) <= set(found)
    for name, values in direct.per_query.items():
        np.testing.assert_allclose(found.per_query[name], values, rtol=1e-12, err_msg=name)
    np.testing.assert_array_equal(found.query_index, direct.query_index)
    assert found.skipped == direct.skipped
    assert found.by_class().keys() == direct.by_class().keys()
    assert found.intervals(samples=20).keys() == set(found)


def test_every_column_is_the_definition():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (30, 12), generator=generator).float()
    relevance = torch.rand(30, 12, generator=generator) < 0.3
    candidates = torch.rand(30, 12, generator=generator) < 0.8
    result = rg.evaluate_scores(scores, relevance, candidates, ks=KS)
    row = 0
    for query in range(30):
        relevant = {i for i in range(12) if relevance[query, i] and candidates[query, i]}
        removed = {i for i in range(12) if not candidates[query, i]}
        expected = metrics(ranking(scores[query].tolist(), relevant, removed), KS)
        if expected is None:
            continue
        assert result.query_index[row] == query
        for name, value in expected.items():
            assert result.per_query[name][row] == pytest.approx(value), name
        row += 1
    assert row == len(result.query_index) == 30 - result.skipped


def graded(scores, gains, k):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], gains[i]))[:k]
    best = sorted(gains, reverse=True)[:k]
    dcg, ideal = (sum(g / math.log2(2 + i) for i, g in enumerate(gs)) for gs in ([gains[i] for i in order], best))
    return dcg / ideal


def test_gains_are_those_of_ndcg():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 4, (20, 9), generator=generator).double()
    gains = torch.randint(0, 4, (20, 9), generator=generator).double()
    result = rg.evaluate_scores(scores.numpy(), gains.numpy(), ks=KS)
    for row, query in enumerate(result.query_index):
        given = scores[query].tolist(), gains[query].tolist()
        assert result.per_query["ndcg"][row] == pytest.approx(graded(*given, 9))
        for k in KS:
            assert result.per_query[f"ndcg@{k}"][row] == pytest.approx(graded(*given, k))
    assert {"NDCG@1", "NDCG@3", "NDCG@10", "MRR", "mAP"} <= set(result)


def test_graded_relevance_has_the_hierarchical_average_precision_of_evaluate():
    embeddings, _ = exact_batch(40)
    levels = torch.randint(0, 3, (40, 2), generator=torch.Generator().manual_seed(3))
    same = (levels[:, None] == levels).cumprod(dim=2).sum(dim=2) / 2
    direct = rg.evaluate(embeddings, relevance=rg.Levels(levels), ks=KS, normalize=False)
    others = ~torch.eye(40, dtype=torch.bool)
    found = rg.evaluate_scores(embeddings @ embeddings.T, same, others, ks=KS)
    assert found["H-AP"] == pytest.approx(direct["H-AP"])
    assert found["NDCG"] == pytest.approx(direct["NDCG"])
    assert "H-AP" not in rg.evaluate_scores(embeddings @ embeddings.T, same > 0, others, ks=KS)


def test_groups_after_each_other_and_padded_lists_are_the_same(monkeypatch):
    monkeypatch.setattr("rankgrad.eval.given_scores.SORTED_NUMBERS", 20)
    generator = torch.Generator().manual_seed(2)
    sizes = [3, 7, 1, 5]
    scores, gains = torch.rand(16, generator=generator), torch.randint(0, 3, (16,), generator=generator)
    padded_scores, padded_gains = torch.full((4, 7), torch.nan), torch.full((4, 7), -1)  # padding as allRank has it
    for query, (some, more) in enumerate(zip(scores.split(sizes), gains.split(sizes), strict=True)):
        padded_scores[query, : len(some)], padded_gains[query, : len(more)] = some, more
    flat = rg.evaluate_scores(scores, gains, group_sizes=sizes, ks=KS, neighbours=1)
    padded = rg.evaluate_scores(padded_scores, padded_gains, padded_gains >= 0, ks=KS)
    assert dict(flat) == pytest.approx(dict(padded))
    np.testing.assert_array_equal(flat.query_index, padded.query_index)
    best = [int(some.argmax()) for some in scores.split(sizes)]
    assert flat.neighbours[0][:, 0].tolist() == [best[query] for query in flat.query_index]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scores": torch.ones(2, 3).long()}, TypeError, "scores must be floating-point numbers, got torch.int64"),
        ({"scores": torch.ones(3)}, ValueError, r"scores must be \[queries, candidates\] .* got shape \(3,\)"),
        ({"scores": torch.full((2, 3), torch.nan)}, ValueError, "scores of candidates must be finite, got 6 NaN"),
        ({"relevance": torch.ones(2, 2)}, ValueError, r"relevance must have the shape of scores, \(2, 3\), got shape \(2, 2\)"),
        ({"relevance": torch.zeros(2, 3)}, ValueError, "no query has a relevant candidate"),
        ({"relevance": torch.tensor([[1, 0, 0], [0, -1, 1]])}, ValueError, r"gains of at least 0, got -1.0 at \[1, 1\]; mark"),
        ({"candidates": torch.ones(2, 3)}, TypeError, "candidates must be bool, got torch.float32"),
        ({"group_sizes": [2, 1]}, ValueError, r"scores must be \[items\] with group_sizes"),
        ({"labels": [1]}, ValueError, "labels must be one per row"),
        ({"ks": (0,)}, ValueError, "every k of ks must be at least 1"),
    ],
)
def test_what_is_refused(change, error, match):
    given = {"scores": torch.rand(2, 3), "relevance": torch.eye(2, 3)} | change
    with pytest.raises(error, match=match):
        rg.evaluate_scores(given.pop("scores"), given.pop("relevance"), **given)


@pytest.mark.parametrize("sizes", [[2, 2], [5, -1], [4, 0], []])
def test_groups_must_add_up(sizes):
    with pytest.raises(ValueError, match="group_sizes must"):
        rg.evaluate_scores(torch.rand(5), torch.ones(5), group_sizes=sizes)
