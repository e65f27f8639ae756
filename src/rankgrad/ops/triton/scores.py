"""Given scores by the fused kernels, for exact ranks of long lists."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rankgrad.ops.masks import MaskRelevance
from rankgrad.ops.sources import GivenScores
from rankgrad.ops.thresholds import DescendingCounts, Thresholds
from rankgrad.ops.triton.bucket_tables import BucketTables
from rankgrad.ops.triton.score_kernels import (
    backward_kernel,
    count_kernel,
    list_kernel,
    positive_grad_kernel,
    tally_kernel,
)

# Scores of a program. All wait for the one that is searched longest, so there are few.
BLOCK = 512

# Buckets of a threshold, most buckets of all lists (16 MiB, which stay in the L2 cache), and scores of a bucket at least.
BUCKETS_EACH = 16
MOST_BUCKETS = 2**22
SCORES_EACH = 4

# Scores of a list below which, and lists above which, the tiled path is taken unless asked otherwise: there is then too
# little work in a launch, or too little in a list to make a table for it.
SHORTEST_LIST = 4096
MOST_LISTS = 64

# Scores up to which launches cost more than work, so that a loss is replayed as CUDA graphs.
MOST_CAPTURED = 2**24


def pays_off(lists: int, length: int) -> bool:
    """Whether the kernels are faster than the tiled path for this many lists of this length."""
    return lists <= MOST_LISTS and length >= SHORTEST_LIST


@dataclass(frozen=True)
class CountedMask:
    """A relevance matrix whose positives are counted but not yet listed. Does not synchronise, so it can be captured."""

    is_relevant: Tensor  # [Q, n] contiguous
    grades: Tensor | None
    until: Tensor  # [Q, blocks] positives up to the end of each block of columns
    num_relevant: Tensor  # [Q]
    order: Tensor  # [Q] of the lists, the caller's
    list_length: Tensor  # [Q]

    @classmethod
    def of(cls, relevance: Tensor) -> "CountedMask":
        grades = None if relevance.dtype == torch.bool else relevance
        is_relevant = (relevance if grades is None else relevance > 0).contiguous()
        queries, n = relevance.shape
        blocks = triton.cdiv(n, BLOCK)
        found = torch.empty(queries, blocks, dtype=torch.int32, device=relevance.device)
        tally_kernel[(queries * blocks,)](relevant=is_relevant.view(torch.uint8), counts=found, n=n, blocks=blocks, BLOCK=BLOCK)
        until, order = found.cumsum(dim=1), torch.arange(queries, device=relevance.device)
        return cls(is_relevant, grades, until, until[:, -1].contiguous(), order, torch.full_like(order, n))

    @property
    def most(self) -> Tensor:
        """[] most positives of a list."""
        return self.num_relevant[0] if len(self.num_relevant) == 1 else self.num_relevant.amax()

    def listed(self, scores: Tensor, width: int) -> tuple[MaskRelevance, "ListedPositives"]:
        """The relevance with the first `width` positives of each list, and these."""
        (queries, n), device, width = self.is_relevant.shape, self.until.device, max(width, 1)
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        made = ListedPositives(
            torch.empty(queries, width, device=device),
            torch.empty(queries, width, dtype=torch.long, device=device),
            torch.empty(queries, width, dtype=torch.bool, device=device),
        )
        blocks = self.until.shape[1]
        list_kernel[(queries * blocks,)](
            scores=scores,
            relevant=self.is_relevant.view(torch.uint8),
            until=self.until,
            columns=made.columns,
            positives=made.scores,
            valid=made.valid.view(torch.uint8),
            row_stride=scores.stride(0),
            n=n,
            P=width,
            blocks=blocks,
            BLOCK=BLOCK,
        )
        first = self.order if queries == 1 else self.order * width
        lists = self.order, self.num_relevant, self.list_length, made.columns.view(-1), first
        return MaskRelevance(self.is_relevant, self.grades, None, *lists, width), made


class ListedPositives(NamedTuple):
    """Positives of lists, padded to the same number."""

    scores: Tensor  # [Q, P] float32, infinite at the padding
    columns: Tensor  # [Q, P] 0 at the padding
    valid: Tensor  # [Q, P] False at the padding


def _buckets(thresholds: Thresholds, length: int) -> int:
    lists, width = thresholds.values.shape
    return max(min(BUCKETS_EACH * width, MOST_BUCKETS // lists, length // SCORES_EACH), 4)


class FusedGivenScores(GivenScores):
    """Few long lists as a matrix of scores, counted exactly."""

    def __init__(self, scores: Tensor, relevance: MaskRelevance, listed: ListedPositives | None = None) -> None:
        super().__init__(scores, relevance)
        self.listed = listed
        if isinstance(relevance.rows(self.row_blocks[0]), slice):
            self.query_order = None
        self.tables: list[BucketTables] = []
        self.positions = scores.new_empty(0)  # [Q, n] int32 thresholds above each score, where they are kept

    def _listed(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.listed is None:
            return super()._listed(rows, width)
        scores, columns, valid = (tensor[rows] for tensor in self.listed)
        return scores, columns, valid

    def count(self, ops: Any, thresholds: list[Thresholds], seed: int, *, keep: bool) -> list[DescendingCounts]:
        rows = [self.relevance.query_order[block] for block in self.row_blocks]
        n, num_relevant = self.scores.shape[1], self.relevance.num_relevant
        self.tables = [BucketTables(t, r, num_relevant, _buckets(t, n)) for t, r in zip(thresholds, rows, strict=True)]
        self.positions = self._of_all_scores(torch.int32) if keep else self.tables[0].begin
        return [self._num_reaching(t, count_kernel, positions=self.positions, KEEP=keep) for t in self.tables]

    def _of_all_scores(self, dtype: torch.dtype) -> Tensor:
        # a pass writes all scores of its lists; there is none where no list of a row block has a positive
        make = torch.empty if all(self.widths) else torch.zeros
        return make(self.scores.shape, dtype=dtype, device=self.scores.device)

    def backward(
        self, ops: Any, thresholds: list[Thresholds], rank_grads: list[tuple[Thresholds, Tensor]], seed: int
    ) -> list[DescendingCounts]:
        self.d_scores = self._of_all_scores(self.scores.dtype)
        d_thresholds = []
        for before, (perturbed, scale) in zip(self.tables, rank_grads, strict=True):
            after = before.perturbed(perturbed)
            arguments = {"positions": self.positions, "scale": scale, "gradient": self.d_scores}
            d_thresholds.append(self._num_reaching(after, backward_kernel, **arguments))
        return d_thresholds

    def _num_reaching(self, tables: BucketTables, kernel: Any, **arguments: Any) -> DescendingCounts:
        """Scores that reach each threshold, from one pass of `kernel` over them."""
        counts = torch.zeros_like(tables.descending, dtype=torch.int32)
        n = self.scores.shape[1]
        if tables.width:
            scores, relevant, candidates = self._operands
            blocks = triton.cdiv(n, BLOCK)
            kernel[(len(tables.rows) * blocks,)](
                scores=scores,
                relevant=relevant,
                candidates=candidates,
                rows=tables.rows,
                bucket_map=tables.bucket_map,
                descending=tables.descending,
                begin=tables.begin,
                **arguments,
                counts=counts,
                row_stride=scores.stride(0),
                n=n,
                P=tables.width,
                BUCKETS=tables.buckets,
                blocks=blocks,
                MASKED=self.relevance.candidates is not None,
                BLOCK=BLOCK,
            )
        return tables.num_reaching(counts, torch.int32 if n < 2**31 else torch.int64)

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, and as bytes which are relevant and which are candidates, contiguous within a list."""
        scores = self.scores if self.scores.stride(1) == 1 else self.scores.contiguous()
        relevant = self.relevance.is_relevant.contiguous().view(torch.uint8)
        candidates = self.relevance.candidates
        return scores, relevant, relevant if candidates is None else candidates.contiguous().view(torch.uint8)

    def input_grads(self, d_positives: list[Tensor]) -> tuple[Tensor, ...]:
        r = self.relevance
        if r.single:
            return super().input_grads(d_positives)
        for tables, d_scores in zip(self.tables, d_positives, strict=True):
            blocks = triton.cdiv(tables.width, BLOCK)
            if blocks:
                positive_grad_kernel[(len(tables.rows) * blocks,)](
                    d_positives=d_scores.contiguous(),
                    columns=r.column,
                    num_relevant=r.num_relevant,
                    first=r.first,
                    rows=tables.rows,
                    gradient=self.d_scores,
                    n=self.scores.shape[1],
                    P=tables.width,
                    blocks=blocks,
                    BLOCK=BLOCK,
                )
        return (self.d_scores,)
