"""Triton kernels of objectives: losses and their derivative by the ranks in one launch, where torch takes thirty.

Letters:  P positives of a query   o_ offsets, m_ a mask, b_ a block in registers
"""

import triton.language as tl

from rankgrad._kernel import kernel


@kernel(do_not_specialize=("num_rows", "P"))
def recall_kernel(
    rank, num_relevant, losses, d_rank, num_rows, P, tau,
    KS: tl.constexpr, NUM_KS: tl.constexpr, CUT_BITS: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """losses[row] = 1 - the mean over k of smooth recall@k, and the derivative by each rank; 0 for a row without positives."""
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_p = tl.arange(0, BP)
    m_r = o_r < num_rows
    b_relevant = tl.load(num_relevant + o_r, mask=m_r, other=0.0)
    m_p = m_r[:, None] & (o_p < P)[None, :]
    m_real = m_p & (o_p[None, :] < b_relevant[:, None])
    o_rank = o_r.to(tl.int64)[:, None] * P + o_p[None, :]
    b_rank = tl.load(rank + o_rank, mask=m_real, other=0.0)
    b_found = tl.zeros([BR], tl.float32)
    b_slope = tl.zeros([BR, BP], tl.float32)
    for j in tl.static_range(NUM_KS):
        k = ((KS >> (CUT_BITS * j)) & ((1 << CUT_BITS) - 1)) * 1.0
        b_x = (k - b_rank) / tau
        b_power = tl.exp(-tl.abs(b_x))  # never too large
        b_sigmoid = tl.where(b_x < 0, b_power, 1.0) / (1 + b_power)
        b_reachable = tl.minimum(tl.maximum(b_relevant, 1.0), k)
        b_recall = tl.sum(tl.where(m_real, b_sigmoid, 0.0), 1) / b_reachable
        b_found += tl.minimum(b_recall, 1.0)
        b_slope += tl.where(b_recall < 1, 1 / b_reachable, 0.0)[:, None] * b_power / ((1 + b_power) * (1 + b_power))
    tl.store(losses + o_r, tl.where(b_relevant > 0, 1 - b_found / NUM_KS, 0.0), mask=m_r)
    tl.store(d_rank + o_rank, tl.where(m_real, b_slope, 0.0) / (tau * NUM_KS), mask=m_p)
