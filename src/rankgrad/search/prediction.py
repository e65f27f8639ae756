"""Labels by nearest neighbours: the label that most of the neighbours of an image carry."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_count
from rankgrad.search.searcher import Searcher

# neighbours asked for so that enough with a label are among them, where some have none
UNLABELLED_FACTOR = 4


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
    labelled = sum(map(bool, labels))
    if not labelled:
        raise ValueError("predict_labels: no image of the gallery has a label, so there is nothing to predict")
    itself = [-1] * len(embeddings) if exclude is None else exclude
    wanted = k + 1 if labelled == len(labels) else UNLABELLED_FACTOR * k + 1
    predictions = []
    for scores, rows, own in zip(*(part.tolist() for part in searcher.search(embeddings, wanted)), itself, strict=True):
        ranked = [(score, row) for score, row in zip(scores, rows, strict=True) if row != own]
        votes = [(score, labels[row]) for score, row in ranked if labels[row]][:k]
        predictions.append(_elect(votes, ranked[0][1] if ranked else -1))
    return predictions


def _elect(votes: list[tuple[float, str]], nearest: int) -> Prediction:
    if not votes:
        return Prediction("", 0.0, float("nan"), nearest)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for score, label in votes:
        scores[label].append(score)
    winner = max(scores, key=lambda label: (len(scores[label]), np.sum(scores[label])))
    return Prediction(winner, len(scores[winner]) / len(votes), max(scores[winner]), nearest)
