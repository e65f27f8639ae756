"""Images with boxes, for readers, batches and evaluation.

Boxes are x1, y1, x2, y2 in continuous pixels: pixel i spans i to i + 1, so the width of a box is x2 - x1. Labels start at 1;
0 is background.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Boxes = NDArray[np.float32]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Scene:
    """One image and its objects."""

    name: str  # of the image's file, or of the generated image
    width: int
    height: int
    boxes: Boxes  # [M, 4]
    labels: NDArray[np.int64]  # [M], 1..classes
    difficult: NDArray[np.bool_]  # [M]

    def __post_init__(self) -> None:
        boxes, count = self.boxes, len(self.labels)
        if boxes.shape != (count, 4) or self.difficult.shape != (count,):
            raise ValueError(
                f"Scene {self.name}: boxes [M, 4], labels [M] and difficult [M] must agree, got {boxes.shape}, "
                f"{self.labels.shape} and {self.difficult.shape}"
            )
        if count and not (boxes[:, 2:] > boxes[:, :2]).all():
            raise ValueError(f"Scene {self.name}: a box must have an area, got {boxes.tolist()}")
        if count and ((boxes < 0).any() or (boxes[:, 2] > self.width).any() or (boxes[:, 3] > self.height).any()):
            raise ValueError(f"Scene {self.name}: boxes must lie in {self.width} x {self.height} pixels, got {boxes.tolist()}")

    @property
    def clear(self) -> "Scene":
        """The scene without difficult objects."""
        kept = ~self.difficult
        return replace(self, boxes=self.boxes[kept], labels=self.labels[kept], difficult=self.difficult[kept])


@dataclass(frozen=True, eq=False)
class Scenes:
    """A split of a detection data set.

    Attributes:
        name: "voc/test".
        class_names: names of the labels 1, 2, ...
        scenes: the images.
        load: pixels [height, width, 3] of the image with the given number.
        notes: what to tell the user about the data.
    """

    name: str
    class_names: tuple[str, ...]
    scenes: tuple[Scene, ...]
    load: Callable[[int], Pixels]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.scenes:
            raise ValueError(f"Scenes {self.name}: must have at least one image, got none")
        most = len(self.class_names)
        for scene in self.scenes:
            if len(scene.labels) and not 1 <= scene.labels.min() <= scene.labels.max() <= most:
                raise ValueError(f"Scenes {self.name}: labels must be 1..{most}, got {scene.labels.tolist()} in {scene.name}")

    def __len__(self) -> int:
        return len(self.scenes)

    def image(self, number: int) -> Tensor:
        """Image as uint8 [3, height, width]."""
        scene, pixels = self.scenes[number], self.load(number)
        if pixels.shape != (scene.height, scene.width, 3):
            got = " x ".join(map(str, pixels.shape[1::-1]))
            raise ValueError(
                f"{self.name}: {scene.name} is {got} pixels, but its annotation says {scene.width} x {scene.height}"
            )
        # a copy, since loaded pixels may be read-only or shared
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    def select(self, numbers: Sequence[int]) -> "Scenes":
        """The images with these numbers, in this order."""
        rows = list(numbers)
        return replace(self, scenes=tuple(self.scenes[i] for i in rows), load=lambda i: self.load(rows[i]))

    def counts(self) -> dict[str, int]:
        """Number of images, and of objects of each class without the difficult ones."""
        labels = np.concatenate([scene.clear.labels for scene in self.scenes])
        per_class = np.bincount(labels, minlength=len(self.class_names) + 1)[1:]
        return {"images": len(self), **dict(zip(self.class_names, per_class.tolist(), strict=True))}


def concatenate(name: str, parts: Sequence[Scenes]) -> Scenes:
    """Concatenate splits, such as VOC 2007 and 2012."""
    if len({part.class_names for part in parts}) != 1:
        raise ValueError(f"{name}: parts must have the same classes, got {[part.class_names for part in parts]}")
    starts = np.cumsum([0, *map(len, parts)])

    def load(number: int) -> Pixels:
        part = int(np.searchsorted(starts, number, side="right")) - 1
        return parts[part].load(number - int(starts[part]))

    scenes = tuple(scene for part in parts for scene in part.scenes)
    return Scenes(name, parts[0].class_names, scenes, load, tuple(note for part in parts for note in part.notes))
