"""Every ranker x objective through every score source equals the oracle in value and gradient to 1e-9."""

import oracle
import pytest
import torch
from hypothesis import example, given
from losses.combinations import (
    KINKED_BY_TIES,
    LONE,
    MIXED,
    MIXED_TIED,
    OBJECTIVES,
    ONE_CLASS,
    PAIRS,
    RANKERS,
    ZERO_IN_MEAN,
    Batch,
    assert_same,
    batches,
    leaf,
    quick,
)
from torch import Tensor

import rankgrad

each_pair = pytest.mark.parametrize(("ranker", "objective"), PAIRS)


def sides(ranker: str, objective: str, batch: Batch, **options):
    """Our loss, and the oracle as a function of lists, with the batch's reduction and empty_query."""
    mine, theirs = RANKERS[ranker], OBJECTIVES[objective]
    loss = rankgrad.RankLoss(mine[0], theirs[0], reduction=batch.reduction, empty_query=batch.empty_query, **options)

    def wanted(lists) -> Tensor:
        return oracle.rank_loss(lists, mine[1], theirs[1], batch.reduction, batch.empty_query)

    return loss, wanted


def compare(ours, wanted, ours_in, wanted_in, batch, ranker, objective) -> None:
    if batch.tied and (ranker, objective) in KINKED_BY_TIES:
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
        return
    upstream = batch.weights(*wanted.shape)
    assert_same(ours, wanted, ours_in, wanted_in, upstream)


@each_pair
@quick
@given(batch=batches)
@example(batch=LONE)
@example(batch=ONE_CLASS)
@example(batch=MIXED)
@example(batch=MIXED_TIED)
@example(batch=ZERO_IN_MEAN)
def test_in_batch(ranker, objective, batch):
    loss, wanted = sides(ranker, objective, batch)
    labels = batch.labels()
    x, y = leaf(batch.embeddings(len(labels))), leaf(batch.embeddings(len(labels)))
    compare(loss(x, labels), wanted(oracle.embedding_lists(y, labels)), [x], [y], batch, ranker, objective)


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED_TIED)
def test_in_batch_without_normalising(ranker, objective, batch):
    loss, wanted = sides(ranker, objective, batch, normalize=False)
    labels = batch.labels()
    points = batch.embeddings(len(labels)) / 4
    x, y = leaf(points), leaf(points)
    lists = oracle.embedding_lists(y, labels, normalize=False)
    compare(loss(x, labels), wanted(lists), [x], [y], batch, ranker, objective)


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED)
@example(batch=MIXED_TIED)
def test_against_a_gallery(ranker, objective, batch):
    loss, wanted = sides(ranker, objective, batch)
    labels, ref_labels = batch.labels()[:4], batch.labels(salt=1)
    x, y = leaf(batch.embeddings(len(labels))), leaf(batch.embeddings(len(labels)))
    ref_x, ref_y = leaf(batch.embeddings(len(ref_labels), 1)), leaf(batch.embeddings(len(ref_labels), 1))
    lists = oracle.embedding_lists(y, labels, ref_y, ref_labels)
    ours = loss(x, labels, ref_x, ref_labels)
    compare(ours, wanted(lists), [x, ref_x], [y, ref_y], batch, ranker, objective)


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED)
@example(batch=ZERO_IN_MEAN)
def test_against_a_gallery_that_holds_some_of_the_queries(ranker, objective, batch):
    loss, wanted = sides(ranker, objective, batch)
    ref_labels = batch.labels()
    n = len(ref_labels)
    place = torch.randperm(n, generator=batch.rng(2))[: max(1, n // 2)]
    self_index = torch.where(batch.mask(len(place), share=0.7, salt=3), place, -1)
    points = batch.embeddings(n)
    x, y, ref_x, ref_y = leaf(points[place]), leaf(points[place]), leaf(points), leaf(points)
    lists = oracle.embedding_lists(y, ref_labels[place], ref_y, ref_labels, self_index=self_index)
    ours = loss(x, ref_labels[place], ref_x, ref_labels, self_index=self_index)
    compare(ours, wanted(lists), [x, ref_x], [y, ref_y], batch, ranker, objective)


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED)
@example(batch=MIXED_TIED)
def test_score_matrix(ranker, objective, batch):
    loss, wanted = sides(ranker, objective, batch)
    n = 1 + sum(batch.sizes)
    relevance = batch.mask(3, n, share=0.3, salt=1)
    x, y = leaf(batch.scores(3, n)), leaf(batch.scores(3, n))
    lists = oracle.score_lists(y, relevance)
    compare(loss.from_scores(x, relevance), wanted(lists), [x], [y], batch, ranker, objective)


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED_TIED)
def test_score_matrix_with_grades_and_a_mask(ranker, objective, batch):
    loss, wanted = sides(ranker, objective, batch)
    n = 2 + sum(batch.sizes)
    grades = torch.randint(0, 4, (3, n), generator=batch.rng(1)) * batch.mask(3, n, share=0.5, salt=2)
    relevance = grades if batch.seed % 2 else grades.double() / 2
    candidates = batch.mask(3, n, share=0.7, salt=3)
    x, y = leaf(batch.scores(3, n)), leaf(batch.scores(3, n))
    lists = oracle.score_lists(y, relevance, candidates)
    ours = loss.from_scores(x, relevance, candidates=candidates)
    compare(ours, wanted(lists), [x], [y], batch, ranker, objective)


@each_pair
@quick
@given(batch=batches)
@example(batch=MIXED_TIED)
def test_score_vector(ranker, objective, batch):
    """One list; `reduction` has nothing to reduce."""
    loss, wanted = sides(ranker, objective, batch)
    n = 3 * sum(batch.sizes)
    relevance = batch.mask(n, share=0.25, salt=1)
    candidates = batch.mask(n, share=0.9, salt=2)
    x, y = leaf(batch.scores(n)), leaf(batch.scores(n))
    want = wanted(oracle.score_lists(y, relevance, candidates)).sum()
    ours = loss.from_scores(x, relevance, candidates=candidates).sum()
    compare(ours, want, [x], [y], batch, ranker, objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ranker", ["sigmoid", "histogram"])
def test_identical_embeddings(ranker, objective):
    """A collapsed model: every score is 1 up to rounding, and no direction is better than another."""
    batch = Batch(sizes=(1, 2, 4), seed=0, tied=True)
    loss, wanted = sides(ranker, objective, batch)
    labels = batch.labels()
    x = leaf(torch.tensor([[0.3, -1.7, 0.9]], dtype=torch.float64).repeat(len(labels), 1))
    ours = loss(x, labels)
    ones = torch.eye(4, dtype=torch.float64)[:1].repeat(len(labels), 1)
    torch.testing.assert_close(ours, wanted(oracle.embedding_lists(ones, labels)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(ours, x)[0], torch.zeros_like(x), rtol=0, atol=1e-9)


def test_soft_weighted_recall_takes_the_slope_to_the_right_at_an_integer():
    # four irrelevant items tied with the relevant one: 4 * sigmoid(0) = 2 of them ahead, exactly
    scores = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    relevance = torch.tensor([True, False, False, False, False])
    loss = rankgrad.RankLoss(rankgrad.Sigmoid(0.5), rankgrad.WeightedRecall([1.0, 2.0, 5.0]))
    value = loss.from_scores(scores, relevance)
    value.backward()
    assert value.item() == pytest.approx(3.0, abs=1e-12)
    slope = 5.0 * 0.25 / 0.5
    torch.testing.assert_close(scores.grad, torch.tensor([-4.0, 1, 1, 1, 1], dtype=torch.float64) * slope)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ranker", ["blackbox", "margin"])
def test_the_blackbox_gradients_compared_above_are_not_all_zero(ranker, objective):
    y = leaf(MIXED.embeddings(sum(MIXED.sizes)))
    lists = oracle.embedding_lists(y, MIXED.labels())
    value = oracle.rank_loss(lists, RANKERS[ranker][1], OBJECTIVES[objective][1])
    assert torch.autograd.grad(value, y)[0].abs().max() > 1e-3


@pytest.mark.parametrize("ranker", RANKERS)
def test_an_empty_query_raises_on_request(ranker):
    loss = rankgrad.RankLoss(RANKERS[ranker][0], rankgrad.AveragePrecision(), empty_query="error")
    x = MIXED.embeddings(sum(MIXED.sizes))
    with pytest.raises(ValueError, match="relevant"):
        loss(x, MIXED.labels())
    loss(x, torch.zeros(len(x), dtype=torch.int64))
