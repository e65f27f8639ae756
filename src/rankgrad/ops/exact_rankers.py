"""True ranks by counting: `Exact`, without a gradient, and `Blackbox`, with RaMBO's. See `rankers` for what a ranker does."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankgrad._checks import check_not_negative, check_positive
from rankgrad.ops.autograd import PositiveScores, Ranks, Upstream
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.thresholds import Thresholds
from rankgrad.ops.tile_memory import TileMemory


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

    def count_tile(self, tile: Tensor, thresholds: Thresholds, key: int, memory: TileMemory) -> Tensor:
        return thresholds.num_reaching(tile)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*proper_ranks(counts, thresholds, positives))


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

    def count_tile(self, tile: Tensor, thresholds: Thresholds, key: int, memory: TileMemory) -> Tensor:
        return thresholds.num_reaching(self._shifted(tile, key))

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*proper_ranks(counts, thresholds, positives))

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
        self,
        tile: Tensor,
        thresholds: Thresholds,
        rank_grad: tuple[Thresholds, Tensor],
        key: int,
        gradient: Tensor,
        memory: TileMemory,
        *,
        add: bool,
    ) -> Tensor:
        perturbed, scale = rank_grad
        # a candidate's rank grows by the relevant items that pass it and shrinks by those that fall behind it
        change, reached = thresholds.crossings(perturbed, self._shifted(tile, key))
        if add:
            gradient.addcmul_(change, scale)
        else:
            torch.mul(change, scale, out=gradient)
        return reached

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
        moved = d_thresholds - counts + (ranks_among(perturbed, positives) - ranks_among(thresholds, positives))
        return positives.fill(moved, 0).to(scale.dtype).mul_(scale).to(positives.scores.dtype)


def proper_ranks(counts: Tensor, thresholds: Thresholds, positives: PositiveScores) -> tuple[Tensor, Tensor]:
    """[B, P] rank of each relevant item among all and among the relevant: the higher score first, then the earlier item."""
    return positives.add_counts(counts, ranks_among(thresholds, positives))


def ranks_among(thresholds: Thresholds, positives: PositiveScores) -> Tensor:
    """[B, P] int32 rank of each relevant item among the relevant; whatever it is at the padding."""
    if positives.valid is None:
        return thresholds.ranks
    # padding is infinite and last in its row: ahead of every item but of infinite ones
    padding = positives.valid.shape[1] - positives.num_relevant[:, None]
    return torch.where(thresholds.values == torch.inf, thresholds.ranks, thresholds.ranks - padding)
