"""A grid over any settings: validation classes select, and the selected setting is trained on all classes and tested once.

The test classes play no part in the selection. Data is read and decoded once for all runs.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankgrad._files import replace_file
from rankgrad._messages import did_you_mean, markdown_table, plural
from rankgrad.runs.ledger import Entry, as_csv, mean_and_deviation, percentages
from rankgrad.runs.recipe import flag_of, format_value, settings_of
from rankgrad.runs.retrieval_evaluation import is_headline
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.task import VALIDATION
from rankgrad.runs.trials import Trials

# set by the sweep itself
FIXED = ("validation", "seed")
# characters in the name of a folder; most file systems allow 255
LONGEST_NAME = 120


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        chosen: the best combination.
        validated: every combination with its runs on validation classes.
        tested: runs of the chosen one on the test splits.
        metric: what the choice went by.
    """

    chosen: Mapping[str, Any]
    validated: tuple[tuple[Mapping[str, Any], tuple[Entry, ...]], ...]
    tested: tuple[Entry, ...]
    metric: str

    def report(self) -> str:
        """Both tables, and what was chosen."""
        metrics = [self.metric, *(name for name in ("mAP", "mAP@R") if name != self.metric)]
        rows = []
        for changes, entries in self.validated:
            known = [name for name in metrics if all(entry.problem or name in entry.metrics for entry in entries)]
            mark = " *" if changes == self.chosen else ""
            rows.append([label_of(changes) + mark, *(percentages(entries, name) if name in known else "" for name in metrics)])
        splits: dict[str, list[Entry]] = {}
        for entry in self.tested:
            splits.setdefault(entry.split, []).append(entry)
        test_metrics = list(dict.fromkeys(name for entry in self.tested for name in entry.metrics if is_headline(name)))
        tests = [
            [split, *(percentages(entries, name) if all(name in e.metrics for e in entries) else "" for name in test_metrics)]
            for split, entries in splits.items()
        ]
        seeds = plural(len({entry.seed for entry in self.tested}), "seed")
        return "\n".join(
            [
                f"validation classes, {seeds}, best {self.metric} marked *",
                markdown_table(["setting", *metrics], rows),
                "",
                f"test, {label_of(self.chosen)}, trained on all training classes",
                markdown_table(["split", *test_metrics], tests),
            ]
        )


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`lr=1e-4,3e-4` as {"lr": (1e-4, 3e-4)}; values of a setting that is itself a list are separated by `/`."""
    grid: dict[str, tuple[Any, ...]] = {}
    settings = settings_of(RetrievalRecipe)
    for text in texts:
        flag, equals, values = text.partition("=")
        name = flag.strip().removeprefix("--").replace("-", "_")
        if not equals or not values:
            raise ValueError(f"--grid must be SETTING=VALUE,VALUE,..., got {text!r}")
        if name not in settings:
            raise ValueError(
                f"--grid: there is no setting {name!r}: "
                f"{did_you_mean(name, settings, otherwise='`rankgrad train --help` lists all')}"
            )
        if name in FIXED or name in grid:
            why = "is given twice" if name in grid else "is set by the sweep itself: see --seeds"
            raise ValueError(f"--grid: {name} {why}")
        entry = settings[name]
        parts = values.split("/" if entry.is_tuple else ",")
        grid[name] = tuple(dict.fromkeys(entry.parse(part.strip()) for part in parts))
    return grid


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the grid's values; the last setting varies fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def label_of(changes: Mapping[str, Any]) -> str:
    """`lr=0.0001 bins=10`."""
    return " ".join(f"{name}={format_value(value)}" for name, value in changes.items()) or "unchanged"


def run_sweep(
    task: RetrievalTask, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int], folder: Path, *, metric: str = "R@1"
) -> SweepResult:
    """Run the grid, choose on validation classes by the mean over `seeds`, retrain and test the choice.

    Args:
        task: the base, with its data.
        grid: values to try, by setting.
        seeds: every combination is run with each of them.
        folder: where the runs go.
        metric: what to choose by.
    """
    recipe = task.recipe
    trials = Trials(folder, checkpoints="all")
    # all combinations are checked before the first one is trained: a wrong value in the last should not cost hours
    planned = [(changes, recipe.with_settings(changes)) for changes in combinations(grid)]
    validated = []
    for changes, variant in planned:
        entries = tuple(
            entry
            for seed in seeds
            for entry in _entries(task.with_recipe(replace(variant, seed=seed)).for_selection(), changes, trials, VALIDATION)
        )
        if not entries[0].problem and metric not in entries[0].metrics:
            raise ValueError(f"--metric must be one of {', '.join(entries[0].metrics)}, got {metric!r}")
        validated.append((changes, entries))
    chosen, _ = max(validated, key=lambda pair: _mean_without_divergence(pair[1], metric))
    final = replace(recipe, validation="none").with_settings(chosen)
    tested = tuple(
        entry
        for seed in seeds
        for entry in _entries(task.with_recipe(replace(final, seed=seed)), chosen, trials, "test")
    )  # fmt: skip
    found = SweepResult(chosen, tuple(validated), tested, metric)
    _write(found, recipe, folder)
    return found


def _mean_without_divergence(entries: Sequence[Entry], metric: str) -> float:
    """The mean over the seeds; a setting with which any of them diverges is worse than all others."""
    if any(entry.problem for entry in entries):
        return -math.inf
    return mean_and_deviation([entry.metrics[metric] for entry in entries])[0]


def _entries(task: RetrievalTask, changes: Mapping[str, Any], trials: Trials, group: str) -> list[Entry]:
    splits = [VALIDATION] if group == VALIDATION else list(task.test_splits())
    label = label_of(changes)
    name = "-".join([group, *label.replace("/", "_").split(), f"seed={task.recipe.seed}"])
    return trials.run(
        task,
        splits,
        f"{group}: {label}",
        group=group,
        label=label,
        changes=changes,
        name=name if len(name) <= LONGEST_NAME else "",
    )


def _write(found: SweepResult, recipe: RetrievalRecipe, folder: Path) -> None:
    entries = [entry for _, runs in found.validated for entry in runs] + list(found.tested)
    replace_file(folder / "runs.csv", as_csv(entries))
    summary = {
        "recipe": recipe.name,
        "metric": found.metric,
        "chosen": dict(found.chosen),
        "flags": [f"{flag_of(name)}={format_value(value)}" for name, value in found.chosen.items()],
        "runs": [vars(entry) for entry in entries],
    }
    replace_file(folder / "sweep.json", json.dumps(summary, indent=2) + "\n")
    replace_file(folder / "sweep.md", found.report() + "\n")
