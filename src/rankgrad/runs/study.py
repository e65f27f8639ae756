"""Studies: lists of changes to one base recipe, each run with several seeds, as tables.

A line may leave settings open. They are chosen on validation classes, one after another, before it is tested.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rankgrad._files import replace_file
from rankgrad._messages import format_duration, markdown_table
from rankgrad.runs.ledger import Entry, as_csv, curves_as_csv, percentages, with_interval
from rankgrad.runs.recipe import Recipe, format_value
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.task import VALIDATION, Task
from rankgrad.runs.trials import NotStartedError, Trials

TEST = "test"
# how far a grid is continued beyond its ends
MOST_EXTENSIONS = 2


@dataclass(frozen=True)
class Grid:
    """Values of a setting to choose from.

    Attributes:
        setting: its name.
        values: what to try, in ascending order where the grid extends.
        extends: go on in the same ratio where the best is the first or last value.
    """

    setting: str
    values: tuple[Any, ...]
    extends: bool = False

    def beyond(self, best: Any, tried: Sequence[Any]) -> float | None:
        """The next value to try when `best` is at an end of those that were tried."""
        if not self.extends or len(tried) - len(self.values) >= MOST_EXTENSIONS:
            return None
        ratio = self.values[1] / self.values[0]
        step = {min(tried): 1 / ratio, max(tried): ratio}.get(best)
        return None if step is None else float(f"{best * step:.3g}")


@dataclass(frozen=True)
class Selection:
    """How a study chooses the settings that its lines leave open: by one shorter run each, on validation classes.

    Attributes:
        metrics: the setting with the largest geometric mean of them is chosen.
        changes: settings of the runs, such as fewer epochs.
        seed: of the runs.
    """

    metrics: tuple[str, ...]
    changes: Mapping[str, Any]
    seed: int = 0

    def score(self, entry: Entry) -> float:
        """What settings are compared by; a run that failed comes last."""
        if entry.problem:
            return -math.inf
        return math.prod(entry.metrics[metric] for metric in self.metrics) ** (1 / len(self.metrics))


@dataclass(frozen=True)
class Variation:
    """A line of a study's table: what is changed in the base, or a recipe in its place, and what is chosen."""

    group: str
    label: str
    changes: Mapping[str, Any]
    base: Recipe | None = None
    grids: tuple[Grid, ...] = ()


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
        selection: how open settings are chosen; None tests every line as it is.
        watches: whether lines are also tested while they train, every `evaluate_every` epochs.
        on_validation: whether lines are compared on validation classes, for choices that others will rely on.
    """

    name: str
    base: Recipe
    variations: tuple[Variation, ...]
    metrics: tuple[str, ...] = ()
    matches_budget: bool = False
    saves_results: bool = False
    selection: Selection | None = None
    watches: bool = False
    on_validation: bool = False

    def chosen(self, pattern: str) -> tuple[Variation, ...]:
        """The variations whose group or label contains `pattern`, or matches it as a shell pattern."""
        wanted = pattern.lower() if any(char in pattern for char in "*?[") else f"*{pattern.lower()}*"
        found = tuple(v for v in self.variations if fnmatch(v.group.lower(), wanted) or fnmatch(v.label.lower(), wanted))
        if not found:
            groups = ", ".join(dict.fromkeys(v.group for v in self.variations))
            raise ValueError(f"--only {pattern!r} matches no line of the study {self.name}; its groups are {groups}")
        return found


@dataclass
class _Line:
    """A variation, its recipe, and its finished runs."""

    variation: Variation
    recipe: Recipe
    chosen: dict[str, Any] = field(default_factory=dict)
    is_chosen: bool = False
    validated: list[Entry] = field(default_factory=list)
    tested: list[Entry] = field(default_factory=list)


def run_study(
    study: Study,
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    only: str = "",
    csv: Path | None = None,
    minutes: float = 0.0,
    share: tuple[int, int] = (0, 1),
    debug: bool = False,
) -> str:
    """Run the chosen lines with every seed; returns the table.

    A file with a line for each run, and the table beside it, are written after every run. A study that was stopped continues
    where it was: a finished run is a line of the ledger. All lines are run with the first seed before the second begins.

    Args:
        study: what to run.
        task: of the base recipe, with its data.
        seeds: every line is run with each of them.
        folder: where the runs go.
        changes: settings that hold for all lines, whatever they change.
        only: which lines, see `Study.chosen`.
        csv: the file, by default in `folder`.
        minutes: stop before the run that would take longer; 0 for no limit.
        share: (i, n) runs every n-th line from the i-th on, counted from 0, and shows what the ledger has of the others: n
            calls with the same folder divide a study. (0, 0) runs nothing.
        debug: run the debug version of each line.
    """
    trials = Trials(
        folder,
        checkpoints="unfinished" if study.saves_results else "none",
        save=study.saves_results,
        minutes=minutes,
        debug=debug,
    )
    csv = csv or folder / f"{study.name}.csv"
    csv.parent.mkdir(parents=True, exist_ok=True)
    changes = changes or {}
    lines = [
        _Line(variation, recipe) for variation, recipe in _planned(study, task, changes, only=only, debug=debug)
    ]  # fmt: skip
    # lines with the same settings are of the same share: their runs have one folder
    turns = {settings: turn for turn, settings in enumerate(dict.fromkeys(_text(line.recipe) for line in lines))}
    text = ""
    for seed in seeds:
        for number, line in enumerate(lines, start=1):
            title = f"{number}/{len(lines)} {line.variation.group}: {line.variation.label}"
            trials.starts = bool(share[1]) and turns[_text(line.recipe)] % share[1] == share[0]
            # out of time, what later lines have in the ledger is still shown
            with contextlib.suppress(NotStartedError):
                if study.selection and seed == seeds[0]:
                    assert isinstance(task, RetrievalTask), "only retrieval has validation classes"
                    _select(study.selection, line, task, trials, title, changes)
                if not study.selection or line.is_chosen:
                    _test(study, line, task, trials, title, seed)
            text = _write(study, lines, csv)
    missing = len(seeds) * len(lines) - sum(len(line.tested) for line in lines)
    if missing:
        reason = f"stopped after {minutes:g} minutes: " if minutes else ""
        text = f"{text}\n\n{reason}{missing} tests are missing; the same command continues"
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


def _text(recipe: Recipe) -> str:
    return json.dumps(recipe.settings(), sort_keys=True)


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


def _select(
    selection: Selection, line: _Line, task: RetrievalTask, trials: Trials, title: str, changes: Mapping[str, Any]
) -> None:  # fmt: skip
    """Choose the open settings of a line, one after another: each with what was chosen before it."""
    shared = {**selection.changes, "seed": selection.seed}
    for grid in line.variation.grids:
        if grid.setting in changes:
            continue
        scores: dict[Any, float] = {}
        waiting = list(grid.values)
        while waiting:
            value = waiting.pop(0)
            tried = {**line.chosen, grid.setting: value}
            recipe = line.recipe.with_settings({**shared, **tried, **changes})
            assert isinstance(recipe, RetrievalRecipe)
            settings = " ".join(f"{name}={format_value(given)}" for name, given in tried.items())
            [entry] = trials.run(
                task.with_recipe(recipe).for_selection(),
                [VALIDATION],
                f"{title}, {settings}",
                group=line.variation.group,
                label=line.variation.label,
                changes=tried,
            )
            line.validated.append(entry)
            scores[value] = selection.score(entry)
            if not waiting:
                further = grid.beyond(max(scores, key=scores.__getitem__), list(scores))
                waiting += [] if further is None else [further]
        line.chosen[grid.setting] = max(scores, key=scores.__getitem__)
    line.is_chosen = True


def _test(study: Study, line: _Line, task: Task, trials: Trials, title: str, seed: int) -> None:
    run = task.with_recipe(replace(line.recipe.with_settings(line.chosen), seed=seed))
    if study.on_validation:
        assert isinstance(run, RetrievalTask), "only retrieval has validation classes"
        run = run.for_selection()
    line.tested += trials.run(
        run,
        [VALIDATION if study.on_validation else TEST],
        title,
        group=line.variation.group,
        label=line.variation.label,
        changes={**line.variation.changes, **line.chosen},
        watched_metrics=study.metrics if study.watches else (),
    )


def _write(study: Study, lines: Sequence[_Line], csv: Path) -> str:
    """Write all tables; returns the one of the results."""
    entries = [entry for line in lines for entry in (*line.validated, *line.tested)]
    replace_file(csv, as_csv(entries))
    if study.watches:
        replace_file(csv.with_name(f"{csv.stem}-curves.csv"), curves_as_csv(entries))
    text = _tables(study, [line for line in lines if line.tested])
    replace_file(csv.with_suffix(".md"), text + "\n")
    return text


def _tables(study: Study, lines: Sequence[_Line]) -> str:
    parts = []
    for group in dict.fromkeys(line.variation.group for line in lines):
        found = [line for line in lines if line.variation.group == group]
        metrics = study.metrics or tuple(found[0].tested[0].metrics)
        cells = [
            [
                line.variation.label,
                *(with_interval(percentages(line.tested, metric), line.tested, metric) for metric in metrics),
                *([" ".join(f"{name}={format_value(v)}" for name, v in line.chosen.items())] if study.selection else []),
                format_duration(sum(entry.seconds for entry in line.tested)),
            ]
            for line in found
        ]
        parts.append(markdown_table([group, *metrics, *(["chosen"] if study.selection else []), "time"], cells))
    return "\n\n".join(parts)
