"""What stands for `step` in a rank, and how it gets a gradient.

A ranker sees one tile at a time: scores of a few queries with some of their irrelevant candidates, against what it
compares them with (the scores of the query's relevant items, or bin edges). It has two things to say about a tile,

    count   how much of it lies ahead of each comparison      C[b, e] = sum over z of kappa(s_bz - t_be)
    pull    the gradient of all those counts                  G[b, z] = dL/ds_bz, and what it adds to the comparisons

and two about a query: what its counts mean (`ranks`), and how dL/dranks turns into the weights of `pull` (`aim`, `land`).
Everything a ranker needs between the passes has the size of the relevant pairs. Hidden entries of a tile (relevant
candidates, the query itself) hold -inf and must count nothing and receive nothing.

Dimension letters:  B queries   Z candidates of one tile   P relevant items, padded   E comparisons
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankgrad._checks import check_count, check_not_negative, check_positive
from rankgrad.ops.ranks import LEAVES, Ranks
from rankgrad.ops.thresholds import Thresholds

# Comparisons of relevant items with each other that exist at once: 2**22 float32 are 16 MiB.
MOST_COMPARISONS = 2**22


@dataclass(frozen=True)
class Relevant:
    """The relevant items of a few queries, all that is known of them besides the embeddings."""

    scores: Tensor  # [B, P] padded with +inf
    valid: Tensor  # [B, P] False at the padding
    gains: Tensor | None  # [B, P] graded relevance, None where relevance is binary
    num_relevant: Tensor  # [B] int64
    list_length: Tensor  # [B] int64, candidates that are ranked
    rank_dtype: torch.dtype  # wide enough for exact integer ranks
    fused: bool = False  # from a door of the fused kernels, which also compare the relevant items with each other
    full: bool = False  # known to have no padding

    def fill(self, values: Tensor, value: float) -> Tensor:
        """`values` [B, P] with `value` at the padding."""
        return values if self.full else torch.where(self.valid, values, value)

    @property
    def as_tile(self) -> Tensor:
        """The relevant scores as candidates: padding hidden."""
        return self.scores.masked_fill(~self.valid, -torch.inf)

    @cached_property
    def entry_gains(self) -> Tensor:
        return (self.valid if self.gains is None else self.gains * self.valid).to(self.rank_dtype)

    def as_ranks(self, rank: Tensor, positive_rank: Tensor, mass: Tensor, gain: Tensor) -> Ranks:
        ideal = self.entry_gains
        ideal = ideal if self.gains is None else ideal.sort(dim=1, descending=True).values
        return Ranks(rank, positive_rank, mass, gain, ideal, self.num_relevant.to(self.rank_dtype))


@dataclass(frozen=True)
class Share:
    """How the rows of a chunk enter the loss and what came back for them, all [B, 1]."""

    unit: Tensor  # the row's share in the loss as reduced: 1 / queries for a mean, 1 for single losses
    incoming: Tensor  # d(what the user differentiates) / d(loss of the row)


class Ranker(ABC):
    """One choice of `step`. Stateless: what belongs to a batch is handed from method to method."""

    differentiable = True
    leaves: tuple[str, ...] = LEAVES  # what `aim` needs the objective's derivative by

    @abstractmethod
    def prepare(self, relevant: Relevant, key: int) -> Any:
        """What tiles are compared with. `key` is a number that is the same in forward and backward of this chunk."""

    @abstractmethod
    def count(self, tile: Tensor, prepared: Any, key: int) -> Tensor:
        """[B, E] irrelevant candidates of the tile ahead of each comparison."""

    @abstractmethod
    def ranks(self, counts: Tensor, relevant: Relevant, prepared: Any) -> Ranks:
        """What the summed counts mean."""

    @abstractmethod
    def aim(self, grads: tuple[Tensor, ...], relevant: Relevant, prepared: Any, share: Share) -> Any:
        """From d(row loss)/d(leaves) to what `pull` needs."""

    @abstractmethod
    def pull(self, tile: Tensor, prepared: Any, aimed: Any, key: int) -> tuple[Tensor, Tensor | None]:
        """[B, Z] gradient of the tile's scores, and the tile's part in the gradient of the comparisons."""

    @abstractmethod
    def land(
        self, pulled: Tensor | None, counts: Tensor, aimed: Any, relevant: Relevant, prepared: Any, share: Share
    ) -> Tensor:
        """[B, P] gradient of the relevant scores, from the tiles' summed parts and the relevant items themselves."""


@dataclass(frozen=True)
class Exact(Ranker):
    """True ranks by counting, no gradient. A tied candidate counts against the relevant item (pessimistic)."""

    differentiable = False

    def prepare(self, relevant: Relevant, key: int) -> Thresholds:
        return Thresholds(relevant.scores)

    def count(self, tile: Tensor, prepared: Thresholds, key: int) -> Tensor:
        return prepared.reached_by(tile)

    def ranks(self, counts: Tensor, relevant: Relevant, prepared: Thresholds) -> Ranks:
        # an item reaches its own score, which is the 1 of 1 + number of others
        return _item_ranks(counts, prepared.reached_by(relevant.as_tile), relevant)

    def aim(self, grads: tuple[Tensor, ...], relevant: Relevant, prepared: Any, share: Share) -> Any:
        raise NotImplementedError("Exact has no gradient")

    def pull(self, tile: Tensor, prepared: Any, aimed: Any, key: int) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("Exact has no gradient")

    def land(
        self, pulled: Tensor | None, counts: Tensor, aimed: Any, relevant: Relevant, prepared: Any, share: Share
    ) -> Tensor:
        raise NotImplementedError("Exact has no gradient")


@dataclass(frozen=True)
class Sigmoid(Ranker):
    """Soft ranks: the step is a logistic of temperature `tau` (RS@k eq. 5, Smooth-AP). Tends to `Exact` as tau -> 0."""

    tau: float

    def __post_init__(self) -> None:
        check_positive(self.tau, name="tau", caller="Sigmoid")

    def prepare(self, relevant: Relevant, key: int) -> Tensor:
        return relevant.scores.t().contiguous()  # [P, B]: a comparison is then contiguous over queries in both roles of a tile

    def _ahead(self, tile: Tensor, threshold: Tensor, out: Tensor) -> Tensor:
        return torch.sub(tile, threshold[:, None], out=out).mul_(1 / self.tau).sigmoid_()

    def count(self, tile: Tensor, prepared: Tensor, key: int) -> Tensor:
        scratch = torch.empty_like(tile)  # one for all: on a CPU fresh memory costs more than what is done with it
        return _columns([self._ahead(tile, threshold, scratch).sum(dim=1) for threshold in prepared], tile)

    def ranks(self, counts: Tensor, relevant: Relevant, prepared: Tensor) -> Ranks:
        # an item ahead of itself counts sigmoid(0) = 1/2
        return _item_ranks(counts, self._among(relevant) + 0.5, relevant)

    def _blocks(self, relevant: Relevant) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and how far each relevant item of a row is ahead of each other [b, item, other], a few rows at a time."""
        tile = relevant.as_tile
        width = max(tile.shape[1], 1)
        for start in range(0, tile.shape[0], max(MOST_COMPARISONS // width**2, 1)):
            rows = slice(start, start + max(MOST_COMPARISONS // width**2, 1))
            yield rows, (tile[rows, None, :] - relevant.scores[rows, :, None]).mul_(1 / self.tau).sigmoid_()

    def _among(self, relevant: Relevant) -> Tensor:
        if relevant.fused:
            from rankgrad.ops.triton.row_ops import ahead_among

            return ahead_among(relevant.scores, relevant.num_relevant, self.tau)
        return torch.cat([ahead.sum(dim=2) for _, ahead in self._blocks(relevant)])

    def aim(self, grads: tuple[Tensor, ...], relevant: Relevant, prepared: Tensor, share: Share) -> tuple[Tensor, Tensor]:
        d_rank, d_positive_rank, _, _ = (g * share.incoming for g in grads)
        # a relevant item ahead moves both ranks; an irrelevant one only the rank among all
        weights = torch.stack((d_rank, d_rank + d_positive_rank)) * relevant.valid / self.tau
        weights = weights.to(relevant.scores.dtype).transpose(1, 2).contiguous()
        return weights[0], weights[1]

    def pull(self, tile: Tensor, prepared: Tensor, aimed: tuple[Tensor, Tensor], key: int) -> tuple[Tensor, Tensor]:
        gradient, scratch = torch.zeros_like(tile), torch.empty_like(tile)
        pulled = []
        for threshold, weight in zip(prepared, aimed[0], strict=True):
            ahead = self._ahead(tile, threshold, scratch)
            slope = torch.ops.aten.sigmoid_backward.grad_input(weight[:, None].expand_as(tile), ahead, grad_input=scratch)
            gradient += slope
            pulled.append(-slope.sum(dim=1))
        return gradient, _columns(pulled, tile)

    def land(
        self,
        pulled: Tensor | None,
        counts: Tensor,
        aimed: tuple[Tensor, Tensor],
        relevant: Relevant,
        prepared: Tensor,
        share: Share,
    ) -> Tensor:
        weights = aimed[1].t()
        assert pulled is not None, "a sigmoid's comparisons are pulled by every tile"
        if relevant.fused:
            from rankgrad.ops.triton.row_ops import ahead_among_backward

            return pulled + ahead_among_backward(relevant.scores, weights, relevant.num_relevant, self.tau)
        parts = []
        for rows, ahead in self._blocks(relevant):
            slope = torch.ops.aten.sigmoid_backward(weights[rows, :, None], ahead)
            parts.append(slope.sum(dim=1) - slope.sum(dim=2))  # as the item ahead, and as the one compared with
        return pulled + torch.cat(parts)


@dataclass(frozen=True)
class Blackbox(Ranker):
    """Exact ranks with RaMBO's gradient: the change of the ranking when the scores move along the incoming gradient.

    The ranking is proper: an irrelevant candidate wins a tie against a relevant one, and of two tied relevant ones the
    first in candidate order wins. The rank among the relevant carries no gradient.

    `lam` refers to normalised ranks, as in the published code: with n candidates in a list, y' = y + lam * n * dL/drank
    and the gradient is (rank(y') - rank(y)) / (lam * n), which is Algorithm 1 with lambda = lam * n. L is the loss as it is
    reduced (a mean over queries includes the 1 / queries), and what is done to the loss later scales the gradient
    without changing the perturbation, so loss scaling is safe.

    `margin` lowers relevant scores by margin / 2 and raises irrelevant ones by as much (eq. 14); `margin_noise` multiplies
    each of these shifts by |N(0, 1)|, drawn anew at each call, as the published detection loss does.
    """

    leaves = ("rank",)

    lam: float
    margin: float = 0.0
    margin_noise: bool = False

    def __post_init__(self) -> None:
        check_positive(self.lam, name="lam", caller="Blackbox")
        check_not_negative(self.margin, name="margin", caller="Blackbox")

    def _shift(self, like: Tensor, key: int) -> Tensor:
        """|N(0, 1)| * margin / 2 for every score, the same whenever it is asked for with the same key."""
        generator = torch.Generator(like.device).manual_seed(key)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator).abs_().mul_(self.margin / 2)

    def _shifted(self, tile: Tensor, key: int) -> Tensor:
        return tile + self._shift(tile, key) if self.margin_noise else tile

    def _lowered(self, relevant: Relevant, key: int) -> Tensor:
        if self.margin == 0:
            return relevant.scores
        return relevant.scores - (self._shift(relevant.scores, key) if self.margin_noise else self.margin)

    def prepare(self, relevant: Relevant, key: int) -> Thresholds:
        return Thresholds(self._lowered(relevant, key))

    def count(self, tile: Tensor, prepared: Thresholds, key: int) -> Tensor:
        return prepared.reached_by(self._shifted(tile, key))

    def ranks(self, counts: Tensor, relevant: Relevant, prepared: Thresholds) -> Ranks:
        return _as_ranks(*_proper_ranks(counts, prepared, relevant), relevant)

    def aim(
        self, grads: tuple[Tensor, ...], relevant: Relevant, prepared: Thresholds, share: Share
    ) -> tuple[Thresholds, Tensor]:
        raw_lam = self.lam * relevant.list_length[:, None].clamp(min=1).to(relevant.rank_dtype)  # a list may be empty
        step = (raw_lam * share.unit * grads[0]).to(prepared.values.dtype)
        scale = (share.incoming / (share.unit * raw_lam)).to(prepared.values.dtype)
        return prepared.moved(relevant.fill(prepared.values + step, torch.inf)), scale

    def pull(self, tile: Tensor, prepared: Thresholds, aimed: tuple[Thresholds, Tensor], key: int) -> tuple[Tensor, Tensor]:
        perturbed, scale = aimed
        # a candidate's rank grows by the relevant items that pass it and shrinks by those that fall behind it
        gradient, reached = prepared.passed_by(perturbed, self._shifted(tile, key))
        return gradient.mul_(scale), reached

    def land(
        self,
        pulled: Tensor | None,
        counts: Tensor,
        aimed: tuple[Thresholds, Tensor],
        relevant: Relevant,
        prepared: Thresholds,
        share: Share,
    ) -> Tensor:
        perturbed, scale = aimed
        assert pulled is not None, "perturbed ranks are counted by every pass"
        (moved, _), (rank, _) = _proper_ranks(pulled, perturbed, relevant), _proper_ranks(counts, prepared, relevant)
        return ((moved - rank) * scale).to(relevant.scores.dtype)


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

    def _position(self, tile: Tensor) -> Tensor:
        """Distance from `high` in bins, in [0, bins]; hidden entries land on the last centre."""
        # contiguous: gather and scatter walk over rows, and a tile in its transposed role is strided
        return ((self.high - tile) * (1 / self.width)).clamp_(0, self.bins).contiguous()

    def prepare(self, relevant: Relevant, key: int) -> None:
        return None

    def count(self, tile: Tensor, prepared: None, key: int) -> Tensor:
        """[B, bins] cumulative histogram at every centre but the last, where all candidates are counted."""
        position = self._position(tile)
        floor = position.floor()
        cell = floor.long()
        size = (tile.shape[0], self.bins + 1)
        items = tile.new_zeros(size).scatter_add_(1, cell, tile.new_ones(()).expand_as(cell))
        spill = tile.new_zeros(size).scatter_add_(1, cell, position.sub_(floor))  # what belongs to the next centre
        return (items.cumsum(dim=1) - spill)[:, :-1]

    def ranks(self, counts: Tensor, relevant: Relevant, prepared: None) -> Ranks:
        irrelevant = (relevant.list_length - relevant.num_relevant).to(counts.dtype)
        mass, gain = self._masses(relevant, relevant.scores)
        positive_rank = mass.cumsum(dim=1)
        return relevant.as_ranks(torch.cat((counts, irrelevant[:, None]), dim=1) + positive_rank, positive_rank, mass, gain)

    def _masses(self, relevant: Relevant, scores: Tensor) -> tuple[Tensor, Tensor]:
        """[B, bins + 1] mass and gain of the relevant items at every centre, by their definition."""
        position = (self.high - scores.masked_fill(~relevant.valid, self.low)).div(self.width).clamp(0, self.bins)
        centres = torch.arange(self.bins + 1, dtype=position.dtype, device=position.device)
        pulse = (1 - (position[:, :, None] - centres).abs()).clamp(min=0) * relevant.valid[:, :, None]
        mass = pulse.sum(dim=1)
        return mass, mass if relevant.gains is None else (pulse * relevant.gains[:, :, None]).sum(dim=1)

    def aim(
        self, grads: tuple[Tensor, ...], relevant: Relevant, prepared: None, share: Share
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        grads = tuple((g * share.incoming).to(relevant.scores.dtype) for g in grads)
        table = grads[0] / self.width
        table[:, -1] = 0  # the last centre counts every candidate, wherever it is
        return table, grads

    def pull(self, tile: Tensor, prepared: None, aimed: tuple[Tensor, tuple[Tensor, ...]], key: int) -> tuple[Tensor, None]:
        position = self._position(tile)
        floor = position.floor()
        # on a centre, and so at the ends and where hidden, the pulses have a kink and the gradient is taken as 0
        return aimed[0].gather(1, floor.long()).mul_(position.sub_(floor).sign_()), None

    def land(
        self,
        pulled: Tensor | None,
        counts: Tensor,
        aimed: tuple[Tensor, tuple[Tensor, ...]],
        relevant: Relevant,
        prepared: None,
        share: Share,
    ) -> Tensor:
        d_rank, d_positive_rank, d_mass, d_gain = aimed[1]
        with torch.enable_grad():
            scores = relevant.scores.detach().requires_grad_()
            mass, gain = self._masses(relevant, scores)
            outputs = (mass.cumsum(dim=1), mass, gain)
            (d_scores,) = torch.autograd.grad(outputs, (scores,), (d_rank + d_positive_rank, d_mass, d_gain))
        return d_scores


def _columns(columns: list[Tensor], tile: Tensor) -> Tensor:
    """[B, E] from E columns; E is 0 where no query of the chunk has a relevant item."""
    return torch.stack(columns, dim=1) if columns else tile.new_zeros(tile.shape[0], 0)


def _item_ranks(counts: Tensor, positive_rank: Tensor, relevant: Relevant) -> Ranks:
    """Ranks with one entry per relevant item, from the irrelevant items ahead of it and its rank among the relevant."""
    return _as_ranks(*_filled(counts, positive_rank, relevant), relevant)


def _filled(counts: Tensor, positive_rank: Tensor, relevant: Relevant) -> tuple[Tensor, Tensor]:
    """[B, P] rank among all and among the relevant, both 1 at the padding."""
    positive_rank = relevant.fill(positive_rank, 1).to(relevant.rank_dtype)
    return relevant.fill(counts, 0).to(relevant.rank_dtype) + positive_rank, positive_rank


def _as_ranks(rank: Tensor, positive_rank: Tensor, relevant: Relevant) -> Ranks:
    mass = relevant.entry_gains if relevant.gains is None else relevant.valid.to(relevant.rank_dtype)
    return relevant.as_ranks(rank, positive_rank, mass, relevant.entry_gains)


def _proper_ranks(counts: Tensor, thresholds: Thresholds, relevant: Relevant) -> tuple[Tensor, Tensor]:
    """[B, P] rank of each relevant item among all and among the relevant: the higher score first, then the earlier item."""
    if relevant.fused:
        from rankgrad.ops.triton.row_ops import proper_ranks

        return proper_ranks(counts, thresholds, relevant.num_relevant, relevant.rank_dtype)
    among = thresholds.ranks
    if not relevant.full:
        # padding is infinite and last in its row: ahead of every item but of infinite ones
        padding = relevant.valid.shape[1] - relevant.num_relevant[:, None]
        among = torch.where(thresholds.values == torch.inf, among, among - padding)
    return _filled(counts, among, relevant)
