"""Triton kernels that prepare embeddings.

    operand_kernel     embeddings as float16 operands in class order
    normalize_kernel   rows divided by their length, and the gradient of that

Letters:  i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton.language as tl

from rankgrad._kernel import kernel


@kernel(do_not_specialize=("items",))
def operand_kernel(
    base, order, mean, scale, operand, plain, bias, items, d,
    KNOWN_SCALE: tl.constexpr, SPLIT: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One row of the operands, in class order and scaled; DP is d padded with zeros to a multiple of the product's step.

    SPLIT: x = high + low in two float16, DP of each. Otherwise: x less the mean in float16, the mean's share in the scores as
    a bias, and x itself for the products of the backward pass. Rows past all items are zeros.
    `scale` is a number if KNOWN_SCALE, else where there is one.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(order + i, mask=i < items, other=0)
    d_here = tl.where(i < items, d, 0)
    b_scale = scale if KNOWN_SCALE else tl.load(scale)
    to_mean = 0.0
    mean_square = 0.0
    for k in range(0, DP, BD):
        o_d = k + tl.arange(0, BD)
        m_d = o_d < d_here
        b_x = tl.load(base + row * d + o_d, mask=m_d, other=0.0)
        m_o = o_d < DP
        if SPLIT:
            b_high = (b_x * b_scale).to(tl.float16)
            b_low = (b_x * b_scale - b_high.to(tl.float32)).to(tl.float16)
            tl.store(operand + i * (2 * DP) + o_d, b_high, mask=m_o)
            tl.store(operand + i * (2 * DP) + DP + o_d, b_low, mask=m_o)
        else:
            b_mean = tl.load(mean + o_d, mask=m_d, other=0.0)
            to_mean += tl.sum(b_x * b_mean, 0)
            mean_square += tl.sum(b_mean * b_mean, 0)
            tl.store(operand + i * DP + o_d, ((b_x - b_mean) * b_scale).to(tl.float16), mask=m_o)
            tl.store(plain + i * DP + o_d, (b_x * b_scale).to(tl.float16), mask=m_o)
    tl.store(bias + i, to_mean - 0.5 * mean_square)


@kernel()
def normalize_kernel(x, normalized, inverse, d, smallest, BD: tl.constexpr):
    """A row divided by its length, and 1 / length; a row of large numbers is scaled first, so that no square overflows."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_x = tl.load(x + i * d + o_d, mask=o_d < d, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(b_x), 0), 1.0)
    b_x = b_x / scale
    b_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_x * b_x, 0)), smallest)
    tl.store(normalized + i * d + o_d, b_x * b_inverse, mask=o_d < d)
    tl.store(inverse + i, b_inverse / scale)


@kernel()
def normalize_bwd_kernel(normalized, inverse, d_normalized, d_x, d, BD: tl.constexpr):
    """What of a row's gradient is not along the row, divided by its length."""
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    b_u = tl.load(normalized + i * d + o_d, mask=o_d < d, other=0.0)
    b_g = tl.load(d_normalized + i * d + o_d, mask=o_d < d, other=0.0)
    tl.store(d_x + i * d + o_d, (b_g - b_u * tl.sum(b_u * b_g, 0)) * tl.load(inverse + i), mask=o_d < d)
