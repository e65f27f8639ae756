"""Labels by nearest neighbours: the label that most of the neighbours of an image carry."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_count
from rankgrad.search.searcher import Searcher

# neighbours asked for so that enough with a label are mostly among them, where some have none
UNLABELLED_FACTOR = 4
# images for which those with a label are searched at once: their scores with a block of the gallery take about 200 MB
AT_ONCE = 128


@dataclass(frozen=True)
class Prediction:
    """What the neighbours of an image say.

    Attributes:
        label: of most of them; of equally many, of those with the higher sum of scores.
        agreement: share of the neighbours that carry it.
        score: highest cosine among those.
        nearest: row of the nearest neighbour, whatever its label.
    """

    label: str
    agreement: float
    score: float
    nearest: int


def predict_labels(
    searcher: Searcher, embeddings: NDArray[Any], k: int = 10, *, exclude: Sequence[int] | None = None
) -> list[Prediction]:
    """Predict the label of each row of `embeddings` [N, d] from its `k` nearest images that have a label.

    Args:
        searcher: of a gallery with labels.
        embeddings: of the images.
        k: number of neighbours that vote.
        exclude: for each image the row of the gallery that is the image itself and has no vote, -1 where there is none.
    """
    check_count(k, name="k", caller="predict_labels")
    labels = searcher.gallery.images.labels
    labelled = np.flatnonzero([bool(label) for label in labels])
    if not len(labelled):
        raise ValueError("predict_labels: no image of the gallery has a label, so there is nothing to predict")
    itself = [-1] * len(embeddings) if exclude is None else exclude
    wanted = k + 1 if len(labelled) == len(labels) else UNLABELLED_FACTOR * k + 1
    found = _others(searcher.search(embeddings, wanted), itself)
    voters = [[(score, row) for score, row in ranked if labels[row]][:k] for ranked in found]
    # where most have no label, or those without are near, too few with one are among those found
    short = [
        query
        for query, own in enumerate(itself)
        if len(voters[query]) < min(k, len(labelled) - (own >= 0 and bool(labels[own])))
    ]
    for first in range(0, len(short), AT_ONCE):
        part = short[first : first + AT_ONCE]
        nearest = _others(searcher.search(embeddings[part], k + 1, among=labelled), [itself[query] for query in part])
        for query, ranked in zip(part, nearest, strict=True):
            voters[query] = ranked[:k]
    return [
        _elect([(score, labels[row]) for score, row in votes], ranked[0][1] if ranked else -1)
        for votes, ranked in zip(voters, found, strict=True)
    ]


def _others(found: tuple[NDArray[np.float32], NDArray[np.int64]], itself: Sequence[int]) -> list[list[tuple[float, int]]]:
    """Scores and rows that a search found for each image, best first, without the image itself."""
    return [
        [(score, row) for score, row in zip(scores, rows, strict=True) if row != own]
        for scores, rows, own in zip(*(part.tolist() for part in found), itself, strict=True)
    ]


def _elect(votes: list[tuple[float, str]], nearest: int) -> Prediction:
    if not votes:
        return Prediction("", 0.0, float("nan"), nearest)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for score, label in votes:
        scores[label].append(score)
    winner = max(scores, key=lambda label: (len(scores[label]), np.sum(scores[label])))
    return Prediction(winner, len(scores[winner]) / len(votes), max(scores[winner]), nearest)
