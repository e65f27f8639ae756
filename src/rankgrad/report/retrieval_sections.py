"""Sections about one group of tests: ranks of relevant items, R@k, precision by recall, categories, the map."""

import importlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad._messages import plural
from rankgrad.report.charts import Bar, Dot, Series, bars, colour_of, dash_of, histogram, line, scatter
from rankgrad.report.groups import EvaluationGroup, GroupMember
from rankgrad.report.headline import every_metric
from rankgrad.report.markup import absent, element, percent, text
from rankgrad.report.rank_statistics import RECALLS, RankStatistics, bin_names, cut_offs, hit_rates, rank_statistics, sample
from rankgrad.report.run_reader import Evaluation, Index, ItemTable
from rankgrad.report.thumbnails import Thumbnails

MAX_CATEGORIES = 40
# more points take t-SNE minutes and the page megabytes
MAX_POINTS = 1200
# classes of the style sheet: c0, c1, ...
CLASS_COLOURS = 12
CATEGORY_COLOURS = ("accent", "wrong", "other", "violet", "yellow", "red", "ink")


def ranks(groups: Sequence[EvaluationGroup]) -> str:
    """Charts of the ranks of relevant items, R@k, precision by recall; and the other metrics."""
    if not groups:
        return absent("Nothing has been tested yet: run `rankgrad eval RUN`.")
    return "".join(_heading(group, groups) + _ranks(group) for group in groups)


def _heading(group: EvaluationGroup, groups: Sequence[EvaluationGroup]) -> str:
    """Names a group if there are several: they are not comparable."""
    names = ", ".join(member.name for member in group.members)
    return element("h3", text(f"{group.title}: {names}")) if len(groups) > 1 else ""


def _ranks(group: EvaluationGroup) -> str:
    found = [(member, rank_statistics(member.evaluation)) for member in group.members]
    counted = [(member, each) for member, each in found if isinstance(each, RankStatistics)]
    parts = []
    if counted:
        parts.append(_rank_histogram(counted))
    parts.append(_hit_rates(group))
    if counted:
        parts.append(_precision_by_recall(counted, group))
    parts.append(every_metric(group))
    several = len(group.members) > 1
    remarks = [absent(f"{member.name}: {each}" if several else each) for member, each in found if isinstance(each, str)]
    return element("div", *filter(None, parts), class_="charts") + "".join(remarks)


def _sampled(each: RankStatistics) -> str:
    return (
        f"{each.queries:,} of {each.of:,} queries, sampled at random" if each.queries < each.of else f"all {each.of:,} queries"
    )


def _name(member: GroupMember, group: EvaluationGroup) -> str:
    return member.name if len(group.members) > 1 else ""


def _rank_histogram(counted: Sequence[tuple[GroupMember, RankStatistics]]) -> str:
    bins = max(len(each.ranks) for _, each in counted)
    series = []
    for member, each in counted:
        shares = np.pad(each.ranks, (0, bins - len(each.ranks))) / max(each.ranks.sum(), 1)
        series.append(Series(member.name, range(bins), shares.tolist(), colour_of(member.place)))
    first = counted[0][1]
    ideal = np.pad(first.ideal, (0, bins - len(first.ideal))) / max(first.ideal.sum(), 1)
    return histogram(
        bin_names(bins),
        series,
        title="Ranks of relevant items",
        about=f"Fraction of all relevant items at each rank; {_sampled(first)}.",
        x="rank",
        y="percent",
        marks=ideal.tolist(),
        mark_name="perfect lists",
    )


def _hit_rates(group: EvaluationGroup) -> str:
    series = []
    for member in group.members:
        place, test = member.place, member.evaluation
        columns = {name: column for name, column in test.queries.items() if name.startswith("first_rank")}
        for turn, (name, column) in enumerate(columns.items()):
            ks = cut_offs(int(np.nanmax(column)) if len(column) and not np.isnan(column).all() else 2)
            setting = name.removeprefix("first_rank").strip("[]")
            label = " ".join(part for part in (_name(member, group), setting) if part)
            colour = place if len(columns) == 1 else place + turn
            series.append(Series(label, ks.tolist(), hit_rates(column, ks).tolist(), colour_of(colour), dash_of(turn or place)))
    if not series:
        return absent("The R@k curve needs queries.npz: run `rankgrad eval` again.")
    return line(
        series,
        title="R@k",
        about="Fraction of queries with a relevant item among the first k.",
        x="k",
        y="percent",
        log_x=True,
        percent=True,
        ceiling=1.0,
    )


def _precision_by_recall(counted: Sequence[tuple[GroupMember, RankStatistics]], group: EvaluationGroup) -> str:
    series = [
        Series(
            _name(member, group),
            (100 * RECALLS).tolist(),
            each.precision.tolist(),
            colour_of(member.place),
            dash_of(member.place),
        )
        for member, each in counted
    ]
    return line(
        series,
        title="Precision by recall",
        about=f"Mean over queries of the precision at each recall; {_sampled(counted[0][1])}.",
        x="recall, percent",
        y="precision, percent",
        percent=True,
        floor=0.0,
        ceiling=1.0,
    )


def categories(groups: Sequence[EvaluationGroup]) -> str:
    """A bar for each category, the best first, with its number of queries."""
    known = [group for group in groups if any(member.evaluation.per_category for member in group.members)]
    if not known:
        return ""
    return "".join(_heading(group, groups) + _categories(group) for group in known)


def _categories(group: EvaluationGroup) -> str:
    known = [(each.place, each.run, each.evaluation) for each in group.members if each.evaluation.per_category]
    metric = next((m for m in ("R@1", "mAP", *known[0][2].metrics) if m in known[0][2].metrics), "R@1")
    names = list(dict.fromkeys(name for _, _, test in known for name in test.per_category))
    rows = []
    for name in names:
        means = [test.per_category.get(name, {}) for _, _, test in known]
        count = next((int(each["queries"]) for each in means if math.isfinite(each.get("queries", math.nan))), 0)
        values = [each.get(metric, math.nan) for each in means]
        rows.append(Bar(f"{name} ({count:,})", values, plural(count, "query", "queries")))
    rows.sort(key=lambda row: -np.nan_to_num(row.values[0], nan=-1))
    about = "Number of queries in parentheses."
    if len(rows) > MAX_CATEGORIES:
        half = MAX_CATEGORIES // 2
        about += f" The {half} best and the {half} worst of {len(rows)} categories."
        rows = [*rows[:half], *rows[-half:]]
    # two short charts side by side read better than a long one
    halves = [rows[: math.ceil(len(rows) / 2)], rows[math.ceil(len(rows) / 2) :]] if len(rows) > 10 else [rows]
    drawn = [
        bars(
            part,
            [run.name for _, run, _ in known],
            title=f"{metric} by category" + (", continued" if place else ""),
            about="The weaker half." if place else about,
            letters=max(len(row.name) for row in rows),
            colours=[colour_of(at) for at, _, _ in known],
        )
        for place, part in enumerate(halves)
    ]
    return element("div", *drawn, class_="charts")


def embedding_map(groups: Sequence[EvaluationGroup], thumbnails: Thumbnails) -> str:
    """The embeddings in two dimensions, neighbours near each other."""
    drawn = []
    members = [member for group in groups for member in group.members]
    if not members:
        return absent("Nothing has been tested yet: run `rankgrad eval RUN`.")
    for member in members:
        prefix = f"{member.name}: " if len(members) > 1 else ""
        test = member.evaluation
        if test.embeddings is None or test.table is None or len(test.table) < 3:
            drawn.append(absent(f"{prefix}A map needs embeddings.npy and table.csv of a test with at least three items."))
            continue
        rows = map_items(test.table)
        vectors = np.asarray(test.embeddings[rows], dtype=np.float32)
        if not np.isfinite(vectors).all():
            drawn.append(absent(f"{prefix}The embeddings are not all finite."))
            continue
        drawn.append(_maps(member, rows, vectors, thumbnails.number(test.table), several=len(members) > 1))
    return element("div", *drawn, class_="charts") if any(part.startswith("<figure") for part in drawn) else "".join(drawn)


def map_items(table: ItemTable) -> Index:
    """Items that a map shows."""
    return sample(len(table), MAX_POINTS)


def _maps(member: GroupMember, rows: Index, vectors: NDArray[np.float32], table: int, *, several: bool) -> str:
    """One run has maps by class, by category and by first answer, each of several runs the first of these."""
    test = member.evaluation
    assert test.table is not None
    places, method = project(vectors)
    told = plural(len(rows), test.table.noun)
    told += f" of {len(test.table):,}, sampled at random" if len(rows) < len(test.table) else ""
    names = [", ".join(filter(None, (test.table.caption(row), test.table.categories[row]))) for row in rows.tolist()]
    drawn = []
    for title, colours, legend in _colourings(test, rows):
        dots = [
            Dot(x, y, colour, name, f"{table} {row}")
            for (x, y), colour, name, row in zip(places.tolist(), colours, names, rows.tolist(), strict=True)
        ]
        about = f"{title}. " if several else ""
        drawn.append(
            scatter(dots, title=member.name if several else title, about=f"{about}{method}; {told}.", legend=legend, small=True)
        )
    return "".join(drawn[:1] if several else drawn)


Colouring = tuple[str, list[str], list[tuple[str, str]]]
"""Title of a map, the colours of its points, and the legend."""


def _colourings(test: Evaluation, rows: NDArray[np.int64]) -> list[Colouring]:
    """By class, and by category and by first answer if they are known."""
    known = (_by_class(test, rows), _by_category(test, rows), _by_answer(test, rows))
    return [each for each in known if each is not None]


def _by_class(test: Evaluation, rows: NDArray[np.int64]) -> Colouring:
    assert test.table is not None
    names = [test.table.caption(row) for row in rows.tolist()]
    number = {name: place for place, name in enumerate(sorted(set(names)))}
    colours = [f"c{number[name] % CLASS_COLOURS}" for name in names]
    legend = [(name, f"c{place}") for name, place in number.items()] if len(number) <= CLASS_COLOURS else []
    title = "By class" if legend else f"By class ({len(number):,} classes in {CLASS_COLOURS} colours)"
    return title, colours, legend


def _by_category(test: Evaluation, rows: NDArray[np.int64]) -> Colouring | None:
    assert test.table is not None
    names = [test.table.categories[row] for row in rows.tolist()]
    if not any(names):
        return None
    common = [name for name, _ in Counter(name for name in names if name).most_common(len(CATEGORY_COLOURS))]
    colours = dict(zip(common, CATEGORY_COLOURS, strict=False))
    others = len(set(names) - set(common) - {""})
    legend = [*colours.items()]
    if others:
        legend.append((plural(others, "other category", "other categories"), "faint"))
    return "By category", [colours.get(name, "faint") for name in names], legend


def _by_answer(test: Evaluation, rows: NDArray[np.int64]) -> Colouring | None:
    if test.index is None or test.first_rank is None:
        return None
    first = dict(zip(test.index.tolist(), test.first_rank.tolist(), strict=True))
    colours = ["faint" if row not in first else "accent" if first[row] == 1 else "wrong" for row in rows.tolist()]
    legend = [("right", "accent"), ("wrong", "wrong"), ("not a query", "faint")]
    return "By first answer", colours, [pair for pair in legend if pair[1] in colours]


def project(vectors: NDArray[np.float32]) -> tuple[NDArray[np.float64], str]:
    """[N, 2] positions and the method: t-SNE if scikit-learn is installed, else principal components."""
    rows = torch.nn.functional.normalize(torch.from_numpy(np.array(vectors)).double(), dim=1)
    # t-SNE of fewer points is not meaningful
    if len(rows) >= 30 and importlib.util.find_spec("sklearn") is not None:
        manifold = importlib.import_module("sklearn.manifold")
        with warnings.catch_warnings():
            # about threads and future defaults: the reader of a page can do nothing about it
            warnings.simplefilter("ignore")
            found = manifold.TSNE(perplexity=min(30, (len(rows) - 1) / 3), init="pca", random_state=0).fit_transform(
                rows.numpy()
            )
        if np.isfinite(found).all():
            return np.asarray(found, dtype=np.float64), "t-SNE: only small distances are meaningful"
    centred = rows - rows.mean(dim=0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = directions[:2]
    total = float(values.square().sum())
    share = float(values[:2].square().sum()) / total if total else 1.0
    places = torch.nn.functional.pad(centred @ kept.t(), (0, 2 - len(kept)))
    # signs of singular vectors are arbitrary: the largest entry of each is made positive, so pages are reproducible
    flip = torch.sign(places.gather(0, places.abs().argmax(dim=0, keepdim=True)))
    return (
        places * torch.where(flip == 0, 1.0, flip)
    ).numpy(), f"two principal components, {percent(share, 0)}% of the variance"
