"""Result of an evaluation: metrics by name, the per-query values behind them, and their protocol."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_choice, check_count
from rankgrad._files import atomic_file, replace_file
from rankgrad._messages import plural
from rankgrad.eval.label_codes import list_labels

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Protocol:
    """A way to turn embeddings into metrics. Values under different protocols cannot be compared."""

    name: str
    rule: str  # what is a query, what is a candidate, what is excluded, what is averaged
    used_for: str
    run: Callable[[Any], "Result"] = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class Result(Mapping[str, float]):
    """A mapping from metric names such as "R@1", "mAP" or "mAP[hard]" to means over queries, all in [0, 1].

    Rows of `per_query` are the queries that have a relevant candidate, in the order of `query_index`. Queries without one are
    in no mean; `skipped` is their number.
    """

    protocol: Protocol
    columns: Mapping[str, str]  # metric -> column of per_query that it is the mean of
    per_query: Mapping[str, NDArray[Any]]
    query_index: Index  # row of the embeddings that each query is
    labels: Index | None = None  # of the queries
    categories: Index | None = None
    label_names: tuple[str, ...] | None = None  # of labels given as strings
    category_names: tuple[str, ...] | None = None
    skipped: int = 0  # queries without a relevant candidate
    skipped_labels: Index | None = None  # their labels, each once
    memory: int = 0  # bytes that `expected_memory` predicted
    deviations: Mapping[str, float] = field(default_factory=dict)  # between repeats, where the protocol repeats
    notes: tuple[str, ...] = ()
    neighbours: tuple[Index, NDArray[np.float32]] | None = None  # [Q, k] candidates and their scores, best first

    def __post_init__(self) -> None:
        means = {metric: _mean(self.per_query[column]) for metric, column in self.columns.items()}
        object.__setattr__(self, "_means", means)
        object.__setattr__(self, "_intervals", {})

    def __getitem__(self, metric: str) -> float:
        means: dict[str, float] = self.__dict__["_means"]
        if metric not in means:
            raise KeyError(f"{metric!r} was not computed under {self.protocol.name}: there are {', '.join(means)}")
        return means[metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __repr__(self) -> str:
        shown = ", ".join(f"{metric}: {value:.4f}" for metric, value in self.items())
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"Result({self.protocol.name}, {len(self.query_index)} queries{skipped}, {shown})"

    @property
    def coverage(self) -> str:
        """How many queries the metrics are means of, and how many were skipped, for which reason."""
        told = plural(len(self.query_index), "query", "queries")
        if not self.skipped:
            return told
        one = self.skipped == 1
        reason = {
            "all-vs-all": "the only item of its class" if one else "the only items of their classes",
            "query-gallery": f"no other item of {'its class' if one else 'their classes'} in the gallery",
        }.get(self.protocol.name, "no relevant candidate")
        named = ""
        if self.skipped_labels is not None and self.label_names is not None:
            named = f": {list_labels(self.skipped_labels, self.label_names)}"
        return f"{told}, {self.skipped:,} skipped ({reason}{named})"

    def queries(self, metric: str) -> int:
        """Number of queries that the metric is the mean of."""
        return int((~np.isnan(self.per_query[self.columns[metric]])).sum())

    def intervals(
        self, level: float = 0.95, samples: int = 1000, seed: int = 0, *, by: Literal["query", "class"] = "query"
    ) -> dict[str, tuple[float, float]]:
        """Bootstrap confidence interval of every metric; computed once for the same arguments.

        Args:
            level: confidence level.
            samples: number of resamplings.
            seed: seed of the resampling.
            by: "query" resamples single queries, for statements about other queries of these classes; "class" resamples
                whole classes, for statements about other classes, which is wider where queries of a class succeed together.
        """
        check_choice(by, ("query", "class"), name="by", caller="Result.intervals")
        known: dict[Any, dict[str, tuple[float, float]]] = self.__dict__["_intervals"]
        key = (level, samples, seed, by)
        if key not in known:
            units = self.query_index if by == "query" else self._labels_or_error("intervals by class")
            values = np.stack([self.per_query[column].astype(np.float64) for column in self.columns.values()], axis=1)
            bounds = bootstrap_intervals(values, units, level=level, samples=samples, seed=seed).tolist()
            known[key] = {metric: (low, high) for metric, (low, high) in zip(self.columns, bounds, strict=True)}
        return dict(known[key])

    def by_class(self) -> dict[Any, dict[str, float]]:
        """Means over the queries of each label, and the number of its "queries"; keys are the labels that were given."""
        means = self._grouped(self._labels_or_error("by_class"))
        names = self.label_names
        return dict(means) if names is None else {names[label]: value for label, value in means.items()}

    def by_category(self, names: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Means over the queries of each category, by name where `names` has one; -1 is "unlabelled"."""
        if self.categories is None:
            raise ValueError("Result.by_category: no categories were given to the evaluation; pass categories=")
        names = names or self.category_names or ()
        return {
            "unlabelled" if category == -1 else names[category] if 0 <= category < len(names) else str(category): means
            for category, means in self._grouped(self.categories).items()
        }

    def _labels_or_error(self, what: str) -> Index:
        if self.labels is None:
            raise ValueError(f"Result.{what}: the queries of {self.protocol.name} have no classes")
        return self.labels

    def _grouped(self, keys: Index) -> dict[int, dict[str, float]]:
        unique, group = np.unique(keys, return_inverse=True)
        table: dict[str, list[float]] = {"queries": np.bincount(group).tolist()}
        for metric, column in self.columns.items():
            values = self.per_query[column].astype(np.float64)
            known = ~np.isnan(values)
            sizes = np.bincount(group, known, minlength=len(unique))
            sums = np.bincount(group, np.where(known, values, 0), minlength=len(unique))
            table[metric] = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan).tolist()
        return {
            int(key): dict(zip(table, row, strict=True))
            for key, row in zip(unique, zip(*table.values(), strict=True), strict=True)
        }

    def table(self, *, intervals: bool = False, level: float = 0.95) -> str:
        """Metrics as text, below the name of the protocol."""
        bounds = self.intervals(level) if intervals else {}
        width = max(map(len, self))
        lines = [f"{self.protocol.name}: {self.coverage}"]
        for metric, value in self.items():
            line = f"  {metric:<{width}}  {value:.4f}"
            if metric in self.deviations:
                line += f"  +- {self.deviations[metric]:.4f} between repeats"
            if metric in bounds:
                line += f"  [{bounds[metric][0]:.4f}, {bounds[metric][1]:.4f}] at {level:.0%}"
            if self.queries(metric) != len(self.query_index):
                line += f"  of {self.queries(metric):,} queries"
            lines.append(line)
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        split: str = "",
        category_names: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        samples: int = 1000,
    ) -> None:
        """Write result.json and queries.npz; existing files are replaced atomically.

        Args:
            folder: created if it does not exist.
            split: name of the split, stored in result.json.
            category_names: names for the means per category.
            extra: more entries of result.json, such as the root of the image paths.
            samples: number of resamplings of the intervals.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        report = {
            "split": split,
            "protocol": self.protocol.name,
            "rule": self.protocol.rule,
            "metrics": dict(self),
            "intervals": {metric: list(bounds) for metric, bounds in self.intervals(samples=samples).items()},
            "deviations": dict(self.deviations),
            "per_category": {} if self.categories is None else self.by_category(category_names),
            "queries": len(self.query_index),
            "skipped": self.skipped,
            "notes": list(self.notes),
            **(extra or {}),
        }
        text = json.dumps(_plain(report), indent=2, allow_nan=False)
        arrays: dict[str, Any] = {"index": self.query_index, **self.per_query}
        if self.labels is not None:
            arrays["label"] = self.labels
        if self.categories is not None:
            arrays["category"] = self.categories
        if self.neighbours is not None:
            arrays["neighbours"], arrays["scores"] = self.neighbours
        # the arrays first: where result.json exists they do too
        with atomic_file(folder / "queries.npz") as unfinished:
            np.savez(unfinished, **arrays)
        replace_file(folder / "result.json", text + "\n")


def bootstrap_intervals(
    values: NDArray[np.float64], units: NDArray[np.int64], *, level: float, samples: int, seed: int
) -> NDArray[np.float64]:
    """[M, 2] bootstrap percentile intervals of the column means of `values` [Q, M]; NaN entries are ignored.

    Rows of one unit are resampled together, so rows that depend on each other belong to one unit.
    """
    check_count(samples, name="samples", caller="Result.intervals")
    check_count(seed, name="seed", caller="Result.intervals", least=0)
    if not 0 < level < 1:
        raise ValueError(f"Result.intervals: level must be above 0 and below 1, got {level!r}")
    unit = np.unique(units, return_inverse=True)[1]
    count = int(unit.max()) + 1
    counted = ~np.isnan(values)
    weights = np.concatenate((np.where(counted, values, 0.0), counted), axis=1)
    totals = np.zeros((count, weights.shape[1]))
    np.add.at(totals, unit, weights)
    rng = np.random.default_rng(seed)
    # one sample at a time: all draws at once would be samples x queries
    drawn = np.stack([np.bincount(rng.integers(count, size=count), minlength=count) @ totals for _ in range(samples)])
    sums, sizes = np.split(drawn, 2, axis=1)
    means = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)
    tail = 50 * (1 - level)
    bounds = np.full((values.shape[1], 2), np.nan)
    some = (sizes > 0).any(axis=0)  # numpy warns about an empty column
    bounds[some] = np.nanpercentile(means[:, some], (tail, 100 - tail), axis=0).T
    return bounds


def _mean(values: NDArray[Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _plain(value: Any) -> Any:
    """Value as JSON: NaN, the mean of nothing, becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
