"""The definition of every ranker, written to be read: float64, one query at a time, all candidates at once.

It runs on request only (`backend="reference"`), in tests and benchmarks. It shares no arithmetic with the tiled path: ranks
follow their definitions, smooth rankers get their gradient from autograd and the blackbox ranker from two full rankings.
"""

from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.autograd import Objective, Ranks
from rankgrad.ops.exact_rankers import Blackbox, Exact
from rankgrad.ops.histogram_ranker import SMALLEST_RANK, Histogram
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound


def reference_losses(
    scores: Tensor,
    relevance: Tensor,
    candidates: Tensor | None,
    ranker: Ranker,
    objective: Objective,
    query_weights: Tensor,
) -> Tensor:
    """[Q] losses of score lists [Q, C] by definition."""
    losses = []
    for query in range(scores.shape[0]):
        on_list = slice(None) if candidates is None else candidates[query]
        y, grades = scores[query][on_list].double(), relevance[query][on_list].double()
        if not (grades > 0).any():
            losses.append(0 * scores[query].sum())
        elif isinstance(ranker, Blackbox):
            losses.append(
                _AlgorithmOne.apply(
                    y, grades, ranker, objective, float(query_weights[query] if query_weights.ndim else query_weights)
                )
            )
        else:
            losses.append(objective(_ranks(y, grades, ranker))[0] + 0 * y.sum())  # attached, also where ranks have no gradient
    return torch.stack(losses)


def _ranks(y: Tensor, grades: Tensor, ranker: Ranker) -> Ranks:
    relevant = grades > 0
    gains = grades[relevant]
    if isinstance(ranker, Histogram):
        position = ((ranker.high - y) / ranker.width).clamp(0, ranker.bins)
        centres = torch.arange(ranker.bins + 1, device=y.device)
        pulse = (1 - (position - centres[:, None]).abs()).clamp(min=0)  # [bins + 1, n]
        mass, gain = pulse[:, relevant].sum(1), (pulse[:, relevant] * gains).sum(1)
        return _as_ranks(pulse.sum(1).cumsum(0).clamp(min=SMALLEST_RANK), mass.cumsum(0), mass, gain, gains)
    if isinstance(ranker, Exact):
        rank, positive_rank = proper_ranking(y, relevant)[relevant], proper_ranking(y[relevant], relevant[relevant])
        return _as_ranks(rank, positive_rank, torch.ones_like(gains), gains, gains)
    if isinstance(ranker, UpperBound):
        t = y[~relevant][None, :] - y[relevant][:, None]  # [x, z]: how far an irrelevant z is ahead of x
        near = torch.sigmoid(t / ranker.tau) + 0.5 * (t > 0)
        irrelevant = torch.where(t > ranker.delta, ranker.rho * (t - ranker.delta) + ranker.offset, near).sum(1)
        positive_rank = proper_ranking(y[relevant].detach(), relevant[relevant])
        return _as_ranks(positive_rank + irrelevant, positive_rank, torch.ones_like(gains), gains, gains)
    if isinstance(ranker, Sigmoid):
        ahead = torch.sigmoid((y[None, :] - y[:, None]) / ranker.tau)  # [x, z]: z is ahead of x
    else:
        raise TypeError(f"reference: no definition of {ranker!r}")
    others = ahead * (1 - torch.eye(len(y), dtype=y.dtype, device=y.device))
    rank, positive_rank = 1 + others.sum(1), 1 + others[:, relevant].sum(1)
    graded_rank = gains + (others[relevant][:, relevant] * torch.minimum(gains[:, None], gains)).sum(1)
    return _as_ranks(rank[relevant], positive_rank[relevant], torch.ones_like(gains), gains, gains, graded_rank)


def _as_ranks(
    rank: Tensor, positive_rank: Tensor, mass: Tensor, gain: Tensor, gains: Tensor, graded_rank: Tensor | None = None
) -> Ranks:
    ideal = gains.sort(descending=True).values
    if graded_rank is None and len(gain) == len(gains):  # of items, each with an exact rank
        graded_rank = (torch.minimum(gains[:, None], gains) * (positive_rank <= positive_rank[:, None])).sum(1)
    return Ranks(
        rank[None],
        positive_rank[None],
        mass[None],
        gain[None],
        ideal[None],
        gains.new_tensor([len(gains)]),
        None if graded_rank is None else graded_rank[None],
    )


def proper_ranking(y: Tensor, relevant: Tensor) -> Tensor:
    """Ranks 1..n by descending score; of equals an irrelevant item comes first, then the earlier one."""
    by_relevance = relevant.long().argsort(stable=True)
    order = by_relevance[y[by_relevance].argsort(descending=True, stable=True)]
    ranks = torch.empty_like(y)
    ranks[order] = torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device)
    return ranks


class _AlgorithmOne(torch.autograd.Function):
    """RaMBO's Algorithm 1 on one list, with lambda = lam * n."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, grades: Tensor, ranker: Blackbox, objective: Objective, query_weight: float) -> Tensor:
        relevant = grades > 0
        shift = torch.where(relevant, -ranker.margin / 2, ranker.margin / 2)
        if ranker.margin_noise:
            shift = shift * torch.randn_like(y).abs()
        shifted = y + shift
        rank = proper_ranking(shifted, relevant)
        positive_rank = proper_ranking(shifted[relevant], relevant[relevant])
        gains = grades[relevant]
        with torch.enable_grad():
            ranks = _as_ranks(rank[relevant], positive_rank, torch.ones_like(gains), gains, gains).detached()
            loss = objective(ranks)[0]
            d_rank = torch.zeros_like(y)
            d_rank[relevant] = query_weight * ranks.gradients(loss)[0][0]
        raw_lam = ranker.lam * len(y)
        perturbed = proper_ranking(shifted + raw_lam * d_rank, relevant)
        ctx.gradient = (perturbed - rank) / (raw_lam * query_weight) if query_weight else torch.zeros_like(y)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient * grad_loss, None, None, None, None
