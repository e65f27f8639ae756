"""Detection runs as values: every row of RaMBO's tables 5 and 8, and the same comparison on data that anyone has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

from rankgrad._messages import did_you_mean
from rankgrad.detection.loss import Scores
from rankgrad.runs.recipe import Published, Recipe, setting
from rankgrad.train.settings import Optimizer, Schedule

DetectionDataSet: TypeAlias = Literal["voc07", "voc0712", "voc12", "folder", "shapes"]
DetectionLoss: TypeAlias = Literal["rambo-ap", "cross-entropy"]
Backbone: TypeAlias = Literal["tiny", "resnet18", "resnet34", "resnet50", "resnet101", "resnext101_32x4d"]
Norm: TypeAlias = Literal["auto", "frozen", "group", "batch"]

METRIC = "AP50"


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(Recipe):
    """One training run of a detector. The defaults are the paper's for VOC 2007 and a ResNet-50."""

    data_set: DetectionDataSet = setting(
        "voc07",
        "'voc07': 2007 trainval, tested on 2007 test; 'voc0712': 2012 trainval as well; 'voc12': 2012 train and val; 'folder': "
        "any data set in VOC's layout; 'shapes': built in",
        group="data",
    )
    skip_bad: bool = setting(
        False, "skip objects without area or outside of their image, and list them, instead of stopping", group="data"
    )
    images: int = setting(0, "use only this many training images; 0: all, 2,000 of shapes", group="data", least=0)
    test_images: int = setting(0, "use only this many test images; 0: all, 500 of shapes", group="data", least=0)
    validation: bool = setting(
        False, "train without the validation images and evaluate on them, to choose settings", group="data"
    )
    train_difficult: bool = setting(False, "train on difficult objects too", group="data")
    flip: bool = setting(True, "mirror training images at random", group="data")
    min_size: int = setting(600, "shorter side of a resized image, in pixels", group="data", least=32, most=4096)
    max_size: int = setting(1000, "limit of its longer side, in pixels", group="data", least=32, most=8192)

    backbone: Backbone = setting("resnet50", "network below the feature pyramid", group="model")
    weights: str = setting("default", "of the backbone: 'default': torchvision's; 'none': random; or a file", group="model")
    norm: Norm = setting(
        "auto", "normalisation layers; 'auto': frozen batch norm with weights, group norm without", group="model"
    )
    trainable_stages: int = setting(
        3, "stages of a pretrained backbone that are trained", group="model", least=0, most=5
    )  # fmt: skip
    anchor_scale: float = setting(
        8.0, "side of a square anchor, in strides of its level", group="model", least=0.5, most=64.0
    )  # fmt: skip
    proposals: int = setting(2000, "proposals of an image passed to the region heads", group="model", least=1)
    regions: int = setting(512, "regions of an image sampled for the losses", group="model", least=4)
    score_threshold: float = setting(0.05, "smallest score of a reported box", group="model", least=0.0, most=1.0)

    loss: DetectionLoss = setting("rambo-ap", "classification loss; those of boxes and proposals stay", group="loss")
    lam: float = setting(
        0.5, "interpolation strength of the blackbox gradient, on ranks divided by the list's length",
        group="loss", least=1e-9,
    )  # fmt: skip
    margin: float = setting(0.15, "margin between positives and negatives", group="loss", least=0.0)
    margin_cap: bool = setting(
        True,
        "limit the margin to half the distance of positives and negatives of a class, so that each class starts",
        group="loss",
    )
    margin_noise: bool = setting(False, "draw the margin anew for every score, as the published code does", group="loss")
    interclass: float = setting(
        1 / 3,
        "share of APC, one list of all classes, beside mAP; 1/3 is the paper's 2 : 1",
        group="loss",
        least=0.0,
        most=1.0,
    )
    memory: int = setting(7, "past batches whose scores are added to the lists of classes", group="loss", least=0)
    scores: Scores = setting("softmax", "what is ranked", group="loss")
    background: Literal["negative", "class"] = setting("negative", "what background is to the loss", group="loss")
    loss_weight: float = setting(1.0, "factor of the classification loss", group="loss", least=1e-9)

    batch_size: int = setting(8, "images in a batch", group="optimisation", least=1)
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    momentum: float = setting(0.9, "momentum of sgd", group="optimisation", least=0.0, most=0.9999)
    weight_decay: float = 1e-4
    schedule: Schedule = "step"
    milestones: tuple[int, ...] = (9,)
    gamma: float = 0.1
    warmup_steps: int = 500
    epochs: int = 12
    clip: float = 35.0
    chunk_size: int = setting(0, "images in the network at once; 0: the whole batch", group="optimisation", least=0)

    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"skip_bad", "test_images", "score_threshold"})

    def check_combinations(self) -> None:
        """Refuse settings of images and model that exclude each other."""
        if self.max_size < self.min_size:
            raise ValueError(f"`max_size` must be at least `min_size` ({self.min_size}), got {self.max_size}")
        if self.norm == "batch" and self.chunk_size:
            raise ValueError(
                f"`norm='batch'` needs the whole batch at once, but `chunk_size` is {self.chunk_size}: "
                "use `norm='frozen'` or `norm='group'`"
            )

    def _loop_settings(self) -> dict[str, Any]:
        # images differ in size from batch to batch, which CUDA graphs do not allow
        return {"metric": METRIC, "cuda_graphs": False, "channels_last": False}

    def debug_version(self, *, has_data: bool = True) -> Self:
        """A copy with a tiny network, few images and two epochs; the loss and its settings stay. Its results mean nothing.

        Args:
            has_data: False trains on the built-in shapes.
        """
        return replace(
            self,
            name=f"{self.name}-debug",
            what=f"{self.what} (debug version: its numbers mean nothing)",
            data_set=self.data_set if has_data else "shapes",
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
            memory=min(self.memory, 2),
            lr=min(self.lr, 0.01),
            schedule="step",
            milestones=(1,),
            warmup_steps=min(self.warmup_steps, 1),
            epochs=2,
            steps=4 if self.steps else 0,
            precision="float32",
            log_every=1,
        )


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
    table: tuple[tuple[Backbone, str, DetectionDataSet, float, float], ...] = (
        ("resnet50", "r50", "voc07", 74.2, 75.7),
        ("resnet50", "r50", "voc0712", 80.4, 81.4),
        ("resnet101", "r101", "voc0712", 82.4, 82.9),
        ("resnext101_32x4d", "x101-32x4d", "voc0712", 83.2, 83.6),
    )
    for backbone, short, data_set, with_entropy, with_rambo in table:
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
    losses: tuple[tuple[str, DetectionLoss, str], ...] = (
        ("ce", "cross-entropy", "cross-entropy"),
        ("rambo", "rambo-ap", "AP loss"),
    )
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
        for short, loss, title in losses
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
        hint = did_you_mean(name, RECIPES, otherwise="`rankgrad detect recipes` lists all")
        raise ValueError(f"there is no detection recipe {name!r}: {hint}")
    return RECIPES[name]
