"""Ranks among the positives that count gains: H-rank of hierarchical average precision (HAPPIER, Ramzi et al., 2022).

    graded_rank(x) = gain(x) + sum over positives z ahead of x of min(gain(z), gain(x))

Dimension letters:  B queries   P positives, padded
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.autograd import PositiveScores, first_derivative_only

# Comparisons of positives with each other that exist at once: 2**22 float32 are 16 MiB.
MOST_COMPARISONS = 2**22


def _row_chunks(gains: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and for them the smaller of the gains of each item and each other [b, item, other]; 0 at the padding."""
    step = max(MOST_COMPARISONS // max(gains.shape[1], 1) ** 2, 1)
    for start in range(0, len(gains), step):
        rows = slice(start, start + step)
        yield rows, torch.minimum(gains[rows, :, None], gains[rows, None, :])


def exact_graded_rank(positives: PositiveScores, positive_rank: Tensor) -> Tensor:
    """From exact ranks among the positives, which all differ."""
    gains = positives.entry_gains
    parts = [
        (smaller * (positive_rank[rows, None, :] <= positive_rank[rows, :, None])).sum(dim=2)
        for rows, smaller in _row_chunks(gains)
    ]
    return torch.cat(parts)


class _SigmoidGradedRank(torch.autograd.Function):
    """With a logistic in place of the step; the comparisons are made again for the gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, positives: PositiveScores, tau: float) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.positives, ctx.tau = positives, tau
        gains = positives.entry_gains
        parts = [(smaller * ahead).sum(dim=2) for smaller, ahead in _compared(scores, positives, tau)]
        # an item ahead of itself counts sigmoid(0) = 1/2
        return torch.cat(parts) + 0.5 * gains

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_rank: Tensor) -> tuple[Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        parts, begin = [], 0
        for smaller, ahead in _compared(scores, ctx.positives, ctx.tau):
            rows = slice(begin, begin + len(ahead))
            begin = rows.stop
            slope = ahead * (1 - ahead) * smaller * (d_rank[rows, :, None] / ctx.tau)
            parts.append(slope.sum(dim=1) - slope.sum(dim=2))  # as the item ahead, and as the one compared with
        return torch.cat(parts).to(scores.dtype), None, None


def _compared(scores: Tensor, positives: PositiveScores, tau: float) -> Iterator[tuple[Tensor, Tensor]]:
    tile = positives.as_tile
    for rows, smaller in _row_chunks(positives.entry_gains):
        yield smaller, (tile[rows, None, :] - scores[rows, :, None]).div_(tau).sigmoid_()


def sigmoid_graded_rank(scores: Tensor, positives: PositiveScores, tau: float) -> Tensor:
    """As a function of the scores of the positives."""
    ranks: Tensor = _SigmoidGradedRank.apply(scores, positives, tau)
    return ranks
