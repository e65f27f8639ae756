"""Ranks of relevant items, R@k, precision by recall, categories, and the embeddings in the plane."""

import importlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad.report.charts import Bar, Dot, Series, bars, colour_of, dash_of, histogram, line, scatter
from rankgrad.report.headline import every_metric
from rankgrad.report.markup import absent, element, percent, plural
from rankgrad.report.rank_statistics import RECALLS, RankStatistics, bin_names, cut_offs, positives, sample, share_found
from rankgrad.report.run_reader import Evaluation, Run

MOST_CATEGORIES = 40
# exact t-SNE of more points takes minutes, and a page of more points megabytes
MOST_POINTS = 1200
CATEGORY_COLOURS = ("accent", "wrong", "other", "violet", "yellow", "red", "ink")


def ranks(runs: Sequence[Run], split: str | None) -> str:
    """Charts of where relevant items stand, how soon the first comes, precision by recall; and the other metrics."""
    tests = [(place, run, run.evaluation(split)) for place, run in enumerate(runs)]
    tested = [(place, run, test) for place, run, test in tests if test is not None]
    if not tested:
        return absent("Nothing has been tested yet: `rankgrad eval RUN` does it.")
    found = [(place, run, positives(test)) for place, run, test in tested]
    counted = [(place, run, each) for place, run, each in found if isinstance(each, RankStatistics)]
    parts = []
    if counted:
        parts.append(_rank_histogram(runs, counted))
    parts.append(_found_by(runs, tested))
    if counted:
        parts.append(_precision_by_recall(runs, counted))
    parts.append(every_metric(runs, split))
    remarks = [absent(f"{run.name}: {each}" if len(runs) > 1 else each) for _, run, each in found if isinstance(each, str)]
    return element("div", *filter(None, parts), class_="charts") + "".join(remarks)


def _seen(each: RankStatistics) -> str:
    return f"{each.queries:,} of {each.of:,} queries, drawn at random" if each.queries < each.of else f"all {each.of:,} queries"


def _name(run: Run, runs: Sequence[Run]) -> str:
    return run.name if len(runs) > 1 else ""


def _rank_histogram(runs: Sequence[Run], counted: Sequence[tuple[int, Run, RankStatistics]]) -> str:
    bins = max(len(each.ranks) for _, _, each in counted)
    series = []
    for place, run, each in counted:
        shares = np.pad(each.ranks, (0, bins - len(each.ranks))) / max(each.ranks.sum(), 1)
        series.append(Series(run.name, range(bins), shares.tolist(), colour_of(place)))
    first = counted[0][2]
    ideal = np.pad(first.ideal, (0, bins - len(first.ideal))) / max(first.ideal.sum(), 1)
    return histogram(
        bin_names(bins),
        series,
        title="Ranks of the relevant items",
        about=f"Share of all relevant items at each rank; {_seen(first)}.",
        x="rank",
        y="percent",
        marks=ideal.tolist(),
        mark_name="if every list were perfect",
    )


def _found_by(runs: Sequence[Run], tested: Sequence[tuple[int, Run, Evaluation]]) -> str:
    series = []
    for place, run, test in tested:
        columns = {name: column for name, column in test.queries.items() if name.startswith("first_rank")}
        for turn, (name, column) in enumerate(columns.items()):
            ks = cut_offs(int(np.nanmax(column)) if len(column) and not np.isnan(column).all() else 2)
            setting = name.removeprefix("first_rank").strip("[]")
            label = " ".join(part for part in (_name(run, runs), setting) if part)
            colour = place if len(columns) == 1 else place + turn
            series.append(
                Series(label, ks.tolist(), share_found(column, ks).tolist(), colour_of(colour), dash_of(turn or place))
            )
    if not series:
        return absent("The R@k curve needs queries.npz: test the run again with `rankgrad eval`.")
    return line(
        series,
        title="R@k",
        about="Share of queries with a right answer among the first k.",
        x="k",
        y="percent",
        log_x=True,
        percent=True,
        ceiling=1.0,
    )


def _precision_by_recall(runs: Sequence[Run], counted: Sequence[tuple[int, Run, RankStatistics]]) -> str:
    series = [
        Series(_name(run, runs), (100 * RECALLS).tolist(), each.precision.tolist(), colour_of(place), dash_of(place))
        for place, run, each in counted
    ]
    return line(
        series,
        title="Precision by recall",
        about=f"Mean precision at the place where a share of a query's relevant items is found; {_seen(counted[0][2])}.",
        x="recall, percent",
        y="precision, percent",
        percent=True,
        floor=0.0,
        ceiling=1.0,
    )


def categories(runs: Sequence[Run], split: str | None) -> str:
    """A bar for each category, the best first, with the number of its queries."""
    tests = [(place, run, run.evaluation(split)) for place, run in enumerate(runs)]
    known = [(place, run, test) for place, run, test in tests if test is not None and test.per_category]
    if not known:
        return absent("The test has no categories.")
    metric = next((m for m in ("R@1", "mAP", *known[0][2].metrics) if m in known[0][2].metrics), "R@1")
    names = list(dict.fromkeys(name for _, _, test in known for name in test.per_category))
    rows = []
    for name in names:
        means = [test.per_category.get(name, {}) for _, _, test in known]
        count = next((int(each["queries"]) for each in means if math.isfinite(each.get("queries", math.nan))), 0)
        values = [each.get(metric, math.nan) for each in means]
        rows.append(Bar(f"{name} ({count:,})", values, plural(count, "query", "queries")))
    rows.sort(key=lambda row: -np.nan_to_num(row.values[0], nan=-1))
    about = "Number of queries in brackets."
    if len(rows) > MOST_CATEGORIES:
        half = MOST_CATEGORIES // 2
        about += f" The {half} best and the {half} worst of {len(rows)} categories."
        rows = [*rows[:half], *rows[-half:]]
    # two short charts beside each other read better than a long one
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


def embedding_map(runs: Sequence[Run], split: str | None) -> str:
    """The embeddings in the plane, near ones near each other."""
    drawn = []
    for run in runs:
        test = run.evaluation(split)
        if test is None or test.embeddings is None or test.table is None or len(test.table) < 3:
            reason = "A map needs embeddings.npy and table.csv of a test with at least three images."
            drawn.append(absent(f"{run.name}: {reason}" if len(runs) > 1 else reason))
            continue
        rows = sample(len(test.table), MOST_POINTS)
        vectors = np.asarray(test.embeddings[rows], dtype=np.float32)
        if not np.isfinite(vectors).all():
            drawn.append(absent(f"{run.name}: the embeddings are not all finite."))
            continue
        drawn.append(_maps(run, test, rows, vectors, several=len(runs) > 1))
    return element("div", *drawn, class_="charts") if any(part.startswith("<figure") for part in drawn) else "".join(drawn)


def _maps(run: Run, test: Evaluation, rows: NDArray[np.int64], vectors: NDArray[np.float32], *, several: bool) -> str:
    """One run has a map by category and one by first answer, runs beside each other have the first that there is."""
    assert test.table is not None
    places, method = in_the_plane(vectors)
    told = plural(len(rows), "image") + (f" of {len(test.table):,}, drawn at random" if len(rows) < len(test.table) else "")
    names = [f"{test.table.labels[row]} {test.table.categories[row]}".strip() for row in rows.tolist()]
    drawn = []
    for title, colours, legend in _colourings(test, rows):
        dots = [Dot(x, y, colour, name) for (x, y), colour, name in zip(places.tolist(), colours, names, strict=True)]
        about = f"{title}. " if several else ""
        drawn.append(
            scatter(dots, title=run.name if several else title, about=f"{about}{method}; {told}.", legend=legend, small=True)
        )
    return "".join(drawn[:1] if several else drawn)


Colouring = tuple[str, list[str], list[tuple[str, str]]]
"""Title of a map, the colour of each of its points, and the legend."""


def _colourings(test: Evaluation, rows: NDArray[np.int64]) -> list[Colouring]:
    """By category, by first answer, as far as they are known; else all in one colour."""
    found = [each for each in (_by_category(test, rows), _by_answer(test, rows)) if each is not None]
    return found or [("Embeddings", ["accent"] * len(rows), [])]


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
    legend = [("right", "accent"), ("wrong", "wrong"), ("no query", "faint")]
    return "By first answer", colours, [pair for pair in legend if pair[1] in colours]


def in_the_plane(vectors: NDArray[np.float32]) -> tuple[NDArray[np.float64], str]:
    """[N, 2] places and how they were found: t-SNE where scikit-learn is installed, else principal components."""
    rows = torch.nn.functional.normalize(torch.from_numpy(np.array(vectors)).double(), dim=1)
    # fewer points have no neighbourhoods to be kept
    if len(rows) >= 30 and importlib.util.find_spec("sklearn") is not None:
        manifold = importlib.import_module("sklearn.manifold")
        with warnings.catch_warnings():
            # of threads and of future defaults: nothing that the reader of a page can act on
            warnings.simplefilter("ignore")
            found = manifold.TSNE(perplexity=min(30, (len(rows) - 1) / 3), init="pca", random_state=0).fit_transform(
                rows.numpy()
            )
        if np.isfinite(found).all():
            return np.asarray(found, dtype=np.float64), "t-SNE: near points are near, far distances mean little"
    centred = rows - rows.mean(dim=0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    kept = directions[:2]
    total = float(values.square().sum())
    share = float(values[:2].square().sum()) / total if total else 1.0
    places = torch.nn.functional.pad(centred @ kept.t(), (0, 2 - len(kept)))
    # signs of singular vectors are arbitrary: the largest entry of each is made positive, so pages repeat
    flip = torch.sign(places.gather(0, places.abs().argmax(dim=0, keepdim=True)))
    return (
        places * torch.where(flip == 0, 1.0, flip)
    ).numpy(), f"two principal components, {percent(share, 0)} % of the variance"
