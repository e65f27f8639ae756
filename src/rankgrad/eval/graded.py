"""Graded NDCG: an item of the query's class has gain 1, another item of its category a smaller one.

Nearly every candidate may have a gain, so whole lists are sorted, a few queries at a time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.eval.embedding_blocks import EmbeddingRows, Index, row_tile
from rankgrad.eval.nearest import ordered_bits
from rankgrad.eval.rank_counts import ProgressCounter
from rankgrad.ops.cpu_products import dot_products
from rankgrad.ops.tile_layout import split, tile_side

# Scores sorted at once: about 1/2 GiB with their keys and the sort's own copies.
SORTED_NUMBERS = 2**24


@dataclass(frozen=True)
class Grades:
    """Labels and categories that decide the gain of a candidate."""

    labels: Index
    categories: Index
    ref_labels: Index
    ref_categories: Index
    self_index: Index  # the query among the candidates, -1 where it is not one
    category_gain: float


def graded_ndcg(
    queries: EmbeddingRows, gallery: EmbeddingRows, chosen: Index, grades: Grades, *, progress: ProgressCounter
) -> NDArray[np.float64]:
    """[Q] NDCG of the queries `chosen`, each of which has at least one candidate of its class."""
    side = tile_side(queries.device)
    # fewer rows for a long gallery, but all products of a call have the same shape
    height = min(row_tile(len(chosen), side), row_tile(max(SORTED_NUMBERS // len(gallery), 1), side))
    discount = 1 / torch.log2(torch.arange(2, len(gallery) + 2, device=queries.device, dtype=torch.float64))
    parts = []
    for chunk in split(len(chosen), height):
        query = chosen[chunk]
        rows = queries.padded(query, height)
        scores = torch.cat(
            [dot_products(rows, tile) for block in gallery.blocks(side) for tile in gallery.padded(block, side).split(side)],
            dim=1,
        )[: len(query), : len(gallery)]
        few = max(SORTED_NUMBERS // len(gallery), 1)
        parts += [_ndcg(scores[part], query[part], grades, discount) for part in split(len(query), few)]
        progress.add(len(query) * len(gallery))
    return torch.cat(parts).cpu().numpy()


def _ndcg(scores: Tensor, query: Index, grades: Grades, discount: Tensor) -> Tensor:
    device = scores.device
    same_label = torch.from_numpy(grades.labels[query][:, None] == grades.ref_labels).to(device)
    category = grades.categories[query][:, None]
    same_category = torch.from_numpy((category == grades.ref_categories) & (category >= 0)).to(device)
    level = torch.where(same_label, 2, same_category.long())
    self_row = np.flatnonzero(grades.self_index[query] >= 0)
    at_self = torch.from_numpy(self_row).to(device), torch.from_numpy(grades.self_index[query][self_row]).to(device)
    # the query itself goes to the end of the list with gain 0
    level[at_self] = 0
    scores[at_self] = -torch.inf
    # where scores are equal the smaller gain comes first
    ordered = 2 - (ordered_bits(scores) * 4 + (2 - level)).sort(dim=1, descending=True).values % 4
    gain = torch.tensor([0.0, grades.category_gain, 1.0], dtype=torch.float64, device=device)
    best = gain[level].sort(dim=1, descending=True).values
    return (gain[ordered] @ discount) / (best @ discount)
