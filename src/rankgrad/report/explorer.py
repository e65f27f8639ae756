"""Data for the script of the page: every query with its neighbours, to be filtered, enlarged and followed.

The page works without it: a script that does not run leaves the rows of examples as they are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import plural
from rankgrad.eval import neighbours
from rankgrad.report.charts import colour_of
from rankgrad.report.groups import EvaluationGroup
from rankgrad.report.rank_statistics import sample
from rankgrad.report.retrieval_sections import map_items
from rankgrad.report.run_reader import Evaluation, Index
from rankgrad.report.thumbnails import SHOWN, Thumbnails, nearest_of

MAX_QUERIES = 10_000
# base64 of the thumbnails of all groups; a page of 10,000 queries has about 3 MB of other data
MAX_BYTES = 19_000_000


@dataclass(frozen=True, eq=False)
class _NeighbourLists:
    """Neighbours of items of a table."""

    item: Index  # [N]
    near: Index  # [N, k]
    scores: NDArray[np.float32]  # [N, k]


def explorer(groups: Sequence[EvaluationGroup], thumbnails: Thumbnails) -> list[tuple[str, str]]:
    """Blocks of JSON by name: "explorer" describes the groups, "thumbnails-0" and so on have their thumbnails."""
    described: list[dict[str, Any]] = []
    blocks = []
    for group in groups:
        found = _group(group, thumbnails, MAX_BYTES // len(groups))
        if found is not None:
            description, encoded = found
            # one text and where each begins in it: a script finds a few of thousands without parsing all
            ends = np.cumsum([len(each or "") for each in encoded]).tolist()
            blocks.append((f"thumbnails-{len(described)}", as_json("".join(each or "" for each in encoded))))
            described.append({**description, "ends": ends})
    return [("explorer", as_json({"prefix": thumbnails.prefix, "groups": described})), *blocks] if described else []


def as_json(value: object) -> str:
    """JSON that cannot end the element it is in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _group(group: EvaluationGroup, thumbnails: Thumbnails, max_bytes: int) -> tuple[dict[str, Any], list[str | None]] | None:
    members = [member for member in group.members if _is_complete(member.evaluation)]
    if not members:
        return None
    first = members[0].evaluation
    table = first.table
    assert table is not None
    members = [each for each in members if each.evaluation.table is not None and each.evaluation.table.paths == table.paths]
    queries = _chosen(first)
    lists = []
    for member in list(members):
        found = _lists(member.evaluation, queries)
        if found is None:
            members.remove(member)
        else:
            lists.append(found)
    if not lists:
        return None
    near = [each.near.ravel() for each in lists]
    others = np.unique(np.concatenate([*near, map_items(table)]))
    items = np.concatenate((queries, np.setdiff1d(others[others < len(table)], queries)))
    position = np.full(len(table), -1)
    position[items] = np.arange(len(items))
    runs = []
    for member, found in zip(members, lists, strict=True):
        runs.append(
            {
                "name": member.name,
                "colour": colour_of(member.place),
                **_columns(member.evaluation, items),
                **_neighbours(member.evaluation, found, items, position),
            }
        )
    names = sorted({table.caption(row) for row in items.tolist()})
    number = {name: place for place, name in enumerate(names)}
    total = len(first.index) if first.index is not None else len(queries)
    description = {
        "title": group.title,
        "tables": sorted({thumbnails.number(each.evaluation.table) for each in members if each.evaluation.table is not None}),
        "marked": not first.by_lists,
        "rows": items.tolist(),
        "paths": [table.shown_name(row) for row in items.tolist()],
        "of_texts": bool(table.texts),
        "classes": names,
        "class": [number[table.caption(row)] for row in items.tolist()],
        "label": np.unique(table.classes[items], return_inverse=True)[1].tolist(),
        "category": [table.categories[row] for row in items.tolist()] if any(table.categories) else [],
        "queries": len(queries),
        "note": "" if len(queries) == total else f"the worst and some others of {plural(total, 'query', 'queries')}",
        "runs": runs,
    }
    return description, thumbnails.encode_all(table, items.tolist(), max_bytes)


def _is_complete(evaluation: Evaluation) -> bool:
    index, first = evaluation.index, evaluation.first_rank
    return evaluation.table is not None and index is not None and first is not None and len(index) > 0


def _chosen(evaluation: Evaluation) -> Index:
    """Items that are queries, the worst first; where there are too many, half of them the worst and half at random."""
    index, first = evaluation.index, evaluation.first_rank
    assert index is not None
    assert first is not None
    order = np.argsort(-np.nan_to_num(first, nan=np.inf), kind="stable")
    if len(order) > MAX_QUERIES:
        worst, rest = order[: MAX_QUERIES // 2], order[MAX_QUERIES // 2 :]
        order = np.concatenate((worst, rest[sample(len(rest), MAX_QUERIES - len(worst))]))
    _, unique = np.unique(index[order], return_index=True)
    return index[order][np.sort(unique)]


def _lists(evaluation: Evaluation, queries: Index) -> _NeighbourLists | None:
    index = evaluation.index
    assert index is not None
    by_item = np.argsort(index, kind="stable")
    found = np.minimum(np.searchsorted(index[by_item], queries), len(index) - 1)
    positions = by_item[found]
    if not np.array_equal(index[positions], queries):
        return None
    near = nearest_of(evaluation, positions.tolist(), SHOWN)
    return None if isinstance(near, str) else _NeighbourLists(queries, *near)


def _columns(evaluation: Evaluation, items: Index) -> dict[str, Any]:
    """Rank of the first relevant item and AP in percent of every item, 0 and null where it is not a query."""
    index, first = evaluation.index, evaluation.first_rank
    assert index is not None
    assert first is not None
    ranks = dict(zip(index.tolist(), np.nan_to_num(first).astype(int).tolist(), strict=True))
    precision = next((evaluation.queries[name] for name in evaluation.queries if name.startswith("average_precision")), None)
    aps = {} if precision is None else dict(zip(index.tolist(), np.round(100 * precision, 1).tolist(), strict=True))
    return {
        "first": [ranks.get(row, 0) for row in items.tolist()],
        "ap": [None if (value := aps.get(row)) is None or np.isnan(value) else value for row in items.tolist()],
    }


def _neighbours(evaluation: Evaluation, lists: _NeighbourLists, items: Index, position: Index) -> dict[str, Any]:
    """Neighbours of every item, those of items that are not queries computed here if the embeddings are there."""
    rest = items[len(lists.item) :]
    near, scores = _local(lists.near, position), lists.scores
    table, embeddings = evaluation.table, evaluation.embeddings
    assert table is not None
    gallery = np.flatnonzero(table.is_gallery)
    k = min(SHOWN, len(gallery) - 1)
    if len(rest) and embeddings is not None and k >= 1 and k == near.shape[1] and np.isfinite(embeddings[rest]).all():
        gallery_row = np.full(len(table), -1)
        gallery_row[gallery] = np.arange(len(gallery))
        more_scores, more = neighbours(embeddings[rest], embeddings[gallery], k, gallery_row[rest])
        near = np.concatenate((near, _local(gallery[more], position)))
        scores = np.concatenate((scores, more_scores))
    return {"k": near.shape[1], "near": near.ravel().tolist(), "scores": np.round(1000 * scores).astype(int).ravel().tolist()}


def _local(near: Index, position: Index) -> Index:
    """Positions among the items of the page; -1 for a distractor, -2 for an item that is not on the page."""
    known = position[np.minimum(near, len(position) - 1)]
    return np.where(near >= len(position), -1, np.where(known < 0, -2, known))
