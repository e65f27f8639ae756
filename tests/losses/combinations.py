"""Every ranker and every objective beside its oracle, and the random batches both are run on."""

from dataclasses import dataclass

import oracle
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import rankgrad

# lam has no small fraction in it, so that a perturbed score never meets another one exactly;
# the histogram's range is off the grid of tied scores, so that none of them lies on a kink
RANKERS = {
    "exact": (rankgrad.Exact(), oracle.Exact()),
    "sigmoid": (rankgrad.Sigmoid(0.13), oracle.Sigmoid(0.13)),
    "upper_bound": (rankgrad.UpperBound(0.13, 3.7, 0.31), oracle.UpperBound(0.13, 3.7, 0.31)),
    "blackbox": (rankgrad.Blackbox(3.1731), oracle.Blackbox(3.1731)),
    "margin": (rankgrad.Blackbox(1.7313, margin=0.25), oracle.Blackbox(1.7313, margin=0.25)),
    "histogram": (rankgrad.Histogram(7, low=-1.13, high=1.21), oracle.Histogram(7, low=-1.13, high=1.21)),
}

WEIGHTS = (0.9, 0.1, 0.4, 0.05)

OBJECTIVES = {
    "average_precision": (rankgrad.AveragePrecision(), oracle.average_precision),
    "recall_at_k": (rankgrad.RecallAtK((1, 2, 5), tau=0.7), oracle.recall_at_k((1, 2, 5), tau=0.7)),
    "precision_at_k": (rankgrad.PrecisionAtK(3, tau=0.8), oracle.precision_at_k(3, tau=0.8)),
    "weighted_recall": (rankgrad.WeightedRecall(WEIGHTS), oracle.weighted_recall(WEIGHTS)),
    "log_recall": (rankgrad.LogRecall(), oracle.log_recall),
    "loglog_recall": (rankgrad.LogLogRecall(), oracle.loglog_recall),
    "ndcg": (rankgrad.NDCG(), oracle.ndcg),
    "reciprocal_rank": (rankgrad.ReciprocalRank(), oracle.reciprocal_rank),
    "average_precision_at_3": (rankgrad.AveragePrecision(3, tau=0.7), oracle.average_precision_at(3, tau=0.7)),
    "average_precision_at_r": (rankgrad.AveragePrecisionAtR(tau=0.9), oracle.average_precision_at(None, tau=0.9)),
    "r_precision": (rankgrad.RPrecision(tau=0.6), oracle.r_precision(tau=0.6)),
    "ndcg_at_2": (rankgrad.NDCG(2, tau=0.8), oracle.ndcg_at(2, tau=0.8)),
}

PAIRS = [(ranker, objective) for ranker in RANKERS for objective in OBJECTIVES]

# exact ties put the first two on a kink of the soft ranks: the value is defined there, the derivative is not; the slopes of
# R-precision are the same one place within and one beyond the cut, so that rounding decides which perturbed score is ahead
KINKED_BY_TIES = {
    ("sigmoid", "weighted_recall"),
    ("sigmoid", "reciprocal_rank"),
    ("blackbox", "r_precision"),
    ("margin", "r_precision"),
}

# neighbours above 2**24 and 2**53 merge in float32 and float64
CLASS_LABELS = torch.tensor([7, -3, 2**24, 2**24 + 1, 2**53, 2**53 + 1, 0])

quick = settings(derandomize=True, deadline=None, max_examples=8, database=None)


@dataclass(frozen=True)
class Batch:
    """Class sizes, a seed for everything random, and whether scores are to tie exactly."""

    sizes: tuple[int, ...]
    seed: int
    tied: bool
    reduction: str = "mean"
    empty_query: str = "skip"

    def rng(self, salt: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 7919 * salt)

    def labels(self, salt: int = 0) -> Tensor:
        labels = CLASS_LABELS[: len(self.sizes)].repeat_interleave(torch.tensor(self.sizes))
        return labels[torch.randperm(len(labels), generator=self.rng(salt))]

    def embeddings(self, n: int, salt: int = 0) -> Tensor:
        """Tied: corners of a cube scaled by powers of two, so that normalising and products are exact."""
        rng = self.rng(salt)
        if not self.tied:
            return torch.randn(n, 5, generator=rng, dtype=torch.float64)
        corners = torch.randint(0, 2, (n, 4), generator=rng).double() * 2 - 1
        corners[:, 2:] = corners[:, :1]  # few distinct rows
        return corners * 2.0 ** torch.randint(-2, 3, (n, 1), generator=rng)

    def scores(self, *shape: int, salt: int = 0) -> Tensor:
        """Some lie outside the histogram's range."""
        rng = self.rng(salt)
        if self.tied:
            return torch.randint(-5, 6, shape, generator=rng).double() * 0.25
        return torch.randn(shape, generator=rng, dtype=torch.float64) * 0.7

    def mask(self, *shape: int, share: float, salt: int = 0) -> Tensor:
        return torch.rand(shape, generator=self.rng(salt)) < share

    def weights(self, *shape: int) -> Tensor:
        """An incoming gradient that is nowhere 1."""
        return torch.rand(shape, generator=self.rng(99), dtype=torch.float64) + 1.5


batches = st.builds(
    Batch,
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 10**6),
    tied=st.booleans(),
    reduction=st.sampled_from(["mean", "mean", "none"]),
    empty_query=st.sampled_from(["skip", "skip", "zero"]),
)
LONE = Batch(sizes=(1, 1, 1), seed=1, tied=False)
ONE_CLASS = Batch(sizes=(6,), seed=2, tied=False)
MIXED = Batch(sizes=(1, 2, 5, 3), seed=3, tied=False)
MIXED_TIED = Batch(sizes=(1, 2, 5, 3), seed=4, tied=True)
ZERO_IN_MEAN = Batch(sizes=(1, 4, 1, 3), seed=5, tied=False, empty_query="zero")


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def assert_same(ours: Tensor, wanted: Tensor, ours_in: list[Tensor], wanted_in: list[Tensor], upstream: Tensor) -> None:
    """Equal values, and equal gradients for an incoming gradient of `upstream`."""
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
    got = torch.autograd.grad(ours, ours_in, upstream.expand_as(ours))
    want = torch.autograd.grad(wanted, wanted_in, upstream.expand_as(wanted), allow_unused=True)
    for g, w, x in zip(got, want, wanted_in, strict=True):
        torch.testing.assert_close(g, torch.zeros_like(x) if w is None else w, rtol=1e-9, atol=1e-9)
