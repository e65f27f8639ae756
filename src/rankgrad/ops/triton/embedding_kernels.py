"""Triton kernels of scores from embeddings. Same contract as the tiled path, float32 inside.

    positives_kernel   scores of relevant pairs, by the same arithmetic as every other tile: of intervals, and of lists
    count_kernel       a program owns BM queries and walks over candidates: how much lies ahead of each threshold
    backward_kernel    the gradient of scores, for the library's products
    scatter_kernel     counts for many thresholds: each candidate is added to the one place of its query that it belongs to
    gather_kernel      gradients of the relevant pairs, added to the products' result in the caller's row order

Scores exist in registers, as tiles of `score_tiles`; those that are stored see `stored_kernels`. What depends on the ranker
stands in `ranker_kernels`. Every sum has one owner or is an integer, so the same input gives the same bits.

Letters:  BM queries, BN candidates of a tile   P thresholds   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton.language as tl

from rankgrad._kernel import kernel
from rankgrad.ops.triton.gradient_tiles import write_gradient
from rankgrad.ops.triton.grid_kernels import deposit
from rankgrad.ops.triton.ranker_kernels import GRID, count_tile, most_thresholds, tally_tile
from rankgrad.ops.triton.score_tiles import (
    PER_QUERY,
    SIZES,
    hidden_columns,
    hidden_range,
    hide,
    hide_listed,
    hide_tile,
    made_tile,
    part_of,
    score_tile,
    stripe,
    visible_tile,
)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def positives_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, out, plain, valid,
    first_row, num_rows, P, plain_scale,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[p, r]: the score of query r with its p-th relevant candidate, by the same arithmetic as every other tile.

    And plain[r, p], the same times plain_scale, and whether there is one in valid[r, p]. Padding is infinite.
    """
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    o_m = first_row + o_r
    m_m = o_r < num_rows
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_self = tl.load(self_index + o_m, mask=m_m, other=-1)
    b_count = tl.load(num_relevant + o_m, mask=m_m, other=0)
    b_self_inside = (b_self >= b_start) & (b_self < b_stop)
    big = 2147483647
    first = tl.min(tl.where(b_count > 0, b_start, big), 0)
    last = tl.max(tl.where(b_count > 0, b_stop, 0), 0)
    for i_n in range(first // BN, tl.cdiv(last, BN)):
        o_n = i_n * BN + tl.arange(0, BN)
        b_s = score_tile(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        b_n = tl.broadcast_to(o_n[None, :], [BM, BN])
        b_is = (b_n >= b_start[:, None]) & (b_n < b_stop[:, None]) & (b_n != b_self[:, None]) & m_m[:, None]
        b_p = b_n - b_start[:, None] - (b_self_inside[:, None] & (b_n > b_self[:, None])).to(tl.int32)
        tl.store(out + b_p.to(tl.int64) * num_rows + o_r[:, None], b_s, mask=b_is & (b_p < P))
        tl.store(plain + o_r.to(tl.int64)[:, None] * P + b_p, b_s * plain_scale, mask=b_is & (b_p < P))
    for p in range(P):
        m_pad = m_m & (p >= b_count)
        p_row = o_r.to(tl.int64) * P + p
        tl.store(valid + p_row, (p < b_count).to(tl.uint8), mask=m_m)
        tl.store(plain + p_row, tl.full([BM], float("inf"), tl.float32), mask=m_pad)
        tl.store(out + o_r + tl.cast(p, tl.int64) * num_rows, tl.full([BM], float("inf"), tl.float32), mask=m_pad)


@kernel(do_not_specialize=SIZES)
def listed_positives_kernel(
    queries, candidates, row_bias, column_bias, alpha, positives, out, first_row, num_rows, P,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same for positives [rows, P] anywhere: BN / BM of each row are the columns of a tile, whose diagonals are wanted."""
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    o_m = first_row + o_r
    o_n = tl.arange(0, BN)
    o_owner = tl.program_id(0) * BM + o_n % BM  # row whose positive the column is
    for first in range(0, P, BN // BM):
        o_which = first + o_n // BM
        p_column = positives + o_owner.to(tl.int64) * P + o_which
        b_column = tl.load(p_column, mask=(o_owner < num_rows) & (o_which < P), other=0)
        b_s = score_tile(queries, candidates, row_bias, column_bias, alpha, o_m, b_column, SPLIT, D, BM, BN, BK)
        for part in range(BN // BM):
            o_p = tl.full([BM], first + part, tl.int64)
            b_t = tl.sum(tl.where(o_n[None, :] == (part * BM + tl.arange(0, BM))[:, None], b_s, 0.0), 1)
            tl.store(out + o_p * num_rows + o_r, b_t, mask=(o_r < num_rows) & (o_p < P))


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def count_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, columns,
    row_t, row_counts, row_slopes, column_t, column_counts, column_slopes,
    first_row, num_rows, pass_row, pass_rows, first_column, num_columns, from_column, num_queries, num_candidates,
    row_p, column_p, tiles_per_split,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr, ROOT: tl.constexpr, ASM: tl.constexpr,
    BOTH: tl.constexpr, LISTED: tl.constexpr, RANK_SELF: tl.constexpr, DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """row_counts[split, p, r], and slopes (SIGMOID, BOUND): the candidates of a split ahead of the p-th threshold of query r.

    Of the queries of a pass, from pass_row on, in the group that begins at first_row, and candidates from from_column on, in
    the group that begins at first_column. BOTH: candidates are queries too, and a tile counts for both, unless its rows are in
    its columns: column_counts[i, p, c] has what of the i-th tile of rows is ahead. Columns before these have met the rows as
    rows.
    """
    i = tl.program_id(0)
    i_split = tl.program_id(1)
    m_first = pass_row + i * BM
    o_m = m_first + tl.arange(0, BM)
    o_r = o_m - first_row
    m_m = o_m < pass_row + pass_rows
    first, last = hidden_range(start, stop, self_index, m_first, num_queries, LISTED, BM)
    met = first_column + num_columns - from_column
    most = most_thresholds(num_relevant, o_m, m_m, row_p, MODE)
    n_first = from_column + i_split * tiles_per_split * BN
    n_stop = tl.minimum(n_first + tiles_per_split * BN, first_column + num_columns)
    beyond = first_column + num_columns
    if BOTH:  # from the tile on that has the rows in its columns
        n_first = tl.maximum(n_first, from_column + (m_first - from_column) // BN * BN)
        beyond = from_column + tl.cdiv(m_first + BM - from_column, BN) * BN
    for n in range(n_first, n_stop, BN):
        b_s = made_tile(queries, candidates, row_bias, column_bias, alpha, m_first, n, DESCRIBED, SPLIT, D, BM, BN, BK)
        b_s = hide_tile(
            b_s, start, stop, self_index, columns, first, last, m_first, n, num_queries, num_candidates,
            LISTED, RANK_SELF, BM, BN,
        )  # fmt: skip
        if BOTH:  # noqa: SIM102  # a constant: what is inside is not compiled
            if n >= beyond:
                o_c = n - first_column + tl.arange(0, BN)
                most_c = most_thresholds(num_relevant, first_column + o_c, o_c < num_columns, column_p, MODE)
                p_part = i.to(tl.int64) * column_p * met
                WIDTH: tl.constexpr = BN // PARTS
                for part in tl.static_range(PARTS):
                    o_c = n - first_column + part * WIDTH + tl.arange(0, WIDTH)
                    count_tile(
                        part_of(b_s, part, PARTS, BM, BN), column_t, column_counts + p_part, column_slopes + p_part,
                        o_c, first_column - from_column + o_c, o_c < num_columns, num_columns, met, most_c,
                        0, False, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM,
                    )  # fmt: skip
        p_split = i_split.to(tl.int64) * row_p * pass_rows
        count_tile(
            b_s, row_t, row_counts + p_split, row_slopes + p_split, o_r, o_m - pass_row, m_m, num_rows, pass_rows, most,
            1, True, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM,
        )  # fmt: skip


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def backward_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, columns,
    row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
    first_row, num_rows, pass_row, pass_rows, first_column, num_columns, from_column, num_queries, num_candidates,
    row_width, row_p, column_p,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr, ROOT: tl.constexpr, ASM: tl.constexpr,
    SYMMETRIC: tl.constexpr, LISTED: tl.constexpr, RANK_SELF: tl.constexpr, DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of scores that are made anew, of a pass and of candidates from from_column on; see `write_gradient`."""
    row_tiles = tl.cdiv(pass_rows, BM)
    i_m, i_n = stripe(tl.program_id(0), row_tiles, tl.num_programs(0) // row_tiles, GROUP)
    m_first = pass_row + i_m * BM
    n_first = from_column + i_n * BN
    o_m = m_first + tl.arange(0, BM)
    o_n = n_first + tl.arange(0, BN)
    b_s = visible_tile(
        queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, columns, m_first, n_first,
        num_queries, num_candidates, LISTED, RANK_SELF, DESCRIBED, SPLIT, D, BM, BN, BK,
    )  # fmt: skip
    row_most = most_thresholds(num_relevant, o_m, o_m < pass_row + pass_rows, row_p, MODE)
    column_most = row_most
    if SYMMETRIC:
        column_most = most_thresholds(num_relevant, o_n, o_n < first_column + num_columns, column_p, MODE)
    WIDTH: tl.constexpr = BN // PARTS
    for part in tl.static_range(PARTS):
        write_gradient(
            part_of(b_s, part, PARTS, BM, BN),
            row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
            m_first, n_first + part * WIDTH, first_row, num_rows, pass_row, pass_rows, first_column, num_columns,
            row_width, row_most, column_most, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM, SYMMETRIC, SPLIT, BM, WIDTH,
        )  # fmt: skip


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def scatter_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, columns,
    maps, tables, descending, sums, first_row, num_rows, num_candidates, tiles_per_split, splits, size, bits, count_bits, scale,
    MODE: tl.constexpr, LISTED: tl.constexpr, RANK_SELF: tl.constexpr, ASM: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The candidates of a split, added to the integers of the queries from first_row on that they belong to.

    GRID: sums of cells [rows, size]; `maps` says where a grid begins, `tables` how many cells it has. SEARCH: counts between
    `descending` thresholds [rows, size], with their maps and tables of buckets.
    """
    # all splits of a tile of queries come together, so that what they share stays in the cache
    i_split = tl.program_id(0) % splits
    o_r = (tl.program_id(0) // splits) * BM + tl.arange(0, BM)
    o_m = first_row + o_r
    m_m = o_r < num_rows
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_self = tl.load(self_index + o_m, mask=m_m, other=-1)
    first, last = hidden_columns(b_start, b_stop, b_self)
    i_stop = tl.minimum((i_split + 1) * tiles_per_split, tl.cdiv(num_candidates, BN))
    for i_n in range(i_split * tiles_per_split, i_stop):
        o_n = i_n * BN + tl.arange(0, BN)
        b_s = score_tile(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        if LISTED:
            b_s = hide_listed(b_s, columns, b_start, b_stop, b_self, i_n * BN, o_n, num_candidates, RANK_SELF, BN)
        elif ((i_n * BN < last) & ((i_n + 1) * BN > first)) | ((i_n + 1) * BN > num_candidates):
            b_s = hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF)
        if MODE == GRID:
            deposit(b_s, maps, tables, sums, o_r, m_m, size, bits, count_bits, scale, SPLIT)
        else:
            tally_tile(b_s, maps, tables, descending, sums, o_r, m_m, size)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def gather_kernel(
    partners, partner_order, d_positives, offset, start, self_index, first_partner, last_partner, product, product_scale,
    product_width, order, out, items, d, pairs,
    ROLE: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[order[i]] = product[i] * scale + sum over the partners j of i in relevant pairs of dL/ds_ij * partner[j].

    ROLE 0: i is a query and its partners are candidates. ROLE 1: i is a candidate, its partners are queries. ROLE 2: both.
    Neighbours in class order share their partners, so a block of items multiplies with a block of partners.
    """
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_i = o_i < items
    m_d = o_d < d
    m_o = m_i[:, None] & m_d[None, :]
    p_product = product + o_i.to(tl.int64)[:, None] * product_width + o_d[None, :]
    b_sum = tl.load(p_product, mask=m_o, other=0.0)
    b_sum *= tl.load(product_scale)
    b_first = tl.load(first_partner + o_i, mask=m_i, other=0)
    b_last = tl.load(last_partner + o_i, mask=m_i, other=0)
    b_offset = tl.zeros([BI], tl.int64)
    b_self = tl.full([BI], -1, tl.int32)
    if ROLE != 1:
        b_offset = tl.load(offset + o_i, mask=m_i, other=0)
        b_self = tl.load(self_index + o_i, mask=m_i, other=-1)
    m_any = b_last > b_first
    # An empty loop begins where it ends: a compiled one loads what comes a step later before it is known to be needed, and
    # the step after the largest integer is negative.
    end = tl.max(tl.where(m_any, b_last, 0), 0)
    for j in range(tl.min(tl.where(m_any, b_first, end), 0), end, BJ):
        o_j = j + tl.arange(0, BJ)
        b_j = tl.broadcast_to(o_j[None, :], [BI, BJ])
        m_pair = (b_j >= b_first[:, None]) & (b_j < b_last[:, None])
        m_j = o_j < tl.max(b_last, 0)
        b_weight = tl.zeros([BI, BJ], tl.float32)
        if ROLE != 1:  # offset of j among the positives of i: its offset in the class, less i itself if that comes before
            m_before = (b_self >= b_first)[:, None] & (b_self[:, None] < b_j)
            b_among = b_j - b_first[:, None] - m_before.to(tl.int32)
            m_other = m_pair & (b_j != b_self[:, None])
            b_at = b_offset[:, None] + b_among
            b_weight += tl.load(d_positives + b_at, mask=m_other & (b_at < pairs), other=0.0)
        if ROLE != 0:
            b_start = tl.load(start + o_j, mask=m_j, other=0)
            b_self_j = tl.load(self_index + o_j, mask=m_j, other=-1)
            b_offset_j = tl.load(offset + o_j, mask=m_j, other=0)
            m_before = (b_self_j >= b_start)[None, :] & (b_self_j[None, :] < o_i[:, None])
            b_among = o_i[:, None] - b_start[None, :] - m_before.to(tl.int32)
            m_other = m_pair & (b_self_j[None, :] != o_i[:, None])
            b_at = b_offset_j[None, :] + b_among
            b_weight += tl.load(d_positives + b_at, mask=m_other & (b_at < pairs), other=0.0)
        b_row = tl.load(partner_order + o_j, mask=m_j, other=0)
        p_partner = partners + b_row.to(tl.int64)[:, None] * d + o_d[None, :]
        b_partner = tl.load(p_partner, mask=m_j[:, None] & m_d[None, :], other=0.0)
        b_sum = tl.dot(b_weight, b_partner, b_sum, input_precision="ieee")
    p_out = out + tl.load(order + o_i, mask=m_i, other=0).to(tl.int64)[:, None] * d + o_d[None, :]
    tl.store(p_out, b_sum, mask=m_o)
