"""The protocols by name: what is a query, what is a candidate, what is excluded from the list, what is averaged."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad.eval.embedding_blocks import EmbeddingRows, Index
from rankgrad.eval.graded import Grades, graded_ndcg
from rankgrad.eval.memory_plan import MemoryPlan
from rankgrad.eval.metrics import (
    DEFINITIONS,
    GRADED_COLUMN,
    PositiveRanks,
    benchmark_precision,
    graded_columns,
    metric_columns,
    per_query,
    trapezoid_average_precision,
)
from rankgrad.eval.nearest import nearest
from rankgrad.eval.rank_counts import (
    MAX_PAIRS,
    ProgressCounter,
    RankCounts,
    count_against_gallery,
    count_all_vs_all,
    count_with_kernels,
)
from rankgrad.eval.relevant_pairs import GradedPairs, ListedPairs, RelevantPairs, SameLabelPairs
from rankgrad.eval.result import Protocol, Result

SETTINGS = ("easy", "medium", "hard")


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """Checked arguments of an evaluation, as a protocol takes them."""

    queries: EmbeddingRows
    labels: Index
    label_names: tuple[str, ...] | None = None  # of labels that were strings
    gallery: EmbeddingRows | None = None
    ref_labels: Index | None = None
    self_index: Index | None = None  # row of the gallery that is the query itself, -1 where it is not in the gallery
    categories: Index | None = None
    ref_categories: Index | None = None
    category_names: tuple[str, ...] | None = None
    category_gain: float | None = None
    relevance: GradedPairs | None = None  # in place of labels
    lists: Mapping[str, Sequence[Index]] = field(default_factory=dict)  # "easy", "hard" and "junk" of every query
    ks: tuple[int, ...]
    kernels: bool = False  # count with the fused kernels
    neighbours: int = 0
    repeats: int = 10
    seed: int = 0
    symmetric: bool = False  # count tiles and their transposes together, for one set of embeddings in memory
    pair_budget: int = 0  # bytes for relevant pairs at a time
    memory: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def candidates(self) -> EmbeddingRows:
        return self.queries if self.gallery is None else self.gallery

    @property
    def candidate_labels(self) -> Index:
        return self.labels if self.ref_labels is None else self.ref_labels

    @property
    def self_candidate(self) -> Index:
        """[Q] the candidate that is the query itself, -1 where it is not one."""
        if self.gallery is None:
            return np.arange(len(self.queries))
        return np.full(len(self.queries), -1) if self.self_index is None else self.self_index


def planned(inputs: EvaluationInputs, plan: MemoryPlan) -> EvaluationInputs:
    """The inputs of an evaluation that uses memory according to a plan."""
    gallery = inputs.gallery
    return replace(
        inputs,
        queries=replace(inputs.queries, block_numbers=plan.block_numbers),
        gallery=None if gallery is None else replace(gallery, block_numbers=plan.block_numbers),
        symmetric=plan.symmetric,
        pair_budget=plan.pair_budget,
        memory=plan.total,
    )


def evaluate_labels(inputs: EvaluationInputs) -> Result:
    """All against all, or queries against a gallery: candidates with the query's label are relevant, or those given."""
    by_label = inputs.relevance is None
    relevance = inputs.relevance or SameLabelPairs(inputs.labels, inputs.candidate_labels, inputs.self_candidate)
    chosen = np.flatnonzero(relevance.num_relevant)
    candidates = len(inputs.candidates)
    passes = (inputs.category_gain is not None) + (inputs.neighbours > 0)
    total = ((len(inputs.queries) if inputs.symmetric else len(chosen)) + passes * len(chosen)) * candidates
    counter = ProgressCounter(inputs.progress, total)
    columns = _columns(_counted(inputs, relevance, counter), inputs.ks, len(inputs.queries), inputs.relevance)
    graded = GRADED_COLUMN["H-AP"] in columns
    values: dict[str, NDArray[Any]] = {name: column[chosen].astype(type_of(name)) for name, column in columns.items()}
    notes: tuple[str, ...] = ()
    if inputs.category_gain is not None:
        values["ndcg"] = _graded(inputs, chosen, counter)
        notes = (f"NDCG: gain 1 for an item of the query's class, {inputs.category_gain:g} for another of its category",)
    return Result(
        protocol=PROTOCOLS["all-vs-all" if inputs.gallery is None else "query-gallery"],
        columns=metric_columns(inputs.ks) | (GRADED_COLUMN if graded else {}),
        per_query=values,
        query_index=chosen,
        labels=inputs.labels[chosen] if by_label else None,
        categories=None if inputs.categories is None else inputs.categories[chosen],
        label_names=inputs.label_names,
        category_names=inputs.category_names,
        skipped=len(inputs.queries) - len(chosen),
        skipped_labels=np.unique(np.delete(inputs.labels, chosen)) if by_label else np.empty(0, np.int64),
        memory=inputs.memory,
        notes=notes,
        neighbours=_neighbours(inputs, chosen, counter),
    )


def _counted(inputs: EvaluationInputs, relevance: RelevantPairs, progress: ProgressCounter) -> Iterator[RankCounts]:
    options: Any = {"pair_budget": inputs.pair_budget, "progress": progress}
    if inputs.relevance is not None:
        return count_against_gallery(inputs.queries, inputs.candidates, relevance, **options)
    if inputs.kernels:
        labels = torch.from_numpy(inputs.labels)
        ref_labels = None if inputs.ref_labels is None else torch.from_numpy(inputs.ref_labels)
        self_index = None if inputs.self_index is None else torch.from_numpy(inputs.self_index)
        return count_with_kernels(inputs.queries, inputs.gallery, labels, ref_labels, self_index, **options)
    if inputs.symmetric:
        return count_all_vs_all(inputs.queries, torch.from_numpy(inputs.labels), **options)
    return count_against_gallery(inputs.queries, inputs.candidates, relevance, **options)


def _columns(
    counted: Iterator[RankCounts], ks: Sequence[int], queries: int, relevance: GradedPairs | None = None
) -> dict[str, NDArray[np.float64]]:
    """All per-query columns, a row for every query, NaN where nothing was counted."""
    columns: dict[str, NDArray[np.float64]] = {}
    for found in counted:
        step = max(MAX_PAIRS // max(found.counts.shape[1], 1), 1)
        for start in range(0, len(found.query), step):
            rows = slice(start, start + step)
            computed = per_query(PositiveRanks.from_counts(found.counts[rows], found.valid[rows]), ks)
            gains = None if relevance is None else relevance.gains(found.query[rows])
            if gains is not None:
                assert found.scores is not None, "counted in the order of the relevance"
                padded = torch.zeros_like(found.scores[rows], dtype=torch.float64)
                padded[found.valid[rows]] = torch.from_numpy(gains).to(padded.device)
                computed |= graded_columns(found.counts[rows], found.valid[rows], found.scores[rows], padded)
            for name, values in computed.items():
                column = columns.setdefault(name, np.full(queries, np.nan))
                column[found.query[rows]] = values.cpu().numpy()
    return columns


def type_of(column: str) -> type[np.int64 | np.float64]:
    """Type of a column of per-query values."""
    return np.int64 if column in ("num_relevant", "first_rank", "trial") else np.float64


def _graded(inputs: EvaluationInputs, chosen: Index, progress: ProgressCounter) -> NDArray[np.float64]:
    assert inputs.categories is not None, "grades were checked to have categories"
    assert inputs.category_gain is not None, "category_gain was given"
    grades = Grades(
        inputs.labels,
        inputs.categories,
        inputs.candidate_labels,
        inputs.categories if inputs.ref_categories is None else inputs.ref_categories,
        inputs.self_candidate,
        inputs.category_gain,
    )
    return graded_ndcg(inputs.queries, inputs.candidates, chosen, grades, progress=progress)


def _neighbours(inputs: EvaluationInputs, chosen: Index, progress: ProgressCounter) -> tuple[Index, NDArray[np.float32]] | None:
    if not inputs.neighbours:
        return None
    k = min(inputs.neighbours, len(inputs.candidates) - int((inputs.self_candidate >= 0).any()))
    before = progress.done
    scores, index = nearest(
        inputs.queries.subset(chosen),
        inputs.candidates,
        k,
        inputs.self_candidate[chosen],
        lambda done, _: progress.add(before + done - progress.done),
    )
    return index, scores


def vehicleid_official(inputs: EvaluationInputs) -> Result:
    """One random image of each id is the gallery, all others are queries; averaged over repeats."""
    rng = np.random.default_rng(inputs.seed)
    order = np.argsort(inputs.labels, kind="stable")
    first = np.flatnonzero(np.diff(inputs.labels[order], prepend=inputs.labels[order[0]] - 1))
    sizes = np.diff(first, append=len(order))
    counter = ProgressCounter(inputs.progress, inputs.repeats * (len(order) - len(first)) * len(first))
    trials, queries = [], []
    for trial in range(inputs.repeats):
        gallery = order[first + rng.integers(sizes)]
        query = np.setdiff1d(order, gallery)
        counted = count_against_gallery(
            inputs.queries.subset(query),
            inputs.queries.subset(gallery),
            SameLabelPairs(inputs.labels[query], inputs.labels[gallery], None),
            pair_budget=inputs.pair_budget,
            progress=counter,
        )
        trials.append({**_columns(counted, inputs.ks, len(query)), "trial": np.full(len(query), float(trial))})
        queries.append(query)
    query_index = np.concatenate(queries)
    metrics = metric_columns(inputs.ks)
    means = {metric: [columns[column].mean() for columns in trials] for metric, column in metrics.items()}
    return Result(
        protocol=PROTOCOLS["vehicleid-official"],
        columns=metrics,
        per_query={name: np.concatenate([columns[name] for columns in trials]).astype(type_of(name)) for name in trials[0]},
        query_index=query_index,
        labels=inputs.labels[query_index],
        categories=None if inputs.categories is None else inputs.categories[query_index],
        label_names=inputs.label_names,
        category_names=inputs.category_names,
        memory=inputs.memory,
        deviations={m: float(np.std(values, ddof=1)) for m, values in means.items()} if inputs.repeats > 1 else {},
        notes=(f"{inputs.repeats} random galleries of {len(first):,} ids, seed {inputs.seed}",),
    )


def evaluate_lists(settings: Sequence[str], inputs: EvaluationInputs) -> Result:
    """Relevant and excluded candidates are listed for every query, once for each setting."""
    easy, hard, junk = (inputs.lists[name] for name in ("easy", "hard", "junk"))
    relevance = ListedPairs([np.concatenate(pair) for pair in zip(easy, hard, strict=True)], junk)
    queries, num_easy = len(inputs.queries), np.array([len(items) for items in easy])
    sizes = {"easy": num_easy, "medium": relevance.num_relevant, "hard": relevance.num_relevant - num_easy}
    chosen = np.flatnonzero(np.any([sizes[setting] > 0 for setting in settings], axis=0))
    if not len(chosen):
        raise ValueError(f"revisited: no query has a relevant image in the setting {', '.join(settings)}")
    lists = int((relevance.num_relevant > 0).sum()) + (len(chosen) if inputs.neighbours else 0)
    counter = ProgressCounter(inputs.progress, lists * len(inputs.candidates))
    columns: dict[str, NDArray[np.float64]] = {}
    # an easy or hard item is relevant or excluded, never irrelevant: one count of the irrelevant ones serves all settings
    for found in count_against_gallery(
        inputs.queries, inputs.candidates, relevance, pair_budget=inputs.pair_budget, progress=counter
    ):
        step = torch.arange(found.counts.shape[1], device=found.counts.device)
        is_easy = step < torch.from_numpy(num_easy[found.query]).to(step.device)[:, None]
        for setting in settings:
            wanted = {"easy": is_easy, "medium": is_easy | ~is_easy, "hard": ~is_easy}[setting]
            ranked = PositiveRanks.from_counts(found.counts, found.valid & wanted)
            some = ranked.num_relevant.cpu().numpy() > 0
            for name, values in _benchmark_columns(ranked, inputs.ks).items():
                column = columns.setdefault(f"{name}[{setting}]", np.full(queries, np.nan))
                column[found.query[some]] = values.cpu().numpy()[some]
    return Result(
        protocol=PROTOCOLS[_NAME_OF[tuple(settings)]],
        columns={
            **{f"mAP[{s}]": f"average_precision[{s}]" for s in settings},
            **{f"mP@{k}[{s}]": f"precision@{k}[{s}]" for s in settings for k in inputs.ks},
        },
        per_query={name: column[chosen] for name, column in columns.items()},
        query_index=chosen,
        skipped=queries - len(chosen),
        memory=inputs.memory,
        neighbours=_neighbours(inputs, chosen, counter),
    )


def _benchmark_columns(ranked: PositiveRanks, ks: Sequence[int]) -> dict[str, Tensor]:
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
            evaluate_labels,
        ),
        Protocol(
            "query-gallery",
            "Queries are ranked against the gallery only. Candidates with the query's label are relevant. A query that is in "
            f"the gallery itself is taken out of its own list by its row number. {_TIES} A query whose label no gallery item "
            "has leaves the mean and is counted.",
            "In-Shop",
            evaluate_labels,
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
            partial(evaluate_lists, SETTINGS),
        ),
        *(
            Protocol(f"roxford-{name}", _LISTED.format(rule), "one setting of roxford alone", partial(evaluate_lists, (name,)))
            for name, rule in _LISTS.items()
        ),
    )
}


def describe_protocols() -> str:
    """Rules of all protocols and definitions of all metrics as text."""

    def entry(name: str, text: str) -> str:
        return f"{name}\n{textwrap.fill(text, 100, initial_indent='    ', subsequent_indent='    ')}"

    protocols = [entry(p.name, f"{p.rule} Used for {p.used_for}.") for p in PROTOCOLS.values()]
    metrics = [entry(name, text) for name, text in DEFINITIONS.items()]
    return "\n\n".join([*protocols, "Metrics, each the mean over queries of", *metrics])
