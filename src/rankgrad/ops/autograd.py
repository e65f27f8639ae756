"""The one autograd function: count ranks over tiles, apply an objective, visit the tiles again for the gradient.

    forward    tiles -> counts -> ranks -> objective -> one loss per query and its derivative by the ranks
    backward   the same tiles again -> gradient of their scores -> gradients of what the door was opened with

Between the two only tensors of the size of the relevant pairs are kept.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rankgrad.ops.rankers import Ranker, Relevant, Share
from rankgrad.ops.ranks import Ranks

Objective = Callable[[Ranks], Tensor]


class Door(Protocol):
    """Where scores come from. Queries are cut into chunks; a list below holds one value per chunk."""

    chunks: list[slice]
    order: Tensor  # [Q] from the door's order of queries to the caller's

    def relevant(self, chunk: int) -> Relevant:
        """The relevant items of a chunk."""
        ...

    def count(self, ranker: Ranker, prepared: list[Any], seed: int) -> list[Tensor]:
        """What `ranker.count` gives, summed over all irrelevant candidates."""
        ...

    def pull(self, ranker: Ranker, prepared: list[Any], aimed: list[Any], seed: int) -> list[Tensor | None]:
        """What `ranker.pull` gives for the comparisons, summed; the gradient of the scores stays with the door."""
        ...

    def gradients(self, d_relevant: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the tensors the door was opened with, after `pull`, the relevant scores' part added."""
        ...


@dataclass(frozen=True)
class Plan:
    """All that a call needs besides the tensors that get a gradient."""

    open: Callable[..., Door]  # from the tensors that get a gradient to a door
    ranker: Ranker
    objective: Objective
    unit: Tensor  # share of a query in the loss as reduced, see Blackbox
    seed: int = 0  # of what a ranker draws at random


def island(device: torch.device) -> Any:
    """Scores and ranks in half precision lose order; autocast stays outside."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


class _AllScores(torch.autograd.Function):
    """queries @ candidates.T, outside of autocast in both directions."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(queries, candidates)
        with island(queries.device):
            return queries @ candidates.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor]:
        queries, candidates = ctx.saved_tensors
        with island(d_scores.device):
            return d_scores @ candidates, d_scores.t() @ queries


def all_scores(queries: Tensor, candidates: Tensor) -> Tensor:
    """[Q, C] every score of a batch so small that they may exist at once."""
    scores: Tensor = _AllScores.apply(queries, candidates)
    return scores


@dataclass
class Passed:
    """What a forward pass leaves for the backward pass; lists hold one value per chunk."""

    plan: Plan
    door: Door
    relevant: list[Relevant]
    prepared: list[Any]
    counts: list[Tensor]
    grads: list[tuple[Tensor, ...]]


def forward_pass(plan: Plan, tensors: tuple[Tensor, ...], *, wants_gradient: bool) -> tuple[Tensor, Passed]:
    """[Q] loss of every query in the caller's order."""
    ranker = plan.ranker
    with island(tensors[0].device):
        door = plan.open(*tensors)
        relevant = [door.relevant(chunk) for chunk in range(len(door.chunks))]
        # keys below the seed are for chunks, the others for tiles
        prepared = [ranker.prepare(items, plan.seed - 1 - chunk) for chunk, items in enumerate(relevant)]
        counts = door.count(ranker, prepared, plan.seed)
        losses, grads = [], []
        for summed, items, ready in zip(counts, relevant, prepared, strict=True):
            with torch.set_grad_enabled(wants_gradient):
                ranks = ranker.ranks(summed, items, ready).detached(ranker.leaves)
                rows = torch.where(items.num_relevant > 0, plan.objective(ranks), 0)
                grads.append(ranks.gradients(rows, ranker.leaves) if wants_gradient else ())
            losses.append(rows.detach())
        in_order = torch.cat(losses)
        out = torch.empty_like(in_order).index_copy_(0, door.order, in_order)
    return out, Passed(plan, door, relevant, prepared, counts, grads)


def backward_pass(passed: Passed, incoming: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the tensors of the forward pass, from d(what the user differentiates) / d(losses) [Q]."""
    ranker, door, seed = passed.plan.ranker, passed.door, passed.plan.seed
    with island(incoming.device):
        rows = incoming[door.order, None]
        shares = [Share(passed.plan.unit, rows[chunk]) for chunk in door.chunks]
        per_chunk = list(zip(passed.relevant, passed.prepared, shares, strict=True))
        aimed = [ranker.aim(grads, *chunk) for grads, chunk in zip(passed.grads, per_chunk, strict=True)]
        pulled = door.pull(ranker, passed.prepared, aimed, seed)
        landed = [
            ranker.land(part, counts, aim, *chunk)
            for part, counts, aim, chunk in zip(pulled, passed.counts, aimed, per_chunk, strict=True)
        ]
        return door.gradients(landed)


class _RankLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)  # read again in backward only to notice a change in place
        wants_gradient = plan.ranker.differentiable and any(ctx.needs_input_grad)
        losses, ctx.passed = forward_pass(plan, tensors, wants_gradient=wants_gradient)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if not ctx.passed.plan.ranker.differentiable:
            return None, *(torch.zeros_like(t) for t in tensors)
        return None, *backward_pass(ctx.passed, incoming)


def rank_losses(plan: Plan, *tensors: Tensor) -> Tensor:
    """[Q] loss of every query, 0 where a query has no relevant candidate."""
    if torch.compiler.is_compiling():
        # a compiled training step stops here and goes on after; decorated, it would load the compiler with the package
        losses: Tensor = torch.compiler.disable(_RankLosses.apply)(plan, *tensors)
    else:
        losses = _RankLosses.apply(plan, *tensors)
    return losses
