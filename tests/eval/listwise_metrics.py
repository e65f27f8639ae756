"""Metrics of a ranked list by their definitions, walking down the list one place at a time, in plain Python."""

import math

import torch


def exact_batch(count, dim=3, most=2, classes=6, seed=0, lowest_label=-3):
    """Whole-numbered embeddings: scores are exact in float32 and tie all the time. Some classes have a single item."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randint(-most, most + 1, (count, dim), generator=generator).float()
    return embeddings, torch.randint(lowest_label, lowest_label + classes, (count,), generator=generator)


def ranking(scores, relevant, removed=()):
    """True and False down the list: by descending score, irrelevant ones first among equals, removed ones left out."""
    kept = [item for item in range(len(scores)) if item not in removed]
    order = sorted(kept, key=lambda item: (-scores[item], item in relevant))
    return [item in relevant for item in order]


def list_of(query, embeddings, labels, ref_emb=None, ref_labels=None, own=None):
    """The ranked list of one query, in float64."""
    if ref_emb is None:
        ref_emb, ref_labels, own = embeddings, labels, query
    scores = (ref_emb.double() @ embeddings[query].double()).tolist()
    relevant = {item for item in range(len(scores)) if ref_labels[item] == labels[query] and item != own}
    return ranking(scores, relevant, {own})


def metrics(hits, ks):
    """What every column of a query should hold; None where nothing is relevant."""
    relevant = sum(hits)
    if not relevant:
        return None
    found, precisions, gained, first = 0, [], 0.0, None
    for place, hit in enumerate(hits, start=1):
        if hit:
            found += 1
            first = first or place
            precisions.append((place, found / place))
            gained += 1 / math.log2(1 + place)
    best = sum(1 / math.log2(1 + place) for place in range(1, relevant + 1))
    values = {
        "num_relevant": relevant,
        "first_rank": first,
        "average_precision": sum(p for _, p in precisions) / relevant,
        "average_precision_at_r": sum(p for place, p in precisions if place <= relevant) / relevant,
        "r_precision": sum(hits[:relevant]) / relevant,
        "reciprocal_rank": 1 / first,
        "ndcg": gained / best,
    }
    for k in ks:
        values[f"hit@{k}"] = float(any(hits[:k]))
        values[f"recall@{k}"] = sum(hits[:k]) / relevant
        values[f"precision@{k}"] = sum(hits[:k]) / k
    return values


def trapezoid(hits):
    """Area under the precision-recall curve: after every place a point, from (0, 1) on."""
    relevant, area, recall, precision, found = sum(hits), 0.0, 0.0, 1.0, 0
    for place, hit in enumerate(hits, start=1):
        found += hit
        area += (found / relevant - recall) * (precision + found / place) / 2
        recall, precision = found / relevant, found / place
    return area


def benchmark_precision(hits, k):
    last = max(place for place, hit in enumerate(hits, start=1) if hit)
    return sum(hits[: min(k, last)]) / min(k, last)


def assert_columns(result, wanted):
    """`wanted` holds for every query what `metrics` gave."""
    asked = [query for query, values in enumerate(wanted) if values is not None]
    assert result.query_index.tolist() == asked
    assert result.skipped == len(wanted) - len(asked)
    for name in wanted[asked[0]]:
        values = torch.tensor([wanted[query][name] for query in asked], dtype=torch.float64)
        torch.testing.assert_close(torch.from_numpy(result.per_query[name]).double(), values, rtol=1e-12, atol=1e-12, msg=name)
