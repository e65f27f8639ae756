"""Kernels of sigmoids on grids, whose cost per score does not grow with the number of positives.

The sum over candidates of sigmoid((s - t) / tau) is a smooth function of t, and its gradient is a smooth function of s. So
every query has a fine grid around its thresholds, and candidates meet the grid instead of the thresholds:

    grid_kernel      where the grid of each query begins and ends
    deposit          a tile adds each score to its cell: how many there are, and the sums of their offsets to the powers 1 to 3
    moment_kernel    these sums as factors of Taylor's series
    collect_kernel   counts and slopes at the thresholds, by Taylor's series around the middle of each cell
    table_kernel     the gradient of a score at the nodes of the grid, and its derivative
    look_up          a tile reads its gradient between two nodes, by Hermite's cubic

The sums of a cell are integers, two in 64 bits, so they are the same in whatever order scores are added. An offset is rounded
to 2 ** -bits of a cell, which moves the count of a threshold by at most 2 ** -(bits + 1) * STEP / 4 for each candidate near it:
3e-7 with 16 bits, which is what scores in float32 differ by anyway. A cell may hold every candidate, so of 63 bits the count
and the sum of offsets take `count_bits` each and leave 16 for an offset up to 8 million candidates. Squares and cubes weigh
STEP / 2 and STEP ** 2 / 6 times as much and make do with 31 - count_bits: 7e-7 for a million candidates. With all four sums the
error is that of float32. With two (WIDE is False) squares are taken as those of scores spread evenly over the cell, which is
wrong by less than scores rounded to float16 are. Scores are in units of base 2, as for other sigmoids.

Letters:  P thresholds of a query   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton
import triton.language as tl

from rankgrad._kernel import kernel
from rankgrad.ops.triton.device_functions import packed, reciprocal, unpacked

# Cells of a unit. Units that a grid goes beyond its thresholds: sigmoids of scores above it are 1 to the last bit of a count of
# a million, and those below it are less than 2 ** -58.
PER_UNIT = tl.constexpr(4)
ABOVE = tl.constexpr(42.0)
BELOW = tl.constexpr(58.0)

# A cell in multiples of tau.
STEP = tl.constexpr(0.6931471805599453 / 4)

SIZES = ("P", "first_row", "num_rows", "from_row", "moment_row")


@kernel(do_not_specialize=SIZES)
def grid_kernel(thresholds, begins, used, first_row, num_rows, P, cells, BP: tl.constexpr, BR: tl.constexpr):
    """Where the grid of query first_row + r begins, nowhere if it has no threshold [P, rows], and how many cells it has."""
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_r = o_r < num_rows
    b_low = tl.full([BP, BR], float("inf"), tl.float32)
    b_high = tl.full([BP, BR], float("-inf"), tl.float32)
    for p in range(0, P, BP):
        o_p = p + tl.arange(0, BP)
        p_t = thresholds + o_p.to(tl.int64)[:, None] * num_rows + o_r[None, :]
        b_t = tl.load(p_t, mask=(o_p < P)[:, None] & m_r[None, :], other=float("inf"))
        b_low = tl.minimum(b_low, b_t)
        b_high = tl.maximum(b_high, tl.where(b_t < float("inf"), b_t, float("-inf")))
    b_begin = tl.floor(tl.min(b_low, 0) - BELOW)
    b_end = tl.max(b_high, 0) + ABOVE
    m_any = b_end > b_begin
    tl.store(begins + first_row + o_r, tl.where(m_any, b_begin, float("inf")), mask=m_r)
    b_cells = tl.where(m_any, tl.minimum(tl.ceil((b_end - b_begin) * PER_UNIT), cells), 0.0)
    tl.store(used + first_row + o_r, b_cells.to(tl.int32), mask=m_r)


@triton.jit
def deposit(b_s, begins, used, moments, o_r, m_m, cells, bits, count_bits, scale, WIDE: tl.constexpr):
    """Adds the scores of a tile to the sums [rows, cells, 1 or 2] of their rows; an offset in a cell has so many bits."""
    b_begin = tl.load(begins + o_r, mask=m_m, other=float("inf"))
    b_cells = tl.load(used + o_r, mask=m_m, other=1)
    b_at = b_s - b_begin[:, None]
    m_in = b_at >= 0.0
    # in fixed point; what is above the grid is in its last cell
    b_most = (b_cells.to(tl.float32) * (scale / PER_UNIT))[:, None]
    b_fixed = tl.minimum(tl.where(m_in, b_at, 0.0) * scale, b_most).to(tl.int32)
    b_cell = tl.minimum(b_fixed >> bits, b_cells[:, None] - 1)
    b_offset = (b_fixed & ((1 << bits) - 1)).to(tl.uint32)
    WIDTH: tl.constexpr = 2 if WIDE else 1
    p_m = moments + (o_r[:, None] * (cells * WIDTH) + b_cell * WIDTH)
    one = tl.full([], 1, tl.int64) << (bits + count_bits)
    tl.atomic_add(p_m, b_offset.to(tl.int64) + one, mask=m_in, sem="relaxed")
    if WIDE:
        fewer = tl.maximum(bits + count_bits - 31, 0)
        half = (1 << fewer) >> 1
        b_square = (b_offset * b_offset) >> bits
        b_cube = (((b_square * b_offset) >> bits) + half) >> fewer
        b_square = (b_square + half) >> fewer
        tl.atomic_add(p_m + 1, b_square.to(tl.int64) | (b_cube.to(tl.int64) << 32), mask=m_in, sem="relaxed")


@kernel(do_not_specialize=["bits", "count_bits"])
def moment_kernel(moments, total, bits, count_bits, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of offsets become factors of Taylor's series around the middle of a cell, two float32 in place of an integer."""
    WIDTH: tl.constexpr = 2 if WIDE else 1
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p_m = moments + o * WIDTH
    b_pair = tl.load(p_m, mask=o < total, other=0)
    shift = bits + count_bits
    b_m0 = (b_pair >> shift).to(tl.float32)
    below = (tl.full([], 1, tl.int64) << shift) - 1
    b_m1 = ((b_pair & below).to(tl.float32) + 0.5 * b_m0) * tl.exp2(-bits.to(tl.float32))  # offsets were cut off
    tl.store(p_m, packed(b_m0, (b_m1 - 0.5 * b_m0) * STEP), mask=o < total)
    if WIDE:
        b_pair = tl.load(p_m + 1, mask=o < total, other=0)
        inverse = tl.exp2(-tl.minimum(bits, 31 - count_bits).to(tl.float32))
        b_m2 = (b_pair & 4294967295).to(tl.float32) * inverse
        b_m3 = (b_pair >> 32).to(tl.float32) * inverse
        b_m3 = b_m3 - 1.5 * b_m2 + 0.75 * b_m1 - 0.125 * b_m0
        b_m2 = b_m2 - b_m1 + 0.25 * b_m0
        tl.store(p_m + 1, packed(b_m2 * (STEP * STEP / 2), b_m3 * (STEP * STEP * STEP / 6)), mask=o < total)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=("num_relevant",))
def collect_kernel(
    thresholds, num_relevant, begins, used, moments, counts, slopes, first_row, num_rows, from_row, moment_row, P, cells,
    WIDE: tl.constexpr, ASM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """counts[p, r] and slopes[p, r] of a query from from_row on: sums of sigmoids at thresholds [P, rows], and of their slopes.

    moments [rows from moment_row on, cells, 2 or 4]. Cells come in whole blocks, and those that no score is in hold 0.
    """
    i_r = from_row - first_row + tl.program_id(0)
    count = tl.minimum(tl.load(num_relevant + first_row + i_r), P)
    o_p = tl.program_id(1) * BP + tl.arange(0, BP)
    o_t = o_p.to(tl.int64) * num_rows + i_r
    b_count = tl.zeros([BC, BP], tl.float32)
    b_slope = tl.zeros([BC, BP], tl.float32)
    if tl.program_id(1) * BP < count:
        begin = tl.load(begins + first_row + i_r)
        b_t = tl.load(thresholds + o_t, mask=o_p < count, other=0.0)
        WIDTH: tl.constexpr = 4 if WIDE else 2
        o_c = tl.arange(0, BC)
        # the power of a difference is that within a block of cells times that from the block to the threshold
        b_near = tl.exp2((o_c + 0.5) * (1.0 / PER_UNIT))[:, None]
        moments += (first_row + i_r - moment_row).to(tl.int64) * (cells * WIDTH)
        for cell in range(0, tl.load(used + first_row + i_r), BC):
            p_m = moments + (cell + o_c) * WIDTH
            b_m0 = tl.load(p_m)[:, None]
            b_m1 = tl.load(p_m + 1)[:, None]
            b_far = tl.exp2(tl.minimum(tl.maximum(begin + cell * (1.0 / PER_UNIT) - b_t, -110.0), 60.0))[None, :]
            b_power = b_near * b_far
            b_behind = reciprocal(1.0 + b_power, ASM)
            b_ahead = b_power * b_behind
            # derivatives of a sigmoid are its slope times polynomials
            b_d = b_ahead * b_behind
            b_second = b_behind - b_ahead
            b_third = 1.0 - 6.0 * b_d
            b_count += b_m0 * b_ahead
            if WIDE:
                b_m2 = tl.load(p_m + 2)[:, None]
                b_m3 = tl.load(p_m + 3)[:, None]
                b_count += b_d * (b_m1 + b_m2 * b_second + b_m3 * b_third)
                b_slope += b_d * (b_m0 + b_m1 * b_second + b_m2 * b_third + b_m3 * b_second * (2.0 * b_third - 1.0))
            else:
                b_m2 = b_m0 * (STEP * STEP / 24)
                b_count += b_d * (b_m1 + b_m2 * b_second)
                b_slope += b_d * (b_m0 + b_m1 * b_second + b_m2 * b_third)
    tl.store(counts + o_t, tl.sum(b_count, 0), mask=o_p < P)
    tl.store(slopes + o_t, tl.sum(b_slope, 0), mask=o_p < P)


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=("num_relevant",))
def table_kernel(
    thresholds, weights, num_relevant, begins, used, table, first_row, num_rows, P, cells,
    ASM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """table[r, node]: sum over p of weights[p, r] times the slope of the sigmoid, and its derivative, packed."""
    i_r = tl.program_id(0)
    cell = tl.program_id(1) * BC
    o_c = cell + tl.arange(0, BC)
    b_f = tl.zeros([BC, BP], tl.float32)
    b_d = tl.zeros([BC, BP], tl.float32)
    if cell <= tl.load(used + first_row + i_r):
        first = tl.load(begins + first_row + i_r) + cell * (1.0 / PER_UNIT)
        count = tl.minimum(tl.load(num_relevant + first_row + i_r), P)
        b_near = tl.exp2(tl.arange(0, BC) * (1.0 / PER_UNIT))[:, None]
        for p in range(0, count, BP):
            o_p = p + tl.arange(0, BP)
            o_t = o_p.to(tl.int64) * num_rows + i_r
            b_t = tl.load(thresholds + o_t, mask=o_p < count, other=0.0)
            b_w = tl.load(weights + o_t, mask=o_p < count, other=0.0)
            b_power = b_near * tl.exp2(tl.minimum(tl.maximum(first - b_t, -110.0), 60.0))[None, :]
            b_behind = reciprocal(1.0 + b_power, ASM)
            b_ahead = b_power * b_behind
            b_slope = b_ahead * b_behind * b_w[None, :]
            b_f += b_slope
            b_d += b_slope * (b_behind - b_ahead)
    p_t = table + (first_row + i_r).to(tl.int64) * cells + o_c
    tl.store(p_t, packed(tl.sum(b_f, 1), tl.sum(b_d, 1) * STEP), mask=o_c < cells)


@triton.jit
def look_up(b_s, begins, table, o_r, m_v, cells, AXIS: tl.constexpr):
    """The gradient of a tile's scores, from the tables [rows, cells] of its rows (AXIS 1) or of its columns (AXIS 0)."""
    b_begin = tl.load(begins + o_r, mask=m_v, other=float("inf"))
    b_at = (b_s - tl.expand_dims(b_begin, AXIS)) * PER_UNIT
    m_in = (b_at >= 0.0) & (b_at < cells - 1)
    b_at = tl.where(m_in, b_at, 0.0)
    b_cell = b_at.to(tl.int32)
    b_u = b_at - b_cell.to(tl.float32)
    p_t = table + tl.expand_dims(o_r.to(tl.int64) * cells, AXIS) + b_cell
    b_f, b_d = unpacked(tl.load(p_t, mask=m_in, other=0))
    b_rise, b_end = unpacked(tl.load(p_t + 1, mask=m_in, other=0))
    b_rise -= b_f
    b_cubic = b_d + b_end - 2.0 * b_rise
    return b_f + b_u * (b_d + b_u * ((b_rise - b_d - b_cubic) + b_u * b_cubic))
