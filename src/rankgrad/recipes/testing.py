"""A trained network on test splits: embeddings, metrics under the data set's protocol, and the files that reports read."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rankgrad.data.table import Table
from rankgrad.eval import Result, evaluate_table, expected_memory
from rankgrad.models import Embedder, describe
from rankgrad.recipes.batches import ordered_batches
from rankgrad.recipes.landmarks import describe_landmarks
from rankgrad.recipes.recipe import Published, Recipe
from rankgrad.recipes.shelf import WITH_DISTRACTORS, Part, Place, Shelf
from rankgrad.train.embedding import embed
from rankgrad.train.progress import Progress
from rankgrad.train.settings import Precision

# nearest neighbours that are kept of every query, for pictures
NEIGHBOURS = 20
PRECISIONS: Mapping[str, Precision] = {"float32": "float32", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True, eq=False)
class Tested:
    """A split, its embeddings and what they score."""

    split: str
    table: Table
    embeddings: NDArray[np.float32]
    result: Result


class AtScales(nn.Module):
    """A network that describes an image at several scales."""

    def __init__(self, model: Embedder, scales: Sequence[float]) -> None:
        super().__init__()
        self.model, self.scales = model, tuple(scales)

    def forward(self, images: Tensor) -> Tensor:
        return describe(self.model, images, self.scales)


def embeddings_of(recipe: Recipe, model: Embedder, part: Part, place: Place) -> Tensor:
    """[N, d] of the rows that are meant, in their order, on the CPU."""
    described = model if recipe.scales == (1.0,) else AtScales(model, recipe.scales)
    return embed(
        described,
        ordered_batches(recipe, part, place),
        device=place.device,
        precision=PRECISIONS[recipe.precision],
        name=f"embedding {part.table.name}",
    )


class Tester:
    """Tests one network on one split after another; landmark images are described once, whatever lists they are in."""

    def __init__(
        self, recipe: Recipe, shelf: Shelf, model: Embedder, folder: Path | None = None, *, announce: bool = False
    ) -> None:
        self.recipe, self.shelf, self.model, self.folder, self.announce = recipe, shelf, model, folder, announce
        self._described: dict[tuple[Path, int], NDArray[np.float32]] = {}

    def score(self, name: str, *, protocol: str | None = None) -> Tested:
        """Test on the split called `name` (see `Shelf.tests`), under its data set's protocol or another one."""
        data_set_name, split = self.shelf.tests(self.recipe)[name]
        data_set = self.shelf.data_set(self.recipe, data_set_name)
        wanted = protocol or data_set.protocols[split]
        options: dict[str, Any] = {"ks": data_set.ks, "device": self.shelf.place.device}
        if wanted != "vehicleid-official":
            options["neighbours"] = NEIGHBOURS
        table = self.shelf.table(self.recipe, split, data_set_name)
        if table.ground_truth is None:
            part = self.shelf.part(self.recipe, split, data_set_name)
            embeddings = embeddings_of(self.recipe, self.model, part, self.shelf.place).numpy()
            table = part.table
        else:
            embeddings = self._landmarks(table)
            if name.endswith(WITH_DISTRACTORS):
                gallery = self.shelf.table(self.recipe, "distractors", data_set_name)
                out = None if self.folder is None else self.folder / "eval" / name / "distractors.npy"
                options["distractors"] = self._landmarks(gallery, out)
        if self.announce:
            print(f"evaluating {name}: {_need(embeddings, table, data_set.ks)}", flush=True)
        with _Meter(f"evaluating {name}") as meter:
            result = evaluate_table(embeddings, table, protocol=wanted, progress=meter, **options)
        return Tested(name, table, embeddings, result)

    def _landmarks(self, table: Table, out: Path | None = None) -> NDArray[np.float32]:
        key = (table.root, hash(table.paths))
        if key not in self._described:
            recipe, device = self.recipe, self.shelf.place.device
            self._described[key] = describe_landmarks(
                self.model, table, size=recipe.size, scales=recipe.scales, device=device, out=out
            )
        return self._described[key]


def _need(embeddings: NDArray[np.float32], table: Table, ks: tuple[int, ...]) -> str:
    """What an evaluation will take, known before it begins."""
    queries = np.arange(len(table)) if table.is_query is None else np.flatnonzero(table.is_query)
    text = f"{len(queries):,} queries among {len(table):,} images"
    if table.ground_truth is not None:
        return text
    if table.is_gallery is None:
        memory = expected_memory(embeddings, table.labels, ks=ks)
    else:
        gallery = table.is_gallery
        memory = expected_memory(
            embeddings[queries], table.labels[queries], embeddings[gallery], table.labels[gallery], ks=ks
        )  # fmt: skip
    return f"{text}, at most {memory / 2**20:,.0f} MiB of memory"


class _Meter:
    """Progress of an evaluation, which tells how much there is to do when it begins."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress: Progress | None = None

    def __enter__(self) -> "_Meter":
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.close()

    def __call__(self, done: int, total: int) -> None:
        if self.progress is None:
            self.progress = Progress(total, self.name, unit="scores")
        self.progress.advance(done - self.progress.done)


def save(tested: Tested, folder: Path, *, debug: bool = False) -> None:
    """RUN/eval/<split>/: the metrics last, so that whoever finds them finds the rest."""
    place = folder / "eval" / tested.split
    place.mkdir(parents=True, exist_ok=True)
    table = tested.table
    np.save(place / "embeddings.npy", tested.embeddings)
    with (place / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "category", "is_query", "is_gallery"])
        flags = [np.ones(len(table), np.bool_) if flag is None else flag for flag in (table.is_query, table.is_gallery)]
        for row, path in enumerate(table.paths):
            writer.writerow([path, int(table.labels[row]), _category(table, row), *(int(flag[row]) for flag in flags)])
    extra = {"root": str(table.root), "table": table.name, "debug": debug}
    tested.result.save(place, split=tested.split, category_names=table.category_names, extra=extra)


def _category(table: Table, row: int) -> str:
    if table.categories is None or table.categories[row] < 0:
        return ""
    return table.category_names[int(table.categories[row])]


def comparison(results: Mapping[str, Result], published: Sequence[Published]) -> str:
    """Metric by metric what was reached, what is published and the difference, in percent, with the protocol."""
    header = ("split", "metric", "got", "published", "difference", "protocol", "source")
    rows: list[tuple[str, ...]] = [header]
    for split, result in results.items():
        wanted: dict[str, Published] = {}
        for number in published:
            if number.split == split:
                wanted.setdefault(number.metric, number)
        shown = [metric for metric in result if metric in wanted or is_headline(metric)]
        rows += [_line(split, metric, result[metric], wanted.get(metric), result.protocol.name) for metric in shown]
    for number in published:
        mean = _mean_of_landmarks(results, number.split)
        if mean is not None:
            rows.append(_line(number.split, number.metric, mean, number, "roxford"))
    kept = [i for i in range(len(header)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    numbers = (2, 3, 4)
    return "\n".join(
        "  ".join(row[i].rjust(widths[i]) if i in numbers else row[i].ljust(widths[i]) for i in kept).rstrip() for row in rows
    )


def _line(split: str, metric: str, value: float, number: Published | None, protocol: str) -> tuple[str, ...]:
    got = f"{100 * value:.1f}"
    if number is None:
        return (split, metric, got, "", "", protocol, "")
    if number.value is None:
        return (split, metric, got, "diverged", "", protocol, number.source)
    return (split, metric, got, f"{number.value:.1f}", f"{100 * value - number.value:+.1f}", protocol, number.source)


def _mean_of_landmarks(results: Mapping[str, Result], split: str) -> float | None:
    """RS@k's means over ROxford and RParis, medium and hard, with distractors and, for "mean", also without."""
    names = {
        "mean": ("roxford5k", "roxford5k+r1m", "rparis6k", "rparis6k+r1m"),
        "mean+r1m": ("roxford5k+r1m", "rparis6k+r1m"),
    }.get(split, ())
    if not names or any(name not in results for name in names):
        return None
    return float(np.mean([results[name][f"mAP[{level}]"] for name in names for level in ("medium", "hard")]))


def is_headline(metric: str) -> bool:
    """Whether tables show it; result.json has all metrics."""
    return metric in ("mAP", "mAP@R") or metric.startswith(("R@", "mAP["))
