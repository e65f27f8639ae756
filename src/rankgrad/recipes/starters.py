"""Recipes that are not a row of a paper: built-in glyphs and shapes, Omniglot, small cars, blood cells, a user's own data."""

from dataclasses import replace
from typing import Any

from rankgrad.detection.detection_recipe import DetectionLoss, DetectionRecipe
from rankgrad.runs.recipe import Recipe
from rankgrad.runs.retrieval_recipe import RetrievalRecipe

# what a loss needs beside its name; the rest is the same for all, so that they can be compared
LOSSES: dict[str, dict[str, Any]] = {
    "recall-at-k": {},
    "recall-at-k-simix": {"loss": "recall-at-k", "simix": True},
    "smooth-ap": {},
    "fastap": {},
    "rambo-recall": {"lam": 4.0, "margin": 0.02},
    "rambo-ap": {"lam": 4.0, "margin": 0.02},
}
CARS_NOTE = (
    "A run of minutes. Where there is no network give the trunk's weights as a file: --weights FILE. A copy of the data set "
    "whose images are already small is enough; if some are absent, add --partial."
)
OWN_NOTE = (
    "The default of `rankgrad train --data DIR`. The batch is as large as the classes allow, 4,000 images at most, and goes "
    "through the network in chunks that fit in memory."
)
SCRATCH_NOTE = (
    "The default of `rankgrad train --data DIR --weights none`. Random weights need a larger learning rate than pretrained "
    "ones: docs/evidence.md has the figures."
)
TEXT_NOTE = (
    "The default of `rankgrad train --data FILE` for a .csv, .jsonl or .parquet file with the columns text and label. The "
    "encoder is downloaded once; without a network give the folder of one: --trunk FOLDER."
)
PAIR_NOTE = (
    "The default for the columns anchor and positive. An anchor ranks the positives of the batch, its own are relevant; it "
    "is tested as a query among the positives of the test pairs."
)
DRAWINGS = RetrievalRecipe(
    name="drawings",
    # characters change their meaning when mirrored
    flip=False,
    crop_scale=0.6,
    per_class=4,
    trunk="convnet",
    weights="none",
    pool="gem",
    layer_norm=True,
    # embeddings of random weights lie in nearly one direction, and the first steps would collapse them
    whiten=True,
    optimizer="adamw",
    # of 3e-4 to 1e-2 the best on validation classes of Omniglot with each of five losses; on glyphs FastAP prefers 1e-3
    lr=3e-3,
    weight_decay=1e-2,
    schedule="cosine",
    warmup_steps=25,
    validation="none",
)
GLYPHS = replace(
    DRAWINGS,
    data_set="glyphs",
    size=32,
    stored_side=32,
    batch_size=384,
    dim=64,
    epochs=10,
)
OMNIGLOT = replace(
    DRAWINGS,
    data_set="omniglot",
    size=64,
    stored_side=72,
    batch_size=960,
    # for those who change the trunk: from random weights a ResNet learns with the statistics of its batches
    batch_norm="live",
    dim=128,
    epochs=20,
    precision="bf16",
)
CARS_SMALL = RetrievalRecipe(
    name="cars-small",
    what="RS@k + SiMix on Cars196 at 112 pixels, EfficientNet-Lite0",
    notes=(CARS_NOTE,),
    data_set="cars",
    size=112,
    stored_side=112,
    crop_scale=0.2,
    batch_size=392,
    per_class=4,
    trunk="tf_efficientnet_lite0",
    pool="gem",
    layer_norm=True,
    simix=True,
    optimizer="adamw",
    lr=5e-4,
    head_lr=4.0,
    weight_decay=1e-2,
    schedule="cosine",
    warmup=1.0,
    epochs=40,
    precision="bf16",
    validation="none",
)
# what the comparison of losses on Cars196 has in common
SMALL_NETWORK = replace(CARS_SMALL, name="small-network", what="", size=160, stored_side=0, simix=False, epochs=30)
# the rank loss that came out best there: its rate and weight were chosen on validation classes
WITH_PROXIES: dict[str, Any] = {
    "loss": "sup-ap", "proxy_loss": "anchor", "proxy_temperature": 1 / 16, "proxy_weight": 0.4, "loss_lr": 100.0, "lr": 2e-4,
}  # fmt: skip
PROXIES_NOTE = (
    "The settings of the line 'SupAPLoss, proxy anchors' of `rankgrad study cars` (docs/evidence.md). On Cars196 it is ahead "
    "of every rank loss alone and level with `--loss pml:ProxyAnchorLoss`."
)
OWN_IMAGES = RetrievalRecipe(
    name="own-images",
    what="images of your own: a folder per class, or a CSV",
    notes=(OWN_NOTE,),
    data_set="folder",
    # of 0.08, 0.2 and 0.4 the best on validation classes of glyphs, Omniglot and a part of Cars196: docs/evidence.md
    crop_scale=0.4,
    loss="recall-at-k",
    batch_size=0,
    per_class=4,
    chunk_size="auto",
    optimizer="adamw",
    schedule="cosine",
    warmup=1.0,
    epochs=30,
)
OWN_IMAGES_SCRATCH = replace(
    OWN_IMAGES,
    name="own-images-scratch",
    what="images of your own, a network from random weights",
    notes=(SCRATCH_NOTE,),
    weights="none",
    lr=3e-4,
)
OWN_TEXTS = RetrievalRecipe(
    name="own-texts",
    what="texts of your own: text and label",
    notes=(TEXT_NOTE,),
    data_set="texts",
    loss="recall-at-k",
    batch_size=0,
    per_class=4,
    chunk_size="auto",
    trunk="sentence-transformers/all-MiniLM-L6-v2",
    # the embedding of the encoder itself, which is of use before any training
    layer_norm=False,
    dim=0,
    optimizer="adamw",
    lr=3e-5,  # the best of three for every rank loss on the validation intents of two data sets, see docs/evidence_text.md
    weight_decay=1e-2,
    decay_norms=False,
    schedule="cosine",
    warmup=1.0,
    epochs=10,
)
OWN_PAIRS = replace(
    OWN_TEXTS, name="own-pairs", what="texts of your own: pairs that belong together", notes=(PAIR_NOTE,), per_class=2
)

SHAPES = DetectionRecipe(
    name="shapes",
    what="drawn shapes, tiny network",
    data_set="shapes",
    min_size=128,
    max_size=128,
    backbone="tiny",
    weights="none",
    anchor_scale=4.0,
    proposals=400,
    regions=128,
    batch_size=16,
    warmup_steps=100,
    epochs=6,
    milestones=(4, 5),
    log_every=20,
)
CELLS = replace(
    SHAPES,
    name="cells",
    what="blood cells (BCCD), ResNet-18 from random weights",
    data_set="folder",
    skip_bad=True,
    min_size=384,
    max_size=512,
    backbone="resnet18",
    anchor_scale=8.0,
    proposals=1000,
    regions=256,
    batch_size=8,
    epochs=40,
    milestones=(30, 37),
    notes=("--data is the folder that holds BCCD; two of its boxes have no area and are skipped.",),
)
DETECTION_LOSSES: tuple[tuple[str, DetectionLoss, str], ...] = (
    ("ce", "cross-entropy", "cross-entropy"),
    ("rambo", "rambo-ap", "AP loss"),
)
# of four on validation images each (`rankgrad detect study shapes --validation --lr ...`): the best, but half of it on shapes,
# where at 0.1 one seed in three ends with nothing learned, with either loss
DETECTION_LR = {"shapes-ce": 0.05, "shapes-rambo": 0.05, "cells-ce": 0.02, "cells-rambo": 0.04}


def recipes() -> list[Recipe]:
    """All of them."""
    retrieval = [
        replace(base, name=f"{base.data_set}-{loss}", what=f"{what}, {loss}", **{"loss": loss, **changes})
        for base, what in (
            (GLYPHS, "the built-in characters, a small network"),
            (OMNIGLOT, "Omniglot's evaluation alphabets from its background ones"),
        )
        for loss, changes in LOSSES.items()
    ]
    detection = [
        replace(
            base,
            name=f"{base.name}-{short}",
            what=f"{base.what}, {title}",
            loss=loss,
            lr=DETECTION_LR[f"{base.name}-{short}"],
        )
        for base in (SHAPES, CELLS)
        for short, loss, title in DETECTION_LOSSES
    ]
    with_proxies = [
        replace(
            SMALL_NETWORK,
            name=f"{data}-sup-ap-proxies",
            what=f"SupAP and a Proxy-Anchor term on {title} at 160 pixels, EfficientNet-Lite0",
            notes=(PROXIES_NOTE, CARS_NOTE),
            data_set=data,
            batch_size=batch_size,
            **WITH_PROXIES,
        )
        for data, title, batch_size in (("cars", "Cars196", 392), ("cub", "CUB-200", 400))
    ]
    return [*retrieval, CARS_SMALL, *with_proxies, OWN_IMAGES, OWN_IMAGES_SCRATCH, OWN_TEXTS, OWN_PAIRS, *detection]
