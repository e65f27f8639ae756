"""Pairs of tests: differences with paired intervals, and the queries that one wins and the other loses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import plural
from rankgrad.eval.metrics import COLUMN_OF
from rankgrad.eval.result import bootstrap_intervals
from rankgrad.report.groups import EvaluationGroup, GroupMember
from rankgrad.report.markup import absent, details, element, paragraph, text
from rankgrad.report.run_reader import Evaluation, Index, Run
from rankgrad.report.thumbnails import Thumbnails, answers, nearest_of, query_cell

SAMPLES = 1000
LEVEL = 0.95
ROWS = 2
STRIP = 5
"""Neighbours of each run in a row of a comparison."""


def column_of(metric: str) -> str:
    """The column of queries.npz that a metric is the mean of."""
    name, bracket, setting = metric.partition("[")
    column = COLUMN_OF.get(name) or re.sub(r"^R@", "hit@", re.sub(r"^m?P@", "precision@", name))
    return f"{column}{bracket}{setting}"


def same_queries(first: Evaluation, other: Evaluation) -> bool:
    """Whether both tests have the same queries, candidates and protocol."""
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
    """Other run minus first run: the mean over queries and its interval."""

    mean: float
    low: float
    high: float


def differences(first: Evaluation, other: Evaluation, metrics: Sequence[str]) -> dict[str, Difference]:
    """Differences of metrics with paired bootstrap intervals; empty if the queries are not the same."""
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
    """Positions of queries whose first relevant item moved, those that moved most first."""

    won: Index
    lost: Index
    won_first: int  # wrong at rank 1 before, right now
    lost_first: int


def wins_and_losses(first: Evaluation, other: Evaluation) -> WinsAndLosses | None:
    """Queries that `other` wins and loses against `first`; None if the queries are not the same."""
    before, after = first.first_rank, other.first_rank
    if before is None or after is None or not same_queries(first, other):
        return None
    # relative: from 2 to 1 is as far as from 200 to 100
    moved = np.nan_to_num(np.log(before) - np.log(after))
    order = np.argsort(-moved, kind="stable")
    return WinsAndLosses(
        won=order[moved[order] > 0],
        lost=order[::-1][moved[order[::-1]] < 0],
        won_first=int(((before > 1) & (after == 1)).sum()),
        lost_first=int(((before == 1) & (after > 1)).sum()),
    )


def won_and_lost(groups: Sequence[EvaluationGroup], thumbnails: Thumbnails) -> str:
    """For each other run of a group, the queries it wins and loses against the first."""
    parts = []
    for group in groups:
        first, *others = group.members
        if not others:
            parts.append(absent(f"{first.name}: no other run was tested on the same data, split and protocol."))
        for place, other in enumerate(others):
            parts.append(_against(first, other, thumbnails, is_open=not parts and not place))
    return "".join(parts)


def _against(first: GroupMember, other: GroupMember, thumbnails: Thumbnails, *, is_open: bool) -> str:
    title = f"{other.name} against {first.name}"
    change = wins_and_losses(first.evaluation, other.evaluation)
    if change is None:
        return element("h3", text(title)) + absent("queries.npz or table.csv of one of them is missing or damaged.")
    parts = [paragraph(text(_summary(change, first.evaluation)))]
    for name, queries in (("Won", change.won), ("Lost", change.lost)):
        if len(queries):
            parts.append(element("h4", name))
            parts.append(_rows({first.name: first.evaluation, other.name: other.evaluation}, queries, thumbnails))
    return details(title, "".join(parts), is_open=is_open)


def _summary(change: WinsAndLosses, base: Evaluation) -> str:
    total = len(base.index) if base.index is not None else 0
    return (
        f"The first relevant item ranks higher for {plural(len(change.won), 'query', 'queries')} and lower for "
        f"{len(change.lost):,} of {total:,}. {change.won_first:,} became right at rank 1, {change.lost_first:,} became wrong."
    )


def _rows(tests: Mapping[str, Evaluation], queries: Index, thumbnails: Thumbnails) -> str:
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
                    element("small", text(f"{name}: first relevant at {ranks[-1]}")),
                    answers(evaluation, query, found[place], scores[place], thumbnails),
                    class_="strip",
                )
            )
        about = f"rank {ranks[0]} \N{RIGHTWARDS ARROW} {ranks[1]}"
        rows.append(
            element(
                "div",
                query_cell(base, query, thumbnails, about),
                element("div", *strips, class_="strips several"),
                class_="found",
            )
        )
    return "".join(rows)


def _spread(evaluation: Evaluation, queries: Index) -> list[int]:
    """The first queries of different classes."""
    assert evaluation.table is not None
    assert evaluation.index is not None
    classes = evaluation.table.classes[evaluation.index[queries]]
    firsts = np.sort(np.unique(classes, return_index=True)[1])[:ROWS]
    chosen: list[int] = queries[firsts].tolist()
    return chosen


def differing_settings(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Settings that are not the same in all runs, with their values."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}
