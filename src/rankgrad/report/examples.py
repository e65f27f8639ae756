"""Example queries: the best, the worst, some at random; and pairs of classes that are confused."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import plural
from rankgrad.report.markup import absent, cut_middle, element, paragraph, percent, text
from rankgrad.report.run_reader import Evaluation, Index
from rankgrad.report.thumbnails import RIGHT, WRONG, Thumbnails, nearest_of, retrieval_row

CONFUSIONS = 8


def best_and_worst(evaluation: Evaluation, thumbnails: Thumbnails, *, each: int) -> str:
    """Rows of pictures: the best queries, the worst and some at random, each class once."""
    first = evaluation.first_rank
    if evaluation.table is None or evaluation.index is None or first is None or not len(first):
        return absent("Rows of pictures need queries.npz and table.csv: run `rankgrad eval` again.")
    groups = _chosen(evaluation, first, each)
    parts = [_legend(evaluation)]
    for title, rows in groups.items():
        if not rows:
            continue
        near = nearest_of(evaluation, rows)
        if isinstance(near, str):
            return absent(near)
        lines = [
            retrieval_row(evaluation, query, found, scores, thumbnails, about=_about(evaluation, query, first))
            for query, found, scores in zip(rows, *near, strict=True)
        ]
        parts.append(element("h3", text(title)) + "".join(lines))
    return "".join(parts)


def _legend(evaluation: Evaluation) -> str:
    if evaluation.by_lists:
        return paragraph(
            "A query and its neighbours, nearest first, with the cosine. Right and wrong are not marked: the relevant "
            "items are listed by the data set, and a run folder does not have these lists."
        )
    return paragraph(
        "A query and its neighbours, nearest first: ",
        _mark("right", RIGHT),
        " same class, ",
        _mark("wrong", WRONG),
        " another class; the number is the cosine.",
    )


def _mark(kind: str, sign: str) -> str:
    return element("span", element("i", sign), class_=f"mark-{kind}")


def _precision(evaluation: Evaluation) -> NDArray[np.float64] | None:
    for name in ("average_precision", "average_precision[medium]", "average_precision[hard]", "average_precision[easy]"):
        if name in evaluation.queries:
            return evaluation.queries[name]
    return None


def _about(evaluation: Evaluation, query: int, first: NDArray[np.float64]) -> str:
    rank, precision = first[query], _precision(evaluation)
    told = "nothing relevant" if np.isnan(rank) else f"first relevant at {int(rank):,}"
    return told if precision is None else f"{told}, AP {percent(float(precision[query]))}"


def _chosen(evaluation: Evaluation, first: NDArray[np.float64], each: int) -> dict[str, list[int]]:
    """Positions of queries by title; no query twice."""
    assert evaluation.table is not None
    assert evaluation.index is not None
    classes = evaluation.table.classes[evaluation.index]
    precision = _precision(evaluation)
    by = 1 / first if precision is None else precision
    many = evaluation.queries.get("num_relevant", np.ones(len(first)))
    # among perfect lists the long ones come first; the worst are those whose first relevant item ranks lowest;
    # ties are broken at random, since the first items of a table are all of one category
    drawn = np.random.default_rng(0).permutation(len(first))
    best = np.lexsort((drawn, -np.nan_to_num(many), -np.nan_to_num(by, nan=-1)))
    worst = np.lexsort((drawn, np.nan_to_num(by), -np.nan_to_num(first, nan=np.inf)))
    taken: set[int] = set()
    groups = {}
    for title, order in (
        ("Best", best),
        ("Worst", worst),
        ("At random", drawn),
    ):
        groups[title] = _one_per_class(order, classes, taken, each)
        taken |= set(groups[title])
    return groups


def _one_per_class(order: Index, classes: Index, taken: set[int], most: int) -> list[int]:
    chosen: list[int] = []
    seen: set[int] = set()
    for query in order.tolist():
        if len(chosen) == most:
            break
        if query not in taken and int(classes[query]) not in seen:
            chosen.append(query)
            seen.add(int(classes[query]))
    return chosen


@dataclass(frozen=True)
class Confusion:
    """Two classes, how often one is the nearest neighbour of the other, and the example with the highest score."""

    labels: tuple[str, str]
    mistakes: int
    of: int  # queries of the two classes
    query: int  # row of the table
    answer: int


def confusions(evaluation: Evaluation, most: int = CONFUSIONS) -> tuple[list[Confusion], int, int] | str:
    """The most frequent pairs, the number of wrong nearest neighbours, and of those in the category of the query."""
    table, index = evaluation.table, evaluation.index
    if evaluation.by_lists:
        return "Relevance is not a matter of labels under this protocol, so there are no confusions of classes."
    near, scores = (evaluation.queries.get(name) for name in ("neighbours", "scores"))
    if table is None or index is None or near is None or scores is None or not near.shape[1]:
        return "Confusions need the neighbours of all queries, which this test did not save."
    known = near[:, 0] < len(table)
    query, answer, score = index[known], near[known, 0], scores[known, 0]
    wrong = table.classes[query] != table.classes[answer]
    query, answer, score = query[wrong], answer[wrong], score[wrong]
    category = np.array(table.categories)
    within = int(((category[query] == category[answer]) & (category[query] != "")).sum())
    pairs = Counter(
        tuple(sorted(pair)) for pair in zip(table.classes[query].tolist(), table.classes[answer].tolist(), strict=True)
    )
    sizes = Counter(table.classes[index].tolist())
    found = []
    for (a, b), mistakes in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:most]:
        here = np.isin(table.classes[query], (a, b)) & np.isin(table.classes[answer], (a, b))
        surest = int(np.argmax(np.where(here, score, -np.inf)))
        rows = int(query[surest]), int(answer[surest])
        labels = (table.caption(rows[0]), table.caption(rows[1]))
        found.append(Confusion(labels, mistakes, sizes[a] + sizes[b], *rows))
    return found, len(query), within


def confusion_cards(evaluation: Evaluation, thumbnails: Thumbnails) -> str:
    """Pairs of classes that are confused, with an example of each."""
    found = confusions(evaluation)
    if isinstance(found, str):
        return absent(found)
    pairs, mistakes, within = found
    if not pairs:
        return paragraph("Every nearest neighbour is of the right class.")
    assert evaluation.table is not None
    told = f"{plural(mistakes, 'query', 'queries')} of {evaluation.count:,} have a nearest neighbour of another class"
    if any(evaluation.table.categories):
        told += f", {percent(within / mistakes, 0)}% of them within the category of the query"
    return paragraph(f"{text(told)}. The most frequent pairs of classes, each with its most similar example:") + element(
        "div", *(_card(evaluation, pair, thumbnails) for pair in pairs), class_="cards"
    )


def _card(evaluation: Evaluation, pair: Confusion, thumbnails: Thumbnails) -> str:
    assert evaluation.table is not None
    names: Sequence[str] = [cut_middle(label, 28) for label in pair.labels]
    return element(
        "div",
        thumbnails.of(evaluation.table, pair.query),
        element("span", "\N{RIGHTWARDS ARROW}", class_="arrow"),
        thumbnails.of(evaluation.table, pair.answer),
        element("p", element("b", text(f"{names[0]} and {names[1]}")), text(f" {pair.mistakes} of {pair.of} queries")),
        class_="card",
    )
