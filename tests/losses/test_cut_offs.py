"""Objectives with a cut-off, under exact ranks, are the metrics of the same name."""

import pytest
import torch
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_r_precision

import rankgrad


def scored_lists(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(5, 30, generator=rng) + 0.1
    return scores, torch.rand(5, 30, generator=rng) < 0.2


def metric(objective, scores, relevance) -> torch.Tensor:
    return 1 - rankgrad.RankLoss(rankgrad.Exact(), objective, reduction="none").from_scores(scores, relevance)


@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_ndcg_at_k_is_that_of_torchmetrics(k):
    for seed in range(3):
        scores, relevance = scored_lists(seed)
        grades = relevance * torch.randint(1, 4, scores.shape, generator=torch.Generator().manual_seed(seed))
        found = metric(rankgrad.NDCG(k), scores, grades)
        wanted = [retrieval_normalized_dcg(s, g, top_k=min(k, 30)) for s, g in zip(scores, grades, strict=True)]
        torch.testing.assert_close(found, torch.stack(wanted).to(found.dtype), rtol=1e-5, atol=1e-6)


def test_r_precision_and_map_at_r_are_those_of_evaluate():
    rng = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(40, 6, generator=rng), torch.arange(40) // 5
    result = rankgrad.evaluate(embeddings, labels)
    for objective, name in (
        (rankgrad.RPrecision(tau=0), "r_precision"),
        (rankgrad.AveragePrecisionAtR(), "average_precision_at_r"),
    ):
        value = 1 - rankgrad.RankLoss(rankgrad.Exact(), objective)(embeddings, labels)
        assert float(value) == pytest.approx(float(result.per_query[name].mean()), abs=1e-6)
    scores, relevance = scored_lists(1)
    wanted = [retrieval_r_precision(s, r) for s, r in zip(scores, relevance, strict=True)]
    torch.testing.assert_close(metric(rankgrad.RPrecision(tau=0), scores, relevance), torch.stack(wanted))


def test_average_precision_at_k_by_hand():
    # relevant at 1, 3 and 4
    scores, relevance = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]), torch.tensor([True, False, True, True, False])
    for k, wanted in ((1, 1.0), (2, 1 / 2), (3, (1 + 2 / 3) / 3), (4, (1 + 2 / 3 + 3 / 4) / 3), (9, (1 + 2 / 3 + 3 / 4) / 3)):
        assert float(metric(rankgrad.AveragePrecision(k), scores, relevance)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rankgrad.AveragePrecision(0), "AveragePrecision: k must be at least 1"),
        (lambda: rankgrad.NDCG(2.5), "NDCG: k must be an integer"),
        (lambda: rankgrad.NDCG(2, tau=-1.0), "NDCG: tau must be a finite number of at least 0"),
        (lambda: rankgrad.RPrecision(-1.0), "RPrecision: tau must be"),
    ],
)
def test_wrong_cut_offs_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
