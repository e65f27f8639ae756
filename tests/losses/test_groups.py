"""Lists of unequal length: one after another with their sizes (LightGBM), or padded (allRank)."""

import oracle
import pytest
import torch
from losses.combinations import RANKERS, assert_same, leaf

import rankgrad as rg

SIZES = [3, 1, 7, 4]
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(15, generator=GENERATOR, dtype=torch.float64)
GRADES = torch.randint(0, 3, (15,), generator=GENERATOR)
CANDIDATES = torch.rand(15, generator=GENERATOR) < 0.8


@pytest.mark.parametrize("ranker", RANKERS)
@pytest.mark.parametrize("candidates", [None, CANDIDATES], ids=["all", "some"])
def test_groups_are_separate_lists(ranker, candidates):
    mine, theirs = RANKERS[ranker]
    x, y, weights = leaf(SCORES), leaf(SCORES), torch.tensor([1.0, 2.0, 0.5, 3.0])
    keep = torch.ones(15, dtype=torch.bool) if candidates is None else candidates
    parts = zip(y.split(SIZES), GRADES.split(SIZES), keep.split(SIZES), strict=True)
    lists = [(scores[mask], grades[mask].double()) for scores, grades, mask in parts]
    wanted = oracle.rank_loss(lists, theirs, oracle.ndcg, weights=weights.tolist())
    ours = rg.RankLoss(mine, rg.NDCG()).from_scores(x, GRADES, candidates=candidates, group_sizes=SIZES, weights=weights)
    assert_same(ours, wanted, [x], [y], torch.tensor(1.5).double())


def test_one_loss_per_group_in_their_order():
    loss = rg.RankLoss(rg.Sigmoid(0.1), rg.NDCG(), reduction="none")
    found = loss.from_scores(SCORES, GRADES, group_sizes=torch.tensor(SIZES))
    alone = [loss.from_scores(s, g) for s, g in zip(SCORES.split(SIZES), GRADES.split(SIZES), strict=True)]
    torch.testing.assert_close(found, torch.cat(alone))


def test_padding_of_minus_one_is_masked_as_documented():
    padded = torch.full((4, 7), -1)
    scores = torch.full((4, 7), 9.0, dtype=torch.float64)
    for row, (s, g) in enumerate(zip(SCORES.split(SIZES), GRADES.split(SIZES), strict=True)):
        scores[row, : len(s)], padded[row, : len(g)] = s, g
    loss = rg.ApproxNDCGLoss(validate=True)
    found = loss.from_scores(scores, padded, candidates=padded >= 0)
    torch.testing.assert_close(found, loss.from_scores(SCORES, GRADES, group_sizes=SIZES))
    with pytest.raises(ValueError, match=r"relevance must be at least 0, got -1; if that marks padding, pass candidates="):
        loss.from_scores(scores, padded)


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (SCORES, {"group_sizes": [3, 1, 7]}, "group_sizes must add up to the number of scores, 15, got a sum of 11"),
        (SCORES, {"group_sizes": [16, -1]}, "group_sizes must be positive integers, got -1 at 1"),
        (SCORES, {"group_sizes": [7.5, 7.5]}, "group_sizes must be positive integers"),
        (SCORES, {"group_sizes": []}, "group_sizes must be positive integers, one per query"),
        (SCORES.view(3, 5), {"group_sizes": SIZES}, r"with group_sizes scores must be \[items\], got shape \(3, 5\)"),
        (SCORES, {"group_sizes": SIZES, "weights": torch.ones(15)}, r"weights must be one per query, shape \(4,\)"),
    ],
)
def test_bad_groups(scores, options, message):
    with pytest.raises(ValueError, match=f"ApproxNDCGLoss.from_scores: {message}"):
        rg.ApproxNDCGLoss().from_scores(scores, torch.ones_like(scores), **options)
