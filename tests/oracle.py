"""Brute-force rank losses in float64: one list at a time, straight from the definitions, slow on purpose.

Nothing here knows rankgrad. A list is `scores` [n] (higher is nearer) and `gains` [n]; gain 0 marks an
irrelevant candidate. A ranker turns a list into entries, an objective turns entries into one number.
Sigmoid, UpperBound and Histogram are plain torch operations, so autograd gives their derivative. Blackbox is Algorithm 1
with two full rankings; its gradient is injected as a term whose value is zero.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

List = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Entries:
    """What an objective sees of one list: [E] each, and the gains of the relevant items."""

    rank: Tensor
    positive_rank: Tensor
    mass: Tensor
    gain: Tensor
    relevant_gains: Tensor

    @property
    def weight(self) -> Tensor:
        return self.mass / len(self.relevant_gains)


Objective = Callable[[Entries], Tensor]


def count_ahead(scores: Tensor, gains: Tensor, ahead: Callable[[Tensor], Tensor]) -> Entries:
    """One entry per relevant item x; `ahead(s_z - s_x)` is how far z counts as ahead of x."""
    relevant = gains > 0
    position = torch.arange(len(scores))
    ranks, positive_ranks = [], []
    for x in position[relevant].tolist():
        votes = ahead(scores - scores[x])
        positive = 1 + votes[relevant & (position != x)].sum()
        ranks.append(votes[~relevant].sum() + positive)
        positive_ranks.append(positive)
    one = torch.ones(len(ranks), dtype=scores.dtype)
    return Entries(torch.stack(ranks), torch.stack(positive_ranks), one, gains[relevant], gains[relevant])


@dataclass(frozen=True)
class Exact:
    """Of tied candidates irrelevant ones are ahead, then relevant ones by index."""

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        return Blackbox(1.0).entries(scores.detach(), gains)

    def loss(self, scores: Tensor, gains: Tensor, objective: Objective, share: float) -> Tensor:
        return objective(self.entries(scores, gains)) + 0 * scores.sum()


@dataclass(frozen=True)
class Sigmoid:
    tau: float

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        return count_ahead(scores, gains, lambda d: torch.sigmoid(d / self.tau))

    def loss(self, scores: Tensor, gains: Tensor, objective: Objective, share: float) -> Tensor:
        return objective(self.entries(scores, gains))


@dataclass(frozen=True)
class UpperBound:
    """SupRank's bound, straight from its definition: irrelevant items by the bound, relevant ones by the step."""

    tau: float
    rho: float
    delta: float

    def bound(self, t: Tensor) -> Tensor:
        behind, near = torch.sigmoid(t / self.tau), torch.sigmoid(t / self.tau) + 0.5
        offset = torch.sigmoid(torch.tensor(self.delta / self.tau, dtype=t.dtype)) + 0.5
        return torch.where(t <= 0, behind, torch.where(t <= self.delta, near, self.rho * (t - self.delta) + offset))

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        relevant = gains > 0
        positive_rank = Blackbox(1.0).entries(scores[relevant].detach(), gains[relevant]).rank
        irrelevant = torch.stack([self.bound(scores[~relevant] - score).sum() for score in scores[relevant]])
        gains = gains[relevant]
        return Entries(positive_rank + irrelevant, positive_rank, torch.ones_like(gains), gains, gains)

    def loss(self, scores: Tensor, gains: Tensor, objective: Objective, share: float) -> Tensor:
        return objective(self.entries(scores, gains))


@dataclass(frozen=True)
class Histogram:
    bins: int
    low: float = -1.0
    high: float = 1.0

    def position(self, scores: Tensor) -> Tensor:
        """Distance from `high` in bin widths; no gradient outside the open interval (low, high)."""
        inside = (scores > self.low) & (scores < self.high)
        clamped = torch.where(inside, scores, scores.detach().clamp(self.low, self.high))
        return (self.high - clamped) * self.bins / (self.high - self.low)

    def pulses(self, scores: Tensor) -> Tensor:
        centres = torch.arange(self.bins + 1, dtype=scores.dtype)
        return torch.relu(1 - (self.position(scores)[:, None] - centres).abs())

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        pulses, relevant = self.pulses(scores), gains > 0
        mass = pulses[relevant].sum(dim=0)
        positive = mass.cumsum(dim=0)
        rank = positive + pulses[~relevant].sum(dim=0).cumsum(dim=0)
        return Entries(rank, positive, mass, gains @ pulses, gains[relevant])

    def loss(self, scores: Tensor, gains: Tensor, objective: Objective, share: float) -> Tensor:
        return objective(self.entries(scores, gains))


@dataclass(frozen=True)
class Blackbox:
    lam: float
    margin: float = 0.0

    def ranking(self, scores: Tensor, gains: Tensor) -> Tensor:
        """Ranks 1..n of all items by one full sort: shifted score, then irrelevant first, then index."""
        relevant = (gains > 0).tolist()
        shifted = [s - self.margin / 2 if r else s + self.margin / 2 for s, r in zip(scores.tolist(), relevant, strict=True)]
        order = sorted(range(len(shifted)), key=lambda i: (-shifted[i], relevant[i], i))
        ranks = torch.empty(len(shifted), dtype=torch.float64)
        ranks[order] = torch.arange(1, len(shifted) + 1, dtype=torch.float64)
        return ranks

    def entries_at(self, ranks: Tensor, gains: Tensor) -> Entries:
        relevant = gains > 0
        rank = ranks[relevant]
        positive = rank.detach().argsort().argsort() + 1.0
        return Entries(rank, positive.to(rank.dtype), torch.ones_like(rank), gains[relevant], gains[relevant])

    def entries(self, scores: Tensor, gains: Tensor) -> Entries:
        return self.entries_at(self.ranking(scores, gains), gains)

    def score_gradient(self, scores: Tensor, gains: Tensor, rank_gradient: Tensor) -> Tensor:
        strength = self.lam * len(scores)
        before = self.ranking(scores, gains)
        after = self.ranking(scores.detach() + strength * rank_gradient, gains)
        return (after - before) / strength

    def loss(self, scores: Tensor, gains: Tensor, objective: Objective, share: float) -> Tensor:
        """`share` is the derivative of the mean with respect to this list's loss."""
        ranks = self.ranking(scores, gains).requires_grad_()
        with torch.enable_grad():
            value = objective(self.entries_at(ranks, gains))
            rank_gradient = torch.autograd.grad(value, ranks)[0] if value.requires_grad else torch.zeros_like(ranks)
        gradient = self.score_gradient(scores, gains, share * rank_gradient) / share if share else torch.zeros_like(ranks)
        injected = (scores * gradient).sum()
        return value.detach() + injected - injected.detach()


Ranker = Exact | Sigmoid | UpperBound | Histogram | Blackbox


def at_least_one(rank: Tensor) -> Tensor:
    """max(rank, 1), at rank 1 with the derivative to the right (torch's clamp gives 0 there)."""
    return torch.where(rank < 1, torch.ones_like(rank), rank)


def average_precision(e: Entries) -> Tensor:
    ratio = e.positive_rank / torch.where(e.rank > 0, e.rank, torch.ones_like(e.rank))
    return 1 - (e.weight * torch.where(e.rank > 0, ratio, torch.zeros_like(ratio))).sum()


def within(e: Entries, k: int, tau: float) -> Tensor:
    """How many relevant items the first k places hold."""
    return (e.mass * torch.sigmoid((k - e.rank) / tau)).sum()


def recall_at_k(ks: Sequence[int], tau: float = 1.0) -> Objective:
    def objective(e: Entries) -> Tensor:
        recalls = [(within(e, k, tau) / min(k, len(e.relevant_gains))).clamp(max=1) for k in ks]
        return 1 - sum(recalls) / len(ks)

    return objective


def precision_at_k(k: int, tau: float = 1.0) -> Objective:
    return lambda e: 1 - within(e, k, tau).clamp(max=k) / k


def of_irrelevant_ahead(weight: Callable[[Tensor], Tensor]) -> Objective:
    return lambda e: (e.weight * weight(e.rank - e.positive_rank)).sum()


def weighted_recall(weights: Sequence[float]) -> Objective:
    """W(r) = w_1 + ... + w_r, linear between integers with the right derivative at them, flat past the last."""

    def total(r: Tensor) -> Tensor:
        pieces = []
        for value in r:
            whole = min(math.floor(value.item()), len(weights))
            slope = weights[whole] if whole < len(weights) else 0.0
            pieces.append(sum(weights[:whole]) + (value - whole) * slope)
        return torch.stack(pieces)

    return of_irrelevant_ahead(total)


log_recall = of_irrelevant_ahead(lambda r: torch.log(1 + r))
loglog_recall = of_irrelevant_ahead(lambda r: torch.log(1 + torch.log(1 + r)))


def ndcg(e: Entries) -> Tensor:
    ideal = sum(g / math.log2(1 + i) for i, g in enumerate(sorted(e.relevant_gains.tolist(), reverse=True), start=1))
    return 1 - (e.gain / torch.log2(1 + at_least_one(e.rank))).sum() / ideal


def first_places(e: Entries, k: int, tau: float) -> Tensor:
    """How far each entry is within the first k places; tau 0 is a step."""
    return torch.sigmoid((k + 0.5 - e.rank) / tau) if tau else (e.rank <= k).to(e.rank.dtype)


def average_precision_at(k: int | None, tau: float) -> Objective:
    """k None: at a query's number of relevant items."""

    def objective(e: Entries) -> Tensor:
        relevant = len(e.relevant_gains)
        cut = relevant if k is None else k
        precision = e.positive_rank / torch.where(e.rank > 0, e.rank, torch.ones_like(e.rank))
        return 1 - (e.mass * precision * first_places(e, cut, tau)).sum() / min(cut, relevant)

    return objective


def r_precision(tau: float) -> Objective:
    return lambda e: 1 - (e.weight * first_places(e, len(e.relevant_gains), tau)).sum()


def ndcg_at(k: int, tau: float) -> Objective:
    def objective(e: Entries) -> Tensor:
        best = sorted(e.relevant_gains.tolist(), reverse=True)[:k]
        ideal = sum(g / math.log2(1 + i) for i, g in enumerate(best, start=1))
        return 1 - (e.gain * first_places(e, k, tau) / torch.log2(1 + at_least_one(e.rank))).sum() / ideal

    return objective


def reciprocal_rank(e: Entries) -> Tensor:
    order = e.rank.detach().argsort(stable=True)
    found = e.mass[order].cumsum(dim=0).clamp(max=1)
    fresh = found - torch.cat([torch.zeros_like(found[:1]), found[:-1]])
    return 1 - (fresh / at_least_one(e.rank[order])).sum()


def query_weights(lists: Sequence[List], empty_query: str = "skip", weights: Sequence[float] | None = None) -> list[float]:
    """The weight of every list in the mean: its own over the sum of those that count."""
    counts = [empty_query == "zero" or bool((gains > 0).any()) for _, gains in lists]
    own = [float(count) * (1.0 if weights is None else weights[i]) for i, count in enumerate(counts)]
    return [weight / sum(own) if sum(own) else 0.0 for weight in own]


def rank_loss(
    lists: Sequence[List], ranker: Ranker, objective: Objective, reduction: str = "mean", empty_query: str = "skip",
    weights: Sequence[float] | None = None,
) -> Tensor:  # fmt: skip
    """The weighted mean, or all losses; what a list weighs in the mean is the same for both."""
    if empty_query == "error" and not all((gains > 0).any() for _, gains in lists):
        raise ValueError("a list without relevant items")
    shares = query_weights(lists, empty_query, weights)
    losses = [
        ranker.loss(scores, gains, objective, share) if (gains > 0).any() else 0 * scores.sum()
        for (scores, gains), share in zip(lists, shares, strict=True)
    ]
    stacked = torch.stack(losses)
    return stacked if reduction == "none" else (stacked * torch.tensor(shares, dtype=stacked.dtype)).sum()


def score_lists(scores: Tensor, relevance: Tensor, candidates: Tensor | None = None) -> list[List]:
    n = scores.shape[-1]
    keep = torch.ones_like(relevance, dtype=torch.bool) if candidates is None else candidates
    rows = zip(scores.reshape(-1, n), relevance.reshape(-1, n), keep.reshape(-1, n), strict=True)
    return [(row[mask], gain[mask].double()) for row, gain, mask in rows]


def embedding_lists(
    embeddings: Tensor,
    labels: Tensor,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    *,
    self_index: Tensor | None = None,
    normalize: bool = True,
    query_in_database: bool = False,
) -> list[List]:
    if ref_emb is None:
        ref_emb, ref_labels, self_index = embeddings, labels, torch.arange(len(labels))
    if self_index is None:
        self_index = torch.full((len(labels),), -1)
    if normalize:
        embeddings = embeddings / embeddings.norm(dim=1, keepdim=True)
        ref_emb = ref_emb / ref_emb.norm(dim=1, keepdim=True)
    lists = []
    for q, scores in enumerate((embeddings @ ref_emb.T).unbind()):
        not_self = torch.arange(len(ref_labels)) != self_index[q]
        gains = ((ref_labels == labels[q]) & not_self).double()
        keep = torch.ones_like(not_self) if query_in_database else not_self
        lists.append((scores[keep], gains[keep]))
    return lists


def same_class_pairs(labels: Tensor) -> list[tuple[int, int]]:
    """Every unordered pair of one class: classes by ascending label, within a class in lexicographic order."""
    members = [(labels == label).nonzero().flatten().tolist() for label in labels.unique()]
    return [pair for places in members for pair in combinations(places, 2)]


def with_virtual(embeddings: Tensor, labels: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor]:
    """SiMix's [X; V]: normalised originals, then alpha*x + (1-alpha)*z for each pair, not normalised again."""
    x = embeddings / embeddings.norm(dim=1, keepdim=True)
    pairs = same_class_pairs(labels)
    virtual = [a * x[i] + (1 - a) * x[j] for a, (i, j) in zip(alphas, pairs, strict=True)]
    virtual_labels = [labels[i] for i, _ in pairs]
    return torch.stack([*x, *virtual]), torch.stack([*labels, *virtual_labels])


def multiclass_loss(
    scores: Tensor, targets: Tensor, ranker: Ranker, objective: Objective, interclass: float,
    past: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:  # fmt: skip
    """(1 - interclass) * mAP + interclass * APC; past batches lengthen the columns of mAP only.

    A blackbox perturbation follows the derivative of the whole sum, so it contains the factor of its term.
    """
    all_scores = torch.cat([scores, *(s for s, _ in past)])
    all_targets = torch.cat([targets, *(t for _, t in past)])

    def term(lists: Sequence[List], factor: float) -> Tensor:
        scaled = Blackbox(ranker.lam * factor, ranker.margin) if isinstance(ranker, Blackbox) else ranker
        return factor * rank_loss(lists, scaled, objective) if factor else torch.zeros((), dtype=scores.dtype)

    per_class = term(score_lists(all_scores.T, all_targets.T), 1 - interclass)
    return per_class + term(score_lists(scores.reshape(-1), targets.reshape(-1)), interclass)
