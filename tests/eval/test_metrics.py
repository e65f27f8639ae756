"""Metrics as functions of ranks: fixtures, a table of properties, and agreement with other libraries where these are right."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from eval.listwise_metrics import benchmark_precision, metrics, trapezoid
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.metrics import average_precision_score, ndcg_score
from torchmetrics.functional.retrieval import (
    retrieval_average_precision,
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_precision,
    retrieval_r_precision,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from rankgrad.eval import evaluate
from rankgrad.eval import metrics as ours
from rankgrad.eval.metrics import (
    COLUMN_OF,
    DEFINITIONS,
    GRADED_COLUMN,
    PositiveRanks,
    metric_columns,
    per_query,
    trapezoid_average_precision,
)

KS = (1, 3, 10)


def ranked(hits):
    """Ranks of lists given as 1 and 0 down the list."""
    hits = torch.tensor(hits, dtype=torch.bool).reshape(-1, len(hits) if not isinstance(hits[0], list) else len(hits[0]))
    width = int(hits.sum(dim=1).max())
    ahead = torch.zeros(len(hits), width, dtype=torch.long)
    valid = torch.zeros(len(hits), width, dtype=torch.bool)
    for row, line in enumerate(hits):
        places = line.nonzero().flatten()
        ahead[row, : len(places)] = places - torch.arange(len(places))
        valid[row, : len(places)] = True
    return PositiveRanks.from_counts(ahead.flip(1), valid.flip(1))  # in any order


def test_the_two_average_precisions_of_one_list():
    lists = ranked([1, 0, 1])
    assert trapezoid_average_precision(lists).item() == pytest.approx(0.791667, abs=1e-6)
    assert per_query(lists, KS)["average_precision"].item() == pytest.approx(0.833333, abs=1e-6)


def random_hits(rows=200, length=12, seed=0):
    hits = np.random.default_rng(seed).random((rows, length)) < 0.3
    return [line.tolist() for line in hits if line.any()]


def test_columns_are_their_definitions():
    hits = random_hits()
    columns = per_query(ranked(hits), KS)
    for row, line in enumerate(hits):
        assert {name: values[row].item() for name, values in columns.items()} == pytest.approx(metrics(line, KS))


def test_the_benchmarks_of_oxford_and_paris_are_their_definitions():
    hits = random_hits()
    lists = ranked(hits)
    area = trapezoid_average_precision(lists)
    assert area.tolist() == pytest.approx([trapezoid(line) for line in hits])
    for k in KS:
        values = ours.benchmark_precision(lists, k)
        assert values.tolist() == pytest.approx([benchmark_precision(line, k) for line in hits])


# value on a list whose relevant items come first, value of one relevant item at the end of a list of 100, grows with k
PROPERTIES = {
    "R@k": (1, 0, True),
    "recall@k": (None, 0, True),
    "P@k": (None, 0, False),
    "mAP": (1, 0.01, False),
    "mAP@R": (1, 0, False),
    "RP": (1, 0, False),
    "MRR": (1, 0.01, False),
    "NDCG": (1, 1 / np.log2(101), False),
}


def test_every_metric_has_a_definition_and_its_properties():
    names = {name if name in COLUMN_OF else name.partition("@")[0] + "@k" for name in metric_columns(KS)}
    assert names == set(PROPERTIES)
    assert set(DEFINITIONS) == names | set(GRADED_COLUMN)  # those of graded relevance have their own tests


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties(name):
    perfect, worst, grows = PROPERTIES[name]
    columns = metric_columns(KS)
    chosen = [columns[m] for m in columns if m == name or (name.endswith("@k") and m.startswith(name[:-1]))]
    at_best, at_worst = per_query(ranked([1] * 4 + [0] * 8), KS), per_query(ranked([0] * 99 + [1]), KS)
    mixed = per_query(ranked(random_hits()), KS)
    for column in chosen:
        assert ((mixed[column] >= 0) & (mixed[column] <= 1)).all()
        assert at_worst[column].item() == pytest.approx(worst)
        if perfect is not None:
            assert at_best[column].item() == perfect
    if grows:
        assert all((mixed[a] <= mixed[b]).all() for a, b in pairwise(chosen))


def overlapping(count=300, dim=6, per_class=6, seed=0):
    """Embeddings without ties, in no order, among which relevant items stand anywhere."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) // per_class
    centres = torch.randn(count // per_class, dim, generator=generator)
    embeddings = centres[labels] + 0.8 * torch.randn(count, dim, generator=generator)
    order = torch.randperm(count, generator=generator)
    return embeddings[order], labels[order]


def scored_lists(embeddings, labels):
    unit = torch.nn.functional.normalize(embeddings)
    for query in range(len(labels)):
        others = torch.arange(len(labels)) != query
        yield (unit @ unit[query])[others], (labels == labels[query])[others]


def test_scikit_learn_agrees():
    embeddings, labels = overlapping()
    result = evaluate(embeddings, labels)
    for query, (scores, relevant) in enumerate(scored_lists(embeddings, labels)):
        assert result.per_query["average_precision"][query] == pytest.approx(average_precision_score(relevant, scores))
        assert result.per_query["ndcg"][query] == pytest.approx(ndcg_score(relevant[None].int(), scores[None]))


def test_torchmetrics_agrees_where_scores_are_positive():
    embeddings, labels = overlapping()
    embeddings[:, 0] = 8  # every cosine is above 0
    result = evaluate(embeddings, labels, ks=KS)
    for query, (scores, relevant) in enumerate(scored_lists(embeddings, labels)):
        assert scores.min() > 0
        values = {name: column[query] for name, column in result.per_query.items()}
        theirs = {
            "average_precision": retrieval_average_precision(scores, relevant),
            "reciprocal_rank": retrieval_reciprocal_rank(scores, relevant),
            "r_precision": retrieval_r_precision(scores, relevant),
            "ndcg": retrieval_normalized_dcg(scores, relevant),
            **{f"hit@{k}": retrieval_hit_rate(scores, relevant, top_k=k) for k in KS},
            **{f"recall@{k}": retrieval_recall(scores, relevant, top_k=k) for k in KS},
            **{f"precision@{k}": retrieval_precision(scores, relevant, top_k=k) for k in KS},
        }
        assert {name: values[name] for name in theirs} == pytest.approx({n: float(v) for n, v in theirs.items()}, abs=1e-5)


def test_torchmetrics_drops_relevant_items_at_negative_scores_and_we_do_not():
    scores, relevant = torch.tensor([0.5, -0.1, -0.2]), torch.tensor([False, True, True])
    gallery = torch.stack((scores, (1 - scores**2).sqrt()), dim=1)
    result = evaluate(torch.tensor([[1.0, 0.0]]), [1], gallery, relevant.long(), ks=(1,))
    assert result["mAP"] == pytest.approx(average_precision_score(relevant, scores)) == pytest.approx(7 / 12)
    assert retrieval_average_precision(scores, relevant) == 0


def accuracy_calculator(k):
    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_average_precision", "mean_reciprocal_rank")
    return AccuracyCalculator(include=names, k=k, device=torch.device("cpu"), knn_func=CustomKNN(CosineSimilarity()))


def assert_agrees(result, theirs):
    ours = [result[name] for name in ("P@1", "RP", "mAP@R", "mAP", "MRR")]
    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_average_precision", "mean_reciprocal_rank")
    assert ours == pytest.approx([theirs[name] for name in names], abs=1e-6)


def test_pytorch_metric_learning_agrees():
    embeddings, labels = overlapping()
    theirs = accuracy_calculator(k=len(labels) - 1).get_accuracy(embeddings, labels)
    assert_agrees(evaluate(embeddings, labels), theirs)


def test_pytorch_metric_learning_agrees_on_a_gallery_and_skips_the_same_queries():
    embeddings, labels = overlapping()
    queries, gallery = slice(0, 100), slice(100, 300)
    labels[:3] = 10_000  # in no gallery
    theirs = accuracy_calculator(k=200).get_accuracy(embeddings[queries], labels[queries], embeddings[gallery], labels[gallery])
    result = evaluate(embeddings[queries], labels[queries], embeddings[gallery], labels[gallery])
    assert result.skipped == 3
    assert_agrees(result, theirs)
