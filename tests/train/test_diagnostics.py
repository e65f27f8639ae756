"""What the journal shows besides the loss, against slow and obvious computations."""

import math

import pytest
import torch
from torch import nn

import rankgrad as rg
from rankgrad.train import diagnostics
from rankgrad.train.diagnostics import CollapseDetector, batch_metrics, diagnose, pairs_with_gradient, skipped_queries, spread


def slow_metrics(embeddings, labels, queries):
    precisions, firsts, perfects = [], [], []
    for q in range(queries):
        scores = (embeddings[q] @ embeddings.t()).tolist()
        others = [i for i in range(len(labels)) if i != q]
        # the irrelevant of two equals comes first
        order = sorted(others, key=lambda i: (-scores[i], labels[i] == labels[q]))
        hits = [bool(labels[i] == labels[q]) for i in order]
        if not any(hits):
            continue
        found = [place + 1 for place, hit in enumerate(hits) if hit]
        precisions.append(sum((n + 1) / place for n, place in enumerate(found)) / len(found))
        firsts.append(hits[0])
        perfects.append(all(hits[: len(found)]))
    return {
        "batch_R@1": sum(firsts) / len(firsts),
        "batch_mAP": sum(precisions) / len(precisions),
        "perfect": sum(perfects) / len(perfects),
    }


@pytest.mark.parametrize("most_queries", [2048, 7])
@pytest.mark.parametrize("ties", [False, True])
def test_batch_metrics_are_exact(monkeypatch, most_queries, ties):
    monkeypatch.setattr(diagnostics, "MOST_QUERIES", most_queries)
    torch.manual_seed(0)
    labels = torch.randint(6, (40,))
    labels[0] = 99  # nothing to find
    # in ties all scores are small integers, exact in any order of sums
    embeddings = torch.randint(-1, 2, (40, 4)).float() if ties else nn.functional.normalize(torch.randn(40, 8), dim=1)
    assert batch_metrics(embeddings, labels) == pytest.approx(slow_metrics(embeddings, labels, min(40, most_queries)))


def test_batches_without_anything_to_find():
    embeddings, labels = torch.randn(5, 3), torch.arange(5)
    numbers = diagnose(embeddings, labels, rg.FastAPLoss())
    assert "batch_R@1" not in numbers
    assert diagnose(embeddings[:1], labels[:1], lambda e, y: e.sum()).keys() == {"skipped"}


def test_spread_and_rank():
    assert spread(torch.eye(8)) == pytest.approx({"spread": 1.0, "effective_rank": 8.0})
    collapsed = spread(torch.ones(50, 4) / 2)
    assert collapsed["spread"] == pytest.approx(0, abs=1e-9)
    assert collapsed["effective_rank"] == pytest.approx(1, abs=1e-3)
    rows = nn.functional.normalize(torch.randn(30, 5, dtype=torch.float64), dim=1)
    cosines = rows @ rows.t()
    values = torch.linalg.svdvals(rows)
    shares = values / values.sum()
    assert spread(rows) == pytest.approx(
        {
            "spread": 1 - float((cosines.sum() - 30) / (30 * 29)),
            "effective_rank": math.exp(-float((shares * shares.log()).sum())),
        }
    )


def test_pairs_with_gradient():
    labels = torch.arange(8) // 2
    apart = nn.functional.normalize(torch.eye(4)[labels] + 0.01 * torch.randn(8, 4), dim=1)
    mixed = nn.functional.normalize(torch.randn(8, 4), dim=1)
    narrow = rg.RankLoss(rg.Sigmoid(0.01), rg.AveragePrecision())
    assert 0 < pairs_with_gradient(mixed, labels, narrow) <= 1
    scores = (mixed @ mixed.t())[~torch.eye(8, dtype=torch.bool)].view(8, 7).requires_grad_()
    relevant = (labels[:, None] == labels)[~torch.eye(8, dtype=torch.bool)].view(8, 7)
    narrow.from_scores(scores, relevant).backward()
    share = (scores.grad.abs() > 1e-3 * scores.grad.abs().max()).float().mean()
    assert pairs_with_gradient(mixed, labels, narrow) == pytest.approx(float(share))
    # an exact ranking with a margin of none has nothing left to teach
    assert pairs_with_gradient(apart, labels, rg.RamboAPLoss(margin=0.0)) == 0
    for wrapped in (rg.SiMix(narrow), rg.EmbeddingMemory(narrow, 2)):
        assert pairs_with_gradient(mixed, labels, wrapped) == pytest.approx(float(share))
    assert pairs_with_gradient(mixed, labels, lambda e, y: e.sum()) is None


def test_skipped_queries():
    labels = torch.tensor([0, 0, 1, 2, 2, 3])
    loss = rg.FastAPLoss()
    loss(torch.randn(6, 4), labels)
    assert skipped_queries(labels, loss) == 2
    simix = rg.SiMix(rg.FastAPLoss())
    simix(torch.randn(6, 4), labels)
    assert skipped_queries(labels, simix) == 2
    assert skipped_queries(labels, lambda e, y: e.sum()) == 2
    memory = rg.EmbeddingMemory(rg.FastAPLoss(), 2)
    memory(torch.randn(6, 4), labels)
    memory(torch.randn(6, 4), labels)
    assert skipped_queries(labels, memory) == 0, "each finds itself of the batch before"


def measured(*spreads, rank=50.0):
    return [{"spread": value, "effective_rank": rank} for value in spreads]


def test_collapse_is_told_once_and_only_where_it_is_one():
    detector = CollapseDetector()
    assert [detector.check(numbers) for numbers in measured(0.6, 0.3, 0.1, 0.05)] == [None] * 4
    (last,) = measured(0.004)
    told = detector.check(last)
    assert "the mean cosine between images is 0.9960, it was 0.4000 at first" in told
    assert "lower --lr" in told
    assert detector.check(last) is None
    # a network that begins with similar embeddings and draws them apart
    detector = CollapseDetector()
    assert [detector.check(numbers) for numbers in measured(0.015, 0.01, 0.02, 0.1)] == [None] * 4
    # embeddings that are close to each other along few directions, as on the way to a point
    detector = CollapseDetector()
    first, near, flat = *measured(0.6, 0.1), *measured(0.1, rank=4.0)
    assert [detector.check(first), detector.check(near)] == [None, None]
    assert "all embeddings fall together" in detector.check(flat)
    # two classes far apart have few directions, too
    detector = CollapseDetector()
    assert [detector.check(numbers) for numbers in (*measured(0.6), *measured(0.5, rank=2.0))] == [None, None]
    assert detector.check({"loss of a detector": 1.0}) is None


def test_a_collapse_names_a_memory_inside_another_loss():
    memory = rg.EmbeddingMemory(rg.FastAPLoss(), 1)
    loss, (first, last) = rg.CalibratedRankLoss(memory, rg.PairCalibration()), measured(0.6, 0.004)
    for past, named in (([], False), ([(torch.eye(4), torch.arange(4))], True)):
        memory.past, detector = past, CollapseDetector()
        assert detector.check(first, loss) is None
        assert ("try --memory 0" in detector.check(last, loss)) == named
