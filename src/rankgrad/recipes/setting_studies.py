"""The published recipes of RS@k and RaMBO on Cars196: whole runs, and short ones, each with one setting changed."""

from dataclasses import replace
from typing import Any

from rankgrad.recipes.loss_studies import ANCHORS, CARS
from rankgrad.recipes.rambo import CUB, MEMORY_SIZE, OF_DATA, RECALLED
from rankgrad.recipes.recall_at_k import SIMIX_KS, resnet
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.study import Study, Variation

METRICS = ("R@1", "R@2", "R@4", "R@8", "mAP@R")
SIMIX: dict[str, Any] = {"simix": True, "ks": SIMIX_KS}
# whole batches fit on one GPU, and weights of the first form of the network are those that are at hand
PUBLISHED = replace(
    resnet("cars"),
    name="cars-published",
    trunk="resnet50-v1",
    precision="bf16",
    chunk_size=0,
    evaluate_every=10,
    log_every=50,
)
PUBLISHED_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cars-recall-at-k-simix", SIMIX),
    ("cars-recall-at-k", {}),
)
# a seventh of the 170 epochs, and of the epochs at which the rate falls
RECALL_AT_K = replace(PUBLISHED, name="cars-recall-at-k-short", epochs=24, milestones=(11, 20), evaluate_every=8)
# what the published code does otherwise, and what smaller images may need; in the order of likelihood
RECALL_AT_K_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as the recipe is", {}),
    ("query in its own list", {"query_in_database": True}),
    ("SiMix", SIMIX),
    ("SiMix, query in its own list", {**SIMIX, "query_in_database": True}),
    ("crops of at least 0.2 of the area", {"crop_scale": 0.2}),
    ("lr 3e-4", {"lr": 3e-4}),
    ("embedding layer x 5", {"head_lr": 5.0}),
    ("cosine schedule", {"schedule": "cosine"}),
    ("SiMix, crops of at least 0.2 of the area", {**SIMIX, "crop_scale": 0.2}),
    ("no weight decay", {"weight_decay": 0.0}),
)
# rank losses and the best of the others in the pipeline of RS@k, with the crops that it prefers on these images
RESNET50 = replace(RECALL_AT_K, name="cars-resnet50", crop_scale=0.2)
PROXY_ANCHOR: dict[str, Any] = {"loss": "pml:ProxyAnchorLoss", "loss_lr": 100.0, "loss_args": "margin=0.1,alpha=32"}
RESNET50_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RecallAtKLoss + SiMix", SIMIX),
    ("ProxyAnchorLoss", PROXY_ANCHOR),
    # the optimizer of its own published code; the rates are the same
    ("ProxyAnchorLoss, AdamW", {**PROXY_ANCHOR, "optimizer": "adamw", "weight_decay": 1e-4}),
    ("SupAPLoss", {"loss": "sup-ap"}),
    ("RecallAtKLoss + SiMix, proxy anchors", {**SIMIX, **ANCHORS, "proxy_weight": 0.1}),
)
# how sharp the crops are that a network trains on: the published code crops the files, and this copy's images are small
IMAGES = replace(CARS, name="cars-images", lr=8e-5)
IMAGES_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("160 of 183 pixels", {}),
    ("160 of 256 pixels", {"train_side": 256}),
    ("112 of 128 pixels", {"size": 112}),
    ("112 of 256 pixels", {"size": 112, "train_side": 256}),
    ("112 of 128 pixels, crops of at least 0.08", {"size": 112, "crop_scale": 0.08}),
    ("112 of 256 pixels, crops of at least 0.08", {"size": 112, "train_side": 256, "crop_scale": 0.08}),
)

# the recalled settings of CUB-200 on Cars196 with a small network, 20 of the 80 epochs
RAMBO = replace(
    RECALLED["cub"],
    memory=MEMORY_SIZE,
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
# in the order of likelihood
RAMBO_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as recalled", {}),
    ("crops of random scale", RESIZED),
    ("crops, lam 4, GeM, layer norm", CUB),
    ("lam 4", {"lam": 4.0}),
    ("no memory", {"memory": 0}),
    ("lr x 4", {"lr": 2e-4}),
    ("8 images of a class", {"per_class": 8}),
    ("statistics of the batch", {"batch_norm": "live"}),
    ("GeM, layer norm", {"pool": "gem", "layer_norm": True}),
    ("crops, lam 4, GeM, layer norm, lr x 4", {**CUB, "lr": 2e-4}),
    ("crops, lam 4, GeM, layer norm, no memory", {**CUB, "memory": 0}),
    ("crops, lam 4, GeM, layer norm, batches of 392, no memory", {**CUB, "memory": 0, "batch_size": 392}),
    ("lr of the embedding layer x 1", {"head_lr": 1.0}),
)
# the recipe of CUB-200 with its own network, 40 of the 80 epochs
RAMBO_RESNET50 = replace(
    OF_DATA["cub"],
    name="cars-rambo-resnet50",
    data_set="cars",
    trunk="resnet50-v1",
    milestones=(17,),
    epochs=40,
    precision="bf16",
    validation="none",
    evaluate_every=5,
    log_every=50,
)
RAMBO_RESNET50_LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as the recipe is", {}),
    ("memory", {"memory": MEMORY_SIZE}),
    ("lr x 4", {"lr": 2e-5}),
    ("recalled crops, lam and pooling", {name: getattr(RECALLED["cub"], name) for name in CUB}),
    ("lr x 4, lr of the embedding layer x 1", {"lr": 2e-5, "head_lr": 1.0}),
)


def _settings(name: str, base: RetrievalRecipe, lines: tuple[tuple[str, dict[str, Any]], ...], group: str = "setting") -> Study:
    variations = tuple(Variation(group, label, changes) for label, changes in lines)
    return Study(name, base, variations, metrics=METRICS, watches=True)


STUDIES = {
    "cars-published": _settings("cars-published", PUBLISHED, PUBLISHED_LINES),
    "cars-images": _settings("cars-images", IMAGES, IMAGES_LINES),
    "cars-recall-at-k": _settings("cars-recall-at-k", RECALL_AT_K, RECALL_AT_K_LINES),
    "cars-resnet50": _settings("cars-resnet50", RESNET50, RESNET50_LINES, group="loss"),
    "cars-rambo": _settings("cars-rambo", RAMBO, RAMBO_LINES),
    "cars-rambo-resnet50": _settings("cars-rambo-resnet50", RAMBO_RESNET50, RAMBO_RESNET50_LINES),
}
