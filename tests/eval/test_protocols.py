"""The protocols with a rule of their own: VehicleID's random galleries, ROxford's lists, tables of rows."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from eval.listwise_metrics import benchmark_precision, exact_batch, list_of, metrics, ranking, trapezoid

from rankgrad.data.readers.roxford import read_ground_truth
from rankgrad.eval import PROTOCOLS, describe_protocols, evaluate, evaluate_table, revisited

KS = (1, 5)


def test_every_protocol_says_its_rule():
    text = describe_protocols()
    for name, protocol in PROTOCOLS.items():
        assert protocol.name == name
        assert len(protocol.rule) > 100
        assert f"{name}\n    " in text
    assert "mAP@R" in text


def vehicles(seed=0):
    embeddings, _ = exact_batch(60, dim=4, seed=seed)
    sizes = np.random.default_rng(seed).integers(1, 7, size=30)
    return embeddings, torch.from_numpy(np.repeat(np.arange(30) * 7 - 50, sizes)[:60])


def test_vehicleid_repeats_are_evaluations_of_one_image_per_id_against_all_others():
    embeddings, labels = vehicles()
    result = evaluate(embeddings, labels, protocol="vehicleid-official", ks=KS, repeats=4, seed=3, normalize=False)
    ids, everyone = set(labels.tolist()), set(range(60))
    galleries, means = [], []
    for trial in range(4):
        asked = result.query_index[result.per_query["trial"] == trial]
        gallery = sorted(everyone - set(asked.tolist()))
        galleries.append(tuple(gallery))
        assert sorted(labels[gallery].tolist()) == sorted(ids)
        lists = [list_of(q, embeddings, labels, embeddings[gallery], labels[gallery]) for q in asked]
        values = [metrics(hits, KS) for hits in lists]
        means.append([np.mean([v[name] for v in values]) for name in ("hit@1", "hit@5", "average_precision")])
    assert len(set(galleries)) == 4
    names = ("R@1", "R@5", "mAP")
    assert [result[name] for name in names] == pytest.approx(np.mean(means, axis=0))
    assert [result.deviations[name] for name in names] == pytest.approx(np.std(means, axis=0, ddof=1))
    assert "between repeats" in result.table()


def test_vehicleid_draws_every_image_about_as_often():
    embeddings, labels = torch.randn(12, 4), torch.arange(12) // 4
    result = evaluate(embeddings, labels, protocol="vehicleid-official", repeats=300)
    shown = 300 - np.bincount(result.query_index, minlength=12)
    assert shown.sum() == 300 * 3
    assert abs(shown / 300 - 1 / 4).max() < 0.1  # four standard deviations


def test_vehicleid_is_ten_repeats_and_a_function_of_its_seed():
    embeddings, labels = vehicles()
    first, again, other = (evaluate(embeddings, labels, protocol="vehicleid-official", seed=seed) for seed in (0, 0, 1))
    assert set(first.per_query["trial"]) == set(range(10))
    assert dict(first) == dict(again) != dict(other)
    assert evaluate(embeddings, labels, protocol=PROTOCOLS["vehicleid-official"], repeats=1).deviations == {}
    told = []
    evaluate(embeddings, labels, protocol="vehicleid-official", progress=lambda *step: told.append(step))
    assert told[-1][0] == told[-1][1]


def landmarks(queries=9, database=80, seed=0):
    """Whole-numbered embeddings and lists; query 0 has no easy image, query 1 no hard one, query 2 neither."""
    rng = np.random.default_rng(seed)
    embeddings = [torch.from_numpy(rng.integers(-2, 3, size=(count, 3))).float() for count in (queries, database)]
    lists = {"easy": [], "hard": [], "junk": []}
    for query in range(queries):
        order, sizes = rng.permutation(database), rng.integers(1, 9, size=3)
        sizes[:2] *= {0: (0, 1), 1: (1, 0), 2: (0, 0)}.get(query, (1, 1))
        for name, items in zip(lists, np.split(order, np.cumsum(sizes))[:3], strict=True):
            lists[name].append(items)
    return *embeddings, lists


def slow_revisited(queries, database, lists, ks):
    """From the text of the benchmark: for each setting what is right, what is removed, then the list place by place."""
    wanted = {}
    for setting, right, gone in (
        ("easy", ("easy",), ("junk", "hard")),
        ("medium", ("easy", "hard"), ("junk",)),
        ("hard", ("hard",), ("junk", "easy")),
    ):
        values = []
        for query, embedding in enumerate(queries):
            relevant, removed = ({int(i) for name in names for i in lists[name][query]} for names in (right, gone))
            hits = ranking((database @ embedding).tolist(), relevant, removed)
            if any(hits):
                values.append([trapezoid(hits), *(benchmark_precision(hits, k) for k in ks)])
        for name, mean in zip(("mAP", *(f"mP@{k}" for k in ks)), np.mean(values, axis=0), strict=True):
            wanted[f"{name}[{setting}]"] = mean
    return wanted


@pytest.mark.parametrize("seed", range(3))
def test_revisited_is_the_definition(seed):
    queries, database, lists = landmarks(seed=seed)
    result = revisited(queries, database, **lists, ks=(1, 5, 10), normalize=False)
    assert dict(result) == pytest.approx(slow_revisited(queries, database, lists, (1, 5, 10)))
    assert result.skipped == 1
    assert [result.queries(f"mAP[{setting}]") for setting in ("easy", "medium", "hard")] == [7, 8, 7]
    assert "of 7 queries" in result.table()


def test_a_result_travels_between_processes():
    queries, database, lists = landmarks()
    told = []
    result = revisited(queries, database, **lists, neighbours=2, progress=lambda *step: told.append(step))
    assert told[-1][0] == told[-1][1]
    again = pickle.loads(pickle.dumps(result))
    assert dict(again) == dict(result)
    assert again.protocol == result.protocol


def test_one_setting_alone_has_the_same_values():
    queries, database, lists = landmarks()
    everything = revisited(queries, database, **lists)
    for setting in ("easy", "medium", "hard"):
        alone = revisited(queries, database, **lists, protocol=f"roxford-{setting}")
        assert alone.protocol.name == f"roxford-{setting}"
        assert dict(alone) == {name: value for name, value in everything.items() if name.endswith(f"[{setting}]")}


def test_distractors_on_disk_lengthen_the_list(tmp_path, monkeypatch):
    monkeypatch.setattr("rankgrad.eval.embedding_blocks.BLOCK_NUMBERS", 3 * 512)
    queries, database, lists = landmarks()
    numbers = np.random.default_rng(5).integers(-2, 3, size=(1500, 3))
    on_disk = np.memmap(tmp_path / "distractors", dtype=np.float16, mode="w+", shape=numbers.shape)
    on_disk[:] = numbers
    result = revisited(queries, database, **lists, distractors=on_disk, ks=KS, normalize=False)
    longer = torch.cat((database, torch.from_numpy(numbers).float()))
    assert dict(result) == pytest.approx(slow_revisited(queries, longer, lists, KS))
    assert result.protocol.name == "roxford+distractors"
    assert result["mAP[medium]"] < revisited(queries, database, **lists, normalize=False)["mAP[medium]"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"protocol": "all-vs-all"}, "protocol must be one of 'roxford', 'roxford-easy'"),
        ({"easy": [[0]]}, "easy must be one list per query, 9, got 1"),
        ({"junk": [[80]] * 9}, "junk of query 0 must be rows of a database of 80, got 80 to 80"),
        ({"easy": [[1, 2]] * 9, "hard": [[2]] * 9, "junk": [[]] * 9}, "query 0 lists an image twice"),
        ({"easy": [[]] * 9, "hard": [[]] * 9}, "no query has an easy or a hard image"),
        ({"easy": [[]] * 9, "protocol": "roxford-easy"}, "no query has a relevant image in the setting easy"),
        ({"distractors": torch.ones(4, 2)}, "database and distractors must have 3 dimensions like the others, got 2"),
    ],
)
def test_what_revisited_refuses(change, match):
    queries, database, lists = landmarks()
    with pytest.raises(ValueError, match=match):
        revisited(queries, database, **(lists | change))


def test_the_published_ground_truth():
    root = os.environ.get("RANKGRAD_DATA")
    if root is None:
        pytest.skip("RANKGRAD_DATA is not set")
    for name, database, easy_queries in (("roxford5k", 4993, 68), ("rparis6k", 6322, 70)):
        truth = read_ground_truth(Path(root) / "revisitop" / f"gnd_{name}.pkl").truth
        generator = torch.Generator().manual_seed(0)
        embeddings, queries = (torch.randn(count, 16, generator=generator) for count in (database, 70))
        result = revisited(queries, embeddings, truth.easy, truth.hard, truth.junk)
        assert result.queries("mAP[easy]") == easy_queries
        assert result.queries("mAP[medium]") == 70


def test_a_table_without_marks_is_all_against_all():
    embeddings, labels = exact_batch(40, lowest_label=0)
    table = SimpleNamespace(labels=labels.numpy(), categories=labels.numpy() % 2, is_query=None, is_gallery=None)
    result = evaluate_table(embeddings, table, ks=KS)
    assert result.protocol.name == "all-vs-all"
    assert dict(result) == dict(evaluate(embeddings, labels, ks=KS))
    assert sum(means["queries"] for means in result.by_category().values()) == 40
    official = evaluate_table(embeddings, table, protocol="vehicleid-official")
    assert official.protocol.name == "vehicleid-official"


def test_row_numbers_of_a_marked_table_are_the_tables():
    embeddings, labels = exact_batch(60, classes=5, lowest_label=0)
    row = np.arange(60)
    table = SimpleNamespace(labels=labels.numpy(), categories=row % 3, is_query=row % 2 == 0, is_gallery=row % 4 < 3)
    result = evaluate_table(embeddings, table, ks=KS, neighbours=3, normalize=False)
    queries, gallery = row[row % 2 == 0], row[row % 4 < 3]
    own = [gallery.tolist().index(query) if query in gallery else -1 for query in queries]
    plain = evaluate(
        embeddings[queries], labels[queries], embeddings[gallery], labels[gallery], self_index=own, ks=KS, normalize=False
    )
    assert dict(result) == dict(plain)
    assert result.query_index.tolist() == queries[plain.query_index].tolist()
    index, scores = result.neighbours
    assert np.isin(index, gallery).all()
    expected = (embeddings[result.query_index][:, None] * embeddings[torch.from_numpy(index)]).sum(2)
    np.testing.assert_array_equal(scores, expected.numpy())


def test_rows_of_no_class_are_relevant_to_nothing():
    embeddings, labels = exact_batch(40, lowest_label=0)
    labels[:9] = -1
    result = evaluate_table(embeddings, SimpleNamespace(labels=labels.numpy()), ks=KS)
    assert result.skipped == 9
    labels[:9] = torch.arange(100, 109)
    assert dict(result) == dict(evaluate(embeddings, labels, ks=KS))


def test_a_table_with_a_ground_truth_is_revisited():
    queries, database, lists = landmarks()
    mark = np.arange(89) < 9
    table = SimpleNamespace(labels=np.full(89, -1), is_query=mark, is_gallery=~mark, ground_truth=SimpleNamespace(**lists))
    result = evaluate_table(torch.cat((queries, database)), table, ks=KS, neighbours=2, distractors=torch.randn(5, 3))
    plain = revisited(queries, database, **lists, ks=KS, neighbours=2, distractors=torch.randn(5, 3))
    assert list(result) == list(plain)
    assert result.protocol.name == "roxford+distractors"
    assert result.neighbours[0].min() >= 9
    with pytest.raises(ValueError, match="roxford needs a table with a ground truth"):
        evaluate_table(queries, SimpleNamespace(labels=np.zeros(9, int)), protocol="roxford")


def test_what_a_table_is_refused_for():
    with pytest.raises(ValueError, match="embeddings must be one per row of the table, 4, got 3"):
        evaluate_table(torch.randn(3, 2), SimpleNamespace(labels=np.zeros(4, int)))
    table = SimpleNamespace(labels=np.zeros(4, int), is_query=np.zeros(4, bool), is_gallery=np.ones(4, bool))
    with pytest.raises(ValueError, match="the table must mark queries and gallery rows, got 0 and 4"):
        evaluate_table(torch.randn(4, 2), table)
