"""What only shows when a batch is cut into tiles, when a query has many relevant items, or when lists are long."""

import oracle
import pytest
import torch
from hypothesis import example, given
from losses.combinations import (
    KINKED_BY_TIES,
    MIXED,
    MIXED_TIED,
    OBJECTIVES,
    PAIRS,
    RANKERS,
    ZERO_IN_MEAN,
    Batch,
    assert_same,
    batches,
    leaf,
    quick,
)

import rankgrad

each_pair = pytest.mark.parametrize(("ranker", "objective"), PAIRS)


def small_tiles(patch: pytest.MonkeyPatch, batch: Batch) -> None:
    """Tiles of 1 to 4 rows, and every other time the path for many relevant items."""
    patch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: 1 + batch.seed % 4)
    patch.setattr("rankgrad.ops.thresholds.FEW_THRESHOLDS", 48 * (batch.seed % 2))


def compare(ours, wanted, ours_in, wanted_in, batch: Batch, pair: tuple[str, str]) -> None:
    if batch.tied and pair in KINKED_BY_TIES:
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
    else:
        assert_same(ours, wanted, ours_in, wanted_in, batch.weights(*wanted.shape))


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED)
@example(batch=MIXED_TIED)
@example(batch=ZERO_IN_MEAN)
def test_embedding_door_in_small_tiles(ranker, objective, batch):
    (mine, theirs), (score, want) = RANKERS[ranker], OBJECTIVES[objective]
    loss = rankgrad.RankLoss(mine, score, reduction=batch.reduction, empty_query=batch.empty_query)
    labels, points = batch.labels(), batch.embeddings(sum(batch.sizes))
    place = torch.randperm(len(labels), generator=batch.rng(2))[: 1 + len(labels) // 2]
    self_index = torch.where(batch.mask(len(place), share=0.7, salt=3), place, -1)
    x, y, ref_x, ref_y = leaf(points), leaf(points), leaf(points), leaf(points)
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch, batch)
        lists = oracle.embedding_lists(y, labels)
        wanted = oracle.rank_loss(lists, theirs, want, batch.reduction, batch.empty_query)
        compare(loss(x, labels), wanted, [x], [y], batch, (ranker, objective))
        lists = oracle.embedding_lists(y[place], labels[place], ref_y, labels, self_index=self_index)
        wanted = oracle.rank_loss(lists, theirs, want, batch.reduction, batch.empty_query)
        ours = loss(x[place], labels[place], ref_x, labels, self_index=self_index)
        compare(ours, wanted, [x, ref_x], [y, ref_y], batch, (ranker, objective))


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED)
@example(batch=MIXED_TIED)
def test_score_door_in_small_tiles(ranker, objective, batch):
    (mine, theirs), (score, want) = RANKERS[ranker], OBJECTIVES[objective]
    loss = rankgrad.RankLoss(mine, score, reduction=batch.reduction, empty_query=batch.empty_query)
    shape = (6, 2 + sum(batch.sizes))
    grades = torch.randint(0, 4, shape, generator=batch.rng(1)) * batch.mask(*shape, share=0.4, salt=2)
    candidates = batch.mask(*shape, share=0.8, salt=3)
    x, y = leaf(batch.scores(*shape)), leaf(batch.scores(*shape))
    lists = oracle.score_lists(y, grades, candidates)
    wanted = oracle.rank_loss(lists, theirs, want, batch.reduction, batch.empty_query)
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch, batch)
        ours = loss.from_scores(x, grades, candidates=candidates)
        compare(ours, wanted, [x], [y], batch, (ranker, objective))


@quick
@given(batch=batches)
@example(batch=MIXED)
def test_query_in_database_in_small_tiles(batch):
    loss = rankgrad.RecallAtKLoss(tau_rank=0.1, normalize=False, query_in_database=True)
    labels, points = batch.labels(), batch.embeddings(sum(batch.sizes))
    x, y = leaf(points), leaf(points)
    lists = oracle.embedding_lists(y, labels, normalize=False, query_in_database=True)
    wanted = oracle.rank_loss(lists, oracle.Sigmoid(0.1), oracle.recall_at_k((1, 2, 4, 8, 16)))
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch, batch)
        assert_same(loss(x, labels), wanted, [x], [y], batch.weights())


@quick
@given(batch=batches)
@example(batch=MIXED)
def test_simix_in_small_tiles(batch):
    labels, points = batch.labels(), batch.embeddings(sum(batch.sizes))
    x, y = leaf(points), leaf(points)
    alphas = torch.rand(len(oracle.same_class_pairs(labels)), generator=batch.rng(5), dtype=torch.float64)
    mixed = oracle.with_virtual(y, labels, alphas)
    lists = oracle.embedding_lists(*mixed, normalize=False)
    wanted = oracle.rank_loss(lists, oracle.Histogram(7), oracle.average_precision)
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch, batch)
        ours = rankgrad.SiMix(rankgrad.FastAPLoss(7), generator=batch.rng(5))(x, labels)
        assert_same(ours, wanted, [x], [y], batch.weights())


@pytest.mark.parametrize("ranker", RANKERS)
def test_more_than_one_tile_and_a_large_class(ranker):
    """540 items in tiles as they are: classes of about two, and one of 60."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.randint(0, 250, (480,), generator=rng), torch.full((60,), 250)])
    labels = labels[torch.randperm(540, generator=rng)]
    points = torch.randn(540, 6, generator=rng, dtype=torch.float64)
    x, y = leaf(points), leaf(points)
    (mine, theirs), (objective, want) = RANKERS[ranker], OBJECTIVES["log_recall"]
    wanted = oracle.rank_loss(oracle.embedding_lists(y, labels), theirs, want)
    ours = rankgrad.RankLoss(mine, objective)(x, labels)
    assert_same(ours, wanted, [x], [y], torch.tensor(1.5, dtype=torch.float64))


@each_pair
def test_reference_backend(ranker, objective):
    (mine, theirs), (score, want) = RANKERS[ranker], OBJECTIVES[objective]
    loss = rankgrad.RankLoss(mine, score, backend="reference")
    for batch in (MIXED, MIXED_TIED):
        labels, points = batch.labels(), batch.embeddings(sum(batch.sizes))
        x, y = leaf(points), leaf(points)
        wanted = oracle.rank_loss(oracle.embedding_lists(y, labels), theirs, want)
        compare(loss(x, labels), wanted, [x], [y], batch, (ranker, objective))
        grades = torch.randint(0, 4, (3, 8), generator=batch.rng(1)) * batch.mask(3, 8, share=0.5, salt=2)
        x, y = leaf(batch.scores(3, 8)), leaf(batch.scores(3, 8))
        wanted = oracle.rank_loss(oracle.score_lists(y, grades), theirs, want)
        compare(loss.from_scores(x, grades), wanted, [x], [y], batch, (ranker, objective))


def test_ranks_are_exact_past_what_float32_counts():
    n = 2**24 + 3  # odd, and so no float32
    relevance = torch.zeros(n, dtype=torch.bool)
    relevance[-1] = True
    last = rankgrad.RankLoss(rankgrad.Exact(), lambda ranks: ranks.rank.amax(dim=1))
    assert int(last.from_scores(torch.zeros(n), relevance)) == n


def test_an_objective_of_ones_own():
    batch = MIXED
    labels, points = batch.labels(), batch.embeddings(sum(batch.sizes))
    x, y = leaf(points), leaf(points)
    wanted = oracle.rank_loss(
        oracle.embedding_lists(y, labels), oracle.Sigmoid(0.2), lambda e: (e.rank.sqrt() * e.positive_rank).mean()
    )
    ours = rankgrad.RankLoss(rankgrad.Sigmoid(0.2), lambda r: r.mean(r.rank.sqrt() * r.positive_rank))(x, labels)
    assert_same(ours, wanted, [x], [y], torch.tensor(1.5, dtype=torch.float64))


def test_margin_noise_is_drawn_anew_and_its_gradient_is_still_a_move():
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 30, generator=rng, dtype=torch.float64, requires_grad=True)
    relevance = torch.rand(6, 30, generator=rng) < 0.2
    loss = rankgrad.RankLoss(rankgrad.Blackbox(4.0, margin=0.5, margin_noise=True), rankgrad.LogRecall())
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = (loss.from_scores(scores, relevance) for _ in range(2))
        torch.manual_seed(3)
        again = loss.from_scores(scores, relevance)
    assert first != second
    assert first == again
    (gradient,) = torch.autograd.grad(first, scores)
    steps = gradient * 4.0 * 30
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
    torch.testing.assert_close(steps.sum(dim=1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-9)
    assert steps.round().any()
