"""Lists of unequal length that follow each other in one vector, as rankers are trained on, and their padded form."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """The lengths of lists that follow each other."""

    sizes: Tensor  # [Q] int64, on the CPU

    @classmethod
    def of(cls, group_sizes: Any, items: int, caller: str) -> "Groups":
        """From integers that must add up to `items`: a tensor, an array or a sequence."""
        sizes = torch.as_tensor(group_sizes).detach().cpu()
        if sizes.ndim != 1 or not len(sizes) or sizes.dtype in (torch.bool, torch.complex64) or sizes.is_floating_point():
            raise ValueError(f"{caller}: group_sizes must be positive integers, one per query")
        if int(sizes.min()) < 1:
            place = int(sizes.argmin())
            raise ValueError(f"{caller}: group_sizes must be positive integers, got {int(sizes[place])} at {place}")
        if int(sizes.sum()) != items:
            total = int(sizes.sum())
            raise ValueError(f"{caller}: group_sizes must add up to the number of scores, {items}, got a sum of {total}")
        return cls(sizes.long())

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def width(self) -> int:
        """Of the longest list."""
        return int(self.sizes.max())

    def padded(self, device: torch.device, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """[B, width] where the items of some lists are in the vector, and False at the padding, which points at any item."""
        begins = (self.sizes.cumsum(0) - self.sizes)[rows, None].to(device)
        column, lengths = torch.arange(self.width, device=device), self.sizes[rows, None].to(device)
        valid = column < lengths
        return begins + torch.where(valid, column, 0), valid
