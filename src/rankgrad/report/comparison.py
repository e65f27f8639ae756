"""Runs against each other: differences with paired intervals, and the queries that one wins and another loses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankgrad.eval.metrics import COLUMN_OF
from rankgrad.eval.result import bootstrap_intervals
from rankgrad.report.markup import absent, element, paragraph, plural, text
from rankgrad.report.run_reader import Evaluation, Index, Run
from rankgrad.report.thumbnails import Thumbnails, answers, nearest_of, query_cell

SAMPLES = 1000
LEVEL = 0.95
ROWS = 4
STRIP = 5
"""Neighbours of each run that a row of a comparison has room for."""


def column_of(metric: str) -> str:
    """The column of queries.npz that a metric is the mean of."""
    name, bracket, setting = metric.partition("[")
    column = COLUMN_OF.get(name) or re.sub(r"^R@", "hit@", re.sub(r"^m?P@", "precision@", name))
    return f"{column}{bracket}{setting}"


def same_queries(first: Evaluation, other: Evaluation) -> bool:
    """Whether both answered the same queries with the same candidates under the same protocol."""
    a, b = first.table, other.table
    if first.index is None or other.index is None or a is None or b is None or first.protocol != other.protocol:
        return False
    return (
        a.paths == b.paths
        and bool((a.is_query == b.is_query).all() and (a.is_gallery == b.is_gallery).all())
        and np.array_equal(first.index, other.index)
        and np.array_equal(first.queries.get("trial", np.empty(0)), other.queries.get("trial", np.empty(0)))
    )


@dataclass(frozen=True)
class Difference:
    """Other run less first run: the mean over queries and its interval."""

    mean: float
    low: float
    high: float


def differences(first: Evaluation, other: Evaluation, metrics: Sequence[str]) -> dict[str, Difference]:
    """Differences of metrics with paired bootstrap intervals: the same queries are drawn for both. None for other queries."""
    if not same_queries(first, other):
        return {}
    assert first.index is not None
    columns = {metric: column_of(metric) for metric in metrics}
    known = {m: c for m, c in columns.items() if c in first.queries and c in other.queries}
    if not known or not len(first.index):
        return {}
    values = np.stack(
        [other.queries[c].astype(np.float64) - first.queries[c].astype(np.float64) for c in known.values()], axis=1
    )
    bounds = bootstrap_intervals(values, first.index, level=LEVEL, samples=SAMPLES, seed=0)
    counted = ~np.isnan(values)
    means = np.where(counted, values, 0).sum(axis=0) / np.maximum(counted.sum(axis=0), 1)
    return {m: Difference(float(mean), *map(float, pair)) for m, mean, pair in zip(known, means, bounds, strict=True)}


@dataclass(frozen=True, eq=False)
class WinsAndLosses:
    """Queries by their position whose first right answer moved, those that moved most first."""

    won: Index
    lost: Index
    won_first: int  # wrong first answer before, right first answer now
    lost_first: int


def wins_and_losses(first: Evaluation, other: Evaluation) -> WinsAndLosses | None:
    """What `other` wins and loses against `first`; None where they answered different queries."""
    before, after = first.first_rank, other.first_rank
    if before is None or after is None or not same_queries(first, other):
        return None
    # in proportion: from 2 to 1 is as far as from 200 to 100
    moved = np.nan_to_num(np.log(before) - np.log(after))
    order = np.argsort(-moved, kind="stable")
    return WinsAndLosses(
        won=order[moved[order] > 0],
        lost=order[::-1][moved[order[::-1]] < 0],
        won_first=int(((before > 1) & (after == 1)).sum()),
        lost_first=int(((before == 1) & (after > 1)).sum()),
    )


def won_and_lost(first: Run, others: Sequence[Run], split: str | None, pictures: Thumbnails) -> str:
    """For each other run, what it wins and loses against the first."""
    base = first.evaluation(split)
    parts = []
    for other in others:
        parts.append(element("h3", text(f"{other.name} against {first.name}")))
        found = other.evaluation(split)
        change = None if base is None or found is None else wins_and_losses(base, found)
        if change is None or base is None or found is None:
            parts.append(absent("The two runs were not tested on the same queries and candidates, or a test is missing."))
            continue
        parts.append(paragraph(text(_summary(change, base))))
        for title, queries in (("Won", change.won), ("Lost", change.lost)):
            if len(queries):
                parts.append(element("h4", title))
                parts.append(_rows({first.name: base, other.name: found}, queries, pictures))
    return "".join(parts)


def _summary(change: WinsAndLosses, base: Evaluation) -> str:
    total = len(base.index) if base.index is not None else 0
    return (
        f"The first right answer comes earlier for {plural(len(change.won), 'query', 'queries')} and later for "
        f"{len(change.lost):,} of {total:,}. {change.won_first:,} that had a wrong first answer now have a right one, "
        f"{change.lost_first:,} the other way round."
    )


def _rows(tests: Mapping[str, Evaluation], queries: Index, pictures: Thumbnails) -> str:
    (_, base), *_ = tests.items()
    chosen = _spread(base, queries)
    lists: dict[str, tuple[Index, NDArray[np.float32]]] = {}
    for name, evaluation in tests.items():
        near = nearest_of(evaluation, chosen, STRIP)
        if isinstance(near, str):
            return absent(near)
        lists[name] = near
    rows = []
    for place, query in enumerate(chosen):
        strips = []
        ranks = []
        for name, evaluation in tests.items():
            first = evaluation.first_rank
            assert first is not None
            found, scores = lists[name]
            ranks.append(f"{int(first[query]):,}")
            strips.append(
                element(
                    "div",
                    element("small", text(f"{name}: first right at {ranks[-1]}")),
                    answers(evaluation, query, found[place], scores[place], pictures),
                    class_="strip",
                )
            )
        about = f"rank {ranks[0]} \N{RIGHTWARDS ARROW} {ranks[1]}"
        rows.append(
            element("div", query_cell(base, query, pictures, about), element("div", *strips, class_="strips"), class_="found")
        )
    return "".join(rows)


def _spread(evaluation: Evaluation, queries: Index) -> list[int]:
    """The first queries, one of each class."""
    assert evaluation.table is not None
    assert evaluation.index is not None
    classes = evaluation.table.classes[evaluation.index[queries]]
    firsts = np.sort(np.unique(classes, return_index=True)[1])[:ROWS]
    chosen: list[int] = queries[firsts].tolist()
    return chosen


def differing_settings(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Settings that are not the same in all runs, with the value in each."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}
