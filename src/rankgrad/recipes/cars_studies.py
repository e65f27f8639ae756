"""Studies on Cars196: rank losses beside those of pytorch-metric-learning, and the settings of two papers one by one.

All losses have one pipeline and one budget; what is theirs, the learning rate and a parameter or two, is chosen on half of the
training classes. Each line of the other studies changes one setting of a recipe, shortened, to show what it does.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rankgrad.recipes.rambo import OF_DATA
from rankgrad.recipes.recall_at_k import SIMIX_KS, resnet
from rankgrad.recipes.starters import CARS_SMALL
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.study import Grid, Selection, Study, Variation

METRICS = ("R@1", "R@2", "R@4", "R@8", "mAP@R")
RANK, WITH_PROXIES, METRIC_LEARNING = "rank loss", "rank loss and proxies", "loss of pytorch-metric-learning"

RATES = Grid("lr", (8e-5, 2e-4, 5e-4), extends=True)
TAUS = Grid("tau", (0.01, 0.03))
PROXIES = (RATES, Grid("proxy_weight", (0.1, 0.4)))
BLACKBOX = (RATES, Grid("lam", (4.0, 0.5)))

BASE = replace(
    CARS_SMALL, name="cars-study", what="", size=160, stored_side=0, simix=False, epochs=30, evaluate_every=6, log_every=50
)


def _fair() -> Iterator[Variation]:
    yield _line(RANK, "RecallAtKLoss", RATES, TAUS, loss="recall-at-k")
    yield _line(RANK, "RecallAtKLoss + SiMix", RATES, TAUS, loss="recall-at-k", simix=True, ks=SIMIX_KS)
    yield _line(RANK, "SmoothAPLoss", RATES, TAUS, loss="smooth-ap")
    yield _line(RANK, "FastAPLoss", RATES, Grid("bins", (10, 20)), loss="fastap")
    yield _line(
        METRIC_LEARNING,
        "ProxyAnchorLoss",
        RATES,
        Grid("loss_lr", (100.0, 10.0)),
        Grid("loss_args", ("margin=0.1,alpha=32", "margin=0.1,alpha=16")),
        loss="pml:ProxyAnchorLoss",
    )
    yield _line(WITH_PROXIES, "RecallAtKLoss, proxies", *PROXIES, loss="recall-at-k", loss_lr=100.0)
    yield _line(
        WITH_PROXIES, "RecallAtKLoss + SiMix, proxies", *PROXIES, loss="recall-at-k", simix=True, ks=SIMIX_KS, loss_lr=100.0
    )
    yield _line(RANK, "SupAPLoss", RATES, TAUS, loss="sup-ap")
    yield _line(WITH_PROXIES, "SupAPLoss, proxies", *PROXIES, loss="sup-ap", loss_lr=100.0)
    yield _line(RANK, "RamboRecallLoss, log", *BLACKBOX, loss="rambo-recall", weighting="log", margin=0.02)
    yield _line(
        METRIC_LEARNING,
        "MultiSimilarityLoss with its miner",
        RATES,
        # the paper's, and those of its published code
        Grid("loss_args", ("alpha=2,beta=50,base=1", "alpha=2,beta=40,base=0.5")),
        loss="pml:MultiSimilarityLoss",
        miner="MultiSimilarityMiner",
    )
    yield _line(
        METRIC_LEARNING,
        "NormalizedSoftmaxLoss",
        RATES,
        Grid("loss_lr", (100.0, 10.0)),
        Grid("loss_args", ("temperature=0.05", "temperature=0.1")),
        loss="pml:NormalizedSoftmaxLoss",
    )
    yield _line(
        METRIC_LEARNING,
        "TripletMarginLoss, semi-hard",
        RATES,
        Grid("loss_args", ("margin=0.1", "margin=0.2")),
        loss="pml:TripletMarginLoss",
        miner="TripletMarginMiner",
        miner_args="margin=0.2,type_of_triplets=semihard",
    )
    yield _line(RANK, "RamboAPLoss", *BLACKBOX, loss="rambo-ap", margin=0.02)
    yield _line(RANK, "RamboRecallLoss, loglog", *BLACKBOX, loss="rambo-recall", weighting="loglog", margin=0.02)


def _line(group: str, label: str, *grids: Grid, **changes: Any) -> Variation:
    # the first value of a grid holds until it is its turn
    first = {grid.setting: grid.values[0] for grid in grids[1:]}
    return Variation(group, label, {**changes, **first}, grids=grids)


# a fifth of the 170 epochs, and of the epochs at which the rate falls
RECALL_AT_K = replace(
    resnet("cars"),
    name="cars-recall-at-k-short",
    trunk="resnet50-v1",
    epochs=34,
    milestones=(16, 28),
    precision="bf16",
    chunk_size=0,
    evaluate_every=6,
    log_every=50,
)
# what the published code does otherwise, and what smaller images may need; in the order of likelihood
RECALL_AT_K_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as the recipe is", {}),
    ("query in its own list", {"query_in_database": True}),
    ("crops of at least 0.2 of the area", {"crop_scale": 0.2}),
    ("SiMix", {"simix": True, "ks": SIMIX_KS}),
    ("SiMix, query in its own list", {"simix": True, "ks": SIMIX_KS, "query_in_database": True}),
    ("lr 3e-4", {"lr": 3e-4}),
)

# the recipe of CUB on Cars196 with a small network, 20 of its 80 epochs
RAMBO = replace(
    OF_DATA["cub"],
    name="cars-rambo-short",
    data_set="cars",
    size=160,
    trunk="tf_efficientnet_lite0",
    # the small network takes larger steps than a ResNet-50
    lr=5e-5,
    milestones=(10,),
    epochs=20,
    precision="bf16",
    validation="none",
    evaluate_every=4,
    log_every=50,
)
RESIZED: dict[str, Any] = {"aspect": "kept", "crop": "resized", "crop_scale": 0.2}
RAMBO_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as recalled", {}),
    ("crops of random scale", RESIZED),
    ("lam 4", {"lam": 4.0}),
    ("no memory", {"memory": 0}),
    ("8 images of a class", {"per_class": 8}),
    ("lr x 4", {"lr": 2e-4}),
    ("lr of the embedding layer x 1", {"head_lr": 1.0}),
    ("statistics of the batch", {"batch_norm": "live"}),
    ("batches of 392, no memory", {"batch_size": 392, "memory": 0}),
    ("GeM, layer norm", {"pool": "gem", "layer_norm": True}),
    ("crops, lam 4, GeM, layer norm, no memory", {**RESIZED, "lam": 4.0, "pool": "gem", "layer_norm": True, "memory": 0}),
)


def _settings(name: str, base: RetrievalRecipe, lines: tuple[tuple[str, dict[str, Any]], ...]) -> Study:
    variations = tuple(Variation("setting", label, changes) for label, changes in lines)
    return Study(name, base, variations, metrics=METRICS, watches=True)


STUDIES = {
    "cars": Study(
        "cars",
        BASE,
        tuple(_fair()),
        metrics=METRICS,
        # as in A Metric Learning Reality Check: it depends on all neighbours, R@1 on one
        selection=Selection("mAP@R", {"epochs": 12}),
        watches=True,
    ),
    "cars-recall-at-k": _settings("cars-recall-at-k", RECALL_AT_K, RECALL_AT_K_LINES),
    "cars-rambo": _settings("cars-rambo", RAMBO, RAMBO_LINES),
}
