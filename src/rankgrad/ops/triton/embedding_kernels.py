"""Triton kernels of the embedding door. Same contract as the tiled path, float32 inside.

    relevant_kernel   scores of relevant pairs, by the same arithmetic as every other tile
    count_kernel      a program owns BM queries and walks over candidates: how much lies ahead of each comparison
    pull_kernel       one tile of the gradient of scores, written in float16 for the library's matrix products
    gather_kernel     what the relevant pairs give back, added to the products' result in the caller's row order

Queries and candidates are in class order, in two operands of equal width D, rows padded to whole tiles with zeros. A
score is acc * alpha + row_bias + column_bias. Comparisons are kept comparison-major, [P, rows], so that a load over
queries is contiguous. Every sum has one owner or is an integer, so the same input gives the same bits.

Letters:  BM queries, BN candidates of a tile   P comparisons   i_ program index, o_ offsets, b_ a block in registers
"""

import triton
import triton.language as tl

SIGMOID = tl.constexpr(0)
STEP = tl.constexpr(1)
RAMP = tl.constexpr(2)


@triton.jit
def _reciprocal(b_x, ASM: tl.constexpr):
    if ASM:  # one instruction, where a division takes six; relative error 2**-23
        b_y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        b_y = 1.0 / b_x
    return b_y


@triton.jit
def _power(b_x):
    """2 ** x without overflow: beyond these ends a sigmoid is 0 or 1 in float32 whatever its comparison."""
    return tl.exp2(tl.minimum(tl.maximum(b_x, -126.0), 126.0))


@triton.jit
def _centre(b_low, b_high):
    """The middle of a row's comparisons, or +inf for all rows if the comparisons of one are too far apart to be factored.

    A sigmoid of s - t, in units where the base is 2, needs 2 ** (s - t) = 2 ** (s - centre) * 2 ** (centre - t), one power per
    score instead of one per comparison. That is exact while |centre - t| <= 100: where either power is cut off the sigmoid is
    0 or 1 in float32.
    """
    m_any = b_high >= b_low  # a row may have none
    b_low = tl.where(m_any, b_low, 0.0)
    b_high = tl.where(m_any, b_high, 0.0)
    return tl.where(tl.max(b_high - b_low, 0) > 200.0, float("inf"), 0.5 * (b_low + b_high))


@triton.jit
def _sigmoid(b_x, b_centre, b_t, FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr):
    """A sigmoid and its complement; b_x is the power of a score less the centre if FACTORED, else the score.

    PRECISE keeps the relative error of small sigmoids, which are all there is once classes are well apart.
    """
    b_power = b_x * tl.exp2(b_centre - b_t) if FACTORED else _power(b_x - b_t)
    if PRECISE:
        b_power = tl.minimum(b_power, 1.0e30)
    b_behind = _reciprocal(1.0 + b_power, ASM)
    return b_power * b_behind if PRECISE else 1.0 - b_behind, b_behind


@triton.jit
def _scores(
    queries, candidates, row_bias, column_bias, alpha, o_m, o_n,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tensor cores cut off what they add to a sum, so the large products of a split are summed outside, 128 at a time."""
    o_k = tl.arange(0, BK)
    p_q = queries + o_m.to(tl.int64)[:, None] * D + o_k[None, :]
    p_c = candidates + o_n.to(tl.int64)[None, :] * D + o_k[:, None]
    b_alpha = tl.load(alpha)
    b_s = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, 2 * D // 3 if SPLIT else D, BK):
        b_s = tl.dot(tl.load(p_q), tl.load(p_c), b_s)
        p_q += BK
        p_c += BK
    b_s *= b_alpha
    if SPLIT:
        for _ in range(2 * D // 3, D, BK):
            b_s += tl.dot(tl.load(p_q), tl.load(p_c)) * b_alpha
            p_q += BK
            p_c += BK
    return b_s + (tl.load(row_bias + o_m)[:, None] + tl.load(column_bias + o_n)[None, :])


@triton.jit
def _hide(b_s, b_start, b_stop, b_own, o_n, num_candidates, KEEP_OWN: tl.constexpr):
    """-inf where a column is relevant to the row, the row's own, or past the end."""
    b_hidden = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] < b_stop[:, None])
    b_is_own = o_n[None, :] == b_own[:, None]
    b_hidden = b_hidden & (b_is_own == 0) if KEEP_OWN else b_hidden | b_is_own
    return tl.where(b_hidden | (o_n[None, :] >= num_candidates), float("-inf"), b_s)


@triton.jit
def _band(b_start, b_stop, b_own):
    """First and one past the last column that `_hide` may touch for these rows."""
    b_any = b_stop > b_start
    big = 2147483647
    first = tl.minimum(tl.min(tl.where(b_any, b_start, big), 0), tl.min(tl.where(b_own >= 0, b_own, big), 0))
    last = tl.maximum(tl.max(tl.where(b_any, b_stop, 0), 0), tl.max(b_own + 1, 0))
    return first, last


@triton.jit
def relevant_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, own, num_relevant, out,
    first_row, num_rows, P,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[p, r]: the score of query r with its p-th relevant candidate, by the same arithmetic as every other tile."""
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    o_m = first_row + o_r
    m_m = o_r < num_rows
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_own = tl.load(own + o_m, mask=m_m, other=-1)
    b_count = tl.load(num_relevant + o_m, mask=m_m, other=0)
    b_own_inside = (b_own >= b_start) & (b_own < b_stop)
    big = 2147483647
    first = tl.min(tl.where(b_count > 0, b_start, big), 0)
    last = tl.max(tl.where(b_count > 0, b_stop, 0), 0)
    for i_n in range(first // BN, tl.cdiv(last, BN)):
        o_n = i_n * BN + tl.arange(0, BN)
        b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        for p in range(P):
            b_column = b_start + p
            b_column += (b_own_inside & (b_column >= b_own)).to(tl.int32)
            b_here = m_m & (p < b_count) & (b_column >= i_n * BN) & (b_column < (i_n + 1) * BN)
            b_t = tl.sum(tl.where(o_n[None, :] == b_column[:, None], b_s, 0.0), 1)
            tl.store(out + tl.cast(p, tl.int64) * num_rows + o_r, b_t, mask=b_here)


@triton.jit
def count_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, own, num_relevant, comparisons, counts, slopes, centres,
    first_row, num_rows, num_candidates, P, panels_per_split,
    MODE: tl.constexpr, KEEP_OWN: tl.constexpr, ASM: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """counts[split, p, r], and slopes for SIGMOID: the candidates of a split ahead of the p-th comparison of query r."""
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    i_split = tl.program_id(1)
    o_m = first_row + o_r
    m_m = o_r < num_rows
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_own = tl.load(own + o_m, mask=m_m, other=-1)
    first, last = _band(b_start, b_stop, b_own)
    p_out = i_split.to(tl.int64) * P * num_rows + o_r
    if MODE != RAMP:  # from here on only the comparisons that a row of this tile has
        P = tl.max(tl.load(num_relevant + o_m, mask=m_m, other=0), 0)
    b_centre = tl.zeros([BM], tl.float32)
    if MODE == SIGMOID:
        b_low = tl.full([BM], float("inf"), tl.float32)
        b_high = tl.full([BM], float("-inf"), tl.float32)
        for p in range(P):
            b_t = tl.load(comparisons + tl.cast(p, tl.int64) * num_rows + o_r, mask=m_m, other=float("inf"))
            b_low = tl.minimum(b_low, b_t)
            b_high = tl.maximum(b_high, tl.where(b_t < float("inf"), b_t, float("-inf")))
        b_centre = _centre(b_low, b_high)
        tl.store(centres + o_r, b_centre, mask=m_m)
    i_stop = tl.minimum((i_split + 1) * panels_per_split, tl.cdiv(num_candidates, BN))
    for i_n in range(i_split * panels_per_split, i_stop):
        o_n = i_n * BN + tl.arange(0, BN)
        b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
        if ((i_n * BN < last) & ((i_n + 1) * BN > first)) | ((i_n + 1) * BN > num_candidates):
            b_s = _hide(b_s, b_start, b_stop, b_own, o_n, num_candidates, KEEP_OWN)
        if MODE == SIGMOID:
            p_t = comparisons + o_r
            p_c = counts + p_out
            p_a = slopes + p_out
            # two loops and not one with a branch: either the score or its power is alive, and registers are scarce
            if tl.max(b_centre, 0) < float("inf"):
                b_e = _power(b_s - b_centre[:, None])
                _count_sigmoid(b_e, b_centre, p_t, p_c, p_a, m_m, num_rows, P, True, SPLIT, ASM)
            else:
                _count_sigmoid(b_s, b_centre, p_t, p_c, p_a, m_m, num_rows, P, False, SPLIT, ASM)
        else:
            for p in range(P):
                p_p = tl.cast(p, tl.int64) * num_rows
                b_old = tl.load(counts + p_out + p_p, mask=m_m, other=0)
                if MODE == STEP:
                    b_t = tl.load(comparisons + o_r + p_p, mask=m_m, other=float("inf"))
                    b_c = tl.sum((b_s >= b_t[:, None]).to(tl.int32), 1)
                else:  # edges are one apart, from the one that `comparisons` points to downwards
                    b_c = tl.sum(tl.minimum(tl.maximum(b_s - (tl.load(comparisons) - p), 0.0), 1.0), 1)
                tl.store(counts + p_out + p_p, b_old + b_c, mask=m_m)


@triton.jit
def _count_sigmoid(
    b_x, b_centre, p_t, p_c, p_a, m_m, stride, P, FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Adds a tile's sum of sigmoids and of their slopes to what the program has of its rows."""
    b_next = tl.load(p_t, mask=m_m, other=float("inf"))
    for p in range(P):
        b_t = b_next
        p_t += stride * tl.minimum(P - 1 - p, 1)  # what comes next is on its way while this is used
        b_next = tl.load(p_t, mask=m_m, other=float("inf"))
        b_count = tl.load(p_c, mask=m_m, other=0.0)
        b_slope = tl.load(p_a, mask=m_m, other=0.0)
        b_ahead, b_behind = _sigmoid(b_x, b_centre[:, None], b_t[:, None], FACTORED, PRECISE, ASM)
        tl.store(p_c, b_count + tl.sum(b_ahead, 1), mask=m_m)
        tl.store(p_a, b_slope + tl.sum(b_ahead * b_behind, 1), mask=m_m)
        p_c += stride
        p_a += stride


@triton.jit
def _pull(
    b_g, b_s, b_extra, p_t, p_w, p_reached, m_v, m_reached, stride, P,
    AXIS: tl.constexpr, MODE: tl.constexpr, FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds to a gradient tile what the comparisons of its rows (AXIS 1) or of its columns (AXIS 0) bring.

    `b_extra` is the centre of the comparisons (SIGMOID) or the scale of the gradient (STEP).
    """
    NOTHING: tl.constexpr = float("inf") if MODE == STEP else 0.0
    b_x = b_s
    b_extra = tl.expand_dims(b_extra, AXIS)
    if FACTORED:
        b_x = _power(b_s - b_extra)
    b_next_t = tl.load(p_t, mask=m_v, other=float("inf"))
    b_next_w = tl.load(p_w, mask=m_v, other=NOTHING)
    for p in range(P):
        b_t = tl.expand_dims(b_next_t, AXIS)
        b_w = tl.expand_dims(b_next_w, AXIS)
        step = stride * tl.minimum(P - 1 - p, 1)  # what comes next is on its way while this is used
        p_w += step
        b_next_w = tl.load(p_w, mask=m_v, other=NOTHING)
        if MODE != RAMP:
            p_t += step
            b_next_t = tl.load(p_t, mask=m_v, other=float("inf"))
        if MODE == SIGMOID:
            b_ahead, b_behind = _sigmoid(b_x, b_extra, b_t, FACTORED, PRECISE, ASM)
            b_g += b_w * (b_ahead * b_behind)
        elif MODE == STEP:  # w is the perturbed threshold
            b_now = b_w > b_s
            b_g += (b_now.to(tl.float32) - (b_t > b_s).to(tl.float32)) * b_extra
            tl.atomic_add(p_reached, tl.sum(tl.where(b_now, 0, 1), AXIS), mask=m_reached, sem="relaxed")
            p_reached += stride
        else:  # w is the step of the table at this edge, edges are one apart
            b_g += tl.where(b_s > b_t - p, b_w, 0.0)
    return b_g


@triton.jit
def pull_kernel(
    queries, candidates, row_bias, column_bias, alpha, start, stop, own, num_relevant,
    row_t, row_w, row_extra, row_reached, column_t, column_w, column_extra, column_reached, high, low,
    first_row, num_rows, chunk_row, chunk_rows, first_column, num_columns, from_column, last_written,
    num_candidates, row_width, row_p, column_p,
    MODE: tl.constexpr, MIRRORED: tl.constexpr, KEEP_OWN: tl.constexpr, ASM: tl.constexpr,
    SPLIT: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows chunk_row.. of the group of queries that begins at first_row, columns of the group that begins at first_column.

    `extra` is the centre of a row's comparisons (SIGMOID) or the scale of a row's gradient (STEP).
    """
    # a stripe of GROUP row tiles at a time, so that the candidates of a wave are read from the cache
    i = tl.program_id(0)
    row_tiles = tl.cdiv(chunk_rows, BM)
    column_tiles = tl.cdiv(last_written - from_column, BN)
    stripe = i // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - stripe * GROUP, GROUP)
    in_stripe = i % (GROUP * column_tiles)
    o_l = (stripe * GROUP + in_stripe % height) * BM + tl.arange(0, BM)  # within the chunk
    n_first = from_column + (in_stripe // height) * BN
    o_r = chunk_row - first_row + o_l  # within the group
    o_m = chunk_row + o_l
    m_m = (o_l < chunk_rows) & (o_r < num_rows)
    o_n = n_first + tl.arange(0, BN)
    o_c = o_n - first_column  # within the group of columns
    m_n = o_c < num_columns
    b_start = tl.load(start + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + o_m, mask=m_m, other=0)
    b_own = tl.load(own + o_m, mask=m_m, other=-1)
    first, last = _band(b_start, b_stop, b_own)
    b_s = _scores(queries, candidates, row_bias, column_bias, alpha, o_m, o_n, SPLIT, D, BM, BN, BK)
    if ((n_first < last) & (n_first + BN > first)) | (n_first + BN > num_candidates):
        b_s = _hide(b_s, b_start, b_stop, b_own, o_n, num_candidates, KEEP_OWN)
    b_g = tl.zeros([BM, BN], tl.float32)
    b_extra = tl.zeros([BM], tl.float32)
    if MODE != RAMP:
        b_extra = tl.load(row_extra + o_r, mask=m_m, other=0.0)
        row_p = tl.max(tl.load(num_relevant + o_m, mask=m_m, other=0), 0)  # no more than a row of this tile has
    p_t = row_t + o_r
    p_w = row_w + o_r
    p_c = row_reached + o_r
    if MODE == SIGMOID:
        # two calls and not one with a branch inside: either the score or its power is alive in the loop
        if tl.max(b_extra, 0) < float("inf"):
            b_g = _pull(b_g, b_s, b_extra, p_t, p_w, p_c, m_m, m_m, num_rows, row_p, 1, MODE, True, SPLIT, ASM)
        else:
            b_g = _pull(b_g, b_s, b_extra, p_t, p_w, p_c, m_m, m_m, num_rows, row_p, 1, MODE, False, SPLIT, ASM)
    else:
        b_g = _pull(b_g, b_s, b_extra, p_t, p_w, p_c, m_m, m_m, num_rows, row_p, 1, MODE, False, SPLIT, ASM)
    if MIRRORED:
        # a row past the end must not be counted by the columns
        b_s = tl.where(m_m[:, None], b_s, float("-inf"))
        # tiles of the chunk's own square are visited from both sides, and the rows have counted there
        m_new = m_n & (o_n >= chunk_row + chunk_rows)
        b_en = tl.zeros([BN], tl.float32)
        if MODE != RAMP:
            b_en = tl.load(column_extra + o_c, mask=m_n, other=0.0)
            column_p = tl.max(tl.load(num_relevant + o_n, mask=m_n, other=0), 0)
        p_tn = column_t + o_c
        p_wn = column_w + o_c
        p_cn = column_reached + o_c
        if MODE == SIGMOID:
            if tl.max(b_en, 0) < float("inf"):
                b_g = _pull(b_g, b_s, b_en, p_tn, p_wn, p_cn, m_n, m_new, num_columns, column_p, 0, MODE, True, SPLIT, ASM)
            else:
                b_g = _pull(b_g, b_s, b_en, p_tn, p_wn, p_cn, m_n, m_new, num_columns, column_p, 0, MODE, False, SPLIT, ASM)
        else:
            b_g = _pull(b_g, b_s, b_en, p_tn, p_wn, p_cn, m_n, m_new, num_columns, column_p, 0, MODE, False, SPLIT, ASM)
    p_g = o_l.to(tl.int64)[:, None] * row_width + (o_n - chunk_row if MIRRORED else o_n)[None, :]
    # columns past the end are 0 and are written as far as the products read
    m_g = (o_l < chunk_rows)[:, None] & (o_n < last_written)[None, :]
    b_high = b_g.to(tl.float16)
    tl.store(high + p_g, b_high, mask=m_g)
    if SPLIT:
        tl.store(low + p_g, ((b_g - b_high.to(tl.float32)) * 2048.0).to(tl.float16), mask=m_g)


@triton.jit
def gather_kernel(
    partners, partner_order, d_relevant, offset, start, own, first_partner, last_partner, product, product_scale, order, out, d,
    ROLE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[order[i]] = product[i] * scale + sum over the partners j of i in relevant pairs of dL/ds_ij * partner[j].

    ROLE 0: i is a query and its partners are candidates. ROLE 1: i is a candidate, its partners are queries. ROLE 2: both.
    """
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < d
    b_sum = tl.load(product + i * d + o_d, mask=m_d, other=0.0) * tl.load(product_scale)
    first = tl.load(first_partner + i)
    if ROLE != 1:
        offset_i = tl.load(offset + i)
        own_i = tl.load(own + i)
    for j in range(first, tl.load(last_partner + i)):
        weight = 0.0
        if ROLE != 1:  # place of j among the relevant of i: its place in the class, less i itself if that comes before
            place = j - first - ((own_i >= first) & (own_i < j)).to(tl.int32)
            weight += tl.load(d_relevant + offset_i + place, mask=j != own_i, other=0.0)
        if ROLE != 0:
            start_j = tl.load(start + j)
            own_j = tl.load(own + j)
            place = i - start_j - ((own_j >= start_j) & (own_j < i)).to(tl.int32)
            weight += tl.load(d_relevant + tl.load(offset + j) + place, mask=own_j != i, other=0.0)
        row = tl.load(partner_order + j)
        b_sum += weight * tl.load(partners + row * d + o_d, mask=m_d, other=0.0)
    tl.store(out + tl.load(order + i) * d + o_d, b_sum, mask=m_d)


@triton.jit
def operand_kernel(
    base, order, mean, scale, as_query, as_candidate, plain, row_bias, column_bias, d,
    SPLIT: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One row of the operands, in class order and scaled; DP is d padded with zeros to a multiple of the product's step.

    SPLIT: x = high + low in two float16; a query is (low, high, high), a candidate (high, low, high), so that one product
    of width 3 DP sums the three terms that matter, small ones first. Otherwise: x less the mean in float16 for both, the
    mean's share in the scores as biases, and x itself for the products of the backward pass.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(order + i)
    b_scale = tl.load(scale)
    to_mean = 0.0
    mean_square = 0.0
    for k in range(0, DP, BD):
        o_d = k + tl.arange(0, BD)
        m_d = o_d < d
        b_x = tl.load(base + row * d + o_d, mask=m_d, other=0.0)
        m_o = o_d < DP
        if SPLIT:
            b_high = (b_x * b_scale).to(tl.float16)
            b_low = (b_x * b_scale - b_high.to(tl.float32)).to(tl.float16)
            p_o = i * (3 * DP) + o_d
            tl.store(as_query + p_o, b_low, mask=m_o)
            tl.store(as_query + p_o + DP, b_high, mask=m_o)
            tl.store(as_query + p_o + 2 * DP, b_high, mask=m_o)
            tl.store(as_candidate + p_o, b_high, mask=m_o)
            tl.store(as_candidate + p_o + DP, b_low, mask=m_o)
            tl.store(as_candidate + p_o + 2 * DP, b_high, mask=m_o)
        else:
            b_mean = tl.load(mean + o_d, mask=m_d, other=0.0)
            to_mean += tl.sum(b_x * b_mean, 0)
            mean_square += tl.sum(b_mean * b_mean, 0)
            tl.store(as_query + i * DP + o_d, ((b_x - b_mean) * b_scale).to(tl.float16), mask=m_o)
            tl.store(plain + i * DP + o_d, (b_x * b_scale).to(tl.float16), mask=m_o)
    tl.store(row_bias + i, to_mean)
    tl.store(column_bias + i, to_mean - mean_square)
