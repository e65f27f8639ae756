"""One rule for ties: `Exact`, `Blackbox` and `evaluate` rank equal scores in the same way."""

import pytest
import torch

import rankgrad

OBJECTIVES = {
    "average_precision": rankgrad.AveragePrecision(),
    "reciprocal_rank": rankgrad.ReciprocalRank(),
    "ndcg": rankgrad.NDCG(),
}


def tied_embeddings(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Few distinct directions, whose cosines are exact."""
    rng = torch.Generator().manual_seed(seed)
    corners = torch.randint(0, 2, (14, 4), generator=rng).double() * 2 - 1
    return corners, torch.randint(0, 4, (14,), generator=rng)


@pytest.mark.parametrize("ranker", [rankgrad.Exact(), rankgrad.Blackbox(1.0)], ids=repr)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_losses_and_evaluation_rank_ties_alike(ranker, backend):
    for seed in range(8):
        embeddings, labels = tied_embeddings(seed)
        found = rankgrad.evaluate(embeddings, labels).per_query
        used = (labels[:, None] == labels).sum(dim=1) > 1
        for name, objective in OBJECTIVES.items():
            loss = rankgrad.RankLoss(ranker, objective, reduction="none", backend=backend)
            losses = loss(embeddings, labels)
            wanted = torch.tensor([1 - v for v in found[name]], dtype=torch.float64)
            torch.testing.assert_close(losses[used], wanted, rtol=1e-6, atol=1e-6)


def test_six_equal_embeddings_of_two_classes():
    embeddings, labels = torch.ones(6, 2), torch.tensor([0, 0, 0, 1, 1, 1])
    # three irrelevant candidates first, then the relevant ones at 4 and 5
    assert rankgrad.evaluate(embeddings, labels)["mAP"] == pytest.approx((1 / 4 + 2 / 5) / 2)
    value = 1 - rankgrad.RankLoss(rankgrad.Exact(), rankgrad.AveragePrecision())(embeddings, labels)
    assert float(value) == pytest.approx((1 / 4 + 2 / 5) / 2)
