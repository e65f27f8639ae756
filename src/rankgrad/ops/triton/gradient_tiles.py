"""The gradient of a tile of scores, in float16 for the library's matrix products.

Letters:  BM queries, BN candidates of a tile   P thresholds   o_ offsets, m_ a mask, b_ a block in registers, p_ pointers
"""

import triton
import triton.language as tl

from rankgrad.ops.triton.ranker_kernels import backward_tile


@triton.jit
def write_gradient(
    b_s, row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low, m_first, n_first,
    first_row, num_rows, pass_row, pass_rows, first_column, num_columns, row_width, row_p, column_p,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    ROOT: tl.constexpr, ASM: tl.constexpr, SYMMETRIC: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of scores of queries from m_first and candidates from n_first on.

    They are of a pass over the queries from pass_row on, in the group that begins at first_row, and of the group of candidates
    that begins at first_column. `extra` is the scale of a row's gradient (STEP, SEARCH).
    """
    o_m = m_first + tl.arange(0, BM)
    o_n = n_first + tl.arange(0, BN)
    m_m = o_m < pass_row + pass_rows
    b_g = tl.zeros([BM, BN], tl.float32)
    b_g = backward_tile(
        b_g, b_s, row_t, row_w, row_extra, row_reached, o_m - first_row, m_m, m_m, num_rows, row_p,
        1, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM,
    )  # fmt: skip
    if SYMMETRIC:
        o_c = o_n - first_column
        m_n = o_c < num_columns
        # tiles of the pass's own square are visited from both sides, and the rows have counted there
        m_new = m_n & (o_n >= pass_row + pass_rows)
        b_g = backward_tile(
            b_g, b_s, column_t, column_w, column_extra, column_reached, o_c, m_n, m_new, num_columns, column_p,
            0, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM,
        )  # fmt: skip
    p_g = (o_m - pass_row).to(tl.int64)[:, None] * row_width + (o_n - pass_row if SYMMETRIC else o_n)[None, :]
    b_high = b_g.to(tl.float16)
    tl.store(high + p_g, b_high, mask=m_m[:, None])
    if SPLIT:
        tl.store(low + p_g, ((b_g - b_high.to(tl.float32)) * 2048.0).to(tl.float16), mask=m_m[:, None])
