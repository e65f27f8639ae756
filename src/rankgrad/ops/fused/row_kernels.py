"""Triton kernels of L2 normalisation: a program is a row."""

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
