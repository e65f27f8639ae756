"""The table that a test prints: what was reached beside the untrained network and what is published."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rankgrad._messages import drop_empty_columns, table
from rankgrad.runs.recipe import Published
from rankgrad.runs.task import SplitResult


def comparison(
    results: Mapping[str, SplitResult],
    published: Sequence[Published],
    combined: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    untrained: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> str:
    """A table of what was reached beside what is published, in percent.

    Args:
        results: by split.
        published: the recipe's numbers; the first of a split and metric counts.
        combined: metrics over several splits, shown where a number of that name is published.
        untrained: metrics of the network before training, by split.
    """
    wanted: dict[tuple[str, str], Published] = {}
    for number in published:
        wanted.setdefault((number.split, number.metric), number)
    rows = []
    for split, result in results.items():
        intervals = result.intervals()
        shown = [metric for metric in result.metrics if metric in result.headline or (split, metric) in wanted]
        for metric in shown:
            interval = "" if metric not in intervals else " - ".join(f"{100 * bound:.1f}" for bound in intervals[metric])
            before = untrained.get(split, {}).get(metric)
            cells = _cells(result.metrics[metric], interval, wanted.get((split, metric)), result.protocol)
            rows.append((split, metric, "" if before is None else f"{100 * before:.1f}", *cells))
    for (split, metric), number in wanted.items():
        if metric in combined.get(split, {}):
            rows.append((split, metric, "", *_cells(combined[split][metric], "", number, "mean")))
    header = ("split", "metric", "untrained", "got", "95% interval", "published", "difference", "protocol", "source")
    return table(*drop_empty_columns(header, rows))


def _cells(value: float, interval: str, number: Published | None, protocol: str) -> tuple[str, ...]:
    """From "got" to "source"."""
    got = f"{100 * value:.1f}"
    if number is None:
        return (got, interval, "", "", protocol, "")
    if number.value is None:
        return (got, interval, "diverged", "", protocol, number.source)
    return (got, interval, f"{number.value:.1f}", f"{100 * value - number.value:+.1f}", protocol, number.source)
