"""Class order of a small batch by kernels. See `labels` for what it is."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rankgrad._dry_run import launch_instead
from rankgrad.ops.triton.class_order_kernels import class_kernel, place_kernel

# Most items: each is compared with every other one, and the number that the kernels give a class has 13 bits for an item.
MOST_ITEMS = 8192

BLOCK = {"BI": 32, "BJ": 128, "num_warps": 8}


class ClassOrder(NamedTuple):
    """The items of a batch in class order, [N] each."""

    order: Tensor  # to the caller's order
    start: Tensor  # first and one past the last item of the item's class
    stop: Tensor
    num_relevant: Tensor  # other items of it


def class_order(labels: Tensor) -> ClassOrder:
    """Of int64 labels on a GPU, without synchronising."""
    labels, items = labels.contiguous(), len(labels)
    counted = torch.empty(3, items, dtype=torch.int32, device=labels.device)
    of_classes = dict(zip(("size", "number", "before"), counted, strict=True))
    # the caller indexes by the order, which no kernel writes in a dry run
    make = torch.empty_like if launch_instead() is None else torch.zeros_like
    made = ClassOrder(*(make(labels) for _ in ClassOrder._fields))
    grid = (triton.cdiv(items, BLOCK["BI"]),)
    class_kernel[grid](labels=labels, **of_classes, items=items, **BLOCK)
    place_kernel[grid](**of_classes, **made._asdict(), items=items, **BLOCK)
    return made
