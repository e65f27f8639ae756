"""Evaluation where relevance is a list of pairs or has levels, against the definitions on dense lists."""

import math

import numpy as np
import pytest
import torch

import rankgrad as rg

RNG = torch.Generator().manual_seed(0)
X, REFS = torch.randn(40, 6, generator=RNG), torch.randn(55, 6, generator=RNG)
REFS[7:10] = REFS[3]  # ties
LABELS = torch.stack([torch.randint(0, n, (95,), generator=RNG) for n in (3, 2, 2)], dim=1)
GAINS = (0.25, 0.5, 1.0)


def by_definition(scores, gains):
    """Metrics of one list; of equal scores the smaller gain comes first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], gains[i]))
    ordered = [gains[i] for i in order]
    positives = [(rank, gain) for rank, gain in enumerate(ordered, start=1) if gain > 0]
    dcg = sum(gain / math.log2(1 + rank) for rank, gain in positives)
    best = sum(gain / math.log2(1 + rank) for rank, gain in enumerate(sorted(gains, reverse=True), start=1))
    hierarchical = sum(
        (sum(min(gain, other) for before, other in positives if before <= rank)) / rank for rank, gain in positives
    ) / sum(gains)
    precision = np.mean([place / rank for place, (rank, _) in enumerate(positives, start=1)])
    return {"NDCG": dcg / best, "H-AP": hierarchical, "mAP": precision, "R@1": float(ordered[0] > 0)}


def expected(queries, candidates, matrix, itself=None):
    scores = (
        torch.nn.functional.normalize(queries.double(), dim=1) @ torch.nn.functional.normalize(candidates.double(), dim=1).t()
    )
    rows = []
    for q in range(len(queries)):
        keep = [c for c in range(len(candidates)) if itself is None or itself[q] != c]
        gains = [float(matrix[q, c]) for c in keep]
        if max(gains) > 0:
            rows.append(by_definition([round(float(scores[q, c]), 9) for c in keep], gains))
    return {name: np.mean([row[name] for row in rows]) for name in rows[0]}, len(queries) - len(rows)


def level_matrix(a, b):
    agree = (a[:, None] == b).cumprod(dim=2).sum(dim=2)
    return torch.tensor([0.0, *GAINS])[agree]


def check(result, wanted, skipped, names=("NDCG", "H-AP", "mAP", "R@1")):
    assert result.skipped == skipped
    for name in names:
        assert result[name] == pytest.approx(wanted[name], abs=1e-9), name


@pytest.mark.parametrize("gallery", [True, False])
@pytest.mark.parametrize("kind", ["pairs", "levels"])
def test_graded_relevance(kind, gallery):
    labels, refs = LABELS[:40], LABELS[40:] if gallery else LABELS[:40]
    matrix = level_matrix(labels, refs)
    itself = None if gallery else list(range(40))
    given = rg.Levels(labels, refs if gallery else None, gains=GAINS)
    if kind == "pairs":
        matrix = matrix * (torch.rand(matrix.shape, generator=RNG) < 0.2)
        matrix[:3] = 0
        if not gallery:
            matrix.fill_diagonal_(0)
        query, item = matrix.nonzero(as_tuple=True)
        given = rg.Pairs(query, item, matrix[query, item])
    result = rg.evaluate(X, ref_emb=REFS if gallery else None, relevance=given, ks=(1, 5), neighbours=2)
    check(result, *expected(X, REFS if gallery else X, matrix, itself))
    assert result.labels is None
    assert result.neighbours[0].shape == (len(result.query_index), 2)


def test_pairs_of_a_class_are_its_labels():
    labels = LABELS[:40, 0] * 2 + LABELS[:40, 1]
    same = (labels[:, None] == labels).fill_diagonal_(False)
    by_pairs = rg.evaluate(X, relevance=rg.Pairs(*same.nonzero(as_tuple=True)), ks=(1, 5))
    by_labels = rg.evaluate(X, labels, ks=(1, 5))
    assert dict(by_pairs) == pytest.approx(dict(by_labels))
    assert "H-AP" not in dict(by_pairs)


def test_the_query_in_the_gallery_is_left_out():
    gallery, self_index = torch.cat((X[:20], REFS)), torch.cat((torch.arange(20), torch.full((20,), -1)))
    pairs = rg.Pairs(torch.arange(40), torch.arange(40) + 30, torch.ones(40) * 2)
    matrix = torch.zeros(40, 75)
    matrix[pairs.query, pairs.item] = 2.0
    result = rg.evaluate(X, ref_emb=gallery, relevance=pairs, self_index=self_index, ks=(1,))
    check(result, *expected(X, gallery, matrix, self_index.tolist()))


def test_scores_take_pairs_too():
    scores, grades = torch.randn(6, 9, generator=RNG), torch.randint(0, 3, (6, 9), generator=RNG)
    query, item = grades.nonzero(as_tuple=True)
    pairs = rg.Pairs(query, item, grades[query, item])
    assert dict(rg.evaluate_scores(scores, pairs)) == dict(rg.evaluate_scores(scores, grades))
    with pytest.raises(TypeError, match="with group_sizes relevance must be one number per score, got Pairs"):
        rg.evaluate_scores(scores.reshape(-1), pairs, group_sizes=[9] * 6)


def test_bad_input_is_explained():
    pairs = rg.Pairs(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(TypeError, match="evaluate: give either labels or relevance, got both"):
        rg.evaluate(X, LABELS[:40, 0], relevance=pairs)
    with pytest.raises(ValueError, match=r"evaluate: relevance: item must be a row of the 40 candidates, 0 to 39, got 77"):
        rg.evaluate(X, relevance=rg.Pairs(torch.tensor([0]), torch.tensor([77])))
    with pytest.raises(ValueError, match="no query has a relevant candidate"):
        rg.evaluate(X, relevance=rg.Pairs(pairs.query, pairs.item, torch.zeros(1)))
    with pytest.raises(TypeError, match="relevance must be Pairs or Levels, got Tensor"):
        rg.evaluate(X, relevance=LABELS[:40])
    with pytest.raises(ValueError, match="categories would have no effect"):
        rg.evaluate(X, relevance=pairs, categories=LABELS[:40, 0])
