"""Baselines that store every comparison at once: what a user would write first, eagerly or under torch.compile."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.presets import BINS, KS, TAU_CUT, TAU_RANK

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def relevant_items(labels: Tensor, per_class: int) -> Tensor:
    """[N, per_class - 1]: for each query the other members of its class."""
    members = labels.argsort().view(-1, per_class)
    member, other = (
        torch.arange(per_class, device=labels.device)[:, None],
        torch.arange(per_class - 1, device=labels.device),
    )
    others = other + (other >= member)  # [per_class, per_class - 1]: all members but the one of the row
    relevant = torch.empty(len(labels), per_class - 1, dtype=torch.int64, device=labels.device)
    relevant[members] = members[:, others]
    return relevant


def scores_without_self(embeddings: Tensor) -> Tensor:
    """Cosine similarities [N, N]; minus infinity on the diagonal takes the query out of every sum of sigmoids."""
    unit = normalize(embeddings)
    return (unit @ unit.T).masked_fill(torch.eye(len(unit), dtype=torch.bool, device=unit.device), -torch.inf)


def recall_at_k_from(rank: Tensor) -> Tensor:
    """The RS@k loss of soft ranks [queries, relevant]."""
    hits = [torch.sigmoid((k - rank) / TAU_CUT).sum(1).div(min(k, rank.shape[1])).clamp(max=1) for k in KS]
    return 1 - torch.stack(hits).mean()


def dense_ranks(embeddings: Tensor, labels: Tensor, per_class: int) -> tuple[Tensor, Tensor]:
    """Soft ranks [N, relevant] among all and among the relevant candidates, through [N, relevant, N] comparisons."""
    scaled = scores_without_self(embeddings) / TAU_RANK
    thresholds = scaled.gather(1, relevant_items(labels, per_class))
    # an item's comparison with itself is sigmoid(0) = 1/2, which turns the 1 of the rank into 1/2;
    # in place, because the difference is needed neither again nor for the gradient
    rank = 0.5 + (scaled[:, None, :] - thresholds[:, :, None]).sigmoid_().sum(2)
    positive_rank = 0.5 + (thresholds[:, None, :] - thresholds[:, :, None]).sigmoid_().sum(2)
    return rank, positive_rank


def dense_recall_at_k(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """RS@k of dense soft ranks."""
    return recall_at_k_from(dense_ranks(embeddings, labels, per_class)[0])


def dense_smooth_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Smooth-AP of dense soft ranks: not the N x N x N of the published code, since only relevant items need a rank."""
    rank, positive_rank = dense_ranks(embeddings, labels, per_class)
    return 1 - (positive_rank / rank).mean()


def loop_recall_at_k(embeddings: Tensor, labels: Tensor, per_class: int, queries: int | None = None) -> Tensor:
    """RS@k query by query, as published (without the query in its own list); of the first `queries` only, if given."""
    unit = normalize(embeddings)
    relevant = relevant_items(labels, per_class)
    # unbind, because the gradient of scores[i] would be a matrix of zeros but for one row, for every single query
    rows = (unit[:queries] @ unit.T / TAU_RANK).unbind()
    losses = []
    for query, row in enumerate(rows):
        thresholds = row[relevant[query]]
        ahead = (row - thresholds[:, None]).sigmoid_()
        rank = 0.5 + ahead.sum(1) - ahead[:, query]
        losses.append(recall_at_k_from(rank[None]))
    return torch.stack(losses).mean()


def dense_fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """FastAP through every pair's part in every cumulative bin, [bins + 1, N, N].

    A triangular pulse summed over the bins up to one is a ramp, and a ramp costs half of what two flanks cost.
    """
    unit = normalize(embeddings)
    # the squared distance 2 - 2s in units of the bin width 4 / bins
    position = (1 - unit @ unit.T).clamp(0, 2) * (BINS / 2)
    relevant = position.gather(1, relevant_items(labels, per_class))
    self_mask = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    position = position.masked_fill(self_mask, 2.0 * BINS)  # beyond every bin
    end = torch.arange(1.0, BINS + 2, device=unit.device, dtype=unit.dtype)
    return fast_ap_from((end[:, None, None] - position).clamp(0, 1).sum(2).T, relevant)


def fast_ap_from(total: Tensor, relevant: Tensor) -> Tensor:
    """FastAP of cumulative bins [N, bins + 1] of all candidates and the relevant items' positions in them."""
    end = torch.arange(1.0, BINS + 2, device=total.device, dtype=total.dtype)
    positives = (end - relevant[:, :, None]).clamp(0, 1).sum(1)
    in_bin = positives.diff(dim=1, prepend=torch.zeros_like(positives[:, :1]))
    # where nothing lies up to a bin nothing relevant lies in it: the term is 0, whatever it is divided by
    ratio = in_bin * positives / total.clamp(min=torch.finfo(total.dtype).tiny)
    return 1 - ratio.sum(1).mean() / relevant.shape[1]


class UnavailableError(Exception):
    """This machine lacks what the formulation needs."""


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function under torch.compile, which can fuse comparisons that eager torch stores."""

    @functools.cache
    def build() -> Callable[Arguments, Result]:
        return torch.compile(function, dynamic=False)

    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return build()(*arguments, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise UnavailableError(f"torch.compile: {problem}") from problem

    return run
