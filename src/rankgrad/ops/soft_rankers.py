"""Steps that are smooth: `Sigmoid`, and `UpperBound`, whose slope does not vanish. See `rankers` for what a ranker does."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankgrad._checks import check_not_negative, check_positive
from rankgrad.ops.autograd import PositiveScores, Ranks, Upstream
from rankgrad.ops.exact_rankers import proper_ranks
from rankgrad.ops.graded_ranks import sigmoid_graded_rank
from rankgrad.ops.rankers import Ranker, TileMap
from rankgrad.ops.thresholds import SigmoidThresholds, Thresholds, smallest_step
from rankgrad.ops.tile_memory import TileMemory

# Thresholds of a batch of one tile that are compared all at once: for a small batch few operations matter, else the cache.
FEW_THRESHOLDS_AT_ONCE = 2**10

# Sigmoids of one tile that are kept for the backward pass: 2**20 float32 are 4 MiB, and a sigmoid is most of a tile's work.
KEPT_SIGMOIDS = 2**20

# Comparisons of positives with each other that exist at once: 2**22 float32 are 16 MiB.
MOST_COMPARISONS = 2**22


@dataclass(frozen=True)
class Sigmoid(Ranker):
    """Soft ranks: the step is a logistic of temperature `tau` (RS@k eq. 5, Smooth-AP). Tends to `Exact` as tau -> 0."""

    grad_fields = ("rank", "positive_rank")

    tau: float

    def __post_init__(self) -> None:
        check_positive(self.tau, name="tau", caller="Sigmoid")

    def thresholds(self, positives: PositiveScores, key: int) -> SigmoidThresholds:
        columns = positives.scores.t().contiguous()
        return SigmoidThresholds(columns, keep=positives.one_tile and columns.numel() <= FEW_THRESHOLDS_AT_ONCE)

    def tile_map(self, thresholds: list[SigmoidThresholds]) -> tuple[TileMap | None, list[SigmoidThresholds]]:
        """One exponential of a score and not one of each comparison: with f = e^-t and x = e^-s a sigmoid is f / (f + x).

        Scores are taken from the middle of the thresholds. Where an exponential ends every sigmoid must be 0 or 1 to the last
        bit, so these must not be too far apart: in float32 131 tau, which is 1.3 for tau = 0.01.
        """
        columns = thresholds[0].columns
        if columns.device.type != "cpu" or any(of_block.keep for of_block in thresholds):
            return None, thresholds
        limits = torch.finfo(columns.dtype)
        end = math.log(limits.max) - 2
        room = end + math.log(limits.eps) - 5
        low, high = min(t.extent[0] for t in thresholds), max(t.extent[1] for t in thresholds)
        if not 0 <= high - low <= 2 * room * self.tau:
            return None, thresholds
        middle, scale = (low + high) / 2, 1 / self.tau
        shift = columns.new_tensor(middle * scale)

        def exponentials_(scores: Tensor) -> Tensor:  # of a hidden score, -inf, it is inf, and its sigmoid 0
            return torch.sub(shift, scores, alpha=scale, out=scores).clamp_(min=-end).exp_()

        columns_of = (t.columns.nan_to_num(posinf=middle)[:, :, None] for t in thresholds)
        return exponentials_, [replace(t, exponentials=exponentials_(c)) for t, c in zip(thresholds, columns_of, strict=True)]

    def _steps_(self, differences: Tensor) -> Tensor:
        """In place their sigmoids, none below `smallest_step`."""
        return differences.mul_(1 / self.tau).clamp_(min=math.log(smallest_step(differences))).sigmoid_()

    def _ahead(self, tile: Tensor, thresholds: SigmoidThresholds, out: Tensor) -> Iterator[Tensor]:
        """Sigmoids of a tile less each threshold, one after another in the same memory."""
        if thresholds.exponentials is None:
            for each in thresholds.columns[:, :, None].unbind():
                yield self._steps_(torch.sub(tile, each, out=out))
        else:
            for each, most in thresholds.bounds:
                yield torch.div(each, torch.minimum(tile, most, out=out).add_(each), out=out)

    def count_tile(self, tile: Tensor, thresholds: SigmoidThresholds, key: int, memory: TileMemory) -> Tensor:
        if thresholds.keep and thresholds.columns.shape[0] * tile.numel() <= KEPT_SIGMOIDS:
            thresholds.tile = self._steps_(tile - thresholds.columns[:, :, None])
            return thresholds.tile.sum(dim=2).t()
        scratch, counts = memory.like(tile, "ahead"), torch.empty_like(thresholds.columns)
        if thresholds.exponentials is None:
            for ahead, count in zip(self._ahead(tile, thresholds, scratch), counts.unbind(), strict=True):
                memory.sum_rows(ahead, out=count)
            return counts.t()
        four = tile.new_tensor(4.0)
        # what all terms of a sum share is taken out of it, but for so much that no term is subnormal
        for (each, _), count in zip(thresholds.bounds, counts.unbind(), strict=True):
            memory.sum_rows(torch.div(four, torch.add(tile, each, out=scratch), out=scratch), out=count)
        return counts.mul_(thresholds.exponentials[:, :, 0] / four).t()

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: SigmoidThresholds) -> Ranks:
        # an item ahead of itself counts sigmoid(0) = 1/2
        among = _joined([ahead.sum(dim=2) for _, ahead in self._among(positives, thresholds)])
        return positives.item_ranks(*positives.add_counts(counts, among + 0.5))

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        return sigmoid_graded_rank(scores, positives, self.tau)

    def _among(self, positives: PositiveScores, thresholds: SigmoidThresholds) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and how far each positive of a row is ahead of each other [b, item, other], a few rows at a time."""
        if thresholds.among is not None:
            yield slice(None), thresholds.among
            return
        tile, inverse = positives.as_tile, 1 / self.tau
        step = max(MOST_COMPARISONS // max(tile.shape[1], 1) ** 2, 1)
        for start in range(0, tile.shape[0], step):
            rows = slice(start, start + step)
            ahead = (tile[rows, None, :] - positives.scores[rows, :, None]).mul_(inverse).sigmoid_()
            if thresholds.keep and ahead.numel() <= KEPT_SIGMOIDS and step >= tile.shape[0]:
                thresholds.among = ahead
            yield rows, ahead

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: SigmoidThresholds, upstream: Upstream
    ) -> tuple[Tensor, Tensor]:
        """[P, B] weights of irrelevant candidates and of positives that are ahead, over tau."""
        scale = upstream.grad_loss / self.tau
        d_rank, d_positive_rank = (positives.fill(g * scale, 0) for g in d_ranks)
        # a positive ahead moves both ranks; an irrelevant candidate only the rank among all
        dtype = positives.scores.dtype
        return _without_negligible(d_rank.to(dtype)).t().contiguous(), (d_rank + d_positive_rank).to(dtype).t()

    def tile_backward(
        self,
        tile: Tensor,
        thresholds: SigmoidThresholds,
        rank_grad: tuple[Tensor, Tensor],
        key: int,
        gradient: Tensor,
        memory: TileMemory,
        *,
        add: bool,
    ) -> Tensor:
        if thresholds.tile is not None:
            slope = torch.ops.aten.sigmoid_backward(rank_grad[0][:, :, None], thresholds.tile)
            torch.sum(slope, dim=0, out=gradient)  # the only tile
            d_thresholds: Tensor = slope.sum(dim=2)
            return d_thresholds.neg_().t()
        scratch, d_thresholds = memory.like(tile, "ahead"), torch.empty_like(thresholds.columns)
        weights = rank_grad[0][:, :, None]
        ahead = self._ahead(tile, thresholds, scratch)
        for each, weight, d_threshold in zip(ahead, weights.unbind(), d_thresholds.unbind(), strict=True):
            slope = torch.ops.aten.sigmoid_backward.grad_input(weight, each, grad_input=scratch if add else gradient)
            if add:
                gradient += slope
            memory.sum_rows(slope, out=d_threshold)
            add = True
        if not add:  # there are no thresholds
            gradient.zero_()
        return d_thresholds.neg_().t()

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: tuple[Tensor, Tensor],
        positives: PositiveScores,
        thresholds: SigmoidThresholds,
        upstream: Upstream,
    ) -> Tensor:
        weights = rank_grad[1].t()
        assert d_thresholds is not None, "every tile adds to the thresholds' gradient"
        parts = []
        for rows, ahead in self._among(positives, thresholds):
            slope = torch.ops.aten.sigmoid_backward(weights[rows, :, None], ahead)
            parts.append(slope.sum(dim=1) - slope.sum(dim=2))  # as the item ahead, and as the one compared with
        return d_thresholds + _joined(parts)


@dataclass(frozen=True)
class UpperBound(Ranker):
    """Ranks that are never too small: the step is replaced by an upper bound whose gradient does not vanish (ROADMAP, SupRank).

    For an irrelevant candidate that is t = s_z - s_x ahead of a relevant one the step becomes

        sigmoid(t / tau)                                          t <= 0
        sigmoid(t / tau) + 1/2                                    0 < t <= delta
        rho (t - delta) + sigmoid(delta / tau) + 1/2              delta < t

    so a candidate that is far ahead is pulled back with slope `rho`, where the slope of `Sigmoid` is 0. Relevant items are
    counted exactly, ties as by `Exact`, and the rank among the relevant carries no gradient.
    """

    grad_fields = ("rank",)

    tau: float = 0.01
    rho: float = 100.0
    delta: float = 0.05

    def __post_init__(self) -> None:
        check_positive(self.tau, name="tau", caller="UpperBound")
        check_not_negative(self.rho, name="rho", caller="UpperBound")
        check_not_negative(self.delta, name="delta", caller="UpperBound")

    @property
    def offset(self) -> float:
        """The bound at delta, where its linear part begins."""
        return 0.5 + 1 / (1 + math.exp(-self.delta / self.tau))

    def thresholds(self, positives: PositiveScores, key: int) -> Thresholds:
        return Thresholds(positives.scores)

    def _compared(self, tile: Tensor, columns: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """A few thresholds at a time: which, how far the tile is ahead of them [p, B, Z], and the sigmoid of that."""
        step = max(KEPT_SIGMOIDS // max(tile.numel(), 1), 1)
        for start in range(0, columns.shape[0], step):
            part = slice(start, start + step)
            ahead = tile - columns[part, :, None]
            yield part, ahead, (ahead * (1 / self.tau)).sigmoid_()

    def count_tile(self, tile: Tensor, thresholds: Thresholds, key: int, memory: TileMemory) -> Tensor:
        counts = tile.new_zeros(thresholds.columns.shape)
        for part, ahead, soft in self._compared(tile, thresholds.columns):
            bound = torch.where(
                ahead > self.delta, (ahead - self.delta) * self.rho + self.offset, soft.add_(ahead > 0, alpha=0.5)
            )
            counts[part] = bound.sum(dim=2)
        return counts.t()

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*proper_ranks(counts, thresholds, positives))

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Thresholds, upstream: Upstream
    ) -> Tensor:
        """[P, B] weights of irrelevant candidates, over tau."""
        weights = positives.fill(d_ranks[0] * (upstream.grad_loss / self.tau), 0)
        return weights.to(positives.scores.dtype).t().contiguous()

    def tile_backward(
        self,
        tile: Tensor,
        thresholds: Thresholds,
        rank_grad: Tensor,
        key: int,
        gradient: Tensor,
        memory: TileMemory,
        *,
        add: bool,
    ) -> Tensor:
        d_thresholds = torch.zeros_like(rank_grad)
        if not add:
            gradient.zero_()
        for part, ahead, soft in self._compared(tile, thresholds.columns):
            slope = torch.where(ahead > self.delta, self.rho * self.tau, soft * (1 - soft)) * rank_grad[part, :, None]
            gradient += slope.sum(dim=0)
            d_thresholds[part] = -slope.sum(dim=2)
        return d_thresholds.t()

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: Tensor,
        positives: PositiveScores,
        thresholds: Thresholds,
        upstream: Upstream,
    ) -> Tensor:
        assert d_thresholds is not None, "every tile adds to the thresholds' gradient"
        return d_thresholds


def _without_negligible(weights: Tensor) -> Tensor:
    """Weights, 0 where too small to change a sum with the largest one: times a slope they would be subnormal, which is slow."""
    if not weights.numel():
        return weights
    size = weights.abs()
    return weights.masked_fill(size < size.amax() * torch.finfo(weights.dtype).eps ** 2, 0)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
