"""The one autograd function: count ranks over tiles, apply an objective, visit the tiles again for the gradient.

    forward    tiles -> counts -> ranks -> objective -> one loss per query and its derivative by the ranks
    backward   the same tiles again -> gradient of their scores -> gradients of what the door was opened with

Between the two only tensors of the size of the relevant pairs are kept.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.doors import Door
from rankgrad.ops.rankers import Ranker, Relevant, Share
from rankgrad.ops.ranks import Ranks

Objective = Callable[[Ranks], Tensor]


@dataclass(frozen=True)
class Plan:
    """All that a call needs besides the tensors that get a gradient."""

    open: Callable[..., Door]  # from the tensors that get a gradient to a door
    ranker: Ranker
    objective: Objective
    unit: Tensor  # share of a query in the loss as reduced, see Blackbox
    seed: int = 0  # of what a ranker draws at random

    def chunk_key(self, chunk: int) -> int:
        return self.seed + 2 * chunk

    def tile_key(self, tile: int) -> int:
        return self.seed + 2 * tile + 1


@dataclass
class ChunkState:
    """What a chunk keeps from forward to backward."""

    relevant: Relevant
    prepared: Any
    counts: Tensor | int = 0
    grads: tuple[Tensor, ...] = ()


def count_chunks(door: Door, plan: Plan) -> list[ChunkState]:
    """The relevant items of every chunk and the irrelevant candidates ahead of them."""
    states = []
    for chunk in range(len(door.chunks)):
        relevant = door.relevant(chunk)
        states.append(ChunkState(relevant, plan.ranker.prepare(relevant, plan.chunk_key(chunk))))

    def count(tile: Tensor, chunk: int, key: int) -> None:
        states[chunk].counts += plan.ranker.count(tile, states[chunk].prepared, plan.tile_key(key))

    door.visit(count)
    return states


def island(device: torch.device) -> Any:
    """Scores and ranks in half precision lose order; autocast stays outside."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


class _RankLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        with island(tensors[0].device):
            door = plan.open(*tensors)
            ctx.states = count_chunks(door, plan)
            losses = []
            for state in ctx.states:
                ranks = plan.ranker.ranks(state.counts, state.relevant, state.prepared)
                with torch.enable_grad():
                    ranks = ranks.detached()
                    rows = torch.where(state.relevant.num_relevant > 0, plan.objective(ranks), 0)
                    if plan.ranker.differentiable and any(ctx.needs_input_grad):
                        state.grads = ranks.gradients(rows)
                losses.append(rows.detach())
            out = torch.cat(losses)
            return torch.empty_like(out).index_copy_(0, door.order, out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        plan, states = ctx.plan, ctx.states
        tensors = ctx.saved_tensors
        if not plan.ranker.differentiable:
            return None, *(torch.zeros_like(t) for t in tensors)
        with island(incoming.device):
            door = plan.open(*tensors)
            incoming = incoming[door.order, None]
            shares = [Share(plan.unit, incoming[chunk]) for chunk in door.chunks]
            aimed = [plan.ranker.aim(s.grads, s.relevant, s.prepared, share) for s, share in zip(states, shares, strict=True)]
            pulled: list[Tensor | None] = [None] * len(states)

            def pull(tile: Tensor, chunk: int, key: int) -> Tensor:
                gradient, part = plan.ranker.pull(tile, states[chunk].prepared, aimed[chunk], plan.tile_key(key))
                earlier = pulled[chunk]
                pulled[chunk] = part if earlier is None or part is None else earlier + part
                return gradient

            door.visit_back(pull)
            for chunk, (state, share) in enumerate(zip(states, shares, strict=True)):
                landed = plan.ranker.land(pulled[chunk], state.counts, state.relevant, state.prepared, aimed[chunk], share)
                door.give_relevant(chunk, landed)
            return None, *door.gradients()


@torch.compiler.disable
def rank_losses(plan: Plan, *tensors: Tensor) -> Tensor:
    """[Q] loss of every query, 0 where a query has no relevant candidate."""
    return _RankLosses.apply(plan, *tensors)
