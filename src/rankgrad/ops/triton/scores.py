"""The score door of the fused kernels, for exact ranks of long lists."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.ops.rankers import Blackbox, Exact, Ranker
from rankgrad.ops.relevance import ScoreLists
from rankgrad.ops.sources import ScoreDoor
from rankgrad.ops.thresholds import Thresholds
from rankgrad.ops.triton import score_kernels as kernels

# Scores or buckets of a program.
BLOCK = 1024

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


def supports(ranker: Ranker) -> bool:
    """Whether the kernels know the ranker."""
    return isinstance(ranker, Exact) or (isinstance(ranker, Blackbox) and not ranker.margin_noise)


def suits(lists: int, length: int) -> bool:
    """Whether the kernels are worth it for so many lists of such length."""
    return lists <= MOST_LISTS and length >= SHORTEST_LIST


@dataclass(frozen=True)
class Counted:
    """A relevance matrix of which all is known but the columns of relevant items. Nothing waits, so it can be captured."""

    is_relevant: Tensor  # [Q, n] contiguous
    grades: Tensor | None
    until: Tensor  # [Q, blocks] int32 relevant items up to the end of each block of columns
    num_relevant: Tensor  # [Q]

    @classmethod
    def of(cls, relevance: Tensor) -> "Counted":
        grades = None if relevance.dtype == torch.bool else relevance
        is_relevant = (relevance if grades is None else relevance > 0).contiguous()
        queries, n = relevance.shape
        found = torch.empty(queries, triton.cdiv(n, BLOCK), dtype=torch.int32, device=relevance.device)
        _columns(is_relevant, found, found, store=False)
        until = found.cumsum(dim=1, dtype=torch.int32)
        return cls(is_relevant, grades, until, until[:, -1].long())

    def padded(self, width: int) -> ScoreLists:
        """The lists with the columns of the first `width` relevant items of each."""
        queries, n = self.is_relevant.shape
        device, width = self.until.device, max(width, 1)
        columns = torch.zeros(queries, width, dtype=torch.long, device=device)
        _columns(self.is_relevant, self.until, columns, store=True)
        order = torch.arange(queries, device=device)
        length, first = torch.full_like(order, n), torch.arange(0, queries * width, width, device=device)
        return ScoreLists(self.is_relevant, self.grades, None, order, self.num_relevant, length, columns.view(-1), first, width)

    def door(self, width: int) -> "Callable[[Tensor], FusedScoreDoor]":
        """Opens a matrix of scores over lists with at most `width` relevant items."""
        return lambda scores: FusedScoreDoor(scores, self.padded(width))


def _columns(is_relevant: Tensor, counts: Tensor, columns: Tensor, *, store: bool) -> None:
    queries, blocks = counts.shape
    kernels.column_kernel[(queries * blocks,)](
        is_relevant.view(torch.uint8), counts, columns, is_relevant.shape[1], columns.shape[1], blocks,
        STORE=store, BLOCK=BLOCK,
    )  # fmt: skip


class Tables:
    """The sorted thresholds of some lists, and where the buckets begin in them."""

    def __init__(self, thresholds: Thresholds, rows: Tensor, lists: ScoreLists, before: "Tables | None" = None) -> None:
        self.thresholds, self.rows, self.lists = thresholds, rows, lists
        self.descending = thresholds.descending[0]
        count, self.width = self.descending.shape
        most = min(MOST_BUCKETS // count, lists.is_relevant.shape[1] // SCORES_EACH)
        self.buckets = max(min(BUCKETS_EACH * self.width, most), 4)
        self.bucket_map: Tensor = self.descending.new_empty(count, 2) if before is None else before.bucket_map
        self.begin = torch.empty(count, self.buckets + 1, dtype=torch.int32, device=rows.device)
        if self.width:
            blocks = triton.cdiv(self.buckets + 1, BLOCK)
            kernels.table_kernel[(count * blocks,)](
                self.descending, lists.num_relevant, rows, self.bucket_map, self.begin,
                self.width, self.buckets, self.width.bit_length(), blocks,
                MAKE_MAP=before is None, BLOCK=BLOCK,
            )  # fmt: skip

    def moved(self, thresholds: Thresholds) -> "Tables":
        """Those of other thresholds with the same map."""
        return Tables(thresholds, self.rows, self.lists, before=self)


class FusedScoreDoor(ScoreDoor):
    """Few long lists as a matrix of scores, for `Exact` and `Blackbox`."""

    fused = True

    def __init__(self, scores: Tensor, lists: ScoreLists) -> None:
        super().__init__(scores, lists)
        self.tables: list[Tables] = []

    def count(self, ranker: Ranker, prepared: list[Thresholds], seed: int) -> list[Tensor]:
        rows = [self.order[chunk] for chunk in self.chunks]
        self.tables = [Tables(t, r, self.lists) for t, r in zip(prepared, rows, strict=True)]
        return [self._reached(t, kernels.count_kernel, (t.descending, t.begin)) for t in self.tables]

    def pull(
        self, ranker: Ranker, prepared: list[Thresholds], aimed: list[tuple[Thresholds, Tensor]], seed: int
    ) -> list[Tensor | None]:
        # a pass writes all scores of its lists; there is none where no list of a chunk has a relevant item
        make = torch.empty_like if all(self.widths) else torch.zeros_like
        self.d_scores = make(self.scores, memory_format=torch.contiguous_format)
        pulled: list[Tensor | None] = []
        for t, (perturbed, scale) in zip(self.tables, aimed, strict=True):
            moved = t.moved(perturbed)
            places = (t.descending, t.begin, moved.descending, moved.begin, scale, self.d_scores)
            pulled.append(self._reached(moved, kernels.pull_kernel, places))
        return pulled

    def _reached(self, tables: Tables, kernel: Any, arguments: tuple[Tensor, ...]) -> Tensor:
        """[B, P] scores that reach each threshold, from one pass of `kernel` over them."""
        counts = torch.zeros_like(tables.descending, dtype=torch.int32)
        n = self.scores.shape[1]
        if tables.width:
            scores, relevant, ranked = self._operands
            blocks = triton.cdiv(n, BLOCK)
            kernel[(len(tables.rows) * blocks,)](
                scores, relevant, ranked, tables.rows, tables.bucket_map, *arguments, counts,
                scores.stride(0), n, tables.width, tables.buckets, blocks,
                RANKED=self.lists.ranked is not None, BLOCK=BLOCK,
            )  # fmt: skip
        return tables.thresholds.as_given(counts.cumsum(dim=1, dtype=torch.int32 if n < 2**31 else torch.int64))

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, and as bytes what is relevant and what is ranked, contiguous within a list."""
        scores = self.scores if self.scores.stride(1) == 1 else self.scores.contiguous()
        relevant = self.lists.is_relevant.contiguous().view(torch.uint8)
        ranked = self.lists.ranked
        return scores, relevant, relevant if ranked is None else ranked.contiguous().view(torch.uint8)

    def gradients(self, d_relevant: list[Tensor]) -> tuple[Tensor, ...]:
        lists = self.lists
        if lists.single:
            return super().gradients(d_relevant)
        for tables, d_scores in zip(self.tables, d_relevant, strict=True):
            blocks = triton.cdiv(tables.width, BLOCK)
            if blocks:
                kernels.land_kernel[(len(tables.rows) * blocks,)](
                    d_scores.contiguous(), lists.column, lists.num_relevant, lists.first, tables.rows, self.d_scores,
                    self.scores.shape[1], tables.width, blocks, BLOCK=BLOCK,
                )  # fmt: skip
        return (self.d_scores,)
