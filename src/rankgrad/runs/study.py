"""The papers' ablations on data that anyone has: each study is a list of changes to one base recipe.

On Omniglot the background alphabets train and the evaluation alphabets test. Every run sees the same number of training images,
whatever its batch size; the learning rate goes with the root of the batch size, the rule for Adam, and rises at the same
pace. The network has no batch norm, which would make large and small batches differ by more than their lists, and
begins with whitened embeddings: those of random weights lie in nearly one direction, and the first full steps would throw
them together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rankgrad.recipes.recall_at_k import SIMIX_KS
from rankgrad.recipes.starters import OMNIGLOT
from rankgrad.runs.data_cache import DataCache
from rankgrad.runs.ledger import Entry, Ledger, as_csv, key_of, markdown, percentages
from rankgrad.runs.pipeline import train_and_evaluate
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe

METRICS = ("R@1", "R@4", "mAP", "mAP@R")
# longer than any run: a study keeps results, not checkpoints
NEVER = 10**9


@dataclass(frozen=True)
class Variation:
    """One line of a study's table: what of the base is changed."""

    group: str
    label: str
    changes: Mapping[str, Any]


LOSSES: Mapping[str, str] = {
    "RecallAtKLoss": "recall-at-k",
    "SmoothAPLoss": "smooth-ap",
    "FastAPLoss": "fastap",
    "RamboRecallLoss": "rambo-recall",
    "RamboAPLoss": "rambo-ap",
}
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "class-balanced": {"sampler": "class-balanced"},
    "random classes": {"sampler": "whole-class", "per_class": 0},
    "category-hard": {"sampler": "category-hard", "per_class": 0, "batches_per_pair": 1},
}


def _variations() -> Iterator[Variation]:
    for name in LOSSES:
        for simix in (False, True):
            yield _changed("loss", name, f"{name}{' + SiMix' if simix else ''}", **_mixing(name, simix))
    for name in ("FastAPLoss", "RecallAtKLoss"):
        for title, sampler in SAMPLERS.items():
            yield _changed("sampling", name, f"{name}, {title}", **sampler)
    for batch in (120, 480, 960, 1920, 3840):
        for simix in (False, True):
            title = f"RecallAtKLoss, {batch:,}{' + SiMix' if simix else ''}"
            yield _changed("batch size", "RecallAtKLoss", title, batch_size=batch, **_mixing("RecallAtKLoss", simix))
    for bins in (2, 5, 10, 20, 50):
        yield _changed("bins", "FastAPLoss", f"FastAPLoss, {bins} bins", bins=bins)
    for ks in ((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        yield _changed("k", "RecallAtKLoss", f"RecallAtKLoss, k {', '.join(map(str, ks))}", ks=ks)
    for tau in (0.001, 0.01, 0.1):
        yield _changed("temperature", "RecallAtKLoss", f"RecallAtKLoss, tau {tau:g}", tau=tau)
    for tau_cut in (0.1, 1.0, 10.0):
        yield _changed("temperature", "RecallAtKLoss", f"RecallAtKLoss, tau_cut {tau_cut:g}", tau_cut=tau_cut)
    for memory in (0, 1, 3):
        yield _changed("memory", "RamboRecallLoss", f"RamboRecallLoss, {memory} batches", memory=memory)
    for margin in (0.0, 0.02, 0.05):
        yield _changed("margin", "RamboRecallLoss", f"RamboRecallLoss, margin {margin:g}", margin=margin)


def _mixing(loss: str, simix: bool) -> Mapping[str, Any]:
    # mixtures lengthen the lists of relevant items, so the paper asks for more of them
    return {"simix": simix, **({"ks": SIMIX_KS} if simix and loss == "RecallAtKLoss" else {})}


def _changed(group: str, loss: str, label: str, **changes: Any) -> Variation:
    return Variation(group, label, {"loss": LOSSES[loss], **changes})


@dataclass(frozen=True)
class Study:
    """A base recipe and its variations."""

    name: str
    base: Recipe
    variations: tuple[Variation, ...]

    def chosen(self, pattern: str) -> tuple[Variation, ...]:
        """The variations whose group or label matches a shell pattern or contains it."""
        wanted = pattern.lower() if any(char in pattern for char in "*?[") else f"*{pattern.lower()}*"
        found = tuple(v for v in self.variations if fnmatch(v.group.lower(), wanted) or fnmatch(v.label.lower(), wanted))
        if not found:
            groups = ", ".join(dict.fromkeys(v.group for v in self.variations))
            raise ValueError(f"--only {pattern!r} matches no line of the study {self.name}; its groups are {groups}")
        return found


STUDIES: Mapping[str, Study] = {
    "omniglot": Study(
        "omniglot",
        replace(
            OMNIGLOT,
            name="omniglot-study",
            lam=4.0,
            margin=0.02,
            checkpoint_every=NEVER,
            evaluate_every=0,
            log_every=50,
        ),
        tuple(_variations()),
    )
}


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
