"""BANKING77 and CLINC150: texts with intents, split by intent or as published."""

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

SPLIT_SEED = 0


@dataclass(frozen=True)
class Intents:
    """Texts and their intents; `published_test` marks the texts of the published test file."""

    texts: list[str]
    labels: Rows
    published_test: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, bool]]) -> "Intents":
        texts, names, test = zip(*rows, strict=True)
        labels = np.unique(np.array(names), return_inverse=True)[1]
        return cls(list(texts), labels.astype(np.int64), np.array(test))


@dataclass(frozen=True)
class Split:
    """Rows to train on and to test on; without a gallery every test text is ranked against the other test texts."""

    train: Rows
    test: Rows
    gallery: Rows | None = None


def banking77(folder: Path) -> Intents:
    """banking77_train.csv and banking77_test.csv, with the columns text and category."""
    rows = []
    for part in ("train", "test"):
        with (folder / f"banking77_{part}.csv").open(newline="", encoding="utf-8") as file:
            rows += [(row["text"], row["category"], part == "test") for row in csv.DictReader(file)]
    return Intents.of(rows)


def clinc150(folder: Path) -> Intents:
    """data_full.json without the texts that belong to no intent (out of scope)."""
    parts = json.loads((folder / "clinc150_data_full.json").read_text(encoding="utf-8"))
    return Intents.of((text, name, part == "test") for part in ("train", "val", "test") for text, name in parts[part])


DATA: dict[str, Callable[[Path], Intents]] = {"BANKING77": banking77, "CLINC150": clinc150}


def split(intents: Intents, name: str) -> Split:
    """A split by name.

    | name       | train on                           | test                                                              |
    | ---------- | ---------------------------------- | ----------------------------------------------------------------- |
    | disjoint   | all texts of a half of the intents | all texts of the other half, each against the others              |
    | validation | three quarters of that first half  | the rest of that first half, each against the others              |
    | published  | the published training texts       | the published test texts, each against the training texts         |
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(intents.labels.max() + 1)
    half = order[: len(order) // 2]
    fitted = half[: len(half) * 3 // 4]
    if name == "disjoint":
        return Split(_rows_of(intents, half), _rows_of(intents, order[len(half) :]))
    if name == "validation":
        return Split(_rows_of(intents, fitted), _rows_of(intents, half[len(fitted) :]))
    train = np.flatnonzero(~intents.published_test)
    return Split(train, np.flatnonzero(intents.published_test), gallery=train)


def _rows_of(intents: Intents, chosen: Rows) -> Rows:
    return np.flatnonzero(np.isin(intents.labels, chosen))
