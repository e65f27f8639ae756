"""Nearest candidates: exact, in one order, from memory and from disk."""

import numpy as np
import pytest
import torch
from eval.listwise_metrics import exact_batch

from rankgrad.eval import neighbours


def slow(queries, gallery, k, own=None):
    scores = (queries.double() @ gallery.double().T).tolist()
    found = []
    for query, row in enumerate(scores):
        candidates = [item for item in range(len(row)) if own is None or item != own[query]]
        found.append(sorted(candidates, key=lambda item, row=row: (-row[item], item))[:k])
    return [[scores[query][item] for item in items] for query, items in enumerate(found)], found


@pytest.mark.parametrize(("count", "k"), [(1, 1), (30, 7), (700, 20), (700, 699)])
def test_the_highest_scores_and_of_equals_the_first(count, k):
    queries, _ = exact_batch(9, seed=1)
    gallery, _ = exact_batch(count, seed=2)
    scores, index = neighbours(queries, gallery, k, normalize=False)
    assert (scores.tolist(), index.tolist()) == slow(queries, gallery, k)


def test_the_query_itself_is_left_out_by_its_row():
    gallery, _ = exact_batch(50)
    own = np.array([3, -1, 49])
    scores, index = neighbours(gallery[[3, 4, 49]], gallery, 49, own, normalize=False)
    assert (scores.tolist(), index.tolist()) == slow(gallery[[3, 4, 49]], gallery, 49, own)


def test_a_gallery_on_disk_in_blocks_equals_one_in_memory(tmp_path, monkeypatch):
    queries, _ = exact_batch(40, dim=8, most=1, seed=1)
    gallery, _ = exact_batch(9000, dim=8, most=1, seed=2)
    whole = neighbours(queries, gallery, 30)
    monkeypatch.setattr("rankgrad.eval.embedding_blocks.BLOCK_NUMBERS", 8)
    monkeypatch.setattr("rankgrad.eval.nearest.TOPK_TILES", 2)
    on_disk = np.memmap(tmp_path / "gallery", dtype=np.float32, mode="w+", shape=tuple(gallery.shape))
    on_disk[:] = gallery.numpy()
    told = []
    blocks = neighbours(queries.numpy(), on_disk, 30, progress=lambda *step: told.append(step))
    np.testing.assert_array_equal(whole[0], blocks[0])
    np.testing.assert_array_equal(whole[1], blocks[1])
    assert len(told) > 5
    assert told[-1] == (40 * 9000, 40 * 9000)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"k": 6}, ValueError, "k must be at most the number of candidates, got k=6 and 5 in the gallery"),
        ({"k": 5, "self_index": np.arange(3)}, ValueError, "k must be at most the number of candidates"),
        ({"self_index": np.array([5, 0, 0])}, ValueError, "self_index must hold 3 rows of a gallery of 5"),
        ({"self_index": np.array([0])}, ValueError, "self_index must hold 3 rows"),
        ({"gallery": torch.ones(5, 3)}, ValueError, "gallery must have 2 dimensions"),
    ],
)
def test_what_is_refused(change, error, match):
    given = {"queries": torch.ones(3, 2), "gallery": torch.ones(5, 2), "k": 2} | change
    with pytest.raises(error, match=match):
        neighbours(**given)
