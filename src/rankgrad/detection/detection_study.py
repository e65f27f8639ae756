"""Cross-entropy and the AP loss with the same budget: the same data, network, epochs and seeds."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankgrad.detection.detection_recipe import METRIC, DetectionRecipe
from rankgrad.detection.detection_task import TEST, Place, examine, read_split, train
from rankgrad.runs.ledger import Entry, Ledger, as_csv, markdown, percentages
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.study import Study

CHECKPOINT_EVERY = 500


def run_study(
    study: Study,
    changes: Mapping[str, Any],
    seeds: Sequence[int],
    place: Place,
    folder: Path,
    *,
    csv: Path | None = None,
    debug: bool = False,
) -> str:
    """Run every line with every seed, writing `csv` and a table after each; returns the table.

    A study that was stopped goes on where it was: a finished run is a line of a ledger, an unfinished one is resumed.
    """
    ledger = Ledger(folder / "ledger.jsonl")
    csv = csv or folder / f"{study.name}.csv"
    csv.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Entry]] = {}
    text = ""
    for variation in study.variations:
        title = variation.label
        assert isinstance(variation.base, DetectionRecipe), "a detection study has a recipe for each line"
        recipe = variation.base.with_settings(changes)
        if debug:
            # what the command line says stands, also in a shrunk run
            recipe = recipe.debug_version(has_data=place.data is not None).with_settings(changes)
        for seed in seeds:
            seeded = replace(recipe, seed=seed, checkpoint_every=recipe.checkpoint_every or CHECKPOINT_EVERY)
            entry = _finished(study.name, title, seeded, place, folder, ledger, debug=debug)
            rows.setdefault(title, []).append(entry)
            csv.write_text(as_csv(each for entries in rows.values() for each in entries), encoding="utf-8")
            text = _table(study.name, rows)
            csv.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return text


def _finished(
    name: str, title: str, recipe: DetectionRecipe, place: Place, folder: Path, ledger: Ledger, *, debug: bool
) -> Entry:
    text = json.dumps({**recipe.settings(), "study": name, "line": title}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    known = ledger.get(key)
    if known:
        return known
    print(f"{name}: {title}, seed {recipe.seed}", flush=True)
    run = folder / "runs" / f"{recipe.name}-seed{recipe.seed}-{key}"
    training, test = read_split(recipe, place, "train"), read_split(recipe, place, TEST)
    begun = RunFolder(run).checkpoints.pointer("last") is not None
    detector, outcome = train(recipe, place, run, training, test, resume=begun, debug=debug)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    tested = examine(recipe, place, detector, test, run, debug=debug)
    changes = {"loss": recipe.loss, "memory": recipe.memory, "lr": recipe.lr}
    metrics = {**tested.result.metrics(), **{f"AP50 {each.name}": each.average_precision() for each in tested.result.classes}}
    entry = Entry(key, name, title, changes, recipe.seed, TEST, metrics, outcome.seconds)
    ledger.add(entry)
    # a study keeps results and curves; its weights would fill a disk
    shutil.rmtree(RunFolder(run).checkpoints.path)
    return entry


def _table(name: str, rows: Mapping[str, Sequence[Entry]]) -> str:
    metrics = list(next(iter(rows.values()))[0].metrics)
    shown = [METRIC, f"{METRIC}[all-point]", *(each for each in metrics if each.startswith(f"{METRIC} "))]
    lines = []
    for title, entries in rows.items():
        seconds = sum(entry.seconds for entry in entries)
        lines.append([title, str(len(entries)), *(percentages(entries, metric) for metric in shown), f"{seconds:.0f} s"])
    return markdown([name, "seeds", *shown, "time"], lines)
