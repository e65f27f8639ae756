"""What the kernels get for a block of rows: thresholds to count against, and what the gradient is made of.

Letter:  P thresholds of a query
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.triton.bucket_tables import BucketTables


@dataclass
class CountArgs:
    """What the counting kernel gets for a row block."""

    thresholds: Tensor  # [P, rows], or the first edge
    num_thresholds: int

    def __post_init__(self) -> None:
        if not self.num_thresholds:  # the kernel prefetches, and there must be something to read
            self.thresholds = self.thresholds.new_zeros(1, self.thresholds.shape[-1])


class BackwardArgs:
    """What the gradient kernel gets for a row block."""

    def __init__(
        self,
        thresholds: Tensor,
        weights: Tensor,
        extra: Tensor,
        peak: Tensor,
        *,
        steepest: float = 1.0,
        reached: Tensor | None = None,
    ) -> None:
        self.num_thresholds = weights.shape[0]
        if not self.num_thresholds:  # the kernel prefetches, and there must be something to read
            thresholds = weights = torch.zeros((1, weights.shape[1]), device=weights.device)
        self.thresholds, self.weights, self.extra = thresholds, weights, extra
        self.peak, self.steepest = peak, steepest  # [], and a number: their product bounds the gradient of a score
        self.reached = reached  # [P, rows] int32 scores that reach the perturbed thresholds, if they are counted

    @property
    def perturbed(self) -> CountArgs:
        """The perturbed thresholds, which stand in place of weights where they are counted."""
        return CountArgs(self.weights, self.num_thresholds)

    @classmethod
    def joined(cls, parts: Sequence["BackwardArgs"]) -> "BackwardArgs":
        """Those of several row blocks with equally many thresholds as of one; nothing may be counted."""
        if len(parts) == 1:
            return parts[0]
        names = ("thresholds", "weights", "extra")
        rows = [torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names]
        peak, steepest = cls.joint_peak(parts)
        return cls(rows[0], rows[1], rows[2], peak, steepest=steepest)

    @staticmethod
    def joint_peak(parts: Sequence["BackwardArgs"]) -> tuple[Tensor, float]:
        """`peak` and `steepest` of several row blocks together."""
        if len(parts) == 1:
            return parts[0].peak, parts[0].steepest
        return torch.stack([part.peak * part.steepest for part in parts]).amax(), 1.0

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
        begins, most = torch.cat((before.begin, after.begin), dim=1), max(before.width, 1)
        made = cls(thresholds, begins, scale, scale.abs().amax(), steepest=most, reached=reached)
        made.num_thresholds = before.width
        return made

    def rescale(self, unit: Tensor) -> None:
        """Divide the gradient by `unit`."""
        if self.reached is None:
            self.weights = (self.weights / unit).contiguous()
        else:
            self.extra = self.extra / unit

    def pairs(self) -> "BackwardArgs":
        """The same with thresholds and weights side by side in place of weights, for a kernel to load both at once."""
        made = copy(self)
        made.weights = torch.stack((self.thresholds, self.weights), dim=-1).view(torch.int64)[..., 0]
        return made

    def kernel_args(self, role: str) -> dict[str, Any]:
        """Arguments of the queries in the rows or the columns of a tile, `role` "row" or "column"."""
        reached = self.thresholds if self.reached is None else self.reached  # not touched where nothing is counted
        tensors = {"t": self.thresholds, "w": self.weights, "extra": self.extra, "reached": reached}
        return {f"{role}_{name}": value for name, value in {**tensors, "p": self.num_thresholds}.items()}
