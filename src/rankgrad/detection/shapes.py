"""Shapes: a detection data set generated at run time, without a download.

Circles, rings, squares, triangles and crosses of random size, colour and rotation, occluding each other, on a noisy background
with specks. Image i of a split is a function of (seed, split, i). An object that is more than half hidden is difficult; one
image in twenty is empty.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_choice, check_count
from rankgrad.data.seeds import bits
from rankgrad.detection.scenes import Pixels, Scene, Scenes

CLASSES = ("circle", "ring", "square", "triangle", "cross")
SPLITS = ("train", "val", "test")
EMPTY = 0.05
MOST_OBJECTS = 7
SPECKS = 25
SMALLEST, LARGEST = 0.05, 0.19
"""Radius of an object, as a fraction of the image's side."""

Mask = NDArray[np.bool_]


def draw_shapes(split: str, count: int, *, size: int = 128, seed: int = 0) -> Scenes:
    """`count` images of `size` x `size` pixels."""
    check_choice(split, SPLITS, name="split", caller="draw_shapes")
    check_count(count, name="count", caller="draw_shapes")
    check_count(size, name="size", caller="draw_shapes", least=32)
    scenes = tuple(_drawn(split, number, size, seed)[0] for number in range(count))
    return Scenes(f"shapes/{split}", CLASSES, scenes, lambda number: _drawn(split, number, size, seed)[1])


# 200 MB of images of 128 x 128: enough for the default sizes
@lru_cache(maxsize=4096)
def _drawn(split: str, number: int, size: int, seed: int) -> tuple[Scene, Pixels]:
    draws = _Draws(seed, split, number)
    rows, columns = np.mgrid[:size, :size] + 0.5
    tilt = draws.uniform(-0.3, 0.3, 2)
    ground = draws.uniform(60, 190, 3) + 60 * (tilt[0] * columns + tilt[1] * rows)[..., None] / size
    for x, y, radius, shade in draws.uniform(0, 1, 4 * SPECKS).reshape(-1, 4):
        speck = np.hypot(columns - x * size, rows - y * size) < (0.004 + 0.016 * radius) * size
        ground[speck] += 120 * (shade - 0.5)
    owner = np.full((size, size), -1)
    masks: list[Mask] = []
    labels: list[int] = []
    for label, mask in _objects(draws, rows, columns, size):
        owner[mask] = len(masks)
        # differs from the mean of what it covers by at least 60 of 255
        away = draws.uniform(60, 130, 3) * np.sign(draws.uniform(-1, 1, 3))
        ground[mask] = ground[mask].mean(axis=0) + away
        masks.append(mask)
        labels.append(label)
    ground += draws.uniform(-14, 14, size * size * 3).reshape(size, size, 3)
    seen = [int((owner == index).sum()) / int(mask.sum()) for index, mask in enumerate(masks)]
    kept = [index for index, share in enumerate(seen) if share > 0]
    scene = Scene(
        name=f"{split}-{number:05}",
        width=size,
        height=size,
        boxes=np.array([_bounds(masks[index]) for index in kept], np.float32).reshape(-1, 4),
        labels=np.array([labels[index] for index in kept], np.int64),
        difficult=np.array([seen[index] < 0.5 for index in kept], np.bool_),
    )
    return scene, ground.clip(0, 255).astype(np.uint8)


class _Draws:
    """Uniform numbers for one image, from numpy's raw stream, which is stable between versions; those of Generator are not."""

    def __init__(self, seed: int, split: str, number: int) -> None:
        self._stream = bits(seed, "shapes", split, number)

    def uniform(self, low: float, high: float, count: int) -> NDArray[np.float64]:
        raw: NDArray[np.float64] = self._stream.random_raw(count).astype(np.float64)
        return low + (high - low) * raw / 2.0**64

    def one(self, low: float, high: float) -> float:
        return float(self.uniform(low, high, 1)[0])


def _objects(draws: _Draws, rows: NDArray[np.float64], columns: NDArray[np.float64], size: int) -> Iterator[tuple[int, Mask]]:
    """Label and mask of each object, from back to front."""
    if draws.one(0, 1) < EMPTY:
        return
    for _ in range(1 + int(draws.one(0, MOST_OBJECTS))):
        label = int(draws.one(0, len(CLASSES)))
        # log-uniform
        radius = size * SMALLEST * (LARGEST / SMALLEST) ** draws.one(0, 1)
        turn, x, y = draws.one(0, 2 * np.pi), draws.one(0, size), draws.one(0, size)
        across, down = columns - x, rows - y
        u = (np.cos(turn) * across + np.sin(turn) * down) / radius
        v = (np.cos(turn) * down - np.sin(turn) * across) / radius
        mask = _inside(CLASSES[label], u, v)
        if mask.sum() >= 9 and min(_sides(mask)) >= 3:
            yield label + 1, mask


def _inside(name: str, u: NDArray[np.float64], v: NDArray[np.float64]) -> Mask:
    """Mask of a shape of radius 1."""
    distance = np.hypot(u, v)
    inside: Mask
    if name == "circle":
        inside = distance < 1
    elif name == "ring":
        inside = (distance < 1) & (distance > 0.55)
    elif name == "square":
        inside = np.maximum(abs(u), abs(v)) < 0.85
    elif name == "triangle":
        inside = (v > -0.5) & (v < 1 - np.sqrt(3) * abs(u))
    else:
        inside = (np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 1)
    return inside


def _bounds(mask: Mask) -> tuple[int, int, int, int]:
    down, across = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(across[0]), int(down[0]), int(across[-1]) + 1, int(down[-1]) + 1


def _sides(mask: Mask) -> tuple[int, int]:
    left, top, right, bottom = _bounds(mask)
    return right - left, bottom - top
