"""The oracle against cases worked out by hand."""

import math

import oracle
import pytest
import torch

# irrelevant 0.9, relevant 0.8, irrelevant 0.5, relevant 0.1: ranks 2 and 4, one and two irrelevant ahead
SCORES = torch.tensor([0.8, 0.9, 0.1, 0.5], dtype=torch.float64)
GAINS = torch.tensor([2.0, 0.0, 1.0, 0.0], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


BY_HAND = {
    "average_precision": (oracle.average_precision, 1 - (1 / 2 + 2 / 4) / 2),
    "recall": (
        oracle.recall_at_k((1, 3)),
        1 - ((sigmoid(-1) + sigmoid(-3)) / 1 + (sigmoid(1) + sigmoid(-1)) / 2) / 2,
    ),
    "precision": (oracle.precision_at_k(3, tau=0.5), 1 - (sigmoid(2) + sigmoid(-2)) / 3),
    "weighted": (oracle.weighted_recall([0.5, 0.25, 9.0]), (0.5 + 0.75) / 2),
    "log": (oracle.log_recall, (math.log(2) + math.log(3)) / 2),
    "loglog": (oracle.loglog_recall, (math.log(1 + math.log(2)) + math.log(1 + math.log(3))) / 2),
    "ndcg": (oracle.ndcg, 1 - (2 / math.log2(3) + 1 / math.log2(5)) / (2 / math.log2(2) + 1 / math.log2(3))),
    "reciprocal": (oracle.reciprocal_rank, 1 / 2),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("ranker", [oracle.Exact(), oracle.Blackbox(1.0), oracle.Sigmoid(1e-3)], ids=repr)
def test_objectives(name, ranker):
    objective, wanted = BY_HAND[name]
    assert objective(ranker.entries(SCORES, GAINS)).item() == pytest.approx(wanted, abs=1e-12)


def test_sigmoid_ranks_leave_the_own_term_out():
    entries = oracle.Sigmoid(0.2).entries(SCORES, GAINS)
    wanted = [1 + sigmoid(0.5) + sigmoid(-3.5) + sigmoid(-1.5), 1 + sigmoid(3.5) + sigmoid(4) + sigmoid(2)]
    assert entries.rank.tolist() == pytest.approx(wanted, abs=1e-12)
    assert entries.positive_rank.tolist() == pytest.approx([1 + sigmoid(-3.5), 1 + sigmoid(3.5)], abs=1e-12)


def test_ties_count_against_an_item_and_blackbox_orders_them():
    scores, gains = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    exact = oracle.Exact().entries(scores, gains)
    assert (exact.rank.tolist(), exact.positive_rank.tolist()) == ([3, 4], [1, 2])
    assert oracle.Blackbox(1.0).ranking(scores, gains).tolist() == [3, 1, 4, 2]
    # a margin of 0.25 turns a lead of 0.25 into a tie, which the irrelevant item wins
    lead = torch.tensor([0.25, 0.0], dtype=torch.float64)
    assert oracle.Blackbox(1.0, margin=0.25).ranking(lead, gains[:2]).tolist() == [2, 1]
    assert oracle.Blackbox(1.0, margin=0.125).ranking(lead, gains[:2]).tolist() == [1, 2]


def test_histogram_splits_an_item_between_two_centres():
    # four bins on [-1, 1]: centres 1, 0.5, 0, -0.5, -1; 0.8 is 0.4 bins below the first, 0.9 is 0.2
    entries = oracle.Histogram(4).entries(SCORES, GAINS)
    assert entries.mass.tolist() == pytest.approx([0.6, 0.4 + 0.2, 0.8, 0, 0])
    assert entries.positive_rank.tolist() == pytest.approx([0.6, 1.2, 2, 2, 2])
    assert entries.rank.tolist() == pytest.approx([1.4, 3.2, 4, 4, 4])
    assert entries.gain.tolist() == pytest.approx([1.2, 0.8 + 0.2, 0.8, 0, 0])


def test_histogram_is_flat_outside_its_range():
    scores = torch.tensor([1.5, 1.0, -1.0, -7.0, 0.3], dtype=torch.float64, requires_grad=True)
    pulses = oracle.Histogram(3).pulses(scores)
    assert pulses.detach().sum(dim=1).tolist() == pytest.approx([1] * 5)
    (pulses * torch.arange(1, 5)).sum().backward()
    assert scores.grad.tolist() == pytest.approx([0, 0, 0, 0, -1.5])


def test_blackbox_gradient_by_hand():
    # AP of one relevant item at rank 2 of 3: dL/drank = 1/4, so y' = 0.5 + 3*lam/4
    gains = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for lam, moved in ((0.2, 0), (0.6, 1)):  # 0.65 stays below 0.9, 0.95 does not
        scores = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
        oracle.rank_loss([(scores, gains)], oracle.Blackbox(lam), oracle.average_precision).backward()
        assert scores.grad.tolist() == pytest.approx([moved / (lam * 3), -moved / (lam * 3), 0])


def test_blackbox_perturbation_sees_the_mean_and_not_the_scale():
    gains = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    scores = torch.tensor([[0.9, 0.5, 0.1]] * 2, dtype=torch.float64, requires_grad=True)
    lists = [(row, gains) for row in scores]
    # half of dL/drank reaches the item above only with twice the lambda, in the mean and in single losses
    for lam, moved in ((0.6, 0), (1.2, 1)):
        ranker = oracle.Blackbox(lam)
        mean = oracle.rank_loss(lists, ranker, oracle.average_precision)
        each = oracle.rank_loss(lists, ranker, oracle.average_precision, reduction="none")
        (of_mean,) = torch.autograd.grad(1000 * mean, scores, retain_graph=True)
        assert of_mean[1].tolist() == pytest.approx([moved * 1000 / (3 * lam), -moved * 1000 / (3 * lam), 0])
        (weighted,) = torch.autograd.grad(each @ torch.tensor([1.0, 1000.0], dtype=torch.float64), scores, retain_graph=True)
        assert weighted[1].tolist() == pytest.approx([moved * 2000 / (3 * lam), -moved * 2000 / (3 * lam), 0])


def test_empty_lists_skip_zero_error_none():
    lists = [(SCORES, GAINS), (SCORES, 0 * GAINS)]
    for reduction, empty_query, wanted in (
        ("mean", "skip", 0.5), ("mean", "zero", 0.25), ("none", "skip", [0.5, 0.0]),
    ):  # fmt: skip
        loss = oracle.rank_loss(lists, oracle.Exact(), oracle.average_precision, reduction, empty_query)
        assert loss.tolist() == wanted
    with pytest.raises(ValueError, match="relevant"):
        oracle.rank_loss(lists, oracle.Exact(), oracle.average_precision, empty_query="error")


def test_the_query_leaves_its_own_list_or_stays_as_irrelevant():
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([5, 5, 9])
    out = oracle.embedding_lists(x, labels)
    assert [g.tolist() for _, g in out] == [[1, 0], [1, 0], [0, 0]]
    assert out[1][0].tolist() == pytest.approx([0.6, 0.8])
    kept = oracle.embedding_lists(x, labels, query_in_database=True)
    assert [g.tolist() for _, g in kept] == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_virtual_examples_of_classes_of_one_two_and_three():
    labels = torch.tensor([4, 7, 4, 9, 7, 4])
    assert oracle.same_class_pairs(labels) == [(0, 2), (0, 5), (2, 5), (1, 4)]
    x = torch.eye(6, dtype=torch.float64) * 3
    alphas = torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    mixed, mixed_labels = oracle.with_virtual(x, labels, alphas)
    assert mixed_labels.tolist() == [4, 7, 4, 9, 7, 4, 4, 4, 4, 7]
    assert mixed[6].tolist() == [0.25, 0, 0.75, 0, 0, 0]
