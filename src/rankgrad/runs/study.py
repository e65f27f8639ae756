"""Studies: lists of changes to one base recipe, each run with several seeds, as tables."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rankgrad._files import replace_file
from rankgrad._messages import format_duration, markdown_table
from rankgrad.runs.ledger import Entry, Ledger, as_csv, key_of, percentages
from rankgrad.runs.pipeline import train_and_evaluate
from rankgrad.runs.recipe import Recipe
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import Task

TEST = "test"


@dataclass(frozen=True)
class Variation:
    """A line of a study's table: what is changed in the base, or a recipe in its place."""

    group: str
    label: str
    changes: Mapping[str, Any]
    base: Recipe | None = None


@dataclass(frozen=True)
class Study:
    """A base recipe and its variations.

    Attributes:
        name: of the study.
        base: what all lines have in common.
        variations: the lines.
        metrics: columns of the table, () for all metrics there are.
        matches_budget: whether all lines see as many training images, whatever their batch size (`match_budget`).
        saves_results: whether the folder of each run keeps its result.
    """

    name: str
    base: Recipe
    variations: tuple[Variation, ...]
    metrics: tuple[str, ...] = ()
    matches_budget: bool = False
    saves_results: bool = False

    def chosen(self, pattern: str) -> tuple[Variation, ...]:
        """The variations whose group or label contains `pattern`, or matches it as a shell pattern."""
        wanted = pattern.lower() if any(char in pattern for char in "*?[") else f"*{pattern.lower()}*"
        found = tuple(v for v in self.variations if fnmatch(v.group.lower(), wanted) or fnmatch(v.label.lower(), wanted))
        if not found:
            groups = ", ".join(dict.fromkeys(v.group for v in self.variations))
            raise ValueError(f"--only {pattern!r} matches no line of the study {self.name}; its groups are {groups}")
        return found


def run_study(
    study: Study,
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    only: str = "",
    csv: Path | None = None,
    debug: bool = False,
) -> str:
    """Run the chosen lines with every seed; returns the table.

    A file with a line for each run, and the table beside it, are written after every run. A study that was stopped continues
    where it was: a finished run is a line of the ledger, an unfinished one is resumed.

    Args:
        study: what to run.
        task: of the base recipe, with its data.
        seeds: every line is run with each of them.
        folder: where the runs go.
        changes: settings that hold for all lines, whatever they change.
        only: which lines, see `Study.chosen`.
        csv: the file, by default in `folder`.
        debug: run the debug version of each line.
    """
    ledger = Ledger(folder / "ledger.jsonl")
    csv = csv or folder / f"{study.name}.csv"
    csv.parent.mkdir(parents=True, exist_ok=True)
    planned = _planned(study, task, changes or {}, only=only, debug=debug)
    rows: list[tuple[Variation, list[Entry]]] = []
    text = ""
    for number, (variation, recipe) in enumerate(planned, start=1):
        rows.append((variation, []))
        for seed in seeds:
            run = task.with_recipe(replace(recipe, seed=seed))
            entry = _entry(study, variation, run, folder, ledger, f"{number}/{len(planned)}", debug=debug)
            rows[-1][1].append(entry)
            replace_file(csv, as_csv(entry for _, entries in rows for entry in entries))
            text = _tables(study, rows)
            replace_file(csv.with_suffix(".md"), text + "\n")
    return text


def _planned(study: Study, task: Task, changes: Mapping[str, Any], *, only: str, debug: bool) -> list[tuple[Variation, Recipe]]:
    """Every line with its recipe. What the command line says holds for all of them."""
    found = []
    for variation in study.chosen(only):
        base = (variation.base or study.base).with_settings(changes)
        recipe = base.with_settings({**variation.changes, **changes})
        if debug:
            recipe = recipe.debug_version(has_data=task.context.data is not None).with_settings(changes)
        elif study.matches_budget:
            images = task.with_recipe(base).data_counts()["train"]["images"]
            recipe = match_budget(base, recipe, images)
        found.append((variation, recipe))
    return found


def match_budget(base: Any, recipe: Any, images: int) -> Any:
    """`recipe` with the steps in which it sees as many images as `base` in its epochs, of `images` each.

    The learning rate goes with the root of the batch size, the rule for Adam, and its warm-up keeps its pace.
    """
    # an epoch of the base is a pass over the images; that of a sampler may be anything
    steps = max(1, round(base.epochs * images / recipe.batch_size))
    steps = min(base.steps or steps, steps)
    growth = math.sqrt(recipe.batch_size / base.batch_size)
    # with a warm-up twice as fast, 20 steps at a batch of 3,840, all embeddings collapse within four steps, and sigmoid ranks
    # have no gradient there
    warmup_steps = min(round(base.warmup_steps * growth), steps // 2)
    return replace(recipe, lr=recipe.lr * growth, steps=steps, warmup_steps=warmup_steps)


def _entry(study: Study, variation: Variation, task: Task, folder: Path, ledger: Ledger, number: str, *, debug: bool) -> Entry:
    key = key_of(task.recipe, TEST)
    known = ledger.get(key)
    if known:
        # the same settings may stand in several groups
        return replace(known, group=variation.group, label=variation.label, changes=dict(variation.changes))
    print(f"{number} {variation.group}: {variation.label}, seed {task.recipe.seed}", flush=True)
    run = RunFolder(folder / "runs" / key)
    scores, seconds = train_and_evaluate(task, run, splits=[TEST], save=study.saves_results, debug=debug)
    seed = task.recipe.seed
    entry = Entry(key, variation.group, variation.label, dict(variation.changes), seed, TEST, scores[TEST], seconds)
    ledger.add(entry)
    # results and curves are kept; the weights of a study would fill a disk
    shutil.rmtree(run.path / "checkpoints")
    return entry


def _tables(study: Study, rows: Sequence[tuple[Variation, Sequence[Entry]]]) -> str:
    parts = []
    for group in dict.fromkeys(variation.group for variation, _ in rows):
        lines = [(variation, entries) for variation, entries in rows if variation.group == group]
        metrics = study.metrics or tuple(lines[0][1][0].metrics)
        cells = [
            [
                variation.label,
                *(percentages(entries, metric) for metric in metrics),
                format_duration(sum(entry.seconds for entry in entries)),
            ]
            for variation, entries in lines
        ]
        parts.append(markdown_table([group, *metrics, "time"], cells))
    return "\n\n".join(parts)
