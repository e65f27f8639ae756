"""The metrics of runs with their intervals, beside published numbers and beside each other."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad._messages import plural
from rankgrad.report.charts import Interval, colour_of, intervals
from rankgrad.report.comparison import LEVEL, Difference, differences
from rankgrad.report.groups import EvaluationGroup, GroupMember, all_groups, is_comparable
from rankgrad.report.markup import Cell, absent, element, paragraph, percent, signed, table, text
from rankgrad.report.run_reader import Evaluation, Run, float_of

BIG = ("R@1", "mAP", "mAP@R", "mAP[medium]", "mAP[hard]")
DEBUG_NOTICE = "This is a debug run: everything in it was shrunk, and its numbers mean nothing."
# name of the checkpoint before the first step
UNTRAINED = "untrained"
GROUPED = "Tests are compared only where data, split and protocol are the same."
DASH = "\N{EN DASH}"


def is_headline(metric: str) -> bool:
    """Whether it is in the first table; the others have a table of their own."""
    return metric in ("mAP", "mAP@R") or metric.startswith(("R@", "mAP["))


def published_of(run: Run, evaluation: Evaluation) -> dict[str, list[Mapping[str, Any]]]:
    """Published numbers for a test by metric; none for a debug run or for data that the recipe is not about."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in _published(run) if evaluation.is_own else ():
        if entry.get("split", "test") == evaluation.split:
            found.setdefault(str(entry.get("metric")), []).append(entry)
    return found


def description(run: Run) -> str:
    """Loss, data and network of a run in one line."""
    settings, test = run.settings, run.evaluation(None)
    parts = []
    if "loss" in settings:
        batch, trunk = settings.get("batch_size"), str(settings.get("trunk"))
        trunk = Path(trunk).name if Path(trunk).is_absolute() else trunk
        parts += [
            f"{settings['loss']} on {settings.get('data_set')}",
            f"{Path(trunk).name if Path(trunk).is_absolute() else trunk}"
            + (f", {settings['dim']} dimensions" if settings.get("dim") else ""),
            *([f"batches of {batch:,}"] if isinstance(batch, int) and batch else []),
        ]
    elif test is not None and test.embeddings is not None:
        count, dim = test.embeddings.shape
        parts.append(f"{plural(count, 'embedding')} of {dim:,} dimensions")
    if "seed" in settings:
        parts.append(f"seed {settings['seed']}")
    return ", ".join(parts)


def numbers(run: Run, split: str | None) -> str:
    """One run: its main numbers, and a table for each test."""
    notice = paragraph(text(DEBUG_NOTICE), class_="notice") if run.debug else ""
    chosen = run.evaluation(split)
    if chosen is None:
        return notice + absent(f"The run has not been tested: run `rankgrad eval {run.folder}`.")
    others = [found for found in run.evaluations.values() if found is not chosen and not _is_baseline(run, found)]
    parts = [notice, _large(run, chosen), _selected(run)]
    parts += [_one_table(run, found) for found in (chosen, *others)]
    tested = {each.split for each in run.evaluations.values() if each.is_own}
    untested = sorted({str(entry.get("split", "test")) for entry in _published(run)} - tested)
    if untested:
        parts.append(paragraph(text(f"Published, but not tested here: {', '.join(untested)}."), class_="quiet"))
    return "".join(parts)


def baseline(run: Run, evaluation: Evaluation) -> Evaluation | None:
    """The same test of the untrained network, if it was made."""
    return next((each for each in run.evaluations.values() if _is_before(run, each, evaluation)), None)


def _is_baseline(run: Run, evaluation: Evaluation) -> bool:
    """Whether a table of another test has this one as a column."""
    return any(_is_before(run, evaluation, other) for other in run.evaluations.values())


def _is_before(run: Run, untrained: Evaluation, trained: Evaluation) -> bool:
    if untrained.checkpoint != UNTRAINED or trained.checkpoint == UNTRAINED:
        return False
    return is_comparable(GroupMember(0, run, untrained, ""), GroupMember(0, run, trained, ""))


def _published(run: Run) -> list[Mapping[str, Any]]:
    found = run.recipe.get("published")
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) and not run.debug else []


def _large(run: Run, evaluation: Evaluation) -> str:
    published = published_of(run, evaluation)
    blocks = []
    for metric in [name for name in BIG if name in evaluation.metrics][:3]:
        lines = [element("b", percent(evaluation.metrics[metric])), element("span", text(metric))]
        if metric in evaluation.intervals:
            lines.append(element("small", f"95%: {_bounds(evaluation.intervals[metric])}"))
        if metric in published:
            lines.append(element("small", f"published: {_printed(published[metric][0])}"))
        blocks.append(element("div", *lines))
    return element("div", *blocks, class_="large") if blocks else ""


def _selected(run: Run) -> str:
    if run.best is None:
        if not run.journal:  # not trained here: embeddings from elsewhere, a shared model
            return ""
        return paragraph("The last weights of the run were tested, unless another checkpoint was chosen.", class_="quiet")
    where = str(run.best.get("selected_on", "an evaluation"))
    told = f"The tested weights are the best on {where}: step {run.best.get('step')}, epoch {run.best.get('epoch')}."
    if where in {each.split for each in run.evaluations.values()}:
        told += f" They were selected on {where} itself, so the numbers on it are too high."
        return paragraph(text(told), class_="notice")
    return paragraph(text(told), class_="quiet")


def _one_table(run: Run, evaluation: Evaluation) -> str:
    published = published_of(run, evaluation)
    header: list[Cell] = ["metric", ("this run", "n"), ("95% interval", "n")]
    compared = bool(published)
    if compared:
        header += [("published", "n"), ("difference", "n"), "source"]
    if evaluation.deviations:
        header.insert(3, ("between repeats", "n"))
    before = baseline(run, evaluation)
    if before is not None:
        header.insert(3, ("untrained", "n"))
    rows: list[list[Cell]] = []
    for metric, value in evaluation.metrics.items():
        if not (is_headline(metric) or metric in published):
            continue
        entries: list[Mapping[str, Any] | None] = [*published.get(metric, ())]
        for place, entry in enumerate(entries or [None]):
            row: list[Cell] = [text(metric), (percent(value), "n strong"), (_bounds(evaluation.intervals.get(metric)), "n")]
            if evaluation.deviations:
                row.insert(3, (f"\N{PLUS-MINUS SIGN}{percent(evaluation.deviations.get(metric), 2)}", "n"))
            if before is not None:
                row.insert(3, (percent(before.metrics.get(metric)), "n"))
            if place:
                row = ["", *(("", "n") for _ in row[1:])]
            if compared:
                row += _beside(value, entry)
            rows.append(row)
    told = f"Protocol {evaluation.protocol}: {plural(evaluation.count, 'query', 'queries')}{_skipped(evaluation)}."
    under = [paragraph(text(note), class_="quiet") for note in evaluation.notes]
    if compared:
        remark = "In percent. A published number holds for the paper's data, weights and settings."
        under.insert(0, paragraph(remark, class_="quiet"))
    return (
        element("h3", text(evaluation.title))
        + paragraph(text(told))
        + (
            _beside_chart(table(header, rows, class_="numbers"), evaluation, published)
            if rows
            else absent("It has no metrics.")
        )
        + "".join(under)
    )


def _beside_chart(numbers: str, evaluation: Evaluation, published: Mapping[str, list[Mapping[str, Any]]]) -> str:
    """The table beside a chart of its intervals and the published numbers."""
    rows = []
    for metric, (low, high) in evaluation.intervals.items():
        value = evaluation.metrics.get(metric, math.nan)
        if math.isfinite(value) and (is_headline(metric) or metric in published):
            marks = [float_of(entry.get("value")) / 100 for entry in published.get(metric, ())]
            rows.append(Interval(metric, value, low, high, [mark for mark in marks if math.isfinite(mark)]))
    if not rows:
        return numbers
    about = "In percent, by bootstrap over the queries."
    chart = intervals(rows, title="95% confidence intervals", about=about, mark_name="published")
    return element("div", numbers, chart, class_="pair")


def _beside(value: float, entry: Mapping[str, Any] | None) -> list[Cell]:
    if entry is None:
        return [("", "n"), ("", "n"), ""]
    printed = float_of(entry.get("value"))
    difference = signed(100 * value - printed) if math.isfinite(printed) else ""
    source = text(entry.get("source", ""))
    note = entry.get("note")
    return [(_printed(entry), "n"), (difference, "n"), source + (f" {element('small', text(note))}" if note else "")]


def _printed(entry: Mapping[str, Any]) -> str:
    value = float_of(entry.get("value"))
    return f"{value:.1f}" if math.isfinite(value) else "diverged"


def _bounds(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{percent(interval[0])}{DASH}{percent(interval[1])}"


def side_by_side(runs: Sequence[Run]) -> str:
    """Several runs: metrics down, runs across, the best marked, differences to the first run; a table per group of tests."""
    parts = [paragraph(text(DEBUG_NOTICE), class_="notice") if any(run.debug for run in runs) else ""]
    parts.append(
        element(
            "ol",
            *(
                element("li", element("b", text(run.name), class_=f"t-{colour_of(place)}"), " ", text(description(run)))
                for place, run in enumerate(runs)
            ),
            class_="runs",
        )
    )
    groups = all_groups(runs)
    if not groups:
        parts.append(absent("None of the runs has been tested: run `rankgrad eval RUN`."))
    if len(groups) > 1:
        parts.append(paragraph(text(f"{GROUPED} There are {len(groups)} groups of tests."), class_="notice"))
    parts += [_shared_table(group, len(runs)) for group in groups]
    return "".join(parts)


def _shared_table(group: EvaluationGroup, num_runs: int) -> str:
    members, base = group.members, group.members[0].evaluation
    names = list(dict.fromkeys(metric for each in members for metric in each.evaluation.metrics if is_headline(metric)))
    changes: list[dict[str, Difference]] = [
        differences(base, each.evaluation, names) if place else {} for place, each in enumerate(members)
    ]
    papers = {metric: _papers(members, metric) for metric in names}
    header: list[Cell] = ["metric", *((text(each.name), "n") for each in members)]
    header += ["published"] if any(papers.values()) else []
    rows: list[list[Cell]] = []
    for metric in names:
        values = [each.evaluation.metrics.get(metric, math.nan) for each in members]
        best = max((value for value in values if math.isfinite(value)), default=math.nan)
        row: list[Cell] = [text(metric)]
        for place, value in enumerate(values):
            below = "" if place else _bounds(base.intervals.get(metric))
            below = below or _change(value, values[0], changes[place].get(metric), place)
            is_best = value == best and len(members) > 1
            shown = element("b", percent(value), " \N{BLACK STAR}") if is_best else percent(value)
            row.append((f"{shown} {element('small', below)}" if below else shown, "n"))
        rows.append([*row, papers[metric]] if any(papers.values()) else row)
    told = [f"Protocol {base.protocol}, {plural(base.count, 'query', 'queries')}{_skipped(base)}."]
    if len(members) > 1:
        told.append("\N{BLACK STAR} marks the best.")
        told.append(f"Below a value: the 95% interval of {members[0].name}, the difference of the others to it")
        told[-1] += f", with a paired bootstrap interval of {100 * LEVEL:.0f}% over queries." if any(changes) else "."
    elif num_runs > 1:
        told.append(f"Only {members[0].name} was tested on this.")
    return element("h3", text(group.title)) + paragraph(text(" ".join(told))) + table(header, rows, class_="numbers")


def _skipped(evaluation: Evaluation) -> str:
    return f", {evaluation.skipped:,} skipped without a relevant candidate" if evaluation.skipped else ""


def _change(value: float, first: float, change: Difference | None, place: int) -> str:
    """The difference to the first run, with its interval where there is one."""
    if not place or not (math.isfinite(value) and math.isfinite(first)):
        return ""
    difference = signed(100 * (value - first))
    return difference if change is None else f"{difference} [{signed(100 * change.low)}, {signed(100 * change.high)}]"


def _papers(members: Sequence[GroupMember], metric: str) -> str:
    found = {
        f"{_printed(entry)} ({entry.get('source', '')})": None
        for each in members
        for entry in published_of(each.run, each.evaluation).get(metric, ())
    }
    return "<br>".join(map(text, found))


def every_metric(group: EvaluationGroup) -> str:
    """The metrics that the first tables do not show."""
    tests = [each.evaluation for each in group.members]
    names = list(dict.fromkeys(metric for test in tests for metric in test.metrics if not is_headline(metric)))
    if not names:
        return ""
    several = len(tests) > 1
    header: list[Cell] = ["metric", *((text(each.name) if several else "percent", "n") for each in group.members)]
    header += [] if several else [("95% interval", "n")]
    rows: list[list[Cell]] = []
    for metric in names:
        row: list[Cell] = [text(metric), *((percent(test.metrics.get(metric)), "n") for test in tests)]
        if not several:
            row.append((_bounds(tests[0].intervals.get(metric)), "n"))
        rows.append(row)
    return element(
        "figure", element("figcaption", element("b", "Other metrics")), table(header, rows, class_="numbers compact")
    )
