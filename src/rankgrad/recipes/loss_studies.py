"""Rank losses beside those of pytorch-metric-learning, on Cars196 and on Omniglot.

All losses have one pipeline and one budget; what is theirs, the learning rate and a parameter or two, is chosen on half of the
training classes.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rankgrad.recipes.recall_at_k import SIMIX_KS
from rankgrad.recipes.starters import OMNIGLOT, SMALL_NETWORK
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.study import Grid, Selection, Study, Variation

RANK, WITH_PROXIES, METRIC_LEARNING = "rank loss", "rank loss and proxies", "loss of pytorch-metric-learning"
TAUS = Grid("tau", (0.01, 0.03))
# alpha 16, which is best for Proxy-Anchor alone
ANCHORS: dict[str, Any] = {"proxy_loss": "anchor", "proxy_temperature": 1 / 16, "loss_lr": 100.0}


def lines(*rates: float) -> Iterator[Variation]:
    """A line per loss, in the order in which they are run: what is compared most often comes first.

    Args:
        *rates: learning rates to choose from; further ones are tried if the first or last is best.
    """
    lr = Grid("lr", rates, extends=True)
    blackbox = (lr, Grid("lam", (4.0, 0.5)))
    proxies = (lr, Grid("proxy_weight", (0.1, 0.4)))
    anchors = (lr, Grid("proxy_weight", (0.4, 0.1, 0.8)))
    yield _line(RANK, "RecallAtKLoss", lr, TAUS, loss="recall-at-k")
    yield _line(RANK, "RecallAtKLoss + SiMix", lr, TAUS, loss="recall-at-k", simix=True, ks=SIMIX_KS)
    yield _line(RANK, "SmoothAPLoss", lr, TAUS, loss="smooth-ap")
    yield _line(RANK, "FastAPLoss", lr, Grid("bins", (10, 20)), loss="fastap")
    yield _line(
        METRIC_LEARNING,
        "ProxyAnchorLoss",
        lr,
        Grid("loss_lr", (100.0, 10.0)),
        Grid("loss_args", ("margin=0.1,alpha=32", "margin=0.1,alpha=16", "margin=0.1,alpha=8")),
        loss="pml:ProxyAnchorLoss",
    )
    yield _line(WITH_PROXIES, "RecallAtKLoss, proxies", *proxies, loss="recall-at-k", loss_lr=100.0)
    yield _line(
        WITH_PROXIES, "RecallAtKLoss + SiMix, proxies", *proxies, loss="recall-at-k", simix=True, ks=SIMIX_KS, loss_lr=100.0
    )
    yield _line(WITH_PROXIES, "RecallAtKLoss, proxy anchors", *anchors, loss="recall-at-k", **ANCHORS)
    yield _line(WITH_PROXIES, "SupAPLoss, proxy anchors", *anchors, loss="sup-ap", **ANCHORS)
    yield _line(
        WITH_PROXIES,
        "RecallAtKLoss + SiMix, proxy anchors",
        *anchors,
        loss="recall-at-k",
        simix=True,
        ks=SIMIX_KS,
        **ANCHORS,
    )
    yield _line(RANK, "SupAPLoss", lr, TAUS, loss="sup-ap")
    yield _line(WITH_PROXIES, "SupAPLoss, proxies", *proxies, loss="sup-ap", loss_lr=100.0)
    yield _line(RANK, "RamboRecallLoss, log", *blackbox, loss="rambo-recall", weighting="log", margin=0.02)
    yield _line(
        METRIC_LEARNING,
        "MultiSimilarityLoss with its miner",
        lr,
        # those of its published code, and the paper's, with which most runs collapse
        Grid("loss_args", ("alpha=2,beta=40,base=0.5", "alpha=2,beta=50,base=1")),
        loss="pml:MultiSimilarityLoss",
        miner="MultiSimilarityMiner",
    )
    yield _line(
        METRIC_LEARNING,
        "NormalizedSoftmaxLoss",
        lr,
        Grid("loss_lr", (100.0, 10.0)),
        Grid("loss_args", ("temperature=0.05", "temperature=0.1")),
        loss="pml:NormalizedSoftmaxLoss",
    )
    yield _line(
        METRIC_LEARNING,
        "TripletMarginLoss, semi-hard",
        lr,
        Grid("loss_args", ("margin=0.1", "margin=0.2")),
        loss="pml:TripletMarginLoss",
        miner="TripletMarginMiner",
        miner_args="margin=0.2,type_of_triplets=semihard",
    )
    yield _line(RANK, "RamboAPLoss", *blackbox, loss="rambo-ap", margin=0.02)
    yield _line(RANK, "RamboRecallLoss, loglog", *blackbox, loss="rambo-recall", weighting="loglog", margin=0.02)


def _line(group: str, label: str, *grids: Grid, **changes: Any) -> Variation:
    # the first value of a grid holds until it is its turn
    first = {grid.setting: grid.values[0] for grid in grids[1:]}
    return Variation(group, label, {**changes, **first}, grids=grids)


def _study(name: str, base: RetrievalRecipe, *rates: float, epochs: int) -> Study:
    return Study(
        name,
        base,
        tuple(lines(*rates)),
        metrics=("R@1", "R@2", "R@4", "R@8", "mAP@R"),
        # both metrics of the tables: chosen by one alone, settings win that gain 0.1 of it and lose points of the other
        selection=Selection(("R@1", "mAP@R"), {"epochs": epochs}),
        watches=True,
    )


CARS = replace(SMALL_NETWORK, name="cars-study", evaluate_every=6, log_every=50)
STUDIES = {
    "cars": _study("cars", CARS, 8e-5, 2e-4, 5e-4, epochs=12),
    "omniglot-losses": _study(
        "omniglot-losses", replace(OMNIGLOT, name="omniglot-losses", evaluate_every=5, log_every=50), 1e-3, 3e-3, epochs=8
    ),
}
