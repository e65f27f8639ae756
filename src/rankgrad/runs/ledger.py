"""Finished runs of a sweep or study, one JSON line each, so that a sweep that was stopped continues where it was."""

import csv
import hashlib
import io
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankgrad._files import replace_file
from rankgrad.runs.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """The result of a finished run on one split."""

    key: str
    group: str
    label: str
    changes: Mapping[str, Any]
    seed: int
    split: str
    metrics: Mapping[str, float]
    seconds: float


def key_of(recipe: Recipe, split: str) -> str:
    """Digest of settings and split; the recipe's name does not count."""
    text = json.dumps({**recipe.settings(), "split": split}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Ledger:
    """A file of JSON lines. A line that a crash cut short is dropped.

    Args:
        path: the file; made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                entry = Entry(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
            self._entries[entry.key] = entry
            complete.append(line)
        # the next line would be appended to a cut one
        replace_file(path, "".join(f"{line}\n" for line in complete))

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation between runs (n - 1); the deviation of a single run is 0."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percentages(entries: Sequence[Entry], metric: str) -> str:
    """Mean of a metric in percent, with the standard deviation if there are several runs."""
    mean, deviation = mean_and_deviation([entry.metrics[metric] for entry in entries])
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(entries) > 1 else f"{100 * mean:.1f}"


def as_csv(entries: Iterable[Entry]) -> str:
    """A line per run and split."""
    rows = list(entries)
    metrics = list(dict.fromkeys(metric for entry in rows for metric in entry.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "label", "changes", "seed", "split", *metrics, "seconds"])
    for entry in rows:
        changes = " ".join(f"{name}={_plain(value)}" for name, value in entry.changes.items())
        values = [f"{entry.metrics[metric]:.6f}" if metric in entry.metrics else "" for metric in metrics]
        writer.writerow([entry.group, entry.label, changes, entry.seed, entry.split, *values, f"{entry.seconds:.1f}"])
    return text.getvalue()


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
