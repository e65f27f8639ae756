"""NDCG with grades: an item of the query's class is worth 1, another item of its category less.

Nearly every candidate may have a grade here, so whole lists are sorted, a few queries at a time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.eval.embedding_blocks import Index, Rows, row_tile
from rankgrad.eval.nearest import ordered_bits
from rankgrad.eval.rank_counts import Tick
from rankgrad.ops.sources import split, tile_side

# Scores that are sorted at once: with their keys and the sort's own copies about 1/2 GiB.
SORTED_NUMBERS = 2**24


@dataclass(frozen=True)
class Grades:
    """What decides the gain of a candidate: its label and its category beside the query's."""

    labels: Index
    categories: Index
    ref_labels: Index
    ref_categories: Index
    own: Index  # the query among the candidates, -1 where it is not
    category_gain: float


def graded_ndcg(queries: Rows, gallery: Rows, asked: Index, grades: Grades, *, tick: Tick) -> NDArray[np.float64]:
    """[Q] NDCG of the queries at `asked`, each of which has at least one candidate of its class."""
    side = tile_side(queries.device)
    # rows are shortened for a long gallery, but all products of a call have one shape
    height = min(row_tile(len(asked), side), row_tile(max(SORTED_NUMBERS // len(gallery), 1), side))
    discount = 1 / torch.log2(torch.arange(2, len(gallery) + 2, device=queries.device, dtype=torch.float64))
    parts = []
    for chunk in split(len(asked), height):
        query = asked[chunk]
        rows = queries.padded(query, height)
        scores = torch.cat(
            [rows @ tile.t() for block in gallery.blocks(side) for tile in gallery.padded(block, side).split(side)],
            dim=1,
        )[: len(query), : len(gallery)]
        few = max(SORTED_NUMBERS // len(gallery), 1)
        parts += [_ndcg(scores[part], query[part], grades, discount) for part in split(len(query), few)]
        tick(len(query) * len(gallery))
    return torch.cat(parts).cpu().numpy()


def _ndcg(scores: Tensor, query: Index, grades: Grades, discount: Tensor) -> Tensor:
    device = scores.device
    same_label = torch.from_numpy(grades.labels[query][:, None] == grades.ref_labels).to(device)
    category = grades.categories[query][:, None]
    same_category = torch.from_numpy((category == grades.ref_categories) & (category >= 0)).to(device)
    level = torch.where(same_label, 2, same_category.long())
    itself = np.flatnonzero(grades.own[query] >= 0)
    place = torch.from_numpy(itself).to(device), torch.from_numpy(grades.own[query][itself]).to(device)
    # the query itself goes to the end of the list, where it is worth nothing
    level[place] = 0
    scores[place] = -torch.inf
    # of equal scores the one that is worth less comes first
    ordered = 2 - (ordered_bits(scores) * 4 + (2 - level)).sort(dim=1, descending=True).values % 4
    gain = torch.tensor([0.0, grades.category_gain, 1.0], dtype=torch.float64, device=device)
    best = gain[level].sort(dim=1, descending=True).values
    return (gain[ordered] @ discount) / (best @ discount)
