"""Object detection as a task: its data, detector, loss and evaluation."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN

from rankgrad._messages import Progress, printable
from rankgrad.detection.box_evaluation import PROTOCOL, DetectionEvaluation, evaluate_split
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.detection.detector_training import DetectionBatches, DetectionObjective, RowDetector, detect
from rankgrad.detection.faster_rcnn import ClassificationLoss, build_detector
from rankgrad.detection.loss import DetectionAPLoss
from rankgrad.detection.scenes import Scene, Scenes
from rankgrad.detection.shapes import draw_shapes
from rankgrad.detection.voc import lists_in, read_voc
from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.recipe import Published
from rankgrad.runs.run_folder import RunFolder, explain_unreadable
from rankgrad.runs.task import EvaluateSplit, RunContext, SplitResult, TestIdentity
from rankgrad.train.large_batch import Loss
from rankgrad.train.loop import Evaluator
from rankgrad.train.settings import AUTOCAST

TRAIN, TEST = "train", "test"
ALL_STAGES = 5
SHAPES = {"train": 2000, "val": 500, "test": 500}
"""Images of each split of the built-in data set."""
DEFAULT_WORKERS = 2
# lists of a folder in VOC's layout, the first that exists; by split and whether settings are being chosen
FOLDER_LISTS = {
    (TRAIN, False): ("trainval", "train"),
    (TEST, False): ("test", "val"),
    (TRAIN, True): ("train",),
    (TEST, True): ("val",),
}
# of the noise that stands for data: about as many objects in an image as in VOC
SAMPLE_CLASSES, SAMPLE_OBJECTS = 20, 3


class DetectionTask:
    """Train a Faster R-CNN and measure its AP50.

    Args:
        recipe: everything that decides the result.
        context: where it runs; one process only.
        class_names: of the detector, by default those of the data.
        scenes: splits that have been read already, by what they depend on.
    """

    name = "detection"
    command = "rankgrad detect train"
    untrained_is_baseline = False
    outputs_are_embeddings = False

    def __init__(
        self,
        recipe: DetectionRecipe,
        context: RunContext,
        *,
        class_names: tuple[str, ...] | None = None,
        scenes: dict[tuple[object, ...], Scenes] | None = None,
    ) -> None:
        if context.processes.size > 1:
            raise ValueError("detectors are trained and tested by one process: leave out --processes")
        self.recipe, self.context = recipe, context
        self._class_names, self._scenes = class_names, {} if scenes is None else scenes

    @classmethod
    def from_run(cls, run: RunFolder, context: RunContext, changes: Mapping[str, Any]) -> Self:
        recipe, names = read_run(run)
        return cls(recipe.with_settings(changes), run.context(context), class_names=names)

    def with_recipe(self, recipe: DetectionRecipe) -> Self:
        return type(self)(recipe, self.context, class_names=self._class_names, scenes=self._scenes)

    def scenes(self, split: str) -> Scenes:
        """The training or test images, read once."""
        recipe = self.recipe
        limit = recipe.images if split == TRAIN else recipe.test_images
        key = (split, recipe.data_set, recipe.validation, recipe.skip_bad, limit)
        if key not in self._scenes:
            self._scenes[key] = read_split(recipe, self.context.data, split)
        return self._scenes[key]

    @property
    def has_data(self) -> bool:
        return self.context.data is not None or self.recipe.data_set == "shapes"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ... of the detector."""
        if self._class_names is not None:
            return self._class_names
        return (self.scenes(TRAIN) if self.has_data else self._noise()).class_names

    def notes(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self.scenes(TRAIN).notes, *self.scenes(TEST).notes)))

    def data_identity(self) -> Mapping[str, DataIdentity]:
        return {split: identity_of(self.scenes(split)) for split in (TRAIN, TEST)}

    def data_counts(self) -> Mapping[str, Mapping[str, int]]:
        return {split: self.scenes(split).counts() for split in (TRAIN, TEST)}

    def run_file_entries(self) -> Mapping[str, Any]:
        return {"class_names": list(self.class_names)}

    def published(self) -> Sequence[Published]:
        # they are of the test images, and not of those that settings are chosen on
        return () if self.recipe.validation else self.recipe.published

    def make_model(self, *, pretrained: bool) -> RowDetector:
        return RowDetector(make_detector(self.recipe, len(self.class_names), self.context.device, pretrained=pretrained))

    def initialise(self, model: nn.Module) -> None:
        """Nothing depends on the data."""

    def param_groups(self, model: nn.Module, loss: Loss) -> None:
        return None

    def make_loss(self) -> DetectionObjective:
        return DetectionObjective(classification_loss(self.recipe), len(self.class_names))

    def warm_up(self) -> None:
        return None

    def make_batches(self) -> DetectionBatches:
        self._check_classes(self.scenes(TRAIN))
        return self._batches(self.scenes(TRAIN))

    def _batches(self, scenes: Scenes) -> DetectionBatches:
        recipe = self.recipe
        return DetectionBatches(
            scenes,
            recipe.batch_size,
            seed=recipe.seed,
            flip=recipe.flip,
            difficult=recipe.train_difficult,
            workers=self._workers,
        )

    def sample_batch(self) -> tuple[dict[str, Tensor], Tensor]:
        batches = self.make_batches() if self.has_data else self._batches(self._noise())
        *_, batch, labels = next(batches.iterate(0))
        return batch, labels

    def evaluators(self) -> Mapping[str, Evaluator]:
        if not self.recipe.evaluate_every:
            return {}
        return {TEST: lambda model: self._evaluate(model, TEST).result.metrics()}

    def selected_on(self) -> None:
        """The last checkpoint is kept: there are no validation images to choose one on."""
        return

    def test_splits(self) -> Sequence[str]:
        return (TEST,)

    def test_identity(self, split: str, protocol: str | None = None) -> TestIdentity:
        if protocol not in (None, PROTOCOL):
            raise ValueError(f"detectors are evaluated under {PROTOCOL}, got {protocol!r}")
        return TestIdentity(identity_of(self.scenes(split)).fingerprint, PROTOCOL)

    def make_evaluator(self, model: nn.Module) -> EvaluateSplit:
        def evaluate(split: str, *, protocol: str | None, scratch: Path) -> DetectionEvaluation:
            return self._evaluate(model, split)

        return evaluate

    def combine(self, results: Mapping[str, SplitResult]) -> Mapping[str, Mapping[str, float]]:
        """There is one split."""
        return {}

    def _evaluate(self, model: nn.Module, split: str) -> DetectionEvaluation:
        assert isinstance(model, RowDetector)
        recipe, scenes = self.recipe, self.scenes(split)
        self._check_classes(scenes)
        with Progress(len(scenes), f"testing on {scenes.name}", unit="images") as progress:
            found = detect(
                model.detector,
                scenes,
                device=self.context.device,
                batch_size=recipe.batch_size,
                workers=self._workers,
                autocast=AUTOCAST[recipe.precision],
                each=progress.advance,
            )
        return evaluate_split(split, scenes, found)

    @property
    def _workers(self) -> int:
        return self.context.workers or DEFAULT_WORKERS

    def _check_classes(self, scenes: Scenes) -> None:
        if scenes.class_names != self.class_names:
            raise ValueError(
                f"the detector was trained on the classes {printable(', '.join(self.class_names))}, but {scenes.name} has "
                f"{printable(', '.join(scenes.class_names))}"
            )

    def _noise(self) -> Scenes:
        """A batch of noise of the recipe's size: time and memory do not depend on the pixels."""
        recipe = self.recipe
        width, height = recipe.max_size, min(recipe.min_size, recipe.max_size)
        side = min(width, height) // 3
        corners = [(side * i / 2, side * i / 3) for i in range(SAMPLE_OBJECTS)]
        boxes = np.array([(x, y, x + side, y + side) for x, y in corners], np.float32)
        scene = Scene("noise", width, height, boxes, np.arange(1, SAMPLE_OBJECTS + 1), np.zeros(SAMPLE_OBJECTS, np.bool_))
        pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
        names = tuple(f"class {label}" for label in range(1, SAMPLE_CLASSES + 1))
        return Scenes("noise", names, (scene,) * recipe.batch_size, lambda number: pixels)


def load_detector(folder: Path | str, device: torch.device | str = "cpu") -> tuple[FasterRCNN, tuple[str, ...]]:
    """The trained detector of a run, torchvision's in evaluation mode, and the names of its classes."""
    run = RunFolder(folder)
    recipe, names = read_run(run)
    detector = make_detector(recipe, len(names), torch.device(device), pretrained=False)
    run.checkpoints.checkpoint("last").load_into(RowDetector(detector))
    return detector.eval(), names


def read_run(run: RunFolder) -> tuple[DetectionRecipe, tuple[str, ...]]:
    """Recipe and class names of a detection run."""
    content = run.read()
    with explain_unreadable(run.recipe_file):
        if content.task != DetectionTask.name:
            raise ValueError(f"it is a {content.task} run: use `rankgrad train` and `rankgrad eval`")
        return content.recipe(DetectionRecipe), tuple(content.entries["class_names"])


def classification_loss(recipe: DetectionRecipe) -> ClassificationLoss:
    """The classification loss of `recipe`."""
    if recipe.loss == "cross-entropy":
        return WeightedCrossEntropy(recipe.loss_weight)
    return DetectionAPLoss(
        lam=recipe.lam,
        margin=recipe.margin,
        margin_cap=recipe.margin_cap,
        interclass=recipe.interclass,
        memory=recipe.memory,
        scores=recipe.scores,
        background=recipe.background,
        weight=recipe.loss_weight,
        margin_noise=recipe.margin_noise,
    )


class WeightedCrossEntropy(nn.Module):
    """Torchvision's loss with a factor."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.weight * F.cross_entropy(logits, targets)


def read_split(recipe: DetectionRecipe, data: Path | None, split: str) -> Scenes:
    """The training or test images of `recipe`."""
    limit = recipe.images if split == TRAIN else recipe.test_images
    if recipe.data_set == "shapes":
        name = TRAIN if split == TRAIN else "val" if recipe.validation else TEST
        # the data is the same whatever the seed of a run
        return draw_shapes(name, limit or SHAPES[name])
    if data is None:
        raise ValueError(f"the data set {recipe.data_set!r} needs --data DIR, the folder that holds it")
    if recipe.data_set == "folder":
        known = lists_in(data)
        wanted = FOLDER_LISTS[split, recipe.validation]
        found = next((each for each in wanted if each in known), None)
        if found is None:
            raise FileNotFoundError(f"{data} has no ImageSets/Main/{' or '.join(wanted)}.txt to {split} on")
        scenes = read_voc(data, found, skip_bad=recipe.skip_bad)
    else:
        years, name = _voc_lists(recipe, split)
        scenes = read_voc(data, name, years=years, skip_bad=recipe.skip_bad)
    return scenes.select(range(min(limit, len(scenes)))) if limit else scenes


def _voc_lists(recipe: DetectionRecipe, split: str) -> tuple[tuple[str, ...], str]:
    """Years and list of a split of Pascal VOC."""
    years = {"voc07": ("2007",), "voc0712": ("2007", "2012"), "voc12": ("2012",)}[recipe.data_set]
    # the annotations of VOC 2012's test images are not public: its validation images are the test
    if recipe.validation or recipe.data_set == "voc12":
        return years, "train" if split == TRAIN else "val"
    return (years, "trainval") if split == TRAIN else (("2007",), "test")


def identity_of(scenes: Scenes) -> DataIdentity:
    """Names, sizes and objects of the images; an image with objects of several classes counts in each of them."""

    def details(scene: Scene, label: int) -> str:
        chosen = scene.labels == label
        objects = np.concatenate((scene.boxes[chosen].ravel(), scene.difficult[chosen].astype(np.float32)))
        return f"{scene.width}x{scene.height} {' '.join(f'{value:g}' for value in objects)}"

    items = [
        ("" if not label else scenes.class_names[label - 1], scene.name, details(scene, label))
        for scene in scenes.scenes
        for label in (sorted(set(scene.labels.tolist())) or [0])
    ]
    fingerprint = hashlib.blake2b(repr((scenes.class_names, items)).encode(), digest_size=16).hexdigest()
    return DataIdentity.of(fingerprint, items)


def make_detector(recipe: DetectionRecipe, classes: int, device: torch.device, *, pretrained: bool = True) -> FasterRCNN:
    """The network of `recipe`; without pretrained weights it is the same one, to be filled from a checkpoint."""
    from_scratch = recipe.weights == "none"
    norm = ("group" if from_scratch else "frozen") if recipe.norm == "auto" else recipe.norm
    return build_detector(
        recipe.backbone,
        classes,
        weights=recipe.weights if pretrained else "none",
        norm=norm,
        trainable_stages=ALL_STAGES if from_scratch else recipe.trainable_stages,
        min_size=recipe.min_size,
        max_size=recipe.max_size,
        anchor_scale=recipe.anchor_scale,
        proposals=recipe.proposals,
        regions=recipe.regions,
        score_threshold=recipe.score_threshold,
        seed=recipe.seed,
    ).to(device)
