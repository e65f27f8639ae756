"""Labels at several levels: gains by the deepest level shared, and hierarchical average precision."""

import numpy as np
import oracle
import pytest
import torch
from losses.combinations import OBJECTIVES, RANKERS, Batch, assert_same, leaf
from torch import Tensor

import rankgrad as rg

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the kernels run in the interpreter only where there is no GPU
GAINS = (0.2, 0.5, 2.0)
ITEM_RANKERS = [name for name in RANKERS if name != "histogram"]


def labels_of(items: int, *, seed: int) -> Tensor:
    """Three levels; finer labels are numbered within their parents, so that the same number means nothing across them."""
    rng = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, 2, (items,), generator=rng) for _ in range(3)], dim=1)


def gain_matrix(labels: Tensor, refs: Tensor, gains: tuple[float, ...] = GAINS) -> Tensor:
    matrix = torch.zeros(len(labels), len(refs), dtype=torch.double)
    for q, own in enumerate(labels.tolist()):
        for c, other in enumerate(refs.tolist()):
            for depth in range(1, len(own) + 1):
                if own[:depth] == other[:depth]:
                    matrix[q, c] = gains[depth - 1]
    return matrix


def hierarchical_ap(e: oracle.Entries) -> Tensor:
    """By layers: AP at every gain, in the share that the layer has of all gains."""
    levels = sorted(set(e.gain.tolist()))
    total = 0.0
    for below, level in zip([0.0, *levels], levels, strict=False):
        within = (e.gain >= level).double()
        total = total + (level - below) * (within * oracle_rank_within(e, within) / e.rank).sum()
    return 1 - total / e.gain.sum()


def oracle_rank_within(e: oracle.Entries, within: Tensor) -> Tensor:
    """Rank among the items of a layer, from scores that the test hands over."""
    return 1 + (e.ahead * within).sum(dim=1)


class Spy:
    """An oracle's ranker whose entries also say how far each relevant item is ahead of each other."""

    def __init__(self, ranker: object) -> None:
        self.ranker = ranker

    def loss(self, scores: Tensor, gains: Tensor, objective: object, share: float) -> Tensor:
        relevant = (gains > 0).nonzero().view(-1)
        s = scores[relevant]
        other = 1 - torch.eye(len(s), dtype=s.dtype)
        if isinstance(self.ranker, oracle.Sigmoid):
            ahead = torch.sigmoid((s[None] - s[:, None]) / self.ranker.tau) * other
        else:
            place = torch.arange(len(s))
            ahead = ((s[None] > s[:, None]) | ((s[None] == s[:, None]) & (place[None] < place[:, None]))).double()

        def seen(entries: oracle.Entries) -> Tensor:
            object.__setattr__(entries, "ahead", ahead)
            return objective(entries)

        return self.ranker.loss(scores, gains, seen, share)


@pytest.mark.parametrize("way", ["one tile", "tiles", "reference"])
@pytest.mark.parametrize("objective", ["ndcg", "hierarchical"])
@pytest.mark.parametrize("ranker", ITEM_RANKERS)
def test_levels_are_a_matrix_of_gains(ranker, objective, way, monkeypatch):
    mine, theirs = RANKERS[ranker]
    score, want = (rg.HierarchicalAveragePrecision(), hierarchical_ap) if objective == "hierarchical" else OBJECTIVES["ndcg"]
    theirs = Spy(theirs) if objective == "hierarchical" else theirs
    if way == "tiles":
        monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: 3)
    loss = rg.RankLoss(mine, score, backend="reference" if way == "reference" else "tiled")
    for seed in range(3):
        batch = Batch(sizes=(1,), seed=seed, tied=False)
        labels, refs = labels_of(9, seed=seed), labels_of(8, seed=seed + 10)
        x, y = (leaf(batch.embeddings(9)) for _ in range(2))
        normal = y / y.norm(dim=1, keepdim=True)
        others = ~torch.eye(9, dtype=torch.bool)
        lists = oracle.score_lists(normal @ normal.t(), gain_matrix(labels, labels), others)
        ours = loss(x, relevance=rg.Levels(labels, gains=GAINS))
        assert_same(ours, oracle.rank_loss(lists, theirs, want), [x], [y], batch.weights())

        ref_x, ref_y = (leaf(batch.embeddings(8, salt=3)) for _ in range(2))
        x, y = (leaf(batch.embeddings(9)) for _ in range(2))
        scores = (y / y.norm(dim=1, keepdim=True)) @ (ref_y / ref_y.norm(dim=1, keepdim=True)).t()
        lists = oracle.score_lists(scores, gain_matrix(labels, refs))
        ours = loss(x, relevance=rg.Levels(labels, refs, gains=GAINS), ref_emb=ref_x)
        assert_same(ours, oracle.rank_loss(lists, theirs, want), [x, ref_x], [y, ref_y], batch.weights())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("ranker", [rg.Sigmoid(0.05), rg.Blackbox(20.0, 0.02), rg.UpperBound()], ids=str)
def test_the_kernels_see_the_gains(ranker):
    pytest.importorskip("triton")
    x, labels = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), labels_of(60, seed=1)
    labels[:, 0] += torch.arange(60) % 5 * 2
    found = []
    for backend in ("tiled", "triton"):
        each = x.to(DEVICE, copy=True).requires_grad_()
        loss = rg.RankLoss(ranker, rg.HierarchicalAveragePrecision(), backend=backend, precision="high")
        value = loss(each, relevance=rg.Levels(labels))
        value.backward()
        found.append((value.detach(), each.grad))
    for tiled, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, tiled, rtol=1e-4, atol=1e-6)


def test_hierarchical_ap_of_binary_relevance_is_ap():
    x, labels = torch.randn(20, 6), torch.arange(20) % 4
    for ranker in (rg.Exact(), rg.Sigmoid(0.1), rg.UpperBound()):
        plain = rg.RankLoss(ranker, rg.AveragePrecision())(x, labels)
        torch.testing.assert_close(rg.RankLoss(ranker, rg.HierarchicalAveragePrecision())(x, labels), plain)
    with pytest.raises(TypeError, match="Histogram: a bin holds items of several gains"):
        rg.RankLoss(rg.Histogram(5), rg.HierarchicalAveragePrecision())(x, labels)


def test_the_best_order_puts_finer_levels_first():
    gains = torch.tensor([[1.0, 0.5, 0.5, 0.0, 0.0]])
    loss = rg.RankLoss(rg.Exact(), rg.HierarchicalAveragePrecision())
    best = loss.from_scores(torch.tensor([[5.0, 4, 3, 2, 1]]), gains)
    assert best == 0
    # the instance behind an item of its class: (1/2 + (1/2 + 1) / 2 + 3/2 / 3) / 2
    swapped = loss.from_scores(torch.tensor([[4.0, 5, 3, 2, 1]]), gains)
    torch.testing.assert_close(1 - swapped, torch.tensor((0.5 + 1.5 / 2 + 1.5 / 3) / 2))


def test_memory_and_parts_with_levels():
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.randn(8, 5, generator=rng, dtype=torch.double) for _ in range(2))
    a, b = labels_of(8, seed=0), labels_of(8, seed=1)
    loss = rg.RankLoss(rg.Sigmoid(0.1), rg.HierarchicalAveragePrecision())
    memory = rg.EmbeddingMemory(loss, size=1)
    memory(first, rg.Levels(a))
    both = torch.cat((second, first)), torch.cat((b, a))
    wanted = loss(second, relevance=rg.Levels(b, both[1]), ref_emb=both[0], self_index=torch.arange(8))
    memory.eval()
    torch.testing.assert_close(memory(second, rg.Levels(b)), wanted)
    parts = [memory.shard_loss(second, rg.Levels(b), rows) for rows in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(sum(parts), wanted)


@pytest.mark.parametrize("tile", [None, 4])
def test_simix_mixes_items_of_the_finest_class(tile, monkeypatch):
    if tile:
        monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: tile)
    labels = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [1, 0], [0, 0]])
    x = torch.nn.functional.normalize(torch.randn(6, 4, dtype=torch.double))
    loss = rg.RankLoss(rg.Sigmoid(0.1), rg.HierarchicalAveragePrecision())
    mixed = rg.SiMix(loss, torch.Generator().manual_seed(3))
    first, second = torch.tensor([0, 0, 2, 3]), torch.tensor([2, 5, 5, 4])
    alpha = torch.rand(4, generator=torch.Generator().manual_seed(3), dtype=torch.double)[:, None]
    everyone = torch.cat((x, alpha * x[first] + (1 - alpha) * x[second]))
    plain = rg.RankLoss(rg.Sigmoid(0.1), rg.HierarchicalAveragePrecision(), normalize=False)
    wanted = plain(everyone, relevance=rg.Levels(torch.cat((labels, labels[first]))))
    torch.testing.assert_close(mixed(x, relevance=rg.Levels(labels)), wanted)


@pytest.mark.parametrize("objective", [rg.HierarchicalAveragePrecision(), rg.NDCG()])
def test_one_level_and_equal_gains_are_classes(objective):
    x, labels = torch.randn(12, 4, dtype=torch.double), labels_of(12, seed=2)
    loss = rg.RankLoss(rg.Sigmoid(0.1), objective)
    plain = rg.RankLoss(rg.Sigmoid(0.1), rg.AveragePrecision() if objective != rg.NDCG() else objective)
    wanted = plain(x, labels[:, 0].contiguous())
    for levels in (rg.Levels(labels[:, :1]), rg.Levels(labels, gains=[1, 1, 1]), rg.Levels(labels.numpy(), gains=np.ones(3))):
        torch.testing.assert_close(loss(x, relevance=levels), wanted)
    deep = rg.Levels(torch.cat((labels[:, :1], torch.zeros(12, 40, dtype=torch.long)), dim=1).tolist(), gains=torch.ones(41))
    torch.testing.assert_close(loss(x, relevance=deep), wanted)


BAD = {
    "huge gain": (lambda: rg.Levels(labels_of(4, seed=0), gains=[1.0, 2.0, 1e300]), "every gain must .* got 1e\\+300"),
    "one number": (lambda: rg.Levels(labels_of(4, seed=0), gains=1.0), r"one for each of 3 levels, got shape \(\)"),
    "references without embeddings": (
        lambda: rg.SmoothAPLoss()(torch.randn(4, 2), relevance=rg.Levels(labels_of(4, seed=0), labels_of(4, seed=0))),
        "ref_labels of Levels go with ref_emb, and there is none",
    ),
    "labels of levels": (
        lambda: rg.SmoothAPLoss()(torch.randn(4, 2), labels_of(4, seed=0)),
        r"labels must be .* pass relevance=rg.Levels\(labels\)",
    ),
    "a vector": (lambda: rg.Levels(torch.arange(4)), r"labels must be integers of shape \(items, levels\), .*\(4,\)"),
    "floats": (lambda: rg.Levels(torch.rand(4, 2)), "labels must be integers .* torch.float32"),
    "too few gains": (lambda: rg.Levels(labels_of(4, seed=0), gains=[1.0]), "one for each of 3 levels, got 1"),
    "falling gains": (lambda: rg.Levels(labels_of(4, seed=0), gains=[1.0, 0.5, 0.7]), "must not fall"),
    "gain of nothing": (lambda: rg.Levels(labels_of(4, seed=0), gains=[0.0, 0.5, 0.7]), "every gain must .* got 0.0"),
    "other levels": (lambda: rg.Levels(labels_of(4, seed=0), labels_of(4, seed=0)[:, :2]), "the 3 levels of labels, got 2"),
    "rows": (
        lambda: rg.SmoothAPLoss()(torch.randn(5, 2), relevance=rg.Levels(labels_of(4, seed=0))),
        "SmoothAPLoss: relevance: labels of Levels must be one row for each of the 5",
    ),
    "no references": (
        lambda: rg.SmoothAPLoss()(torch.randn(4, 2), relevance=rg.Levels(labels_of(4, seed=0)), ref_emb=torch.randn(3, 2)),
        "ref_labels of Levels must be one row for each of the 3 .* got none",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_levels_are_explained(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
