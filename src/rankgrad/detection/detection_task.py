"""A detection recipe from beginning to end: data, training by `rankgrad.train`, test, report."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN

from rankgrad.detection import box_results
from rankgrad.detection.detection_recipe import DetectionRecipe
from rankgrad.detection.detector_training import DetectionBatches, DetectionObjective, RowDetector, detect
from rankgrad.detection.faster_rcnn import ClassificationLoss, build_detector
from rankgrad.detection.loss import DetectionAPLoss
from rankgrad.detection.scenes import Scenes
from rankgrad.detection.shapes import draw_shapes
from rankgrad.detection.voc import lists_in, read_voc
from rankgrad.runs.run_folder import DEBUG_NOTICE, RECIPE_FILE, RunFolder, content_of, data_in, description_in, read
from rankgrad.train.loop import Evaluator, FitResult, fit
from rankgrad.train.progress import Progress
from rankgrad.train.settings import AUTOCAST

TASK = "detection"
TEST = "test"
ALL_STAGES = 5
DRAWN = {"train": 2000, "val": 500, "test": 500}
# lists of a folder in VOC's layout, the first that it has; by split and whether settings are to be chosen
FOLDER_LISTS = {
    ("train", False): ("trainval", "train"),
    (TEST, False): ("test", "val"),
    ("train", True): ("train",),
    (TEST, True): ("val",),
}


@dataclass(frozen=True)
class Place:
    """Where a recipe runs: what may differ between two runs of the same result."""

    data: Path | None
    device: torch.device
    workers: int = 2


def start_run(recipe: DetectionRecipe, place: Place, folder: Path, *, debug: bool = False) -> box_results.Tested:
    """Train `recipe` in a new folder and test it."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        way = f"continue the run in it with --resume {folder}, or " if (folder / RECIPE_FILE).is_file() else ""
        raise ValueError(f"{folder} is there already and not empty: {way}give another folder with --out")
    return _run(recipe, place, folder, resume=False, debug=debug)


def resume_run(folder: Path, place: Place, changes: Mapping[str, Any]) -> box_results.Tested:
    """Go on with the run in `folder` where it was stopped, from what the folder says."""
    saved = load_run(folder)
    place = replace(place, data=place.data or saved.data)
    return _run(saved.recipe.with_settings(changes), place, folder, resume=True, debug=saved.debug)


def evaluate_run(folder: Path, place: Place, *, changes: Mapping[str, Any] | None = None) -> box_results.Tested:
    """Test the last checkpoint of the run in `folder` again."""
    saved = load_run(folder)
    recipe = saved.recipe.with_settings(changes or {})
    place = replace(place, data=place.data or saved.data)
    test = read_split(recipe, place, TEST)
    detector = new_detector(recipe, len(saved.class_names), place.device, with_weights=False)
    if test.class_names != saved.class_names:
        raise ValueError(
            f"{folder} was trained on the classes {', '.join(saved.class_names)}, but {test.name} has "
            f"{', '.join(test.class_names)}"
        )
    found = RunFolder(folder).checkpoints.checkpoint("last")
    found.load_into(RowDetector(detector))
    print(f"testing the last checkpoint of {folder}, step {found.step:,}", flush=True)
    return examine(recipe, place, detector, test, folder, debug=saved.debug)


def load_detector(folder: Path | str, device: torch.device | str = "cpu") -> tuple[FasterRCNN, tuple[str, ...]]:
    """The trained detector of a run, torchvision's in evaluation mode, and the names of its classes."""
    folder = Path(folder)
    saved = load_run(folder)
    detector = new_detector(saved.recipe, len(saved.class_names), torch.device(device), with_weights=False)
    RunFolder(folder).checkpoints.checkpoint("last").load_into(RowDetector(detector))
    return detector.eval(), saved.class_names


def _run(recipe: DetectionRecipe, place: Place, folder: Path, *, resume: bool, debug: bool) -> box_results.Tested:
    from rankgrad.detection.detection_report import write_report

    training, test = read_split(recipe, place, "train"), read_split(recipe, place, TEST)
    for note in dict.fromkeys((*training.notes, *test.notes)):
        print(f"note: {note}", flush=True)
    detector, outcome = train(recipe, place, folder, training, test, resume=resume, debug=debug)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt
    tested = examine(recipe, place, detector, test, folder, debug=debug)
    print(f"report: {write_report([folder], folder / 'report.html')}")
    return tested


def train(
    recipe: DetectionRecipe,
    place: Place,
    folder: Path,
    training: Scenes,
    test: Scenes,
    *,
    resume: bool,
    debug: bool = False,
) -> tuple[FasterRCNN, FitResult]:
    """The detector of `recipe`, trained; the run's files are in `folder`."""
    classes = len(training.class_names)
    run = RunFolder(folder)
    begun = resume and run.checkpoints.pointer("last") is not None
    # a checkpoint has all weights: the file or download that training began with is not needed again
    detector = new_detector(recipe, classes, place.device, with_weights=not begun)
    batches = DetectionBatches(
        training,
        recipe.batch_size,
        seed=recipe.seed,
        flip=recipe.flip,
        difficult=recipe.train_difficult,
        workers=place.workers,
    )
    evaluators: dict[str, Evaluator] = {}
    if recipe.evaluate_every:
        evaluators[TEST] = lambda model: _look(recipe, place, _inside(model), test).result.metrics()
    run.prepare()
    with _saved(recipe, place, folder, training.class_names, debug=debug):
        outcome = fit(
            RowDetector(detector),
            DetectionObjective(classification_loss(recipe), classes),
            batches,
            recipe.train_settings(),
            folder,
            evaluators=evaluators,
            device=place.device,
            resume=resume,
            identity=recipe.identity(),
            description={"recipe": recipe.name, "task": TASK, "data": {"train": training.counts(), "test": test.counts()}},
            resume_hint=f"Continue with: rankgrad detect train --resume {folder}",
        )
    return detector, outcome


def examine(
    recipe: DetectionRecipe, place: Place, detector: FasterRCNN, test: Scenes, folder: Path, *, debug: bool
) -> box_results.Tested:
    """Test a detector, write RUN/eval and print AP of each class beside what is published."""
    tested = _look(recipe, place, detector, test)
    box_results.save(tested, test, folder, debug=debug)
    print(f"\n{box_results.table_of(tested)}\n")
    for metric, value in tested.result.metrics().items():
        published = () if debug or recipe.validation else recipe.published
        wanted = next((number for number in published if number.metric == metric), None)
        against = (
            ""
            if wanted is None or wanted.value is None
            else (f"   published {wanted.value:.1f} ({wanted.source}), difference {100 * value - wanted.value:+.1f}")
        )
        print(f"{metric} {100 * value:.1f}{against}")
    if debug:
        print(f"\n{DEBUG_NOTICE}")
    return tested


def classification_loss(recipe: DetectionRecipe) -> ClassificationLoss:
    """The classification loss of `recipe`."""
    if recipe.loss == "cross-entropy":
        return CrossEntropy(recipe.loss_weight)
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


class CrossEntropy(nn.Module):
    """What torchvision has, with a factor."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.weight * F.cross_entropy(logits, targets)


def read_split(recipe: DetectionRecipe, place: Place, split: str) -> Scenes:
    """The training or test images of `recipe`."""
    limit = recipe.images if split == "train" else recipe.test_images
    judged = "val" if recipe.validation else "test"
    if recipe.data_set == "shapes":
        part = "train" if split == "train" else judged
        # the data is the same whatever the seed of a run
        return draw_shapes(part, limit or DRAWN[part])
    if place.data is None:
        raise ValueError(f"the data set {recipe.data_set!r} needs --data DIR, the folder that holds it")
    if recipe.data_set == "folder":
        known = lists_in(place.data)
        wanted = FOLDER_LISTS[split, recipe.validation]
        name = next((each for each in wanted if each in known), None)
        if name is None:
            raise FileNotFoundError(f"{place.data} has no ImageSets/Main/{' or '.join(wanted)}.txt to {split} on")
        scenes = read_voc(place.data, name, skip_bad=recipe.skip_bad)
    else:
        years, name = _voc_lists(recipe, split)
        scenes = read_voc(place.data, name, years=years, skip_bad=recipe.skip_bad)
    return scenes.select(range(min(limit, len(scenes)))) if limit else scenes


def _voc_lists(recipe: DetectionRecipe, split: str) -> tuple[tuple[str, ...], str]:
    """Years and list of a split of Pascal VOC."""
    years = {"voc07": ("2007",), "voc0712": ("2007", "2012"), "voc12": ("2012",)}[recipe.data_set]
    # VOC keeps the test of 2012 to itself: its validation images are the test
    if recipe.validation or recipe.data_set == "voc12":
        return years, "train" if split == "train" else "val"
    return (years, "trainval") if split == "train" else (("2007",), "test")


def _look(recipe: DetectionRecipe, place: Place, detector: FasterRCNN, test: Scenes) -> box_results.Tested:
    with Progress(len(test), f"testing on {test.name}", unit="images") as progress:
        found = detect(
            detector,
            test,
            device=place.device,
            batch_size=recipe.batch_size,
            workers=place.workers,
            autocast=AUTOCAST[recipe.precision],
            each=progress.advance,
        )
    return box_results.judged(TEST, test, found)


def _inside(model: nn.Module) -> FasterRCNN:
    assert isinstance(model, RowDetector)
    return model.detector


def new_detector(recipe: DetectionRecipe, classes: int, device: torch.device, *, with_weights: bool = True) -> FasterRCNN:
    """The network of `recipe`; without weights it is the same one, to be filled from a checkpoint."""
    from_scratch = recipe.weights == "none"
    norm = ("group" if from_scratch else "frozen") if recipe.norm == "auto" else recipe.norm
    return build_detector(
        recipe.backbone,
        classes,
        weights=recipe.weights if with_weights else "none",
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


@contextlib.contextmanager
def _saved(recipe: DetectionRecipe, place: Place, folder: Path, class_names: tuple[str, ...], *, debug: bool) -> Iterator[None]:
    """Write RUN/recipe.json; settings with which the run is refused leave the file as it was."""
    path = folder / RECIPE_FILE
    before = path.read_bytes() if path.is_file() else None
    content = content_of(recipe, place.data, debug=debug) | {"task": TASK, "class_names": list(class_names)}
    RunFolder(folder).write_json(RECIPE_FILE, content)
    try:
        yield
    except ValueError:
        if before is not None:
            path.write_bytes(before)
        raise


@dataclass(frozen=True)
class SavedRun:
    """What RUN/recipe.json says."""

    recipe: DetectionRecipe
    data: Path | None
    class_names: tuple[str, ...]
    debug: bool


def load_run(folder: Path) -> SavedRun:
    """The recipe that the run in `folder` is of."""

    def made(content: Mapping[str, Any]) -> SavedRun:
        if content.get("task") != TASK:
            raise ValueError("it is a retrieval run, which `rankgrad train` and `rankgrad eval` take")
        recipe = DetectionRecipe(**description_in(content)).with_settings(content["settings"])
        return SavedRun(recipe, data_in(content), tuple(content["class_names"]), debug=bool(content.get("debug")))

    return read(folder, made)
