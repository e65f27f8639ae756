"""The oracle with the face of a rankgrad loss, and versions of it with one mistake each."""

from dataclasses import dataclass, replace

import oracle
import torch
from oracle import Entries, Objective, Ranker
from torch import Tensor


@dataclass
class Standin:
    ranker: Ranker
    objective: Objective
    normalize: bool = True
    query_in_database: bool = False
    reduction: str = "mean"

    def __call__(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        lists = oracle.embedding_lists(embeddings, labels, normalize=self.normalize, query_in_database=self.query_in_database)
        return oracle.rank_loss(lists, self.ranker, self.objective, self.reduction)

    def from_scores(self, scores: Tensor, relevance: Tensor) -> Tensor:
        lists = oracle.score_lists(scores, relevance)
        return oracle.rank_loss(lists, self.ranker, self.objective, self.reduction)


class _Rescale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float, listen: bool) -> Tensor:
        ctx.factor, ctx.listen = factor, listen
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.factor * (grad if ctx.listen else torch.ones_like(grad)), None, None


@dataclass
class WrongGradient:
    """The right value; its gradient multiplied by `factor`, or deaf to the incoming one."""

    loss: Standin
    factor: float = 1.0
    listen: bool = True

    def __call__(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return _Rescale.apply(self.loss(embeddings, labels), self.factor, self.listen)

    def from_scores(self, scores: Tensor, relevance: Tensor) -> Tensor:
        return _Rescale.apply(self.loss.from_scores(scores, relevance), self.factor, self.listen)


@dataclass
class SelfAsRelevant(Standin):
    """The query found in its own list, and counted as found."""

    def __call__(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        x = embeddings / embeddings.norm(dim=1, keepdim=True) if self.normalize else embeddings
        relevance = labels[:, None] == labels
        return self.from_scores(x @ x.T, relevance)


class OwnTermCounted(oracle.Sigmoid):
    """sigmoid(0) = 1/2 of the item itself in both of its ranks."""

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        e = super().entries(scores, gains)
        return replace(e, rank=e.rank + 0.5, positive_rank=e.positive_rank + 0.5)


class SharedRanks(oracle.Exact):
    """Tied candidates all count against each other, relevant ones too."""

    def entries(self, scores, gains):
        return oracle.count_ahead(scores.detach(), gains, lambda d: (d >= 0).to(d.dtype))


class StrictTies(oracle.Exact):
    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        return oracle.count_ahead(scores.detach(), gains, lambda d: (d > 0).to(d.dtype))


class PlainDistance(oracle.Histogram):
    """Bins of equal width in the distance, not in its square."""

    def position(self, scores: Tensor) -> Tensor:
        return (2 - 2 * scores).clamp(min=1e-12).sqrt() / 2 * self.bins


class OneCentreLess(oracle.Histogram):
    """`bins` centres from end to end instead of `bins` + 1."""

    def pulses(self, scores: Tensor) -> Tensor:
        return oracle.Histogram(self.bins - 1, self.low, self.high).pulses(scores)


class ExclusiveHistogram(oracle.Histogram):
    """Cumulative counts that stop before the bin itself."""

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        e = super().entries(scores, gains)
        own = self.pulses(scores).sum(dim=0)
        return replace(e, rank=e.rank - own, positive_rank=e.positive_rank - e.mass)


class RelevantWinTies(oracle.Blackbox):
    def ranking(self, scores: Tensor, gains: Tensor) -> Tensor:
        order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), gains[i].item() == 0, i))
        ranks = torch.empty(len(scores), dtype=torch.float64)
        ranks[order] = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
        return ranks


class RawLambda(oracle.Blackbox):
    """Algorithm 1 on integer ranks, as printed."""

    def score_gradient(self, scores: Tensor, gains: Tensor, rank_gradient: Tensor) -> Tensor:
        after = self.ranking(scores.detach() + self.lam * rank_gradient, gains)
        return (after - self.ranking(scores, gains)) / self.lam


class OnlyRelevantMove(oracle.Blackbox):
    """The irrelevant items that were overtaken get no gradient."""

    def score_gradient(self, scores: Tensor, gains: Tensor, rank_gradient: Tensor) -> Tensor:
        return super().score_gradient(scores, gains, rank_gradient) * (gains > 0)


class DifferentiablePositiveRank(oracle.Blackbox):
    """The rank among the relevant items carries a gradient as well, so r- loses its own."""

    def entries_at(self, ranks: Tensor, gains: Tensor) -> Entries:
        e = super().entries_at(ranks, gains)
        return replace(e, positive_rank=e.positive_rank + e.rank - e.rank.detach())


class MeanForgotten(oracle.Blackbox):
    """The perturbation of a list does not know that its loss enters a mean."""

    def loss(self, scores: Tensor, gains: Tensor, objective: Objective, share: float) -> Tensor:
        return super().loss(scores, gains, objective, 1.0)


def recall_over_all_relevant(ks, tau: float = 1.0) -> Objective:
    """Divides by |P| where the paper divides by min(k, |P|)."""
    return lambda e: 1 - sum(oracle.within(e, k, tau) for k in ks) / len(e.rank) / len(ks)


def recall_with_a_temperature_per_k(ks) -> Objective:
    return lambda e: sum(oracle.recall_at_k((k,), tau=float(k))(e) for k in ks) / len(ks)
