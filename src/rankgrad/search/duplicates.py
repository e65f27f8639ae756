"""What a gallery says about its own data: near-duplicates, and images that are likely mislabelled."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_count
from rankgrad.search.searcher import Searcher

# rows that are searched at once, so that progress can be shown
BLOCK = 4096


@dataclass(frozen=True)
class DuplicateGroup:
    """Images that are linked by pairs of at least the threshold.

    Attributes:
        rows: the images, ascending.
        scores: cosine of each image with its nearest image of the group.
    """

    rows: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class LabelError:
    """An image whose nearest neighbours all carry another label.

    Attributes:
        row: the image.
        suggested: the most frequent label of its neighbours.
        agreement: fraction of the neighbours that carry it.
        score: mean cosine of those.
        neighbours: the nearest labelled images, nearest first.
        scores: their cosines.
    """

    row: int
    suggested: str
    agreement: float
    score: float
    neighbours: tuple[int, ...]
    scores: tuple[float, ...]


def nearest_neighbours(
    searcher: Searcher, k: int, *, progress: Callable[[int], None] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """[N, k] cosines and rows of the nearest other images of each image of a gallery; row -1 where an index found fewer.

    Args:
        searcher: the gallery, with an index or without.
        k: neighbours of each image.
        progress: called with the number of images done.
    """
    check_count(k, name="k", caller="nearest_neighbours")
    embeddings = searcher.gallery.embeddings
    k = min(k, len(embeddings) - 1)
    scores, rows = np.full((len(embeddings), k), -np.inf, np.float32), np.full((len(embeddings), k), -1, np.int64)
    for start in range(0, len(embeddings), BLOCK):
        block = np.array(embeddings[start : start + BLOCK])
        found_scores, found = searcher.search(block, k + 1)
        for i, row in enumerate(range(start, start + len(block))):
            # with many equal embeddings an image need not be among its own neighbours
            others = np.flatnonzero((found[i] != row) & (found[i] >= 0))[:k]
            scores[row, : len(others)], rows[row, : len(others)] = found_scores[i, others], found[i, others]
        if progress:
            progress(start + len(block))
    return scores, rows


def near_duplicates(scores: NDArray[np.float32], rows: NDArray[np.int64], threshold: float) -> list[DuplicateGroup]:
    """Groups of images that are linked by a cosine of at least `threshold`, the most similar first.

    Args:
        scores: from `nearest_neighbours`.
        rows: likewise.
        threshold: cosine from which two images are near-duplicates.
    """
    parent = np.arange(len(rows))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    nearest = np.full(len(rows), -np.inf, np.float32)
    for first, place in zip(*np.nonzero((scores >= threshold) & (rows >= 0)), strict=True):
        second, score = rows[first, place], scores[first, place]
        nearest[first], nearest[second] = max(nearest[first], score), max(nearest[second], score)
        parent[root(int(first))] = root(int(second))
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(np.isfinite(nearest)).tolist():
        groups.setdefault(root(row), []).append(row)
    found = [DuplicateGroup(tuple(group), tuple(nearest[group].tolist())) for group in groups.values()]
    return sorted(found, key=lambda group: (-max(group.scores), group.rows))


def label_errors(
    scores: NDArray[np.float32], rows: NDArray[np.int64], labels: Sequence[str], k: int, *, agreement: float = 0.0
) -> tuple[list[LabelError], float]:
    """Images whose `k` nearest labelled neighbours all carry another label, the surest first; and their accuracy.

    The accuracy is the fraction of images whose label is the most frequent one of their neighbours. Where it is low, the
    embeddings do not separate the classes, and a disagreement says little about the label. Images without a label, and those
    whose class has no other image, are not judged.

    Args:
        scores: from `nearest_neighbours`, of more than `k` neighbours where some images have no label.
        rows: likewise.
        labels: class of each image, "" where there is none.
        k: neighbours that must disagree.
        agreement: fraction of the neighbours that must carry the same other label.
    """
    sizes = Counter(labels)
    labelled = np.array([bool(label) for label in labels])
    found, judged, right = [], 0, 0
    for row, label in enumerate(labels):
        if not label or sizes[label] < 2:
            continue
        places = [place for place in np.flatnonzero(rows[row] >= 0) if labelled[rows[row, place]]][:k]
        near = rows[row, places].tolist()
        if not near:
            continue
        (suggested, count), *_ = Counter(labels[other] for other in near).most_common(1)
        judged, right = judged + 1, right + (suggested == label)
        if count < agreement * len(near) or any(labels[other] == label for other in near):
            continue
        cosines = scores[row, places]
        agreeing = cosines[[labels[other] == suggested for other in near]]
        found.append(
            LabelError(row, suggested, count / len(near), float(agreeing.mean()), tuple(near), tuple(cosines.tolist()))
        )
    return sorted(found, key=lambda error: (-error.agreement, -error.score, error.row)), right / max(judged, 1)
