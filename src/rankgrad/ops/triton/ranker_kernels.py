"""What the embedding kernels compute for a ranker, by its MODE.

The kernels of `embedding_kernels` and `stored_kernels` walk over tiles and call device functions, which alone know the rankers:

    count_tile      a tile's part of the counts
    tally_tile      the same where thresholds are searched
    backward_tile   a tile's part of the gradient

The positives of a query are compared with each other in `positive_kernels`. Thresholds are kept threshold-major, [P, rows], so
that a load over queries is contiguous. A query may have more positives than there is room for: a captured call finds out only
when it has run, and its result is dropped then. So what is read and written is limited by P, not by the number of positives.

Letters:  P thresholds of a query   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton
import triton.language as tl

from rankgrad.ops.triton.device_functions import reciprocal, unpacked
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


# A sigmoid of s - t needs 2 ** (t - s) = (2 ** (-s / ROOT) * 2 ** (t / ROOT)) ** ROOT: one power per score, for all thresholds
# of its row and of its column, and one per threshold. ROOT is the power of two, up to MOST_ROOT, with which no exponent is
# beyond LARGEST_POWER; 0 if there is none, and each pair of a score and a threshold has a power of its own.
LARGEST_POWER = 120.0
MOST_ROOT = 8


def root_of(largest: float) -> int:
    """ROOT for scores of base 2 that are at most so large."""
    root = 1
    while largest / root > LARGEST_POWER:
        root *= 2
    return root if root <= MOST_ROOT else 0


# One reciprocal for three thresholds, 1 / a = b c * 1 / (a b c), halves the work of the unit that computes powers and
# reciprocals, and was no faster: RS@k of 65,536 items took 68.8 ms and not 67.0 in "high", 38.9 and not 38.1 in "fast", on an
# H200.
@triton.jit
def _sigmoid(b_x, b_t, ROOT: tl.constexpr, ASM: tl.constexpr):
    """A sigmoid of a score less a threshold, 1 / (1 + 2 ** (t - s)): small ones keep their relative error.

    Which are all there is once classes are well apart. With a ROOT, b_x and b_t are the powers of the two.
    """
    if ROOT == 0:
        b_odds = tl.exp2(b_t - b_x)
    else:
        b_odds = b_x * b_t
        if ROOT > 1:
            b_odds *= b_odds
        if ROOT > 2:
            b_odds *= b_odds
        if ROOT > 4:
            b_odds *= b_odds
    return reciprocal(1.0 + b_odds, ASM)


@triton.jit
def _soft_step(
    b_x, b_t, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    ROOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What stands for the step of a score less a threshold, and its slope by that over tau (SIGMOID, BOUND)."""
    b_ahead = _sigmoid(b_x, b_t, ROOT, ASM)
    b_slope = b_ahead - b_ahead * b_ahead
    if MODE == BOUND:
        b_d = b_x - b_t
        b_ahead += tl.where(b_d > 0.0, 0.5, 0.0)
        b_ahead = tl.where(b_d > DELTA, (b_d - DELTA) * (SLOPE * 0.6931471805599453) + OFFSET, b_ahead)
        b_slope = tl.where(b_d > DELTA, SLOPE, b_slope)
    return b_ahead, b_slope


@triton.jit
def _compared(b_s, ROOT: tl.constexpr):
    """What thresholds are compared with: scores, or their powers."""
    return b_s if ROOT == 0 else tl.exp2(b_s * (-1.0 / ROOT))


@triton.jit
def most_thresholds(num_relevant, o_i, m_v, P, MODE: tl.constexpr):
    """How many of P thresholds any of these queries has."""
    if MODE != RAMP:
        P = tl.minimum(tl.max(tl.load(num_relevant + o_i, mask=m_v, other=0), 0), P)
    return P


@triton.jit
def count_tile(
    b_s, thresholds, counts, slopes, o_t, o_out, m_v, stride, out_stride, P,
    AXIS: tl.constexpr, ADD: tl.constexpr, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    ROOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Stores what of a tile is ahead of each threshold of its rows (AXIS 1) or of its columns (AXIS 0), and the slopes of that.

    Slopes for SIGMOID and BOUND. ADD: to what is there. Thresholds are at o_t, counts and slopes at o_out.
    """
    b_x = _compared(b_s, ROOT)
    # scalar pointers and offsets, which take fewer registers than a pointer for each row or column
    p_t = thresholds
    p_c = counts
    p_a = slopes
    o_known = tl.minimum(o_t, stride - 1)
    b_next = tl.load(p_t) if MODE == RAMP else tl.load(p_t + o_known)
    for p in range(P):
        if MODE == RAMP:  # edges are one apart, from the one that `thresholds` points to downwards
            b_count = tl.sum(tl.minimum(tl.maximum(b_s - (b_next - p), 0.0), 1.0), AXIS)
        else:
            b_t = tl.expand_dims(b_next, AXIS)
            p_t += stride * tl.minimum(P - 1 - p, 1)  # prefetch the next threshold
            b_next = tl.load(p_t + o_known)
            if MODE == STEP:
                b_count = tl.sum((b_s >= b_t).to(tl.int32), AXIS)
            else:
                b_ahead, b_steep = _soft_step(b_x, b_t, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM)
                b_count = tl.sum(b_ahead, AXIS)
                # A sum of squares takes one instruction less than one of slopes. Its error is that of a count: of candidates
                # far ahead, which have none, a slope of 1e-7 each may be left.
                b_slope = b_count - tl.sum(b_ahead * b_ahead, AXIS) if MODE == SIGMOID else tl.sum(b_steep, AXIS)
                if ADD:
                    b_slope += tl.load(p_a + o_out, mask=m_v, other=0.0)
                tl.store(p_a + o_out, b_slope, mask=m_v)
                p_a += out_stride
        if ADD:
            b_count += tl.load(p_c + o_out, mask=m_v, other=0)
        tl.store(p_c + o_out, b_count, mask=m_v)
        p_c += out_stride


@triton.jit
def backward_tile(
    b_g, b_s, thresholds, weights, extra, reached, o_r, m_v, m_reached, stride, P,
    AXIS: tl.constexpr, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    ROOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds to a gradient tile what P thresholds of its rows (AXIS 1) or of its columns (AXIS 0) contribute.

    `extra` is the scale of a query's gradient (STEP, SEARCH). `thresholds` is where a GRID begins and `weights` its table of P
    cells; for a SEARCH see `_crossings`.
    """
    if MODE == GRID:
        b_g += look_up(b_s, thresholds, weights, o_r, m_v, P, AXIS)
    elif MODE == SEARCH:
        # a transpose is laid out for loads from many places, where a product's layout would be changed at each step of a search
        b_c = _crossings(tl.trans(b_s), thresholds, weights, extra, reached, o_r, m_v, m_reached, P, 1 - AXIS)
        b_g += tl.trans(b_c)
    else:
        b_g = _add_thresholds(b_g, b_s, thresholds, weights, extra, o_r, stride, P, AXIS, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM)
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
    b_g, b_s, thresholds, weights, extra, o_r, stride, P,
    AXIS: tl.constexpr, MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    ROOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`weights` are pairs of a threshold and its weight; of RAMP, weights alone, and the first edge in `thresholds`.

    Past the last query scores are -inf, which has no gradient whatever the threshold.
    """
    o_r = tl.minimum(o_r, stride - 1)
    b_x = _compared(b_s, ROOT)
    if MODE == RAMP:
        b_edge = tl.expand_dims(tl.load(thresholds + o_r), AXIS)
    if MODE == STEP:
        b_scale = tl.expand_dims(tl.load(extra + o_r), AXIS)
    b_next = tl.load(weights + o_r)
    for p in range(P):
        b_now = tl.expand_dims(b_next, AXIS)
        weights += stride * tl.minimum(P - 1 - p, 1)  # prefetch the next one
        b_next = tl.load(weights + o_r)
        if MODE == RAMP:  # w is the step of the table at this edge, edges are one apart
            b_g += tl.where(b_s > b_edge - p, b_now, 0.0)
        else:
            b_t, b_w = unpacked(b_now)
            if MODE == STEP:  # w is the perturbed threshold
                b_g += ((b_w > b_s).to(tl.float32) - (b_t > b_s).to(tl.float32)) * b_scale
            else:
                _, b_steep = _soft_step(b_x, b_t, MODE, DELTA, SLOPE, OFFSET, ROOT, ASM)
                b_g += b_w * b_steep
    return b_g
