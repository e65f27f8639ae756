"""What the embedding kernels compute for a ranker, by its MODE.

The kernels of `embedding_kernels` and `stored_kernels` walk over tiles and call device functions, which alone know the rankers:

    begin_rows      thresholds that the rows of a tile have, and what is computed once for them
    count_tile      a tile's part of the counts
    count_list      the counts of stored scores
    tally_tile      the same where thresholds are searched
    backward_tile   a tile's part of the gradient

The positives of a query are compared with each other in `positive_kernels`. Thresholds are kept threshold-major, [P, rows], so
that a load over queries is contiguous. A query may have more positives than there is room for: a captured call finds out only
when it has run, and its result is dropped then. So what is read and written is limited by P, not by the number of positives.

Letters:  P thresholds of a query   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton
import triton.language as tl

from rankgrad.ops.triton.device_functions import reciprocal
from rankgrad.ops.triton.grid_kernels import look_up
from rankgrad.ops.triton.score_kernels import position_of

SIGMOID = tl.constexpr(0)
STEP = tl.constexpr(1)
RAMP = tl.constexpr(2)
BOUND = tl.constexpr(3)
# in place of SIGMOID and STEP where a query has many thresholds
GRID = tl.constexpr(4)
SEARCH = tl.constexpr(5)

# Buckets of a query whose thresholds are searched: of each threshold, and at most.
BUCKETS_EACH = tl.constexpr(8)
MOST_BUCKETS = tl.constexpr(1024)


def num_buckets(num_thresholds: int) -> int:
    """Buckets of a query with so many thresholds."""
    return min(int(BUCKETS_EACH.value) * num_thresholds, int(MOST_BUCKETS.value))


# How far apart thresholds of a query may be, in units where the base is 2, to share a centre. A sigmoid of s - t needs
# 2 ** (s - t) = 2 ** (s - centre) * 2 ** (centre - t), one power per score instead of one per threshold. That is exact while
# |centre - t| <= 100: where either power is cut off the sigmoid is 0 or 1 in float32.
SHARED = tl.constexpr(200.0)


@triton.jit
def _power(b_x):
    """2 ** x without overflow: beyond these ends a sigmoid is 0 or 1 in float32 whatever its threshold."""
    return tl.exp2(tl.minimum(tl.maximum(b_x, -126.0), 126.0))


# One reciprocal for three thresholds, 1 / a = b c * 1 / (a b c), halves the work of the unit that computes powers and
# reciprocals, and was no faster: RS@k of 65,536 items took 68.8 ms and not 67.0 in "high", 38.9 and not 38.1 in "fast", on an
# H200. Tiles and SHARED were others then, too, so that this says little about what bounds these kernels.
@triton.jit
def _sigmoid(b_x, b_centre, b_t, FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr):
    """A sigmoid and its complement; b_x is the power of a score less the centre if FACTORED, else the score.

    PRECISE keeps the relative error of small sigmoids, which are all there is once classes are well apart.
    """
    b_power = b_x * tl.exp2(b_centre - b_t) if FACTORED else _power(b_x - b_t)
    if PRECISE:
        b_power = tl.minimum(b_power, 1.0e30)
    b_behind = reciprocal(1.0 + b_power, ASM)
    return b_power * b_behind if PRECISE else 1.0 - b_behind, b_behind


@triton.jit
def _soft_step(
    b_x, b_centre, b_t, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What stands for the step of a score less a threshold, and its slope by that over tau (SIGMOID, BOUND)."""
    b_ahead, b_behind = _sigmoid(b_x, b_centre, b_t, FACTORED, PRECISE, ASM)
    b_slope = b_ahead * b_behind
    if MODE == BOUND:
        b_d = b_x - b_t
        b_ahead += tl.where(b_d > 0.0, 0.5, 0.0)
        b_ahead = tl.where(b_d > DELTA, (b_d - DELTA) * (SLOPE * 0.6931471805599453) + OFFSET, b_ahead)
        b_slope = tl.where(b_d > DELTA, SLOPE, b_slope)
    return b_ahead, b_slope


@triton.jit
def begin_rows(thresholds, num_relevant, centres, o_m, o_r, m_m, num_rows, P, MODE: tl.constexpr, BM: tl.constexpr):
    """How many thresholds the rows of a tile have at most; the lowest of each row and its centre (SIGMOID).

    Also the parts of length SHARED that hold the thresholds of any row. Centres are stored, +inf if that is more than one.
    """
    if MODE != RAMP:  # only the thresholds that a row of this tile has
        P = tl.minimum(tl.max(tl.load(num_relevant + o_m, mask=m_m, other=0), 0), P)
    b_low = tl.zeros([BM], tl.float32)
    b_middle = b_low
    parts = 1
    if MODE == SIGMOID:
        b_low += float("inf")
        b_high = tl.full([BM], float("-inf"), tl.float32)
        for p in range(P):
            b_t = tl.load(thresholds + tl.cast(p, tl.int64) * num_rows + o_r, mask=m_m, other=float("inf"))
            b_low = tl.minimum(b_low, b_t)
            b_high = tl.maximum(b_high, tl.where(b_t < float("inf"), b_t, float("-inf")))
        m_any = b_high >= b_low  # a row may have none
        b_low = tl.where(m_any, b_low, 0.0)
        b_high = tl.where(m_any, b_high, 0.0)
        b_middle = 0.5 * (b_low + b_high)
        spread = tl.max(b_high - b_low, 0)
        parts = tl.where(spread > SHARED, tl.where(spread > 2 * SHARED, 3, 2), 1)  # more than two are not told apart
        tl.store(centres + o_r, tl.where(parts > 1, float("inf"), b_middle), mask=m_m)
    return P, b_low, b_middle, parts


@triton.jit
def count_tile(
    b_s, b_low, b_middle, i_pass, parts, thresholds, counts, slopes, o_r, p_out, m_m, num_rows, P,
    MODE: tl.constexpr, NEAR: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds what of a tile is ahead of each threshold to the counts, and the slopes to theirs (SIGMOID, BOUND).

    NEAR: of the thresholds in part i_pass.
    """
    if (MODE == SIGMOID) or (MODE == BOUND):  # noqa: SIM109  # Triton has no `in`
        p_t = thresholds + o_r
        p_c = counts + p_out
        p_a = slopes + p_out
        # in parts as long as each other, so that centres are near
        b_length = (b_middle - b_low) * (2.0 / parts)
        b_from = b_low + b_length * i_pass
        b_until = tl.full(b_low.shape, float("inf"), tl.float32)
        # two loops and not one with a branch: either the score or its power is alive, and registers are scarce
        if NEAR:
            b_until = tl.where(i_pass < parts - 1, b_low + b_length * (i_pass + 1), b_until)
            b_centre = b_middle + b_length * (i_pass - (parts - 1) * 0.5)
            b_e = _power(b_s - b_centre[:, None])
            _count_soft(
                b_e, b_centre, p_t, p_c, p_a, m_m, b_from, b_until, num_rows, P, MODE, DELTA, SLOPE, OFFSET, True, PRECISE, ASM
            )
        elif MODE == BOUND:  # the line beyond delta needs the score, so that a power in place of it would save nothing
            _count_soft(
                b_s, b_middle, p_t, p_c, p_a, m_m, b_from, b_until, num_rows, P, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM
            )
        elif parts == 1:
            b_e = _power(b_s - b_middle[:, None])
            _count_soft(
                b_e, b_middle, p_t, p_c, p_a, m_m, b_from, b_until, num_rows, P, MODE, DELTA, SLOPE, OFFSET, True, PRECISE, ASM
            )
        else:
            _count_soft(
                b_s, b_middle, p_t, p_c, p_a, m_m, b_from, b_until, num_rows, P, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM
            )
    else:
        for p in range(P):
            p_p = tl.cast(p, tl.int64) * num_rows
            b_old = tl.load(counts + p_out + p_p, mask=m_m, other=0)
            if MODE == STEP:
                b_t = tl.load(thresholds + o_r + p_p, mask=m_m, other=float("inf"))
                b_c = tl.sum((b_s >= b_t[:, None]).to(tl.int32), 1)
            else:  # edges are one apart, from the one that `thresholds` points to downwards
                b_c = tl.sum(tl.minimum(tl.maximum(b_s - (tl.load(thresholds) - p), 0.0), 1.0), 1)
            tl.store(counts + p_out + p_p, b_old + b_c, mask=m_m)


@triton.jit
def count_list(
    p_s, other_stride, first, last, num_others, b_centre, thresholds, counts, slopes, o_r, p_out, m_m, num_rows, p, P,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds what of the lists at p_s is ahead of thresholds p to p + HELD, at most 3, to the counts, and the slopes to theirs.

    Thresholds are of positives, not edges of bins (RAMP). Of the lists, what stands from `first` to `last`, in steps of BN.
    Every thread has sums of its own until the end of the lists, so that nothing crosses threads on the way.
    """
    DTYPE: tl.constexpr = tl.int32 if MODE == STEP else tl.float32
    b_t0 = _threshold(thresholds, o_r, m_m, num_rows, p, P, BM)
    b_t1 = _threshold(thresholds, o_r, m_m, num_rows, p + 1, P, BM)
    b_t2 = _threshold(thresholds, o_r, m_m, num_rows, p + 2, P, BM)
    b_c0 = tl.zeros([BM, BN], DTYPE)
    b_c1 = tl.zeros([BM, BN], DTYPE)
    b_c2 = tl.zeros([BM, BN], DTYPE)
    b_a0 = tl.zeros([BM, BN], DTYPE)
    b_a1 = tl.zeros([BM, BN], DTYPE)
    b_a2 = tl.zeros([BM, BN], DTYPE)
    for begin in range(first, last, BN):
        o_o = begin + tl.arange(0, BN)
        b_x = tl.load(p_s + o_o[None, :] * other_stride, mask=(o_o < num_others)[None, :], other=float("-inf"))
        if FACTORED:
            b_x = _power(b_x - b_centre[:, None])
        b_ahead, b_slope = _ahead(b_x, b_centre, b_t0, MODE, DELTA, SLOPE, OFFSET, FACTORED, PRECISE, ASM)
        b_c0 += b_ahead
        b_a0 += b_slope
        if HELD > 1:
            b_ahead, b_slope = _ahead(b_x, b_centre, b_t1, MODE, DELTA, SLOPE, OFFSET, FACTORED, PRECISE, ASM)
            b_c1 += b_ahead
            b_a1 += b_slope
        if HELD > 2:
            b_ahead, b_slope = _ahead(b_x, b_centre, b_t2, MODE, DELTA, SLOPE, OFFSET, FACTORED, PRECISE, ASM)
            b_c2 += b_ahead
            b_a2 += b_slope
    _add_sums(b_c0, b_a0, counts, slopes, p_out, m_m, num_rows, p, P, MODE, BM)
    if HELD > 1:
        _add_sums(b_c1, b_a1, counts, slopes, p_out, m_m, num_rows, p + 1, P, MODE, BM)
    if HELD > 2:
        _add_sums(b_c2, b_a2, counts, slopes, p_out, m_m, num_rows, p + 2, P, MODE, BM)


@triton.jit
def _threshold(thresholds, o_r, m_m, num_rows, p, P, BM: tl.constexpr):
    """The p-th of each query, +inf past the last."""
    m_t = m_m & (tl.full([BM], p, tl.int32) < P)
    return tl.load(thresholds + tl.cast(p, tl.int64) * num_rows + o_r, mask=m_t, other=float("inf"))


@triton.jit
def _ahead(
    b_x, b_centre, b_t, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """How much each score of a tile is ahead of its row's threshold, and the slope (SIGMOID, BOUND)."""
    if MODE == STEP:
        b_ahead = (b_x >= b_t[:, None]).to(tl.int32)
        b_slope = b_ahead
    else:
        b_ahead, b_slope = _soft_step(
            b_x, b_centre[:, None], b_t[:, None], MODE, DELTA, SLOPE, OFFSET, FACTORED, PRECISE, ASM
        )  # fmt: skip
    return b_ahead, b_slope


@triton.jit
def _add_sums(b_c, b_a, counts, slopes, p_out, m_m, num_rows, p, P, MODE: tl.constexpr, BM: tl.constexpr):
    p_out += tl.cast(p, tl.int64) * num_rows
    m_out = m_m & (tl.full([BM], p, tl.int32) < P)
    tl.store(counts + p_out, tl.load(counts + p_out, mask=m_out, other=0) + tl.sum(b_c, 1), mask=m_out)
    if (MODE == SIGMOID) or (MODE == BOUND):  # noqa: SIM109
        tl.store(slopes + p_out, tl.load(slopes + p_out, mask=m_out, other=0) + tl.sum(b_a, 1), mask=m_out)


@triton.jit
def _count_soft(
    b_x, b_centre, p_t, p_c, p_a, m_m, b_from, b_until, stride, P,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds a tile's sum of soft steps and of their slopes to what the program has of its rows.

    FACTORED: for thresholds from b_from to b_until.
    """
    b_next = tl.load(p_t, mask=m_m, other=float("inf"))
    for p in range(P):
        b_t = b_next
        p_t += stride * tl.minimum(P - 1 - p, 1)  # prefetch the next threshold
        b_next = tl.load(p_t, mask=m_m, other=float("inf"))
        b_count = tl.load(p_c, mask=m_m, other=0.0)
        b_slope = tl.load(p_a, mask=m_m, other=0.0)
        b_ahead, b_steep = _soft_step(
            b_x, b_centre[:, None], b_t[:, None], MODE, DELTA, SLOPE, OFFSET, FACTORED, PRECISE, ASM
        )  # fmt: skip
        m_now = m_m & (b_t >= b_from) & (b_t < b_until) if FACTORED else m_m
        tl.store(p_c, b_count + tl.sum(b_ahead, 1), mask=m_now)
        tl.store(p_a, b_slope + tl.sum(b_steep, 1), mask=m_now)
        p_c += stride
        p_a += stride


@triton.jit
def backward_tile(
    b_g, b_s, thresholds, weights, extra, reached, num_relevant, o_i, o_r, m_v, m_reached, stride, P,
    AXIS: tl.constexpr, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    PRECISE: tl.constexpr, ASM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adds to a gradient tile what the thresholds of its rows (AXIS 1) or of its columns (AXIS 0) contribute.

    `extra` is the centre of a query's thresholds (SIGMOID) or the scale of its gradient (STEP, SEARCH). `thresholds` is where a
    GRID begins and `weights` its table of P cells; for a SEARCH see `_crossings`.
    """
    b_extra = tl.zeros([SIZE], tl.float32)
    if (MODE != RAMP) and (MODE != GRID) and (MODE != SEARCH):
        b_extra = tl.load(extra + o_r, mask=m_v, other=0.0)
        P = tl.minimum(tl.max(tl.load(num_relevant + o_i, mask=m_v, other=0), 0), P)  # only what a query of this tile has
    p_t = thresholds + o_r
    p_w = weights + o_r
    if MODE == GRID:
        b_g += look_up(b_s, thresholds, weights, o_r, m_v, P, AXIS)
    elif MODE == SEARCH:
        # a transpose is laid out for loads from many places, where a product's layout would be changed at each step of a search
        b_c = _crossings(tl.trans(b_s), thresholds, weights, extra, reached, o_r, m_v, m_reached, P, 1 - AXIS)
        b_g += tl.trans(b_c)
    elif MODE == SIGMOID:
        # two calls and not one with a branch inside: either the score or its power is alive in the loop
        if tl.max(b_extra, 0) < float("inf"):
            b_g = _add_thresholds(
                b_g, b_s, b_extra, p_t, p_w, m_v, stride, P,
                AXIS, MODE, DELTA, SLOPE, OFFSET, True, PRECISE, ASM,
            )  # fmt: skip
        else:
            b_g = _add_thresholds(
                b_g, b_s, b_extra, p_t, p_w, m_v, stride, P,
                AXIS, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM,
            )  # fmt: skip
    else:
        b_g = _add_thresholds(
            b_g, b_s, b_extra, p_t, p_w, m_v, stride, P,
            AXIS, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM,
        )  # fmt: skip
    return b_g


@triton.jit
def tally_tile(b_s, maps, tables, descending, counts, o_r, m_m, P):
    """counts[r, k] += scores of row r of the tile that lie below k thresholds [rows, P] and no more."""
    b_s = tl.trans(b_s)
    b_row = tl.where(m_m, o_r, 0).to(tl.int64)[None, :]
    m_s = (b_s > float("-inf")) & m_m[None, :]
    buckets = tl.minimum(BUCKETS_EACH * P, MOST_BUCKETS)
    b_k = position_of(b_s, m_s, maps + b_row * 2, tables + b_row * (buckets + 1), descending + b_row * P, buckets)
    tl.atomic_add(counts + b_row * P + b_k, 1, mask=m_s & (b_k < P), sem="relaxed")


@triton.jit
def _crossings(b_s, thresholds, tables, scale, reached, o_r, m_v, m_reached, P, AXIS: tl.constexpr):
    """How many more thresholds of a row, or column, are above a score after the perturbation, scaled, and `tally_tile` of them.

    A row of `thresholds` is its map of buckets and P thresholds before and after, one of `tables` where buckets begin in both.
    """
    b_row = tl.expand_dims(tl.where(m_v, o_r, 0).to(tl.int64), AXIS)
    m_s = (b_s > float("-inf")) & tl.expand_dims(m_v, AXIS)
    p_t = thresholds + b_row * (2 + 2 * P)
    buckets = tl.minimum(BUCKETS_EACH * P, MOST_BUCKETS)
    p_b = tables + b_row * (2 * (buckets + 1))
    b_before = position_of(b_s, m_s, p_t, p_b, p_t + 2, buckets)
    b_after = position_of(b_s, m_s, p_t, p_b + (buckets + 1), p_t + 2 + P, buckets)
    m_new = m_s & tl.expand_dims(m_reached, AXIS) & (b_after < P)
    tl.atomic_add(reached + b_row * P + b_after, 1, mask=m_new, sem="relaxed")
    return (b_after - b_before).to(tl.float32) * tl.load(scale + b_row)


@triton.jit
def _add_thresholds(
    b_g, b_s, b_extra, p_t, p_w, m_v, stride, P,
    AXIS: tl.constexpr, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
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
        step = stride * tl.minimum(P - 1 - p, 1)  # prefetch the next threshold
        p_w += step
        b_next_w = tl.load(p_w, mask=m_v, other=NOTHING)
        if MODE != RAMP:
            p_t += step
            b_next_t = tl.load(p_t, mask=m_v, other=float("inf"))
        if (MODE == SIGMOID) or (MODE == BOUND):  # noqa: SIM109
            _, b_steep = _soft_step(b_x, b_extra, b_t, MODE, DELTA, SLOPE, OFFSET, FACTORED, PRECISE, ASM)
            b_g += b_w * b_steep
        elif MODE == STEP:  # w is the perturbed threshold
            b_g += ((b_w > b_s).to(tl.float32) - (b_t > b_s).to(tl.float32)) * b_extra
        else:  # w is the step of the table at this edge, edges are one apart
            b_g += tl.where(b_s > b_t - p, b_w, 0.0)
    return b_g
