"""Triton kernels of stored scores: blocks of some thousand queries, made once and read by what counts and by the gradient.

    store_kernel      a block of scores
    centre_kernel     the middle of each query's thresholds
    tally_kernel      how much of a block lies ahead of each threshold, for its rows or for its columns
    gradient_kernel   the gradient of the scores of a block, in float16 for the library's matrix products

What depends on the ranker stands in `ranker_kernels`.

Letters:  BM queries, BN candidates of a tile   P thresholds   o_ offsets, m_ a mask, b_ a block in registers, p_ pointers
"""

import triton.language as tl

from rankgrad.ops.triton.kernel import kernel
from rankgrad.ops.triton.ranker_kernels import SIGMOID, backward_tile, begin_rows, count_list
from rankgrad.ops.triton.score_tiles import (
    PER_QUERY,
    SIZES,
    described_score_tile,
    hidden_columns,
    hide,
    hide_listed,
    score_tile,
)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def store_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, columns, scores,
    first_row, num_queries, first_column, num_candidates, width,
    LISTED: tl.constexpr, RANK_SELF: tl.constexpr, DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Scores [rows, width] from first_row and first_column on, -inf where a pair is hidden or past the end; whole tiles.

    DESCRIBED: queries and candidates are tensor descriptors.
    """
    # a stripe of GROUP row tiles at a time, so that the candidates of a wave are read from the cache
    i = tl.program_id(0)
    column_tiles = width // BN
    stripe = i // (GROUP * column_tiles)
    height = tl.minimum(tl.num_programs(0) // column_tiles - stripe * GROUP, GROUP)
    in_stripe = i % (GROUP * column_tiles)
    l_first = (stripe * GROUP + in_stripe % height) * BM
    c_first = (in_stripe // height) * BN
    m_first = first_row + l_first
    n_first = first_column + c_first
    o_m = m_first + tl.arange(0, BM)
    o_n = n_first + tl.arange(0, BN)
    if DESCRIBED:
        b_s = described_score_tile(queries, candidates, row_bias, alpha, m_first, n_first, D, BM, BN, BK)
    else:
        b_s = score_tile(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
    # loaded after the product, which needs the registers
    m_m = o_m < num_queries
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_self = tl.load(self_index + o_m, mask=m_m, other=-1)
    first, last = hidden_columns(b_start, b_stop, b_self)
    if LISTED:
        b_s = hide_listed(b_s, columns, b_start, b_stop, b_self, n_first, o_n, num_candidates, RANK_SELF, BN)
    elif ((n_first < last) & (n_first + BN > first)) | (n_first + BN > num_candidates):
        b_s = hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF)
    if m_first + BM > num_queries:  # columns are queries too and must not count a row past the end
        b_s = tl.where(m_m[:, None], b_s, float("-inf"))
    tl.store(scores + (l_first + tl.arange(0, BM))[:, None] * width + (c_first + tl.arange(0, BN))[None, :], b_s)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def centre_kernel(thresholds, num_relevant, centres, first_row, num_rows, P, MODE: tl.constexpr, BM: tl.constexpr):
    """centres[r]: the centre of the thresholds of query r (SIGMOID)."""
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    begin_rows(thresholds, num_relevant, centres, first_row + o_r, o_r, o_r < num_rows, num_rows, P, MODE, BM)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def tally_kernel(
    scores, num_relevant, thresholds, counts, slopes, centres,
    query_stride, other_stride, num_queries, num_others, tiles_per_split, first_row, first_in_group, num_rows, P,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    SPLIT: tl.constexpr, ASM: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds to counts[split, p, r] what of stored scores [num_queries, num_others], rows or columns of a block, is ahead.

    A split is `tiles_per_split` times BN of the others. The list of a query is read again for every HELD thresholds.
    """
    o_l = tl.program_id(0) * BM + tl.arange(0, BM)
    m_m = o_l < num_queries
    o_r = first_in_group + o_l
    i_split = tl.program_id(1)
    p_out = i_split.to(tl.int64) * P * num_rows + o_r
    first = i_split * tiles_per_split * BN
    last = tl.minimum(first + tiles_per_split * BN, num_others)
    b_centre = tl.zeros([BM], tl.float32)
    if MODE == SIGMOID:
        b_centre = tl.load(centres + o_r, mask=m_m, other=0.0)
    P = tl.minimum(tl.max(tl.load(num_relevant + first_row + o_l, mask=m_m, other=0), 0), P)  # only what these queries have
    p_s = scores + o_l[:, None] * query_stride
    for p in range(0, P, HELD):
        # two calls and not one with a branch inside: either the score or its power is alive in the loop
        if (MODE == SIGMOID) and (tl.max(b_centre, 0) < float("inf")):
            count_list(
                p_s, other_stride, first, last, num_others, b_centre, thresholds, counts, slopes, o_r, p_out, m_m, num_rows,
                p, P, MODE, DELTA, SLOPE, OFFSET, True, SPLIT, ASM, HELD, BM, BN,
            )  # fmt: skip
        else:
            count_list(
                p_s, other_stride, first, last, num_others, b_centre, thresholds, counts, slopes, o_r, p_out, m_m, num_rows,
                p, P, MODE, DELTA, SLOPE, OFFSET, False, SPLIT, ASM, HELD, BM, BN,
            )  # fmt: skip


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def gradient_kernel(
    scores, num_relevant,
    row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
    first_row, num_rows, pass_row, pass_rows, first_column, num_columns, from_column,
    score_width, row_width, row_p, column_p,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    SYMMETRIC: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows pass_row.. of the group of queries that begins at first_row, columns of the group that begins at first_column.

    `extra` is the centre of a row's thresholds (SIGMOID) or the scale of a row's gradient (STEP).
    """
    o_l = tl.program_id(1) * BM + tl.arange(0, BM)  # within the pass
    o_s = tl.program_id(0) * BN + tl.arange(0, BN)  # within the block of scores
    o_r = pass_row - first_row + o_l  # within the group
    m_m = o_l < pass_rows
    o_n = from_column + o_s
    o_c = o_n - first_column  # within the group of columns
    m_n = o_c < num_columns
    b_s = tl.load(scores + o_l[:, None] * score_width + o_s[None, :])
    b_g = tl.zeros([BM, BN], tl.float32)
    b_g = backward_tile(
        b_g, b_s, row_t, row_w, row_extra, row_reached, num_relevant, pass_row + o_l, o_r, m_m, m_m, num_rows, row_p,
        1, MODE, DELTA, SLOPE, OFFSET, SPLIT, ASM, BM,
    )  # fmt: skip
    if SYMMETRIC:
        # tiles of the pass's own square are visited from both sides, and the rows have counted there
        m_new = m_n & (o_n >= pass_row + pass_rows)
        b_g = backward_tile(
            b_g, b_s, column_t, column_w, column_extra, column_reached, num_relevant, o_n, o_c, m_n, m_new, num_columns,
            column_p, 0, MODE, DELTA, SLOPE, OFFSET, SPLIT, ASM, BN,
        )  # fmt: skip
    p_g = o_l.to(tl.int64)[:, None] * row_width + (o_n - pass_row if SYMMETRIC else o_n)[None, :]
    b_high = b_g.to(tl.float16)
    tl.store(high + p_g, b_high, mask=m_m[:, None])
    if SPLIT:
        tl.store(low + p_g, ((b_g - b_high.to(tl.float32)) * 2048.0).to(tl.float16), mask=m_m[:, None])
