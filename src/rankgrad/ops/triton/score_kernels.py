"""Triton kernels for exact ranks of long lists of given scores: streaming passes, no sort of the scores. float32 inside.

    table_kernel           where each bucket of a monotone map of scores begins in the sorted thresholds
    count_kernel           a block of scores: bucket, search among the thresholds of the bucket, one count more at the position
    backward_kernel        the same after a perturbation of the thresholds: gradient of the scores, new counts
    positive_grad_kernel   gradients of the positives' scores, scattered to their columns
    tally_kernel           positives in every block of a list
    list_kernel            columns and scores of the positives of every list, in order, without synchronising for their number

Thresholds are sorted in descending order, infinite padding first. The position of a score is the number of thresholds above
it, so a score reaches the threshold at its position and all after it, and the counts up to a position add up to the scores that
reach the threshold there. Counts are integers, so the same input gives the same bits in whatever order the blocks come.
rankgrad.ops.thresholds says why rounding in the map does no harm; it must only be the same map in all kernels.

Letters:  n scores, P thresholds of a list   i a list, i_ program index, o_ offsets, m_ a mask, b_ a block in registers
"""

import triton
import triton.language as tl

from rankgrad._kernel import kernel

# They differ from call to call, and no load gets wider by knowing that one of them is even.
SIZES = ["P", "BUCKETS", "steps", "blocks"]


@triton.jit
def bucket_of(b_s, top, per_score, BUCKETS):
    """Buckets from the highest score down, 0 above `top`; per_score is negative. Never turns the order of scores around."""
    b_f = (b_s - top) * per_score
    # the 1 is added to the integer: a fused multiply-add here and none in another kernel would be two maps
    return tl.minimum(tl.where(b_f >= 0, b_f, -1.0), BUCKETS - 2.0).to(tl.int32) + 1


@triton.jit
def search(b_s, descending, b_low, b_high):
    """Thresholds above each score, of which b_low are known to be and those from b_high on are known not to be."""
    width = tl.max(b_high - b_low)
    while width > 0:
        b_middle = (b_low + b_high) // 2
        m_open = b_low < b_high
        b_t = tl.load(descending + b_middle, mask=m_open, other=0.0)
        m_above = m_open & (b_t > b_s)
        b_high = tl.where(m_open & (b_t <= b_s), b_middle, b_high)
        b_low = tl.where(m_above, b_middle + 1, b_low)
        width = width // 2
    return b_low


@triton.jit
def position_of(b_s, m_visible, bucket_map, begin, descending, BUCKETS):
    """Thresholds of a list above each of its scores; 0 for hidden ones. Pointers are [BM, 1] for a tile of BM lists."""
    b_bucket = bucket_of(b_s, tl.load(bucket_map), tl.load(bucket_map + 1), BUCKETS)
    b_low = tl.load(begin + b_bucket, mask=m_visible, other=0)
    b_high = tl.load(begin + b_bucket + 1, mask=m_visible, other=0)
    return search(b_s, descending, b_low, b_high)


@triton.jit
def _tally(counts, b_position, m_visible, P):
    """One count more at each position; P is beyond the last threshold and not needed."""
    # whole blocks may share a position, where scores are equal or above all thresholds: that is one addition
    first = tl.min(tl.where(m_visible, b_position, P), 0)
    together = tl.sum((m_visible & (b_position == first)).to(tl.int32), 0)
    tl.atomic_add(counts + first, together, mask=first < P, sem="relaxed")
    tl.atomic_add(counts + b_position, 1, mask=m_visible & (b_position > first) & (b_position < P), sem="relaxed")


@triton.jit
def _scores(scores, relevant, candidates, row_stride, row, o_n, n, MASKED: tl.constexpr):
    """A block of scores in float32, which of them are counted, and which there are at all."""
    m_n = o_n < n
    b_s = tl.load(scores + row * row_stride + o_n, mask=m_n, other=0.0).to(tl.float32)
    m_visible = m_n & (tl.load(relevant + row * n + o_n, mask=m_n, other=1) == 0)
    if MASKED:
        m_visible = m_visible & (tl.load(candidates + row * n + o_n, mask=m_n, other=0) != 0)
    return b_s, m_visible, m_n


@triton.jit
def _first_in(descending, top, per_score, bucket, BUCKETS, P, steps):
    """Thresholds of P in buckets before this one."""
    low = P * 0
    high = P
    for _ in range(steps):
        middle = (low + high) // 2
        # at the end of the search nothing is read beyond
        t = tl.load(descending + tl.minimum(middle, P - 1))
        is_open = low < high
        is_before = bucket_of(t, top, per_score, BUCKETS) < bucket
        high = tl.where(is_open & (is_before == 0), middle, high)
        low = tl.where(is_open & is_before, middle + 1, low)
    return low


@kernel(do_not_specialize=SIZES, do_not_specialize_on_alignment=("num_relevant",))
def table_kernel(
    descending, num_relevant, rows, bucket_map, begin, P, BUCKETS, steps, blocks,
    MAKE_MAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """begin[i, b] = thresholds of row i in buckets before b, for b = 0 .. BUCKETS. MAKE_MAP: find the map and store it too."""
    i = (tl.program_id(0) // blocks).to(tl.int64)
    i_block = tl.program_id(0) % blocks
    descending += i * P
    if MAKE_MAP:
        # there are more relevant items than thresholds where the padding was too narrow, and the result will not be used
        padding = tl.maximum(tl.minimum(P - tl.load(num_relevant + tl.load(rows + i)), P - 1), 0)
        # infinite scores must not stretch the map
        top = tl.minimum(tl.maximum(tl.load(descending + padding), -3.0e38), 3.0e38)
        bottom = tl.minimum(tl.maximum(tl.load(descending + P - 1), -3.0e38), 3.0e38)
        # half of each: the difference may overflow
        span = tl.maximum(top * 0.5 - bottom * 0.5, 1.0e-30)
        per_score = (1.5 - BUCKETS * 0.5) / span
        if i_block == 0:
            tl.store(bucket_map + 2 * i, top)
            tl.store(bucket_map + 2 * i + 1, per_score)
    else:
        top = tl.load(bucket_map + 2 * i)
        per_score = tl.load(bucket_map + 2 * i + 1)
    o_b = i_block * BLOCK + tl.arange(0, BLOCK)
    m_b = o_b <= BUCKETS
    low = P * 0
    high = P
    if blocks > 1:
        # first where the block begins and ends: its own search is then short and in the cache
        low = _first_in(descending, top, per_score, i_block * BLOCK, BUCKETS, P, steps)
        high = _first_in(descending, top, per_score, (i_block + 1) * BLOCK - 1, BUCKETS, P, steps)
    b_low = tl.zeros([BLOCK], tl.int32) + low
    b_high = tl.zeros([BLOCK], tl.int32) + high
    width = high - low
    while width > 0:
        b_middle = (b_low + b_high) // 2
        m_open = m_b & (b_low < b_high)
        b_t = tl.load(descending + b_middle, mask=m_open, other=0.0)
        m_before = bucket_of(b_t, top, per_score, BUCKETS) < o_b
        b_high = tl.where(m_open & (m_before == 0), b_middle, b_high)
        b_low = tl.where(m_open & m_before, b_middle + 1, b_low)
        width = width // 2
    tl.store(begin + i * (BUCKETS + 1) + o_b, b_low, mask=m_b)


@kernel(do_not_specialize=SIZES)
def count_kernel(
    scores, relevant, candidates, rows, bucket_map, descending, begin, positions, counts, row_stride, n, P, BUCKETS, blocks,
    MASKED: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts[i, k] += scores of list i that lie below k thresholds and no more; KEEP: these k are stored as positions."""
    i = (tl.program_id(0) // blocks).to(tl.int64)
    o_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i)
    b_s, m_visible, m_n = _scores(scores, relevant, candidates, row_stride, row, o_n, n, MASKED)
    b_position = position_of(b_s, m_visible, bucket_map + 2 * i, begin + i * (BUCKETS + 1), descending + i * P, BUCKETS)
    if KEEP:
        tl.store(positions + row * n + o_n, b_position, mask=m_n)
    _tally(counts + i * P, b_position, m_visible, P)


@kernel(do_not_specialize=SIZES)
def backward_kernel(
    scores, relevant, candidates, rows, bucket_map, descending, begin, positions, scale, gradient, counts,
    row_stride, n, P, BUCKETS, blocks,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same counts for perturbed thresholds, and how many more of them than before are above, times scale[i]."""
    i = (tl.program_id(0) // blocks).to(tl.int64)
    o_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i)
    b_s, m_visible, m_n = _scores(scores, relevant, candidates, row_stride, row, o_n, n, MASKED)
    b_before = tl.load(positions + row * n + o_n, mask=m_n, other=0)
    b_after = position_of(b_s, m_visible, bucket_map + 2 * i, begin + i * (BUCKETS + 1), descending + i * P, BUCKETS)
    # a rank grows by the positives that pass the score and shrinks by those that fall behind it
    b_gradient = (b_after - b_before).to(tl.float32) * tl.load(scale + i)
    tl.store(gradient + row * n + o_n, b_gradient.to(gradient.dtype.element_ty), mask=m_n)
    _tally(counts + i * P, b_after, m_visible, P)


@kernel(do_not_specialize=SIZES)
def positive_grad_kernel(d_positives, columns, num_relevant, first, rows, gradient, n, P, blocks, BLOCK: tl.constexpr):
    """gradient[rows[i], column of the j-th relevant item] = d_positives[i, j]."""
    i = (tl.program_id(0) // blocks).to(tl.int64)
    o_p = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i)
    m_p = (o_p < tl.load(num_relevant + row)) & (o_p < P)
    b_column = tl.load(columns + tl.load(first + row) + o_p, mask=m_p, other=0)
    b_gradient = tl.load(d_positives + i * P + o_p, mask=m_p, other=0.0)
    tl.store(gradient + row * n + b_column, b_gradient.to(gradient.dtype.element_ty), mask=m_p)


@kernel(do_not_specialize=SIZES)
def tally_kernel(relevant, counts, n, blocks, BLOCK: tl.constexpr):
    """counts[i, block] = relevant items of a block of list i."""
    i = (tl.program_id(0) // blocks).to(tl.int64)
    o_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_is = tl.load(relevant + i * n + o_n, mask=o_n < n, other=0) != 0
    tl.store(counts + tl.program_id(0), tl.sum(b_is.to(tl.int32), 0))


@kernel(do_not_specialize=SIZES)
def list_kernel(scores, relevant, until, columns, positives, valid, row_stride, n, P, blocks, BLOCK: tl.constexpr):
    """The relevant items of every list in order, and padding up to P: columns, scores and whether there is one.

    until[i, block] = relevant items of list i up to the end of the block; what is beyond P is left out.
    """
    i = (tl.program_id(0) // blocks).to(tl.int64)
    i_block = tl.program_id(0) % blocks
    o_n = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns += i * P
    positives += i * P
    valid += i * P
    until += i * blocks
    b_is = (tl.load(relevant + i * n + o_n, mask=o_n < n, other=0) != 0).to(tl.int32)
    o_p = tl.load(until + i_block) - tl.sum(b_is, 0) + tl.cumsum(b_is, 0) - b_is
    m_p = (b_is != 0) & (o_p < P)
    tl.store(columns + o_p, o_n, mask=m_p)
    tl.store(positives + o_p, tl.load(scores + i * row_stride + o_n, mask=m_p, other=0.0).to(tl.float32), mask=m_p)
    tl.store(valid + o_p, tl.full([BLOCK], 1, tl.uint8), mask=m_p)
    # the blocks share the padding
    count = tl.load(until + blocks - 1).to(tl.int32)
    for begin in range(count + i_block * BLOCK, P, blocks * BLOCK):
        o_pad = begin + tl.arange(0, BLOCK)
        tl.store(columns + o_pad, tl.zeros([BLOCK], tl.int64), mask=o_pad < P)
        tl.store(positives + o_pad, tl.full([BLOCK], float("inf"), tl.float32), mask=o_pad < P)
        tl.store(valid + o_pad, tl.zeros([BLOCK], tl.uint8), mask=o_pad < P)
