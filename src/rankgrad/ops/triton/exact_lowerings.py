"""`Exact` and `Blackbox` in the embedding kernels: integer counts, and proper ranks made of them.

Letter:  P thresholds of a query
"""

import numpy as np
import torch
import triton
from torch import Tensor

from rankgrad.ops.autograd import PositiveScores, Ranks, Upstream
from rankgrad.ops.exact_rankers import Blackbox, Exact
from rankgrad.ops.thresholds import DescendingCounts, Thresholds
from rankgrad.ops.triton.bucket_tables import BucketTables
from rankgrad.ops.triton.kernel_arguments import BackwardArgs
from rankgrad.ops.triton.lowering import Lowering
from rankgrad.ops.triton.positive_kernels import perturb_kernel, proper_kernel
from rankgrad.ops.triton.ranker_kernels import SEARCH, STEP


class ExactLowering(Lowering[Exact]):
    """Integer counts, no gradient."""

    mode = STEP
    many_mode = SEARCH
    count_dtype = torch.int32

    def ranks(self, counts: Tensor | DescendingCounts, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*ranks_by_kernel(counts, thresholds, positives))


class BlackboxLowering(Lowering[Blackbox]):
    """Integer counts before and after the perturbation."""

    mode = STEP
    many_mode = SEARCH
    count_dtype = torch.int32

    def ranks(self, counts: Tensor | DescendingCounts, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        rank, among = ranks_by_kernel(counts, thresholds, positives)
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


def ranks_by_kernel(
    ahead: Tensor | DescendingCounts, thresholds: Thresholds, positives: PositiveScores
) -> tuple[Tensor, Tensor]:
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
