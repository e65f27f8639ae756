"""A tile of scores in the registers of a Triton program, by the same arithmetic in every kernel, and what is hidden of it.

Queries and candidates are in class order, in two operands of equal width, rows padded to whole tiles with zeros. A score
is acc * alpha + (row_bias + column_bias).

Letters:  BM queries, BN candidates of a tile   o_ offsets, b_ a block in registers, p_ pointers
"""

import triton
import triton.language as tl

# Neither the value of these arguments nor the alignment of these arrays makes the code better, and each case that Triton
# tells apart (1, a multiple of 16, aligned) is seconds of compiling at the next batch size.
SIZES = (
    *("P", "row_p", "column_p", "num_rows", "num_candidates", "num_columns", "pass_rows", "first_row", "first_column", "items"),
    *("num_queries", "tiles_per_split", "splits", "size", "bits", "count_bits", "pairs"),
)
PER_QUERY = (
    *("start", "stop", "self_index", "first_partner", "last_partner", "num_relevant"),
    *(f"{role}_{name}" for role in ("row", "column") for name in ("t", "w", "extra", "reached", "counts", "slopes")),
)

# Most dimensions whose products are summed by a tensor core, and what share of a score is cut off for each of them in the mean:
# on an H200 1.8e-7 with 64 dimensions, 2.8e-7 with 128 and 7.3e-7 from 256 on.
FLUSH = tl.constexpr(256)
CUT_OFF = 2.0**-23 * 3 / 128


@triton.jit
def score_tile(
    queries, candidates, row_bias, column_bias, alpha, o_m, o_n,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scores of a tile. A row of the operands is D numbers, or D high and D low parts if SPLIT."""
    b_alpha = tl.load(alpha)
    b_bias = tl.load(row_bias + o_m)[:, None]
    o_k = tl.arange(0, BK)
    if SPLIT:
        p_q = queries + o_m.to(tl.int64)[:, None] * (2 * D) + o_k[None, :]
        p_c = candidates + o_n.to(tl.int64)[None, :] * (2 * D) + o_k[:, None]
        b_s = tl.zeros([BM, BN], tl.float32)
        b_part = tl.zeros([BM, BN], tl.float32)
        for k in range(0, 3 * D, BK):
            k_q, k_c = split_step(k, D)
            b_part = tl.dot(tl.load(p_q + k_q), tl.load(p_c + k_c), b_part)
            if ends_sum(k + BK, D):
                b_s += b_part
                b_part = tl.zeros([BM, BN], tl.float32)
    else:
        p_q = queries + o_m.to(tl.int64)[:, None] * D + o_k[None, :]
        p_c = candidates + o_n.to(tl.int64)[None, :] * D + o_k[:, None]
        b_s = tl.zeros([BM, BN], tl.float32)
        for _ in range(0, D, BK):
            b_s = tl.dot(tl.load(p_q), tl.load(p_c), b_s)
            p_q += BK
            p_c += BK
        b_bias += tl.load(column_bias + o_n)[None, :]
    # what is not centred has no bias: it is 0 and keeps the product from being fused with what is subtracted next, which would
    # leave the product unrounded there: equal scores have to be equal to the last bit. Besides, a threshold less a bare product
    # was compiled to nothing at all (Triton 3.6, ptxas 12.8).
    return b_s * b_alpha + b_bias


@triton.jit
def described_score_tile(
    queries, candidates, row_bias, column_bias, alpha, m_first, n_first,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`score_tile`, to the last bit, of rows from m_first and n_first on that tensor descriptors bring.

    Without addresses in registers there is space for a larger tile, or for one program more.
    """
    b_bias = tl.load(row_bias + m_first + tl.arange(0, BM))[:, None]
    b_s = tl.zeros([BM, BN], tl.float32)
    if SPLIT:
        b_part = tl.zeros([BM, BN], tl.float32)
        for k in range(0, 3 * D, BK):
            k_q, k_c = split_step(k, D)
            b_part = tl.dot(queries.load([m_first, k_q]), candidates.load([n_first, k_c]).T, b_part)
            if ends_sum(k + BK, D):
                b_s += b_part
                b_part = tl.zeros([BM, BN], tl.float32)
    else:
        for k in range(0, D, BK):
            b_s = tl.dot(queries.load([m_first, k]), candidates.load([n_first, k]).T, b_s)
        b_bias += tl.load(column_bias + n_first + tl.arange(0, BN))[None, :]
    return b_s * tl.load(alpha) + b_bias


@triton.jit
def stripe(i, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of the i-th tile: GROUP row tiles at a time, so that the candidates of a wave are read from the cache."""
    number = i // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - number * GROUP, GROUP)
    inside = i % (GROUP * column_tiles)
    return number * GROUP + inside % height, inside // height


@triton.jit
def part_of(b_x, WHICH: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """One of 1, 2 or 4 parts of a tile's columns: numbers of all columns at once would not fit into the registers."""
    if PARTS == 1:
        b_part = b_x
    else:
        b_left, b_right = _halves(b_x, BM, BN)
        b_half = b_left if WHICH < PARTS // 2 else b_right
        if PARTS == 2:
            b_part = b_half
        else:
            b_left, b_right = _halves(b_half, BM, BN // 2)
            b_part = b_left if WHICH % 2 == 0 else b_right
    return b_part


@triton.jit
def _halves(b_x, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(b_x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def split_step(k, D: tl.constexpr):
    """Where in a row of high and low parts step k of three products begins, of queries and of candidates.

    Low parts of queries with high ones of candidates, the other way round, then the high parts of both: small products first.
    """
    return tl.where(k < D, k + D, tl.where(k < 2 * D, k - D, k - 2 * D)), tl.where(k < 2 * D, k, k - 2 * D)


@triton.jit
def ends_sum(k, D: tl.constexpr):
    """Whether a sum ends before step k of three products, and a new one begins.

    Tensor cores cut off what they add to a sum, so sums of FLUSH dimensions are added up outside. Either product of a high and
    a low part is summed alone: a score is the same to the last bit if its query and its candidate change places.
    """
    k = tl.cast(k, tl.int32)
    return (k % D == 0) | ((k > 2 * D) & ((k - 2 * D) % FLUSH == 0))


@triton.jit
def visible_tile(
    queries, candidates, row_bias, column_bias, alpha, start, stop, self_index, columns, m_first, n_first,
    num_queries, num_candidates,
    LISTED: tl.constexpr, RANK_SELF: tl.constexpr, DESCRIBED: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scores of queries from m_first and candidates from n_first on, -inf where a pair is hidden or past the end."""
    b_s = made_tile(
        queries, candidates, row_bias, column_bias, alpha, m_first, n_first, DESCRIBED, SPLIT, D, BM, BN, BK
    )  # fmt: skip
    first, last = hidden_range(start, stop, self_index, m_first, num_queries, LISTED, BM)
    return hide_tile(
        b_s, start, stop, self_index, columns, first, last, m_first, n_first, num_queries, num_candidates,
        LISTED, RANK_SELF, BM, BN,
    )  # fmt: skip


@triton.jit
def made_tile(
    queries, candidates, row_bias, column_bias, alpha, m_first, n_first,
    DESCRIBED: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scores of queries from m_first and candidates from n_first on. DESCRIBED: both are tensor descriptors."""
    if DESCRIBED:
        b_s = described_score_tile(
            queries, candidates, row_bias, column_bias, alpha, m_first, n_first, SPLIT, D, BM, BN, BK
        )  # fmt: skip
    else:
        o_m = m_first + tl.arange(0, BM)
        o_n = n_first + tl.arange(0, BN)
        b_s = score_tile(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
    return b_s


@triton.jit
def hidden_range(start, stop, self_index, m_first, num_queries, LISTED: tl.constexpr, BM: tl.constexpr):
    """`hidden_columns` of queries from m_first on; where relevant candidates are LISTED they may be anywhere."""
    first = 0
    last = 2147483647
    if LISTED == 0:
        o_m = m_first + tl.arange(0, BM)
        m_m = o_m < num_queries
        b_start = tl.load(start + o_m, mask=m_m, other=0)
        b_stop = tl.load(stop + o_m, mask=m_m, other=0)
        first, last = hidden_columns(b_start, b_stop, tl.load(self_index + o_m, mask=m_m, other=-1))
    return first, last


@triton.jit
def hide_tile(
    b_s, start, stop, self_index, columns, first, last, m_first, n_first, num_queries, num_candidates,
    LISTED: tl.constexpr, RANK_SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """-inf where a pair of a tile is hidden or past the end; first and last come from `hidden_range`."""
    o_m = m_first + tl.arange(0, BM)
    o_n = n_first + tl.arange(0, BN)
    m_m = o_m < num_queries
    if ((n_first < last) & (n_first + BN > first)) | (n_first + BN > num_candidates):
        b_start = tl.load(start + o_m, mask=m_m, other=0)
        b_stop = tl.load(stop + o_m, mask=m_m, other=0)
        b_self = tl.load(self_index + o_m, mask=m_m, other=-1)
        if LISTED:
            b_s = hide_listed(b_s, columns, b_start, b_stop, b_self, n_first, o_n, num_candidates, RANK_SELF, BN)
        else:
            b_s = hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF)
    if m_first + BM > num_queries:  # columns are queries too and must not count a row past the end
        b_s = tl.where(m_m[:, None], b_s, float("-inf"))
    return b_s


@triton.jit
def hide(b_s, b_start, b_stop, b_self, o_n, num_candidates, RANK_SELF: tl.constexpr):
    """-inf where a column is relevant to the row, the query itself, or past the end."""
    b_n = o_n[None, :]
    # one after the other, so that few comparisons are alive
    if RANK_SELF:
        b_s = tl.where((b_n >= b_start[:, None]) & (b_n < b_stop[:, None]) & (b_n != b_self[:, None]), float("-inf"), b_s)
    else:
        b_s = tl.where((b_n >= b_start[:, None]) & (b_n < b_stop[:, None]), float("-inf"), b_s)
        b_s = tl.where(b_n == b_self[:, None], float("-inf"), b_s)
    return tl.where(b_n >= num_candidates, float("-inf"), b_s)


@triton.jit
def hide_listed(b_s, columns, b_start, b_stop, b_self, n_first, o_n, num_candidates, RANK_SELF: tl.constexpr, BN: tl.constexpr):
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
def hidden_columns(b_start, b_stop, b_self):
    """First and one past the last column that `hide` may touch for these rows."""
    b_any = b_stop > b_start
    big = 2147483647
    first = tl.minimum(tl.min(tl.where(b_any, b_start, big), 0), tl.min(tl.where(b_self >= 0, b_self, big), 0))
    last = tl.maximum(tl.max(tl.where(b_any, b_stop, 0), 0), tl.max(b_self + 1, 0))
    return first, last
