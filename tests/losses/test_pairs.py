"""Relevance as a sparse list of pairs: the loss is that of the dense matrix, and bad pairs are named."""

import copy
import pickle
import re

import numpy as np
import oracle
import pytest
import torch
from benchmarks.measure import in_child
from hypothesis import example, given, settings
from hypothesis import strategies as st
from losses.combinations import (
    KINKED_BY_TIES,
    OBJECTIVES,
    PAIRS,
    RANKERS,
    Batch,
    assert_same,
    leaf,
)
from losses.memory_of_relevance import bytes_taken
from torch import Tensor, nn

import rankgrad as rg
from rankgrad.ops.pair_relevance import PairLists

quick = settings(derandomize=True, deadline=None, max_examples=3, database=None)
# what an objective makes of the ranks is the same for all kinds of relevance; NDCG sees the gains
each_pair = pytest.mark.parametrize(
    ("ranker", "objective"), [pair for pair in PAIRS if pair[1] in ("average_precision", "log_recall", "ndcg")]
)
shapes = st.builds(
    Batch,
    sizes=st.just((1,)),
    seed=st.integers(0, 10**6),
    tied=st.booleans(),
    reduction=st.sampled_from(["mean", "none"]),
    empty_query=st.sampled_from(["skip", "zero"]),
)
NO_PAIR_IN_FIRST_ROWS = Batch(sizes=(1,), seed=4, tied=True)


def some_pairs(batch: Batch, queries: int, candidates: int, self_index: Tensor | None, share: float) -> tuple[rg.Pairs, Tensor]:
    """Pairs in any order, with gains of 0 to 3, and the same as a matrix."""
    grades = torch.randint(0, 4, (queries, candidates), generator=batch.rng(1))
    listed = batch.mask(queries, candidates, share=share, salt=2)
    listed[: batch.seed % 3] = False  # queries without a relevant candidate
    if self_index is not None:
        rows = (self_index >= 0).nonzero().view(-1)
        listed[rows, self_index[rows]] = False
    query, item = listed.nonzero(as_tuple=True)
    order = torch.randperm(len(query), generator=batch.rng(3))
    query, item = query[order], item[order]
    return rg.Pairs(query, item, grades[query, item]), grades * listed


def lists_of(x: Tensor, refs: Tensor, matrix: Tensor, self_index: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    candidates = torch.ones_like(matrix, dtype=torch.bool)
    if self_index is not None:
        rows = (self_index >= 0).nonzero().view(-1)
        candidates[rows, self_index[rows]] = False
    normal, normal_refs = (rows / rows.norm(dim=1, keepdim=True) for rows in (x, refs))
    return oracle.score_lists(normal @ normal_refs.t(), matrix, candidates)


@each_pair
@pytest.mark.parametrize("way", ["one tile", "tiles"])
@quick
@given(batch=shapes)
@example(batch=NO_PAIR_IN_FIRST_ROWS)
def test_pairs_are_the_dense_matrix(ranker, objective, way, batch):
    (mine, theirs), (score, want) = RANKERS[ranker], OBJECTIVES[objective]
    loss = rg.RankLoss(mine, score, reduction=batch.reduction, empty_query=batch.empty_query)

    def compare(ours, wanted, ours_in, wanted_in):
        if batch.tied and (ranker, objective) in KINKED_BY_TIES:
            torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
        else:
            assert_same(ours, wanted, ours_in, wanted_in, batch.weights(*wanted.shape))

    with pytest.MonkeyPatch.context() as patch:
        if way == "tiles":
            patch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: 1 + batch.seed % 4)
            patch.setattr("rankgrad.ops.thresholds.FEW_THRESHOLDS", 48 * (batch.seed % 2))
        itself = torch.arange(9)
        pairs, matrix = some_pairs(batch, 9, 9, itself, 0.4)
        x, y = (leaf(batch.embeddings(9)) for _ in range(2))
        wanted = oracle.rank_loss(lists_of(y, y, matrix, itself), theirs, want, batch.reduction, batch.empty_query)
        compare(loss(x, relevance=pairs), wanted, [x], [y])

        self_index = torch.where(batch.mask(5, share=0.6, salt=5), torch.arange(2, 7), -1)
        pairs, matrix = some_pairs(batch, 5, 8, self_index, 0.5)
        refs, ref_y = (leaf(batch.embeddings(8, salt=6)) for _ in range(2))
        x, y = (leaf(batch.embeddings(5)) for _ in range(2))
        wanted = oracle.rank_loss(lists_of(y, ref_y, matrix, self_index), theirs, want, batch.reduction, batch.empty_query)
        ours = loss(x, relevance=pairs, ref_emb=refs, self_index=self_index)
        compare(ours, wanted, [x, refs], [y, ref_y])


@pytest.mark.parametrize("ranker", RANKERS)
def test_the_reference_backend_takes_pairs(ranker):
    batch = Batch(sizes=(1,), seed=8, tied=False)
    pairs, matrix = some_pairs(batch, 9, 9, torch.arange(9), 0.4)
    (mine, theirs), (score, want) = RANKERS[ranker], OBJECTIVES["ndcg"]
    x, y = (leaf(batch.embeddings(9)) for _ in range(2))
    wanted = oracle.rank_loss(lists_of(y, y, matrix, torch.arange(9)), theirs, want)
    assert_same(rg.RankLoss(mine, score, backend="reference")(x, relevance=pairs), wanted, [x], [y], batch.weights())


def test_pairs_of_one_class_are_its_labels():
    labels = torch.tensor([4, 2, 4, 4, 9, 2])
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    same = (labels[:, None] == labels).fill_diagonal_(False)
    pairs = rg.Pairs(*same.nonzero(as_tuple=True))
    for loss in (rg.RecallAtKLoss(), rg.RecallAtKLoss(query_in_database=True), rg.RamboAPLoss()):
        torch.testing.assert_close(loss(x, relevance=pairs), loss(x, labels))
        torch.testing.assert_close(loss(x, pairs), loss(x, labels))
        weights = torch.rand(6)
        torch.testing.assert_close(loss(x, relevance=pairs, weights=weights), loss(x, labels, weights=weights))


def test_no_pairs_at_all():
    nothing = torch.empty(0, dtype=torch.long)
    for n in (4, 600):
        x = torch.randn(n, 3, requires_grad=True)
        value = rg.SmoothAPLoss()(x, relevance=rg.Pairs(nothing, nothing))
        value.backward()
        assert value == 0
        assert not x.grad.any()


BAD = {
    "query beyond": (([0, 6], [1, 2], None), r"query must be a row of the 6 queries, 0 to 5, got 6"),
    "query negative": (([0, -1], [1, 2], None), r"query must .* got -1"),
    "item beyond": (([0, 2], [1, 6], None), r"item must be a row of the 6 candidates, 0 to 5, got 6 for query 2"),
    "item negative": (([0, 2], [1, -3], None), r"item must .* got -3 for query 2"),
    "twice": (([3, 0, 3], [1, 2, 1], None), r"each pair must be given once, got query 3 with item 1"),
    "itself": (([3, 0], [1, 0], None), r"a query must not be relevant to itself, got query 0 with item 0"),
    "negative gain": (
        ([3, 0], [1, 2], [1.0, -2.0]),
        r"gain must be 0 or between 1e-15 and 1e\+15, got -2.0 for query 0, item 2",
    ),
    "infinite gain": (([3, 0], [1, 2], [1.0, float("inf")]), r"gain must .* got inf for query 0, item 2"),
    "gain beyond float32": (([3, 0], [1, 2], [1e300, 1.0]), r"gain must .* for query 3, item 1"),
    "gain that vanishes in float32": (([3, 0], [1, 2], [1e-300, 1.0]), r"gain must .* for query 3, item 1"),
    "nan gain": (([3, 0], [1, 2], [float("nan"), 2.0]), r"gain must .* got nan for query 3, item 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_named(name):
    (query, item, gain), message = BAD[name]
    pairs = rg.Pairs(query, item, gain)
    with pytest.raises(ValueError, match=rf"SmoothAPLoss: relevance: {message}"):
        rg.SmoothAPLoss()(torch.randn(6, 4), relevance=pairs)


def test_bad_calls_are_explained():
    x, labels, pairs = torch.randn(3, 4), torch.arange(3), rg.Pairs(torch.tensor([0]), torch.tensor([1]))
    loss = rg.SmoothAPLoss()
    with pytest.raises(TypeError, match="either labels or relevance, got both"):
        loss(x, labels, relevance=pairs)
    with pytest.raises(TypeError, match="either labels or relevance, got neither"):
        loss(x)
    with pytest.raises(TypeError, match=r"relevance must be .*Pairs.*, got Tensor"):
        loss(x, relevance=labels)
    with pytest.raises(ValueError, match="ref_labels goes with labels"):
        loss(x, relevance=pairs, ref_emb=x, ref_labels=labels)
    with pytest.raises(ValueError, match="ignore_label goes with labels"):
        rg.SmoothAPLoss(ignore_label=-1)(x, relevance=pairs)
    with pytest.raises(TypeError, match=r"SiMix: .* labels must be classes, got Pairs"):
        rg.SiMix(loss)(x, pairs)
    with pytest.raises(ValueError, match=re.escape("Pairs: item must be one per row of query, shape (1,), got shape (2,)")):
        rg.Pairs(torch.tensor([0]), torch.tensor([1, 2]))
    with pytest.raises(TypeError, match=r"Pairs: query must be integers, got torch.float32"):
        rg.Pairs(torch.tensor([0.0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="Pairs: gain must be one number per pair"):
        rg.Pairs(torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=re.escape("Pairs: query must be [pairs], got shape (1, 2)")):
        rg.Pairs([[0, 1]], [[1, 2]])
    with pytest.raises(TypeError, match="Pairs: item must be a tensor, an array or a list of numbers, got NoneType"):
        rg.Pairs([0], None)
    with pytest.raises(TypeError, match=r"Pairs: item must be a tensor.* got list"):
        rg.Pairs([0], ["a"])
    with pytest.raises(ValueError, match="SmoothAPLoss: self_index must be below 3, got 3"):
        loss(x, relevance=pairs, ref_emb=x, self_index=torch.arange(3) + 1)
    for wrap in (
        rg.SiMix,
        rg.DistributedRankLoss,
        lambda inner: rg.EmbeddingMemory(inner, 2),
        lambda inner: rg.LargeBatch(nn.Identity(), inner, 2),
    ):
        wrapped = wrap(loss)
        with pytest.raises(TypeError, match="either labels or relevance, got both"):
            wrapped(x, labels, relevance=pairs)


def test_arrays_and_lists_are_pairs_too():
    x, query, item, gain = torch.randn(6, 4), [3, 0, 5], [1, 2, 4], [1.0, 2.0, 0.5]
    wanted = rg.ApproxNDCGLoss()(x, relevance=rg.Pairs(torch.tensor(query), torch.tensor(item), torch.tensor(gain)))
    for kind in (list, tuple, np.array, lambda values: np.array(values[::-1])[::-1], torch.tensor):
        pairs = rg.Pairs(kind(query), kind(item), kind(gain))
        torch.testing.assert_close(rg.ApproxNDCGLoss()(x, relevance=pairs), wanted)
        torch.testing.assert_close(rg.ApproxNDCGLoss()(x, relevance=pickle.loads(pickle.dumps(pairs))), wanted)
        torch.testing.assert_close(rg.ApproxNDCGLoss()(x, relevance=copy.deepcopy(pairs).to("cpu")), wanted)
    assert rg.SmoothAPLoss()(x, relevance=rg.Pairs([], [])) == 0
    assert rg.Pairs(query, item) != rg.Pairs(query, item)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int32])
def test_gains_of_any_type(dtype):
    x, gain = torch.randn(6, 4), torch.tensor([1, 2, 3])
    wanted = rg.ApproxNDCGLoss()(x, relevance=rg.Pairs([3, 0, 0], [1, 2, 4], gain))
    torch.testing.assert_close(rg.ApproxNDCGLoss()(x, relevance=rg.Pairs([3, 0, 0], [1, 2, 4], gain.to(dtype))), wanted)


def test_autocast_does_not_change_a_loss_of_pairs():
    x = torch.randn(40, 8, requires_grad=True)
    pairs, found = rg.Pairs(torch.arange(20), torch.arange(20, 40), torch.rand(20)), []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = rg.ApproxNDCGLoss()(x, relevance=pairs)
        found.append((value.detach(), *torch.autograd.grad(value, x)))
    torch.testing.assert_close(*found)


def test_multi_label_items():
    labels = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    sets = [["cat", "dog"], {"cat"}, ["fish"], ("cat", "dog", "fish"), []]
    shared = labels.double() @ labels.double().t()
    either = (labels[:, None] | labels).sum(dim=2).double()
    off = 1 - torch.eye(5)
    wanted = {None: (shared > 0).double(), "overlap": shared, "jaccard": shared / either.clamp(min=1)}
    for gain, matrix in wanted.items():
        for each in (labels, labels.numpy(), sets):
            pairs = rg.Pairs.from_multilabel(each, gain=gain)
            dense = torch.zeros(5, 5, dtype=torch.double)
            dense[pairs.query, pairs.item] = 1.0 if pairs.gain is None else pairs.gain.double()
            torch.testing.assert_close(dense, matrix * off, rtol=1e-6, atol=0)
    against = rg.Pairs.from_multilabel(labels[:2], labels[1:], self_index=torch.tensor([-1, 0]))
    assert list(zip(against.query.tolist(), against.item.tolist(), strict=True)) == [(0, 0), (0, 2), (1, 2)]
    by_name = rg.Pairs.from_multilabel(sets[:2], sets[1:], self_index=torch.tensor([-1, 0]))
    assert torch.equal(by_name.item, against.item)
    with pytest.raises(TypeError, match=r"labels must be bool, .* got torch.int64"):
        rg.Pairs.from_multilabel(labels.long())
    with pytest.raises(TypeError, match="a set of labels for each item, got 'cat'"):
        rg.Pairs.from_multilabel(["cat", "dog"])
    with pytest.raises(TypeError, match="both be tensors or both lists"):
        rg.Pairs.from_multilabel(labels, sets)
    with pytest.raises(ValueError, match="as many columns"):
        rg.Pairs.from_multilabel(labels, labels[:, :2])


def test_expanding_labels_takes_no_matrix(monkeypatch):
    """30,000 items with pairs of labels, each shared by about six."""
    labels = torch.randint(10_000, (30_000, 2), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = rg.Pairs.from_multilabel(labels)
    assert 100_000 < len(pairs.query) < 500_000
    monkeypatch.setattr(PairLists, "dense", lambda self: pytest.fail("a dense matrix"))
    lists = pairs.of_batch(30_000, None, caller="test").build()
    assert sum(t.numel() for t in vars(lists).values() if isinstance(t, Tensor)) < 2_000_000


def test_a_large_batch_in_chunks():
    torch.manual_seed(0)
    images, pairs = torch.randn(24, 6), rg.Pairs(torch.tensor([0, 0, 7, 20]), torch.tensor([5, 11, 3, 21]))
    loss = rg.SmoothAPLoss()
    gradients = []
    for chunk_size in (24, 5):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = nn.Linear(6, 4)
        step = rg.LargeBatch(model, loss, chunk_size=chunk_size)
        step(images, relevance=pairs)
        gradients.append(model.weight.grad)
    torch.testing.assert_close(*gradients)


def test_items_beyond_the_batch_are_in_memory():
    rng = torch.Generator().manual_seed(0)
    first, second, third = (torch.randn(4, 5, generator=rng, dtype=torch.double) for _ in range(3))
    memory = rg.EmbeddingMemory(rg.SmoothAPLoss(), size=2)
    inside = rg.Pairs(torch.tensor([0, 1]), torch.tensor([1, 0]))
    memory(first, inside)
    memory(second, relevance=inside)
    across = rg.Pairs(torch.tensor([0, 2]), torch.tensor([5, 11]))  # the second item of the first batch, the last in memory
    wanted = rg.SmoothAPLoss()(third, relevance=across, ref_emb=torch.cat((third, first, second)), self_index=torch.arange(4))
    torch.testing.assert_close(memory(third, across), wanted)
    with pytest.raises(ValueError, match="of the kind that those in memory are, got Tensor"):
        memory(third, torch.arange(4))


def test_parts_of_the_queries_sum_up():
    batch = Batch(sizes=(1,), seed=5, tied=False)
    pairs, _ = some_pairs(batch, 12, 12, torch.arange(12), 0.3)
    x = batch.embeddings(12)
    for loss in (rg.SmoothAPLoss(), rg.RamboAPLoss(), rg.EmbeddingMemory(rg.FastAPLoss(), 2)):
        if isinstance(loss, rg.EmbeddingMemory):
            loss(batch.embeddings(12, salt=1), pairs)
            loss.eval()
        a, b = leaf(x), leaf(x)
        whole, parts = loss(a, pairs), [loss.shard_loss(b, pairs, rows) for rows in (slice(0, 5), slice(5, 12))]
        assert_same(sum(parts), whole, [b], [a], torch.tensor(1.5))


def test_multi_label_items_take_at_most_twice_the_memory_of_classes():
    """4,096 items of 64 dimensions with about ten relevant ones each; a dense matrix of relevance took 457 MB.

    These take 56 MB, and 62 where products are made by oneDNN.
    """
    taken = in_child(bytes_taken, 4096)
    assert taken["pairs"] <= 2 * taken["labels"], taken
    assert taken["pairs"] < 70e6, taken
