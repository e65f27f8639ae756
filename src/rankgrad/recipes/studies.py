"""The papers' ablations on data that anyone has, each a list of changes to a base recipe.

On Omniglot the background alphabets train and the evaluation alphabets test. The network has no batch norm, which would make
large and small batches differ by more than their lists, and starts from whitened embeddings: those of random weights lie in
nearly one direction, and the first full steps would collapse them. The detection studies compare cross-entropy with the AP
loss on the same budget.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.recipes import loss_studies, setting_studies
from rankgrad.recipes.catalogue import find
from rankgrad.recipes.default_study import DEFAULTS
from rankgrad.recipes.recall_at_k import SIMIX_KS
from rankgrad.recipes.starters import OMNIGLOT
from rankgrad.runs.recipe import Recipe
from rankgrad.runs.study import Study, Variation

LOSSES: Mapping[str, str] = {
    "RecallAtKLoss": "recall-at-k",
    "SmoothAPLoss": "smooth-ap",
    "FastAPLoss": "fastap",
    "RamboRecallLoss": "rambo-recall",
    "RamboAPLoss": "rambo-ap",
}
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "class-balanced": {"sampler": "class-balanced"},
    "random classes": {"sampler": "whole-class", "per_class": 0},
    "category-hard": {"sampler": "category-hard", "per_class": 0, "batches_per_pair": 1},
}


def _variations() -> Iterator[Variation]:
    for name in LOSSES:
        for simix in (False, True):
            yield _changed("loss", name, f"{name}{' + SiMix' if simix else ''}", **_mixing(name, simix))
    for name in ("FastAPLoss", "RecallAtKLoss"):
        for title, sampler in SAMPLERS.items():
            yield _changed("sampling", name, f"{name}, {title}", **sampler)
    for batch in (120, 480, 960, 1920, 3840):
        for simix in (False, True):
            title = f"RecallAtKLoss, {batch:,}{' + SiMix' if simix else ''}"
            yield _changed("batch size", "RecallAtKLoss", title, batch_size=batch, **_mixing("RecallAtKLoss", simix))
    for bins in (2, 5, 10, 20, 50):
        yield _changed("bins", "FastAPLoss", f"FastAPLoss, {bins} bins", bins=bins)
    for ks in ((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        yield _changed("k", "RecallAtKLoss", f"RecallAtKLoss, k {', '.join(map(str, ks))}", ks=ks)
    for tau in (0.001, 0.01, 0.1):
        yield _changed("temperature", "RecallAtKLoss", f"RecallAtKLoss, tau {tau:g}", tau=tau)
    for tau_cut in (0.1, 1.0, 10.0):
        yield _changed("temperature", "RecallAtKLoss", f"RecallAtKLoss, tau_cut {tau_cut:g}", tau_cut=tau_cut)
    for memory in (0, 1, 3):
        yield _changed("memory", "RamboRecallLoss", f"RamboRecallLoss, {memory} batches", memory=memory)
    for margin in (0.0, 0.02, 0.05):
        yield _changed("margin", "RamboRecallLoss", f"RamboRecallLoss, margin {margin:g}", margin=margin)


def _mixing(loss: str, simix: bool) -> Mapping[str, Any]:
    # mixtures lengthen the lists of relevant items, so the paper asks for more of them
    return {"simix": simix, **({"ks": SIMIX_KS} if simix and loss == "RecallAtKLoss" else {})}


def _changed(group: str, loss: str, label: str, **changes: Any) -> Variation:
    return Variation(group, label, {"loss": LOSSES[loss], **changes})


def _detection(name: str) -> Study:
    cross_entropy, ranked = (find(f"{name}-{loss}", DetectionRecipe) for loss in ("ce", "rambo"))
    return Study(
        name,
        cross_entropy,
        (Variation("loss", "cross-entropy", {}, cross_entropy), Variation("loss", "AP loss", {}, ranked)),
        saves_results=True,
    )


STUDIES: Mapping[str, Study] = {
    "omniglot": Study(
        "omniglot",
        replace(
            OMNIGLOT,
            name="omniglot-study",
            lam=4.0,
            margin=0.02,
            evaluate_every=0,
            log_every=50,
        ),
        tuple(_variations()),
        metrics=("R@1", "R@4", "mAP", "mAP@R"),
        matches_budget=True,
    ),
    **loss_studies.STUDIES,
    **setting_studies.STUDIES,
    "defaults": DEFAULTS,
    "shapes": _detection("shapes"),
    "cells": _detection("cells"),
}


def studies_of(kind: type[Recipe]) -> Mapping[str, Study]:
    """The studies of a kind of recipe, by name."""
    return {name: study for name, study in STUDIES.items() if isinstance(study.base, kind)}
