"""How each ranker runs in the embedding kernels: device functions by MODE, and one host object per ranker.

The kernels of `embedding_kernels` walk over tiles and call three device functions, which alone know the rankers:

    begin_rows      thresholds that the rows of a tile have, and what is computed once for them
    count_tile      a tile's part of the counts
    backward_tile   a tile's part of the gradient

Thresholds are kept threshold-major, [P, rows], so that a load over queries is contiguous. On the host, a `Lowering` says what
its MODE needs: it prepares the kernels' arguments, and compares the positives of a query with each other in kernels of its own.

Letters:  P thresholds of a query   i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad.ops.autograd import PositiveScores, Ranks, Upstream
from rankgrad.ops.rankers import Blackbox, Exact, Histogram, Ranker, Sigmoid, UpperBound
from rankgrad.ops.thresholds import SigmoidThresholds, Thresholds
from rankgrad.ops.triton.bucket_tables import BucketTables
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


@triton.jit
def _power(b_x):
    """2 ** x without overflow: beyond these ends a sigmoid is 0 or 1 in float32 whatever its threshold."""
    return tl.exp2(tl.minimum(tl.maximum(b_x, -126.0), 126.0))


@triton.jit
def _centre(b_low, b_high):
    """The middle of a row's thresholds, or +inf for all rows if the thresholds of one are too far apart to be factored.

    A sigmoid of s - t, in units where the base is 2, needs 2 ** (s - t) = 2 ** (s - centre) * 2 ** (centre - t), one power per
    score instead of one per threshold. That is exact while |centre - t| <= 100: where either power is cut off the sigmoid is
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
    """How many thresholds the rows of a tile have at most, and the centre of each row's (SIGMOID, stored too)."""
    if MODE != RAMP:  # only the thresholds that a row of this tile has
        P = tl.max(tl.load(num_relevant + o_m, mask=m_m, other=0), 0)
    b_centre = tl.zeros([BM], tl.float32)
    if MODE == SIGMOID:
        b_low = tl.full([BM], float("inf"), tl.float32)
        b_high = tl.full([BM], float("-inf"), tl.float32)
        for p in range(P):
            b_t = tl.load(thresholds + tl.cast(p, tl.int64) * num_rows + o_r, mask=m_m, other=float("inf"))
            b_low = tl.minimum(b_low, b_t)
            b_high = tl.maximum(b_high, tl.where(b_t < float("inf"), b_t, float("-inf")))
        b_centre = _centre(b_low, b_high)
        tl.store(centres + o_r, b_centre, mask=m_m)
    return P, b_centre


@triton.jit
def count_tile(
    b_s, b_centre, thresholds, counts, slopes, o_r, p_out, m_m, num_rows, P,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds what of a tile is ahead of each threshold to the counts, and the slopes to theirs (SIGMOID, BOUND)."""
    if (MODE == SIGMOID) or (MODE == BOUND):  # noqa: SIM109  # Triton has no `in`
        p_t = thresholds + o_r
        p_c = counts + p_out
        p_a = slopes + p_out
        if MODE == BOUND:  # the line beyond delta needs the score, so that a power in place of it would save nothing
            _count_soft(b_s, b_centre, p_t, p_c, p_a, m_m, num_rows, P, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM)
        # two loops and not one with a branch: either the score or its power is alive, and registers are scarce
        elif tl.max(b_centre, 0) < float("inf"):
            b_e = _power(b_s - b_centre[:, None])
            _count_soft(b_e, b_centre, p_t, p_c, p_a, m_m, num_rows, P, MODE, DELTA, SLOPE, OFFSET, True, PRECISE, ASM)
        else:
            _count_soft(b_s, b_centre, p_t, p_c, p_a, m_m, num_rows, P, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM)
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
def _count_soft(
    b_x, b_centre, p_t, p_c, p_a, m_m, stride, P,
    MODE: tl.constexpr, DELTA: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds a tile's sum of soft steps and of their slopes to what the program has of its rows."""
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
        tl.store(p_c, b_count + tl.sum(b_ahead, 1), mask=m_m)
        tl.store(p_a, b_slope + tl.sum(b_steep, 1), mask=m_m)
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
        P = tl.max(tl.load(num_relevant + o_i, mask=m_v, other=0), 0)  # no more than a query of this tile has
    p_t = thresholds + o_r
    p_w = weights + o_r
    p_c = reached + o_r
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
                b_g, b_s, b_extra, p_t, p_w, p_c, m_v, m_reached, stride, P,
                AXIS, MODE, DELTA, SLOPE, OFFSET, True, PRECISE, ASM,
            )  # fmt: skip
        else:
            b_g = _add_thresholds(
                b_g, b_s, b_extra, p_t, p_w, p_c, m_v, m_reached, stride, P,
                AXIS, MODE, DELTA, SLOPE, OFFSET, False, PRECISE, ASM,
            )  # fmt: skip
    else:
        b_g = _add_thresholds(
            b_g, b_s, b_extra, p_t, p_w, p_c, m_v, m_reached, stride, P,
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
    b_g, b_s, b_extra, p_t, p_w, p_reached, m_v, m_reached, stride, P,
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
            b_now = b_w > b_s
            b_g += (b_now.to(tl.float32) - (b_t > b_s).to(tl.float32)) * b_extra
            tl.atomic_add(p_reached, tl.sum(tl.where(b_now, 0, 1), AXIS), mask=m_reached, sem="relaxed")
            p_reached += stride
        else:  # w is the step of the table at this edge, edges are one apart
            b_g += tl.where(b_s > b_t - p, b_w, 0.0)
    return b_g


@triton.jit(do_not_specialize=("P",))
def among_kernel(scores, num_relevant, out, P, scale, ASM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr):
    """out[row, x] = sum over the row's positives y of sigmoid((s_y - s_x) / tau), x itself among them; scale: of base 2.

    Scores are subtracted before they are scaled: of two products less each other a GPU rounds one and not the other, so that
    equal scores would differ.
    """
    i = tl.program_id(0).to(tl.int64)
    count = tl.load(num_relevant + i)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_x = tl.load(scores + i * P + o_x, mask=o_x < count, other=0.0)
    b_sum = tl.zeros([BY, BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=float("-inf"))
        b_sum += reciprocal(1.0 + tl.exp2((b_x[None, :] - b_y[:, None]) * scale), ASM)
    tl.store(out + i * P + o_x, tl.sum(b_sum, 0), mask=o_x < P)


@triton.jit(do_not_specialize=("P",))
def among_bwd_kernel(scores, weights, num_relevant, out, P, scale, ASM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr):
    """out[row, x] = sum over y of (w_y - w_x) slope((s_y - s_x) / tau): the slope of a sigmoid is even."""
    i = tl.program_id(0).to(tl.int64)
    count = tl.load(num_relevant + i)
    o_x = tl.program_id(1) * BX + tl.arange(0, BX)
    b_x = tl.load(scores + i * P + o_x, mask=o_x < count, other=0.0)
    b_wx = tl.load(weights + i * P + o_x, mask=o_x < count, other=0.0)
    b_sum = tl.zeros([BY, BX], tl.float32)
    for start in range(0, count, BY):
        o_y = start + tl.arange(0, BY)
        b_y = tl.load(scores + i * P + o_y, mask=o_y < count, other=float("-inf"))
        b_wy = tl.load(weights + i * P + o_y, mask=o_y < count, other=0.0)
        b_ahead = reciprocal(1.0 + tl.exp2((b_x[None, :] - b_y[:, None]) * scale), ASM)
        b_sum += (b_wy[:, None] - b_wx[None, :]) * (b_ahead - b_ahead * b_ahead)
    tl.store(out + i * P + o_x, tl.where(o_x < count, tl.sum(b_sum, 0), 0.0), mask=o_x < P)


@triton.jit(do_not_specialize=("P",))
def proper_kernel(ahead, order, descending, num_relevant, rank, among, P, AMONG: tl.constexpr, BLOCK: tl.constexpr):
    """Ranks of a row's positives [P] from their positions in descending order and the irrelevant ones ahead; 1 at padding.

    AMONG: those among the positives, too.
    """
    i = tl.program_id(0).to(tl.int64)
    o_position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_position = o_position < P
    count = tl.load(num_relevant + i)
    b_item = tl.load(order + i * P + o_position, mask=m_position, other=0)
    b_value = tl.load(descending + i * P + o_position, mask=m_position, other=0.0)
    m_real = m_position & (b_item < count)
    # padding is infinite and last in its row: ahead of every item but of infinite ones
    b_among = o_position + 1 - tl.where(b_value == float("inf"), 0, P - count)
    b_among = tl.where(m_real, b_among, 1)
    b_ahead = tl.load(ahead + i * P + b_item, mask=m_real, other=0)
    if AMONG:
        tl.store(among + i * P + b_item, b_among.to(among.dtype.element_ty), mask=m_position)
    tl.store(rank + i * P + b_item, (b_among + b_ahead).to(rank.dtype.element_ty), mask=m_position)


@dataclass(frozen=True)
class CountArgs:
    """What the counting kernel gets for a row block."""

    thresholds: Tensor  # [P, rows], or the first edge
    num_thresholds: int


class BackwardArgs:
    """What the gradient kernel gets for a row block."""

    def __init__(
        self,
        thresholds: Tensor,
        weights: Tensor,
        extra: Tensor,
        peak: Tensor,
        *,
        reached: Tensor | None = None,
    ) -> None:
        self.num_thresholds = weights.shape[0]
        if not self.num_thresholds:  # the kernel prefetches, and there must be something to read
            thresholds = weights = torch.zeros((1, weights.shape[1]), device=weights.device)
        self.thresholds, self.weights, self.extra = thresholds, weights, extra
        self.peak = peak  # [] bound of the gradient of a score
        self.reached = reached  # [P, rows] int32 scores that reach the perturbed thresholds, if they are counted

    @classmethod
    def joined(cls, parts: Sequence["BackwardArgs"]) -> "BackwardArgs":
        """Those of several row blocks with equally many thresholds as of one; nothing may be counted."""
        if len(parts) == 1:
            return parts[0]
        names = ("thresholds", "weights", "extra")
        rows = [torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names]
        return cls(rows[0], rows[1], rows[2], torch.stack([part.peak for part in parts]).amax())

    @classmethod
    def of_tables(cls, begins: Tensor, table: Tensor) -> "BackwardArgs":
        """Grids and tables of all queries in place of thresholds and weights."""
        made = cls(begins, table, begins, begins)
        made.num_thresholds = table.shape[1]
        return made

    @classmethod
    def of_search(cls, before: BucketTables, after: BucketTables, scale: Tensor) -> "BackwardArgs":
        """Sorted thresholds before and after a perturbation, and their buckets."""
        thresholds = torch.cat((before.bucket_map, before.descending, after.descending), dim=1)
        reached = torch.zeros(before.descending.shape, dtype=torch.int32, device=scale.device)
        peak = scale.abs().amax() * max(before.width, 1)
        made = cls(thresholds, torch.cat((before.begin, after.begin), dim=1), scale, peak, reached=reached)
        made.num_thresholds = before.width
        return made

    def rescale(self, factor: Tensor) -> None:
        """Multiply the gradient by `factor`."""
        if self.reached is None:
            self.weights = (self.weights * factor).contiguous()
        else:
            self.extra = self.extra * factor

    def kernel_args(self, role: str) -> dict[str, Any]:
        """Arguments of the queries in the rows or the columns of a tile, `role` "row" or "column"."""
        reached = self.thresholds if self.reached is None else self.reached  # not touched where nothing is counted
        tensors = {"t": self.thresholds, "w": self.weights, "extra": self.extra, "reached": reached}
        return {f"{role}_{name}": value for name, value in {**tensors, "p": self.num_thresholds}.items()}


R = TypeVar("R", bound=Ranker)


class Lowering(ABC, Generic[R]):
    """A ranker on the kernels: its own methods where kernels do not replace them."""

    mode: ClassVar[Any]
    count_dtype: ClassVar[torch.dtype] = torch.float32
    keeps_slopes: ClassVar[bool] = False  # whether counting also sums slopes and stores centres for the gradient
    many_mode: ClassVar[Any] = None  # MODE where queries have many positives, if another one is faster then
    per_positive: ClassVar[bool] = True  # whether thresholds are positives, which makes comparisons most of a tile's work

    def __init__(self, ranker: R) -> None:
        self.ranker = ranker
        self.differentiable, self.grad_fields = ranker.differentiable, ranker.grad_fields

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {"MODE": self.mode, "DELTA": 0.0, "SLOPE": 0.0, "OFFSET": 0.0}

    @property
    def score_scale(self) -> float:
        """The kernels' scores are in multiples of 1 / score_scale."""
        return 1.0

    @property
    def threshold_scale(self) -> float:
        """The scale of the positives' scores, that of the tiles where a tie between the two must be one to the last bit."""
        return 1.0

    def thresholds(self, positives: PositiveScores, key: int) -> Any:
        return self.ranker.thresholds(positives, key)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Any) -> Ranks:
        return self.ranker.ranks(counts, positives, thresholds)

    def graded_rank(self, scores: Tensor, positives: PositiveScores, positive_rank: Tensor) -> Tensor:
        return self.ranker.graded_rank(scores, positives, positive_rank)

    def rank_gradient(self, d_ranks: tuple[Tensor, ...], positives: PositiveScores, thresholds: Any, upstream: Upstream) -> Any:
        return self.ranker.rank_gradient(d_ranks, positives, thresholds, upstream)

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: Any,
        positives: PositiveScores,
        thresholds: Any,
        upstream: Upstream,
    ) -> Tensor:
        return self.ranker.positive_backward(d_thresholds, counts, rank_grad, positives, thresholds, upstream)

    @abstractmethod
    def count_args(self, thresholds: Any, width: int, device: torch.device) -> CountArgs:
        """For a row block whose queries have at most `width` positives."""

    def backward_args(self, thresholds: Any, rank_grad: Any, kept: Any) -> BackwardArgs:
        """`kept` is (slopes, centres) of the count where `keeps_slopes`."""
        raise NotImplementedError(f"{type(self.ranker).__name__} has no gradient")

    def threshold_grad(self, rank_grad: Any, kept: Any, args: BackwardArgs) -> Tensor | None:
        """[B, P] what `positive_backward` gets, after the gradient kernel."""
        return None


class SigmoidLowering(Lowering[Sigmoid]):
    """Sums of logistics and of their slopes, which make the gradient of the thresholds without another pass."""

    mode = SIGMOID
    keeps_slopes = True
    many_mode = GRID

    @property
    def score_scale(self) -> float:
        return 1.4426950408889634 / self.ranker.tau  # of base 2

    @property
    def threshold_scale(self) -> float:
        return self.score_scale

    def thresholds(self, positives: PositiveScores, key: int) -> SigmoidThresholds:
        assert positives.columns is not None, "the source keeps what the kernels compare"
        return SigmoidThresholds(positives.columns)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: SigmoidThresholds) -> Ranks:
        scores = positives.scores.contiguous()
        among = torch.empty_like(scores, memory_format=torch.contiguous_format)
        if among.numel():
            among_kernel[_among_grid(among)](
                scores=scores,
                num_relevant=positives.num_relevant,
                out=among,
                P=among.shape[1],
                scale=self.score_scale,
                ASM=among.is_cuda,
                **_among_blocks(among),
            )
        return positives.item_ranks(*positives.add_counts(counts, among + 0.5))

    def count_args(self, thresholds: SigmoidThresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def backward_args(
        self, thresholds: SigmoidThresholds, rank_grad: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor]
    ) -> BackwardArgs:
        weights = rank_grad[0]
        return BackwardArgs(thresholds.columns, weights, kept[1], weights.abs().sum(dim=0).amax() / 4)

    def threshold_grad(self, rank_grad: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], args: BackwardArgs) -> Tensor:
        return -(rank_grad[0] * kept[0]).t()

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: tuple[Tensor, Tensor],
        positives: PositiveScores,
        thresholds: SigmoidThresholds,
        upstream: Upstream,
    ) -> Tensor:
        assert d_thresholds is not None, "counting sums the slopes"
        scores = positives.scores.contiguous()
        gradient = torch.empty_like(scores, memory_format=torch.contiguous_format)
        if gradient.numel():
            among_bwd_kernel[_among_grid(gradient)](
                scores=scores,
                weights=rank_grad[1].t().contiguous(),
                num_relevant=positives.num_relevant,
                out=gradient,
                P=gradient.shape[1],
                scale=self.score_scale,
                ASM=gradient.is_cuda,
                **_among_blocks(gradient),
            )
        return d_thresholds + gradient


class UpperBoundLowering(Lowering[UpperBound]):
    """Sums of bounds and of their slopes; positives are ranked exactly."""

    mode = BOUND
    keeps_slopes = True

    @property
    def constants(self) -> dict[str, Any]:
        ranker = self.ranker
        line = {"DELTA": ranker.delta * self.score_scale, "SLOPE": ranker.rho * ranker.tau, "OFFSET": ranker.offset}
        return {"MODE": self.mode, **line}

    @property
    def score_scale(self) -> float:
        return 1.4426950408889634 / self.ranker.tau  # of base 2

    @property
    def threshold_scale(self) -> float:
        return self.score_scale

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))

    def thresholds(self, positives: PositiveScores, key: int) -> Thresholds:
        assert positives.columns is not None, "the source keeps what the kernels compare"
        return Thresholds(positives.columns.t().contiguous())

    def count_args(self, thresholds: Thresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def backward_args(self, thresholds: Thresholds, rank_grad: Tensor, kept: tuple[Tensor, Tensor]) -> BackwardArgs:
        steepest = max(0.25, self.ranker.rho * self.ranker.tau)
        return BackwardArgs(thresholds.columns, rank_grad, kept[1], rank_grad.abs().sum(dim=0).amax() * steepest)

    def threshold_grad(self, rank_grad: Tensor, kept: tuple[Tensor, Tensor], args: BackwardArgs) -> Tensor:
        return -(rank_grad * kept[0]).t()


def _among_blocks(rows: Tensor) -> dict[str, int]:
    width = triton.next_power_of_2(rows.shape[1])
    return {"BX": min(128, width), "BY": min(8, width), "num_warps": 1}


def _among_grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], _among_blocks(rows)["BX"])


class ExactLowering(Lowering[Exact]):
    """Integer counts, no gradient."""

    mode = STEP
    many_mode = SEARCH
    count_dtype = torch.int32

    def count_args(self, thresholds: Thresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        return positives.item_ranks(*_proper_ranks(counts, thresholds, positives))


class BlackboxLowering(Lowering[Blackbox]):
    """Integer counts before and after the perturbation."""

    mode = STEP
    many_mode = SEARCH
    count_dtype = torch.int32

    def count_args(self, thresholds: Thresholds, width: int, device: torch.device) -> CountArgs:
        return CountArgs(thresholds.columns, width)

    def ranks(self, counts: Tensor, positives: PositiveScores, thresholds: Thresholds) -> Ranks:
        rank, among = _proper_ranks(counts, thresholds, positives)
        thresholds.found = rank
        return positives.item_ranks(rank, among)

    def backward_args(
        self, thresholds: Thresholds, rank_grad: tuple[Thresholds, Tensor], kept: BucketTables | None
    ) -> BackwardArgs:
        perturbed, scale = rank_grad
        if kept is not None:
            return BackwardArgs.of_search(kept, kept.perturbed(perturbed), scale[:, 0])
        reached = torch.zeros(thresholds.columns.shape, dtype=torch.int32, device=scale.device)
        peak = scale.abs().amax() * max(thresholds.columns.shape[0], 1)
        return BackwardArgs(thresholds.columns, perturbed.columns, scale[:, 0], peak, reached=reached)

    def threshold_grad(self, rank_grad: tuple[Thresholds, Tensor], kept: BucketTables | None, args: BackwardArgs) -> Tensor:
        assert args.reached is not None, "perturbed ranks are counted"
        if kept is None:
            return args.reached.t()
        return rank_grad[0].unsorted(args.reached.cumsum(dim=1, dtype=torch.int32))

    def positive_backward(
        self,
        d_thresholds: Tensor | None,
        counts: Tensor,
        rank_grad: tuple[Thresholds, Tensor],
        positives: PositiveScores,
        thresholds: Thresholds,
        upstream: Upstream,
    ) -> Tensor:
        perturbed, scale = rank_grad
        assert d_thresholds is not None, "perturbed ranks are counted by every pass"
        assert thresholds.found is not None, "ranks come before their gradient"
        after, _ = _proper_ranks(d_thresholds, perturbed, positives, among=False)
        return ((after - thresholds.found) * scale).to(positives.scores.dtype)


def _proper_ranks(
    ahead: Tensor, thresholds: Thresholds, positives: PositiveScores, *, among: bool = True
) -> tuple[Tensor, Tensor]:
    """[B, P] ranks of positives among all and `among` the positives, from the irrelevant ones ahead of each."""
    descending, order = thresholds.descending
    rank = torch.empty(order.shape, dtype=positives.rank_dtype, device=order.device)
    rank_among = torch.empty_like(rank) if among else rank  # not touched unless it is wanted
    if rank.numel():
        block = min(256, triton.next_power_of_2(rank.shape[1]))
        proper_kernel[(len(rank), triton.cdiv(rank.shape[1], block))](
            ahead=ahead.contiguous(),
            order=order,
            descending=descending,
            num_relevant=positives.num_relevant,
            rank=rank,
            among=rank_among,
            P=rank.shape[1],
            AMONG=among,
            BLOCK=block,
        )
    return rank, rank_among


class HistogramLowering(Lowering[Histogram]):
    """Sums of ramps between the edges of bins."""

    mode = RAMP
    per_positive = False

    @property
    def score_scale(self) -> float:
        return 1 / self.ranker.width

    def count_args(self, thresholds: None, width: int, device: torch.device) -> CountArgs:
        # the first edge; the kernel knows the others
        return CountArgs(torch.full((1,), self.ranker.high * self.score_scale - 1, device=device), self.ranker.bins)

    def backward_args(self, thresholds: None, rank_grad: tuple[Tensor, tuple[Tensor, ...]], kept: None) -> BackwardArgs:
        # the table as steps at the edges, from the lowest score up: below all edges the sum is exactly 0
        table = rank_grad[0].t()[:-1]  # [bins, rows]
        steps = torch.cat((-table[:1], table[:-1] - table[1:], table[-1:]))
        top = torch.full_like(steps[0], self.ranker.high / self.ranker.width)
        return BackwardArgs(top, steps, steps, table.abs().amax())


LOWERINGS: Mapping[type[Ranker], type[Lowering[Any]]] = {
    Exact: ExactLowering,
    Sigmoid: SigmoidLowering,
    UpperBound: UpperBoundLowering,
    Blackbox: BlackboxLowering,
    Histogram: HistogramLowering,
}


def lowering_of(ranker: Ranker, *, given_scores: bool) -> Lowering[Any] | None:
    """The kernels of `ranker`, for given scores or for embeddings; None where there are none and it runs tiled."""
    lowering = LOWERINGS.get(type(ranker))
    if lowering is None or ranker.draws:
        return None
    if given_scores and lowering.count_dtype != torch.int32:  # the kernels for given scores count exactly
        return None
    return lowering(ranker)
