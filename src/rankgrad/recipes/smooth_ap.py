"""Smooth-AP (Brown et al., ECCV 2020) as RS@k's tables 2 and 3 and its text on Cars196 report it.

Rows marked as trained by RS@k's authors use "the same implementation as for RS@k": its settings with another loss and, unless
stated otherwise, the original's batch of 384.
"""

from dataclasses import replace
from typing import Any

from rankgrad.recipes.recall_at_k import DATA, TABLE_2, landmark_numbers, landmarks, resnet, vit
from rankgrad.runs.recipe import Published, sources
from rankgrad.runs.retrieval_recipe import RetrievalRecipe

SELF = (
    "The query is neither a candidate nor relevant to itself here. The published code counts it as both, which adds an item of "
    "rank 1 to every list."
)
ASSUMED = "RS@k's settings with the batch of 384 that its text gives for Smooth-AP; nothing else is stated for this row."
PIPELINE = (
    "Settings of the published code; its README names the batch of 384 and a factor of 1 for the embedding layer, its defaults "
    "are 112 and 5."
)
# the paper itself is not at hand
ORIGINAL_SOURCES = sources(
    code="data_set batch_size per_class sampler trunk weights pool layer_norm dim optimizer loss tau size aspect "
    "crop crop_scale flip batch_norm lr head_lr weight_decay decay_norms schedule milestones gamma epochs",
)
ORIGINAL: dict[str, dict[str, Any]] = {
    "inat": {"milestones": (40, 70), "epochs": 90},
    "vehicleid": {"milestones": (200, 300), "epochs": 400},
}
ORIGINAL_ROWS = {"inat": (67.2, 81.8, 90.3, 93.1), "vehicleid": (94.9, 97.6, 93.3, 96.4, 91.9, 96.2)}
ROWS: dict[str, tuple[tuple[float, ...], ...]] = {
    "-gem": (
        (68.7, 82.7, 90.9, 93.5),
        (80.3, 92.0, 96.9, 99.0),
        (94.2, 97.2, 92.7, 96.2, 91.0, 95.8),
        (78.2, 85.6, 90.8, 94.3),
    ),
    "-vit-b32": (
        (72.2, 84.6, 91.6, 93.9),
        (83.7, 94.0, 97.8, 99.3),
        (94.8, 97.7, 93.5, 96.8, 92.1, 96.3),
        (78.1, 85.7, 91.0, 94.8),
    ),
    "-vit-b16": (
        (79.1, 89.0, 94.2, 95.8),
        (86.6, 95.4, 98.4, 99.5),
        (95.5, 97.7, 94.2, 96.9, 93.1, 96.6),
        (86.2, 92.1, 95.1, 97.2),
    ),
}


def recipes() -> list[RetrievalRecipe]:
    """All rows."""
    found = [_original(data) for data in ORIGINAL]
    found += [_row(data, suffix, ROWS[suffix][column]) for suffix in ROWS for column, data in enumerate(DATA)]
    cars = replace(_row("cars", "-gem", ROWS["-gem"][3]), batch_size=392, chunk_size=98)
    found += [
        replace(
            cars,
            name="cars-smooth-ap-bs392",
            what="Smooth-AP, ResNet-50, GeM + layer norm, batch 392",
            published=Published.columns("cars", (79.5, 86.6, 91.2, 94.4), "RS@k, section 4.3"),
        ),
        replace(
            cars,
            name="cars-smooth-ap-simix",
            what="Smooth-AP + SiMix, ResNet-50, GeM + layer norm, batch 392",
            simix=True,
            published=Published.columns("cars", (85.4, 91.0, 94.3, 96.7), "RS@k, section 4.3"),
        ),
        replace(
            landmarks(),
            name="gldv1-smooth-ap",
            what="Smooth-AP, ResNet-101 GeM, 2048 dimensions",
            loss="smooth-ap",
            notes=(SELF, *landmarks().notes[1:]),
            published=landmark_numbers((52.7, 40.6, 67.9, 46.3, 49.5, 25.8, 81.7, 63.3, 57.4, 29.8)),
        ),
    ]
    return found


def _original(data: str) -> RetrievalRecipe:
    return replace(
        resnet(data),
        name=f"{data}-smooth-ap",
        what="Smooth-AP, ResNet-50, batch 384",
        loss="smooth-ap",
        batch_size=384,
        chunk_size=192,
        pool="avg",
        layer_norm=False,
        lr=1e-5,
        sources=ORIGINAL_SOURCES,
        notes=(SELF, PIPELINE, *resnet(data).notes[1:]),
        published=Published.columns(data, ORIGINAL_ROWS[data], TABLE_2),
        **ORIGINAL[data],
    )


def _row(data: str, suffix: str, values: tuple[float, ...]) -> RetrievalRecipe:
    base = resnet(data) if suffix == "-gem" else vit(data, suffix.removeprefix("-"))
    trunk = {"-gem": "ResNet-50, GeM + layer norm", "-vit-b32": "ViT-B/32", "-vit-b16": "ViT-B/16"}[suffix]
    return replace(
        base,
        name=f"{data}-smooth-ap{suffix}",
        what=f"Smooth-AP, {trunk}, batch 384",
        loss="smooth-ap",
        batch_size=384,
        chunk_size=96 if suffix == "-vit-b16" else 192,
        notes=(SELF, ASSUMED, *base.notes[1:]),
        published=Published.columns(data, values, TABLE_2),
    )
