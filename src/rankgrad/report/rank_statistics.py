"""Ranks of the relevant items of queries, summarised: histograms over powers of two, precision by recall."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad.eval.embedding_blocks import EmbeddingRows
from rankgrad.eval.metrics import PositiveRanks
from rankgrad.eval.rank_counts import MEMORY_LIMIT, ProgressCounter, count_against_gallery
from rankgrad.eval.relevant_pairs import SameLabelPairs
from rankgrad.report.run_reader import Evaluation, Index

MAX_QUERIES = 2000
RECALLS = np.arange(1, 101) / 100


@dataclass(frozen=True, eq=False)
class RankStatistics:
    """Ranks of all relevant items of some queries.

    Attributes:
        queries: number of queries in the sample.
        of: number of queries in all.
        ranks: [bins] relevant items with rank 1, 2, 3 to 4, 5 to 8 and so on.
        ideal: [bins] the same for perfect lists.
        precision: [100] mean over queries of the precision where 1 %, 2 %, ... of the relevant items are found.
    """

    queries: int
    of: int
    ranks: Index
    ideal: Index
    precision: NDArray[np.float64]

    @property
    def bins(self) -> list[str]:
        return bin_names(len(self.ranks))


def bin_names(count: int) -> list[str]:
    """`1`, `2`, `3-4`, `5-8`, ..."""
    ends = [2**i for i in range(count)]
    dash = "\N{EN DASH}"
    return [str(end) if end <= 2 else f"{_short(end // 2 + 1)}{dash}{_short(end)}" for end in ends]


def _short(value: int) -> str:
    return str(value) if value < 10_000 else f"{value / 1000:.0f}k"


def rank_statistics(evaluation: Evaluation, most: int = MAX_QUERIES) -> RankStatistics | str:
    """Ranks of all relevant items, counted from the embeddings; or the reason why they cannot be."""
    if evaluation.by_lists:
        return (
            f"{evaluation.protocol}: the relevant items are listed by the data set, and a run folder does not have these lists."
        )
    if evaluation.protocol == "vehicleid-official":
        first = evaluation.first_rank
        if first is None:
            return "queries.npz is missing: run `rankgrad eval` again."
        # every gallery has one relevant item
        return _summed([first.astype(np.int64)[:, None]], len(first))
    table, index = evaluation.table, evaluation.index
    if table is None or evaluation.embeddings is None:
        return "Ranks need embeddings.npy and table.csv: run `rankgrad eval` again."
    queries_at = np.flatnonzero(table.is_query) if index is None else index
    chosen = sample(len(queries_at), most)
    try:
        found = _summed(_ranks(evaluation, queries_at[chosen]), len(queries_at))
    except ValueError as error:
        return f"Ranks cannot be counted: {error}"
    return found


def sample(count: int, most: int) -> Index:
    """`most` of `count` positions in order, always the same ones."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _ranks(evaluation: Evaluation, queries_at: Index) -> Iterator[Index]:
    """[B, P] ascending ranks of some queries at a time, 0 at the padding."""
    table, embeddings = evaluation.table, evaluation.embeddings
    assert table is not None
    assert embeddings is not None
    gallery = np.flatnonzero(table.is_gallery)
    gallery_row = np.full(len(table), -1)
    gallery_row[gallery] = np.arange(len(gallery))
    relevance = SameLabelPairs(table.classes[queries_at], table.classes[gallery], gallery_row[queries_at])
    candidate_rows = embeddings if len(gallery) == len(table) else embeddings[gallery]
    queries, candidates = (
        EmbeddingRows.from_arrays([rows], device=torch.device("cpu"), normalize=True, name="embeddings", caller="report")
        for rows in (embeddings[queries_at], candidate_rows)
    )
    for found in count_against_gallery(queries, candidates, relevance, pair_budget=MEMORY_LIMIT, progress=ProgressCounter()):
        ranked = PositiveRanks.from_counts(found.counts, found.valid)
        yield ranked.rank.masked_fill(~ranked.valid, 0).numpy()


def _summed(parts: Iterator[Index] | list[Index], of: int) -> RankStatistics:
    seen, bins = 0, 1
    ranks, ideal = np.zeros(64, np.int64), np.zeros(64, np.int64)
    precision = np.zeros(len(RECALLS))
    for part in parts:
        real = part > 0
        sizes = real.sum(axis=1)
        places = np.broadcast_to(np.arange(1, part.shape[1] + 1), part.shape)
        ranks += np.bincount(_bin(part[real]), minlength=64)
        ideal += np.bincount(_bin(places[real]), minlength=64)
        # the item that brings the recall to r is number ceil(r R)
        needed = np.ceil(RECALLS * sizes[:, None] - 1e-9).astype(np.int64)
        precision += (needed / np.take_along_axis(part, needed - 1, axis=1)).sum(axis=0)
        seen += len(part)
    used = np.flatnonzero(ranks)
    bins = int(used[-1]) + 1 if len(used) else 1
    if not seen:
        raise ValueError("no query has a relevant item")
    return RankStatistics(seen, of, ranks[:bins], ideal[:bins], precision / seen)


def _bin(ranks: Index) -> Index:
    """0 for rank 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8: the exponent of the next power of two."""
    return np.ceil(np.log2(ranks) - 1e-12).astype(np.int64)


def hit_rates(first_rank: NDArray[np.float64], ks: Index) -> NDArray[np.float64]:
    """R@k for every k: the fraction of queries whose first relevant item is among the first k."""
    known = np.sort(first_rank[~np.isnan(first_rank)])
    return np.searchsorted(known, ks, side="right") / max(len(known), 1)


def cut_offs(highest: int) -> Index:
    """1, 2, 3, ... and logarithmic steps from about 20 on, up to `highest`."""
    return np.unique(np.geomspace(1, max(highest, 2), 72).round().astype(np.int64))
