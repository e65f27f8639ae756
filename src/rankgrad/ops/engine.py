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


class _RankLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)  # read again in backward only to notice a change in place
        ranker = ctx.ranker = plan.ranker
        ctx.unit, ctx.seed = plan.unit, plan.seed
        wants_gradient = ranker.differentiable and any(ctx.needs_input_grad)
        with island(tensors[0].device):
            door = ctx.door = plan.open(*tensors)
            ctx.relevant = [door.relevant(chunk) for chunk in range(len(door.chunks))]
            # keys below the seed are for chunks, the others for tiles
            ctx.prepared = [ranker.prepare(relevant, plan.seed - 1 - chunk) for chunk, relevant in enumerate(ctx.relevant)]
            ctx.counts = door.count(ranker, ctx.prepared, plan.seed)
            losses, ctx.grads = [], []
            for counts, relevant, prepared in zip(ctx.counts, ctx.relevant, ctx.prepared, strict=True):
                with torch.set_grad_enabled(wants_gradient):
                    ranks = ranker.ranks(counts, relevant, prepared).detached()
                    rows = torch.where(relevant.num_relevant > 0, plan.objective(ranks), 0)
                    ctx.grads.append(ranks.gradients(rows) if wants_gradient else ())
                losses.append(rows.detach())
            out = torch.cat(losses)
            return torch.empty_like(out).index_copy_(0, door.order, out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        ranker, door = ctx.ranker, ctx.door
        tensors = ctx.saved_tensors
        if not ranker.differentiable:
            return None, *(torch.zeros_like(t) for t in tensors)
        with island(incoming.device):
            incoming = incoming[door.order, None]
            shares = [Share(ctx.unit, incoming[chunk]) for chunk in door.chunks]
            per_chunk = list(zip(ctx.relevant, ctx.prepared, shares, strict=True))
            aimed = [ranker.aim(grads, *chunk) for grads, chunk in zip(ctx.grads, per_chunk, strict=True)]
            pulled = door.pull(ranker, ctx.prepared, aimed, ctx.seed)
            landed = [
                ranker.land(part, counts, aim, *chunk)
                for part, counts, aim, chunk in zip(pulled, ctx.counts, aimed, per_chunk, strict=True)
            ]
            return None, *door.gradients(landed)


@torch.compiler.disable
def rank_losses(plan: Plan, *tensors: Tensor) -> Tensor:
    """[Q] loss of every query, 0 where a query has no relevant candidate."""
    losses: Tensor = _RankLosses.apply(plan, *tensors)
    return losses
