"""torchvision's Faster R-CNN with a feature pyramid, with any classification loss.

    detector = build_detector("resnet50", classes=20, weights="resnet50.pth")
    use_classification_loss(detector, DetectionAPLoss())
    losses = detector(images, targets)          # loss_classifier is ours, the other three are torchvision's

`use_classification_loss` works with any detector of torchvision that has `roi_heads`, Mask and Keypoint R-CNN included.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from rankgrad._checks import check_choice, check_count
from rankgrad.detection.detection_recipe import Backbone, Norm
from rankgrad.models.trunks import IMAGENET_MEAN, IMAGENET_STD, Trunk
from rankgrad.models.weights import Weights, load_weights, read_weights

ClassificationLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps logits [regions, 1 + classes] and targets [regions], 0 for background, to a scalar."""

# strides of the five levels of the pyramid, in pixels
STRIDES = (4, 8, 16, 32, 64)
ASPECTS = (0.5, 1.0, 2.0)
GROUPS = 32
TINY = (16, 32, 64, 96)
"""Channels of the stages of the tiny backbone."""


@dataclass(frozen=True)
class _Backbone:
    """A ResNet: type of block, blocks per stage, groups of ResNeXt."""

    block: type[BasicBlock | Bottleneck]
    layers: tuple[int, int, int, int]
    groups: int = 1
    width_per_group: int = 64

    def build(self, norm: Callable[[int], nn.Module]) -> ResNet:
        return ResNet(self.block, list(self.layers), groups=self.groups, width_per_group=self.width_per_group, norm_layer=norm)


RESNETS = {
    "resnet18": _Backbone(BasicBlock, (2, 2, 2, 2)),
    "resnet34": _Backbone(BasicBlock, (3, 4, 6, 3)),
    "resnet50": _Backbone(Bottleneck, (3, 4, 6, 3)),
    "resnet101": _Backbone(Bottleneck, (3, 4, 23, 3)),
    # torchvision has the 32x8d only
    "resnext101_32x4d": _Backbone(Bottleneck, (3, 4, 23, 3), groups=32, width_per_group=4),
}


class RankedRoIHeads(RoIHeads):  # type: ignore[misc]  # torchvision has no types
    """torchvision's region heads with another classification loss.

    Proposals, sampling, box regression, masks, keypoints and inference are those of `heads`, whose modules are shared.
    """

    def __init__(self, heads: RoIHeads, loss: ClassificationLoss) -> None:
        matcher, sampler = heads.proposal_matcher, heads.fg_bg_sampler
        super().__init__(
            heads.box_roi_pool,
            heads.box_head,
            heads.box_predictor,
            fg_iou_thresh=matcher.high_threshold,
            bg_iou_thresh=matcher.low_threshold,
            batch_size_per_image=sampler.batch_size_per_image,
            positive_fraction=sampler.positive_fraction,
            bbox_reg_weights=heads.box_coder.weights,
            score_thresh=heads.score_thresh,
            nms_thresh=heads.nms_thresh,
            detections_per_img=heads.detections_per_img,
            mask_roi_pool=heads.mask_roi_pool,
            mask_head=heads.mask_head,
            mask_predictor=heads.mask_predictor,
            keypoint_roi_pool=heads.keypoint_roi_pool,
            keypoint_head=heads.keypoint_head,
            keypoint_predictor=heads.keypoint_predictor,
        )
        self.classification_loss = loss
        self._targets: list[Tensor] = []
        self.train(heads.training)

    def select_training_samples(self, proposals: Any, targets: Any) -> Any:
        selected = super().select_training_samples(proposals, targets)
        self._targets = selected[2]
        return selected

    def forward(self, features: Any, proposals: Any, image_shapes: Any, targets: Any = None) -> tuple[Any, dict[str, Tensor]]:
        logits: list[Tensor] = []
        # for this call only: the predictor may be replaced between calls
        hook = self.box_predictor.register_forward_hook(lambda module, given, output: logits.append(output[0]))
        try:
            result, losses = super().forward(features, proposals, image_shapes, targets)
        finally:
            hook.remove()
        if self.training:
            losses["loss_classifier"] = self.classification_loss(logits[0], torch.cat(self._targets))
            self._targets = []
        return result, losses


def use_classification_loss(detector: nn.Module, loss: ClassificationLoss) -> None:
    """Replace the classification loss of a torchvision detector, and nothing else.

    A loss that is a module becomes a submodule of the detector: its parameters and its memory are in `state_dict`.
    """
    heads = getattr(detector, "roi_heads", None)
    if not isinstance(heads, RoIHeads):
        raise TypeError(
            f"use_classification_loss: detector must have torchvision's roi_heads, as Faster R-CNN has, got "
            f"{type(detector).__name__}; in another detector call the loss with its logits and targets"
        )
    if not callable(loss):
        raise TypeError(f"use_classification_loss: loss must be a function of logits and targets, got {type(loss).__name__}")
    detector.roi_heads = RankedRoIHeads(heads, loss)


def build_detector(
    backbone: str = "resnet50",
    classes: int = 20,
    *,
    weights: str = "none",
    norm: str = "auto",
    trainable_stages: int | None = None,
    min_size: int = 600,
    max_size: int = 1000,
    anchor_scale: float = 8.0,
    proposals: int = 2000,
    regions: int = 512,
    score_threshold: float = 0.05,
    seed: int = 0,
) -> FasterRCNN:
    """Faster R-CNN with a feature pyramid on any `Backbone`, with torchvision's losses.

    Args:
        backbone: "resnet50", "resnet101", "resnext101_32x4d", smaller ones, or "tiny" for tests.
        classes: number of classes, without background.
        weights: of the backbone: "none", "default" (torchvision's, downloaded), or a file of torchvision's or timm's names.
        norm: "frozen" batch normalisation, usual with pretrained weights; "group" or live "batch" normalisation to train from
            scratch; "auto": frozen with weights, group without.
        trainable_stages: number of stages that are trained, from the last to the first, then the stem; None: 3 with weights,
            else all 5.
        min_size: shorter side of a resized image.
        max_size: limit of its longer side.
        anchor_scale: side of a square anchor, in strides of its level: 8 gives 32 to 512 pixels.
        proposals: proposals of an image passed to the region heads in training; half as many at test time.
        regions: regions of an image sampled for the losses.
        score_threshold: smallest score of a reported box.
        seed: seed of the random weights.
    """
    caller = "build_detector"
    check_choice(backbone, get_args(Backbone), name="backbone", caller=caller)
    check_choice(norm, get_args(Norm), name="norm", caller=caller)
    check_count(classes, name="classes", caller=caller)
    if trainable_stages is None:
        trainable_stages = 5 if weights == "none" else 3
    check_count(trainable_stages, name="trainable_stages", caller=caller, least=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body, channels, width = _pyramid_body(backbone, weights, norm, trainable_stages)
        stages = {f"layer{level}": str(level - 1) for level in (1, 2, 3, 4)}
        pyramid = BackboneWithFPN(body, stages, channels, out_channels=width)
        hidden = 4 * width
        return FasterRCNN(
            pyramid,
            min_size=min_size,
            max_size=max_size,
            image_mean=list(IMAGENET_MEAN),
            image_std=list(IMAGENET_STD),
            rpn_anchor_generator=AnchorGenerator(
                tuple((round(anchor_scale * stride),) for stride in STRIDES), (ASPECTS,) * len(STRIDES)
            ),
            rpn_pre_nms_top_n_train=proposals,
            rpn_post_nms_top_n_train=proposals,
            rpn_pre_nms_top_n_test=max(proposals // 2, 1),
            rpn_post_nms_top_n_test=max(proposals // 2, 1),
            box_roi_pool=MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=7, sampling_ratio=2),
            box_head=TwoMLPHead(width * 7 * 7, hidden),
            box_predictor=FastRCNNPredictor(hidden, classes + 1),
            box_batch_size_per_image=regions,
            box_score_thresh=score_threshold,
        )


def _pyramid_body(name: str, weights: str, norm: str, trainable: int) -> tuple[nn.Module, list[int], int]:
    """The network below the pyramid, the channels of its four stages, and those of the pyramid."""
    if norm == "auto":
        norm = "group" if weights == "none" else "frozen"
    layer = {"frozen": FrozenBatchNorm2d, "batch": nn.BatchNorm2d, "group": partial(_group_norm, GROUPS)}[norm]
    if name == "tiny":
        if weights != "none":
            raise ValueError(f"build_detector: the backbone 'tiny' has no weights, got {weights!r}: use 'none'")
        return _tiny(), list(TINY), 64
    body = RESNETS[name].build(layer)
    expansion = RESNETS[name].block.expansion
    if weights != "none":
        _load(body, name, weights)
    # conv1 and bn1 are the stem
    prefixes = ("layer4", "layer3", "layer2", "layer1", "conv1", "bn1")[: trainable + (trainable > 4)]
    for parameter_name, parameter in body.named_parameters():
        parameter.requires_grad_(parameter_name.startswith(prefixes))
    return body, [stage * expansion for stage in (64, 128, 256, 512)], 256


def _load(body: ResNet, name: str, weights: str) -> None:
    if weights == "default":
        if not hasattr(torchvision.models, name):
            raise ValueError(
                f"build_detector: torchvision has no weights of {name}: pass a file, such as timm's resnext101_32x4d, or 'none'"
            )
        enum = torchvision.models.get_model_weights(name)
        loaded = Weights(dict(enum["IMAGENET1K_V1"].get_state_dict(progress=False)), Path(weights))
    else:
        loaded = read_weights(Path(weights).expanduser())
    # frozen layers have no such buffer
    state = {key: value for key, value in loaded.state.items() if not key.endswith("num_batches_tracked")}
    outside, body.fc = body.fc, nn.Identity()
    trunk = Trunk(name, body, channels=512, input_size=224)
    load_weights(trunk, nn.Identity(), replace(loaded, state=state))
    body.fc = outside


def _tiny() -> nn.Sequential:
    """A few convolutions with the strides of a ResNet."""
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=_stage(3, TINY[0]))
    for level, (before, after) in enumerate(zip((TINY[0], *TINY), TINY, strict=False), start=1):
        stages[f"layer{level}"] = _stage(before, after)
    return nn.Sequential(stages)


def _stage(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
        _group_norm(8, after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        _group_norm(8, after),
        nn.ReLU(inplace=True),
    )


def _group_norm(groups: int, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels)
