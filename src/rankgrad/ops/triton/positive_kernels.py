"""Triton kernels in which the positives of a query are compared with each other.

    among_kernel     soft ranks: sums of sigmoids of their differences, and among_bwd_kernel the gradient of that
    weigh_kernel     the derivative by soft ranks as weights of the candidates ahead
    proper_kernel    exact ranks from positions
    perturb_kernel   thresholds moved by a gradient

Letters:  P positives of a query   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton.language as tl

from rankgrad._kernel import kernel
from rankgrad.ops.triton.device_functions import reciprocal


@kernel(do_not_specialize=("P", "row_stride", "column_stride"))
def among_kernel(
    scores, num_relevant, counts, rank, among, P, row_stride, column_stride, scale,
    ASM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """among[row, x] = 1/2 + sum over the row's positives y of sigmoid((s_y - s_x) / tau), x itself among them.

    And rank[row, x], the same and the irrelevant candidates ahead, counts[row, x]. Both are 1 at padding. `scale` is of base 2.
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
    b_among = tl.where(o_x < count, tl.sum(b_sum, 0) + 0.5, 1.0)
    b_ahead = tl.load(counts + i * row_stride + o_x.to(tl.int64) * column_stride, mask=o_x < count, other=0.0)
    tl.store(among + i * P + o_x, b_among, mask=o_x < P)
    tl.store(rank + i * P + o_x, b_ahead + b_among, mask=o_x < P)


@kernel(do_not_specialize=("P", "num_rows", "grad_stride"))
def weigh_kernel(
    d_rank, d_among, grad_loss, num_relevant, weights, among_weights, sums, num_rows, P, grad_stride, scale,
    BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """weights[p, row] of irrelevant candidates ahead, among_weights[row, p] of positives ahead, and sums of a row's |weights|.

    A positive ahead moves both ranks, an irrelevant candidate only the rank among all. 0 at padding.
    """
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_r = o_r < num_rows
    b_count = tl.load(num_relevant + o_r, mask=m_r, other=0)
    b_scale = tl.load(grad_loss + o_r.to(tl.int64) * grad_stride, mask=m_r, other=0.0) * scale
    b_sum = tl.zeros([BR], tl.float32)
    for start in range(0, P, BP):
        o_p = start + tl.arange(0, BP)
        m_p = m_r[:, None] & (o_p < P)[None, :]
        m_real = m_p & (o_p[None, :] < b_count[:, None])
        o_row = o_r.to(tl.int64)[:, None] * P + o_p[None, :]
        b_weight = tl.load(d_rank + o_row, mask=m_real, other=0.0) * b_scale[:, None]
        b_among = tl.load(d_among + o_row, mask=m_real, other=0.0) * b_scale[:, None]
        b_sum += tl.sum(tl.abs(b_weight), 1)
        # where there is no entry a scale that is not finite would leave NaN
        b_weight = tl.where(m_real, b_weight, 0.0)
        tl.store(weights + o_p.to(tl.int64)[None, :] * num_rows + o_r[:, None], b_weight, mask=m_p)
        tl.store(among_weights + o_row, tl.where(m_real, b_weight + b_among, 0.0), mask=m_p)
    tl.store(sums + o_r, b_sum, mask=m_r)


@kernel(do_not_specialize=("P", "num_rows"), do_not_specialize_on_alignment=("slopes",))
def among_bwd_kernel(
    scores, among_weights, weights, slopes, num_relevant, out, num_rows, P, scale,
    ASM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """out[row, x] = sum over y of (w_y - w_x) slope((s_y - s_x) / tau), less weights[x, row] * slopes[x, row]; 0 at padding.

    The slope of a sigmoid is even; w are the among_weights, and `slopes` the sums over irrelevant candidates.
    """
    i = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_relevant + i), P)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    m_x = o_x < count
    b_x = tl.load(scores + i * P + o_x, mask=m_x, other=0.0)
    b_wx = tl.load(among_weights + i * P + o_x, mask=m_x, other=0.0)
    b_sum = tl.zeros([BY, BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=float("-inf"))
        b_wy = tl.load(among_weights + i * P + o_y, mask=o_y < count, other=0.0)
        b_ahead = reciprocal(1.0 + tl.exp2((b_x[None, :] - b_y[:, None]) * scale), ASM)
        b_sum += (b_wy[:, None] - b_wx[None, :]) * (b_ahead - b_ahead * b_ahead)
    o_column = o_x.to(tl.int64) * num_rows + i
    b_weight = tl.load(weights + o_column, mask=m_x, other=0.0)
    b_others = b_weight * tl.load(slopes + o_column, mask=m_x, other=0.0)
    tl.store(out + i * P + o_x, tl.where(m_x, tl.sum(b_sum, 0) - b_others, 0.0), mask=o_x < P)


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
