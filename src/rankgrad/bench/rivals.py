"""The formulations that the losses are measured against: the best a user would write by hand, and published ones.

All take embeddings [N, d] and labels [N] of a class-balanced batch (`per_class` of every class, in any order),
normalise the embeddings, and return the mean loss over the queries, with the papers' settings. They differ in how
they get the ranks, hence in time and memory, and not in what they compute, unless `Rival.differs` says so.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

Formulation = Callable[[Tensor, Tensor, int], Tensor]

KS = (1, 2, 4, 8, 16)
TAU_RANK = 0.01
TAU_CUT = 1.0
BINS = 10
RECALL_LAM, RECALL_MARGIN = 4.0, 0.02
AP_LAM, AP_MARGIN = 0.5, 0.0


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
    own = scaled.gather(1, relevant_items(labels, per_class))
    # an item's comparison with itself is sigmoid(0) = 1/2, which turns the 1 of the rank into 1/2;
    # in place, because the difference is needed neither again nor for the gradient
    rank = 0.5 + (scaled[:, None, :] - own[:, :, None]).sigmoid_().sum(2)
    positive_rank = 0.5 + (own[:, None, :] - own[:, :, None]).sigmoid_().sum(2)
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
        own = row[relevant[query]]
        ahead = (row - own[:, None]).sigmoid_()
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
    total = (end[:, None, None] - position).clamp(0, 1).sum(2).T
    positives = (end - relevant[:, :, None]).clamp(0, 1).sum(1)
    in_bin = positives.diff(dim=1, prepend=torch.zeros_like(positives[:, :1]))
    # where nothing lies up to a bin nothing relevant lies in it: the term is 0, whatever it is divided by
    ratio = in_bin * positives / total.clamp(min=torch.finfo(unit.dtype).tiny)
    return 1 - ratio.sum(1).mean() / relevant.shape[1]


class _SortedRambo(torch.autograd.Function):
    """RaMBO with the ranking of every row by sorting: once for the ranks, once more for the perturbed scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, relevant: Tensor, lam: float, margin: float, recall: bool) -> Tensor:
        # the margin between relevant and irrelevant items, all of it on the few relevant ones
        shifted = scores.scatter_add(1, relevant, scores.new_full(relevant.shape, -margin))
        all_ranks = _rank_rows(shifted)
        rank = all_ranks.gather(1, relevant)
        positive_rank = (rank[:, None, :] <= rank[:, :, None]).sum(2)
        if recall:
            ahead = rank - positive_rank
            loss = torch.log1p(torch.log1p(ahead))
            slope = 1 / (1 + torch.log1p(ahead)) / (1 + ahead)
        else:
            loss = 1 - positive_rank / rank
            slope = positive_rank / rank.square()
        length = scores.shape[1] - 1
        perturbation = slope * (lam * length / slope.numel())  # lam belongs to ranks divided by the list's length
        ctx.save_for_backward(shifted, all_ranks, relevant, perturbation)
        ctx.scale = 1 / (lam * length)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        shifted, all_ranks, relevant, perturbation = ctx.saved_tensors
        moved = _rank_rows(shifted.scatter_add(1, relevant, perturbation)).sub_(all_ranks)
        return moved.mul_(outputs[0] * ctx.scale), None, None, None, None


def _rank_rows(scores: Tensor) -> Tensor:
    order = scores.argsort(1, descending=True)
    places = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    return torch.empty_like(scores).scatter_(1, order, places.expand_as(scores))


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


def library_fast_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """FastAP of pytorch-metric-learning."""
    from pytorch_metric_learning.losses import FastAPLoss

    loss: Tensor = FastAPLoss(num_bins=BINS)(embeddings, labels)
    return loss


def library_smooth_ap(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
    """Smooth-AP of pytorch-metric-learning, N x N x N."""
    from pytorch_metric_learning.losses import SmoothAPLoss

    loss: Tensor = SmoothAPLoss(temperature=TAU_RANK)(embeddings, labels)
    return loss


class UnavailableError(Exception):
    """This machine lacks what the formulation needs."""


def compiled(function: Formulation) -> Formulation:
    """The formulation under torch.compile, which can fuse comparisons that eager torch stores."""

    @functools.cache
    def build() -> Formulation:
        return torch.compile(function, dynamic=False)

    def run(embeddings: Tensor, labels: Tensor, per_class: int) -> Tensor:
        try:
            return build()(embeddings, labels, per_class)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise UnavailableError(f"torch.compile: {problem}") from problem

    return run


@dataclass(frozen=True)
class Rival:
    """One way to compute one loss.

    `numbers(N, P)` estimates how many numbers forward and backward hold at their worst moment for N queries with
    P relevant items each: enough to tell beforehand what would not fit.
    """

    loss: str
    name: str
    function: Formulation
    numbers: Callable[[int, int], float]
    differs: str = ""  # what it computes instead of the loss; empty where it computes the loss
    sample: Formulation | None = None  # the same for SAMPLED_QUERIES queries only, where all would take too long


SAMPLED_QUERIES = 128

RIVALS = (
    Rival("recall_at_k", "dense", dense_recall_at_k, lambda n, p: (2 * p + 5) * n * n),
    Rival("recall_at_k", "dense-compiled", compiled(dense_recall_at_k), lambda n, p: 6 * n * n),
    Rival(
        "recall_at_k",
        "query-loop",
        loop_recall_at_k,
        lambda n, p: (2 * p + 5) * n * n,
        sample=functools.partial(loop_recall_at_k, queries=SAMPLED_QUERIES),
    ),
    Rival("smooth_ap", "dense", dense_smooth_ap, lambda n, p: (2 * p + 5) * n * n),
    Rival("smooth_ap", "dense-compiled", compiled(dense_smooth_ap), lambda n, p: 6 * n * n),
    Rival(
        "smooth_ap",
        "pml",
        library_smooth_ap,
        lambda n, p: 5.5 * n**3,
        differs="other ranks: takes rows as class by class, as many classes as members",
    ),
    Rival("fast_ap", "dense", dense_fast_ap, lambda n, p: (3 * (BINS + 1) + 4) * n * n),
    Rival("fast_ap", "dense-compiled", compiled(dense_fast_ap), lambda n, p: 6 * n * n),
    Rival("fast_ap", "pml", library_fast_ap, lambda n, p: (4 * (BINS + 1) + 7) * n * n),
    Rival("rambo_recall", "sorted-rows", sorted_rambo_recall, lambda n, p: 12 * n * n),
    Rival("rambo_ap", "sorted-rows", sorted_rambo_ap, lambda n, p: 12 * n * n),
)
