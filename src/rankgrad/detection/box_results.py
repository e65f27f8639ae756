"""What a test leaves in RUN/eval/<split>, written and read.

result.json        metrics, AP of each class, what the numbers mean
detections.npz     every box found and every object, so that curves can be drawn and numbers checked without the images
pictures/*.jpg     a few images, those with most mistakes and those with none
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad.detection.box_evaluation import RIGHT, WRONG, DetectionResult, Detections, evaluate_boxes
from rankgrad.detection.scenes import Scene, Scenes
from rankgrad.train.journal import jsonable

PROTOCOL = "voc-11-point"
RULE = (
    "AP50 by the rules of Pascal VOC 2007: a box is right with an intersection over union of at least 0.5 with an object that "
    "no box of a higher score has found; a second box on an object is wrong; difficult objects are left out; AP is the mean of "
    "the highest precision at a recall of at least 0, 0.1, ..., 1. AP50[all-point] is the area below that curve instead."
)
PICTURES = 8
"""Pictures with most mistakes, and as many without any."""
CERTAIN = 0.5
"""Score from which on a wrong box counts as a mistake when pictures are chosen."""
SIDE = 480


@dataclass(frozen=True, eq=False)
class Tested:
    """A split, what was found in it and how good that is."""

    split: str
    class_names: tuple[str, ...]
    scenes: tuple[Scene, ...]
    found: tuple[Detections, ...]
    result: DetectionResult


def judged(split: str, scenes: Scenes, found: Sequence[Detections]) -> Tested:
    """The detections of a split, judged."""
    result = evaluate_boxes(found, scenes.scenes, scenes.class_names)
    return Tested(split, scenes.class_names, scenes.scenes, tuple(found), result)


def save(tested: Tested, scenes: Scenes, folder: Path, *, debug: bool) -> None:
    """Writes RUN/eval/<split>; `folder` is RUN."""
    place = folder / "eval" / tested.split
    place.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = _arrays(tested)
    np.savez_compressed(place / "detections.npz", **arrays)
    (place / "pictures").mkdir(exist_ok=True)
    for old in (place / "pictures").glob("*.jpg"):
        old.unlink()
    for number in worst_and_best(tested):
        _save_picture(scenes, number, place / "pictures" / f"{number:06}.jpg")
    notes = [*scenes.notes]
    if tested.result.absent:
        notes.append(f"no object of {', '.join(tested.result.absent)}: the mean is over the other classes")
    content = {
        "split": tested.split,
        "table": scenes.name,
        "protocol": PROTOCOL,
        "rule": RULE,
        "metrics": tested.result.metrics(),
        "per_category": tested.result.per_class(),
        "images": len(tested.scenes),
        "objects": sum(each.objects for each in tested.result.classes),
        "notes": notes,
        "debug": debug,
    }
    # result.json comes last: where it is, the other files are
    (place / "result.json").write_text(json.dumps(jsonable(content), indent=1) + "\n", encoding="utf-8")


def load(folder: Path, split: str) -> tuple[Tested, Mapping[str, Any]]:
    """What `save` wrote: the test, judged again from its boxes, and result.json."""
    place = folder / "eval" / split
    for name in ("result.json", "detections.npz"):
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place / name} is missing: `rankgrad detect eval {folder}` makes it")
    content = json.loads((place / "result.json").read_text(encoding="utf-8"))
    with np.load(place / "detections.npz") as file:
        arrays = {name: file[name] for name in file.files}
    names = tuple(map(str, arrays["class_names"]))
    scenes = tuple(
        Scene(str(arrays["names"][i]), int(arrays["sizes"][i, 0]), int(arrays["sizes"][i, 1]), boxes, labels, difficult)
        for i, (boxes, labels, difficult) in enumerate(
            _split(arrays, "object", ("boxes", "labels", "difficult"), len(arrays["names"]))
        )
    )
    found = tuple(Detections(*parts) for parts in _split(arrays, "found", ("boxes", "labels", "scores"), len(scenes)))
    return Tested(split, names, scenes, found, evaluate_boxes(found, scenes, names)), content


def worst_and_best(tested: Tested) -> list[int]:
    """Numbers of the images with most mistakes, then of those without any and with most objects."""
    mistakes, objects = [], []
    for found, verdicts, missed, scene in zip(
        tested.found, tested.result.verdicts, tested.result.missed, tested.scenes, strict=True
    ):
        mistakes.append(int(((verdicts == WRONG) & (found.scores >= CERTAIN)).sum()) + int(missed.sum()))
        objects.append(int((~scene.difficult).sum()))
    numbers = range(len(mistakes))
    worst = sorted((i for i in numbers if mistakes[i]), key=lambda i: (-mistakes[i], i))[:PICTURES]
    best = sorted((i for i in numbers if not mistakes[i] and objects[i]), key=lambda i: (-objects[i], i))[:PICTURES]
    return worst + best


def table_of(tested: Tested) -> str:
    """AP of each class as text."""
    width = max(len("class"), *map(len, tested.class_names))
    lines = [f"{'class':{width}}  {'objects':>7}  {'AP50':>5}  {'all-point':>9}"]
    for each in tested.result.classes:
        values = [each.average_precision("11-point"), each.average_precision("all-point")]
        shown = ["-" if math.isnan(value) else f"{100 * value:.1f}" for value in values]
        lines.append(f"{each.name:{width}}  {each.objects:>7,}  {shown[0]:>5}  {shown[1]:>9}")
    return "\n".join(lines)


def _arrays(tested: Tested) -> dict[str, Any]:
    scenes, found = tested.scenes, tested.found
    return {
        "class_names": np.array(tested.class_names),
        "names": np.array([scene.name for scene in scenes]),
        "sizes": np.array([(scene.width, scene.height) for scene in scenes]),
        "object_count": np.array([len(scene.labels) for scene in scenes]),
        "object_boxes": np.concatenate([scene.boxes for scene in scenes]),
        "object_labels": np.concatenate([scene.labels for scene in scenes]),
        "object_difficult": np.concatenate([scene.difficult for scene in scenes]),
        "found_count": np.array([len(each.labels) for each in found]),
        "found_boxes": np.concatenate([each.boxes for each in found]),
        "found_labels": np.concatenate([each.labels for each in found]),
        "found_scores": np.concatenate([each.scores for each in found]),
        "found_right": np.concatenate(tested.result.verdicts) == RIGHT,
    }


def _split(arrays: Mapping[str, NDArray[Any]], kind: str, names: Sequence[str], images: int) -> list[tuple[NDArray[Any], ...]]:
    """What belongs to each image."""
    ends = np.cumsum(arrays[f"{kind}_count"])[:-1]
    columns = [np.split(arrays[f"{kind}_{name}"], ends) for name in names]
    assert all(len(column) == images for column in columns)
    return list(zip(*columns, strict=True))


def _save_picture(scenes: Scenes, number: int, path: Path) -> None:
    from PIL import Image

    image = Image.fromarray(scenes.image(number).permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE))
    image.save(path, quality=80)
