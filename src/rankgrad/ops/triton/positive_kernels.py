"""Triton kernels in which the positives of a query are compared with each other.

    among_kernel     sums of sigmoids of their differences, and among_bwd_kernel the gradient of that
    proper_kernel    exact ranks from positions
    perturb_kernel   thresholds moved by a gradient

Letters:  P positives of a query   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton.language as tl

from rankgrad.ops.triton.device_functions import reciprocal
from rankgrad.ops.triton.kernel import kernel


@kernel(do_not_specialize=("P",))
def among_kernel(scores, num_relevant, out, P, scale, ASM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr):
    """out[row, x] = sum over the row's positives y of sigmoid((s_y - s_x) / tau), x itself among them; scale: of base 2.

    Scores are subtracted before they are scaled: of two products less each other a GPU rounds one and not the other, so that
    equal scores would differ.
    """
    i = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_relevant + i), P)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_x = tl.load(scores + i * P + o_x, mask=o_x < count, other=0.0)
    b_sum = tl.zeros([BY, BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=float("-inf"))
        b_sum += reciprocal(1.0 + tl.exp2((b_x[None, :] - b_y[:, None]) * scale), ASM)
    tl.store(out + i * P + o_x, tl.sum(b_sum, 0), mask=o_x < P)


@kernel(do_not_specialize=("P",))
def among_bwd_kernel(scores, weights, num_relevant, out, P, scale, ASM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr):
    """out[row, x] = sum over y of (w_y - w_x) slope((s_y - s_x) / tau): the slope of a sigmoid is even."""
    i = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_relevant + i), P)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_x = tl.load(scores + i * P + o_x, mask=o_x < count, other=0.0)
    b_wx = tl.load(weights + i * P + o_x, mask=o_x < count, other=0.0)
    b_sum = tl.zeros([BY, BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=float("-inf"))
        b_wy = tl.load(weights + i * P + o_y, mask=o_y < count, other=0.0)
        b_ahead = reciprocal(1.0 + tl.exp2((b_x[None, :] - b_y[:, None]) * scale), ASM)
        b_sum += (b_wy[:, None] - b_wx[None, :]) * (b_ahead - b_ahead * b_ahead)
    tl.store(out + i * P + o_x, tl.where(o_x < count, tl.sum(b_sum, 0), 0.0), mask=o_x < P)


@kernel(do_not_specialize=("P", "blocks"))
def proper_kernel(
    ahead, order, descending, num_relevant, rank, among, before, scale, P, blocks,
    SORTED: tl.constexpr, AMONG: tl.constexpr, MOVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ranks of a row's positives [P] from their positions in descending order and the irrelevant ones ahead; 1 at padding.

    SORTED: `ahead` is in descending order, too. AMONG: ranks among the positives as well. MOVED: not the ranks, but how far
    they are from those before, times scale[row].
    """
    i = (tl.program_id(0) // blocks).to(tl.int64)
    o_position = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    m_position = o_position < P
    count = tl.load(num_relevant + i)
    b_item = tl.load(order + i * P + o_position, mask=m_position, other=0)
    b_value = tl.load(descending + i * P + o_position, mask=m_position, other=0.0)
    m_real = m_position & (b_item < count)
    # padding is infinite and last in its row: ahead of every item but of infinite ones
    b_among = o_position + 1 - tl.where(b_value == float("inf"), 0, P - count)
    b_among = tl.where(m_real, b_among, 1)
    o_ahead = o_position if SORTED else b_item
    b_rank = b_among + tl.load(ahead + i * P + o_ahead, mask=m_real, other=0)
    if AMONG:
        tl.store(among + i * P + b_item, b_among.to(among.dtype.element_ty), mask=m_position)
    if MOVED:
        b_before = tl.load(before + i * P + b_item, mask=m_position, other=1.0)
        b_rank = (b_rank.to(before.dtype.element_ty) - b_before) * tl.load(scale + i).to(before.dtype.element_ty)
    tl.store(rank + i * P + b_item, b_rank.to(rank.dtype.element_ty), mask=m_position)


@kernel(do_not_specialize=("P", "blocks", "weight_stride", "grad_stride"))
def perturb_kernel(
    values, d_rank, num_relevant, list_length, weight, grad_loss, perturbed, scale, lam, lam_rest, P, blocks,
    weight_stride, grad_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Thresholds [P] of a row moved along the derivative by their ranks, infinite at padding, and the scale of the gradient.

    In the precision of d_rank, and without fused multiply-adds, which would round in another way than torch.
    """
    i = (tl.program_id(0) // blocks).to(tl.int64)
    o_p = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    kind = d_rank.dtype.element_ty
    # lam in two float32, which is what kernels get of a number; a list may be empty
    length = tl.maximum(tl.load(list_length + i), 1).to(kind)
    raw_lam = (tl.full([], lam, tl.float64) + tl.full([], lam_rest, tl.float64)).to(kind) * length
    w = tl.load(weight + i * weight_stride).to(kind)
    b_step = raw_lam * w * tl.load(d_rank + i * P + o_p, mask=o_p < P, other=0.0)
    b_value = tl.load(values + i * P + o_p, mask=o_p < P, other=0.0) + b_step.to(tl.float32)
    b_value = tl.where(o_p < tl.load(num_relevant + i), b_value, float("inf"))
    tl.store(perturbed + i * P + o_p, b_value, mask=o_p < P)
    if tl.program_id(0) % blocks == 0:
        g = tl.load(grad_loss + i * grad_stride).to(kind)
        quotient = tl.div_rn(g, w * raw_lam) if kind == tl.float32 else g / (w * raw_lam)
        # a query of weight 0 does not move
        tl.store(scale + i, tl.where(w == 0, 0.0, quotient).to(tl.float32))
