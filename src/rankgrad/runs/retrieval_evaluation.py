"""A trained network on test splits: embeddings, metrics under a protocol, and the files that reports read."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import Progress, format_bytes, plural, printable
from rankgrad.data.preprocessing import Preprocessing
from rankgrad.data.table import Table
from rankgrad.eval import Result, evaluate_sharded, evaluate_table, expected_memory
from rankgrad.eval.embedding_blocks import Array
from rankgrad.models import Embedder
from rankgrad.runs.data_cache import WITH_DISTRACTORS
from rankgrad.runs.embedding import embed_native_shape
from rankgrad.runs.task import RunContext
from rankgrad.train.processes import Processes

if TYPE_CHECKING:
    from rankgrad.runs.retrieval_task import RetrievalTask

# nearest neighbours that are saved of every query, for pictures
NEIGHBOURS = 20
# protocols under which every process ranks its own queries
SHARDED_PROTOCOLS = ("all-vs-all", "query-gallery")


@dataclass(frozen=True, eq=False)
class RetrievalEvaluation:
    """The result of a network on a split.

    Attributes:
        split: name of the split.
        table: its images.
        embeddings: those of this process.
        result: of all processes; None on all but the first.
        protocol: name of the rules.
        processes: those that computed it.
    """

    split: str
    table: Table
    embeddings: NDArray[np.float32]
    result: Result | None
    protocol: str
    processes: Processes

    @property
    def details(self) -> str:
        """How many queries were skipped, where any were."""
        if self.result is None or not self.result.skipped:
            return ""
        return f"{self.split}: {printable(self.result.coverage)}"

    @property
    def metrics(self) -> Mapping[str, float]:
        return {} if self.result is None else dict(self.result)

    @property
    def headline(self) -> Sequence[str]:
        return [metric for metric in self.metrics if is_headline(metric)]

    def intervals(self) -> Mapping[str, tuple[float, float]]:
        """By resampling queries."""
        return {} if self.result is None else self.result.intervals()

    def write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write embeddings.npy, table.csv, queries.npz and, last, result.json."""
        _write_embeddings(folder / "embeddings.npy", self.embeddings, len(self.table), self.processes)
        if self.result is None:
            return
        _write_table(folder / "table.csv", self.table)
        extra = {"root": str(self.table.root), "table": self.table.name, **extra}
        self.result.save(folder, split=self.split, category_names=self.table.category_names, extra=extra)


def evaluate_shards(embeddings: Array, table: Table, context: RunContext, **options: Any) -> Result | None:
    """Evaluate the embeddings that all processes hold of a table; None on all but the first."""
    own = context.processes.shard(len(table))
    marks: dict[str, Any] = {
        name: None if (values := getattr(table, name)) is None else values[own]
        for name in ("is_query", "is_gallery", "categories")
    }
    return evaluate_sharded(embeddings, table.labels[own], **marks, device=context.device, **options)


class SplitEvaluator:
    """Tests one network on one split after another. Landmark images are embedded once, however many lists they are in.

    Args:
        task: what the network was trained for.
        model: the network.
        announce: say before each evaluation what it will take.
    """

    def __init__(self, task: "RetrievalTask", model: Embedder, *, announce: bool = False) -> None:
        self.task, self.model, self.announce = task, model, announce
        self._landmarks: dict[tuple[Path, int], NDArray[np.float32]] = {}

    def __call__(self, split: str, *, protocol: str | None = None, scratch: Path | None = None) -> RetrievalEvaluation:
        """Test on a split, under its data set's protocol or another one."""
        task, context = self.task, self.task.context
        data_set_name, name_there = task.data.tests(task.recipe)[split]
        data_set = task.data.data_set(task.recipe, data_set_name)
        wanted = protocol or data_set.protocols[name_there]
        options: dict[str, Any] = {"ks": data_set.ks}
        if wanted != "vehicleid-official":
            options["neighbours"] = NEIGHBOURS
        table = task.data.table(task.recipe, name_there, data_set_name)
        result: Result | None = None
        if table.ground_truth is None:
            opened = task.data.split(task.recipe, name_there, data_set_name)
            embeddings, table = task.embed(self.model, opened).numpy(), opened.table
            if context.processes.size > 1:
                result = self._evaluate_together(split, table, embeddings, wanted, options)
            else:
                result = self._evaluate_alone(split, table, embeddings, wanted, options)
        elif context.processes.first:
            # a few thousand images, one at a time because no two have the same shape: by the first process
            embeddings = self._embed_landmarks(table)
            if split.endswith(WITH_DISTRACTORS):
                gallery = task.data.table(task.recipe, "distractors", data_set_name)
                out = None if scratch is None else scratch / "distractors.npy"
                options["distractors"] = self._embed_landmarks(gallery, out)
            result = self._evaluate_alone(split, table, embeddings, wanted, options)
        else:
            embeddings = np.empty((0, self.model.dim), np.float32)
        found = wanted if result is None else result.protocol.name
        return RetrievalEvaluation(split, table, embeddings, result, found, context.processes)

    def _evaluate_alone(
        self, name: str, table: Table, embeddings: NDArray[np.float32], protocol: str, options: Mapping[str, Any]
    ) -> Result:
        if self.announce:
            print(f"evaluating {name}: {_cost(embeddings, table, options['ks'])}", flush=True)
        with _EvaluationProgress(f"evaluating {name}") as progress:
            return evaluate_table(
                embeddings, table, protocol=protocol, progress=progress, device=self.task.context.device, **options
            )  # fmt: skip

    def _evaluate_together(
        self, name: str, table: Table, embeddings: NDArray[np.float32], protocol: str, options: Mapping[str, Any]
    ) -> Result | None:
        """By all processes where the protocol allows it, else by the first, which is sent the embeddings."""
        context = self.task.context
        if protocol in SHARDED_PROTOCOLS:
            with _EvaluationProgress(f"evaluating {name}", shown=context.processes.first) as progress:
                return evaluate_shards(embeddings, table, context, progress=progress, **options)
        blocks = list(context.processes.gather_to_first(embeddings))
        return self._evaluate_alone(name, table, np.concatenate(blocks), protocol, options) if blocks else None

    def _embed_landmarks(self, table: Table, out: Path | None = None) -> NDArray[np.float32]:
        key = (table.root, hash(table.paths))
        if key not in self._landmarks:
            recipe, device = self.task.recipe, self.task.context.device
            preprocess = Preprocessing(recipe.size, native_shape=True)
            self._landmarks[key] = embed_native_shape(
                self.model, table, preprocess, scales=recipe.scales, device=device, out=out
            )
        return self._landmarks[key]


def _cost(embeddings: NDArray[np.float32], table: Table, ks: tuple[int, ...]) -> str:
    """What an evaluation will take, known before it begins."""
    queries = np.arange(len(table)) if table.is_query is None else np.flatnonzero(table.is_query)
    text = f"{len(queries):,} queries among {plural(len(table), table.noun)}"
    if table.ground_truth is not None:
        return text
    if table.is_gallery is None:
        memory = expected_memory(embeddings, table.labels, ks=ks)
    else:
        gallery = table.is_gallery
        memory = expected_memory(
            embeddings[queries], table.labels[queries], embeddings[gallery], table.labels[gallery], ks=ks
        )  # fmt: skip
    return f"{text}, at most {format_bytes(memory)} of memory"


class _EvaluationProgress:
    """Shows the progress of an evaluation, which knows its total only when it begins."""

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self.name, self.shown = name, shown
        self.progress: Progress | None = None

    def __enter__(self) -> "_EvaluationProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.close()

    def __call__(self, done: int, total: int) -> None:
        if self.progress is None:
            self.progress = Progress(total, self.name, unit="scores", shown=self.shown)
        self.progress.advance(done - self.progress.done)


def _write_embeddings(path: Path, own: NDArray[np.float32], rows: int, processes: Processes) -> None:
    """Block by block: all embeddings need not fit in the memory of one process."""
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


def _write_table(path: Path, table: Table) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        texts = [] if table.texts is None else ["text"]
        writer.writerow(["path", "label", "category", "is_query", "is_gallery", "class", *texts])
        flags = [np.ones(len(table), np.bool_) if flag is None else flag for flag in (table.is_query, table.is_gallery)]
        for row, path_in_root in enumerate(table.paths):
            marks = (int(flag[row]) for flag in flags)
            label = int(table.labels[row])
            text = [] if table.texts is None else [table.texts[row]]
            writer.writerow([path_in_root, label, _category(table, row), *marks, table.class_name(label), *text])


def _category(table: Table, row: int) -> str:
    if table.categories is None or table.categories[row] < 0:
        return ""
    return table.category_names[int(table.categories[row])]


def is_headline(metric: str) -> bool:
    """Whether tables show it; result.json has all metrics."""
    return metric in ("mAP", "mAP@R", "MRR") or metric.startswith(("R@", "mAP[", "NDCG"))
