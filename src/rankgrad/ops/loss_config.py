"""The settings of a loss, the queries that its mean is over, and what a call returns."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rankgrad.ops.autograd import Objective
from rankgrad.ops.rankers import Ranker

Backend = Literal["auto", "triton", "tiled", "reference"]
ScorePrecision = Literal["auto", "fast", "high"]
BACKENDS = ("auto", "triton", "tiled", "reference")
SCORE_PRECISIONS = ("auto", "fast", "high")


@dataclass(frozen=True)
class Compute:
    """How losses are computed; `RankLoss` documents the fields."""

    normalize: bool = True
    backend: Backend = "auto"
    precision: ScorePrecision = "auto"
    cuda_graphs: bool = True


@dataclass(frozen=True)
class Reduction:
    """How the losses of queries become one loss; `RankLoss` documents the fields."""

    kind: Literal["mean", "none"] = "mean"
    empty_query: Literal["skip", "zero", "error"] = "skip"

    def used_queries(self, num_relevant: Tensor, caller: str) -> Tensor:
        """[] queries with a relevant candidate. Synchronises only where empty queries are refused."""
        used = (num_relevant > 0).sum()
        if self.empty_query == "error" and (empty := len(num_relevant) - int(used)):
            raise ValueError(
                f"{caller}: empty_query='error' and {empty} of {len(num_relevant)} queries have no relevant candidate"
            )
        return used

    def shares(self, queries: "Queries", like: Tensor, caller: str) -> "Shares":
        """How many of the queries count, and the weight of each in the mean; `like` has the dtype and device of the loss.

        A query weighs its own weight over the sum of those that count, 1 / used where none are given. That is the same whatever
        `kind` is, so that (losses * weights).sum() is the mean.
        """
        dtype = like.dtype if is_wide(like) else torch.float32
        if queries.none_empty:
            used = torch.full((), queries.num_relevant.shape[0], device=like.device)
        else:
            used = self.used_queries(queries.num_relevant, caller)
        if queries.weights is not None:
            weights = queries.weights.to(like.device, dtype)
            if self.empty_query != "zero":
                weights = torch.where(queries.num_relevant.to(like.device) > 0, weights, 0)
            total = weights.sum()
            weights = weights / torch.where(total == 0, 1, total)
        elif self.empty_query == "zero" or queries.none_empty:
            weights = torch.full((), 1 / queries.num_relevant.shape[0], dtype=dtype, device=like.device)
        else:
            weights = used.clamp(min=1).to(like.device, dtype, non_blocking=True).reciprocal()
        return Shares(used, weights)


class Shares(NamedTuple):
    """What the mean over queries needs to know."""

    used: Tensor  # [] queries with a relevant candidate
    weights: Tensor  # [] or [Q]

    def nan_if_any(self, tensors: tuple[Tensor, ...]) -> "Shares":
        """Weights are NaN where `tensors` hold NaN, which makes the loss NaN too."""
        weights = self.weights
        for tensor in tensors:
            largest = tensor.detach().amax()
            if largest.device.type == "cpu":
                weights = weights * torch.nan if math.isnan(largest.item()) else weights
            else:  # without synchronising: what is between two equal bounds is their value, or NaN
                weights = largest.to(weights.dtype).clamp(weights, weights)
        return self._replace(weights=weights)


@dataclass(frozen=True)
class Queries:
    """The queries that a mean is over, which may be more than those of a call."""

    num_relevant: Tensor  # [Q], in the caller's order if there are weights
    weights: Tensor | None = None  # [Q]
    shard: slice | None = None  # the queries of this call
    none_empty: bool = False  # known to have relevant candidates each


@dataclass(frozen=True)
class LossConfig:
    """All settings of a loss."""

    ranker: Ranker
    objective: Objective
    reduction: Reduction = Reduction()
    compute: Compute = Compute()


class LossOutput(NamedTuple):
    """What a call returns."""

    loss: Tensor
    used_queries: Tensor  # [] queries with a relevant candidate
    query_weights: Tensor  # [] or [Q] weight of a query in the mean


def is_wide(tensor: Tensor) -> bool:
    """Whether it can enter the scores as it is."""
    return tensor.dtype in (torch.float32, torch.float64)
