"""Triton kernels for rows: L2 normalisation, and how the relevant items of a query stand to each other."""

import triton
import triton.language as tl


@triton.jit
def unit_kernel(x, unit, inverse, d, smallest, BD: tl.constexpr):
    """A row divided by its length, and 1 / length."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_x = tl.load(x + i * d + o_d, mask=o_d < d, other=0.0)
    b_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_x * b_x, 0)), smallest)
    tl.store(unit + i * d + o_d, b_x * b_inverse, mask=o_d < d)
    tl.store(inverse + i, b_inverse)


@triton.jit
def unit_bwd_kernel(unit, inverse, d_unit, d_x, d, BD: tl.constexpr):
    """What of a row's gradient is not along the row, divided by its length."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_u = tl.load(unit + i * d + o_d, mask=o_d < d, other=0.0)
    b_g = tl.load(d_unit + i * d + o_d, mask=o_d < d, other=0.0)
    tl.store(d_x + i * d + o_d, (b_g - b_u * tl.sum(b_u * b_g, 0)) * tl.load(inverse + i), mask=o_d < d)


@triton.jit
def among_kernel(scores, num_relevant, out, P, inverse_tau, BX: tl.constexpr, BY: tl.constexpr):
    """out[row, x] = sum over the row's relevant y of sigmoid((s_y - s_x) / tau), x itself among them."""
    i = tl.program_id(0).to(tl.int64)
    count = tl.load(num_relevant + i)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_x = tl.load(scores + i * P + o_x, mask=o_x < count, other=0.0)
    b_sum = tl.zeros([BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=0.0)
        b_ahead = tl.sigmoid((b_y[None, :] - b_x[:, None]) * inverse_tau)
        b_sum += tl.sum(tl.where(o_y[None, :] < count, b_ahead, 0.0), 1)
    tl.store(out + i * P + o_x, b_sum, mask=o_x < P)


@triton.jit
def among_bwd_kernel(scores, weights, num_relevant, out, P, inverse_tau, BX: tl.constexpr, BY: tl.constexpr):
    """out[row, x] = sum over y of (w_y - w_x) slope((s_y - s_x) / tau): the slope of a sigmoid is even."""
    i = tl.program_id(0).to(tl.int64)
    count = tl.load(num_relevant + i)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_x = tl.load(scores + i * P + o_x, mask=o_x < count, other=0.0)
    b_wx = tl.load(weights + i * P + o_x, mask=o_x < count, other=0.0)
    b_sum = tl.zeros([BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=0.0)
        b_wy = tl.load(weights + i * P + o_y, mask=o_y < count, other=0.0)
        b_ahead = tl.sigmoid((b_y[None, :] - b_x[:, None]) * inverse_tau)
        b_slope = tl.where(o_y[None, :] < count, b_ahead * (1.0 - b_ahead), 0.0)
        b_sum += tl.sum((b_wy[None, :] - b_wx[:, None]) * b_slope, 1)
    tl.store(out + i * P + o_x, tl.where(o_x < count, b_sum, 0.0), mask=o_x < P)


@triton.jit
def proper_kernel(ahead, order, descending, num_relevant, rank, among, P, BLOCK: tl.constexpr):
    """Ranks of the items of a row [P] from their places in descending order and the irrelevant ones ahead; 1 for padding."""
    i = tl.program_id(0).to(tl.int64)
    o_place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_place = o_place < P
    count = tl.load(num_relevant + i)
    b_item = tl.load(order + i * P + o_place, mask=m_place, other=0)
    b_value = tl.load(descending + i * P + o_place, mask=m_place, other=0.0)
    m_real = m_place & (b_item < count)
    # padding is infinite and last in its row: ahead of every item but of infinite ones
    b_among = o_place + 1 - tl.where(b_value == float("inf"), 0, P - count)
    b_among = tl.where(m_real, b_among, 1)
    b_ahead = tl.load(ahead + i * P + b_item, mask=m_real, other=0)
    tl.store(among + i * P + b_item, b_among.to(among.dtype.element_ty), mask=m_place)
    tl.store(rank + i * P + b_item, (b_among + b_ahead).to(rank.dtype.element_ty), mask=m_place)
