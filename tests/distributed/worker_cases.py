"""The cases in which several processes must agree with one, computed by any number of processes: `everything(processes, ...)`.

    torchrun --nproc-per-node 4 cases.py FOLDER [STOPPED]        the first process writes FOLDER/found.pt

STOPPED is a folder with runs that other processes have begun.
"""

import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from train.tiny_loop import Vectors, held_out
from train.tiny_loop import network as small

import rankgrad as rg
from rankgrad.data.seeds import generator
from rankgrad.eval import evaluate_sharded, evaluate_table, rank_counts
from rankgrad.recipes.catalogue import find
from rankgrad.runs import equivalence
from rankgrad.runs.equivalence import Equivalence, compare_processes
from rankgrad.runs.retrieval_task import RetrievalTask
from rankgrad.runs.task import RunContext
from rankgrad.train.checkpoints import CheckpointStore
from rankgrad.train.errors import TrainingError
from rankgrad.train.journal import entries
from rankgrad.train.loop import fit
from rankgrad.train.processes import Processes, exit_process, join
from rankgrad.train.settings import TrainSettings
from rankgrad.train.sharding import ShardedBatches, full_tensors, wrap_model

WIDTH, DIM = 6, 5

PRESETS: dict[str, Callable[[], rg.RankLoss]] = {
    "recall_at_k": rg.RecallAtKLoss,
    "recall_at_k, published": lambda: rg.RecallAtKLoss(query_in_database=True),
    "smooth_ap, learned tau": lambda: rg.SmoothAPLoss(0.05, learn_tau=True).double(),
    "fastap": rg.FastAPLoss,
    "fastap, zero": lambda: rg.FastAPLoss(empty_query="zero"),
    "rambo_recall": rg.RamboRecallLoss,
    "rambo_ap": lambda: rg.RamboAPLoss(lam=2.0, margin=0.1),
}
AROUND: dict[str, Callable[[rg.RankLoss], Any]] = {
    "alone": lambda loss: loss,
    "simix": lambda loss: rg.SiMix(loss, torch.Generator().manual_seed(5)),
    "memory": lambda loss: rg.EmbeddingMemory(loss, 2),
    "proxies": lambda loss: rg.CalibratedRankLoss(rg.SiMix(loss, torch.Generator().manual_seed(5)), proxies(), 0.3),
}

# labels in the order of the batch, which processes share in contiguous parts
BATCHES = {
    # every class is spread over the processes; 13 items are shared unevenly
    "uneven": [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0],
    # the last quarter are items that have no match at all, the first two have theirs elsewhere
    "no positives": [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 90, 91, 92, 93],
    # one class per process, so that all positives are its own
    "own positives": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
}
WAYS = {
    "ddp": ("ddp", 0, 0),
    "ddp in chunks": ("ddp", 2, 0),
    "ddp in chunks, one kept": ("ddp", 2, 1),
    "fsdp in chunks": ("fsdp", 2, "auto"),
    "sums": (None, 2, 1),
}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, DIM)).double()


def proxies() -> rg.ProxySoftmax:
    """For the classes that have more than one item."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return rg.ProxySoftmax(4, DIM).double()


def inputs(name: str, step: int) -> tuple[Tensor, Tensor]:
    labels = torch.tensor(BATCHES[name])
    return torch.randn(len(labels), WIDTH, dtype=torch.float64, generator=generator(0, name, step)), labels


def table(processes: Processes) -> dict[str, dict[str, Tensor]]:
    """Loss and gradients of every case."""
    found = {}
    for preset, make in PRESETS.items():
        for around, wrap in AROUND.items():
            for batch in BATCHES:
                for way in ways(preset, around, batch):
                    found[f"{preset} / {around} / {batch} / {way}"] = gradients(wrap(make()), batch, way, processes)
    return found


def ways(preset: str, around: str, batch: str) -> Iterator[str]:
    """All ways for one preset and batch, for the others one after the other: they do not depend on each other."""
    if preset == "recall_at_k" and batch == "uneven":
        yield from WAYS
    else:
        yield list(WAYS)[(list(PRESETS).index(preset) + list(AROUND).index(around) + list(BATCHES).index(batch)) % len(WAYS)]


def some_pairs(labels: Tensor, processes: Processes) -> rg.Pairs:
    """Pairs of the whole batch, not symmetric and with gains; each is given by one process, whichever."""
    row = torch.arange(len(labels))
    related = (labels[:, None] == labels) & ((row[:, None] + 2 * row) % 3 > 0) & (row[:, None] != row)
    query, item = related.nonzero(as_tuple=True)
    mine = torch.arange(len(query)) % processes.size == processes.rank
    return rg.Pairs(query[mine], item[mine], 1.0 + (query + item)[mine] % 2)


def sparse(processes: Processes) -> dict[str, dict[str, Tensor]]:
    """Gradients where relevance is a list of pairs, or has levels."""
    kinds: dict[str, tuple[Any, Callable[[Tensor, slice], Any]]] = {
        "pairs": (rg.NDCG(), lambda labels, own: some_pairs(labels, processes)),
        "levels": (
            rg.HierarchicalAveragePrecision(),
            lambda labels, own: rg.Levels(torch.stack((labels % 2, labels), dim=1)[own]),
        ),
    }
    found = {}
    for kind, (objective, share) in kinds.items():
        for name, way in (("alone", "ddp in chunks"), ("memory", "sums")):
            loss = AROUND[name](rg.RankLoss(rg.Sigmoid(0.05), objective))
            found[f"{kind} / {name} / {way}"] = gradients(loss, "no positives", way, processes, share)
    return found


def gradients(
    loss: Any,
    batch: str,
    way: str,
    processes: Processes,
    share: Callable[[Tensor, slice], Any] = lambda labels, own: labels[own],
) -> dict[str, Tensor]:
    """Two steps without an optimizer, so that a memory has something to remember; the gradients of the last."""
    parallel, chunk, keep = WAYS[way]
    model, groups = network(), []
    if parallel is not None:
        model, _ = wrap_model(model, groups, parallel, processes)
    together = rg.DistributedRankLoss(loss, averaged=parallel is not None)
    step = rg.LargeBatch(model, together, chunk, keep, processes=processes)
    for number in range(2):
        images, labels = inputs(batch, number)
        own = processes.shard(len(labels))
        model.zero_grad(set_to_none=True)
        loss.zero_grad(set_to_none=True)
        value = step(images[own], share(labels, own))
    named = (*model.named_parameters(), *loss.named_parameters(prefix="loss"))
    found = {name.removeprefix("module."): p.grad for name, p in named}
    if parallel is None and processes.size > 1:
        for gradient in found.values():
            dist.all_reduce(gradient)
    count = together.used_queries.double()
    return {"loss": value, "used": count, **{name: full_tensors(gradient).clone() for name, gradient in found.items()}}


def weighted(processes: Processes) -> dict[str, dict[str, Tensor]]:
    """Loss and gradient of the embeddings of all where queries have weights."""
    found = {}
    for around, wrap in AROUND.items():
        points, labels = inputs("uneven", 3)
        embeddings, weights = points[:, :DIM].clone().requires_grad_(), torch.arange(len(labels)) % 4 / 4
        own = processes.shard(len(labels))
        loss = rg.DistributedRankLoss(wrap(rg.RecallAtKLoss()), averaged=False)
        value = loss(embeddings[own], labels[own], weights=weights[own])
        value.backward()
        if processes.size > 1:
            dist.all_reduce(embeddings.grad)
        found[around] = {"loss": value.detach(), "gradient": embeddings.grad}
    return found


def exchanges(processes: Processes) -> dict[str, int]:
    """How often DDP exchanges gradients in a step, by number of chunks."""
    found = {}
    for chunk in (0, 2, 1):
        model = nn.parallel.DistributedDataParallel(network())
        calls: list[int] = []

        def hook(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            calls.append(1)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(calls, hook)
        images, labels = inputs("own positives", 0)
        own = processes.shard(len(labels))
        step = rg.LargeBatch(model, rg.DistributedRankLoss(rg.SmoothAPLoss()), chunk, 1, processes=processes)
        step(images[own], labels[own])
        calls.clear()  # the first step builds the buckets anew
        step(images[own], labels[own])
        found[str(-(-len(labels[own]) // (chunk or len(labels))))] = len(calls)
    return found


def refusals(processes: Processes) -> dict[str, list[str]]:
    """What every process says about bad input that only one of them has."""
    loss = rg.DistributedRankLoss(rg.SmoothAPLoss())
    last = processes.rank == processes.size - 1
    found = {}
    for name, items, width in (("nothing", 0, DIM), ("another width", 3, DIM + 1)):
        embeddings = torch.randn(items if last else 3, width if last else DIM, dtype=torch.float64)
        try:
            loss(embeddings, torch.zeros(len(embeddings), dtype=torch.long))
            said = ""
        except ValueError as error:
            said = str(error)
        found[name] = processes.gather(said)
    try:
        loss(torch.ones(3, DIM), torch.zeros(3, dtype=torch.long), weights=torch.ones(3) if last else None)
        said = ""
    except ValueError as error:
        said = str(error)
    found["weights of one"] = processes.gather(said)
    return found


def shares(rows: int, processes: Processes) -> slice:
    """Uneven on purpose: the first process has twice as much."""
    edges = [0, *(rows * (rank + 2) // (processes.size + 1) for rank in range(processes.size))]
    return slice(edges[processes.rank], edges[processes.rank + 1])


def gallery() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Embeddings with duplicates across processes, rows of no class and of a class of their own, and marks of both kinds."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 40, 700)
    labels[::50], labels[7::90] = -1, np.arange(1000, 1000 + len(labels[7::90]))
    embeddings = rng.normal(size=(700, 8)).astype(np.float32) + 2 * rng.normal(size=(1001 + 700, 8)).astype(np.float32)[labels]
    embeddings[350:360] = embeddings[:10]
    marked = {"is_query": rng.random(700) < 0.3, "is_gallery": rng.random(700) < 0.8}
    return embeddings, {"labels": labels, "categories": labels % 3, **marked}


def evaluations(processes: Processes) -> dict[str, Any]:
    embeddings, marks = gallery()
    found = {}
    for name, used in (("all-vs-all", ("labels", "categories")), ("query-gallery", tuple(marks))):
        for budget in (2**29, 1):  # one pass over all queries, and as many as there are chunks
            rank_counts.MEMORY_LIMIT = budget
            if processes.size == 1:
                table = SimpleNamespace(**{key: marks[key] for key in used})
                result = evaluate_table(embeddings, table, ks=(1, 5), neighbours=4)
            else:
                own = shares(len(embeddings), processes)
                given = {key: marks[key][own] for key in used}
                result = evaluate_sharded(embeddings[own], **given, ks=(1, 5), neighbours=4)
            if result is not None:
                found[f"{name}, {budget}"] = {
                    "metrics": dict(result),
                    "per_query": dict(result.per_query),
                    "index": result.query_index,
                    "categories": result.categories,
                    "skipped": result.skipped,
                    "neighbours": result.neighbours,
                    "protocol": result.protocol.name,
                }
    return found


class Doubles(Vectors):
    """Batches of `tiny` in float64, one item short, so that they are shared unevenly."""

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for step, indices, images, labels in super().iterate(start):
            yield step, indices[:-1], images[:-1].double(), labels[:-1]


class ShortOfMemory(nn.Module):
    """Has no room for more than `most` images on the last process."""

    def __init__(self, body: nn.Module, most: int, processes: Processes) -> None:
        super().__init__()
        self.body, self.most, self.last = body, most, processes.rank == processes.size - 1

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.last and len(images) > self.most:
            raise torch.OutOfMemoryError("no room")
        return self.body(images)


def held_out_doubles(model: nn.Module) -> dict[str, float]:
    return dict(held_out(_InDouble(model)))


class _InDouble(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.double())


def run(
    folder: Path,
    processes: Processes,
    *,
    steps: int,
    parallel: str = "ddp",
    resume: bool = False,
    most: int = 10**6,
    stop_at: int = 0,
    spoil_at: int = 0,
    chunk_size: int | str = 4,
) -> dict[str, Any]:
    """A training of `fit`, told as the first process's journal has it."""
    settings = TrainSettings(
        steps=steps,
        lr=1e-2,
        weight_decay=1e-3,
        clip=0.5,
        chunk_size=chunk_size,
        keep=1 if chunk_size == 4 else "auto",
        metric="margin",
        checkpoint_every=2,
        log_every=1,
        parallel=parallel,
    )
    loss = rg.EmbeddingMemory(rg.RecallAtKLoss(), 2)
    model = ShortOfMemory(small(dropout=0.0).double(), most, processes)
    batches: Any = _Disturbed(Doubles(), processes, stop_at=stop_at, spoil_at=spoil_at)
    outcome, said = None, ""
    try:
        outcome = fit(
            model,
            rg.DistributedRankLoss(loss) if processes.size > 1 else loss,
            ShardedBatches(batches, processes),
            settings,
            folder,
            evaluators={"validation": held_out_doubles},
            select="validation",
            resume=resume,
            processes=processes,
        )
    except TrainingError as error:
        said = str(error)
    told = {"said": processes.gather(said), "reasons": processes.gather(outcome.reason if outcome else "")}
    if not processes.first:
        return told
    journal = list(entries(folder / "journal.jsonl"))
    weights = CheckpointStore(folder / "checkpoints").newest_good()[0]
    return {
        **told,
        "steps": [
            {key: entry[key] for key in ("step", "loss", "gradient", "batch_mAP", "skipped", "effective_rank")}
            for entry in journal
            if entry["kind"] == "step"
        ],
        "metrics": [entry["metrics"] for entry in journal if entry["kind"] == "eval"],
        "warnings": [entry["message"] for entry in journal if entry["kind"] == "warning"],
        "weights": weights.weights() if weights else {},
        "files": sorted(path.name for path in weights.folder.iterdir()) if weights else [],
        # the model that was handed in has the weights too, also where a divided copy was trained
        "model": {name: value.clone() for name, value in model.state_dict().items()},
    }


class _Disturbed:
    """Batches during which the last process is asked to stop, or of which one is spoilt."""

    def __init__(self, batches: Doubles, processes: Processes, *, stop_at: int, spoil_at: int) -> None:
        self.batches, self.last = batches, processes.rank == processes.size - 1
        self.stop_at, self.spoil_at, self.seen = stop_at, spoil_at, 0
        self.set_epoch = batches.set_epoch

    def __len__(self) -> int:
        return len(self.batches)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for step, indices, images, labels in self.batches.iterate(start):
            self.seen += 1
            if self.seen == self.stop_at and self.last:
                signal.raise_signal(signal.SIGTERM)
            yield step, indices, images * torch.nan if self.seen == self.spoil_at else images, labels


def runs(folder: Path, processes: Processes, stopped: Path | None) -> dict[str, Any]:
    """Whole runs, runs that end early, and the rest of runs that were stopped under another number of processes."""
    found = {
        "whole": run(folder / "whole", processes, steps=8),
        "divided": run(folder / "divided", processes, steps=8, parallel="fsdp"),
        "chosen chunks": run(folder / "chosen", processes, steps=8, chunk_size="auto"),
        "divided, chosen chunks": run(folder / "divided-chosen", processes, steps=8, chunk_size="auto", parallel="fsdp"),
        "short of memory": run(folder / "short", processes, steps=8, most=3),
        "stopped": run(folder / "stopped", processes, steps=8, stop_at=4),
        "divided, stopped": run(folder / "divided-stopped", processes, steps=8, stop_at=4, parallel="fsdp"),
        "spoilt": run(folder / "spoilt", processes, steps=8, spoil_at=4),
    }
    if stopped is not None:
        for name, parallel in (("stopped", "ddp"), ("divided-stopped", "ddp"), ("stopped", "fsdp")):
            place = folder / f"{name}-resumed-{parallel}"
            if processes.first:
                shutil.copytree(stopped / name, place)
            found[f"{name}, resumed as {parallel}"] = run(place, processes, steps=8, parallel=parallel, resume=True)
    return found


def equivalences(processes: Processes, folder: Path) -> dict[str, Equivalence]:
    """What `check-equivalence` finds, also where something is wrong."""
    place = RunContext(None, torch.device("cpu"), cache=folder / "cache", processes=processes)
    recipe = find("glyphs-recall-at-k").debug_version()
    found = {
        "ddp": compare_processes(RetrievalTask(recipe, place), images=15),
        "fsdp": compare_processes(RetrievalTask(recipe, replace(place, parallel="fsdp")), images=15),
        "with memory": compare_processes(RetrievalTask(replace(recipe, memory=2), place), images=15),
        "with simix": compare_processes(RetrievalTask(replace(recipe, simix=True), place), images=15),
    }
    right = equivalence.DistributedRankLoss
    equivalence.DistributedRankLoss = partial(right, averaged=False)
    try:
        found["gradients summed where they are averaged"] = compare_processes(RetrievalTask(recipe, place), images=15)
    finally:
        equivalence.DistributedRankLoss = right
    return found


def everything(processes: Processes, folder: Path, stopped: Path | None = None) -> dict[str, Any]:
    found = {
        "table": table(processes),
        "sparse": sparse(processes),
        "weighted": weighted(processes),
        "evaluations": evaluations(processes),
        "runs": runs(folder, processes, stopped),
        "exchanges": exchanges(processes) if processes.size > 1 else {},
        "refusals": refusals(processes) if processes.size > 1 else {},
        "equivalences": equivalences(processes, folder) if processes.size == 2 else {},
    }
    losses = processes.gather([float(entry["loss"]) for entry in found["table"].values()])
    return {**found, "losses of all": losses}


def main(folder: Path, stopped: Path | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with join(torch.device("cpu")) as processes:
        found = everything(processes, folder, stopped)
        if processes.first:
            torch.save(found, folder / "found.pt")
    exit_process(0)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]), *([None] if len(sys.argv) == 2 else []))
