"""`evaluate` against the definitions, on lists full of ties, and by every way it can count."""

import re

import numpy as np
import pytest
import torch
from eval.listwise_metrics import assert_columns, exact_batch, list_of, metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from rankgrad.eval import evaluate, expected_memory
from rankgrad.eval.embedding_blocks import to_unit_length

KS = (1, 2, 5, 50)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run in the interpreter only where there is no GPU


def wanted(embeddings, labels, ref_emb=None, ref_labels=None, own=None):
    lists = [
        list_of(query, embeddings, labels, ref_emb, ref_labels, None if own is None else int(own[query]))
        for query in range(len(labels))
    ]
    return [metrics(hits, KS) for hits in lists]


@pytest.mark.parametrize("seed", range(4))
def test_all_against_all_is_the_definition(seed):
    embeddings, labels = exact_batch(60, classes=25, seed=seed)
    assert_columns(evaluate(embeddings, labels, ks=KS, normalize=False), wanted(embeddings, labels))


@pytest.mark.parametrize("seed", range(4))
def test_queries_against_a_gallery_are_the_definition(seed):
    queries, labels = exact_batch(23, classes=9, seed=seed)
    gallery, ref_labels = exact_batch(41, classes=7, seed=seed + 100)
    result = evaluate(queries, labels, gallery, ref_labels, ks=KS, normalize=False)
    assert result.protocol.name == "query-gallery"
    assert_columns(result, wanted(queries, labels, gallery, ref_labels))


@given(
    st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.integers(-2, 1)), min_size=2, max_size=12).filter(
        lambda rows: len({row[2] for row in rows}) < len(rows)
    )
)
@settings(max_examples=30, deadline=None)
def test_any_small_batch_is_the_definition(rows):
    table = torch.tensor(rows)
    embeddings, labels = table[:, :2].float(), table[:, 2]
    assert_columns(evaluate(embeddings, labels, ks=KS, normalize=False), wanted(embeddings, labels))


def test_a_query_in_the_gallery_is_removed_by_its_row_and_not_as_first_neighbour():
    gallery, ref_labels = exact_batch(40, classes=5, seed=3)
    gallery[7] = gallery[20]  # a duplicate: which of the two comes first says nothing
    own = torch.tensor([7, 20, -1, 3])
    queries, labels = gallery[[7, 20, 5, 3]], ref_labels[[7, 20, 5, 3]]
    result = evaluate(queries, labels, gallery, ref_labels, self_index=own, ks=KS, normalize=False)
    assert_columns(result, wanted(queries, labels, gallery, ref_labels, own))


def test_one_query_and_a_cut_off_past_the_end_of_the_list():
    queries, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, 0.1], [1.0, 0.0]])
    result = evaluate(queries, [5], gallery, [5, 7], ks=(1, 2, 1000))
    assert dict(result) == pytest.approx(
        {"R@1": 0, "R@2": 1, "R@1000": 1, "mAP": 0.5, "mAP@R": 0, "RP": 0, "MRR": 0.5, "NDCG": 1 / np.log2(3)}
        | {"recall@1": 0, "recall@2": 1, "recall@1000": 1, "P@1": 0, "P@2": 0.5, "P@1000": 0.001}
    )


def test_two_tied_relevant_items_hold_two_places():
    embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, 0.6], [0.0, 1.0]])
    result = evaluate(embeddings, [1, 1, 1, 2], ks=(1,))
    assert result.per_query["first_rank"][0] == 1
    assert result.per_query["average_precision"][0] == 1


def ragged(count, seed=0, most=60):
    """Classes of 1 to `most` items in random order, with duplicates across classes."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(count), rng.integers(1, most + 1, size=count))[:count]
    embeddings = rng.normal(size=(count, 8)) + rng.normal(size=(labels.max() + 1, 8))[labels]
    embeddings[rng.integers(count, size=count // 4)] = embeddings[rng.integers(count, size=count // 4)]
    order = rng.permutation(count)
    return torch.from_numpy(embeddings[order]).float(), torch.from_numpy(labels[order])


def assert_same(first, second):
    assert first.query_index.tolist() == second.query_index.tolist()
    for name, values in first.per_query.items():
        # ranks and hits to the last bit; sums over relevant items may add up in another order
        tolerance = 0 if name.startswith(("first", "num", "hit", "recall", "r_prec")) else 1e-13
        np.testing.assert_allclose(values, second.per_query[name], rtol=0, atol=tolerance, err_msg=name)


def sorted_lists(embeddings, labels):
    """First rank and average precision of every query by sorting the scores of the whole matrix, irrelevant ones first."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    # duplicates tie to the last bit in a product of whole rows, so rounding to 1e-9 only brings their ties back
    scores = ((unit @ unit.T) * 1e9).round()
    relevant = labels[:, None] == labels
    relevant.fill_diagonal_(False)
    scores.fill_diagonal_(-torch.inf)
    order = (scores * 2 - relevant.double()).argsort(dim=1, descending=True)
    hits = relevant.gather(1, order).double()
    precision = hits.cumsum(1) / torch.arange(1, len(labels) + 1)
    some = hits.any(dim=1)
    return hits.argmax(dim=1)[some] + 1, ((precision * hits).sum(1) / hits.sum(1))[some]


@pytest.mark.parametrize("most", [3, 12, 60])  # few comparisons of a query, and so many that a table counts them
def test_many_tiles_agree_with_sorting_all_scores(most):
    embeddings, labels = ragged(1300, most=most)
    result = evaluate(embeddings, labels)
    first, precision = sorted_lists(embeddings, labels)
    # float32 moves an item past another here and there; a wrong tile or tie rule moves thousands
    assert (torch.from_numpy(result.per_query["first_rank"]) != first).float().mean() < 0.002
    torch.testing.assert_close(torch.from_numpy(result.per_query["average_precision"]), precision, rtol=0, atol=2e-3)


@pytest.mark.parametrize("most", [12, 60])
def test_groups_of_any_size_and_both_ways_of_counting_agree(most, monkeypatch):
    embeddings, labels = ragged(1300, most=most)
    whole = evaluate(embeddings, labels)
    own = torch.arange(len(labels))
    for budget in (1, 2**21, 2**29):
        monkeypatch.setattr("rankgrad.eval.rank_counts.MEMORY_LIMIT", budget)
        assert_same(whole, evaluate(embeddings, labels))
        assert_same(whole, evaluate(embeddings, labels, embeddings, labels, self_index=own))


@pytest.mark.parametrize(("count", "dim"), [(4, 5), (40, 128), (514, 33), (700, 512)])
def test_collapsed_embeddings_tie_exactly(count, dim):
    # one vector for all: whatever the shape of a tile, no rounding may tell one score from another
    embeddings = torch.randn(dim, generator=torch.Generator().manual_seed(count)).expand(count, dim)
    labels = torch.arange(count) // 2
    for result in (evaluate(embeddings, labels), evaluate(embeddings[:32], labels[:32], embeddings, labels)):
        irrelevant = count - 2
        assert set(result.per_query["first_rank"].tolist()) == {irrelevant + 1}


def test_order_of_the_items_does_not_matter():
    embeddings, labels = ragged(600)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    assert dict(evaluate(embeddings, labels)) == pytest.approx(dict(evaluate(embeddings[order], labels[order])), abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_gallery_on_disk_equals_one_in_memory(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("rankgrad.eval.embedding_blocks.BLOCK_NUMBERS", 8 * 512)  # several blocks
    embeddings, labels = ragged(1200)
    on_disk = np.memmap(tmp_path / "gallery", dtype=dtype, mode="w+", shape=tuple(embeddings.shape))
    on_disk[:] = embeddings.numpy()
    on_disk.flush()
    read = np.memmap(tmp_path / "gallery", dtype=dtype, mode="r", shape=tuple(embeddings.shape))
    in_memory = torch.from_numpy(np.array(read))
    queries, query_labels = embeddings[:70], labels[:70]
    assert_same(
        evaluate(queries, query_labels, read, labels.numpy()), evaluate(queries, query_labels, in_memory, labels.numpy())
    )
    assert_same(evaluate(read, labels), evaluate(in_memory, labels))


def test_numpy_lists_and_other_number_formats():
    embeddings, labels = exact_batch(50)
    plain = evaluate(embeddings, labels, ks=KS, normalize=False)
    assert_same(plain, evaluate(embeddings.numpy(), labels.tolist(), ks=KS, normalize=False))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert_same(plain, evaluate(embeddings.to(dtype), labels.to(torch.int32), ks=KS, normalize=False))


def test_the_precision_that_training_was_allowed_does_not_matter():
    embeddings, labels = ragged(600)
    plain = evaluate(embeddings.requires_grad_(), labels, neighbours=3)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            other = evaluate(embeddings, labels, neighbours=3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same(plain, other)
    np.testing.assert_array_equal(plain.neighbours[1], other.neighbours[1])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("most", [12, 60])
def test_the_number_of_threads_does_not_matter(threads, most):
    embeddings, labels = ragged(1300, most=most)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(
            (
                evaluate(embeddings, labels),
                evaluate(embeddings, labels, memory_limit=2**27),
                evaluate(embeddings[:90], labels[:90], embeddings, labels),
            )
        )
        assert torch.get_num_threads() == count
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert_same(first, second)


def test_a_stop_in_the_middle_leaves_the_threads_as_they_were(threads):
    threads(3)
    embeddings, labels = ragged(1300)

    def stop(done, total):
        raise KeyboardInterrupt

    for gallery in ((), (embeddings, labels)):
        with pytest.raises(KeyboardInterrupt):
            evaluate(embeddings, labels, *gallery, progress=stop)
        assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("ties_in_the_interpreter")
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_norms_that_overflow_or_underflow_change_nothing(scale):
    embeddings, labels = ragged(300)
    plain = evaluate(embeddings, labels)
    assert plain["R@1"] > 0
    # a power of two, so that scaling itself does not round
    factor = 2.0 ** round(np.log2(scale))
    assert_same(plain, evaluate(embeddings * factor, labels))
    assert_same(plain, evaluate(embeddings * factor, labels, backend="triton", device=DEVICE))


def test_ordinary_rows_are_normalised_to_the_same_bits_as_by_torch():
    rows = torch.randn(500, 33) * torch.logspace(-8, 8, 500)[:, None]
    rows[7] = 0
    assert torch.equal(to_unit_length(rows), torch.nn.functional.normalize(rows, dim=1))


@pytest.mark.parametrize("kind", [list, np.array, lambda names: np.array(names, dtype=object)])
def test_strings_are_labels_too(kind):
    embeddings, labels = exact_batch(60)
    names = [f"class {label:03}" for label in labels.tolist()]
    plain, named = (
        evaluate(embeddings, labels, categories=labels // 4),
        evaluate(embeddings, kind(names), categories=kind(names)),
    )
    assert_same(plain, named)
    assert {f"class {label:03}": means for label, means in plain.by_class().items()} == named.by_class()
    assert named.by_category() == named.by_class()
    gallery = evaluate(embeddings[:20], kind(names[:20]), embeddings[20:], kind(names[20:]))
    assert_same(evaluate(embeddings[:20], labels[:20], embeddings[20:], labels[20:]), gallery)


def test_skipped_queries_are_mentioned_with_their_labels():
    embeddings = torch.randn(6, 4)
    alone = evaluate(embeddings, ["a", "a", "b", "c", "a", "a"])
    assert alone.coverage == "4 queries, 2 skipped (the only items of their classes: 'b', 'c')"
    assert alone.table().startswith(f"all-vs-all: {alone.coverage}\n")
    assert "4 queries, 2 skipped, R@1" in repr(alone)
    one = evaluate(embeddings[:2], ["a", "b"], embeddings, ["a"] * 6)
    assert one.coverage == "1 query, 1 skipped (no other item of its class in the gallery: 'b')"
    assert evaluate(embeddings, [0] * 6).coverage == "6 queries"


def test_the_smallest_limit_that_is_possible_is_kept_to():
    embeddings, labels = ragged(1300, most=60)
    with pytest.raises(ValueError, match="memory_limit must be at least") as refused:
        evaluate(embeddings, labels, memory_limit=1)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    result = evaluate(embeddings, labels, memory_limit=least)
    assert result.memory <= least
    assert_same(evaluate(embeddings, labels), result)
    with pytest.raises(ValueError, match=f"at least {least}"):
        evaluate(embeddings, labels, memory_limit=least - 1)


def test_labels_past_the_precision_of_floats():
    embeddings, labels = exact_batch(50)
    assert_same(evaluate(embeddings, labels), evaluate(embeddings, labels + 2**53))


@pytest.mark.parametrize("gallery", [False, True])
def test_fused_kernels_give_the_same_ranks(gallery, monkeypatch):
    embeddings, labels = exact_batch(140, dim=16, classes=40)
    more = (exact_batch(90, dim=16, classes=40, seed=7)) if gallery else ()
    kernels, plain = (
        evaluate(embeddings, labels, *more, backend=backend, normalize=False, device=DEVICE) for backend in ("triton", "tiled")
    )
    assert_same(plain, kernels)
    monkeypatch.setattr("rankgrad.eval.rank_counts.MEMORY_LIMIT", 1)
    assert_same(plain, evaluate(embeddings, labels, *more, backend="triton", normalize=False, device=DEVICE))


@pytest.mark.parametrize("options", [{}, {"memory_limit": 2**27}, {"neighbours": 3}, {"category_gain": 0.5}])
def test_progress_goes_up_to_the_end(options):
    embeddings, labels = ragged(700)
    told = []
    evaluate(embeddings, labels, categories=labels // 4, progress=lambda done, total: told.append((done, total)), **options)
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    told.clear()
    evaluate(embeddings[:60], labels[:60], embeddings, labels, progress=lambda *step: told.append(step))
    assert told[-1][0] == told[-1][1]


def graded_ndcg(hits_and_grades, gain):
    discounted = sum(gain[grade] / np.log2(2 + place) for place, grade in enumerate(hits_and_grades))
    best = sorted((gain[grade] for grade in hits_and_grades), reverse=True)
    return discounted / sum(value / np.log2(2 + place) for place, value in enumerate(best))


def test_graded_ndcg_is_the_definition(monkeypatch):
    monkeypatch.setattr("rankgrad.eval.graded.SORTED_NUMBERS", 400)
    embeddings, labels = exact_batch(60, classes=20)
    categories = labels.div(5, rounding_mode="floor")
    categories[labels == 2] = -1  # two items of unknown category share none
    result = evaluate(embeddings, labels, ks=(1,), categories=categories, category_gain=0.25, normalize=False)
    scores = (embeddings @ embeddings.T).tolist()
    for query, value in zip(result.query_index, result.per_query["ndcg"], strict=True):
        grade = [2 if labels[item] == labels[query] else int(categories[item] == categories[query] != -1) for item in range(60)]
        order = sorted((i for i in range(60) if i != query), key=lambda i: (-scores[query][i], grade[i]))
        assert value == pytest.approx(graded_ndcg([grade[i] for i in order], (0, 0.25, 1)))
    assert "0.25 for another of its category" in result.table()


def test_grades_of_nothing_but_the_class_are_binary_ndcg():
    embeddings, labels = exact_batch(60, classes=20)
    gallery, ref_labels = exact_batch(70, classes=20, seed=5)
    given = {"categories": labels // 5, "ref_categories": ref_labels // 5, "category_gain": 0.0, "normalize": False}
    graded = evaluate(embeddings, labels, gallery, ref_labels, **given)
    assert graded["NDCG"] == pytest.approx(evaluate(embeddings, labels, gallery, ref_labels, normalize=False)["NDCG"])


def test_neighbours_come_with_the_result():
    embeddings, labels = ragged(600)
    result = evaluate(embeddings, labels, neighbours=5)
    index, scores = result.neighbours
    assert index.shape == scores.shape == (len(result.query_index), 5)
    assert not (index == result.query_index[:, None]).any()
    first = result.per_query["first_rank"]
    found = labels.numpy()[index] == labels.numpy()[result.query_index][:, None]
    # where the first relevant item ties with an irrelevant one, the metric takes the worse and the neighbours the earlier
    clear = ~(np.diff(scores, axis=1) == 0).any(axis=1) & (first < 5)
    assert clear.sum() > 100
    np.testing.assert_array_equal(found[clear].argmax(axis=1) + 1, first[clear])


def test_the_announced_memory_is_a_number_beforehand():
    embeddings, labels = ragged(600)
    assert expected_memory(embeddings, labels) == evaluate(embeddings, labels).memory > embeddings.numel() * 4


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"embeddings": torch.ones(6)}, ValueError, r"embeddings must be \[items, dimensions\] .* got shape \(6,\)"),
        ({"embeddings": torch.ones(6, 2).long()}, TypeError, "embeddings must be a floating-point tensor"),
        ({"embeddings": [[1.0]]}, TypeError, "embeddings must be a torch.Tensor or a numpy array, got list"),
        ({"embeddings": np.ones((6, 2), int)}, TypeError, "embeddings must be floating-point numbers, got int64"),
        ({"embeddings": torch.full((6, 2), torch.nan)}, ValueError, "embeddings must be finite, got 12 NaN"),
        (
            {"labels": torch.ones(5).long()},
            ValueError,
            r"labels must be one per row of embeddings, shape \(6,\), got shape \(5,\)",
        ),
        ({"labels": torch.ones(6)}, TypeError, "labels must be integers or strings, got float32"),
        ({"labels": torch.arange(6)}, ValueError, "no query has a relevant candidate: 6 queries and 6 candidates"),
        ({"ref_emb": torch.ones(6, 2)}, ValueError, "go together, got ref_emb and no ref_labels"),
        ({"ref_labels": torch.ones(6)}, ValueError, "go together, got ref_labels and no ref_emb"),
        ({"ref_emb": torch.ones(3, 4), "ref_labels": [0] * 3}, ValueError, "ref_emb must have 2 dimensions .* got 4"),
        ({"self_index": torch.arange(6)}, ValueError, "self_index needs ref_emb"),
        (
            {"ref_emb": torch.ones(3, 2), "ref_labels": [0] * 3, "self_index": torch.arange(6)},
            ValueError,
            "self_index must be below 3, the rows of ref_emb, got 5",
        ),
        ({"ks": ()}, ValueError, "ks must hold at least one cut-off"),
        ({"ks": (0,)}, ValueError, "every k of ks must be at least 1, got 0"),
        ({"ks": (1.5,)}, TypeError, "every k of ks must be an integer, got 1.5"),
        ({"protocol": "sop"}, ValueError, "protocol must be one of 'all-vs-all', 'query-gallery'"),
        ({"protocol": "query-gallery"}, ValueError, "query-gallery needs ref_emb and ref_labels"),
        ({"protocol": "all-vs-all", "ref_emb": torch.ones(3, 2), "ref_labels": [0] * 3}, ValueError, "takes no ref_emb"),
        ({"protocol": "roxford-hard"}, ValueError, "needs the lists of easy, hard and junk images: call .*revisited"),
        ({"repeats": 3, "seed": 1}, ValueError, "repeats, seed would have no effect under all-vs-all"),
        ({"protocol": "vehicleid-official", "neighbours": 3}, ValueError, "neighbours would have no effect"),
        ({"category_gain": 0.5}, ValueError, "category_gain needs categories"),
        ({"category_gain": 1.5, "categories": [0] * 6}, ValueError, "category_gain must be at most 1"),
        ({"ref_categories": [0] * 6}, ValueError, "ref_categories are only for category_gain"),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'triton', 'tiled'"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be at least 1"),
        ({"memory_limit": 1}, ValueError, r"memory_limit must be at least \d+ \([\d.]+ MiB\) for these embeddings, got 1"),
        ({"labels": ["a", "b", "a", "", "b", "a"]}, ValueError, "must be a string that is not empty, got ''; missing in row 3"),
        ({"labels": ["a", None, "a", "b", None, "a"]}, ValueError, "got None; missing in rows 1, 4"),
        ({"labels": list("abcdef")}, ValueError, "share no label; .* Queries have 'a', 'b', 'c', 'd', 'e' and 1 more"),
        (
            {"labels": ["a"] * 6, "ref_emb": torch.ones(3, 2), "ref_labels": [0] * 3},
            TypeError,
            "labels and ref_labels must both be integers or both strings",
        ),
        (
            {"labels": ["a"] * 6, "ref_emb": torch.ones(2, 2), "ref_labels": ["b", "c"]},
            ValueError,
            "Queries have 'a', the gallery has 'b', 'c'",
        ),
        ({"neighbours": -1}, ValueError, "neighbours must be at least 0"),
    ],
)
def test_what_is_refused(change, error, match):
    given = {"embeddings": torch.randn(6, 2), "labels": torch.zeros(6).long()} | change
    with pytest.raises(error, match=match):
        evaluate(given.pop("embeddings"), given.pop("labels"), **given)


def test_kernels_on_a_gallery_on_disk_are_refused(tmp_path):
    on_disk = np.memmap(tmp_path / "gallery", dtype=np.float32, mode="w+", shape=(6, 2))
    with pytest.raises(ValueError, match="needs embeddings in memory, got a memmap"):
        evaluate(torch.randn(6, 2), [0] * 6, on_disk, [0] * 6, backend="triton")
