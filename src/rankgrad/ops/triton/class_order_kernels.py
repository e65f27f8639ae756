"""Triton kernels that put the items of a small batch in class order by comparing each with each.

    class_kernel   a number for each item's class, ascending with its size and then with its label
    place_kernel   where each item and its class stand

A sort of a few thousand numbers is a dozen launches, one of which has all the work in one thread block.

Letters:  i, j items   o_ offsets, m_ a mask, b_ a block in registers
"""

import triton.language as tl

from rankgrad._kernel import kernel

# Of one array, whose rows are aligned at some batch sizes; each case that Triton tells apart would be compiled.
OF_CLASSES = ("size", "number", "before")


@kernel(do_not_specialize=("items",), do_not_specialize_on_alignment=("labels", *OF_CLASSES))
def class_kernel(labels, size, number, before, items, BI: tl.constexpr, BJ: tl.constexpr):
    """size[i] = items of i's class, before[i] = those that come before i; number[i] = size * 2**13 + items of lower labels."""
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    b_label = tl.load(labels + o_i, mask=o_i < items, other=0)[:, None]
    # summed over j at the end
    b_lower = tl.zeros([BI, BJ], tl.int32)
    b_same = tl.zeros([BI, BJ], tl.int32)
    b_before = tl.zeros([BI, BJ], tl.int32)
    for j in range(0, items, BJ):
        o_j = (j + tl.arange(0, BJ))[None, :]
        b_other = tl.load(labels + o_j, mask=o_j < items, other=0)
        m_same = (b_other == b_label) & (o_j < items)
        b_lower += ((b_other < b_label) & (o_j < items)).to(tl.int32)
        b_same += m_same.to(tl.int32)
        b_before += (m_same & (o_j < o_i[:, None])).to(tl.int32)
    b_size = tl.sum(b_same, 1)
    tl.store(size + o_i, b_size, mask=o_i < items)
    tl.store(number + o_i, b_size * 8192 + tl.sum(b_lower, 1), mask=o_i < items)
    tl.store(before + o_i, tl.sum(b_before, 1), mask=o_i < items)


@kernel(do_not_specialize=("items",), do_not_specialize_on_alignment=OF_CLASSES)
def place_kernel(
    size, number, before, order, start, stop, num_relevant, items,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """order[place of i] = i, and there where its class begins and ends, and the other items of it."""
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    m_i = o_i < items
    b_number = tl.load(number + o_i, mask=m_i, other=0)[:, None]
    b_ahead = tl.zeros([BI, BJ], tl.int32)
    for j in range(0, items, BJ):
        o_j = (j + tl.arange(0, BJ))[None, :]
        # what is past the end is larger than any number
        b_ahead += (tl.load(number + o_j, mask=o_j < items, other=2147483647) < b_number).to(tl.int32)
    b_start = tl.sum(b_ahead, 1)
    b_size = tl.load(size + o_i, mask=m_i, other=0)
    o_place = b_start + tl.load(before + o_i, mask=m_i, other=0)
    tl.store(order + o_place, o_i.to(tl.int64), mask=m_i)
    tl.store(start + o_place, b_start.to(tl.int64), mask=m_i)
    tl.store(stop + o_place, (b_start + b_size).to(tl.int64), mask=m_i)
    tl.store(num_relevant + o_place, (b_size - 1).to(tl.int64), mask=m_i)
