"""Counting against thresholds equals comparing everything with everything, whatever the scores look like."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankgrad.ops.thresholds import Thresholds

quick = settings(derandomize=True, deadline=None, max_examples=60, database=None)


def on_a_grid(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=rng) * 0.5


def heavy_tails(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng) / torch.randn(shape, generator=rng).abs()


def one_value(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.full(shape, 0.7)


def neighbours(*shape: int, rng: torch.Generator) -> Tensor:
    """A few floats next to each other, far from 0: a bucket cannot be narrower than their distance."""
    return 100 + torch.randint(-3, 4, shape, generator=rng) * 2.0**-17


def huge(*shape: int, rng: torch.Generator) -> Tensor:
    """Differences overflow in float32."""
    return torch.where(torch.rand(shape, generator=rng) < 0.5, -3e38, 3e38) * torch.rand(shape, generator=rng)


def tiny(*shape: int, rng: torch.Generator) -> Tensor:
    """Differences underflow, and the quotient of the map with them."""
    return torch.randint(-3, 4, shape, generator=rng) * 1e-45


KINDS = {
    "normal": lambda *shape, rng: torch.randn(shape, generator=rng),
    "grid": on_a_grid,
    "heavy": heavy_tails,
    "one value": one_value,
    "neighbours": neighbours,
    "huge": huge,
    "tiny": tiny,
}


def sample(kind: str, rows: int, width: int, infinite: float, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    values = KINDS[kind](rows, width, rng=rng).to(dtype)
    where = torch.rand(rows, width, generator=rng)
    return values.masked_fill(where < infinite, torch.inf).masked_fill(where > 1 - infinite, -torch.inf)


def check(thresholds: Thresholds, tile: Tensor) -> None:
    t = thresholds.values
    assert torch.equal(thresholds.num_reaching(tile).long(), (tile[:, None, :] >= t[:, :, None]).sum(dim=2))
    above = thresholds.above(tile)
    assert above.dtype == tile.dtype
    assert torch.equal(above.long(), (t[:, :, None] > tile[:, None, :]).sum(dim=1))
    earlier = torch.ones(t.shape[1], t.shape[1]).tril(-1).bool()
    ahead = (t[:, None, :] > t[:, :, None]) | ((t[:, None, :] == t[:, :, None]) & earlier)
    assert torch.equal(thresholds.ranks.long(), 1 + ahead.sum(dim=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@quick
@given(
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 3),
    rows=st.integers(1, 5),
    width=st.integers(0, 70),
    scores=st.integers(1, 300),
    infinite=st.sampled_from([0.0, 0.2, 1.0]),
    few=st.sampled_from([0, 0, 16]),
    seed=st.integers(0, 10**6),
)
@example(kinds=("one value",) * 3, rows=1, width=33, scores=300, infinite=0.0, few=0, seed=1)
@example(kinds=("normal", "normal", "heavy"), rows=1, width=70, scores=300, infinite=0.2, few=0, seed=2)
def test_counts_equal_comparing_all_with_all(dtype, kinds, rows, width, scores, infinite, few, seed):
    rng = torch.Generator().manual_seed(seed)
    before, after, tile = (
        sample(kind, rows, size, infinite, rng, dtype) for kind, size in zip(kinds, (width, width, scores), strict=True)
    )
    if width:
        tile[:, ::3] = before[:, torch.arange(len(tile[0, ::3])) % width]  # scores on thresholds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankgrad.ops.thresholds.FEW_THRESHOLDS", few)
        patch.setattr("rankgrad.ops.thresholds.BLOCK_ON_CPU", 128)
        old = Thresholds(before)
        new = old.perturbed(after)
        check(old, tile)
        check(new, tile)
        change, reached = old.crossings(new, tile)
        assert torch.equal(change, new.above(tile) - old.above(tile))
        assert torch.equal(reached, new.num_reaching(tile))
        strided = tile.t().contiguous().t()
        assert torch.equal(old.num_reaching(strided), old.num_reaching(tile))


def test_a_crowd_of_buckets_answers_without_a_search(monkeypatch):
    """Scores beyond all thresholds, by far the most in a list, must not be searched."""
    rng = torch.Generator().manual_seed(1)
    thresholds = Thresholds(torch.rand(1, 1000, generator=rng))
    searched = []
    search = type(thresholds.table).search
    monkeypatch.setattr(type(thresholds.table), "search", lambda self, p, s: searched.append(len(s)) or search(self, p, s))
    for scores in (torch.rand(1, 5000, generator=rng) - 1.001, torch.rand(1, 5000, generator=rng) + 1.001):
        thresholds.num_reaching(scores)
    assert searched == [0, 0]
    thresholds.num_reaching(torch.rand(1, 5000, generator=rng))
    assert 0 < searched[2] < 5000 // 8


def test_nan_scores_do_no_harm_to_the_others():
    tile = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    thresholds = Thresholds(tile[:, :40].clone())
    broken = tile.clone()
    broken[:, 7] = torch.nan
    others = torch.arange(100) != 7
    assert torch.equal(thresholds.above(broken)[:, others], thresholds.above(tile)[:, others])
