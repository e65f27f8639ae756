"""Triton kernels of scores from embeddings. Same contract as the tiled path, float32 inside.

    positives_kernel   scores of relevant pairs, by the same arithmetic as every other tile: of intervals, and of lists
    count_kernel       a program owns BM queries and walks over candidates: how much lies ahead of each threshold
    scatter_kernel     the same for many thresholds: each candidate is added to the one place of its query that it belongs to
    backward_kernel    one tile of the gradient of scores, written in float16 for the library's matrix products
    gather_kernel      gradients of the relevant pairs, added to the products' result in the caller's row order

Queries and candidates are in class order, in two operands of equal width, rows padded to whole tiles with zeros. A score
is acc * alpha + row_bias + column_bias. What depends on the ranker stands in `ranker_kernels`. Every sum has one owner or is
an integer, so the same input gives the same bits.

Letters:  BM queries, BN candidates of a tile   P thresholds   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton
import triton.language as tl

from rankgrad.ops.triton.grid_kernels import deposit
from rankgrad.ops.triton.kernel import kernel
from rankgrad.ops.triton.ranker_kernels import GRID, backward_tile, begin_rows, count_tile, tally_tile

# Neither the value of these arguments nor the alignment of these arrays makes the code better, and each case that Triton
# tells apart (1, a multiple of 16, aligned) is seconds of compiling at the next batch size.
SIZES = (
    *("P", "row_p", "column_p", "num_rows", "num_candidates", "num_columns", "pass_rows", "first_row", "first_column", "items"),
    *("last_written", "tiles_per_split", "splits", "size", "bits", "count_bits"),
)
PER_QUERY = (
    *("start", "stop", "self_index", "first_partner", "last_partner", "num_relevant"),
    *("thresholds", "counts", "slopes", "centres"),
    *(f"{role}_{name}" for role in ("row", "column") for name in ("t", "w", "extra", "reached")),
)


@triton.jit
def _scores(
    queries, candidates, row_bias, column_bias, alpha, o_m, o_n,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scores of a tile. A row of the operands is D numbers, or D high and D low parts if SPLIT.

    SPLIT sums the three products that matter, small ones first. Tensor cores cut off what they add to a sum, so the sum over
    the dimensions is made outside, BK at a time.
    """
    o_k = tl.arange(0, BK)
    WIDTH: tl.constexpr = 2 * D if SPLIT else D
    p_q = queries + o_m.to(tl.int64)[:, None] * WIDTH + o_k[None, :]
    p_c = candidates + o_n.to(tl.int64)[None, :] * WIDTH + o_k[:, None]
    b_s = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, D, BK):
        b_q = tl.load(p_q)
        b_c = tl.load(p_c)
        if SPLIT:
            b_part = tl.dot(tl.load(p_q + D), b_c)
            b_part = tl.dot(b_q, tl.load(p_c + D), b_part)
            b_s += tl.dot(b_q, b_c, b_part)
        else:
            b_s = tl.dot(b_q, b_c, b_s)
        p_q += BK
        p_c += BK
    return b_s * tl.load(alpha) + (tl.load(row_bias + o_m)[:, None] + tl.load(column_bias + o_n)[None, :])


@triton.jit
def _hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF: tl.constexpr):
    """-inf where a column is relevant to the row, the query itself, or past the end."""
    b_hidden = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] < b_stop[:, None])
    b_is_self = o_n[None, :] == b_self[:, None]
    b_hidden = b_hidden & (b_is_self == 0) if RANK_SELF else b_hidden | b_is_self
    return tl.where(b_hidden | (o_n[None, :] >= num_candidates), float("-inf"), b_s)


@triton.jit
def _hide_listed(
    b_s, columns, b_start, b_stop, b_self, n_first, o_n, num_candidates, RANK_SELF: tl.constexpr, BN: tl.constexpr
):
    """The same where the relevant candidates of a row are columns[start:stop], ascending: few of them are in a tile."""
    # a binary search for the first that is not before the tile
    b_at = b_start
    b_end = b_stop
    left = tl.max(b_end - b_at, 0)
    while left > 0:
        b_open = b_at < b_end
        b_middle = (b_at + b_end) // 2
        b_before = b_open & (tl.load(columns + b_middle, mask=b_open, other=0) < n_first)
        b_at = tl.where(b_before, b_middle + 1, b_at)
        b_end = tl.where(b_open & (b_before == 0), b_middle, b_end)
        left = left // 2
    b_column = tl.load(columns + b_at, mask=b_at < b_stop, other=2147483647)
    here = tl.min(b_column, 0) < n_first + BN
    while here:
        b_s = tl.where(o_n[None, :] == b_column[:, None], float("-inf"), b_s)
        b_at += (b_column < n_first + BN).to(tl.int32)
        b_column = tl.load(columns + b_at, mask=b_at < b_stop, other=2147483647)
        here = tl.min(b_column, 0) < n_first + BN
    if RANK_SELF == 0:
        b_s = tl.where(o_n[None, :] == b_self[:, None], float("-inf"), b_s)
    return tl.where(o_n[None, :] >= num_candidates, float("-inf"), b_s)


@triton.jit
def _hidden_columns(b_start, b_stop, b_self):
    """First and one past the last column that `_hide` may touch for these rows."""
    b_any = b_stop > b_start
    big = 2147483647
    first = tl.minimum(tl.min(tl.where(b_any, b_start, big), 0), tl.min(tl.where(b_self >= 0, b_self, big), 0))
    last = tl.maximum(tl.max(tl.where(b_any, b_stop, 0), 0), tl.max(b_self + 1, 0))
    return first, last


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def positives_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, out,
    first_row, num_rows, P,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[p, r]: the score of query r with its p-th relevant candidate, by the same arithmetic as every other tile."""
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
        b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        b_n = tl.broadcast_to(o_n[None, :], [BM, BN])
        b_is = (b_n >= b_start[:, None]) & (b_n < b_stop[:, None]) & (b_n != b_self[:, None]) & m_m[:, None]
        b_p = b_n - b_start[:, None] - (b_self_inside[:, None] & (b_n > b_self[:, None])).to(tl.int32)
        tl.store(out + b_p.to(tl.int64) * num_rows + o_r[:, None], b_s, mask=b_is & (b_p < P))


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
        b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, b_column, SPLIT, D, BM, BN, BK)
        for part in range(BN // BM):
            o_p = tl.full([BM], first + part, tl.int64)
            b_t = tl.sum(tl.where(o_n[None, :] == (part * BM + tl.arange(0, BM))[:, None], b_s, 0.0), 1)
            tl.store(out + o_p * num_rows + o_r, b_t, mask=(o_r < num_rows) & (o_p < P))


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def count_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, columns,
    thresholds, counts, slopes, centres, first_row, num_rows, num_candidates, P, tiles_per_split,
    MODE: tl.constexpr, NEAR: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    LISTED: tl.constexpr, RANK_SELF: tl.constexpr, ASM: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """counts[split, p, r], and slopes (SIGMOID, BOUND): the candidates of a split ahead of the p-th threshold of query r.

    NEAR: thresholds of a query that are too far apart to share a centre (SIGMOID) have another pass over the candidates and not
    a loop of their own, with which the kernel would take twice as long to compile. For where two passes are enough.
    """
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    i_split = tl.program_id(1)
    o_m = first_row + o_r
    m_m = o_r < num_rows
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_self = tl.load(self_index + o_m, mask=m_m, other=-1)
    first, last = _hidden_columns(b_start, b_stop, b_self)
    p_out = i_split.to(tl.int64) * P * num_rows + o_r
    P, b_low, b_middle, parts = begin_rows(thresholds, num_relevant, centres, o_m, o_r, m_m, num_rows, P, MODE, BM)
    passes = parts if NEAR else 1
    i_stop = tl.minimum((i_split + 1) * tiles_per_split, tl.cdiv(num_candidates, BN))
    for i in range(i_split * tiles_per_split * passes, i_stop * passes):
        i_n = i // passes
        o_n = i_n * BN + tl.arange(0, BN)
        b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        if LISTED:
            b_s = _hide_listed(b_s, columns, b_start, b_stop, b_self, i_n * BN, o_n, num_candidates, RANK_SELF, BN)
        elif ((i_n * BN < last) & ((i_n + 1) * BN > first)) | ((i_n + 1) * BN > num_candidates):
            b_s = _hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF)
        count_tile(
            b_s, b_low, b_middle, i % passes, parts, thresholds, counts, slopes, o_r, p_out, m_m, num_rows, P,
            MODE, NEAR, DELTA, SLOPE, OFFSET, SPLIT, ASM,
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
    first, last = _hidden_columns(b_start, b_stop, b_self)
    i_stop = tl.minimum((i_split + 1) * tiles_per_split, tl.cdiv(num_candidates, BN))
    for i_n in range(i_split * tiles_per_split, i_stop):
        o_n = i_n * BN + tl.arange(0, BN)
        b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        if LISTED:
            b_s = _hide_listed(b_s, columns, b_start, b_stop, b_self, i_n * BN, o_n, num_candidates, RANK_SELF, BN)
        elif ((i_n * BN < last) & ((i_n + 1) * BN > first)) | ((i_n + 1) * BN > num_candidates):
            b_s = _hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF)
        if MODE == GRID:
            deposit(b_s, maps, tables, sums, o_r, m_m, size, bits, count_bits, scale, SPLIT)
        else:
            tally_tile(b_s, maps, tables, descending, sums, o_r, m_m, size)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def backward_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, num_relevant, columns,
    row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
    first_row, num_rows, pass_row, pass_rows, first_column, num_columns, from_column, last_written,
    num_candidates, row_width, row_p, column_p,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    SYMMETRIC: tl.constexpr, LISTED: tl.constexpr, RANK_SELF: tl.constexpr, ASM: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows pass_row.. of the group of queries that begins at first_row, columns of the group that begins at first_column.

    `extra` is the centre of a row's thresholds (SIGMOID) or the scale of a row's gradient (STEP).
    """
    # a stripe of GROUP row tiles at a time, so that the candidates of a wave are read from the cache
    i = tl.program_id(0)
    row_tiles = tl.cdiv(pass_rows, BM)
    column_tiles = tl.cdiv(last_written - from_column, BN)
    stripe = i // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - stripe * GROUP, GROUP)
    in_stripe = i % (GROUP * column_tiles)
    o_l = (stripe * GROUP + in_stripe % height) * BM + tl.arange(0, BM)  # within the pass
    n_first = from_column + (in_stripe // height) * BN
    o_r = pass_row - first_row + o_l  # within the group
    o_m = pass_row + o_l
    m_m = (o_l < pass_rows) & (o_r < num_rows)
    o_n = n_first + tl.arange(0, BN)
    o_c = o_n - first_column  # within the group of columns
    m_n = o_c < num_columns
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_self = tl.load(self_index + o_m, mask=m_m, other=-1)
    first, last = _hidden_columns(b_start, b_stop, b_self)
    b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
    if LISTED:
        b_s = _hide_listed(b_s, columns, b_start, b_stop, b_self, n_first, o_n, num_candidates, RANK_SELF, BN)
    elif ((n_first < last) & (n_first + BN > first)) | (n_first + BN > num_candidates):
        b_s = _hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF)
    b_g = tl.zeros([BM, BN], tl.float32)
    b_g = backward_tile(
        b_g, b_s, row_t, row_w, row_extra, row_reached, num_relevant, o_m, o_r, m_m, m_m, num_rows, row_p,
        1, MODE, DELTA, SLOPE, OFFSET, SPLIT, ASM, BM,
    )  # fmt: skip
    if SYMMETRIC:
        # a row past the end must not be counted by the columns
        b_s = tl.where(m_m[:, None], b_s, float("-inf"))
        # tiles of the pass's own square are visited from both sides, and the rows have counted there
        m_new = m_n & (o_n >= pass_row + pass_rows)
        b_g = backward_tile(
            b_g, b_s, column_t, column_w, column_extra, column_reached, num_relevant, o_n, o_c, m_n, m_new, num_columns,
            column_p, 0, MODE, DELTA, SLOPE, OFFSET, SPLIT, ASM, BN,
        )  # fmt: skip
    p_g = o_l.to(tl.int64)[:, None] * row_width + (o_n - pass_row if SYMMETRIC else o_n)[None, :]
    # columns past the end are 0 and are written as far as the products read
    m_g = (o_l < pass_rows)[:, None] & (o_n < last_written)[None, :]
    b_high = b_g.to(tl.float16)
    tl.store(high + p_g, b_high, mask=m_g)
    if SPLIT:
        tl.store(low + p_g, ((b_g - b_high.to(tl.float32)) * 2048.0).to(tl.float16), mask=m_g)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=PER_QUERY)
def gather_kernel(
    partners, partner_order, d_positives, offset, start, self_index, first_partner, last_partner, product, product_scale,
    product_width, order, out, items, d,
    SPLIT: tl.constexpr, ROLE: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
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
    if SPLIT:  # what the low parts contributed stands beside
        b_sum += tl.load(p_product + product_width // 2, mask=m_o, other=0.0)
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
            b_weight += tl.load(d_positives + b_offset[:, None] + b_among, mask=m_other, other=0.0)
        if ROLE != 0:
            b_start = tl.load(start + o_j, mask=m_j, other=0)
            b_self_j = tl.load(self_index + o_j, mask=m_j, other=-1)
            b_offset_j = tl.load(offset + o_j, mask=m_j, other=0)
            m_before = (b_self_j >= b_start)[None, :] & (b_self_j[None, :] < o_i[:, None])
            b_among = o_i[:, None] - b_start[None, :] - m_before.to(tl.int32)
            m_other = m_pair & (b_self_j[None, :] != o_i[:, None])
            b_weight += tl.load(d_positives + b_offset_j[None, :] + b_among, mask=m_other, other=0.0)
        b_row = tl.load(partner_order + o_j, mask=m_j, other=0)
        p_partner = partners + b_row.to(tl.int64)[:, None] * d + o_d[None, :]
        b_partner = tl.load(p_partner, mask=m_j[:, None] & m_d[None, :], other=0.0)
        b_sum = tl.dot(b_weight, b_partner, b_sum, input_precision="ieee")
    p_out = out + tl.load(order + o_i, mask=m_i, other=0).to(tl.int64)[:, None] * d + o_d[None, :]
    tl.store(p_out, b_sum, mask=m_o)
