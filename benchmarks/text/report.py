"""Tables of the text study from the rows of its CSV file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.text.losses import LOSSES, OURS, THEIRS
from rankgrad._messages import markdown_table
from rankgrad.eval.result import bootstrap_intervals

Row: TypeAlias = Mapping[str, str]
METRICS = ("R@1", "mAP", "mAP@R")
SAMPLES = 10_000

HEAD = """# Rank losses on text

```sh
python -m benchmarks.text_study --data DIR --model all-MiniLM-L6-v2 --csv FILE --report docs/evidence_text.md
```

all-MiniLM-L6-v2 is trained to bring texts of the same intent together. Every loss gets the same {texts} texts (batches
of {batch}, {steps} steps), the same AdamW with linear warm-up and decay, dropout, bf16 transformer and float32 loss, in
one loop that calls every loss through the interface of sentence-transformers. Losses of classes and triplets see 4
texts of an intent at a time, losses of pairs 2, and no intent comes again in a batch before all the others, which keeps
false negatives of `MultipleNegativesRankingLoss` as few as they can be. For each loss and data set the learning rate
and one setting of the loss (of two) were chosen by mAP on validation intents, a quarter of the training intents, with one
seed{lower}.
Under each table the loss of either library that is best on the validation intents is compared with that of the other.

*Disjoint*: trained on all texts of half of the intents, tested on all texts of the other half, each against the others.
*Published*: trained on the published training texts, tested on the published test texts, each against the training
texts, so that R@1 is the accuracy of the nearest neighbour. Mean and standard deviation of {seeds} seeds in percent;
brackets have the 95% bootstrap interval over test intents, averaged over the seeds; a number without ± is of one seed.
Of the {choices} chosen rates {lowest} are the lowest and {highest} the highest that was tried with that loss.
Machine: {machine}, torch {torch}. Every run is in
[text-nvidia-h200.csv](../benchmarks/results/text-nvidia-h200.csv).
"""


def best_on_validation(rows: Iterable[Row], lowest: float = 0.0) -> dict[tuple[str, str], Row]:
    """Of each (data, loss) the run with the best mAP on the validation intents, among rates of at least `lowest`."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["data"], row["loss"]
        if row["stage"] != "choice" or float(row["lr"]) < lowest:
            continue
        if key not in best or float(row["mAP"]) > float(best[key]["mAP"]):
            best[key] = row
    return best


def chosen_settings(rows: Iterable[Row], lowest: float = 0.0) -> dict[tuple[str, str], tuple[str, float]]:
    """Setting and rate of each (data, loss), see `best_on_validation`."""
    return {key: (row["setting"], float(row["lr"])) for key, row in best_on_validation(rows, lowest).items()}


def tried_rates(rows: Iterable[Row], data: str, loss: str, setting: str) -> list[float]:
    """Rates that were tried on the validation intents."""
    wanted = "choice", data, loss, setting
    return [float(row["lr"]) for row in rows if (row["stage"], row["data"], row["loss"], row["setting"]) == wanted]


def report(rows: Sequence[Row], first_rate: float = 0.0) -> str:
    """All tables as Markdown; batch sizes were compared at the best rate of at least `first_rate`."""
    chosen, first_chosen = chosen_settings(rows), chosen_settings(rows, first_rate)
    losses = _stage(rows, "loss")
    main, late = _shown(rows, losses, chosen)
    if not main:
        raise ValueError("text_study: the file has no run of the losses yet, only of the choice of rates")
    validation = {key: float(row["mAP"]) for key, row in best_on_validation(rows).items()}
    lower = any(float(row["lr"]) < first_rate for row in _stage(rows, "choice"))
    head = HEAD.format(
        lowest=sum(rate == min(tried_rates(rows, *key, setting)) for key, (setting, rate) in chosen.items()),
        highest=sum(rate == max(tried_rates(rows, *key, setting)) for key, (setting, rate) in chosen.items()),
        choices=len(chosen),
        lower="; where the\nlowest of the first three rates was the best, lower ones followed until one was worse"
        if lower
        else "",
        texts=f"{int(main[0]['texts']):,}",
        batch=main[0]["batch"],
        steps=int(main[0]["texts"]) // int(main[0]["batch"]),
        seeds=len({row["seed"] for row in main}),
        machine=main[0]["machine"],
        torch=main[0]["torch"],
    )
    if late:
        head += f"\nNot run yet at the rate that was chosen, and shown at the best of those that were: {', '.join(late)}.\n"
    parts = [head, "## Results"]
    for split in ("disjoint", "published"):
        for data in _values(main, "data"):
            some = [row for row in (*_stage(rows, "untrained"), *main) if (row["data"], row["split"]) == (data, split)]
            if _values(some, "stage") != ["untrained"]:
                parts += [f"### {data}, {split}", _losses(some), _difference(some, validation)]
    if sizes := _stage(rows, "batch"):
        parts += ["## Batch size", _BATCH_TEXT]
        for data in _values(sizes, "data"):
            same = [
                row
                for row in losses
                if (row["data"], row["split"]) == (data, "disjoint")
                and first_chosen[data, row["loss"]] == (row["setting"], float(row["lr"]))
            ]
            some = [*same, *(row for row in sizes if row["data"] == data)]
            parts += [f"### {data}, disjoint, mAP", _sizes(some), _differences_by_size(some, validation)]
    if cached := _stage(rows, "cached"):
        parts += ["## Cached forms", _CACHED_TEXT, _cached(main, cached)]
    parts += ["## What was chosen", _choices(_stage(rows, "choice"))]
    return "\n\n".join(part.strip() for part in parts if part)


def _shown(
    rows: Sequence[Row], losses: Sequence[Row], chosen: Mapping[tuple[str, str], tuple[str, float]]
) -> tuple[list[Row], list[str]]:
    """Runs of each loss at the best rate that it was run at, and the losses for which that is not the chosen one."""
    shown: list[Row] = []
    late: list[str] = []
    for data, name, split in dict.fromkeys((row["data"], row["loss"], row["split"]) for row in losses):
        own = [row for row in losses if (row["data"], row["loss"], row["split"]) == (data, name, split)]
        ran = {(row["setting"], float(row["lr"])) for row in own}
        tried = [row for row in rows if (row["stage"], row["data"], row["loss"]) == ("choice", data, name)]
        known = [row for row in tried if (row["setting"], float(row["lr"])) in ran]
        best = max(known, key=lambda row: float(row["mAP"]))
        used = best["setting"], float(best["lr"])
        shown += [row for row in own if (row["setting"], float(row["lr"])) == used]
        if used != chosen[data, name]:
            late.append(f"`{name}` on {data}, {split}")
    return shown, late


_BATCH_TEXT = """The same number of texts in fewer, larger steps; the rate, the best of the first three, goes with the root of
the batch size. Batches above 512 use the cached forms where there are any (`CachedRankLoss`,
`CachedMultipleNegativesRankingLoss`). A batch of pairs larger than twice the number of training intents has false negatives,
which only losses of labels avoid."""

_CACHED_TEXT = """Disjoint intents, with a quarter of the batch in memory at a time: the same loss of the same batch."""


def _stage(rows: Iterable[Row], stage: str) -> list[Row]:
    return [row for row in rows if row["stage"] == stage]


def _values(rows: Iterable[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def _percent(values: Sequence[float]) -> str:
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{deviation}"


def _column(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _losses(rows: Sequence[Row]) -> str:
    lines = []
    for name in ("", *LOSSES):
        own = [row for row in rows if row["loss"] == name]
        if not own:
            continue
        cells = [
            f"{_percent(_column(own, metric))} [{100 * fmean(_column(own, f'{metric} low')):.1f}, "
            f"{100 * fmean(_column(own, f'{metric} high')):.1f}]"
            for metric in METRICS
        ]
        lines.append([LOSSES[name].library if name else "", name or "untrained", *cells])
    return markdown_table(["", "loss", *METRICS], lines, align="llrrr")


_OVER_INTENTS = "95% interval over test intents"
Validation = Mapping[tuple[str, str], float]


def _best_of_each(rows: Sequence[Row], validation: Validation) -> tuple[str, str] | None:
    """The losses of either library with the best mAP on the validation intents."""
    data, best = rows[0]["data"], []
    for library in (OURS, THEIRS):
        names = [name for name in _values(rows, "loss") if name and LOSSES[name].library == library]
        if not names:
            return None
        best.append(max(names, key=lambda name: validation[data, name]))
    return best[0], best[1]


def _difference(rows: Sequence[Row], validation: Validation) -> str:
    """The best of ours against the best of theirs."""
    best = _best_of_each(rows, validation)
    if best is None:
        return ""
    ours, theirs = best
    points = _interval(rows, ours, theirs)
    return f"`{ours}` against `{theirs}`, the best of each on the validation intents: {points} points of mAP, {_OVER_INTENTS}."


def _differences_by_size(rows: Sequence[Row], validation: Validation) -> str:
    """The same at every batch size."""
    by_size = {size: [row for row in rows if int(row["batch"]) == size] for size in sorted({int(row["batch"]) for row in rows})}
    listed = {row["loss"] for row in rows if row["stage"] == "batch"}
    best = _best_of_each([row for row in rows if row["loss"] in listed], validation)
    if best is None:
        return ""
    ours, theirs = best
    found = [
        f"{size:,}: {_interval(some, ours, theirs)}"
        for size, some in by_size.items()
        if {ours, theirs} <= {row["loss"] for row in some}
    ]
    return f"`{ours}` against `{theirs}` by batch size, points of mAP, {_OVER_INTENTS}: {'; '.join(found)}."


def _interval(rows: Sequence[Row], ours: str, theirs: str) -> str:
    weights = _numbers(rows[0]["queries by intent"])
    mean, low, high = paired_difference(_by_intent(rows, ours) - _by_intent(rows, theirs), weights)
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def paired_difference(differences: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, float, float]:
    """Weighted mean of the differences by intent and its bootstrap interval over intents."""
    repeated = np.repeat(differences, weights.astype(int))
    units = np.repeat(np.arange(len(weights)), weights.astype(int))
    low, high = bootstrap_intervals(repeated[:, None], units, level=0.95, samples=SAMPLES, seed=0)[0]
    return float(repeated.mean()), float(low), float(high)


def _by_intent(rows: Sequence[Row], loss: str) -> NDArray[np.float64]:
    found = np.stack([_numbers(row["mAP by intent"]) for row in rows if row["loss"] == loss])
    mean: NDArray[np.float64] = found.mean(axis=0)
    return mean


def _numbers(text: str) -> NDArray[np.float64]:
    return np.array([float(each) for each in text.split()])


def _sizes(rows: Sequence[Row]) -> str:
    sizes = sorted(int(size) for size in _values(rows, "batch"))
    names = [name for name in LOSSES if any(row["loss"] == name and row["stage"] == "batch" for row in rows)]

    def cell(name: str, size: int) -> str:
        own = [row for row in rows if row["loss"] == name and int(row["batch"]) == size]
        return _percent(_column(own, "mAP")) if own else "-"

    return markdown_table(
        ["loss", *(f"{size:,}" for size in sizes)], [[name, *(cell(name, size) for size in sizes)] for name in names]
    )


def _cached(main: Sequence[Row], cached: Sequence[Row]) -> str:
    def mean(rows: Iterable[Row], use: Callable[[Row], bool]) -> str:
        return _percent(_column(filter(use, rows), "mAP"))

    lines = []
    for data in _values(cached, "data"):
        for name in _values(cached, "loss"):

            def same(row: Row, data: str = data, name: str = name) -> bool:
                return (row["data"], row["split"], row["loss"]) == (data, "disjoint", name)

            lines.append([data, name, mean(main, same), mean(cached, same)])
    return markdown_table(["data", "loss", "mAP, plain", "mAP, cached"], lines)


def _choices(rows: Sequence[Row]) -> str:
    chosen = chosen_settings(rows)
    rates = sorted({float(row["lr"]) for row in rows})
    lines = []
    for data in _values(rows, "data"):
        for name, loss in LOSSES.items():
            for setting in loss.settings:
                found = {
                    float(row["lr"]): 100 * float(row["mAP"])
                    for row in rows
                    if (row["data"], row["loss"], row["setting"]) == (data, name, setting)
                }
                marked = [
                    f"**{found[lr]:.1f}**"
                    if chosen[data, name] == (setting, lr)
                    else f"{found[lr]:.1f}"
                    if lr in found
                    else "-"
                    for lr in rates
                ]
                lines.append([data, name, setting, *marked])
    head = ["data", "loss", "setting", *(f"{rate:g}" for rate in rates)]
    return "mAP on the validation intents, one seed:\n\n" + markdown_table(head, lines, align="lll" + "r" * len(rates))
