"""Recipes that are nobody's table: the built-in glyphs, Omniglot, small cars, and images of one's own."""

from dataclasses import replace
from typing import Any

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
    # embeddings of random weights lie in nearly one direction, and the first steps would throw them together
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
OWN_IMAGES = RetrievalRecipe(
    name="own-images",
    what="images of your own: a folder per class, or a CSV",
    notes=(OWN_NOTE,),
    data_set="folder",
    loss="recall-at-k",
    batch_size=0,
    per_class=4,
    chunk_size="auto",
    optimizer="adamw",
    schedule="cosine",
    warmup=1.0,
    epochs=30,
)


def recipes() -> list[RetrievalRecipe]:
    """All of them."""
    found = [
        replace(base, name=f"{base.data_set}-{loss}", what=f"{what}, {loss}", **{"loss": loss, **changes})
        for base, what in (
            (GLYPHS, "the built-in characters, a small network"),
            (OMNIGLOT, "Omniglot's evaluation alphabets from its background ones"),
        )
        for loss, changes in LOSSES.items()
    ]
    return [*found, CARS_SMALL, OWN_IMAGES]
