"""Sorted thresholds with a table of buckets, so that a score is searched among few of them. See `score_kernels`."""

import torch
import triton
from torch import Tensor

from rankgrad.ops.thresholds import DescendingCounts, Thresholds
from rankgrad.ops.triton.score_kernels import table_kernel

# Buckets of a program.
BLOCK = 1024


class BucketTables:
    """The sorted thresholds of rows, each with as many buckets, and where the buckets begin in them."""

    def __init__(
        self,
        thresholds: Thresholds,
        rows: Tensor,
        num_relevant: Tensor,
        buckets: int,
        unperturbed: "BucketTables | None" = None,
    ) -> None:
        self.thresholds, self.rows, self.num_relevant, self.buckets = thresholds, rows, num_relevant, buckets
        self.descending = thresholds.descending[0]
        count, self.width = self.descending.shape
        self.bucket_map: Tensor = self.descending.new_empty(count, 2) if unperturbed is None else unperturbed.bucket_map
        self.begin = torch.empty(count, buckets + 1, dtype=torch.int32, device=rows.device)
        if self.width:
            blocks = triton.cdiv(buckets + 1, BLOCK)
            table_kernel[(count * blocks,)](
                descending=self.descending,
                num_relevant=num_relevant,
                rows=rows,
                bucket_map=self.bucket_map,
                begin=self.begin,
                P=self.width,
                BUCKETS=buckets,
                steps=self.width.bit_length(),
                blocks=blocks,
                MAKE_MAP=unperturbed is None,
                BLOCK=BLOCK,
            )

    def perturbed(self, thresholds: Thresholds) -> "BucketTables":
        """Those of other thresholds with the same map."""
        return BucketTables(thresholds, self.rows, self.num_relevant, self.buckets, unperturbed=self)

    def num_reaching(self, counts: Tensor, dtype: torch.dtype = torch.int32) -> DescendingCounts:
        """Scores that reach each threshold, from how many [B, P] lie below k thresholds and no more."""
        return DescendingCounts(self.thresholds, counts.cumsum(dim=1, dtype=dtype))
