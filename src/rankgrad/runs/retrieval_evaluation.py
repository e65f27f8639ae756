"""A trained network on test splits: embeddings, metrics under the data set's protocol, and the files that reports read."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rankgrad.data.preprocessing import Preprocessing
from rankgrad.data.table import Table
from rankgrad.eval import Result, evaluate_sharded, evaluate_table, expected_memory
from rankgrad.eval.embedding_blocks import Array
from rankgrad.models import Embedder, embed_multiscale
from rankgrad.runs.data_cache import WITH_DISTRACTORS, DataCache, RunContext, Split
from rankgrad.runs.embedding import embed, embed_native_shape
from rankgrad.runs.recipe import Published
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.runs.retrieval_task import ordered_batches
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.progress import Progress

# nearest neighbours that are kept of every query, for pictures
NEIGHBOURS = 20


@dataclass(frozen=True, eq=False)
class Tested:
    """A split, the embeddings that this process has of it and what all of them score, which the first process knows."""

    split: str
    table: Table
    embeddings: NDArray[np.float32]
    result: Result | None


class MultiScale(nn.Module):
    """A network that describes an image at several scales."""

    def __init__(self, model: Embedder, scales: Sequence[float]) -> None:
        super().__init__()
        self.model, self.scales = model, tuple(scales)

    def forward(self, images: Tensor) -> Tensor:
        return embed_multiscale(self.model, images, self.scales)


def embeddings_of(recipe: Recipe, model: Embedder, split: Split, context: RunContext) -> Tensor:
    """[N, d] of this process's share of the rows that are meant, in their order, on the CPU."""
    described = model if recipe.scales == (1.0,) else MultiScale(model, recipe.scales)
    rows = None
    if context.processes.size > 1:
        rows = (np.arange(len(split.table)) if split.rows is None else split.rows)[context.processes.shard(len(split.labels))]
    return embed(
        described,
        ordered_batches(recipe, split, context, rows),
        device=context.device,
        precision=recipe.precision,
        name=f"embedding {split.table.name}",
        shown=context.processes.first,
    )


def score_shares(embeddings: Array, table: Table, context: RunContext, **options: Any) -> Result | None:
    """`evaluate_table` of what all processes hold of a table; None on all but the first."""
    own = context.processes.shard(len(table))
    marks: dict[str, Any] = {
        name: None if (values := getattr(table, name)) is None else values[own]
        for name in ("is_query", "is_gallery", "categories")
    }
    return evaluate_sharded(embeddings, table.labels[own], **marks, device=context.device, **options)


class RetrievalEvaluator:
    """Tests one network on one split after another; landmark images are described once, whatever lists they are in."""

    def __init__(
        self, recipe: Recipe, data: DataCache, model: Embedder, folder: Path | None = None, *, announce: bool = False
    ) -> None:
        self.recipe, self.data, self.model, self.folder, self.announce = recipe, data, model, folder, announce
        self._described: dict[tuple[Path, int], NDArray[np.float32]] = {}

    def score(self, name: str, *, protocol: str | None = None) -> Tested:
        """Test on the split called `name` (see `DataCache.tests`), under its data set's protocol or another one."""
        data_set_name, split = self.data.tests(self.recipe)[name]
        data_set = self.data.data_set(self.recipe, data_set_name)
        wanted = protocol or data_set.protocols[split]
        options: dict[str, Any] = {"ks": data_set.ks, "device": self.data.context.device}
        if wanted != "vehicleid-official":
            options["neighbours"] = NEIGHBOURS
        table = self.data.table(self.recipe, split, data_set_name)
        context = self.data.context
        if table.ground_truth is None:
            opened = self.data.split(self.recipe, split, data_set_name)
            embeddings = embeddings_of(self.recipe, self.model, opened, context).numpy()
            table = opened.table
            if context.processes.size > 1:
                return Tested(name, table, embeddings, self._of_all(name, table, embeddings, wanted, options))
        elif not context.processes.first:
            # one image at a time, of any shape: a few thousand of them, described by the first
            return Tested(name, table, np.empty((0, self.model.dim), np.float32), None)
        else:
            embeddings = self._landmarks(table)
            if name.endswith(WITH_DISTRACTORS):
                gallery = self.data.table(self.recipe, "distractors", data_set_name)
                out = None if self.folder is None else self.folder / "eval" / name / "distractors.npy"
                options["distractors"] = self._landmarks(gallery, out)
        return Tested(name, table, embeddings, self._evaluated(name, table, embeddings, wanted, options))

    def _evaluated(
        self, name: str, table: Table, embeddings: NDArray[np.float32], protocol: str, options: dict[str, Any]
    ) -> Result:
        if self.announce:
            print(f"evaluating {name}: {_need(embeddings, table, options['ks'])}", flush=True)
        with _Meter(f"evaluating {name}") as meter:
            return evaluate_table(embeddings, table, protocol=protocol, progress=meter, **options)

    def _of_all(
        self, name: str, table: Table, embeddings: NDArray[np.float32], protocol: str, options: dict[str, Any]
    ) -> Result | None:
        """By all processes where the protocol can be divided, else by the first, which is sent the embeddings."""
        context = self.data.context
        if protocol in ("all-vs-all", "query-gallery"):
            shared = {key: value for key, value in options.items() if key != "device"}
            with _Meter(f"evaluating {name}", shown=context.processes.first) as meter:
                return score_shares(embeddings, table, context, progress=meter, **shared)
        blocks = list(context.processes.gather_to_first(embeddings))
        return self._evaluated(name, table, np.concatenate(blocks), protocol, options) if blocks else None

    def _landmarks(self, table: Table, out: Path | None = None) -> NDArray[np.float32]:
        key = (table.root, hash(table.paths))
        if key not in self._described:
            recipe, device = self.recipe, self.data.context.device
            preprocess = Preprocessing(recipe.size, native_shape=True)
            self._described[key] = embed_native_shape(
                self.model, table, preprocess, scales=recipe.scales, device=device, out=out
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

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self.name, self.shown = name, shown
        self.progress: Progress | None = None

    def __enter__(self) -> "_Meter":
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.close()

    def __call__(self, done: int, total: int) -> None:
        if self.progress is None:
            self.progress = Progress(total, self.name, unit="scores", shown=self.shown)
        self.progress.advance(done - self.progress.done)


def save(tested: Tested, folder: Path, processes: Processes = ALONE, *, debug: bool = False) -> None:
    """RUN/eval/<split>/: the metrics last, so that whoever finds them finds the rest. The first process writes."""
    place = folder / "eval" / tested.split
    table = tested.table
    if processes.first:
        place.mkdir(parents=True, exist_ok=True)
    _save_embeddings(place / "embeddings.npy", tested.embeddings, len(table), processes)
    if tested.result is None:
        return
    with (place / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "category", "is_query", "is_gallery"])
        flags = [np.ones(len(table), np.bool_) if flag is None else flag for flag in (table.is_query, table.is_gallery)]
        for row, path in enumerate(table.paths):
            writer.writerow([path, int(table.labels[row]), _category(table, row), *(int(flag[row]) for flag in flags)])
    extra = {"root": str(table.root), "table": table.name, "debug": debug}
    tested.result.save(place, split=tested.split, category_names=table.category_names, extra=extra)


def _save_embeddings(path: Path, own: NDArray[np.float32], rows: int, processes: Processes) -> None:
    """Block by block: all embeddings need not fit into the memory of one process."""
    if processes.size == 1:
        np.save(path, own)
        return
    file: NDArray[np.float32] | None = None
    begin = 0
    for block in processes.gather_to_first(own):
        if file is None:
            file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, block.shape[1]))
        file[begin : begin + len(block)] = block
        begin += len(block)


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
