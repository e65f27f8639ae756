"""What an objective sees: the ranks of the relevant items of a few queries, as plain tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# What an objective can be differentiated by.
LEAVES = ("rank", "positive_rank", "mass", "gain")


@dataclass(frozen=True)
class Ranks:
    """Ranks of relevant items, one row per query, padded to the longest row.

    An entry is one relevant item of mass 1 (`Exact`, `Sigmoid`, `Blackbox`) or one bin centre that holds the mass of
    the relevant items around it (`Histogram`). Padding has mass and gain 0 and rank 1, so sums over entries need no mask.

    Dimension letters:  B queries   E entries
    """

    rank: Tensor  # [B, E] among all candidates, 1 is best
    positive_rank: Tensor  # [B, E] among the relevant candidates
    mass: Tensor  # [B, E] how many relevant items the entry stands for
    gain: Tensor  # [B, E] their graded relevance, equal to the mass where relevance is binary
    ideal: Tensor  # [B, I] the gains of the single relevant items in descending order, padded with 0
    num_relevant: Tensor  # [B] relevant candidates of each query, as a float

    @property
    def weight(self) -> Tensor:
        """[B, E] share of the entry in a mean over the query's relevant items; 0 where there are none."""
        return self.mass / self.num_relevant.clamp(min=1)[:, None]

    def mean(self, values: Tensor) -> Tensor:
        """[B] mean of `values` [B, E] over the relevant items of each query."""
        return (self.weight * values).sum(dim=1)

    def total(self, values: Tensor) -> Tensor:
        """[B] sum of `values` [B, E] over the relevant items of each query."""
        return (self.mass * values).sum(dim=1)

    def detached(self, leaves: Sequence[str] = LEAVES) -> "Ranks":
        """The same ranks with some of them leaves of a new graph, so that an objective can be differentiated by these."""
        return replace(self, **{name: getattr(self, name).detach().requires_grad_() for name in leaves})

    def gradients(self, losses: Tensor, leaves: Sequence[str] = LEAVES) -> tuple[Tensor, ...]:
        """D losses / d leaves; a row of `losses` depends on its own row of ranks only."""
        tensors = tuple(getattr(self, name) for name in leaves)
        if not losses.requires_grad:  # an objective may ignore the ranks, or be constant
            return tuple(torch.zeros_like(t) for t in tensors)
        return torch.autograd.grad(losses.sum(), tensors, allow_unused=True, materialize_grads=True)
