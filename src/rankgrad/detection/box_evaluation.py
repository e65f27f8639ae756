"""Average precision of boxes by the rules of Pascal VOC.

The detections of a class in all images form one list, sorted by score. Each is matched with the object of its class and image
that it overlaps most, matched already or not. With an intersection over union of at least 0.5 it is right if it is the first
match of that object, wrong if it is another one, and ignored if the object is difficult; with less it is wrong. Difficult
objects need not be found.

    11-point    the mean of the highest precision at a recall of at least 0, 0.1, ..., 1 (VOC 2007)
    all-point   the area below the highest precision at a recall of at least r (VOC 2010 and later)

COCO differs: there a detection whose best object is taken is matched with the next best.

The result of a split is saved in RUN/eval/<key>:

    result.json        metrics, AP of each class, what the numbers mean
    detections.npz     all detections and objects, so that curves can be drawn and numbers checked without the images
    pictures/*.jpg     a few images: those with most mistakes and those with none
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_choice, check_positive
from rankgrad._messages import table
from rankgrad.detection.scenes import Boxes, Scene, Scenes
from rankgrad.train.journal import jsonable

Rule: TypeAlias = Literal["11-point", "all-point"]
RULES: tuple[Rule, ...] = ("11-point", "all-point")
Floats = NDArray[np.float64]

PROTOCOL = "voc-11-point"
RULE = (
    "AP50 by the rules of Pascal VOC 2007: a box is right with an intersection over union of at least 0.5 with an object that "
    "no box of a higher score has found; a second box on an object is wrong; difficult objects are left out; AP is the mean of "
    "the highest precision at a recall of at least 0, 0.1, ..., 1. AP50[all-point] is the area below that curve instead."
)
PICTURES = 8
"""Pictures with most mistakes, and as many without any."""
CONFIDENT = 0.5
"""Smallest score with which a wrong box counts as a mistake when pictures are chosen."""
PICTURE_SIDE = 480

# what became of a detection
WRONG, RIGHT, LEFT_OUT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections in one image."""

    boxes: Boxes  # [D, 4]
    labels: NDArray[np.int64]  # [D]
    scores: NDArray[np.float32]  # [D]

    def __post_init__(self) -> None:
        count = len(self.labels)
        if self.boxes.shape != (count, 4) or self.scores.shape != (count,):
            raise ValueError(
                f"Detections: boxes [D, 4], labels [D] and scores [D] must agree, got {self.boxes.shape}, "
                f"{self.labels.shape} and {self.scores.shape}"
            )
        if not np.isfinite(self.scores).all():
            raise ValueError("Detections: scores must be finite, got NaN or infinite ones")


@dataclass(frozen=True, eq=False)
class ClassResult:
    """One class: its objects, and precision and recall after each detection that counts."""

    name: str
    objects: int  # without difficult ones
    detections: int
    recall: Floats
    precision: Floats

    def average_precision(self, rule: Rule = "11-point") -> float:
        """AP of the class; NaN if it has no object."""
        check_choice(rule, RULES, name="rule", caller="average_precision")
        if not self.objects:
            return math.nan
        if not len(self.recall):
            return 0.0
        if rule == "11-point":
            # quotients of integers: 3 of 10 objects reach exactly the float 3 / 10
            reached = [self.recall >= tenths / 10 for tenths in range(11)]
            return float(np.mean([self.precision[at].max(initial=0.0) for at in reached]))
        highest = np.maximum.accumulate(self.precision[::-1])[::-1]
        return float((np.diff(self.recall, prepend=0.0) * highest).sum())


@dataclass(frozen=True, eq=False)
class DetectionResult:
    """Results of all classes, and the verdict on every detection.

    Attributes:
        iou: smallest overlap of a right detection.
        classes: in the order of their labels.
        verdicts: of the detections of each image: `WRONG`, `RIGHT` or `LEFT_OUT`.
        missed: for each image, which of its objects were not found; difficult ones are not missed.
    """

    iou: float
    classes: tuple[ClassResult, ...]
    verdicts: tuple[NDArray[np.int64], ...]
    missed: tuple[NDArray[np.bool_], ...]

    def mean(self, rule: Rule = "11-point") -> float:
        """Mean over the classes that have an object; NaN if none has."""
        values = [each.average_precision(rule) for each in self.classes if each.objects]
        return float(np.mean(values)) if values else math.nan

    def metrics(self) -> dict[str, float]:
        """AP by both rules; the first is the paper's for VOC 2007."""
        name = f"AP{round(100 * self.iou)}"
        return {name: self.mean("11-point"), f"{name}[all-point]": self.mean("all-point")}

    def per_class(self) -> dict[str, Mapping[str, float]]:
        name = f"AP{round(100 * self.iou)}"
        return {
            each.name: {
                name: each.average_precision("11-point"),
                f"{name}[all-point]": each.average_precision("all-point"),
                "objects": float(each.objects),
                "detections": float(each.detections),
            }
            for each in self.classes
        }

    @property
    def absent(self) -> tuple[str, ...]:
        """Classes without an object, which the mean leaves out."""
        return tuple(each.name for each in self.classes if not each.objects)


def evaluate_boxes(
    found: Sequence[Detections], scenes: Sequence[Scene], class_names: Sequence[str], *, iou: float = 0.5
) -> DetectionResult:
    """Judge the detections of each image against its objects.

    Args:
        found: the detections, an entry per image.
        scenes: the images with their objects, in the same order.
        class_names: of labels 1, 2, ...
        iou: smallest overlap of a right detection.
    """
    check_positive(iou, name="iou", caller="evaluate_boxes")
    if len(found) != len(scenes):
        raise ValueError(f"evaluate_boxes: found must be one per image, {len(scenes)}, got {len(found)}")
    for each, scene in zip(found, scenes, strict=True):
        if len(each.labels) and not 1 <= each.labels.min() <= each.labels.max() <= len(class_names):
            raise ValueError(
                f"evaluate_boxes: labels must be 1..{len(class_names)}, got {sorted(set(each.labels.tolist()))} in {scene.name}"
            )
    overlaps = [_overlap(each.boxes, scene.boxes) for each, scene in zip(found, scenes, strict=True)]
    verdicts = tuple(np.full(len(each.labels), WRONG, np.int64) for each in found)
    taken = [np.zeros(len(scene.labels), np.bool_) for scene in scenes]
    image = np.repeat(np.arange(len(found)), [len(each.labels) for each in found])
    row = np.concatenate([np.arange(len(each.labels)) for each in found]) if found else np.zeros(0, np.int64)
    scores = np.concatenate([each.scores for each in found]) if found else np.zeros(0, np.float32)
    labels = np.concatenate([each.labels for each in found]) if found else np.zeros(0, np.int64)
    # stable: equal scores stay in the order of images and boxes
    order = np.argsort(-scores, kind="stable")
    for place in order.tolist():
        _judge(int(image[place]), int(row[place]), int(labels[place]), overlaps, scenes, taken, verdicts, iou)
    classes = []
    judged = np.concatenate(verdicts)[order] if found else np.zeros(0, np.int64)
    for label, name in enumerate(class_names, start=1):
        objects = sum(int(((scene.labels == label) & ~scene.difficult).sum()) for scene in scenes)
        counted = judged[(labels[order] == label) & (judged != LEFT_OUT)]
        right = np.cumsum(counted == RIGHT)
        recall, precision = right / max(objects, 1), right / np.arange(1, len(counted) + 1)
        classes.append(ClassResult(name, objects, int((labels == label).sum()), recall, precision))
    missed = tuple(~(taken_here | scene.difficult) for taken_here, scene in zip(taken, scenes, strict=True))
    return DetectionResult(iou, tuple(classes), verdicts, missed)


def _judge(
    image: int,
    row: int,
    label: int,
    overlaps: Sequence[Floats],
    scenes: Sequence[Scene],
    taken: Sequence[NDArray[np.bool_]],
    verdicts: Sequence[NDArray[np.int64]],
    iou: float,
) -> None:
    """The verdict on one detection, after all with higher scores."""
    scene = scenes[image]
    overlap = np.where(scene.labels == label, overlaps[image][row], -1.0)
    if not len(overlap):
        return
    best = int(overlap.argmax())
    if overlap[best] < iou:
        return
    if scene.difficult[best]:
        verdicts[image][row] = LEFT_OUT
    elif not taken[image][best]:
        verdicts[image][row] = RIGHT
        taken[image][best] = True


def _overlap(first: Boxes, second: Boxes) -> Floats:
    """[D, M] intersection over union."""
    one, two = first.astype(np.float64)[:, None], second.astype(np.float64)[None]
    low, high = np.maximum(one[..., :2], two[..., :2]), np.minimum(one[..., 2:], two[..., 2:])
    shared = (high - low).clip(min=0).prod(axis=2)
    areas = [(each[..., 2:] - each[..., :2]).clip(min=0).prod(axis=2) for each in (one, two)]
    union: Floats = areas[0] + areas[1] - shared
    overlap: Floats = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlap


@dataclass(frozen=True, eq=False)
class DetectionEvaluation:
    """A split, what was detected in it and how good that is.

    Attributes:
        split: name of the split.
        class_names: of labels 1, 2, ...
        scenes: the images with their objects.
        found: the detections in each.
        result: which of them are right.
        images: the split with its pixels; None for one that was read back.
    """

    split: str
    class_names: tuple[str, ...]
    scenes: tuple[Scene, ...]
    found: tuple[Detections, ...]
    result: DetectionResult
    images: Scenes | None = None
    protocol = PROTOCOL

    @property
    def metrics(self) -> Mapping[str, float]:
        per_class = {f"AP50 {each.name}": each.average_precision() for each in self.result.classes}
        return {**self.result.metrics(), **per_class}

    @property
    def headline(self) -> Sequence[str]:
        return list(self.result.metrics())

    @property
    def details(self) -> str:
        """AP of each class."""
        rows = []
        for each in self.result.classes:
            values = [each.average_precision("11-point"), each.average_precision("all-point")]
            shown = ["-" if math.isnan(value) else f"{100 * value:.1f}" for value in values]
            rows.append([each.name, f"{each.objects:,}", *shown])
        return table(["class", "objects", "AP50", "all-point"], rows, align="lrrr")

    def intervals(self) -> Mapping[str, tuple[float, float]]:
        """None: AP of a class is one number for all images."""
        return {}

    def write(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write detections, pictures and, last, result.json."""
        assert self.images is not None, "only an evaluation with images is written"
        arrays: dict[str, Any] = _arrays(self)
        np.savez_compressed(folder / "detections.npz", **arrays)
        (folder / "pictures").mkdir()
        for number in worst_and_best(self):
            _save_picture(self.images, number, folder / "pictures" / f"{number:06}.jpg")
        notes = [*self.images.notes]
        if self.result.absent:
            notes.append(f"no object of {', '.join(self.result.absent)}: the mean is over the other classes")
        content = {
            "split": self.split,
            "table": self.images.name,
            "protocol": PROTOCOL,
            "rule": RULE,
            "metrics": self.result.metrics(),
            "per_category": self.result.per_class(),
            "images": len(self.scenes),
            "objects": sum(each.objects for each in self.result.classes),
            "notes": notes,
            **extra,
        }
        (folder / "result.json").write_text(json.dumps(jsonable(content), indent=1) + "\n", encoding="utf-8")


def evaluate_split(split: str, scenes: Scenes, found: Sequence[Detections]) -> DetectionEvaluation:
    """Judge the detections of a split."""
    result = evaluate_boxes(found, scenes.scenes, scenes.class_names)
    return DetectionEvaluation(split, scenes.class_names, scenes.scenes, tuple(found), result, scenes)


def read_evaluation(run: Path, key: str) -> tuple[DetectionEvaluation, Mapping[str, Any]]:
    """A saved evaluation, judged again from its boxes, and the content of result.json."""
    folder = run / "eval" / key
    for name in ("result.json", "detections.npz"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: make it with `rankgrad detect eval {run}`")
    content = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    with np.load(folder / "detections.npz") as file:
        arrays = {name: file[name] for name in file.files}
    names = tuple(map(str, arrays["class_names"]))
    scenes = tuple(
        Scene(str(arrays["names"][i]), int(arrays["sizes"][i, 0]), int(arrays["sizes"][i, 1]), boxes, labels, difficult)
        for i, (boxes, labels, difficult) in enumerate(
            _per_image(arrays, "object", ("boxes", "labels", "difficult"), len(arrays["names"]))
        )
    )
    found = tuple(Detections(*parts) for parts in _per_image(arrays, "found", ("boxes", "labels", "scores"), len(scenes)))
    return DetectionEvaluation(key, names, scenes, found, evaluate_boxes(found, scenes, names)), content


def worst_and_best(evaluation: DetectionEvaluation) -> list[int]:
    """Numbers of the images with most mistakes, then of those without any and with most objects."""
    mistakes, objects = [], []
    result = evaluation.result
    for found, verdicts, missed, scene in zip(evaluation.found, result.verdicts, result.missed, evaluation.scenes, strict=True):
        mistakes.append(int(((verdicts == WRONG) & (found.scores >= CONFIDENT)).sum()) + int(missed.sum()))
        objects.append(int((~scene.difficult).sum()))
    numbers = range(len(mistakes))
    worst = sorted((i for i in numbers if mistakes[i]), key=lambda i: (-mistakes[i], i))[:PICTURES]
    best = sorted((i for i in numbers if not mistakes[i] and objects[i]), key=lambda i: (-objects[i], i))[:PICTURES]
    return worst + best


def _arrays(evaluation: DetectionEvaluation) -> dict[str, Any]:
    scenes, found = evaluation.scenes, evaluation.found
    return {
        "class_names": np.array(evaluation.class_names),
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
        "found_right": np.concatenate(evaluation.result.verdicts) == RIGHT,
    }


def _per_image(
    arrays: Mapping[str, NDArray[Any]], kind: str, names: Sequence[str], images: int
) -> list[tuple[NDArray[Any], ...]]:
    """The rows that belong to each image."""
    ends = np.cumsum(arrays[f"{kind}_count"])[:-1]
    columns = [np.split(arrays[f"{kind}_{name}"], ends) for name in names]
    assert all(len(column) == images for column in columns)
    return list(zip(*columns, strict=True))


def _save_picture(scenes: Scenes, number: int, path: Path) -> None:
    from PIL import Image

    image = Image.fromarray(scenes.image(number).permute(1, 2, 0).numpy())
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    image.save(path, quality=80)
