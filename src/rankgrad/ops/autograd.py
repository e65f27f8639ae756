"""The one autograd function: count ranks over tiles, apply an objective, visit the tiles again for the gradient.

    forward    tiles -> counts -> ranks -> objective -> one loss per query and its derivative by the ranks
    backward   the same tiles again -> gradient of their scores -> gradients of the tensors the scores were made from

Between the two passes only tensors of the size of the relevant pairs are kept.

Dimension letters:  Q queries   B queries of a row block   P positives of a query, padded   E entries of `Ranks`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rankgrad._device import autocast_disabled

# Fields of `Ranks` that an objective can be differentiated by.
GRAD_FIELDS = ("rank", "positive_rank", "mass", "gain")


@dataclass(frozen=True)
class Ranks:
    """What an objective sees: the ranks of the positives of each query, one row per query, padded to the longest row.

    An entry is one positive of mass 1 (`Exact`, `Sigmoid`, `Blackbox`), or one bin centre holding the mass of the
    positives around it (`Histogram`). Padding has mass and gain 0 and rank 1, so sums over entries need no mask.
    """

    rank: Tensor  # [B, E] among all candidates, 1 is best
    positive_rank: Tensor  # [B, E] among the relevant candidates
    mass: Tensor  # [B, E] number of positives the entry stands for
    gain: Tensor  # [B, E] their graded relevance, equal to the mass where relevance is binary
    ideal: Tensor  # [B, I] gains of the positives in descending order, padded with 0
    num_relevant: Tensor  # [B] relevant candidates of each query, as a float

    @property
    def weight(self) -> Tensor:
        """[B, E] weight of the entry in a mean over the query's positives; 0 where there are none."""
        return self.mass / self.num_relevant.clamp(min=1)[:, None]

    def mean(self, values: Tensor) -> Tensor:
        """[B] mean of `values` [B, E] over the positives of each query."""
        return (self.weight * values).sum(dim=1)

    def total(self, values: Tensor) -> Tensor:
        """[B] sum of `values` [B, E] over the positives of each query."""
        return (self.mass * values).sum(dim=1)

    def detached(self, fields: Sequence[str] = GRAD_FIELDS) -> "Ranks":
        """The same ranks with `fields` as leaves of a new graph, so that an objective can be differentiated by them."""
        return replace(self, **{name: getattr(self, name).detach().requires_grad_() for name in fields})

    def gradients(self, losses: Tensor, fields: Sequence[str] = GRAD_FIELDS) -> tuple[Tensor, ...]:
        """D losses / d fields; a row of `losses` depends on its own row of ranks only."""
        tensors = tuple(getattr(self, name) for name in fields)
        if not losses.requires_grad:  # an objective may ignore the ranks, or be constant
            return tuple(torch.zeros_like(t) for t in tensors)
        return torch.autograd.grad(losses.sum(), tensors, allow_unused=True, materialize_grads=True)


Objective = Callable[[Ranks], Tensor]


def at_least(values: Tensor, least: float) -> Tensor:
    """max(values, least) with slope 1 at equality, where ranks often are; the slope of `clamp` there depends on the version."""
    return torch.where(values < least, least, values)


@dataclass(frozen=True)
class PositiveScores:
    """The scores of the positives of a row block, and what is known of its queries."""

    scores: Tensor  # [B, P] padded with +inf
    valid: Tensor  # [B, P] False at the padding
    gains: Tensor | None  # [B, P] graded relevance, None where relevance is binary
    num_relevant: Tensor  # [B] int64
    list_length: Tensor  # [B] int64, number of ranked candidates
    rank_dtype: torch.dtype  # wide enough for exact integer ranks
    full: bool = False  # known to have no padding

    def fill(self, values: Tensor, value: float) -> Tensor:
        """`values` [B, P] with `value` at the padding."""
        return values if self.full else torch.where(self.valid, values, value)

    @property
    def as_tile(self) -> Tensor:
        """The positives as candidates: padding hidden."""
        return self.scores.masked_fill(~self.valid, -torch.inf)

    @cached_property
    def entry_gains(self) -> Tensor:
        return (self.valid if self.gains is None else self.gains * self.valid).to(self.rank_dtype)

    def as_ranks(self, rank: Tensor, positive_rank: Tensor, mass: Tensor, gain: Tensor) -> Ranks:
        ideal = self.entry_gains
        ideal = ideal if self.gains is None else ideal.sort(dim=1, descending=True).values
        return Ranks(rank, positive_rank, mass, gain, ideal, self.num_relevant.to(self.rank_dtype))

    def add_counts(self, counts: Tensor, positive_rank: Tensor) -> tuple[Tensor, Tensor]:
        """[B, P] rank among all and among the positives, both 1 at the padding, from the irrelevant candidates ahead."""
        positive_rank = self.fill(positive_rank, 1).to(self.rank_dtype)
        return self.fill(counts, 0).to(self.rank_dtype) + positive_rank, positive_rank

    def item_ranks(self, rank: Tensor, positive_rank: Tensor) -> Ranks:
        """Ranks with one entry per positive."""
        mass = self.entry_gains if self.gains is None else self.valid.to(self.rank_dtype)
        return self.as_ranks(rank, positive_rank, mass, self.entry_gains)


@dataclass(frozen=True)
class Upstream:
    """How the queries of a row block enter the loss, and the gradient that arrived for them."""

    query_weight: Tensor  # weight of a query in the loss as reduced: 1 / queries for a mean, 1 for single losses
    grad_loss: Tensor  # [B, 1] d(what the user differentiates) / d(loss of the query)


class RankOps(Protocol):
    """What the function below calls: how scores become ranks, and the gradient of ranks that of scores."""

    differentiable: bool
    grad_fields: tuple[str, ...]  # fields of `Ranks` that `rank_gradient` needs the objective's derivative by

    def thresholds(self, positives: PositiveScores, key: int) -> Any:
        """What tiles are compared with. `key` is the same in forward and backward of a row block."""
        ...

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Any) -> Ranks:
        """What the counts of all tiles mean."""
        ...

    def rank_gradient(self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Any, upstream: Upstream) -> Any:
        """From d(loss of a query) / d(grad_fields) to what the backward pass over tiles needs."""
        ...

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
        ...


class ScoreSource(Protocol):
    """Where scores come from. Queries are cut into row blocks; every list below holds one value per row block."""

    row_blocks: list[slice]
    query_order: Tensor  # [Q] from the source's order of queries to the caller's

    def positives(self, block: int) -> PositiveScores:
        """Scores of the positives of a row block."""
        ...

    def count(self, ops: Any, thresholds: list[Any], seed: int) -> list[Tensor]:
        """Irrelevant candidates ahead of each threshold, over all tiles."""
        ...

    def backward(self, ops: Any, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Tensor | None]:
        """Sum over tiles of what they add to the thresholds' gradient; the gradient of the scores stays with the source."""
        ...

    def input_grads(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the tensors the source was opened with, after `backward`; those of the positives' scores are added."""
        ...


@dataclass(frozen=True)
class RankCall:
    """All that a call needs besides the tensors that get a gradient."""

    open_source: Callable[..., ScoreSource]  # from the tensors that get a gradient to their scores
    ops: RankOps
    objective: Objective
    query_weights: Tensor  # weight of a query in the loss as reduced, see Blackbox
    seed: int = 0  # of a ranker's random numbers


class _AllScores(torch.autograd.Function):
    """queries @ candidates.T with autocast disabled in both directions."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor | None) -> Tensor:
        ctx.save_for_backward(*((queries,) if candidates is None else (queries, candidates)))
        with autocast_disabled(queries.device):
            return queries @ (queries if candidates is None else candidates).t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor | None]:
        queries, *others = ctx.saved_tensors
        with autocast_disabled(d_scores.device):
            if not others:
                return torch.addmm(d_scores @ queries, d_scores.t(), queries), None
            return d_scores @ others[0], d_scores.t() @ queries


def all_scores(queries: Tensor, candidates: Tensor | None = None) -> Tensor:
    """[Q, C] every score of a batch small enough to hold them all, against itself where `candidates` is None."""
    scores: Tensor = _AllScores.apply(queries, candidates)
    return scores


@dataclass
class ForwardState:
    """What a forward pass keeps for the backward pass; lists hold one value per row block."""

    call: RankCall
    source: ScoreSource
    positives: list[PositiveScores]
    thresholds: list[Any]
    counts: list[Tensor]
    d_ranks: list[tuple[Tensor, ...]]


def forward_pass(call: RankCall, tensors: tuple[Tensor, ...], *, wants_gradient: bool) -> tuple[Tensor, ForwardState]:
    """[Q] loss of every query in the caller's order."""
    ops = call.ops
    with autocast_disabled(tensors[0].device):
        source = call.open_source(*tensors)
        positives = [source.positives(block) for block in range(len(source.row_blocks))]
        # keys below the seed are for row blocks, the others for tiles
        thresholds = [ops.thresholds(items, call.seed - 1 - block) for block, items in enumerate(positives)]
        counts = source.count(ops, thresholds, call.seed)
        losses, d_ranks = [], []
        for summed, items, compared in zip(counts, positives, thresholds, strict=True):
            with torch.set_grad_enabled(wants_gradient):
                ranks = ops.ranks(summed, items, compared).detached(ops.grad_fields)
                rows = torch.where(items.num_relevant > 0, call.objective(ranks), 0)
                d_ranks.append(ranks.gradients(rows, ops.grad_fields) if wants_gradient else ())
            losses.append(rows.detach())
        in_order = torch.cat(losses)
        out = torch.empty_like(in_order).index_copy_(0, source.query_order, in_order)
    return out, ForwardState(call, source, positives, thresholds, counts, d_ranks)


def backward_pass(state: ForwardState, grad_losses: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the tensors of the forward pass, from d(what the user differentiates) / d(losses) [Q]."""
    ops, source, call = state.call.ops, state.source, state.call
    with autocast_disabled(grad_losses.device):
        rows = grad_losses[source.query_order, None]
        upstream = [Upstream(call.query_weights, rows[block]) for block in source.row_blocks]
        blocks = list(zip(state.positives, state.thresholds, upstream, strict=True))
        rank_grads = [ops.rank_gradient(d, *block) for d, block in zip(state.d_ranks, blocks, strict=True)]
        d_thresholds = source.backward(ops, state.thresholds, rank_grads, call.seed)
        d_positives = [
            ops.positive_backward(d, counts, rank_grad, *block)
            for d, counts, rank_grad, block in zip(d_thresholds, state.counts, rank_grads, blocks, strict=True)
        ]
        return source.input_grads(d_positives)


class RankLossFunction(torch.autograd.Function):
    """Losses of all queries as a function of embeddings or scores."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)  # read again in backward only to notice a change in place
        wants_gradient = call.ops.differentiable and any(ctx.needs_input_grad)
        losses, ctx.state = forward_pass(call, tensors, wants_gradient=wants_gradient)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if not ctx.state.call.ops.differentiable:
            return None, *(torch.zeros_like(t) for t in tensors)
        return None, *backward_pass(ctx.state, grad_losses)


def rank_losses(call: RankCall, *tensors: Tensor) -> Tensor:
    """[Q] loss of every query, 0 where a query has no relevant candidate."""
    if torch.compiler.is_compiling():
        # a compiled training step breaks here and goes on after; decorated, it would load the compiler with the package
        losses: Tensor = torch.compiler.disable(RankLossFunction.apply)(call, *tensors)
    else:
        losses = RankLossFunction.apply(call, *tensors)
    return losses
