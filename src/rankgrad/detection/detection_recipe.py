"""Recipes of object detection: data, detector, loss, optimisation."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

from rankgrad.detection.loss import Scores
from rankgrad.runs.recipe import Recipe, setting
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
    trainable_stages: int = setting(3, "stages of a pretrained backbone that are trained", group="model", least=0, most=5)
    anchor_scale: float = setting(8.0, "side of a square anchor, in strides of its level", group="model", least=0.5, most=64.0)
    proposals: int = setting(2000, "proposals of an image passed to the region heads", group="model", least=1)
    regions: int = setting(512, "regions of an image sampled for the losses", group="model", least=4)
    score_threshold: float = setting(0.05, "smallest score of a reported box", group="model", least=0.0, most=1.0)

    loss: DetectionLoss = setting("rambo-ap", "classification loss; those of boxes and proposals stay", group="loss")
    lam: float = setting(
        0.5,
        "interpolation strength of the blackbox gradient, on ranks divided by the list's length",
        group="loss",
        least=1e-9,
    )
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
