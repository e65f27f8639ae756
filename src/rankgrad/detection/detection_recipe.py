"""Detection runs as values: every row of RaMBO's tables 5 and 8, and the same comparison on data that anyone has."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from rankgrad.detection.faster_rcnn import BACKBONES, NORMS
from rankgrad.detection.loss import BACKGROUNDS, SCORES
from rankgrad.runs.recipe import Published, checked, nearest, setting

DATA_SETS = ("voc07", "voc0712", "voc12", "folder", "shapes")
LOSSES = ("rambo-ap", "cross-entropy")
METRIC = "AP50"


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe:
    """One training run of a detector, whole. The defaults are the paper's for VOC 2007 and a ResNet-50."""

    name: str
    what: str = ""
    published: tuple[Published, ...] = ()
    notes: tuple[str, ...] = ()

    # data
    data_set: str = setting(
        "voc07",
        "'voc07': 2007 trainval, tested on 2007 test; 'voc0712': 2012 trainval as well; 'voc12': 2012 train and val; 'folder': "
        "any data set in VOC's layout; 'shapes': drawn",
        choices=DATA_SETS,
    )
    skip_bad: bool = setting(False, "leave out objects without area or outside of their image, and not stop at the first")
    images: int = setting(0, "use only so many training images; 0: all, and 2,000 drawn ones", least=0)
    test_images: int = setting(0, "use only so many test images; 0: all, and 500 drawn ones", least=0)
    validation: bool = setting(False, "train without the validation images and be judged by them, to choose settings by")
    train_difficult: bool = setting(False, "train on difficult objects too")
    flip: bool = setting(True, "mirror every other training image")
    min_size: int = setting(600, "shorter side that images are resized to, pixels", least=32, most=4096)
    max_size: int = setting(1000, "longest side after that", least=32, most=8192)

    # model
    backbone: str = setting("resnet50", "network below the pyramid", choices=BACKBONES)
    weights: str = setting("default", "of the backbone: 'default': torchvision's; 'none': random; or a file")
    norm: str = setting(
        "auto", "normalisation layers; 'auto': frozen batch norm with weights, group norm without", choices=NORMS
    )
    trainable_stages: int = setting(3, "stages of the backbone that are trained where there are weights", least=0, most=5)
    anchor_scale: float = setting(8.0, "side of a square anchor in steps of its level", least=0.5, most=64.0)
    proposals: int = setting(2000, "proposals of an image that go on to the region heads", least=1)
    regions: int = setting(512, "regions of an image that are sampled for the losses", least=4)
    score_threshold: float = setting(0.05, "below which a box is not reported", least=0.0, most=1.0)

    # loss
    loss: str = setting("rambo-ap", "classification loss; those of boxes and proposals stay", choices=LOSSES)
    lam: float = setting(0.5, "rambo's interpolation, on ranks divided by the list's length", least=1e-9)
    margin: float = setting(0.15, "rambo's margin between positives and negatives", least=0.0)
    margin_cap: bool = setting(
        True, "no margin wider than half the distance of positives and negatives of a class, so that each class starts"
    )
    margin_noise: bool = setting(False, "draw the margin anew for every score, as the published code does")
    interclass: float = setting(
        1 / 3, "share of APC, one list of all classes, beside mAP; 1/3 is the paper's 2 : 1", least=0.0, most=1.0
    )
    memory: int = setting(7, "past batches whose scores lengthen the lists of classes", least=0)
    scores: str = setting("softmax", "what of a logit is ranked", choices=SCORES)
    background: str = setting("negative", "what background is to the loss", choices=BACKGROUNDS[:2])
    loss_weight: float = setting(1.0, "factor of the classification loss", least=1e-9)

    # optimisation
    batch_size: int = setting(8, "images in a batch", least=1)
    optimizer: str = setting("sgd", "optimizer", choices=("adam", "adamw", "sgd"))
    lr: float = setting(0.1, "learning rate", least=1e-12)
    momentum: float = setting(0.9, "of sgd", least=0.0, most=0.9999)
    weight_decay: float = setting(1e-4, "weight decay", least=0.0)
    schedule: str = setting("step", "learning rate over time", choices=("constant", "step", "cosine", "exponential"))
    milestones: tuple[int, ...] = setting((9,), "epochs at which 'step' multiplies by gamma", least=1)
    gamma: float = setting(0.1, "factor of 'step' at a milestone and of 'exponential' each epoch", least=1e-6, most=1.0)
    warmup_steps: int = setting(500, "steps over which the learning rate rises to lr", least=0)
    epochs: int = setting(12, "passes through the training images", least=1)
    steps: int = setting(0, "stop after so many steps, whatever the epoch; 0: epochs decide", least=0)
    clip: float = setting(35.0, "largest norm of the gradient; 0: any", least=0.0)
    precision: str = setting("float32", "of the network; the loss is float32 in any case", choices=("float32", "bf16", "fp16"))
    chunk_size: int = setting(0, "images in the network at once; 0: the whole batch", least=0)

    # evaluation
    evaluate_every: int = setting(0, "epochs between tests while training goes on; 0: only at the end", least=0)

    # the run
    seed: int = setting(0, "of everything random", least=0)
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: each epoch", least=0)
    log_every: int = setting(10, "steps between lines of the journal", least=1)

    def __post_init__(self) -> None:
        for name, entry in settings_of(type(self)).items():
            object.__setattr__(self, name, checked(entry, getattr(self, name)))
        problem = self._contradiction()
        if problem:
            raise ValueError(f"{self.name}: {problem}")

    def _contradiction(self) -> str:
        if self.max_size < self.min_size:
            return f"max_size must be at least min_size ({self.min_size}), got {self.max_size}"
        if (self.schedule == "step") != bool(self.milestones):
            return (
                "schedule 'step' needs milestones, the epochs at which the learning rate falls"
                if self.schedule == "step"
                else f"milestones {', '.join(map(str, self.milestones))} need the schedule 'step', got {self.schedule!r}"
            )
        if self.milestones != tuple(sorted(set(self.milestones))):
            return f"milestones must ascend, got {', '.join(map(str, self.milestones))}"
        if self.norm == "batch" and self.chunk_size:
            return f"norm 'batch' needs the whole batch at once, but chunk_size is {self.chunk_size}: use 'frozen' or 'group'"
        return ""

    def settings(self) -> dict[str, Any]:
        """Every setting by name, as JSON has it."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def with_settings(self, changes: Mapping[str, Any]) -> "DetectionRecipe":
        """A copy with `changes`, checked; a change of schedule drops the milestones of the one before."""
        for name in changes:
            if name not in SETTINGS:
                raise ValueError(f"{self.name}: there is no setting {name!r}{nearest(name, SETTINGS)}")
        dropped = {"milestones": ()} if changes.get("schedule", "step") != "step" else {}
        return replace(self, **{**dropped, **changes})


def settings_of(recipe: type[DetectionRecipe]) -> dict[str, "Field[Any]"]:
    """The fields that are settings, by name and in order."""
    return {entry.name: entry for entry in fields(recipe) if "about" in entry.metadata}


SETTINGS: Mapping[str, "Field[Any]"] = settings_of(DetectionRecipe)

# the first setting of each group of the help text
GROUPS = {
    "data_set": "data",
    "backbone": "model",
    "loss": "loss",
    "batch_size": "optimisation",
    "evaluate_every": "evaluation",
    "seed": "the run",
}

OPEN_CHOICES = (
    "The paper does not say which scores are ranked, what background is, how the loss is weighted against those of boxes, or "
    "the learning rate of its cross-entropy rows; docs/detection.md gives the reasons for what is done here."
)
WEIGHTS = "The paper's detectors and ImageNet weights are mmdetection's; here they are torchvision's."
# mmdetection's own for two images per GPU; the paper gives 0.1 for its AP loss alone
CROSS_ENTROPY_LR = 0.01
# of four on validation images each (`rankgrad detect study shapes --validation --lr ...`): the best, but half of it on shapes,
# where at 0.1 one seed in three ends with nothing learned, with either loss
CHOSEN_LR = {"shapes-ce": 0.05, "shapes-rambo": 0.05, "cells-ce": 0.02, "cells-rambo": 0.04}


def _rows() -> list[DetectionRecipe]:
    """Table 5: backbone, data, cross-entropy, RaMBO."""
    rows = []
    for backbone, short, data_set, with_entropy, with_rambo in (
        ("resnet50", "r50", "voc07", 74.2, 75.7),
        ("resnet50", "r50", "voc0712", 80.4, 81.4),
        ("resnet101", "r101", "voc0712", 82.4, 82.9),
        ("resnext101_32x4d", "x101-32x4d", "voc0712", 83.2, 83.6),
    ):
        notes = [OPEN_CHOICES, WEIGHTS]
        if short.startswith("x101"):
            notes.append("torchvision has no weights of a ResNeXt-101 32x4d: --weights takes a file, such as timm's.")
        base = DetectionRecipe(name="", data_set=data_set, backbone=backbone, notes=tuple(notes))
        rows.append(
            replace(
                base,
                name=f"{data_set}-{short}-ce",
                what=f"Faster R-CNN, {backbone}, cross-entropy",
                loss="cross-entropy",
                lr=CROSS_ENTROPY_LR,
                published=(Published(METRIC, with_entropy, "RaMBO, Table 5"),),
            )
        )
        rows.append(
            replace(
                base,
                name=f"{data_set}-{short}-rambo",
                what=f"Faster R-CNN, {backbone}, AP loss",
                published=(Published(METRIC, with_rambo, "RaMBO, Table 5"),),
            )
        )
    return rows


def _ablation(base: DetectionRecipe) -> list[DetectionRecipe]:
    """Table 8: what of the AP loss is changed; its first and fourth rows are those of table 5."""
    changes: tuple[tuple[str, str, dict[str, Any], float], ...] = (
        ("no-margin", "lam 0.5, no margin", {"margin": 0.0}, 74.6),
        ("lam-0.1", "lam 0.1", {"lam": 0.1}, 75.2),
        ("lam-2.5", "lam 2.5", {"lam": 2.5}, 74.3),
    )
    return [
        replace(
            base,
            name=f"{base.name}-{name}",
            what=f"{base.what}, {what}",
            published=(Published(METRIC, value, "RaMBO, Table 8"),),
            **change,
        )
        for name, what, change, value in changes
    ]


def _ours() -> list[DetectionRecipe]:
    """The comparison on data that anyone has, from random weights."""
    shapes = DetectionRecipe(
        name="",
        what="drawn shapes, tiny network, AP loss",
        data_set="shapes",
        min_size=128,
        max_size=128,
        backbone="tiny",
        weights="none",
        anchor_scale=4.0,
        proposals=400,
        regions=128,
        batch_size=16,
        warmup_steps=100,
        epochs=6,
        milestones=(4, 5),
        log_every=20,
    )
    cells = replace(
        shapes,
        what="blood cells (BCCD), ResNet-18 from random weights, AP loss",
        data_set="folder",
        skip_bad=True,
        min_size=384,
        max_size=512,
        backbone="resnet18",
        anchor_scale=8.0,
        proposals=1000,
        regions=256,
        batch_size=8,
        epochs=40,
        milestones=(30, 37),
        notes=("--data is the folder that holds BCCD; two of its boxes have no area and are left out.",),
    )
    return [
        replace(
            base,
            name=f"{name}-{short}",
            what=base.what.replace("AP loss", title),
            loss=loss,
            lr=CHOSEN_LR[f"{name}-{short}"],
        )
        for name, base in (("shapes", shapes), ("cells", cells))
        for short, loss, title in (("ce", "cross-entropy", "cross-entropy"), ("rambo", "rambo-ap", "AP loss"))
    ]


def _catalogue() -> dict[str, DetectionRecipe]:
    table = _rows()
    base = next(recipe for recipe in table if recipe.name == "voc07-r50-rambo")
    eighth = {"voc07-r50-ce": 74.2, "voc07-r50-rambo": 75.7}
    table = [
        replace(recipe, published=(*recipe.published, Published(METRIC, eighth[recipe.name], "RaMBO, Table 8")))
        if recipe.name in eighth
        else recipe
        for recipe in table
    ]
    return {recipe.name: recipe for recipe in (*table, *_ablation(base), *_ours())}


RECIPES: Mapping[str, DetectionRecipe] = _catalogue()


def find(name: str) -> DetectionRecipe:
    """The recipe called `name`."""
    if name not in RECIPES:
        raise ValueError(
            f"there is no detection recipe {name!r}{nearest(name, RECIPES) or '; `rankgrad detect recipes` lists all'}"
        )
    return RECIPES[name]


def shrunk(recipe: DetectionRecipe, *, drawn: bool) -> DetectionRecipe:
    """`recipe` with a tiny network, few images and two epochs; loss and its settings stay its own. The result means nothing.

    Args:
        recipe: to shrink.
        drawn: train on shapes, because no folder was given.
    """
    return replace(
        recipe,
        name=f"{recipe.name}-debug",
        what=f"{recipe.what} (debug: shrunk, its numbers mean nothing)",
        data_set="shapes" if drawn else recipe.data_set,
        skip_bad=True,
        images=12,
        test_images=6,
        min_size=96,
        max_size=128,
        backbone="tiny",
        weights="none",
        norm="auto",
        anchor_scale=4.0,
        proposals=100,
        regions=32,
        batch_size=4,
        memory=min(recipe.memory, 2),
        lr=min(recipe.lr, 0.01),
        schedule="step",
        milestones=(1,),
        warmup_steps=min(recipe.warmup_steps, 1),
        epochs=2,
        steps=4 if recipe.steps else 0,
        precision="float32",
        log_every=1,
    )
