"""Charts of the journal: learning curves, the surrogate beside the exact metric, diagnostics, events."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rankgrad._messages import format_duration
from rankgrad.report.charts import Dot, Series, colour_of, dash_of, line, scatter
from rankgrad.report.markup import Cell, element, number, paragraph, percent, table, text
from rankgrad.report.run_reader import Run, float_of

MAX_POINTS = 240
MAX_DOTS = 400
EPISODES = ("resume", "warning", "end")

# relative change below which a curve is constant
FLAT = 1e-6

Curve = tuple[list[float], list[float]]

# what 1 - loss approximates: losses of AP have the exact mAP beside them, the surrogate of recall has R@1
AP_LOSSES = ("fastap", "smooth-ap", "rambo-ap")

DIAGNOSTICS: Sequence[tuple[str, str, str, str]] = (
    (
        "perfect",
        "Perfect queries",
        "Queries of a batch whose relevant items are all ranked first: they have nothing more to teach.",
        "percent",
    ),
    ("pairs_with_gradient", "Pairs with gradient", "Scores of a batch with a noticeable gradient.", "percent"),
    ("spread", "Spread", "1 - mean cosine between different images; 0 is collapse.", "1 - cosine"),
    ("effective_rank", "Effective rank", "Effective number of dimensions of the embeddings of a batch.", "dimensions"),
    ("skipped", "Skipped queries", "Queries of a batch without a relevant item.", "queries"),
    ("gradient", "Gradient norm", "Before clipping.", "norm"),
    ("lr", "Learning rate", "Of the first parameter group.", "lr"),
    ("images_per_second", "Speed", "Forward and backward passes including the loss.", "images per second"),
    ("memory", "GPU memory", "Peak so far.", "GiB"),
)
"""Name in the journal, title, meaning, unit."""


def curve(run: Run, name: str, *, complement: bool = False) -> Curve:
    """Steps and values of a quantity of the journal; many points are averaged in groups. `complement` is 1 - value."""
    points = {float_of(entry.get("step")): float_of(entry.get(name)) for entry in run.entries("step")}
    known = sorted((step, value) for step, value in points.items() if math.isfinite(step) and math.isfinite(value))
    scale = 2**-30 if name == "memory" else 1.0
    values = [1 - value if complement else scale * value for _, value in known]
    return thinned([step for step, _ in known], values)


def thinned(x: Sequence[float], y: Sequence[float], most: int = MAX_POINTS) -> Curve:
    """Means over groups of consecutive points, at most `most` of them."""
    group = math.ceil(len(x) / most) or 1
    if group == 1:
        return list(x), list(y)
    starts = range(0, len(x), group)
    return [float(np.mean(x[i : i + group])) for i in starts], [float(np.mean(y[i : i + group])) for i in starts]


def validation(run: Run, metric: str) -> Curve:
    """Steps and values of a metric of the evaluations during training."""
    entries = run.entries("eval")
    splits = [str(entry.get("split")) for entry in entries]
    split = "validation" if "validation" in splits else next(iter(splits), "")
    found: dict[float, float] = {}
    for entry in entries:
        metrics = entry.get("metrics")
        if str(entry.get("split")) == split and isinstance(metrics, Mapping):
            found[float_of(entry.get("step"))] = float_of(metrics.get(metric))
    known = sorted((step, value) for step, value in found.items() if math.isfinite(step) and math.isfinite(value))
    return [step for step, _ in known], [value for _, value in known]


def exact_metric(run: Run) -> str:
    """The metric in the journal that the loss of the run is a surrogate of."""
    return "R@1" if run.settings.get("loss") in ("recall-at-k", "rambo-recall") else "mAP"


def learning(runs: Sequence[Run]) -> str:
    """Loss, exact metric, validation, and surrogate against exact metric."""
    if not any(run.entries("step", "eval") for run in runs):
        return ""
    charts = _alone(runs[0]) if len(runs) == 1 else _together(runs)
    return element("div", *charts, class_="charts")


def _alone(run: Run) -> list[str]:
    metric = exact_metric(run)
    bounded = run.settings.get("loss") != "rambo-recall"
    charts = [_lines([run], "loss", "Loss", "Of a batch, at logged steps.", "loss")]
    series = [
        Series(f"{metric} in batch", *curve(run, f"batch_{metric}"), "ink"),
        Series(f"{metric}, {_validated(run)}", *validation(run, metric), "other", dots=True),
    ]
    if bounded:
        series.insert(1, Series("1 - loss", *curve(run, "loss", complement=True), "accent", "7 3"))
    series = [each for each in series if each.x]
    if series:
        charts.append(
            line(
                series,
                title="Surrogate and exact metric over time",
                about=_about_surrogate(run),
                x="step",
                y="percent",
                percent=True,
            )
        )
    charts.append(_against([run]))
    charts.append(_all_validation(run))
    return [chart for chart in charts if chart]


def _validated(run: Run) -> str:
    splits = {str(entry.get("split")) for entry in run.entries("eval")}
    return "validation" if "validation" in splits or not splits else min(splits)


def _about_surrogate(run: Run) -> str:
    loss = run.settings.get("loss")
    if loss in AP_LOSSES:
        return "1 - loss approximates the AP of a batch; beside it the exact mAP of the same batch."
    if loss == "recall-at-k":
        ks = run.settings.get("ks")
        mean = f", the mean over k = {', '.join(map(str, ks))}" if isinstance(ks, list) else ""
        return f"1 - loss approximates the recall of a batch{mean}; beside it the exact R@1 of the same batch."
    if loss == "rambo-recall":
        return "This loss is a logarithm of ranks, not a fraction, so only the exact metric is shown."
    return "1 - loss beside the exact metric of the same batch."


def _against(runs: Sequence[Run]) -> str:
    """A dot for each logged step: the surrogate and the exact metric."""
    dots = []
    bounded = all(run.settings.get("loss") != "rambo-recall" for run in runs)
    for index, run in enumerate(runs):
        metric = exact_metric(run)
        entries = run.entries("step")
        entries = entries[:: math.ceil(len(entries) / MAX_DOTS) or 1]
        colour = colour_of(index)
        for entry in entries:
            loss, exact = float_of(entry.get("loss")), float_of(entry.get(f"batch_{metric}"))
            if math.isfinite(loss) and math.isfinite(exact):
                told = f"{run.name}, step {entry.get('step')}: loss {loss:.4f}, {metric} {100 * exact:.1f} %"
                dots.append(Dot(1 - loss if bounded else loss, exact, colour, told))
    if not dots:
        return ""
    metrics = sorted({exact_metric(run) for run in runs})
    return scatter(
        dots,
        title="Surrogate against exact metric",
        about="One dot per batch."
        + (
            " On the diagonal the surrogate equals the metric."
            if bounded
            else " Falling dots: a lower loss is a better metric."
        ),
        x="1 - loss, percent" if bounded else "loss",
        y=f"exact {' or '.join(metrics)} in batch" + (", percent" if bounded else ""),
        percent=bounded,
        diagonal=bounded,
        legend=[(run.name, colour_of(index)) for index, run in enumerate(runs)] if len(runs) > 1 else (),
    )


def _all_validation(run: Run) -> str:
    names = [str(name) for entry in run.entries("eval")[:1] for name in entry.get("metrics") or {}]
    shown = [name for name in names if name.startswith(("R@", "mAP")) and "[" not in name] or names
    colours = ("other", "accent", "violet", "wrong", "yellow", "ink", "red")
    series = [
        Series(name, *validation(run, name), colours[index % len(colours)], dots=True)
        for index, name in enumerate(shown[: len(colours)])
    ]
    series = [each for each in series if each.x]
    if not series:
        return ""
    title = f"Evaluations on {_validated(run)}"
    return line(series, title=title, about="During training.", x="step", y="percent", percent=True)


def _together(runs: Sequence[Run]) -> list[str]:
    losses = {str(run.settings.get("loss")) for run in runs}
    remark = " The losses differ: compare shapes, not heights." if len(losses) > 1 else ""
    charts = [_lines(runs, "loss", "Loss", f"Of a batch, at logged steps.{remark}", "loss")]
    charts += [
        _lines(runs, f"batch_{metric}", f"Exact {metric} in the batch", "Each query against the rest of its batch.", "percent")
        for metric in ("R@1", "mAP")
    ]
    for metric in ("R@1", "mAP"):
        series = _named(runs, [validation(run, metric) for run in runs], dots=True)
        if series:
            charts.append(
                line(
                    series,
                    title=f"{metric} on validation",
                    about="During training.",
                    x="step",
                    y="percent",
                    percent=True,
                )
            )
    charts.append(_against(runs))
    return [chart for chart in charts if chart]


def _named(runs: Sequence[Run], curves: Sequence[Curve], *, dots: bool = False) -> list[Series]:
    """Curves in the colours of their runs; a single run needs no name."""
    return [
        Series(run.name if len(runs) > 1 else "", *found, colour_of(index), dash_of(index), dots)
        for index, (run, found) in enumerate(zip(runs, curves, strict=True))
        if found[0]
    ]


def _lines(runs: Sequence[Run], name: str, title: str, about: str, unit: str) -> str:
    series = _named(runs, [curve(run, name) for run in runs])
    if not series:
        return ""
    most = max(len(run.entries("step")) for run in runs)
    if most > MAX_POINTS:
        about += f" Means of {math.ceil(most / MAX_POINTS)} logged steps."
    return line(series, title=title, about=about, x="step", y=unit, percent=unit == "percent")


def diagnostics(runs: Sequence[Run]) -> str:
    """What the loss does not show. A quantity that never changes is a line of text, not a chart."""
    charts, constant = [], []
    for name, title, about, unit in DIAGNOSTICS:
        curves = [values for run in runs if (values := curve(run, name)[1])]
        levels = {value for values in curves for value in values}
        if levels and _is_flat(levels):
            constant.append(f"{title.lower()} {_level(statistics.fmean(levels), unit)}")
        else:
            charts.append(_lines(runs, name, title, about, unit))
    found = [chart for chart in charts if chart]
    if not found and not constant:
        return ""
    told = paragraph(text(f"Constant: {', '.join(constant)}."), class_="quiet") if constant else ""
    return element("div", *found, class_="charts") + told


def _is_flat(values: Collection[float]) -> bool:
    """Whether values differ by less than can be seen."""
    low, high = min(values), max(values)
    return high - low <= FLAT * max(abs(low), abs(high))


def _level(value: float, unit: str) -> str:
    return f"{percent(value)}%" if unit == "percent" else number(value)


def events(runs: Sequence[Run]) -> str:
    """Resumes, warnings and ends of runs."""
    rows = []
    for run in runs:
        for entry in run.entries(*EPISODES):
            which = [text(run.name)] if len(runs) > 1 else []
            when = str(entry.get("time", ""))[:19].replace("T", " ")
            rows.append([text(when), *which, number(float_of(entry.get("step"))), text(entry["kind"]), text(_told(entry))])
    if not rows:
        return ""
    header: list[Cell] = ["time (UTC)", *(["run"] if len(runs) > 1 else []), "step", "event", "what"]
    return table(header, rows, class_="events")


def _told(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "resume":
        hardware = entry.get("hardware")
        device = (hardware.get("gpu") or hardware.get("device")) if isinstance(hardware, Mapping) else None
        return "resumed" + (f" on {device}" if device else "")
    parts = [str(entry[name]) for name in ("reason", "message") if entry.get(name)]
    seconds = float_of(entry.get("seconds"))
    if math.isfinite(seconds):
        parts.append(f"after {format_duration(seconds)}")
    return ", ".join(parts)
