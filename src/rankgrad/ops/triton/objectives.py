"""Objectives by their kernels, for those that know their own derivative."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from rankgrad.ops.autograd import Ranks
from rankgrad.ops.triton.objective_kernels import recall_kernel

# Ranks of a program, and most positives of a query and most cut-offs, for which a program is compiled.
BLOCK = 512
MOST_POSITIVES = 4096
MOST_CUTS = 16

# Bits of a cut-off in the one number that holds them all: Triton before 3.4 cannot index a constant tuple.
CUT_BITS = 24


def recall_at_k(ranks: Ranks, ks: Sequence[int], tau: float) -> tuple[Tensor, Tensor] | None:
    """[B] losses of `RecallAtK` and [B, P] their derivative by the ranks of items of mass 1; None where torch has to do it."""
    rows, width = ranks.rank.shape
    if len(ks) > MOST_CUTS or max(ks) >> CUT_BITS or not 0 < width <= MOST_POSITIVES or ranks.rank.dtype != torch.float32:
        return None
    losses, d_rank = ranks.rank.new_empty(rows), torch.empty_like(ranks.rank)
    columns = triton.next_power_of_2(width)
    block = max(BLOCK // columns, 1)
    recall_kernel[(triton.cdiv(rows, block),)](
        rank=ranks.rank,
        num_relevant=ranks.num_relevant,
        losses=losses,
        d_rank=d_rank,
        num_rows=rows,
        P=width,
        tau=tau,
        KS=sum(k << CUT_BITS * j for j, k in enumerate(ks)),
        NUM_KS=len(ks),
        CUT_BITS=CUT_BITS,
        BR=block,
        BP=columns,
    )
    return losses, d_rank
