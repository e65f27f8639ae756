"""Finished runs of a sweep or study, one JSON line each, so that a sweep that was stopped continues where it was."""

import contextlib
import csv
import functools
import hashlib
import io
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rankgrad.runs.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """The result of a finished run on one split.

    Attributes:
        key: digest of its settings and its data, see `key_of`.
        group: heading of its table.
        label: of its line there.
        changes: settings that make the line.
        seed: of the run.
        split: what was tested on.
        metrics: of the last weights.
        seconds: of the whole run.
        intervals: 95% confidence intervals of some metrics.
        curve: metrics over the course of training, each with its `epoch`.
        problem: why there are no metrics, for a run that diverged.
    """

    key: str
    group: str
    label: str
    changes: Mapping[str, Any]
    seed: int
    split: str
    metrics: Mapping[str, float]
    seconds: float
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    curve: Sequence[Mapping[str, float]] = field(default_factory=list)
    problem: str = ""


def key_of(recipe: Recipe, split: str, data: str = "") -> str:
    """Digest of settings, split and data; the recipe's name does not count, nor where a file of weights is, but what is in it.

    Args:
        recipe: its settings.
        split: what is tested on.
        data: fingerprint of the data; without one, the key that ledgers had before data was part of it.
    """
    # settings that came later and are as they were before leave the key of a finished run as it is
    settings = {name: value for name, value in recipe.settings().items() if (name, value) not in recipe.before_setting.items()}
    weights = Path(str(settings.get("weights", "")))
    if weights.is_file():
        state = weights.stat()
        settings["weights"] = _digest_of(weights, state.st_size, state.st_mtime_ns)
    text = json.dumps({**settings, "split": split, **({"data": data} if data else {})}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache
def _digest_of(path: Path, size: int, modified: int) -> str:
    """Of the content of a file, which is read again when its size or date has changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Ledger:
    """A file of JSON lines, which several processes may read and append to. A line that a crash cut short is skipped.

    Args:
        path: the file; made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        self._read = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell() and not path.read_bytes().endswith(b"\n"):
                # the next line would be appended to a cut one
                file.write(b"\n")

    def __len__(self) -> int:
        self._refresh()
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        if key not in self._entries:
            self._refresh()
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        # in one write, so that lines of several processes do not mix
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(entry)).encode() + b"\n")
            os.fsync(file.fileno())

    def _refresh(self) -> None:
        """Read the complete lines that were added since the last time."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, TypeError):
                entry = Entry(**json.loads(line))
                self._entries[entry.key] = entry


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation between runs (n - 1); the deviation of a single run is 0."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percentages(entries: Sequence[Entry], metric: str) -> str:
    """Mean of a metric in percent, with the standard deviation if there are several runs, and how many diverged."""
    diverged = [entry for entry in entries if entry.problem]
    if diverged:
        entries = [entry for entry in entries if not entry.problem]
        rest = f"{percentages(entries, metric)}, " if entries else ""
        return f"{rest}{len(diverged)} diverged"
    mean, deviation = mean_and_deviation([entry.metrics[metric] for entry in entries])
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(entries) > 1 else f"{100 * mean:.1f}"


def with_interval(text: str, entries: Sequence[Entry], metric: str) -> str:
    """`text` and the mean of the runs' intervals of a metric in percent, where all have one."""
    if not all(metric in entry.intervals for entry in entries):
        return text
    low, high = (100 * statistics.fmean(entry.intervals[metric][end] for entry in entries) for end in (0, 1))
    return f"{text} [{low:.1f}, {high:.1f}]"


def as_csv(entries: Iterable[Entry]) -> str:
    """A line per run and split."""
    rows = list(entries)
    metrics = list(dict.fromkeys(metric for entry in rows for metric in entry.metrics))
    bounded = list(dict.fromkeys(metric for entry in rows for metric in entry.intervals))
    bounds = [f"{metric} {end}" for metric in bounded for end in ("low", "high")]
    lines: list[list[Any]] = [["group", "label", "changes", "seed", "split", *metrics, *bounds, "seconds"]]
    for entry in rows:
        values = [_decimal(entry.metrics.get(metric)) for metric in metrics]
        ends = [_decimal(end) for metric in bounded for end in entry.intervals.get(metric, (None, None))]
        lines.append([*_names(entry), *values, *ends, f"{entry.seconds:.1f}"])
    return _csv(lines)


def curves_as_csv(entries: Iterable[Entry]) -> str:
    """A line per evaluation while training."""
    rows = [(entry, point) for entry in entries for point in entry.curve]
    metrics = list(dict.fromkeys(name for _, point in rows for name in point if name != "epoch"))
    lines: list[list[Any]] = [["group", "label", "changes", "seed", "split", "epoch", *metrics]]
    lines += [
        [*_names(entry), int(point["epoch"]), *(_decimal(point.get(metric)) for metric in metrics)] for entry, point in rows
    ]
    return _csv(lines)


def _names(entry: Entry) -> list[Any]:
    changes = " ".join(f"{name}={_plain(value)}" for name, value in entry.changes.items())
    return [entry.group, entry.label, changes, entry.seed, entry.split]


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
