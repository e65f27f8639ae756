"""Triton kernels of stored scores: blocks of some thousand queries, which a search or a look-up reads in another layout.

    store_kernel      a block of scores
    gradient_kernel   the gradient of the scores of a block

What depends on the ranker stands in `ranker_kernels`.

Letters:  BM queries, BN candidates of a tile   o_ offsets, b_ a block in registers
"""

import triton.language as tl

from rankgrad._kernel import kernel
from rankgrad.ops.triton.gradient_tiles import write_gradient
from rankgrad.ops.triton.score_tiles import PER_QUERY, SIZES, stripe, visible_tile


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
    column_tiles = width // BN
    i_m, i_n = stripe(tl.program_id(0), tl.num_programs(0) // column_tiles, column_tiles, GROUP)
    l_first = i_m * BM
    c_first = i_n * BN
    m_first = first_row + l_first
    n_first = first_column + c_first
    b_s = visible_tile(
        queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, columns, m_first, n_first,
        num_queries, num_candidates, LISTED, RANK_SELF, DESCRIBED, SPLIT, D, BM, BN, BK,
    )  # fmt: skip
    tl.store(scores + (l_first + tl.arange(0, BM))[:, None] * width + (c_first + tl.arange(0, BN))[None, :], b_s)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def gradient_kernel(
    scores, row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
    first_row, num_rows, pass_row, pass_rows, first_column, num_columns, from_column,
    score_width, row_width, row_p, column_p,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    ROOT: tl.constexpr, ASM: tl.constexpr, SYMMETRIC: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of scores of the pass over queries from pass_row on and of candidates from from_column on; see `write_gradient`."""
    l_first = tl.program_id(1) * BM
    c_first = tl.program_id(0) * BN
    p_s = scores + (l_first + tl.arange(0, BM))[:, None] * score_width + (c_first + tl.arange(0, BN))[None, :]
    write_gradient(
        tl.load(p_s), row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
        pass_row + l_first, from_column + c_first, first_row, num_rows, pass_row, pass_rows, first_column, num_columns,
        row_width, row_p, column_p, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM, SYMMETRIC, SPLIT, BM, BN,
    )  # fmt: skip
