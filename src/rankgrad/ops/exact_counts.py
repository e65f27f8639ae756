"""Exact ranks on the kernels, for evaluation."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rankgrad.ops.autograd import PositiveScores, ScoreSource
from rankgrad.ops.backends import lowering_for
from rankgrad.ops.exact_rankers import Exact
from rankgrad.ops.labels import Labels
from rankgrad.ops.thresholds import DescendingCounts


def exact_counts(
    queries: Tensor, candidates: Tensor, relevance: Labels, *, normalized: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Irrelevant candidates at or above each positive, by the kernels: for groups of queries (indices, counts, valid)."""
    from rankgrad.ops.triton.embeddings import EmbeddingSource
    from rankgrad.ops.triton.first_call import compile_together

    built, ops = relevance.build(), lowering_for(Exact(), given_scores=False)
    source = EmbeddingSource.of(built, queries.device, "high", normalized=normalized, ops=ops)

    def counted() -> tuple[ScoreSource, list[PositiveScores], list[Any]]:
        opened = source(queries, candidates)
        positives = [opened.positives(block) for block in range(len(opened.row_blocks))]
        return opened, positives, opened.count(ops, [ops.thresholds(items, 0) for items in positives], 0, keep=False)

    with torch.cuda.device_of(queries):
        compile_together(frozenset((queries.shape[1], kind) for kind in source.kinds), counted, queries.device)
        opened, positives, counts = counted()
    for rows, items, count in zip(opened.row_blocks, positives, counts, strict=True):
        assert items.valid is not None, "the kernels pad"
        yield built.query_order[rows], count.unsorted() if isinstance(count, DescendingCounts) else count, items.valid
