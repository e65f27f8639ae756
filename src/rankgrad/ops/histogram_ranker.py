"""Ranks at the bins of a soft histogram. See `rankers` for what a ranker does."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.ops.autograd import PositiveScores, Ranks, Upstream
from rankgrad.ops.rankers import Ranker, TileMap
from rankgrad.ops.tile_memory import TileMemory

# Rank at a bin centre that no candidate has reached, where mass and rank among the positives are 0.
SMALLEST_RANK = 1e-30

# Up to here a pass over a tile for each bin, which serves both of its roles, beats a scatter for each role; measured on a CPU.
FEW_BINS = 14

# Bins of all scores of a tile that are made at once, which takes the fewest operations: 2**18 float32 are 1 MiB.
ALL_AT_ONCE = 2**18


@dataclass(frozen=True)
class Histogram(Ranker):
    """Ranks at the bins of a soft histogram (FastAP): `bins` intervals, so bins + 1 centres, from `high` down to `low`.

    A score gives its mass to the two centres it lies between. The default range is that of the cosine, where the
    centres are FastAP's on the squared distance 2 - 2s in [0, 4]. Scores outside the range count at its ends and get
    no gradient.
    """

    bins: int
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_count(self.bins, name="bins", caller="Histogram")
        if not self.low < self.high:
            raise ValueError(f"Histogram: low must be below high, got low={self.low!r}, high={self.high!r}")

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.bins

    def _height_(self, scores: Tensor) -> Tensor:
        """In place the distance from `low` in bins, in [0, bins]: 0 for hidden entries, the full height for NaN."""
        bins = scores.new_full((), self.bins)  # filled on the device: a copy from the host could not be captured
        torch.add(bins, scores.sub_(self.high), alpha=1 / self.width, out=scores)  # exact at `high`, where duplicates are
        return scores.clamp_(0, self.bins).nan_to_num_(nan=self.bins)

    def thresholds(self, positives: PositiveScores, key: int) -> None:
        return None

    def tile_map(self, thresholds: list[None]) -> tuple[TileMap, list[None]]:
        return self._height_, thresholds

    def count_tile(self, tile: Tensor, thresholds: None, key: int, memory: TileMemory) -> Tensor:
        """[B, bins] cumulative histogram at every centre but the last, where all candidates are counted."""
        if self.bins * tile.numel() <= ALL_AT_ONCE:
            below = torch.arange(self.bins - 1, -1, -1, dtype=tile.dtype, device=tile.device)[:, None, None]
            return (tile - below).clamp_(0, 1).sum(dim=2).t()
        if self.bins <= FEW_BINS:
            return self._cut_off(tile, [1], memory)[0]
        tile = tile.contiguous()  # scatter walks over rows, and a transposed tile is strided
        cell = memory.like(tile, "cell", torch.int64)
        cell.copy_(memory.like(tile, "narrow", self._index_dtype).copy_(tile))  # in one step it is not vectorised
        size = (tile.shape[0], self.bins + 1)
        items = tile.new_zeros(size).scatter_add_(1, cell, tile.new_ones(()).expand_as(tile))
        above = tile.new_zeros(size).scatter_add_(1, cell, torch.frac(tile, out=memory.like(tile, "above")))
        # all of the cells above a centre, exactly, and of the cell below what belongs to the centre
        return items.cumsum(dim=1).neg_().add_(tile.shape[1]).add_(above)[:, :-1].flip(1)

    def count_roles(self, tile: Tensor, thresholds: list[None], keys: list[int], memory: TileMemory) -> list[Tensor]:
        if len(thresholds) == 1 or self.bins > FEW_BINS:
            return super().count_roles(tile, thresholds, keys, memory)
        return self._cut_off(tile, [1, 0], memory)

    def _cut_off(self, tile: Tensor, dims: list[int], memory: TileMemory) -> list[Tensor]:
        """For each dimension that is summed over [B, bins] what scores have above a centre and not above the next one up."""
        sums = [tile.new_zeros(self.bins + 1, tile.shape[1 - dim]) for dim in dims]
        above = memory.like(tile, "above")
        summed = [(above if dim else above.t(), total.unbind()[1:]) for dim, total in zip(dims, sums, strict=True)]
        for centre in range(self.bins):
            torch.ops.aten.softshrink.out(tile, self.bins - 1 - centre, out=above)
            for rows, totals in summed:
                memory.sum_rows(rows, out=totals[centre])
        return [total.diff(dim=0).t() for total in sums]

    @property
    def _index_dtype(self) -> torch.dtype:
        """Of numbers up to 2 * bins."""
        return torch.int8 if 2 * self.bins <= torch.iinfo(torch.int8).max else torch.int32

    def kept_tile(self, tile: Tensor, memory: TileMemory) -> Tensor:
        """An odd number between two centres, an even one on a centre."""
        ceil = torch.ceil(tile, out=memory.like(tile, "above"))
        return tile.to(self._index_dtype).add_(memory.like(tile, "narrow", self._index_dtype).copy_(ceil))

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: None) -> Ranks:
        irrelevant = (positives.list_length - positives.num_relevant).to(counts.dtype)
        mass, gain = self._masses(positives, positives.scores)
        positive_rank = mass.cumsum(dim=1)
        # objectives divide by ranks, and at a centre that nothing has reached yet the rank is 0
        rank = (torch.cat((counts, irrelevant[:, None]), dim=1) + positive_rank).clamp_(min=SMALLEST_RANK)
        return positives.as_ranks(rank, positive_rank, mass, gain)

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        raise TypeError("Histogram: a bin holds items of several gains, so it has no graded rank; use another ranker")

    def _masses(self, positives: PositiveScores, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[B, bins + 1] mass and gain of the relevant items at every centre, by their definition."""
        valid = positives.valid
        scores = scores if valid is None else scores.masked_fill(~valid, self.low)
        position = (self.high - scores).div(self.width).clamp(0, self.bins)
        centres = torch.arange(self.bins + 1, dtype=position.dtype, device=position.device)
        pulse = (1 - (position[:, :, None] - centres).abs()).clamp(min=0)
        pulse = pulse if valid is None else pulse * valid[:, :, None]
        mass = pulse.sum(dim=1)
        return mass, mass if positives.gains is None else (pulse * positives.gains[:, :, None]).sum(dim=1)

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: None, upstream: Upstream
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        d_ranks = tuple((g * upstream.grad_loss).to(positives.scores.dtype) for g in d_ranks)
        # on a centre, and so at the ends and where hidden, the pulses have a kink and the gradient is taken as 0
        table = d_ranks[0].new_zeros(len(d_ranks[0]), 2 * self.bins + 1)
        table[:, 1::2] = d_ranks[0][:, :-1].flip(1) / self.width
        return table, d_ranks

    def tile_backward(
        self,
        tile: Tensor,
        thresholds: None,
        rank_grad: tuple[Tensor, tuple[Tensor, ...]],
        key: int,
        gradient: Tensor,
        memory: TileMemory,
        *,
        add: bool,
    ) -> None:
        table = rank_grad[0]
        slope = memory.like(tile, "slope", table.dtype) if add else gradient
        if tile.is_contiguous():
            torch.gather(table, 1, memory.like(tile, "index", torch.int64).copy_(tile), out=slope)
        else:  # in the order of memory, in which a gather would be slower
            entries = torch.arange(0, table.numel(), table.shape[1], dtype=torch.int32, device=table.device)
            index = memory.like(tile, "narrow index", torch.int32).copy_(tile).add_(entries[:, None])
            torch.index_select(table.view(-1), 0, index.t().view(-1), out=slope.t().view(-1))
        if add:
            gradient += slope

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: tuple[Tensor, tuple[Tensor, ...]],
        positives: PositiveScores,
        thresholds: None,
        upstream: Upstream,
    ) -> Tensor:
        d_rank, d_positive_rank, d_mass, d_gain = rank_grad[1]
        # a mass counts at its own centre and in the ranks at all later ones
        d_mass = d_mass + (d_rank + d_positive_rank).flip(1).cumsum(dim=1).flip(1)
        position = self.bins - self._height_(positives.scores.clone())  # padding lies on the first centre
        cell = position.floor()
        index = cell.long().clamp_(max=self.bins - 1)
        # between two centres mass moves from one to the next; on a centre the pulses have a kink, see `tile_backward`
        if positives.gains is None:
            moved = (d_mass + d_gain).diff(dim=1).gather(1, index)
        else:
            moved = d_mass.diff(dim=1).gather(1, index) + positives.gains * d_gain.diff(dim=1).gather(1, index)
        return moved.mul_(position.sub_(cell).sign_()).mul_(-1 / self.width)
