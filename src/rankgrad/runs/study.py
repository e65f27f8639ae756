"""Run a study: one base recipe and lists of changes to it, as a table.

Every run sees the same number of training images, whatever its batch size; the learning rate goes with the root of the batch
size, the rule for Adam, and its warm-up keeps its pace.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rankgrad.runs.data_cache import DataCache
from rankgrad.runs.ledger import Entry, Ledger, as_csv, key_of, markdown, percentages
from rankgrad.runs.pipeline import train_and_evaluate
from rankgrad.runs.recipe import Recipe as BaseRecipe
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe

METRICS = ("R@1", "R@4", "mAP", "mAP@R")


@dataclass(frozen=True)
class Variation:
    """One line of a study's table: what of the base is changed, or of a base of its own."""

    group: str
    label: str
    changes: Mapping[str, Any]
    base: BaseRecipe | None = None


@dataclass(frozen=True)
class Study:
    """A base recipe and its variations."""

    name: str
    base: BaseRecipe
    variations: tuple[Variation, ...]

    def chosen(self, pattern: str) -> tuple[Variation, ...]:
        """The variations whose group or label matches a shell pattern or contains it."""
        wanted = pattern.lower() if any(char in pattern for char in "*?[") else f"*{pattern.lower()}*"
        found = tuple(v for v in self.variations if fnmatch(v.group.lower(), wanted) or fnmatch(v.label.lower(), wanted))
        if not found:
            groups = ", ".join(dict.fromkeys(v.group for v in self.variations))
            raise ValueError(f"--only {pattern!r} matches no line of the study {self.name}; its groups are {groups}")
        return found


def run_study(
    study: Study,
    base: Recipe,
    seeds: Sequence[int],
    data: DataCache,
    folder: Path,
    *,
    only: str = "",
    csv: Path | None = None,
    debug: bool = False,
) -> str:
    """Run the chosen variations of `base`, writing `csv` and a table after every run; returns the table."""
    ledger = Ledger(folder / "ledger.jsonl")
    images = len(data.split(base.debug_version() if debug else base, "train").table)
    planned = [(variation, _sized(base, variation, images, debug=debug)) for variation in study.chosen(only)]
    csv = csv or folder / f"{study.name}.csv"
    csv.parent.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[Variation, list[Entry]]] = []
    for number, (variation, recipe) in enumerate(planned, start=1):
        rows.append((variation, []))
        for seed in seeds:
            entry = _finished(variation, replace(recipe, seed=seed), data, folder, ledger, f"{number}/{len(planned)}")
            rows[-1][1].append(entry)
            csv.write_text(as_csv(entry for _, entries in rows for entry in entries), encoding="utf-8")
    text = _table(rows)
    csv.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return text


def _sized(base: Recipe, variation: Variation, images: int, *, debug: bool) -> Recipe:
    recipe = base.with_settings(variation.changes)
    if debug:
        return recipe.debug_version()
    # epochs of the base are passes through the images; a sampler's own epoch may be anything
    steps = max(1, round(base.epochs * images / recipe.batch_size))
    steps = min(base.steps or steps, steps)
    growth = math.sqrt(recipe.batch_size / base.batch_size)
    # where it rises at twice this pace, as over 20 steps with a batch of 3,840, all embeddings are in one point after four
    # steps, and sigmoid ranks have no gradient there
    warmup_steps = min(round(base.warmup_steps * growth), steps // 2)
    return replace(recipe, lr=recipe.lr * growth, steps=steps, warmup_steps=warmup_steps)


def _finished(variation: Variation, recipe: Recipe, data: DataCache, folder: Path, ledger: Ledger, number: str) -> Entry:
    key = key_of(recipe, "test")
    known = ledger.get(key)
    if known:
        # the same settings may stand in several groups
        return replace(known, group=variation.group, label=variation.label, changes=dict(variation.changes))
    print(f"{number} {variation.group}: {variation.label}, seed {recipe.seed}", flush=True)
    scores, seconds = train_and_evaluate(recipe, data, folder / "runs" / key, splits=["test"])
    entry = Entry(key, variation.group, variation.label, dict(variation.changes), recipe.seed, "test", scores["test"], seconds)
    ledger.add(entry)
    return entry


def _table(rows: Sequence[tuple[Variation, Sequence[Entry]]]) -> str:
    parts = []
    for group in dict.fromkeys(variation.group for variation, _ in rows):
        lines = [
            [variation.label, *(percentages(entries, metric) for metric in METRICS), f"{sum(e.seconds for e in entries):.0f} s"]
            for variation, entries in rows
            if variation.group == group
        ]
        parts.append(markdown([group, *METRICS, "time"], lines))
    return "\n\n".join(parts)
