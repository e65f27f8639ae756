"""What the kernels ask about a ranker: the base of its host object."""

from collections.abc import Hashable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rankgrad.ops.autograd import Objective, PositiveScores, Ranks, Upstream, own_derivative
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.thresholds import DescendingCounts
from rankgrad.ops.triton import objectives
from rankgrad.ops.triton.kernel_arguments import BackwardArgs, CountArgs

R = TypeVar("R", bound=Ranker)


class Lowering(Generic[R]):
    """A ranker on the kernels: its own methods where kernels do not replace them."""

    mode: ClassVar[Any]
    count_dtype: ClassVar[torch.dtype] = torch.float32
    keeps_slopes: ClassVar[bool] = False  # whether counting also sums slopes for the gradient
    many_mode: ClassVar[Any] = None  # MODE where queries have many positives, if another one is faster then
    per_positive: ClassVar[bool] = True  # whether thresholds are positives, which makes comparisons most of a tile's work

    def __init__(self, ranker: R) -> None:
        self.ranker = ranker
        self.differentiable, self.grad_fields = ranker.differentiable, ranker.grad_fields

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {"MODE": self.mode, "DELTA": 0.0, "SLOPE": 0.0, "OFFSET": 0.0}

    @property
    def kind(self) -> Hashable:
        """Equal for those that the kernels are compiled for once."""
        return type(self), *map(str, self.constants.values())

    @property
    def score_scale(self) -> float:
        """The kernels' scores are in multiples of 1 / score_scale."""
        return 1.0

    @property
    def threshold_scale(self) -> float:
        """The scale of the positives' scores, that of the tiles where a tie between the two must be one to the last bit."""
        return 1.0

    def thresholds(self, positives: PositiveScores, key: int) -> Any:
        return self.ranker.thresholds(positives, key)

    def ranks(self, counts: Any, positives: PositiveScores, thresholds: Any) -> Ranks:
        return self.ranker.ranks(counts, positives, thresholds)

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        return self.ranker.graded_rank(scores, positives, positive_rank)

    def with_gradient(self, objective: Objective, ranks: Ranks) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        derivative = own_derivative(objective)
        found = None if derivative is None else derivative(ranks, self.grad_fields, objectives)
        return None if found is None else (found[0], tuple(found[1:]))

    def rank_gradient(self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Any, upstream: Upstream) -> Any:
        return self.ranker.rank_gradient(d_ranks, positives, thresholds, upstream)

    def positive_backward(
        self,
        d_thresholds: Any,
        counts: Any,
        rank_grad: Any,
        positives: PositiveScores,
        thresholds: Any,
        upstream: Upstream,
    ) -> Tensor:
        return self.ranker.positive_backward(d_thresholds, counts, rank_grad, positives, thresholds, upstream)

    def count_args(self, thresholds: Any, width: int, device: torch.device) -> CountArgs:
        """For a row block whose queries have at most `width` positives."""
        return CountArgs(thresholds.columns, width)

    def backward_args(self, thresholds: Any, rank_grad: Any, kept: Any) -> BackwardArgs:
        """`kept` is (slopes, thresholds as they were counted with) where `keeps_slopes`."""
        raise NotImplementedError(f"{type(self.ranker).__name__} has no gradient")

    def threshold_grad(self, rank_grad: Any, kept: Any, args: BackwardArgs) -> Tensor | DescendingCounts | None:
        """[B, P] what `positive_backward` gets, after the gradient kernel."""
        return None
