"""The table of pictures: what each shows, and how it is computed, drawn and captioned."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rankgrad.report.figures import (
    batch_bias,
    before_after,
    bins,
    landscape,
    learning_curve,
    margin,
    surrogate,
    virtual_examples,
)
from rankgrad.report.figures.style import Theme


@dataclasses.dataclass(frozen=True)
class Picture:
    """Numbers, the picture of them and the text below it."""

    shows: str
    compute: Callable[[], Any]
    draw: Callable[[Any, Theme], Figure]
    caption: Callable[[Any], str]


PICTURES: Mapping[str, Picture] = {
    "rambo-landscape": Picture(
        "a loss of ranks and its blackbox interpolations (RaMBO, figure 1)",
        landscape.compute,
        landscape.draw,
        landscape.caption,
    ),
    "batch-bias": Picture(
        "the mAP of a mini-batch against its size (RaMBO, figure 2)", batch_bias.compute, batch_bias.draw, batch_bias.caption
    ),
    "margin-collapse": Picture(
        "scores that collapse without a margin (RaMBO, figure 3)", margin.compute, margin.draw, margin.caption
    ),
    "recall-surrogate": Picture(
        "smooth beside exact recall@k, and its gradient by rank (RS@k, figures 1 and 3)",
        surrogate.compute,
        surrogate.draw,
        surrogate.caption,
    ),
    "fastap-bins": Picture("the trade-off over the number of bins (FastAP, figure 4)", bins.compute, bins.draw, bins.caption),
    "learning-curve": Picture(
        "rank losses against stand-ins on the same network",
        learning_curve.compute,
        learning_curve.draw,
        learning_curve.caption,
    ),
    "simix": Picture(
        "the virtual examples of SiMix", virtual_examples.compute, virtual_examples.draw, virtual_examples.caption
    ),
    "before-after": Picture(
        "retrieved pictures before and after training", before_after.compute, before_after.draw, before_after.caption
    ),
}


def as_json(numbers: Any) -> dict[str, Any]:
    """The fields of a dataclass with arrays as lists, to five digits: more than the eye resolves."""

    def plain(value: Any) -> Any:
        if isinstance(value, (np.ndarray, list, tuple)):
            return [plain(each) for each in value]
        if isinstance(value, (float, np.floating)):
            return float(f"{value:.5g}")
        return value.item() if isinstance(value, np.generic) else value

    return {field.name: plain(getattr(numbers, field.name)) for field in dataclasses.fields(numbers)}
