"""How long a training step of a detector takes here, and which part of it is the classification loss."""

import time
from collections.abc import Callable

import numpy as np
import torch

from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.detection.detection_task import classification_loss, new_detector
from rankgrad.detection.detector_training import DetectionBatches, DetectionObjective, RowDetector
from rankgrad.detection.scenes import Scene, Scenes
from rankgrad.train.settings import AUTOCAST

CLASSES = 20
OBJECTS = 3
"""Objects of an image, about as many as in VOC."""
WARM_UP, REPEATS = 3, 15


def plan_step(recipe: DetectionRecipe, device: torch.device) -> str:
    """A sentence about a step of `recipe` on noise of its size, and about the loss alone on as many regions."""
    scenes = _noise(recipe)
    model = RowDetector(new_detector(recipe, CLASSES, device)).train()
    loss = classification_loss(recipe)
    objective = DetectionObjective(loss, CLASSES).to(device).train()
    _, _, batch, labels = next(DetectionBatches(scenes, recipe.batch_size, flip=False).iterate(0))
    batch = {name: value.to(device) for name, value in batch.items()}
    autocast = AUTOCAST[recipe.precision]

    def step() -> None:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            rows = model(batch)
        objective(rows, labels).backward()
        model.zero_grad(set_to_none=True)

    regions = recipe.batch_size * recipe.regions
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(regions, 1 + CLASSES, generator=draws).to(device).requires_grad_()
    targets = torch.randint(1, CLASSES + 1, (regions,), generator=draws)
    # a quarter of the regions are positive, as the detector samples them
    targets[regions // 4 :] = 0
    targets = targets.to(device)

    def alone() -> None:
        torch.autograd.grad(loss(logits, targets), logits)

    whole = _median(step, device)
    for _ in range(recipe.memory):
        alone()  # fills the memory, with which the lists are as long as they get
    part = _median(alone, device)
    ranked = CLASSES * regions * (1 + (recipe.memory if recipe.loss == "rambo-ap" else 0)) + CLASSES * regions
    return (
        f"{recipe.name} on {_name(device)}: a step of {recipe.batch_size} images takes {1e3 * whole:,.0f} ms, forward and "
        f"backward; its classification loss ({recipe.loss}, {regions:,} regions x {CLASSES} classes, {ranked:,} scores ranked) "
        f"{1e3 * part:.2f} ms, {100 * part / whole:.2f} % of it"
    )


def _noise(recipe: DetectionRecipe) -> Scenes:
    width, height = recipe.max_size, min(recipe.min_size, recipe.max_size)
    side = min(width, height) // 3
    corners = [(side * i / 2, side * i / 3) for i in range(OBJECTS)]
    boxes = np.array([(x, y, x + side, y + side) for x, y in corners], np.float32)
    labels = np.arange(1, OBJECTS + 1)
    scene = Scene("noise", width, height, boxes, labels, np.zeros(OBJECTS, np.bool_))
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    names = tuple(f"class {label}" for label in range(1, CLASSES + 1))
    return Scenes("noise", names, (scene,) * recipe.batch_size, lambda number: pixels)


def _median(call: Callable[[], None], device: torch.device) -> float:
    seconds = []
    for repeat in range(WARM_UP + REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
