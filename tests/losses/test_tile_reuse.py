"""What tiles share: work done once for all comparisons, and tiles kept from the forward to the backward pass."""

import pytest
import torch
from losses.combinations import RANKERS

import rankgrad
from rankgrad.ops import histogram_ranker, sources, tile_layout, tiled_source
from rankgrad.ops.autograd import PositiveScores
from rankgrad.ops.labels import Labels
from rankgrad.ops.tile_memory import TileMemory

each_ranker = pytest.mark.parametrize("ranker", RANKERS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tile_layout, "tile_side", lambda device: 16)


def batch(items=75, dim=12, spread=1.0):
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, items // 4, (items,), generator=generator)
    centres = torch.randn(items, dim, generator=generator)
    return (centres[labels] + torch.randn(items, dim, generator=generator)) * spread, labels


def value_and_gradient(loss, embeddings, labels):
    leaf = embeddings.clone().requires_grad_()
    value = loss(leaf, labels)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def relative_error(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@each_ranker
def test_kept_tiles_change_no_bit(ranker, monkeypatch):
    loss = rankgrad.RankLoss(RANKERS[ranker][0], rankgrad.AveragePrecision())
    kept = value_and_gradient(loss, *batch())
    monkeypatch.setattr(tiled_source, "KEPT_BYTES", 3 * 16 * 16 * 4)  # the first three tiles
    some = value_and_gradient(loss, *batch())
    monkeypatch.setattr(tiled_source, "KEPT_BYTES", 0)
    none = value_and_gradient(loss, *batch())
    for found in (some, none):
        assert torch.equal(found[0], kept[0])
        assert torch.equal(found[1], kept[1])


def test_no_more_is_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(tiled_source, "KEPT_BYTES", 5 * 16 * 16 * 4)
    held = []
    backward = tiled_source.TiledSource.backward

    def watched(source, *args):
        held.append(sum(tile.numel() * tile.element_size() for tile in source.kept.values()))
        result = backward(source, *args)
        held.append(len(source.kept))
        return result

    monkeypatch.setattr(tiled_source.TiledSource, "backward", watched)
    value_and_gradient(rankgrad.SmoothAPLoss(), *batch())
    assert 4 * 16 * 16 * 4 <= held[0] <= 5 * 16 * 16 * 4
    assert held[1] == 0


def test_without_a_gradient_nothing_is_kept(monkeypatch):
    made = []
    monkeypatch.setattr(tiled_source.TiledSource, "__init__", _recording(tiled_source.TiledSource.__init__, made))
    embeddings, labels = batch()
    rankgrad.SmoothAPLoss()(embeddings, labels)
    assert len(made) == 1
    assert not made[0].kept


def _recording(init, made):
    def wrapper(self):
        made.append(self)
        init(self)

    return wrapper


@each_ranker
def test_a_second_backward_computes_tiles_again(ranker):
    loss = rankgrad.RankLoss(RANKERS[ranker][0], rankgrad.AveragePrecision())
    embeddings, labels = batch()
    leaf = embeddings.requires_grad_()
    value = loss(leaf, labels)
    first, second = (torch.autograd.grad(value, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@each_ranker
@pytest.mark.parametrize("most", [0, 2, 16])
def test_positives_in_tiles_on_the_diagonal(ranker, most, monkeypatch):
    """Some classes end with a row block, some are too large for that; of some row blocks the tile does not stay."""
    monkeypatch.setattr(tile_layout, "OWN_SCORES", most * 16 * 16)
    layouts, layout_of = [], tile_layout.TileLayout.of
    monkeypatch.setattr(tile_layout.TileLayout, "of", lambda *args: layouts.append(layout_of(*args)) or layouts[-1])
    made = []
    monkeypatch.setattr(tiled_source.TiledSource, "__init__", _recording(tiled_source.TiledSource.__init__, made))
    embeddings, labels = batch(items=150)
    labels[:60] = labels[:60] // 4 * 4  # a few classes of many items
    objective = rankgrad.AveragePrecision()
    wanted, found = (
        value_and_gradient(rankgrad.RankLoss(RANKERS[ranker][0], objective, backend=backend), embeddings.double(), labels)
        for backend in ("reference", "tiled")
    )
    assert abs(found[0] - wanted[0]) < 1e-9
    assert (found[1] - wanted[1]).norm() <= 1e-9 * wanted[1].norm()
    (layout,), (source,) = layouts, made
    assert sum(layout.own) <= most
    assert not all(layout.own)
    assert any(layout.own) == bool(most)
    assert [rows.start for rows in layout.row_blocks[1:]] == [rows.stop for rows in layout.row_blocks[:-1]]
    assert max(rows.stop - rows.start for rows in layout.row_blocks) <= 16 + 16 // 4
    assert not source.own_scores
    assert not source.own_grads


@pytest.mark.parametrize("dim", [2, 12])
def test_one_exponential_a_score_is_as_good_as_one_a_comparison(dim, monkeypatch):
    embeddings, labels = batch(items=150, dim=dim)
    loss = rankgrad.RecallAtKLoss()
    wanted = value_and_gradient(rankgrad.RecallAtKLoss(backend="reference"), embeddings.double(), labels)
    maps = []
    tile_map = rankgrad.Sigmoid.tile_map
    monkeypatch.setattr(rankgrad.Sigmoid, "tile_map", lambda *args: maps.append(tile_map(*args)) or maps[-1])
    mapped = value_and_gradient(loss, embeddings, labels)
    monkeypatch.setattr(rankgrad.Sigmoid, "tile_map", lambda ranker, thresholds: (None, thresholds))
    direct = value_and_gradient(loss, embeddings, labels)
    # cosines of two dimensions are anywhere in [-1, 1], which is too far for float32 where a tile meets both ends
    assert {each is None for each, _ in maps} == ({True, False} if dim == 2 else {False})
    assert abs(mapped[0] - wanted[0]) < 1e-6
    assert relative_error(mapped[1], wanted[1]) < max(3 * relative_error(direct[1], wanted[1]), 1e-6)
    assert relative_error(direct[1], wanted[1]) < 1e-4


@pytest.mark.parametrize("spread", [1e-3, 0.1, 0.5])
def test_scores_of_any_size(spread):
    """From differences that a sigmoid hardly notices to some far beyond what an exponential holds."""
    embeddings, labels = batch(spread=spread)
    wanted = value_and_gradient(rankgrad.SmoothAPLoss(normalize=False, backend="reference"), embeddings.double(), labels)
    found = value_and_gradient(rankgrad.SmoothAPLoss(normalize=False), embeddings, labels)
    assert abs(found[0] - wanted[0]) < 1e-5
    assert relative_error(found[1], wanted[1]) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_get_no_subnormal_numbers(dtype, monkeypatch):
    tiny, gradients = torch.finfo(dtype).tiny, []
    cleaned = sources.without_subnormal_
    monkeypatch.setattr(sources, "without_subnormal_", lambda g: gradients.append(cleaned(g)) or gradients[-1])
    embeddings, labels = batch()
    value_and_gradient(rankgrad.RecallAtKLoss(tau_rank=0.003), embeddings.to(dtype), labels)
    assert gradients
    assert all(((g == 0) | (g.abs() >= tiny)).all() for g in gradients)
    given = torch.tensor([0.0, 1e-300 if dtype == torch.float64 else 1e-38, -1e-3, 1e-20], dtype=dtype)
    assert cleaned(given).tolist() == [0.0, 0.0, *given[2:].tolist()]


@pytest.mark.parametrize("mapped", [True, False])
def test_slopes_are_not_subnormal_however_small_a_weight(mapped):
    """A product of two small numbers may be, and is a hundred times as slow as others."""
    ranker, limits = rankgrad.Sigmoid(0.01), torch.finfo(torch.float32)
    thresholds = ranker.thresholds(_positives(torch.tensor([[-0.2, 0.9], [0.1, 0.5]])), 0)
    tile = torch.linspace(-0.9, 0.9, 512).expand(2, -1).clone()
    tile[:, 7] = -torch.inf
    tile_map, (compared_with,) = ranker.tile_map([thresholds]) if mapped else (None, [thresholds])
    weights = torch.tensor([[limits.eps**2, 1.0], [limits.eps**1.5, limits.eps]])
    compared = tile.clone() if tile_map is None else tile_map(tile.clone())
    gradient = torch.empty_like(tile)
    d_thresholds = ranker.tile_backward(compared, compared_with, (weights, weights), 0, gradient, TileMemory(), add=False)
    assert ((gradient == 0) | (gradient.abs() >= limits.tiny)).all()
    ahead = torch.sigmoid((tile.double() - thresholds.columns.double()[:, :, None]) / 0.01)
    slopes = weights.double()[:, :, None] * ahead * (1 - ahead)
    assert (gradient - slopes.sum(dim=0)).abs().max() < 1e-6
    assert (d_thresholds.t() + slopes.sum(dim=2)).abs().max() < 1e-5
    assert (ranker.count_tile(compared, compared_with, 0, TileMemory()).t() - ahead.sum(dim=2)).abs().max() < 1e-3


def _positives(scores):
    count = torch.full((len(scores),), scores.shape[1])
    return PositiveScores(scores, None, None, num_relevant=count, list_length=count + 600, rank_dtype=torch.float32)


@pytest.mark.parametrize("rank_self", [True, False])
@pytest.mark.parametrize("in_batch", [True, False])
def test_a_few_hidden_scores_are_those_that_a_mask_would_hide(in_batch, rank_self):
    generator = torch.Generator().manual_seed(3)
    labels, ref_labels = (torch.randint(0, 20, (80,), generator=generator) for _ in range(2))
    relevance = Labels(labels, None if in_batch else ref_labels, rank_self=rank_self).build()
    width, rows = int(relevance.num_relevant.max()), slice(10, 50)
    whole, parts = torch.zeros(40, 80), torch.zeros(40, 80)
    relevance.hide_(whole, rows, slice(0, 80), width)
    assert width < 80 // 8
    for first in range(0, 80, 16):
        columns = slice(first, first + 16)
        relevance.hide_(parts[:, columns], rows, columns, width)
    assert torch.equal(whole, parts)
    assert (whole == -torch.inf).sum() == relevance.num_relevant[rows].sum() + (40 if in_batch and not rank_self else 0)


@pytest.mark.parametrize("bins", [1, 10, 70])
@pytest.mark.parametrize("roles", [1, 2])
@pytest.mark.parametrize("at_once", [0, 2**20])
def test_a_histogram_counts_a_tile_in_each_role(bins, roles, at_once, monkeypatch):
    """By whichever way is fast for so many bins; scores at both ends, on a centre, hidden, out of range."""
    monkeypatch.setattr(histogram_ranker, "ALL_AT_ONCE", at_once)
    ranker = rankgrad.Histogram(bins)
    scores = torch.rand(40, 56, generator=torch.Generator().manual_seed(1)) * 2.2 - 1.1
    scores[3, :5] = torch.tensor([1.0, -1.0, 0.0, -torch.inf, 5.0])
    tile_map, compared = ranker.tile_map([None] * roles)
    counts = ranker.count_roles(tile_map(scores.clone()), compared, [0] * roles, TileMemory())
    position = ((1 - scores.double()) * (bins / 2)).clamp(0, bins)
    for found, of_role in zip(counts, (position, position.t()), strict=False):
        wanted = torch.stack([(centre + 1 - of_role).clamp(0, 1).sum(dim=1) for centre in range(bins)], dim=1)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5 * bins, rtol=1e-6)
    assert len(counts) == roles


def test_a_histogram_keeps_a_byte_of_a_score(monkeypatch):
    held = []
    backward = tiled_source.TiledSource.backward
    monkeypatch.setattr(
        tiled_source.TiledSource, "backward", lambda source, *args: held.append(dict(source.kept)) or backward(source, *args)
    )
    value_and_gradient(rankgrad.FastAPLoss(), *batch())
    assert len(held[0]) == 15
    assert all(tile.element_size() == 1 for tile in held[0].values())


def test_tiles_take_turns_in_memory():
    memory, tile = TileMemory(), torch.rand(4, 6)
    first = memory.like(tile, "a")
    assert memory.like(tile, "a").data_ptr() == first.data_ptr()
    assert memory.like(tile[:2].contiguous(), "a").data_ptr() == first.data_ptr()
    assert memory.like(tile, "b").data_ptr() != first.data_ptr()
    assert memory.like(tile.t(), "a").stride() == tile.t().stride()
    assert memory.like(tile[:, ::2], "a").is_contiguous()
    memory.forget("a")
    assert memory.like(tile, "a").data_ptr() != first.data_ptr()
