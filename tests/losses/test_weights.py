"""Weights of queries, and losses of single queries that compose to the mean."""

import oracle
import pytest
import torch
from hypothesis import given
from losses.combinations import MIXED, OBJECTIVES, RANKERS, Batch, assert_same, batches, leaf, quick

import rankgrad

each_ranker = pytest.mark.parametrize("ranker", RANKERS)


def weights_of(batch: Batch, n: int) -> torch.Tensor:
    """Some are 0."""
    return torch.rand(n, generator=batch.rng(7), dtype=torch.float64) * batch.mask(n, share=0.8, salt=8)


@each_ranker
@quick
@given(batch=batches)
def test_weights_in_the_mean(ranker, batch):
    mine, theirs = RANKERS[ranker]
    options = {"reduction": batch.reduction, "empty_query": batch.empty_query}
    loss, labels = rankgrad.RankLoss(mine, rankgrad.LogRecall(), **options), batch.labels()
    weights = weights_of(batch, len(labels))
    x, y = leaf(batch.embeddings(len(labels))), leaf(batch.embeddings(len(labels)))
    lists = oracle.embedding_lists(y, labels)
    wanted = oracle.rank_loss(lists, theirs, oracle.log_recall, batch.reduction, batch.empty_query, weights.tolist())
    assert_same(loss(x, labels, weights=weights), wanted, [x], [y], batch.weights(*wanted.shape))


@each_ranker
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("tile", [512, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_single_losses_and_their_weights_make_the_mean(ranker, backend, tile, weighted, monkeypatch):
    monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: tile)
    labels = MIXED.labels()
    weights = weights_of(MIXED, len(labels)) if weighted else None
    results = []
    for reduction in ("mean", "none"):
        loss = rankgrad.RankLoss(RANKERS[ranker][0], rankgrad.AveragePrecision(), reduction=reduction, backend=backend)
        x = leaf(MIXED.embeddings(len(labels)))
        value = loss(x, labels, weights=weights)
        value = (value * loss.query_weights).sum() if reduction == "none" else value
        results.append((value.detach(), torch.autograd.grad(3 * value, x)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_weights_of_lists_of_scores(objective):
    scores, relevance = torch.randn(4, 9, generator=MIXED.rng(), dtype=torch.float64), MIXED.mask(4, 9, share=0.4, salt=1)
    weights = torch.tensor([0.0, 2.0, 1.0, 0.5])
    mine, theirs = OBJECTIVES[objective]
    x, y = leaf(scores), leaf(scores)
    wanted = oracle.rank_loss(oracle.score_lists(y, relevance), oracle.Blackbox(2.0), theirs, weights=weights.tolist())
    ours = rankgrad.RankLoss(rankgrad.Blackbox(2.0), mine).from_scores(x, relevance, weights=weights)
    assert_same(ours, wanted, [x], [y], torch.tensor(1.5).double())


@pytest.mark.parametrize("ranker", ["sigmoid", "blackbox"])
def test_shards_of_a_weighted_batch_sum_up_to_its_loss(ranker):
    labels = MIXED.labels()
    loss, weights = rankgrad.RankLoss(RANKERS[ranker][0], rankgrad.AveragePrecision()), weights_of(MIXED, len(labels))
    x = leaf(MIXED.embeddings(len(labels)))
    whole = torch.autograd.grad(loss(x, labels, weights=weights), x)[0]
    parts = [loss.shard_loss(x, labels, rows, weights=weights) for rows in (slice(0, 4), slice(4, len(labels)))]
    torch.testing.assert_close(sum(parts), loss(x, labels, weights=weights))
    torch.testing.assert_close(torch.autograd.grad(sum(parts), x)[0], whole)


@pytest.mark.parametrize("ranker", ["sigmoid", "histogram", "upper_bound"])
def test_a_virtual_example_has_the_mixed_weight_of_its_pair(ranker):
    mine, theirs = RANKERS[ranker]
    labels = MIXED.labels()
    weights, x, y = weights_of(MIXED, len(labels)), leaf(MIXED.embeddings(len(labels))), leaf(MIXED.embeddings(len(labels)))
    generator = torch.Generator().manual_seed(3)
    pairs = oracle.same_class_pairs(labels)
    alphas = torch.rand(len(pairs), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mixed = [float(a * weights[i] + (1 - a) * weights[j]) for a, (i, j) in zip(alphas, pairs, strict=True)]
    points, all_labels = oracle.with_virtual(y, labels, alphas)
    lists = oracle.embedding_lists(points, all_labels, normalize=False)
    wanted = oracle.rank_loss(lists, theirs, oracle.average_precision, weights=[*weights.tolist(), *mixed])
    loss = rankgrad.SiMix(rankgrad.RankLoss(mine, rankgrad.AveragePrecision()), generator)
    assert_same(loss(x, labels, weights=weights), wanted, [x], [y], torch.tensor(1.5).double())


def test_weights_that_are_all_zero_give_an_attached_zero():
    x = leaf(MIXED.embeddings(len(MIXED.labels())))
    value = rankgrad.RamboAPLoss()(x, MIXED.labels(), weights=torch.zeros(len(x)))
    assert value == 0
    assert not torch.autograd.grad(value, x)[0].any()


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.ones(3), ValueError, r"weights must be one per query, shape \(11,\), got shape \(3,\)"),
        (torch.ones(11, dtype=torch.long), TypeError, "weights must be a floating-point tensor"),
        ([1.0] * 11, TypeError, "weights must be a torch.Tensor, got list"),
        (-torch.ones(11), ValueError, "weights must be at least 0, got -1"),
        (torch.full((11,), torch.nan), ValueError, "weights must be finite, got 11 NaN"),
    ],
)
def test_wrong_weights_are_refused(weights, error, message):
    labels = MIXED.labels()
    with pytest.raises(error, match=message):
        rankgrad.SmoothAPLoss(validate=True)(MIXED.embeddings(len(labels)), labels, weights=weights)
