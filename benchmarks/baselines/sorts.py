"""Baselines of RaMBO's losses that rank by sorting, of every row of a batch and of one long list."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.dense import relevant_items, scores_without_self
from benchmarks.presets import AP_LAM, AP_MARGIN, RECALL_LAM, RECALL_MARGIN


class _SortedRambo(torch.autograd.Function):
    """RaMBO with the ranking of every row by sorting: once for the ranks, once more for the perturbed scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, relevant: Tensor, lam: float, margin: float, recall: bool) -> Tensor:
        # the margin between relevant and irrelevant items, all of it on the few relevant ones
        shifted = scores.scatter_add(1, relevant, scores.new_full(relevant.shape, -margin))
        all_ranks = _rank_rows(shifted)
        rank = all_ranks.gather(1, relevant)
        positive_rank = (rank[:, None, :] <= rank[:, :, None]).sum(2)
        loss, slope = rambo_terms(rank, positive_rank, recall)
        length = scores.shape[1] - 1
        perturbation = slope * (lam * length / slope.numel())  # lam belongs to ranks divided by the list's length
        ctx.save_for_backward(shifted, all_ranks, relevant, perturbation)
        ctx.scale = 1 / (lam * length)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        shifted, all_ranks, relevant, perturbation = ctx.saved_tensors
        perturbed = _rank_rows(shifted.scatter_add(1, relevant, perturbation)).sub_(all_ranks)
        return perturbed.mul_(outputs[0] * ctx.scale), None, None, None, None


def rambo_terms(rank: Tensor, positive_rank: Tensor, recall: bool) -> tuple[Tensor, Tensor]:
    """What each relevant item adds to the loss, and the derivative by its rank: of loglog recall or of AP."""
    if recall:
        ahead = rank - positive_rank
        return torch.log1p(torch.log1p(ahead)), 1 / (1 + torch.log1p(ahead)) / (1 + ahead)
    return 1 - positive_rank / rank, positive_rank / rank.square()


def _rank_rows(scores: Tensor) -> Tensor:
    order = scores.argsort(1, descending=True)
    positions = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    return torch.empty_like(scores).scatter_(1, order, positions.expand_as(scores))


def sorted_rambo_recall(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """RaMBO's recall loss, weighted by loglog."""
    relevant = relevant_items(labels, per_class)
    loss: Tensor = _SortedRambo.apply(scores_without_self(embeddings), relevant, RECALL_LAM, RECALL_MARGIN, True)
    return loss


def sorted_rambo_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """RaMBO's AP loss."""
    relevant = relevant_items(labels, per_class)
    loss: Tensor = _SortedRambo.apply(scores_without_self(embeddings), relevant, AP_LAM, AP_MARGIN, False)
    return loss


def two_sorts_ap(scores: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """RaMBO's AP loss of one list [n] and its gradient: two sorts, ranks by a scatter, in integers."""
    length = len(scores)
    positions = torch.arange(1, length + 1, device=scores.device, dtype=torch.int32)
    order = scores.argsort(descending=True)
    rank = torch.empty_like(positions).scatter_(0, order, positions)
    positive_rank = torch.empty_like(positions).scatter_(0, order, relevance[order].cumsum(0, dtype=torch.int32))
    total = relevance.sum()
    precision = positive_rank.to(scores.dtype) / rank * relevance
    perturbed = scores + precision / rank * (AP_LAM * length / total)
    del positive_rank, order
    order = perturbed.argsort(descending=True)
    rank_change = torch.empty_like(positions).scatter_(0, order, positions).sub_(rank)
    return 1 - precision.sum() / total, rank_change.to(scores.dtype) / (AP_LAM * length)


def six_argsorts_ap(scores: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The same as the published code has it: a ranking is two argsorts, and there are three of them, in floats."""

    def ranking(values: Tensor) -> Tensor:
        return (torch.argsort(torch.argsort(values).flip(0)) + 1).to(scores.dtype)

    length, relevant = len(scores), relevance.to(scores.dtype)
    total = relevant.sum()
    rank = ranking(scores)
    positive_rank = ranking(-rank + 2.0 * length * relevant)
    precision = positive_rank / rank * relevant
    lam = AP_LAM * length
    return 1 - precision.sum() / total, (ranking(scores + precision / rank * (lam / total)) - rank) / lam
