"""Two towers in both directions: the mean of two calls, with one product for both."""

import pytest
import torch
from losses.combinations import RANKERS, assert_same, leaf

import rankgrad as rg
from rankgrad.ops.sources import EmbeddingScores

RNG = torch.Generator().manual_seed(0)
A, B = torch.randn(11, 5, generator=RNG, dtype=torch.double), torch.randn(14, 5, generator=RNG, dtype=torch.double)
IDS, B_IDS = torch.tensor([7, 3, 3, 9, 1, 1, 1, 0, 5, 7, 8]), torch.tensor([1, 3, 4, 7, 7, 3, 0, 0, 0, 9, 2, 1, 7, 6])
LISTED = (IDS[:, None] == B_IDS) & (torch.rand(11, 14, generator=RNG) < 0.8)
PAIRS = rg.Pairs(*LISTED.nonzero(as_tuple=True), torch.randint(1, 4, (int(LISTED.sum()),), generator=RNG))
LEVELS = rg.Levels(torch.stack((IDS % 3, IDS), dim=1), torch.stack((B_IDS % 3, B_IDS), dim=1))


def two_calls(loss, a, b, kind):
    if kind == "ids":
        return loss(a, IDS, b, B_IDS), loss(b, B_IDS, a, IDS)
    back = rg.Pairs(PAIRS.item, PAIRS.query, PAIRS.gain) if kind == "pairs" else rg.Levels(LEVELS.ref_labels, LEVELS.labels)
    forth = PAIRS if kind == "pairs" else LEVELS
    return loss(a, relevance=forth, ref_emb=b), loss(b, relevance=back, ref_emb=a)


def one_call(loss, a, b, kind):
    if kind == "ids":
        return rg.both_ways(loss)(a, b, IDS, B_IDS)
    return rg.both_ways(loss)(a, b, relevance=PAIRS if kind == "pairs" else LEVELS)


@pytest.mark.parametrize("way", ["tiles", "one tile", "reference"])
@pytest.mark.parametrize("kind", ["ids", "pairs", "levels"])
@pytest.mark.parametrize("ranker", RANKERS)
def test_both_ways_are_two_calls(ranker, kind, way, monkeypatch):
    if way == "tiles":
        monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: 4)
    options = {"backend": "reference" if way == "reference" else "auto"}
    upstream = torch.tensor(1.5, dtype=torch.double)
    for reduction in ("mean", "none"):
        loss = rg.RankLoss(RANKERS[ranker][0], rg.NDCG(), reduction=reduction, **options)
        a, b, c, d = leaf(A), leaf(B), leaf(A), leaf(B)
        forth, back = two_calls(loss, c, d, kind)
        wanted = (forth + back) / 2 if reduction == "mean" else torch.cat((forth, back))
        assert_same(one_call(loss, a, b, kind), wanted, [a, b], [c, d], upstream)


@pytest.mark.parametrize("empty_query", ["skip", "zero"])
def test_the_weights_make_the_mean(empty_query, monkeypatch):
    monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: 4)
    both = {kind: rg.both_ways(rg.SmoothAPLoss(reduction=kind, empty_query=empty_query)) for kind in ("mean", "none")}
    mean, losses = both["mean"](A, B, IDS, B_IDS), both["none"](A, B, IDS, B_IDS)
    torch.testing.assert_close((losses * both["none"].query_weights).sum(), mean)
    together = IDS[:, None] == B_IDS
    assert int(both["mean"].used_queries) == int(together.any(1).sum() + together.any(0).sum())


def test_products_are_shared(monkeypatch):
    """Scores are computed once: half of the products that two calls make."""
    monkeypatch.setattr("rankgrad.ops.tile_layout.tile_side", lambda device: 4)
    seen = []
    tiles = EmbeddingScores._tile_pairs

    def counted(self):
        for pair in tiles(self):
            seen.append(1)
            yield pair

    monkeypatch.setattr(EmbeddingScores, "_tile_pairs", counted)
    rg.both_ways(rg.SmoothAPLoss())(leaf(A), leaf(B), IDS, B_IDS).backward()
    once = len(seen)
    seen.clear()
    sum(two_calls(rg.SmoothAPLoss(), leaf(A), leaf(B), "ids")).backward()
    assert len(seen) == 2 * once


def test_a_compiled_step_is_one_graph():
    torch._dynamo.reset()
    tower, both = torch.nn.Linear(5, 3).double(), rg.both_ways(rg.SmoothAPLoss())
    value = both(tower(A), B[:, :3], IDS, B_IDS)
    wanted = torch.autograd.grad(value, tower.weight)[0]
    compiled = torch.compile(lambda x: both(tower(x), B[:, :3], IDS, B_IDS), fullgraph=True, backend="aot_eager")
    found = compiled(A)
    torch.testing.assert_close((found, torch.autograd.grad(found, tower.weight)[0]), (value, wanted))
    torch._dynamo.reset()


def test_bad_input_is_explained():
    with pytest.raises(TypeError, match="both_ways: loss must be a RankLoss, got SiMix"):
        rg.both_ways(rg.SiMix(rg.SmoothAPLoss()))
    loss = rg.both_ways(rg.SmoothAPLoss())
    with pytest.raises(
        ValueError, match=r"both_ways: second_ids must be one per row of second, shape \(14,\), got shape \(11,\)"
    ):
        loss(A, B, IDS)
    with pytest.raises(TypeError, match="both_ways: give either ids or relevance, got neither"):
        loss(A, B)
