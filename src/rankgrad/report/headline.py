"""The numbers: what was reached, how sure that is, what is published, and how runs differ."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankgrad.report.charts import Interval, colour_of, intervals
from rankgrad.report.comparison import LEVEL, Difference, differences
from rankgrad.report.markup import Cell, absent, element, paragraph, percent, plural, signed, table, text
from rankgrad.report.run_reader import Evaluation, Run, float_of

BIG = ("R@1", "mAP", "mAP@R", "mAP[medium]", "mAP[hard]")
DEBUG_NOTICE = "This is a debug run: everything in it was shrunk, and its numbers mean nothing."
DASH = "\N{EN DASH}"


def is_headline(metric: str) -> bool:
    """Whether it stands in the first table; the others have one of their own."""
    return metric in ("mAP", "mAP@R") or metric.startswith(("R@", "mAP["))


def published_of(run: Run, split: str) -> dict[str, list[Mapping[str, Any]]]:
    """Numbers of papers for a split by metric; a debug run has none to be compared with."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    numbers = run.recipe.get("published")
    for entry in numbers if isinstance(numbers, list) and not run.debug else ():
        if isinstance(entry, Mapping) and entry.get("split", "test") == split:
            found.setdefault(str(entry.get("metric")), []).append(entry)
    return found


def description(run: Run) -> str:
    """Loss, data and network of a run in a line."""
    settings = run.settings
    if not settings:
        return "recipe.json is missing, so the settings are not known"
    batch = settings.get("batch_size")
    parts = [
        f"{settings.get('loss')} on {settings.get('data_set')}",
        f"{settings.get('trunk')}" + (f", {settings['dim']} dimensions" if settings.get("dim") else ""),
        *([f"batches of {batch:,}"] if isinstance(batch, int) and batch else []),
        f"seed {settings.get('seed', 0)}",
    ]
    return ", ".join(parts)


def numbers(run: Run, split: str | None) -> str:
    """One run: its large numbers, and a table for each split."""
    notice = paragraph(text(DEBUG_NOTICE), class_="notice") if run.debug else ""
    chosen = run.evaluation(split)
    if chosen is None:
        return notice + absent(f"The run has not been tested: `rankgrad eval {run.folder}` does it.")
    others = [found for found in run.evaluations.values() if found is not chosen]
    parts = [notice, _large(run, chosen), _selected(run)]
    parts += [_one_table(run, found) for found in (chosen, *others)]
    untested = sorted({str(entry.get("split", "test")) for entry in _published(run)} - run.evaluations.keys())
    if untested:
        parts.append(paragraph(text(f"Published too, but not tested here: {', '.join(untested)}."), class_="quiet"))
    return "".join(parts)


def _published(run: Run) -> list[Mapping[str, Any]]:
    found = run.recipe.get("published")
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) and not run.debug else []


def _large(run: Run, evaluation: Evaluation) -> str:
    published = published_of(run, evaluation.split)
    blocks = []
    for metric in [name for name in BIG if name in evaluation.metrics][:3]:
        lines = [element("b", percent(evaluation.metrics[metric])), element("span", text(metric))]
        if metric in evaluation.intervals:
            lines.append(element("small", f"95 %: {_bounds(evaluation.intervals[metric])}"))
        if metric in published:
            lines.append(element("small", f"published: {_printed(published[metric][0])}"))
        blocks.append(element("div", *lines))
    return element("div", *blocks, class_="large") if blocks else ""


def _selected(run: Run) -> str:
    if run.best is None:
        return paragraph("The last weights of the run are tested, unless another checkpoint was asked for.", class_="quiet")
    where = str(run.best.get("selected_on", "an evaluation"))
    told = f"The tested weights are the best on {where}: step {run.best.get('step')}, epoch {run.best.get('epoch')}."
    if where in run.evaluations:
        told += f" They were chosen on {where} itself, so the numbers on it are the best of many and too high."
        return paragraph(text(told), class_="notice")
    return paragraph(text(told), class_="quiet")


def _one_table(run: Run, evaluation: Evaluation) -> str:
    published = published_of(run, evaluation.split)
    header: list[Cell] = ["metric", ("this run", "n"), ("95 % interval", "n")]
    compared = bool(published)
    if compared:
        header += [("published", "n"), ("difference", "n"), "source"]
    if evaluation.deviations:
        header.insert(3, ("between repeats", "n"))
    rows: list[list[Cell]] = []
    for metric, value in evaluation.metrics.items():
        if not (is_headline(metric) or metric in published):
            continue
        entries: list[Mapping[str, Any] | None] = [*published.get(metric, ())]
        for place, entry in enumerate(entries or [None]):
            row: list[Cell] = [text(metric), (percent(value), "n strong"), (_bounds(evaluation.intervals.get(metric)), "n")]
            if evaluation.deviations:
                row.insert(3, (f"\N{PLUS-MINUS SIGN}{percent(evaluation.deviations.get(metric), 2)}", "n"))
            if place:
                row = ["", *(("", "n") for _ in row[1:])]
            if compared:
                row += _beside(value, entry)
            rows.append(row)
    told = [f"Protocol {evaluation.protocol}: {plural(evaluation.count, 'query', 'queries')}"]
    if evaluation.skipped:
        told.append(f"{evaluation.skipped:,} with nothing to find left out")
    under = [paragraph(text(note), class_="quiet") for note in evaluation.notes]
    if compared:
        remark = "Percent. A published number holds for the paper's own data, weights and settings."
        under.insert(0, paragraph(remark, class_="quiet"))
    return (
        element("h3", text(evaluation.split))
        + paragraph(text(", ".join(told) + "."))
        + (
            _beside_chart(table(header, rows, class_="numbers"), evaluation, published)
            if rows
            else absent("It has no metrics.")
        )
        + "".join(under)
    )


def _beside_chart(numbers: str, evaluation: Evaluation, published: Mapping[str, list[Mapping[str, Any]]]) -> str:
    """A table, and what a table does not show: how wide intervals are and on which side published numbers lie."""
    rows = []
    for metric, (low, high) in evaluation.intervals.items():
        value = evaluation.metrics.get(metric, math.nan)
        if math.isfinite(value) and (is_headline(metric) or metric in published):
            marks = [float_of(entry.get("value")) / 100 for entry in published.get(metric, ())]
            rows.append(Interval(metric, value, low, high, [mark for mark in marks if math.isfinite(mark)]))
    if not rows:
        return numbers
    about = "Percent, with the interval that resampling the queries gives."
    chart = intervals(rows, title="How sure they are", about=about, mark_name="published")
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
    """Several runs: metrics down, runs across, the best marked, differences to the first run."""
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
    splits = list(dict.fromkeys(split for run in runs for split in run.evaluations))
    if not splits:
        parts.append(absent("None of the runs has been tested: `rankgrad eval RUN` does it."))
    parts += [_shared_table(runs, split) for split in splits]
    return "".join(parts)


def _shared_table(runs: Sequence[Run], split: str) -> str:
    tests = [run.evaluations.get(split) for run in runs]
    names = list(dict.fromkeys(metric for test in tests if test for metric in test.metrics if is_headline(metric)))
    base = tests[0]
    changes: list[dict[str, Difference]] = [
        differences(base, test, names) if base is not None and test is not None and place else {}
        for place, test in enumerate(tests)
    ]
    papers = {metric: _papers(runs, split, metric) for metric in names}
    header: list[Cell] = ["metric", *((text(run.name), "n") for run in runs), *(["published"] if any(papers.values()) else [])]
    rows: list[list[Cell]] = []
    for metric in names:
        values = [test.metrics.get(metric, math.nan) if test else math.nan for test in tests]
        best = max((value for value in values if math.isfinite(value)), default=math.nan)
        row: list[Cell] = [text(metric)]
        for place, value in enumerate(values):
            below = _bounds(base.intervals.get(metric)) if base and not place else ""
            below = below or _change(value, values[0], changes[place].get(metric), place)
            shown = element("b", percent(value), " \N{BLACK STAR}") if value == best else percent(value)
            row.append((f"{shown} {element('small', below)}" if below else shown, "n"))
        rows.append([*row, papers[metric]] if any(papers.values()) else row)
    protocols = {test.protocol for test in tests if test}
    told = f"Protocol {' and '.join(sorted(protocols))}. "
    if len(protocols) > 1:
        told += "Values of different protocols are not to be compared. "
    told += f"\N{BLACK STAR} marks the best. Below a value: the 95 % interval of {runs[0].name}, the difference of others to it"
    paired = any(changes)
    told += f", with a paired bootstrap interval of {100 * LEVEL:.0f} % over queries" if paired else ""
    told += "." if paired else "; the runs did not answer the same queries, so there are no paired intervals."
    return element("h3", text(split)) + paragraph(text(told)) + table(header, rows, class_="numbers")


def _change(value: float, first: float, change: Difference | None, place: int) -> str:
    """The difference to the first run, with its interval where there is one."""
    if not place or not (math.isfinite(value) and math.isfinite(first)):
        return ""
    difference = signed(100 * (value - first))
    return difference if change is None else f"{difference} [{signed(100 * change.low)}, {signed(100 * change.high)}]"


def _papers(runs: Sequence[Run], split: str, metric: str) -> str:
    found = {
        f"{_printed(entry)} ({entry.get('source', '')})": None
        for run in runs
        for entry in published_of(run, split).get(metric, ())
    }
    return "<br>".join(map(text, found))


def every_metric(runs: Sequence[Run], split: str | None) -> str:
    """The metrics that the first tables leave out."""
    tests = [run.evaluation(split) for run in runs]
    names = list(dict.fromkeys(metric for test in tests if test for metric in test.metrics if not is_headline(metric)))
    if not names:
        return ""
    several = len(runs) > 1
    header: list[Cell] = ["metric", *((text(run.name) if several else "percent", "n") for run in runs)]
    header += [] if several else [("95 % interval", "n")]
    rows: list[list[Cell]] = []
    for metric in names:
        row: list[Cell] = [text(metric), *((percent(test.metrics.get(metric) if test else None), "n") for test in tests)]
        if not several and tests[0] is not None:
            row.append((_bounds(tests[0].intervals.get(metric)), "n"))
        rows.append(row)
    return element(
        "figure", element("figcaption", element("b", "The other metrics")), table(header, rows, class_="numbers compact")
    )
