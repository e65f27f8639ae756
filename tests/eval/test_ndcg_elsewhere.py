"""NDCG@k as other libraries define it: allRank (from its definition), torchmetrics and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score
from torch import Tensor
from torchmetrics.functional.retrieval import retrieval_normalized_dcg

import rankgrad as rg

PADDED = -1  # allRank's mark of what is not an item
KS = (1, 2, 3, 5, 20)


def by_definition(scores: list[float], grades: list[float], k: int) -> float:
    """allRank: gain 2^grade - 1, discount log2(1 + rank), padding left out, 0 where nothing is relevant."""
    items = [(score, grade) for score, grade in zip(scores, grades, strict=True) if grade != PADDED]

    def dcg(ordered: list[float]) -> float:
        return sum((2**grade - 1) / math.log2(2 + place) for place, grade in enumerate(ordered[:k]))

    best = dcg(sorted((grade for _, grade in items), reverse=True))
    return dcg([grade for _, grade in sorted(items, key=lambda item: -item[0])]) / best if best else 0.0


def allrank_ndcg(scores: Tensor, grades: Tensor, ats: tuple[int, ...]) -> Tensor:
    """The function of allRank, [Q, len(ats)], by `evaluate_scores`."""
    gains = 2 ** grades.clamp(min=0) - 1
    found = torch.zeros(len(scores), len(ats), dtype=torch.float64)
    if bool((grades > 0).any()):
        result = rg.evaluate_scores(scores, gains, grades != PADDED, ks=ats)
        found[result.query_index] = torch.stack([torch.from_numpy(result.per_query[f"ndcg@{k}"]) for k in ats], dim=1)
    return found


def exact_ndcg(scores: Tensor, gains: Tensor, k: int | None, candidates: Tensor | None = None) -> Tensor:
    """The objective, [Q], 0 where nothing is relevant."""
    loss = rg.RankLoss(rg.Exact(), rg.NDCG(k), reduction="none")
    value = 1 - loss.from_scores(scores, gains, candidates=candidates)
    some = (gains > 0) if candidates is None else (gains > 0) & candidates
    return value * some.any(dim=1)


@pytest.mark.parametrize(
    ("scores", "grades", "ats", "wanted"),
    [
        ([0.5, 0.2], [1.0, 0.0], (2,), [1.0]),
        ([0.5, 0.2], [0.0, 1.0], (2,), [1 / math.log2(3)]),
        ([0.5, 0.2], [0.0, 0.0], (2,), [0.0]),
        ([0.5, 0.2, 0.1], [1.0, 0.0, 1.0], (1, 2), [1.0, 1 / (1 + 1 / math.log2(3))]),
        ([0.5, 0.2, 1.0], [1.0, 0.0, PADDED], (3,), [1.0]),
        ([0.5, 0.2, 1.0], [0.0, 1.0, PADDED], (3,), [1 / math.log2(3)]),
        ([0.5, 0.2, 1.0], [PADDED] * 3, (3,), [0.0]),
        ([0.5], [2.0], (1, 9), [1.0, 1.0]),
        (
            [0.1, 0.9, 0.5],
            [3.0, 0.0, 1.0],
            (1, 2, 9),
            [0.0, 1 / math.log2(3) / (7 + 1 / math.log2(3)), (1 / math.log2(3) + 7 / 2) / (7 + 1 / math.log2(3))],
        ),
    ],
)
def test_lists_that_allrank_is_tested_with(scores, grades, ats, wanted):
    found = allrank_ndcg(torch.tensor([scores]), torch.tensor([grades]), ats)[0]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    gains = 2 ** torch.tensor([grades]).clamp(min=0) - 1
    for k, value in zip(ats, wanted, strict=True):
        exact = exact_ndcg(torch.tensor([scores]), gains, k, torch.tensor([grades]) != PADDED)
        assert float(exact) == pytest.approx(value, abs=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.integers(-1, 4), min_size=7, max_size=7), min_size=1, max_size=4), st.randoms(use_true_random=False)
)
def test_any_lists_with_padding_are_those_of_the_definition(grades, random):
    scores = [random.sample(range(100), 7) for _ in grades]  # no ties: allRank's order of equal scores is not defined
    found = allrank_ndcg(torch.tensor(scores).double(), torch.tensor(grades), KS)
    wanted = [[by_definition(s, g, k) for k in KS] for s, g in zip(scores, grades, strict=True)]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)
    gains, valid = 2 ** torch.tensor(grades).clamp(min=0) - 1, torch.tensor(grades) != PADDED
    for place, k in enumerate(KS):
        exact = exact_ndcg(torch.tensor(scores).double(), gains, k, valid)
        np.testing.assert_allclose(exact.numpy(), np.array(wanted)[:, place], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 10, None])
def test_torchmetrics_and_scikit_learn_have_the_same_values(k):
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 10, generator=rng, dtype=torch.float64) + 0.1
    grades = torch.randint(0, 4, (6, 10), generator=rng)
    grades[2] = 0
    result = rg.evaluate_scores(scores, grades, ks=(k or 10,))
    found = np.zeros(6)
    found[result.query_index] = result.per_query["ndcg" if k is None else f"ndcg@{k}"]
    theirs = [float(retrieval_normalized_dcg(s, g, top_k=k)) for s, g in zip(scores, grades, strict=True)]
    np.testing.assert_allclose(found, theirs, rtol=1e-6)
    np.testing.assert_allclose(exact_ndcg(scores, grades, k).numpy(), theirs, rtol=1e-6)
    np.testing.assert_allclose(found, [ndcg_score(g[None], s[None], k=k) for s, g in zip(scores, grades, strict=True)])
    assert result.skipped == 1


def test_groups_of_one_and_of_unequal_length():
    sizes = [1, 4, 1, 3]
    rng = torch.Generator().manual_seed(1)
    scores, grades = torch.rand(9, generator=rng), torch.tensor([2, 0, 1, 3, 0, 0, 1, 0, 2])
    lists = list(zip(scores.split(sizes), grades.split(sizes), strict=True))
    wanted = [float(retrieval_normalized_dcg(s, g, top_k=2)) for s, g in lists if g.any()]
    result = rg.evaluate_scores(scores, grades, group_sizes=sizes, ks=(2,))
    np.testing.assert_allclose(result.per_query["ndcg@2"], wanted, rtol=1e-6)
    assert result.query_index.tolist() == [0, 1, 3]
    loss = rg.RankLoss(rg.Exact(), rg.NDCG(2)).from_scores(scores, grades, group_sizes=sizes)
    assert 1 - float(loss) == pytest.approx(np.mean(wanted), abs=1e-6)
