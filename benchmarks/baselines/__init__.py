"""The baselines that the losses are measured against: the best a user would write by hand, and published code.

    dense            every comparison at once, eagerly, compiled, or query by query
    chunked          row chunks, so that memory is bounded
    sorts            RaMBO's ranks by sorting
    libraries        pytorch-metric-learning
    torch_products   rankgrad itself with torch's own matrix products
    floors           no loss at all: what none in plain torch can do without on a CPU

All take embeddings [N, d] and labels [N] of a class-balanced batch (`per_class` of every class, in any order), normalise the
embeddings, and return the mean loss over the queries, with the settings of `benchmarks.presets`. They differ in how they get
the ranks, hence in time and memory, and not in what they compute, unless `Baseline.differs` says so.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.baselines.chunked import Formulation
from benchmarks.baselines.dense import compiled, dense_fast_ap, dense_recall_at_k, dense_smooth_ap, loop_recall_at_k
from benchmarks.baselines.floors import sigmoid_operators, symmetric_products
from benchmarks.baselines.libraries import library_fast_ap, library_smooth_ap
from benchmarks.baselines.sorts import sorted_rambo_ap, sorted_rambo_recall
from benchmarks.baselines.torch_products import with_torch_products
from benchmarks.presets import BINS, PRESETS


@dataclass(frozen=True)
class Baseline:
    """One way to compute one loss.

    `numbers(N, P)` estimates how many numbers forward and backward hold at their worst moment for N queries with
    P relevant items each: enough to tell beforehand what would not fit.
    """

    loss: str
    name: str
    function: Formulation
    numbers: Callable[[int, int], float]
    differs: str = ""  # what it computes instead of the loss; empty where it computes the loss
    sample: Formulation | None = None  # the same for SAMPLED_QUERIES queries only, where all would take too long


SAMPLED_QUERIES = 128
ONE_TILE = 2**20
TORCH_PRODUCTS = "torch-products"
PRODUCTS = "the matrix products alone, no loss"
OPERATORS = "the matrix products and operators on tiles in the cache, no loss"

BASELINES = (
    Baseline("recall_at_k", "dense", dense_recall_at_k, lambda n, p: (2 * p + 5) * n * n),
    Baseline("recall_at_k", "dense-compiled", compiled(dense_recall_at_k), lambda n, p: 6 * n * n),
    Baseline(
        "recall_at_k",
        "query-loop",
        loop_recall_at_k,
        lambda n, p: (2 * p + 5) * n * n,
        sample=functools.partial(loop_recall_at_k, queries=SAMPLED_QUERIES),
    ),
    Baseline("recall_at_k", "products", symmetric_products, lambda n, p: ONE_TILE, differs=PRODUCTS),
    Baseline("recall_at_k", "operators", sigmoid_operators, lambda n, p: ONE_TILE, differs=OPERATORS),
    Baseline("smooth_ap", "dense", dense_smooth_ap, lambda n, p: (2 * p + 5) * n * n),
    Baseline("smooth_ap", "operators", sigmoid_operators, lambda n, p: ONE_TILE, differs=OPERATORS),
    Baseline("smooth_ap", "dense-compiled", compiled(dense_smooth_ap), lambda n, p: 6 * n * n),
    Baseline(
        "smooth_ap",
        "pml",
        library_smooth_ap,
        lambda n, p: 5.5 * n**3,
        differs="other ranks: takes rows as class by class, as many classes as members",
    ),
    Baseline("fast_ap", "dense", dense_fast_ap, lambda n, p: (3 * (BINS + 1) + 4) * n * n),
    Baseline("fast_ap", "dense-compiled", compiled(dense_fast_ap), lambda n, p: 6 * n * n),
    Baseline("fast_ap", "pml", library_fast_ap, lambda n, p: (4 * (BINS + 1) + 7) * n * n),
    Baseline("rambo_recall", "sorted-rows", sorted_rambo_recall, lambda n, p: 12 * n * n),
    Baseline("rambo_ap", "sorted-rows", sorted_rambo_ap, lambda n, p: 12 * n * n),
    *(Baseline(loss, TORCH_PRODUCTS, with_torch_products(loss), lambda n, p: 0) for loss in PRESETS),
)


def dense_baseline(loss: str) -> Baseline:
    """The eager baseline of a loss with all scores at once."""
    return next(baseline for baseline in BASELINES if baseline.loss == loss)
