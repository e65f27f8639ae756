"""Folders of runs as training and testing write them, small and with known contents."""

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_datasets
import numpy as np
from PIL import Image

from rankgrad.eval import evaluate_table

SETTINGS = {
    "data_set": "folder",
    "loss": "fastap",
    "trunk": "convnet",
    "dim": 8,
    "batch_size": 24,
    "lr": 1e-3,
    "ks": [1, 2],
    "seed": 0,
}
PUBLISHED = [
    {"metric": "R@1", "value": 62.7, "source": "FastAP, Table 1", "split": "test", "note": "batch 256"},
    {"metric": "mAP", "value": None, "source": "RaMBO, Table 4", "split": "test", "note": ""},
    {"metric": "R@1", "value": 40.0, "source": "FastAP, Table 9", "split": "large", "note": ""},
]


@dataclass
class Data:
    """Images of a few classes and embeddings around a centre of each."""

    root: Path
    paths: list[str]
    labels: list[int]
    label_names: list[str]
    categories: list[int]
    category_names: list[str]
    is_query: list[bool] | None = None
    is_gallery: list[bool] | None = None

    def embeddings(self, noise: float, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        centres = np.random.default_rng(99).normal(size=(max(self.labels) + 1, 8))
        return (centres[self.labels] + noise * rng.normal(size=(len(self.labels), 8))).astype(np.float32)


def make_data(root: Path, *, classes: int = 9, per_class: int = 4, gallery: bool = False, names: tuple[str, ...] = ()) -> Data:
    """Stripes of `tests/fake_datasets.py`; `names` replace the labels of the first classes."""
    categories = [f"group {i}" for i in range(3)]
    rows = [(label, example) for label in range(classes) for example in range(per_class)]
    data = Data(
        root,
        [f"class {label}/{example}.png" for label, example in rows],
        [label for label, _ in rows],
        [names[label] if label < len(names) else str(label) for label, _ in rows],
        [label % 3 for label, _ in rows],
        categories,
    )
    for path, (label, example) in zip(data.paths, rows, strict=True):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(fake_datasets.picture(label, example)).save(root / path)
    if gallery:
        data.is_query = [example % 2 == 0 for _, example in rows]
        data.is_gallery = [example != 0 for _, example in rows]
    return data


def write_run(
    folder: Path,
    data: Data,
    *,
    noise: float = 0.9,
    seed: int = 0,
    steps: int = 40,
    settings: dict[str, Any] | None = None,
    split: str = "test",
    debug: bool = False,
    options: dict[str, Any] | None = None,
) -> Path:
    """A finished run with one test, by the hands of the library where it is about metrics, else by ours."""
    folder.mkdir(parents=True)
    recipe = {
        "name": "own-images",
        "what": "a test",
        "settings": {**SETTINGS, **(settings or {})},
        "published": PUBLISHED,
        "notes": ["a note of the recipe"],
        "debug": debug,
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    write_journal(folder / "journal.jsonl", steps, seed)
    (folder / "checkpoints").mkdir()
    best = {"folder": "step-00000040", "step": steps, "epoch": 4, "metrics": {"R@1": 0.5}, "selected_on": "validation"}
    (folder / "checkpoints" / "best.json").write_text(json.dumps(best))
    write_test(folder / "eval" / split, data, data.embeddings(noise, seed), options)
    return folder


def write_journal(path: Path, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries: list[dict[str, Any]] = [
        {
            "kind": "start", "step": 0, "recipe": "own-images",
            "versions": {"torch": "2.15.0"}, "hardware": {"device": "cpu", "gpu": "Some GPU"},
            "command": ["rankgrad", "train"], "data": {"train": {"images": 1200, "classes": 30}}, "parameters": 12345,
        }
    ]  # fmt: skip
    for step in range(1, steps + 1):
        exact = 1 - 0.9 * 0.95**step
        numbers = {
            "loss": 1 - exact + 0.02 * rng.random(),
            "batch_R@1": exact,
            "batch_mAP": exact,
            "lr": 1e-3,
            "perfect": exact / 2,
        }
        entries.append({"kind": "step", "step": step, "spread": 0.5, "skipped": 0.0, "pairs_with_gradient": 0.3, **numbers})
        if step % 10 == 0:
            metrics = {"R@1": 0.8 * exact, "mAP": 0.6 * exact}
            entries.append({"kind": "eval", "step": step, "split": "validation", "metrics": metrics})
    entries.append({"kind": "warning", "step": 12, "message": "out of memory at step 12, which is repeated: chunks of 8"})
    entries.append({"kind": "resume", "step": 20, "hardware": {"device": "cuda:0", "gpu": "Other GPU"}})
    entries.append({"kind": "end", "step": steps, "reason": "finished", "seconds": 3725.0})
    stamped = [{"time": "2026-03-01T12:00:00.000+00:00", "epoch": 1, **entry} for entry in entries]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in stamped))


def write_test(place: Path, data: Data, embeddings: np.ndarray, options: dict[str, Any] | None = None) -> None:
    table = SimpleNamespace(labels=np.array(data.labels), categories=np.array(data.categories))
    if data.is_query is not None:
        table.is_query, table.is_gallery = np.array(data.is_query), np.array(data.is_gallery)
    chosen = {"neighbours": 12, "ks": (1, 2, 4)} if options is None else options
    result = evaluate_table(embeddings, table, **chosen)
    extra = {"root": str(data.root), "table": "folder/test"}
    result.save(place, split=place.name, category_names=data.category_names, extra=extra, samples=50)
    np.save(place / "embeddings.npy", embeddings)
    with (place / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "category", "is_query", "is_gallery"])
        for row, path in enumerate(data.paths):
            flags = [1 if marks is None else int(marks[row]) for marks in (data.is_query, data.is_gallery)]
            writer.writerow([path, data.label_names[row], data.category_names[data.categories[row]], *flags])


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
