"""How each ranker runs in the embedding kernels: one host object per ranker.

A `Lowering` says what the MODE of its ranker needs in `ranker_kernels`: it prepares the kernels' arguments, and has the
positives of a query compared with each other.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rankgrad.ops.exact_rankers import Blackbox, Exact
from rankgrad.ops.histogram_ranker import Histogram
from rankgrad.ops.rankers import Ranker
from rankgrad.ops.soft_rankers import Sigmoid, UpperBound
from rankgrad.ops.triton.exact_lowerings import BlackboxLowering, ExactLowering
from rankgrad.ops.triton.lowering import Lowering
from rankgrad.ops.triton.soft_lowerings import HistogramLowering, SigmoidLowering, UpperBoundLowering

LOWERINGS: Mapping[type[Ranker], type[Lowering[Any]]] = {
    Exact: ExactLowering,
    Sigmoid: SigmoidLowering,
    UpperBound: UpperBoundLowering,
    Blackbox: BlackboxLowering,
    Histogram: HistogramLowering,
}


def lowering_of(ranker: Ranker, *, given_scores: bool) -> Lowering[Any] | None:
    """The kernels of `ranker`, for given scores or for embeddings; None where there are none and it runs tiled."""
    lowering = LOWERINGS.get(type(ranker))
    if lowering is None or ranker.draws:
        return None
    if given_scores and lowering.count_dtype != torch.int32:  # the kernels for given scores count exactly
        return None
    return lowering(ranker)
