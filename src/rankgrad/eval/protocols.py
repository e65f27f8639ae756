"""The protocols by name: who is a query, who is a candidate, who is left out of the list, what is averaged."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.eval.embedding_blocks import Index, Rows
from rankgrad.eval.graded import Grades, graded_ndcg
from rankgrad.eval.metrics import (
    DEFINITIONS,
    Ranked,
    benchmark_precision,
    metric_columns,
    per_query,
    trapezoid_average_precision,
)
from rankgrad.eval.nearest import nearest
from rankgrad.eval.rank_counts import Ahead, GivenLists, SameLabel, Tick, against_gallery, among_themselves, by_kernels
from rankgrad.eval.result import Protocol, Result

# Relevant pairs that are turned into metrics at once: a handful of float64 of each are 0.2 GiB.
MOST_PAIRS = 2**22

SETTINGS = ("easy", "medium", "hard")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked evaluation: what a protocol gets."""

    queries: Rows
    labels: Index
    gallery: Rows | None = None
    ref_labels: Index | None = None
    own: Index | None = None  # row of the gallery that is the query itself, -1 where it is not there
    categories: Index | None = None
    ref_categories: Index | None = None
    category_gain: float | None = None
    lists: Mapping[str, Sequence[Index]] = field(default_factory=dict)  # "easy", "hard" and "junk" of every query
    ks: tuple[int, ...]
    kernels: bool = False  # count with the engine's fused kernels
    neighbours: int = 0
    repeats: int = 10
    seed: int = 0
    budget: int
    memory: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def candidates(self) -> Rows:
        return self.queries if self.gallery is None else self.gallery

    @property
    def candidate_labels(self) -> Index:
        return self.labels if self.ref_labels is None else self.ref_labels

    @property
    def self_index(self) -> Index:
        """[Q] the query's own row among the candidates."""
        if self.gallery is None:
            return np.arange(len(self.queries))
        return np.full(len(self.queries), -1) if self.own is None else self.own


class Meter:
    """Adds up what is done and tells it."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, scores: int) -> None:
        self.done += scores
        if self.progress:
            self.progress(self.done, self.total)


def by_labels(request: Request) -> Result:
    """All against all, or queries against a gallery: a candidate of the query's label is relevant."""
    relevance = SameLabel(request.labels, request.candidate_labels, request.self_index)
    asked = np.flatnonzero(relevance.num_relevant)
    candidates = len(request.candidates)
    symmetric = request.gallery is None and not request.kernels and not request.queries.on_disk
    passes = (request.category_gain is not None) + (request.neighbours > 0)
    total = ((len(request.queries) if symmetric else len(asked)) + passes * len(asked)) * candidates
    meter = Meter(request.progress, total)
    columns = _columns(_counted(request, relevance, meter), request.ks, len(request.queries))
    values: dict[str, NDArray[Any]] = {name: column[asked].astype(type_of(name)) for name, column in columns.items()}
    notes: tuple[str, ...] = ()
    if request.category_gain is not None:
        values["ndcg"] = _graded(request, asked, meter)
        notes = (f"NDCG: gain 1 for an item of the query's class, {request.category_gain:g} for another of its category",)
    return Result(
        protocol=PROTOCOLS["all-vs-all" if request.gallery is None else "query-gallery"],
        columns=metric_columns(request.ks),
        per_query=values,
        query_index=asked,
        labels=request.labels[asked],
        categories=None if request.categories is None else request.categories[asked],
        skipped=len(request.queries) - len(asked),
        memory=request.memory,
        notes=notes,
        neighbours=_neighbours(request, asked, meter),
    )


def _counted(request: Request, relevance: SameLabel, tick: Tick) -> Iterator[Ahead]:
    if request.kernels:
        labels, own = torch.from_numpy(request.labels), request.own
        ref_labels = None if request.ref_labels is None else torch.from_numpy(request.ref_labels)
        place = None if own is None else torch.from_numpy(own)
        return by_kernels(request.queries, request.gallery, labels, ref_labels, place, budget=request.budget, tick=tick)
    if request.gallery is None and not request.queries.on_disk:
        return among_themselves(request.queries, torch.from_numpy(request.labels), budget=request.budget, tick=tick)
    return against_gallery(request.queries, request.candidates, relevance, budget=request.budget, tick=tick)


def _columns(counted: Iterator[Ahead], ks: Sequence[int], queries: int) -> dict[str, NDArray[np.float64]]:
    """Every per-query column, a row for every query, NaN where nothing was counted."""
    columns: dict[str, NDArray[np.float64]] = {}
    for ahead in counted:
        step = max(MOST_PAIRS // max(ahead.count.shape[1], 1), 1)
        for start in range(0, len(ahead.query), step):
            rows = slice(start, start + step)
            for name, values in per_query(Ranked.of(ahead.count[rows], ahead.valid[rows]), ks).items():
                column = columns.setdefault(name, np.full(queries, np.nan))
                column[ahead.query[rows]] = values.cpu().numpy()
    return columns


def type_of(column: str) -> type[np.int64 | np.float64]:
    """In which numbers a column of per-query values is kept."""
    return np.int64 if column in ("num_relevant", "first_rank", "trial") else np.float64


def _graded(request: Request, asked: Index, tick: Tick) -> NDArray[np.float64]:
    assert request.categories is not None, "grades were checked to have categories"
    assert request.category_gain is not None, "asked for grades"
    grades = Grades(
        request.labels,
        request.categories,
        request.candidate_labels,
        request.categories if request.ref_categories is None else request.ref_categories,
        request.self_index,
        request.category_gain,
    )
    return graded_ndcg(request.queries, request.candidates, asked, grades, tick=tick)


def _neighbours(request: Request, asked: Index, tick: Tick) -> tuple[Index, NDArray[np.float32]] | None:
    if not request.neighbours:
        return None
    k = min(request.neighbours, len(request.candidates) - int((request.self_index >= 0).any()))
    done = 0

    def progress(scores: int, _: int) -> None:
        nonlocal done
        tick(scores - done)
        done = scores

    scores, index = nearest(request.queries.held(asked), request.candidates, k, request.self_index[asked], progress)
    return index, scores


def vehicleid_official(request: Request) -> Result:
    """One random image of each id is the gallery, all others are queries; repeated, and averaged over the repeats."""
    rng = np.random.default_rng(request.seed)
    order = np.argsort(request.labels, kind="stable")
    first = np.flatnonzero(np.diff(request.labels[order], prepend=request.labels[order[0]] - 1))
    sizes = np.diff(first, append=len(order))
    meter = Meter(request.progress, request.repeats * (len(order) - len(first)) * len(first))
    trials, queries = [], []
    for trial in range(request.repeats):
        shown = order[first + rng.integers(sizes)]
        asking = np.setdiff1d(order, shown)
        counted = against_gallery(
            request.queries.held(asking),
            request.queries.held(shown),
            SameLabel(request.labels[asking], request.labels[shown], None),
            budget=request.budget,
            tick=meter,
        )
        trials.append({**_columns(counted, request.ks, len(asking)), "trial": np.full(len(asking), float(trial))})
        queries.append(asking)
    query = np.concatenate(queries)
    metrics = metric_columns(request.ks)
    means = {metric: [columns[column].mean() for columns in trials] for metric, column in metrics.items()}
    return Result(
        protocol=PROTOCOLS["vehicleid-official"],
        columns=metrics,
        per_query={name: np.concatenate([columns[name] for columns in trials]).astype(type_of(name)) for name in trials[0]},
        query_index=query,
        labels=request.labels[query],
        categories=None if request.categories is None else request.categories[query],
        memory=request.memory,
        deviations={m: float(np.std(values, ddof=1)) for m, values in means.items()} if request.repeats > 1 else {},
        notes=(f"{request.repeats} random galleries of {len(first):,} ids, seed {request.seed}",),
    )


def by_lists(settings: Sequence[str], request: Request) -> Result:
    """Relevant and removed candidates are written down for every query, once for each setting."""
    easy, hard, junk = (request.lists[name] for name in ("easy", "hard", "junk"))
    relevance = GivenLists([np.concatenate(pair) for pair in zip(easy, hard, strict=True)], junk)
    queries, num_easy = len(request.queries), np.array([len(items) for items in easy])
    sizes = {"easy": num_easy, "medium": relevance.num_relevant, "hard": relevance.num_relevant - num_easy}
    asked = np.flatnonzero(np.any([sizes[setting] > 0 for setting in settings], axis=0))
    if not len(asked):
        raise ValueError(f"revisited: no query has a relevant image in the setting {', '.join(settings)}")
    lists = int((relevance.num_relevant > 0).sum()) + (len(asked) if request.neighbours else 0)
    meter = Meter(request.progress, lists * len(request.candidates))
    columns: dict[str, NDArray[np.float64]] = {}
    # easy and hard items are relevant or removed, never plain: one count of the plain ones serves all settings
    for ahead in against_gallery(request.queries, request.candidates, relevance, budget=request.budget, tick=meter):
        step = torch.arange(ahead.count.shape[1], device=ahead.count.device)
        is_easy = step < torch.from_numpy(num_easy[ahead.query]).to(step.device)[:, None]
        for setting in settings:
            sought = {"easy": is_easy, "medium": is_easy | ~is_easy, "hard": ~is_easy}[setting]
            ranked = Ranked.of(ahead.count, ahead.valid & sought)
            some = ranked.num_relevant.cpu().numpy() > 0
            for name, values in _benchmark_columns(ranked, request.ks).items():
                column = columns.setdefault(f"{name}[{setting}]", np.full(queries, np.nan))
                column[ahead.query[some]] = values.cpu().numpy()[some]
    return Result(
        protocol=PROTOCOLS[_NAME_OF[tuple(settings)]],
        columns={
            **{f"mAP[{s}]": f"average_precision[{s}]" for s in settings},
            **{f"mP@{k}[{s}]": f"precision@{k}[{s}]" for s in settings for k in request.ks},
        },
        per_query={name: column[asked] for name, column in columns.items()},
        query_index=asked,
        skipped=queries - len(asked),
        memory=request.memory,
        neighbours=_neighbours(request, asked, meter),
    )


def _benchmark_columns(ranked: Ranked, ks: Sequence[int]) -> dict[str, Tensor]:
    return {
        "num_relevant": ranked.num_relevant,
        "first_rank": ranked.rank[:, 0],
        "average_precision": trapezoid_average_precision(ranked),
        **{f"precision@{k}": benchmark_precision(ranked, k) for k in ks},
    }


_NAME_OF: dict[tuple[str, ...], str] = {SETTINGS: "roxford", **{(setting,): f"roxford-{setting}" for setting in SETTINGS}}

_LISTED = (
    "Queries are the cropped query images, candidates all database images, and distractors where they are given, which are "
    "never relevant. {} Removed images are taken out of the list before ranks are read. A query without relevant images leaves "
    "the mean. AP is the area under the precision-recall curve by trapezoids, with precision 1 before the first place; mP@k is "
    "the precision at k, or at the last relevant image where that comes before k."
)
_LISTS = {
    "easy": "Relevant are the images marked easy; hard and junk ones are removed.",
    "medium": "Relevant are the images marked easy or hard; junk is removed.",
    "hard": "Relevant are the images marked hard; easy and junk ones are removed.",
}

_TIES = "Where scores are equal, irrelevant candidates come first."

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "all-vs-all",
            "Every item is a query once and is ranked against all others; it is taken out of its own list by its row number, "
            f"not as the first neighbour. Candidates with the query's label are relevant. {_TIES} A query whose label no "
            "other item has leaves the mean and is counted.",
            "SOP, CUB, Cars196, iNaturalist, and VehicleID as FastAP, Smooth-AP and RS@k report it",
            by_labels,
        ),
        Protocol(
            "query-gallery",
            "Queries are ranked against the gallery only. Candidates with the query's label are relevant. A query that is in "
            f"the gallery itself is taken out of its own list by its row number. {_TIES} A query whose label no gallery item "
            "has leaves the mean and is counted.",
            "In-Shop",
            by_labels,
        ),
        Protocol(
            "vehicleid-official",
            "One image of each id, drawn at random, is the gallery and all other images are queries. The draw is repeated 10 "
            f"times; a metric is the mean over the repeats and comes with their standard deviation. {_TIES} Values lie far "
            "below those of all-vs-all on the same images.",
            "VehicleID in vehicle re-identification",
            vehicleid_official,
        ),
        Protocol(
            "roxford",
            _LISTED.format("Three settings: " + " ".join(f"[{name}] {rule}" for name, rule in _LISTS.items())),
            "ROxford5k and RParis6k, also with the 1M distractors",
            partial(by_lists, SETTINGS),
        ),
        *(
            Protocol(f"roxford-{name}", _LISTED.format(rule), "one setting of roxford alone", partial(by_lists, (name,)))
            for name, rule in _LISTS.items()
        ),
    )
}


def describe_protocols() -> str:
    """Every protocol's rule and every metric's definition as text."""

    def entry(name: str, text: str) -> str:
        return f"{name}\n{textwrap.fill(text, 100, initial_indent='    ', subsequent_indent='    ')}"

    protocols = [entry(p.name, f"{p.rule} Used for {p.used_for}.") for p in PROTOCOLS.values()]
    metrics = [entry(name, text) for name, text in DEFINITIONS.items()]
    return "\n\n".join([*protocols, "Metrics, each the mean over queries of", *metrics])
