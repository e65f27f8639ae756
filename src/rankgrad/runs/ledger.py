"""Many runs as one piece of work. A finished run is a line of a ledger, so a series that was stopped goes on where it was."""

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

from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe


@dataclass(frozen=True)
class Entry:
    """A finished run: what it was, what it scored on one split, how long it took."""

    key: str
    group: str
    label: str
    changes: Mapping[str, Any]
    seed: int
    split: str
    metrics: Mapping[str, float]
    seconds: float


def key_of(recipe: Recipe, split: str) -> str:
    """The same for the same settings and split, whatever the recipe is called."""
    text = json.dumps({**recipe.settings(), "split": split}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Ledger:
    """Finished runs in a file of JSON lines. A line that was cut short by a crash is forgotten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                entry = Entry(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
            self._entries[entry.key] = entry
            whole.append(line)
        # a cut line would swallow the next one
        path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The deviation between runs (n - 1); 0 of a single one."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percentages(entries: Sequence[Entry], metric: str) -> str:
    """Mean and, of several runs, deviation of a metric, in percent."""
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


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns: names to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}{'-' if i == 0 else ':'}" for i, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])
