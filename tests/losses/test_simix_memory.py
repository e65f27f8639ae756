"""SiMix, the two memories and the multi-class form against explicit constructions."""

import copy

import oracle
import pytest
import torch
from losses.combinations import assert_same, leaf
from torch import Tensor

import rankgrad

WIDE = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


def batch(sizes: tuple[int, ...], seed: int, dim: int = 5) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(sum(sizes), generator=rng)]
    return torch.randn(sum(sizes), dim, generator=rng, dtype=torch.float64) * 2, labels


RANKED = {
    "recall_at_k": (
        lambda: rankgrad.RecallAtKLoss(ks=(1, 2, 4), tau_rank=0.1), oracle.Sigmoid(0.1), oracle.recall_at_k((1, 2, 4)),
    ),
    "fastap": (lambda: rankgrad.FastAPLoss(7), oracle.Histogram(7), oracle.average_precision),
    "rambo_recall": (
        lambda: rankgrad.RamboRecallLoss(lam=3.17), oracle.Blackbox(3.17, margin=0.02), oracle.loglog_recall,
    ),
}  # fmt: skip
each_loss = pytest.mark.parametrize("name", RANKED)


@each_loss
@pytest.mark.parametrize("sizes", [(1, 2, 3), (4, 4), (2,), (1, 1, 5)], ids=str)
def test_simix_is_the_loss_on_originals_and_virtual_examples(name, sizes):
    make, ranker, objective = RANKED[name]
    points, labels = batch(sizes, seed=1)
    x, y = leaf(points), leaf(points)
    ours = rankgrad.SiMix(make(), generator=torch.Generator().manual_seed(8))(x, labels)
    pairs = len(oracle.same_class_pairs(labels))
    alphas = torch.rand(pairs, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    mixed, mixed_labels = oracle.with_virtual(y, labels, alphas)
    wanted = oracle.rank_loss(oracle.embedding_lists(mixed, mixed_labels, normalize=False), ranker, objective)
    assert_same(ours, wanted, [x], [y], torch.tensor(2.5, dtype=torch.float64))


def test_simix_widens_the_default_ks_and_no_others():
    points, labels = batch((5, 6), seed=2)
    alphas = torch.rand(25, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    lists = oracle.embedding_lists(*oracle.with_virtual(points, labels, alphas), normalize=False)
    for options, ks in (({}, WIDE), ({"ks": (1, 3)}, (1, 3))):
        loss = rankgrad.SiMix(rankgrad.RecallAtKLoss(**options), generator=torch.Generator().manual_seed(8))
        wanted = oracle.rank_loss(lists, oracle.Sigmoid(0.01), oracle.recall_at_k(ks))
        torch.testing.assert_close(loss(points, labels), wanted, rtol=1e-9, atol=1e-9)


def test_simix_leaves_the_wrapped_loss_as_it_was():
    points, labels = batch((3, 4), seed=3)
    loss = rankgrad.RecallAtKLoss()
    before = loss(points, labels)
    rankgrad.SiMix(loss)(points, labels)
    assert torch.equal(loss(points, labels), before)


def test_simix_without_pairs_is_the_plain_loss():
    points, labels = batch((1, 1, 1), seed=4)
    x = leaf(points)
    value = rankgrad.SiMix(rankgrad.FastAPLoss())(x, labels)
    assert value.item() == 0
    assert not torch.autograd.grad(value, x)[0].any()


def test_simix_draws_afresh_and_repeats_with_its_generator():
    points, labels = batch((4, 4), seed=5)
    loss = rankgrad.SiMix(rankgrad.FastAPLoss(), generator=torch.Generator().manual_seed(1))
    first, second = loss(points, labels), loss(points, labels)
    again = rankgrad.SiMix(rankgrad.FastAPLoss(), generator=torch.Generator().manual_seed(1))(points, labels)
    assert first != second
    assert first == again


@each_loss
def test_embedding_memory_is_a_longer_gallery(name):
    make, ranker, objective = RANKED[name]
    memory, past = rankgrad.EmbeddingMemory(make(), size=2), []
    for step in range(5):
        points, labels = batch((1, 2, 4) if step % 2 else (3, 3), seed=10 + step)
        x, y = leaf(points), leaf(points)
        gallery = torch.cat([y, *(p for p, _ in past[-2:])])
        gallery_labels = torch.cat([labels, *(p for _, p in past[-2:])])
        lists = oracle.embedding_lists(y, labels, gallery, gallery_labels, self_index=torch.arange(len(labels)))
        assert_same(memory(x, labels), oracle.rank_loss(lists, ranker, objective), [x], [y], torch.tensor(1.5).double())
        past.append((points, labels))


@pytest.mark.parametrize("size", [0, 1])
def test_first_call_and_size_zero_are_the_plain_loss(size):
    memory = rankgrad.EmbeddingMemory(rankgrad.FastAPLoss(), size=size)
    for seed in range(3 if size == 0 else 1):
        points, labels = batch((2, 3), seed=seed)
        torch.testing.assert_close(memory(points, labels), rankgrad.FastAPLoss()(points, labels))


def test_memory_reads_but_does_not_store_in_eval_mode():
    memory = rankgrad.EmbeddingMemory(rankgrad.FastAPLoss(), size=3)
    memory(*batch((2, 3), seed=1))
    memory.eval()
    probe = batch((4, 2), seed=2)
    first = memory(*probe)
    assert torch.equal(memory(*probe), first)
    assert not torch.equal(first, rankgrad.FastAPLoss()(*probe))


def test_what_is_remembered_keeps_no_graph_and_no_alias():
    memory = rankgrad.EmbeddingMemory(rankgrad.FastAPLoss(), size=1)
    points, labels = batch((2, 3), seed=1)
    old = leaf(points)
    memory(old, labels)
    with torch.no_grad():
        old.mul_(-1)  # an optimiser step or a reused buffer must not reach the memory
    x, y = leaf(batch((3, 3), seed=2)[0]), batch((3, 3), seed=2)[1]
    value = memory(x, y)
    value.backward()
    assert old.grad is None
    other = rankgrad.EmbeddingMemory(rankgrad.FastAPLoss(), size=1)
    other(points, labels)
    assert torch.equal(other(x, y), value)


def assert_state_survives(memory, step) -> None:
    """`step(memory, seed)` trains once; a reloaded module goes on with the same bits."""
    for seed in range(4):
        step(memory, seed)
    state = copy.deepcopy(memory.state_dict())
    fresh = copy.deepcopy(memory)
    blank = type(memory)(rankgrad.RamboAPLoss(lam=3.1), 3)
    blank.load_state_dict(state)
    used = type(memory)(rankgrad.RamboAPLoss(lam=3.1), 3)
    step(used, 77)
    used.load_state_dict(state)
    for seed in range(20, 24):
        wanted = step(fresh, seed)
        for reloaded in (blank, used):
            for got, want in zip(step(reloaded, seed), wanted, strict=True):
                assert torch.equal(got, want)


def embedding_step(memory, seed: int) -> tuple[Tensor, Tensor]:
    points, labels = batch((1, 2, 3) if seed % 2 else (4, 4), seed=seed)
    x = leaf(points)
    value = memory(x, labels)
    return value.detach(), torch.autograd.grad(value, x)[0]


def score_batch(seed: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    n = 6 + seed % 3
    return torch.randn(rows, n, generator=rng, dtype=torch.float64), torch.rand(rows, n, generator=rng) < 0.3


def score_step(memory, seed: int) -> tuple[Tensor, Tensor]:
    scores, relevance = score_batch(seed)
    x = leaf(scores)
    value = memory.from_scores(x, relevance)
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize(
    ("kind", "step"), [("EmbeddingMemory", embedding_step), ("ScoreMemory", score_step)], ids=["embedding", "score"]
)
def test_state_dict_round_trip(kind, step):
    assert_state_survives(getattr(rankgrad, kind)(rankgrad.RamboAPLoss(lam=3.1), 3), step)


@each_loss
def test_score_memory_lengthens_every_list(name):
    make, ranker, objective = RANKED[name]
    memory, past = rankgrad.ScoreMemory(make(), size=2), []
    for seed in range(5):
        scores, relevance = score_batch(seed)
        x, y = leaf(scores), leaf(scores)
        long_scores = torch.cat([y, *(s for s, _ in past[-2:])], dim=1)
        long_relevance = torch.cat([relevance, *(r for _, r in past[-2:])], dim=1)
        wanted = oracle.rank_loss(oracle.score_lists(long_scores, long_relevance), ranker, objective)
        assert_same(memory.from_scores(x, relevance), wanted, [x], [y], torch.tensor(1.5).double())
        past.append((scores, relevance))


def test_score_memory_of_size_zero_and_in_eval_mode():
    scores, relevance = score_batch(0)
    plain = rankgrad.FastAPLoss().from_scores(scores, relevance)
    nothing = rankgrad.ScoreMemory(rankgrad.FastAPLoss(), size=0)
    quiet = rankgrad.ScoreMemory(rankgrad.FastAPLoss(), size=2).eval()
    for _ in range(2):
        torch.testing.assert_close(nothing.from_scores(scores, relevance), plain)
        torch.testing.assert_close(quiet.from_scores(scores, relevance), plain)


@pytest.mark.parametrize("interclass", [0.0, 1 / 3, 1.0])
@pytest.mark.parametrize("memory", [0, 2])
def test_multiclass_loss(interclass, memory):
    loss = rankgrad.MulticlassRankLoss(rankgrad.RamboAPLoss(lam=2.31), interclass=interclass, memory=memory)
    past: list[tuple[Tensor, Tensor]] = []
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        scores = torch.randn(9, 5, generator=rng, dtype=torch.float64)
        targets = torch.rand(9, 5, generator=rng) < 0.3
        targets[:, seed % 5] = False  # a class that is absent here
        x, y = leaf(scores), leaf(scores)
        recent = past[len(past) - memory :] if memory else []
        wanted = oracle.multiclass_loss(y, targets, oracle.Blackbox(2.31), oracle.average_precision, interclass, recent)
        assert_same(loss(x, targets), wanted, [x], [y], torch.tensor(1.5).double())
        past.append((scores, targets))


def test_multiclass_defaults_and_number_targets():
    rng = torch.Generator().manual_seed(3)
    scores, targets = torch.randn(12, 4, generator=rng).double(), torch.rand(12, 4, generator=rng) < 0.3
    wanted = oracle.multiclass_loss(scores, targets, oracle.Blackbox(0.5), oracle.average_precision, 1 / 3)
    for given in (targets, targets.double(), targets.long()):
        torch.testing.assert_close(rankgrad.MulticlassRankLoss()(scores, given), wanted, rtol=1e-9, atol=1e-9)


def test_multiclass_without_a_positive_is_zero_and_attached():
    x = leaf(torch.zeros(3, 2, dtype=torch.float64))
    value = rankgrad.MulticlassRankLoss()(x, torch.zeros(3, 2, dtype=torch.bool))
    assert value.item() == 0
    assert not torch.autograd.grad(value, x)[0].any()
