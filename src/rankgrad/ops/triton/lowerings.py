"""How each ranker runs in the embedding kernels: one host object per ranker.

A `Lowering` says what the MODE of its ranker needs in `ranker_kernels`: it prepares the kernels' arguments, and has the
positives of a query compared with each other.

Letter:  P thresholds of a query
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import triton
from torch import Tensor

from rankgrad._gpu import has_gpu
from rankgrad.ops.autograd import Objective, PositiveScores, Ranks, Upstream, own_derivative
from rankgrad.ops.exact_rankers import Blackbox, Exact
from rankgrad.ops.histogram_ranker import Histogram
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound
from rankgrad.ops.thresholds import DescendingCounts, SigmoidThresholds, Thresholds
from rankgrad.ops.triton import objectives
from rankgrad.ops.triton.bucket_tables import BucketTables
from rankgrad.ops.triton.kernel_arguments import BackwardArgs, CountArgs
from rankgrad.ops.triton.positive_kernels import among_bwd_kernel, among_kernel, perturb_kernel, proper_kernel, weigh_kernel
from rankgrad.ops.triton.ranker_kernels import BOUND, GRID, RAMP, SEARCH, SIGMOID, STEP

R = TypeVar("R", bound=Ranker)


class Lowering(ABC, Generic[R]):
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

    @abstractmethod
    def count_args(self, thresholds: Any, width: int, device: torch.device) -> CountArgs:
        """For a row block whose queries have at most `width` positives."""

    def backward_args(self, thresholds: Any, rank_grad: Any, kept: Any) -> BackwardArgs:
        """`kept` is (slopes, thresholds as they were counted with) where `keeps_slopes`."""
        raise NotImplementedError(f"{type(self.ranker).__name__} has no gradient")

    def threshold_grad(self, rank_grad: Any, kept: Any, args: BackwardArgs) -> Tensor | DescendingCounts | None:
        """[B, P] what `positive_backward` gets, after the gradient kernel."""
        return None


class SigmoidWeights(NamedTuple):
    """The derivative by the soft ranks of a row block."""

    weights: Tensor  # [P, B] of irrelevant candidates ahead, over tau
    among_weights: Tensor  # [B, P] of positives ahead, over tau
    sums: Tensor  # [B] of |weights|


class SigmoidLowering(Lowering[Sigmoid]):
    """Sums of logistics and of their slopes, which make the gradient of the thresholds without another pass."""

    mode = SIGMOID
    keeps_slopes = True
    many_mode = GRID

    @property
    def score_scale(self) -> float:
        return 1.4426950408889634 / self.ranker.tau  # of base 2

    @property
    def threshold_scale(self) -> float:
        return self.score_scale

    def thresholds(self, positives: PositiveScores, key: int) -> SigmoidThresholds:
        assert positives.columns is not None, "the source keeps what the kernels compare"
        return SigmoidThresholds(positives.columns)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: SigmoidThresholds) -> Ranks:
        scores = positives.scores.contiguous()
        rank, among = torch.empty_like(scores), torch.empty_like(scores)
        if rank.numel():
            among_kernel[_among_grid(rank)](
                scores=scores,
                num_relevant=positives.num_relevant,
                counts=counts,
                rank=rank,
                among=among,
                P=rank.shape[1],
                row_stride=counts.stride(0),
                column_stride=counts.stride(1),
                scale=self.score_scale,
                ASM=has_gpu(rank.device),
                **_among_blocks(rank),
            )
        return positives.item_ranks(rank, among)

    def count_args(self, thresholds: SigmoidThresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: SigmoidThresholds, upstream: Upstream
    ) -> SigmoidWeights:
        rows, width = d_ranks[0].shape
        made = SigmoidWeights(*(d_ranks[0].new_empty(shape) for shape in ((width, rows), (rows, width), (rows,))))
        weigh_kernel[(triton.cdiv(rows, 32),)](
            d_rank=d_ranks[0].contiguous(),
            d_among=d_ranks[1].contiguous(),
            grad_loss=upstream.grad_loss,
            num_relevant=positives.num_relevant,
            weights=made.weights,
            among_weights=made.among_weights,
            sums=made.sums,
            num_rows=rows,
            P=width,
            grad_stride=upstream.grad_loss.stride(0),
            scale=1 / self.ranker.tau,
            BR=32,
            BP=min(32, triton.next_power_of_2(max(width, 1))),
        )
        return made

    def backward_args(
        self, thresholds: SigmoidThresholds, rank_grad: SigmoidWeights, kept: tuple[Tensor, Tensor]
    ) -> BackwardArgs:
        return BackwardArgs(kept[1], rank_grad.weights, rank_grad.sums, rank_grad.sums.amax(), steepest=0.25)

    def threshold_grad(self, rank_grad: SigmoidWeights, kept: tuple[Tensor, Tensor], args: BackwardArgs) -> Tensor:
        return kept[0]  # the slopes, see `positive_backward`

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: SigmoidWeights,
        positives: PositiveScores,
        thresholds: SigmoidThresholds,
        upstream: Upstream,
    ) -> Tensor:
        assert d_thresholds is not None, "counting sums the slopes"
        scores = positives.scores.contiguous()
        gradient = torch.empty_like(scores)
        if gradient.numel():
            among_bwd_kernel[_among_grid(gradient)](
                scores=scores,
                among_weights=rank_grad.among_weights,
                weights=rank_grad.weights,
                slopes=d_thresholds,
                num_relevant=positives.num_relevant,
                out=gradient,
                num_rows=len(gradient),
                P=gradient.shape[1],
                scale=self.score_scale,
                ASM=has_gpu(gradient.device),
                **_among_blocks(gradient),
            )
        return gradient


class UpperBoundLowering(Lowering[UpperBound]):
    """Sums of bounds and of their slopes; positives are ranked exactly."""

    mode = BOUND
    keeps_slopes = True

    @property
    def constants(self) -> dict[str, Any]:
        ranker = self.ranker
        line = {"DELTA": ranker.delta * self.score_scale, "SLOPE": ranker.rho * ranker.tau, "OFFSET": ranker.offset}
        return {"MODE": self.mode, **line}

    @property
    def score_scale(self) -> float:
        return 1.4426950408889634 / self.ranker.tau  # of base 2

    @property
    def threshold_scale(self) -> float:
        return self.score_scale

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))

    def thresholds(self, positives: PositiveScores, key: int) -> Thresholds:
        assert positives.columns is not None, "the source keeps what the kernels compare"
        return Thresholds(positives.columns.t().contiguous())

    def count_args(self, thresholds: Thresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def backward_args(self, thresholds: Thresholds, rank_grad: Tensor, kept: tuple[Tensor, Tensor]) -> BackwardArgs:
        peak = torch.linalg.vector_norm(rank_grad, 1, dim=0).amax()
        return BackwardArgs(kept[1], rank_grad, peak, peak, steepest=max(0.25, self.ranker.rho * self.ranker.tau))

    def threshold_grad(self, rank_grad: Tensor, kept: tuple[Tensor, Tensor], args: BackwardArgs) -> Tensor:
        return -(rank_grad * kept[0]).t()


def _among_blocks(rows: Tensor) -> dict[str, int]:
    width = triton.next_power_of_2(rows.shape[1])
    return {"BX": min(128, width), "BY": min(8, width), "num_warps": 1}


def _among_grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], _among_blocks(rows)["BX"])


class ExactLowering(Lowering[Exact]):
    """Integer counts, no gradient."""

    mode = STEP
    many_mode = SEARCH
    count_dtype = torch.int32

    def count_args(self, thresholds: Thresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def ranks(self, counts: Tensor | DescendingCounts, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))


class BlackboxLowering(Lowering[Blackbox]):
    """Integer counts before and after the perturbation."""

    mode = STEP
    many_mode = SEARCH
    count_dtype = torch.int32

    def count_args(self, thresholds: Thresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def ranks(self, counts: Tensor | DescendingCounts, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        rank, among = _proper_ranks(counts, thresholds, positives)
        thresholds.found = rank
        return positives.item_ranks(rank, among)

    def rank_gradient(
        self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Thresholds, upstream: Upstream
    ) -> tuple[Thresholds, Tensor]:
        values, weight, grad_loss = thresholds.values.contiguous(), upstream.query_weight, upstream.grad_loss
        perturbed, scale = torch.empty_like(values), values.new_empty(len(values), 1)
        lam = float(np.float32(self.ranker.lam))
        grid, block = _row_blocks(values)
        perturb_kernel[grid](
            values=values,
            d_rank=d_ranks[0].contiguous(),
            num_relevant=positives.num_relevant,
            list_length=positives.list_length,
            weight=weight,
            grad_loss=grad_loss,
            perturbed=perturbed,
            scale=scale,
            lam=lam,
            lam_rest=self.ranker.lam - lam,
            P=values.shape[1],
            weight_stride=weight.stride(0) if weight.ndim else 0,
            grad_stride=grad_loss.stride(0),
            enable_fp_fusion=False,
            **block,
        )
        return thresholds.perturbed(perturbed), scale

    def backward_args(
        self, thresholds: Thresholds, rank_grad: tuple[Thresholds, Tensor], kept: BucketTables | None
    ) -> BackwardArgs:
        perturbed, scale = rank_grad
        if kept is not None:
            return BackwardArgs.of_search(kept, kept.perturbed(perturbed), scale[:, 0])
        reached = torch.zeros(thresholds.columns.shape, dtype=torch.int32, device=scale.device)
        most = max(thresholds.columns.shape[0], 1)
        return BackwardArgs(
            thresholds.columns, perturbed.columns, scale[:, 0], scale.abs().amax(), steepest=most, reached=reached
        )

    def threshold_grad(
        self, rank_grad: tuple[Thresholds, Tensor], kept: BucketTables | None, args: BackwardArgs
    ) -> Tensor | DescendingCounts:
        assert args.reached is not None, "perturbed ranks are counted"
        if kept is None:
            return args.reached.t()
        return DescendingCounts(rank_grad[0], args.reached.cumsum(dim=1, dtype=torch.int32))

    def positive_backward(
        self,
        d_thresholds: Tensor | DescendingCounts | None,
        counts: Tensor | DescendingCounts,
        rank_grad: tuple[Thresholds, Tensor],
        positives: PositiveScores,
        thresholds: Thresholds,
        upstream: Upstream,
    ) -> Tensor:
        perturbed, scale = rank_grad
        assert d_thresholds is not None, "perturbed ranks are counted by every pass"
        assert thresholds.found is not None, "ranks come before their gradient"
        moved = torch.empty_like(positives.scores, memory_format=torch.contiguous_format)
        _launch_proper(d_thresholds, perturbed, positives, rank=moved, before=thresholds.found, scale=scale)
        return moved


def _proper_ranks(ahead: Tensor | DescendingCounts, thresholds: Thresholds, positives: PositiveScores) -> tuple[Tensor, Tensor]:
    """[B, P] ranks of positives among all and among the positives, from the irrelevant ones ahead of each."""
    rank = torch.empty(thresholds.values.shape, dtype=positives.rank_dtype, device=thresholds.values.device)
    among = torch.empty_like(rank)
    _launch_proper(ahead, thresholds, positives, rank=rank, among=among)
    return rank, among


def _launch_proper(
    ahead: Tensor | DescendingCounts,
    thresholds: Thresholds,
    positives: PositiveScores,
    *,
    rank: Tensor,
    among: Tensor | None = None,
    before: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Ranks of positives in `rank` and `among`, or, with ranks `before`, how far they moved times `scale`."""
    descending, order = thresholds.descending
    if rank.numel():
        grid, block = _row_blocks(rank)
        proper_kernel[grid](
            ahead=ahead.values if isinstance(ahead, DescendingCounts) else ahead.contiguous(),
            order=order,
            descending=descending,
            num_relevant=positives.num_relevant,
            rank=rank,
            among=rank if among is None else among,  # what is not wanted is not touched
            before=rank if before is None else before,
            scale=descending if scale is None else scale,
            P=rank.shape[1],
            SORTED=isinstance(ahead, DescendingCounts),
            AMONG=among is not None,
            MOVED=before is not None,
            **block,
        )


def _row_blocks(rows: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid for rows [B, P] in blocks, and what tells a kernel about it."""
    block = min(256, triton.next_power_of_2(max(rows.shape[1], 1)))
    blocks = max(triton.cdiv(rows.shape[1], block), 1)
    return (len(rows) * blocks,), {"blocks": blocks, "BLOCK": block}


class HistogramLowering(Lowering[Histogram]):
    """Sums of ramps between the edges of bins."""

    mode = RAMP
    per_positive = False

    @property
    def score_scale(self) -> float:
        return 1 / self.ranker.width

    def count_args(self, thresholds: None, width: int, device: torch.device) -> CountArgs:
        # the first edge; the kernel knows the others
        return CountArgs(torch.full((1,), self.ranker.high * self.score_scale - 1, device=device), self.ranker.bins)

    def backward_args(self, thresholds: None, rank_grad: tuple[Tensor, tuple[Tensor, ...]], kept: None) -> BackwardArgs:
        # the table as steps at the edges, from the lowest score up: below all edges the sum is exactly 0
        table = rank_grad[0][:, 1::2].flip(1).t()  # [bins, rows] between centres, from the highest score down
        steps = torch.cat((-table[:1], table[:-1] - table[1:], table[-1:]))
        top = torch.full_like(steps[0], self.ranker.high / self.ranker.width)
        return BackwardArgs(top, steps, steps, table.abs().amax())


LOWERINGS: Mapping[type[Ranker], type[Lowering[Any]]] = {
    Exact: ExactLowering,
    Sigmoid: SigmoidLowering,
    UpperBound: UpperBoundLowering,
    Blackbox: BlackboxLowering,
    Histogram: HistogramLowering,
}


def lowering_of(ranker: Ranker, *, given_scores: bool) -> Lowering[Any] | None:
    """The kernels of `ranker`, for given scores or for embeddings; None where there are none and it runs tiled."""
    lowering = LOWERINGS.get(type(ranker))
    if lowering is None or ranker.draws:
        return None
    if given_scores and lowering.count_dtype != torch.int32:  # the kernels for given scores count exactly
        return None
    return lowering(ranker)
