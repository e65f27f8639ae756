"""`Sigmoid`, `UpperBound` and `Histogram` in the embedding kernels: sums of steps that are not sharp.

Letter:  P thresholds of a query
"""

from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from rankgrad._gpu import has_gpu
from rankgrad.ops.autograd import PositiveScores, Ranks, Upstream
from rankgrad.ops.histogram_ranker import Histogram
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound
from rankgrad.ops.thresholds import SigmoidThresholds, Thresholds
from rankgrad.ops.triton.exact_lowerings import ranks_by_kernel
from rankgrad.ops.triton.kernel_arguments import BackwardArgs, CountArgs
from rankgrad.ops.triton.lowering import Lowering
from rankgrad.ops.triton.positive_kernels import among_bwd_kernel, among_kernel, weigh_kernel
from rankgrad.ops.triton.ranker_kernels import BOUND, GRID, RAMP, SIGMOID

S = TypeVar("S", Sigmoid, UpperBound)


class SigmoidWeights(NamedTuple):
    """The derivative by the soft ranks of a row block."""

    weights: Tensor  # [P, B] of irrelevant candidates ahead, over tau
    among_weights: Tensor  # [B, P] of positives ahead, over tau
    sums: Tensor  # [B] of |weights|


class _LogisticLowering(Lowering[S]):
    """Scores and thresholds are in multiples of tau, of base 2. The slopes of a step are summed with it."""

    keeps_slopes = True

    @property
    def score_scale(self) -> float:
        return 1.4426950408889634 / self.ranker.tau

    @property
    def threshold_scale(self) -> float:
        return self.score_scale


class SigmoidLowering(_LogisticLowering[Sigmoid]):
    """Sums of logistics and of their slopes, which make the gradient of the thresholds without another pass."""

    mode = SIGMOID
    many_mode = GRID

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


class UpperBoundLowering(_LogisticLowering[UpperBound]):
    """Sums of bounds and of their slopes; positives are ranked exactly."""

    mode = BOUND

    @property
    def constants(self) -> dict[str, Any]:
        ranker = self.ranker
        line = {"DELTA": ranker.delta * self.score_scale, "SLOPE": ranker.rho * ranker.tau, "OFFSET": ranker.offset}
        return {"MODE": self.mode, **line}

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*ranks_by_kernel(counts, thresholds, positives))

    def thresholds(self, positives: PositiveScores, key: int) -> Thresholds:
        assert positives.columns is not None, "the source keeps what the kernels compare"
        return Thresholds(positives.columns.t().contiguous())

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
