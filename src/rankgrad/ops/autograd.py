"""The autograd function of every loss: count ranks over tiles, apply an objective, visit the tiles again for the gradient.

    forward    tiles -> counts -> ranks -> objective -> one loss per query and its derivative by the ranks
    backward   the same tiles again -> gradient of their scores -> gradients of the tensors the scores were made from

Between the two passes only tensors of the size of the relevant pairs are kept.

Dimension letters:  Q queries   B queries of a row block   P positives of a query, padded   E entries of `Ranks`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from rankgrad._device import autocast_disabled
from rankgrad._dry_run import launch_instead

# Fields of `Ranks` that an objective can be differentiated by.
GRAD_FIELDS = ("rank", "positive_rank", "mass", "gain")


@dataclass(frozen=True)
class Ranks:
    """What an objective sees: the ranks of the positives of each query, one row per query, padded to the longest row.

    An entry is one positive of mass 1 (`Exact`, `Sigmoid`, `UpperBound`, `Blackbox`), or one bin centre holding the mass of
    the positives around it (`Histogram`). Padding has mass and gain 0 and rank 1, so sums over entries need no mask.
    """

    rank: Tensor  # [B, E] among all candidates, 1 is best
    positive_rank: Tensor  # [B, E] among the relevant candidates, 0 at a bin centre that none has reached
    mass: Tensor  # [B, E] number of positives the entry stands for
    gain: Tensor  # [B, E] their graded relevance, equal to the mass where relevance is binary
    ideal: Tensor  # [B, I] gains of the positives in descending order, padded with 0
    num_relevant: Tensor  # [B] relevant candidates of each query, as a float
    graded_rank: Tensor | None = None  # [B, E] its gain, and of every positive ahead of it the smaller of the two gains

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

    def within(self, cut: float | Tensor, tau: float) -> Tensor:
        """[B, E] whether an entry is among the first `cut`, a number or [B, 1]: 0 or 1, or a logistic where `tau` is not 0."""
        inside = cut + 0.5 - self.rank
        return torch.sigmoid(inside / tau) if tau else (inside > 0).to(self.rank.dtype)

    def detached(self, fields: Sequence[str] = GRAD_FIELDS) -> "Ranks":
        """The same ranks with `fields` as leaves of a new graph, so that an objective can be differentiated by them."""
        values = vars(self)
        return Ranks(**values | {name: values[name].detach().requires_grad_() for name in fields})

    def gradients(self, losses: Tensor, fields: Sequence[str] = GRAD_FIELDS, *others: Tensor) -> tuple[Tensor, ...]:
        """D losses / d fields, and by `others`; a row of `losses` depends on its own row of ranks only."""
        tensors = (*(getattr(self, name) for name in fields), *others)
        if not losses.requires_grad:  # an objective may ignore the ranks, or be constant
            return tuple(torch.zeros_like(t) for t in tensors)
        # of the sum and not with ones for every loss, for which torch imports sympy: half a second of the first call
        return torch.autograd.grad(losses.sum(), tensors, allow_unused=True, materialize_grads=True)


Objective = Callable[[Ranks], Tensor]


def own_derivative(objective: Objective) -> Callable[..., tuple[Tensor, ...] | None] | None:
    """`with_gradient` of an objective; None where it has none, or where a subclass overrides `__call__` and not that."""
    for cls in type(objective).__mro__:
        if "with_gradient" in vars(cls):
            derivative: Callable[..., tuple[Tensor, ...] | None] = objective.with_gradient  # type: ignore[attr-defined]
            return derivative
        if "__call__" in vars(cls):
            break
    return None


def at_least(values: Tensor, least: float) -> Tensor:
    """max(values, least) with slope 1 at equality, where ranks often are; the slope of `clamp` there depends on the version."""
    return torch.where(values < least, least, values)


@dataclass(frozen=True)
class PositiveScores:
    """The scores of the positives of a row block, and what is known of its queries."""

    scores: Tensor  # [B, P] padded with +inf
    valid: Tensor | None  # [B, P] False at the padding; None where there is none and every query has P positives
    gains: Tensor | None  # [B, P] graded relevance, None where relevance is binary
    num_relevant: Tensor  # [B] int64
    list_length: Tensor  # [B] int64, number of ranked candidates
    rank_dtype: torch.dtype  # wide enough for exact integer ranks
    one_tile: bool = False  # all scores of the call are one tile, so that comparisons with it may be kept
    columns: Tensor | None = None  # [P, B] the scores as the kernels compare them, in multiples of a score scale

    def fill(self, values: Tensor, value: float) -> Tensor:
        """`values` [B, P] with `value` at the padding."""
        return values if self.valid is None else torch.where(self.valid, values, value)

    @property
    def as_tile(self) -> Tensor:
        """The positives as candidates: padding hidden."""
        return self.scores if self.valid is None else self.scores.masked_fill(~self.valid, -torch.inf)

    @cached_property
    def masses(self) -> Tensor:
        """[B, P] 1, and 0 at the padding."""
        if self.valid is None:
            return torch.ones_like(self.scores, dtype=self.rank_dtype)
        return self.valid.to(self.rank_dtype)

    @cached_property
    def entry_gains(self) -> Tensor:
        return self.masses if self.gains is None else self.gains.to(self.rank_dtype) * self.masses

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
        return self.as_ranks(rank, positive_rank, self.masses, self.entry_gains)


@dataclass(frozen=True)
class Upstream:
    """How the queries of a row block enter the loss, and the gradient that arrived for them."""

    query_weight: Tensor  # [] or [B, 1] weight of a query in the mean
    grad_loss: Tensor  # [B, 1] d(what the user differentiates) / d(loss of the query)


class RankOps(Protocol):
    """What the function below calls: how scores become ranks, and the gradient of ranks that of scores."""

    differentiable: bool
    grad_fields: tuple[str, ...]  # fields of `Ranks` that `rank_gradient` needs the objective's derivative by

    def thresholds(self, positives: PositiveScores, key: int) -> Any:
        """What tiles are compared with. `key` is the same in forward and backward of a row block."""
        ...

    def ranks(self, counts: Any, positives: PositiveScores, thresholds: Any) -> Ranks:
        """What the counts of all tiles mean."""
        ...

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        """`Ranks.graded_rank` as a function of the scores of the positives, for objectives that are `graded`."""
        ...

    def with_gradient(self, objective: Objective, ranks: Ranks) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """[B] losses, 0 where a query has no positive, and their derivatives by `grad_fields`; None: autograd finds them."""
        ...

    def rank_gradient(self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Any, upstream: Upstream) -> Any:
        """From d(loss of a query) / d(grad_fields) to what the backward pass over tiles needs."""
        ...

    def positive_backward(
        self,
        d_thresholds: Any,
        counts: Any,
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

    @property
    def query_order(self) -> Tensor | None:
        """[Q] from the source's order of queries to the caller's, None where they are the same."""
        ...

    def positives(self, block: int) -> PositiveScores:
        """Scores of the positives of a row block."""
        ...

    def count(self, ops: Any, thresholds: list[Any], seed: int, *, keep: bool) -> list[Any]:
        """Irrelevant candidates ahead of each threshold, as `ranks` takes them. `keep`: a backward pass will follow."""
        ...

    def backward(self, ops: Any, thresholds: list[Any], rank_grads: list[Any], seed: int) -> list[Any]:
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
    query_weights: Tensor  # [] or [Q] weight of a query in the mean, whether it is taken here or not, see Blackbox
    reduce: bool = False  # return the weighted sum of the losses instead of all of them
    seed: int = 0  # of a ranker's random numbers

    @property
    def any_order(self) -> bool:
        """Whether the order of the queries makes no difference: all weigh the same in the sum that is returned."""
        return self.reduce and not self.query_weights.ndim


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "rankgrad: rank losses have no second derivative. backward(create_graph=True) works, but the gradient it returns "
            "cannot be differentiated again (as a gradient penalty or a Hessian-vector product would)"
        )


def graph_is_kept() -> bool:
    """Whether there may be another backward pass after the one under way: `retain_graph`.

    Else torch frees what a function has saved, also if its result is still held (`total += loss`). What it holds besides is for
    the function to let go of.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # noqa: SLF001  torch has no public name for it
    return ask is None or bool(ask())


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward method of a function with saved tensors: under `create_graph` its results refuse a second backward.

    `once_differentiable` refuses only where the incoming gradient needs a gradient, and else returns constants without a word.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        inputs = [tensor for tensor in ctx.saved_tensors if tensor.requires_grad]
        results = results if isinstance(results, tuple) else (results,)
        return tuple(None if each is None else _NoSecondDerivative.apply(each, *inputs) for each in results)

    return wrapper


@dataclass
class ForwardState:
    """What a forward pass keeps for the backward pass; lists hold one value per row block."""

    call: RankCall
    source: ScoreSource
    positives: list[PositiveScores]
    thresholds: list[Any]
    counts: list[Any]
    d_ranks: list[tuple[Tensor, ...]]
    d_scores: list[Tensor]  # of the positives, where the objective is `graded`


def forward_pass(call: RankCall, tensors: tuple[Tensor, ...], *, wants_gradient: bool) -> tuple[Tensor, ForwardState]:
    """[Q] loss of every query, in the caller's order where that makes a difference."""
    ops = call.ops
    with autocast_disabled(tensors[0].device):
        source = call.open_source(*tensors)
        positives = [source.positives(block) for block in range(len(source.row_blocks))]
        # keys below the seed are for row blocks, the others for tiles
        thresholds = [ops.thresholds(items, call.seed - 1 - block) for block, items in enumerate(positives)]
        counts = source.count(ops, thresholds, call.seed, keep=wants_gradient)
        losses, d_ranks = [], []
        d_scores: list[Tensor] = []
        graded = getattr(call.objective, "graded", False)
        for summed, items, compared in zip(counts, positives, thresholds, strict=True):
            ranks = ops.ranks(summed, items, compared)
            known = None if graded else ops.with_gradient(call.objective, ranks)
            if known is not None:
                losses.append(known[0])
                d_ranks.append(known[1])
                continue
            with torch.set_grad_enabled(wants_gradient):
                ranks = ranks.detached(ops.grad_fields)
                scores = [items.scores.detach().requires_grad_(wants_gradient)] if graded else []
                if graded:
                    ranks = replace(ranks, graded_rank=ops.graded_rank(scores[0], items, ranks.positive_rank.detach()))
                rows = call.objective(ranks)
                if items.valid is not None or not items.scores.shape[1]:
                    rows = torch.where(items.num_relevant > 0, rows, 0)
                found = ranks.gradients(rows, ops.grad_fields, *scores) if wants_gradient else ()
                d_ranks.append(found[: len(ops.grad_fields)])
                d_scores += found[len(ops.grad_fields) :]
            losses.append(rows.detach())
        out = losses[0] if len(losses) == 1 else torch.cat(losses)
        if source.query_order is not None and not call.any_order:
            out = torch.empty_like(out).index_copy_(0, source.query_order, out)
    return out, ForwardState(call, source, positives, thresholds, counts, d_ranks, d_scores)


def backward_pass(state: ForwardState, grad_losses: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the tensors of the forward pass, from d(what the user differentiates) / d(losses) [Q]."""
    ops, source, call = state.call.ops, state.source, state.call
    with autocast_disabled(grad_losses.device):
        order, weights = None if call.any_order else source.query_order, call.query_weights
        rows = (grad_losses if order is None else grad_losses[order])[:, None]
        if weights.ndim:
            weights = (weights if order is None else weights[order])[:, None]
        upstream = [Upstream(weights[block] if weights.ndim else weights, rows[block]) for block in source.row_blocks]
        blocks = list(zip(state.positives, state.thresholds, upstream, strict=True))
        rank_grads = [ops.rank_gradient(d, *block) for d, block in zip(state.d_ranks, blocks, strict=True)]
        d_thresholds = source.backward(ops, state.thresholds, rank_grads, call.seed)
        d_positives = [
            ops.positive_backward(d, counts, rank_grad, *block)
            for d, counts, rank_grad, block in zip(d_thresholds, state.counts, rank_grads, blocks, strict=True)
        ]
        for i, d_scores in enumerate(state.d_scores):
            d_positives[i] = d_positives[i] + state.positives[i].fill(d_scores * upstream[i].grad_loss, 0)
        return source.input_grads(d_positives)


def reduced(losses: Tensor, query_weights: Tensor, *, reduce: bool) -> Tensor:
    """The weighted sum of losses [Q], or the losses themselves. NaN weights make both NaN: scores that are NaN have no rank."""
    if not reduce:
        return losses * (1 + 0 * query_weights)
    return losses.sum() * query_weights if query_weights.ndim == 0 else (losses * query_weights).sum()


class RankLossFunction(torch.autograd.Function):
    """Losses of all queries as a function of embeddings or scores."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)  # read again in backward only to notice a change in place
        wants_gradient = call.ops.differentiable and any(ctx.needs_input_grad)
        losses, ctx.state = forward_pass(call, tensors, wants_gradient=wants_gradient)
        ctx.num_queries = losses.shape[0]
        if launch_instead() and wants_gradient:
            backward_pass(ctx.state, torch.ones_like(losses))
        return reduced(losses, call.query_weights, reduce=call.reduce)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        tensors, state = ctx.saved_tensors, ctx.state
        if not graph_is_kept():
            ctx.state = None
        call = state.call
        if not call.ops.differentiable:
            return None, *(torch.zeros_like(t) for t in tensors)
        factor = call.query_weights if call.reduce else 1 + 0 * call.query_weights
        return None, *backward_pass(state, (grad_losses * factor).expand(ctx.num_queries))


def rank_losses(call: RankCall, *tensors: Tensor) -> Tensor:
    """[Q] loss of every query, 0 where a query has no relevant candidate, or [] their weighted sum."""
    if torch.compiler.is_compiling():
        # a compiled training step breaks here and goes on after; decorated, it would load the compiler with the package
        losses: Tensor = torch.compiler.disable(RankLossFunction.apply)(call, *tensors)
    else:
        losses = RankLossFunction.apply(call, *tensors)
    return losses
