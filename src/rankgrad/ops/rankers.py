"""What stands for `step` in a rank, and how it gets a gradient: tile mathematics in plain torch.

A ranker sees one tile at a time: scores of a few queries with some of their irrelevant candidates, against thresholds (the
scores of the query's positives, or bin edges). It says two things about a tile,

    count_tile      how much of it lies ahead of each threshold      C[b, e] = sum over z of kappa(s_bz - t_be)
    tile_backward   the gradient of all those counts                 G[b, z] = dL/ds_bz, and the tile's part of dL/dt_be

and may do once per tile what all comparisons with it share (`tile_map`). The rest is about a query: what its counts mean
(`ranks`), how dL/dranks becomes the weights of `tile_backward` (`rank_gradient`), and the gradient of its positives
(`positive_backward`). What a ranker keeps between the passes has the size of the relevant pairs. Hidden entries of a tile
(positives, the query itself) hold -inf; they count nothing and receive no gradient.

Dimension letters:  B queries   Z candidates of one tile   P positives, padded   E thresholds
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankgrad._checks import check_count, check_not_negative, check_positive
from rankgrad.ops.autograd import GRAD_FIELDS, PositiveScores, Ranks, Upstream
from rankgrad.ops.graded_ranks import exact_graded_rank, sigmoid_graded_rank
from rankgrad.ops.thresholds import SigmoidThresholds, Thresholds

TileMap = Callable[[Tensor], Tensor]

# Rank at a bin centre that no candidate has reached, where mass and rank among the positives are 0.
SMALLEST_RANK = 1e-30

# Sigmoids of one tile that are kept for the backward pass: 2**20 float32 are 4 MiB, and a sigmoid is most of a tile's work.
KEPT_SIGMOIDS = 2**20

# Comparisons of positives with each other that exist at once: 2**22 float32 are 16 MiB.
MOST_COMPARISONS = 2**22


class Ranker(ABC):
    """One choice of `step`. Stateless: what belongs to a batch is handed from method to method.

    A ranker without a gradient sets `differentiable` to False and leaves out the three gradient methods.
    """

    differentiable = True
    grad_fields: tuple[str, ...] = GRAD_FIELDS  # fields of `Ranks` that `rank_gradient` needs the objective's derivative by

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, which the kernels do not."""
        return False

    def weighted(self, weight: float) -> "Ranker":
        """The ranker of a loss that enters a sum with `weight`, where that matters for the gradient."""
        return self

    @abstractmethod
    def thresholds(self, positives: PositiveScores, key: int) -> Any:
        """What tiles are compared with. `key` is the same in forward and backward of a row block."""

    def tile_map(self, thresholds: list[Any]) -> TileMap | None:
        """What comparisons with a tile have in common, as a change of its scores in place; None: they stay as they are.

        Made once for all tiles of a call: a tile and its transpose share it, and one that is kept for the backward pass has
        it already. `thresholds` are those of all row blocks.
        """
        return None

    @abstractmethod
    def count_tile(self, tile: Tensor, thresholds: Any, key: int) -> Tensor:
        """[B, E] irrelevant candidates of the tile, as `tile_map` leaves it, ahead of each threshold."""

    @abstractmethod
    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Any) -> Ranks:
        """What the counts of all tiles mean."""

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        """[B, P] `Ranks.graded_rank` as a function of the scores of the positives; without a gradient unless it has one."""
        return exact_graded_rank(positives, positive_rank)

    def rank_gradient(self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Any, upstream: Upstream) -> Any:
        """From d(loss of a query) / d(grad_fields) to what `tile_backward` needs."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def tile_backward(self, tile: Tensor, thresholds: Any, rank_grad: Any, key: int) -> tuple[Tensor, Tensor | None]:
        """[B, Z] gradient of the tile's scores, before `tile_map`, and the tile's part of the thresholds' gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: Any,
        positives: PositiveScores,
        thresholds: Any,
        upstream: Upstream,
    ) -> Tensor:
        """[B, P] gradient of the positives' scores, from what the tiles summed up and the positives themselves."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")


@dataclass(frozen=True)
class Exact(Ranker):
    """True ranks by counting, no gradient.

    The one rule for ties, also that of `Blackbox` and of `rankgrad.evaluate`: where scores are equal, irrelevant candidates
    come first, then relevant ones in candidate order, so that all ranks differ. (scikit-learn puts equal scores at one
    threshold: its average precision is the same where relevant candidates tie with irrelevant ones only, and higher where
    they also tie with each other.)
    """

    differentiable = False

    def thresholds(self, positives: PositiveScores, key: int) -> Thresholds:
        return Thresholds(positives.scores)

    def count_tile(self, tile: Tensor, thresholds: Thresholds, key: int) -> Tensor:
        return thresholds.num_reaching(tile)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))


@dataclass(frozen=True)
class Sigmoid(Ranker):
    """Soft ranks: the step is a logistic of temperature `tau` (RS@k eq. 5, Smooth-AP). Tends to `Exact` as tau -> 0."""

    grad_fields = ("rank", "positive_rank")

    tau: float

    def __post_init__(self) -> None:
        check_positive(self.tau, name="tau", caller="Sigmoid")

    def thresholds(self, positives: PositiveScores, key: int) -> SigmoidThresholds:
        return SigmoidThresholds(positives.scores.t().contiguous(), keep=positives.one_tile)

    def tile_map(self, thresholds: list[SigmoidThresholds]) -> TileMap | None:
        """One exponential of a score and not one of each comparison: with f = e^-t and x = e^-s a sigmoid is f / (f + x).

        Scores are taken from the middle of all thresholds. Where an exponential ends every sigmoid must be 0 or 1 to the last
        bit, so thresholds must not be too far apart: in float32 131 tau, which is 1.3 for tau = 0.01.
        """
        columns = [of_block.columns for of_block in thresholds if of_block.columns.numel()]
        if not columns or columns[0].device.type != "cpu" or any(of_block.keep for of_block in thresholds):
            return None
        limits = torch.finfo(columns[0].dtype)
        end = math.log(limits.max) - 2
        room = end + math.log(limits.eps) - 5
        low = min(values.amin().item() for values in columns)
        high = max(values.masked_fill(values == torch.inf, -torch.inf).amax().item() for values in columns)
        if not 0 <= high - low <= 2 * room * self.tau:
            return None
        middle, scale = (low + high) / 2, 1 / self.tau

        def exponentials_(scores: Tensor) -> Tensor:  # of a hidden score, -inf, it is inf, and its sigmoid 0
            return scores.sub_(middle).mul_(-scale).clamp_(min=-end).exp_()

        for of_block in thresholds:
            of_block.exponentials = exponentials_(of_block.columns.masked_fill(of_block.columns == torch.inf, middle))
        return exponentials_

    def _ahead(self, tile: Tensor, thresholds: SigmoidThresholds, out: Tensor) -> Iterator[Tensor]:
        """Sigmoids of a tile less each threshold, one after another in the same memory."""
        # products of a sigmoid with the weight of a threshold must not be subnormal, see `_without_negligible`
        least = torch.finfo(tile.dtype).eps ** 2
        if thresholds.exponentials is None:
            for each in thresholds.columns:
                yield torch.sub(tile, each[:, None], out=out).mul_(1 / self.tau).clamp_(min=math.log(least)).sigmoid_()
        else:
            for each in thresholds.exponentials[:, :, None]:
                yield torch.div(each, torch.minimum(tile, each / least, out=out).add_(each), out=out)

    def count_tile(self, tile: Tensor, thresholds: SigmoidThresholds, key: int) -> Tensor:
        if thresholds.keep and thresholds.columns.shape[0] * tile.numel() <= KEPT_SIGMOIDS:
            least = torch.finfo(tile.dtype).eps ** 2
            ahead = (tile - thresholds.columns[:, :, None]).mul_(1 / self.tau).clamp_(min=math.log(least)).sigmoid_()
            thresholds.tile = ahead
            return ahead.sum(dim=2).t()
        scratch = torch.empty_like(tile)  # one for all: on a CPU fresh memory costs more than what is done with it
        if thresholds.exponentials is None:
            return _columns([ahead.sum(dim=1) for ahead in self._ahead(tile, thresholds, scratch)], tile)
        four = tile.new_tensor(4.0)
        # what all terms of a sum share is taken out of it, but for so much that no term is subnormal
        sums = [
            torch.div(four, torch.add(tile, each[:, None], out=scratch), out=scratch).sum(dim=1)
            for each in thresholds.exponentials
        ]
        return _columns(sums, tile).mul_(thresholds.exponentials.t() / four)

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
        self, tile: Tensor, thresholds: SigmoidThresholds, rank_grad: tuple[Tensor, Tensor], key: int
    ) -> tuple[Tensor, Tensor]:
        if thresholds.tile is not None:
            slope = torch.ops.aten.sigmoid_backward(rank_grad[0][:, :, None], thresholds.tile)
            return slope.sum(dim=0), slope.sum(dim=2).neg_().t()
        gradient, scratch = torch.zeros_like(tile), torch.empty_like(tile)
        d_thresholds = []
        for ahead, weight in zip(self._ahead(tile, thresholds, scratch), rank_grad[0], strict=True):
            slope = torch.ops.aten.sigmoid_backward.grad_input(weight[:, None].expand_as(tile), ahead, grad_input=scratch)
            gradient += slope
            d_thresholds.append(-slope.sum(dim=1))
        return gradient, _columns(d_thresholds, tile)

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

    def count_tile(self, tile: Tensor, thresholds: Thresholds, key: int) -> Tensor:
        counts = tile.new_zeros(thresholds.columns.shape)
        for part, ahead, soft in self._compared(tile, thresholds.columns):
            bound = torch.where(
                ahead > self.delta, (ahead - self.delta) * self.rho + self.offset, soft.add_(ahead > 0, alpha=0.5)
            )
            counts[part] = bound.sum(dim=2)
        return counts.t()

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Thresholds, upstream: Upstream
    ) -> Tensor:
        """[P, B] weights of irrelevant candidates, over tau."""
        weights = positives.fill(d_ranks[0] * (upstream.grad_loss / self.tau), 0)
        return weights.to(positives.scores.dtype).t().contiguous()

    def tile_backward(self, tile: Tensor, thresholds: Thresholds, rank_grad: Tensor, key: int) -> tuple[Tensor, Tensor]:
        gradient, d_thresholds = torch.zeros_like(tile), torch.zeros_like(rank_grad)
        for part, ahead, soft in self._compared(tile, thresholds.columns):
            slope = torch.where(ahead > self.delta, self.rho * self.tau, soft * (1 - soft)) * rank_grad[part, :, None]
            gradient += slope.sum(dim=0)
            d_thresholds[part] = -slope.sum(dim=2)
        return gradient, d_thresholds.t()

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


@dataclass(frozen=True)
class Blackbox(Ranker):
    """Exact ranks with RaMBO's gradient: the change of the ranking when the scores move along the incoming gradient.

    Ties are ranked as by `Exact`. The rank among the relevant carries no gradient.

    `lam` refers to normalised ranks, as in the published code: with n candidates in a list, y' = y + lam * n * dL/drank
    and the gradient is (rank(y') - rank(y)) / (lam * n), which is Algorithm 1 with lambda = lam * n. L is the mean over
    queries, weights included, also where single losses are returned; what is done to the loss later scales the gradient
    without changing the perturbation, so loss scaling is safe.

    `margin` lowers relevant scores by margin / 2 and raises irrelevant ones by as much (eq. 14); `margin_noise` multiplies
    each of these shifts by |N(0, 1)|, drawn anew at each call, as the published detection loss does.
    """

    grad_fields = ("rank",)

    lam: float
    margin: float = 0.0
    margin_noise: bool = False

    @property
    def draws(self) -> bool:
        return self.margin_noise

    def weighted(self, weight: float) -> "Blackbox":
        """The perturbation follows the derivative of the whole sum, so it contains the weight."""
        return replace(self, lam=self.lam * weight)

    def __post_init__(self) -> None:
        check_positive(self.lam, name="lam", caller="Blackbox")
        check_not_negative(self.margin, name="margin", caller="Blackbox")

    def _shift(self, like: Tensor, key: int) -> Tensor:
        """|N(0, 1)| * margin / 2 for every score, the same whenever it is asked for with the same key."""
        generator = torch.Generator(like.device).manual_seed(key)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator).abs_().mul_(self.margin / 2)

    def _shifted(self, tile: Tensor, key: int) -> Tensor:
        return tile + self._shift(tile, key) if self.margin_noise else tile

    def _lowered(self, positives: PositiveScores, key: int) -> Tensor:
        if self.margin == 0:
            return positives.scores
        return positives.scores - (self._shift(positives.scores, key) if self.margin_noise else self.margin)

    def thresholds(self, positives: PositiveScores, key: int) -> Thresholds:
        return Thresholds(self._lowered(positives, key), keep=positives.one_tile)

    def count_tile(self, tile: Tensor, thresholds: Thresholds, key: int) -> Tensor:
        return thresholds.num_reaching(self._shifted(tile, key))

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Thresholds, upstream: Upstream
    ) -> tuple[Thresholds, Tensor]:
        raw_lam = self.lam * positives.list_length[:, None].clamp(min=1).to(positives.rank_dtype)  # a list may be empty
        step = (raw_lam * upstream.query_weight * d_ranks[0]).to(thresholds.values.dtype)
        scale = (upstream.grad_loss / (upstream.query_weight * raw_lam)).to(thresholds.values.dtype)
        if upstream.query_weight.ndim:  # a query of weight 0 does not move
            scale = torch.where(upstream.query_weight == 0, 0, scale)
        return thresholds.perturbed(positives.fill(thresholds.values + step, torch.inf)), scale

    def tile_backward(
        self, tile: Tensor, thresholds: Thresholds, rank_grad: tuple[Thresholds, Tensor], key: int
    ) -> tuple[Tensor, Tensor]:
        perturbed, scale = rank_grad
        # a candidate's rank grows by the relevant items that pass it and shrinks by those that fall behind it
        gradient, reached = thresholds.crossings(perturbed, self._shifted(tile, key))
        return gradient.mul_(scale), reached

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: tuple[Thresholds, Tensor],
        positives: PositiveScores,
        thresholds: Thresholds,
        upstream: Upstream,
    ) -> Tensor:
        perturbed, scale = rank_grad
        assert d_thresholds is not None, "perturbed ranks are counted by every pass"
        moved = d_thresholds - counts + (_ranks_among(perturbed, positives) - _ranks_among(thresholds, positives))
        return positives.fill(moved, 0).to(scale.dtype).mul_(scale).to(positives.scores.dtype)


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

    def _position_(self, scores: Tensor) -> Tensor:
        """In place the distance from `high` in bins, in [0, bins]; hidden entries are at the last centre, NaN at the first."""
        return scores.sub_(self.high).mul_(-1 / self.width).clamp_(0, self.bins).nan_to_num_(nan=0.0)

    def thresholds(self, positives: PositiveScores, key: int) -> None:
        return None

    def tile_map(self, thresholds: list[None]) -> TileMap:
        return self._position_

    def count_tile(self, tile: Tensor, thresholds: None, key: int) -> Tensor:
        """[B, bins] cumulative histogram at every centre but the last, where all candidates are counted."""
        tile = tile.contiguous()  # scatter walks over rows, and a transposed tile is strided
        cell = tile.long()
        size = (tile.shape[0], self.bins + 1)
        items = tile.new_zeros(size).scatter_add_(1, cell, torch.ones_like(tile))
        spill = tile.new_zeros(size).scatter_add_(1, cell, tile.frac())  # what belongs to the next centre
        return (items.cumsum(dim=1) - spill)[:, :-1]

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
        table = d_ranks[0] / self.width
        table[:, -1] = 0  # the last centre counts every candidate, wherever it is
        return table, d_ranks

    def tile_backward(
        self, tile: Tensor, thresholds: None, rank_grad: tuple[Tensor, tuple[Tensor, ...]], key: int
    ) -> tuple[Tensor, None]:
        if tile.is_contiguous():
            slope = rank_grad[0].gather(1, tile.long())
        else:  # in the order of memory
            slope = rank_grad[0].t().contiguous().gather(0, tile.t().long()).t()
        # on a centre, and so at the ends and where hidden, the pulses have a kink and the gradient is taken as 0
        return slope.mul_(tile.frac().sign_()), None

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
        position = self._position_(positives.scores.clone())  # padding lies on the first centre
        cell = position.floor()
        index = cell.long().clamp_(max=self.bins - 1)
        # between two centres mass moves from one to the next; on a centre the pulses have a kink, see `tile_backward`
        if positives.gains is None:
            moved = (d_mass + d_gain).diff(dim=1).gather(1, index)
        else:
            moved = d_mass.diff(dim=1).gather(1, index) + positives.gains * d_gain.diff(dim=1).gather(1, index)
        return moved.mul_(position.sub_(cell).sign_()).mul_(-1 / self.width)


def _without_negligible(weights: Tensor) -> Tensor:
    """0 for weights that no sum with the largest one shows: their products with slopes would be subnormal, which is slow."""
    if not weights.numel():
        return weights
    size = weights.abs()
    return weights.masked_fill(size < size.amax() * torch.finfo(weights.dtype).eps ** 2, 0)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _columns(columns: list[Tensor], tile: Tensor) -> Tensor:
    """[B, E] from E columns; E is 0 where no query of the chunk has a relevant item."""
    return torch.stack(columns, dim=1) if columns else tile.new_zeros(tile.shape[0], 0)


def _proper_ranks(counts: Tensor, thresholds: Thresholds, positives: PositiveScores) -> tuple[Tensor, Tensor]:
    """[B, P] rank of each relevant item among all and among the relevant: the higher score first, then the earlier item."""
    return positives.add_counts(counts, _ranks_among(thresholds, positives))


def _ranks_among(thresholds: Thresholds, positives: PositiveScores) -> Tensor:
    """[B, P] int32 rank of each relevant item among the relevant; whatever it is at the padding."""
    if positives.valid is None:
        return thresholds.ranks
    # padding is infinite and last in its row: ahead of every item but of infinite ones
    padding = positives.valid.shape[1] - positives.num_relevant[:, None]
    return torch.where(thresholds.values == torch.inf, thresholds.ranks, thresholds.ranks - padding)
