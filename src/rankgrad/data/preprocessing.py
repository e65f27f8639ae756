"""Which part of an image is shown: boxes drawn for a whole batch at once, for decoded and for undecoded images alike.

The distributions are torchvision's `RandomCrop`, `RandomResizedCrop` and `CenterCrop`; what the papers train with are
the presets `AUGMENTS`. Images are stored a little larger than they are shown, `stored_side(224)` = 256.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from rankgrad._checks import check_choice, check_count, check_positive, check_tensor, shape_of

Crop: TypeAlias = Literal["random", "resized", "center"]

# the field's sizes: 224 pixels shown of 256 stored
SHOWN = 224 / 256
ATTEMPTS = 10


def stored_side(size: int) -> int:
    """The side to store images at that are shown at `size`: 256 for 224."""
    check_count(size, name="size", caller="stored_side")
    return round(size / SHOWN)


@dataclass(frozen=True)
class Augment:
    """How a box is chosen, and whether half of the images are mirrored.

    Attributes:
        crop: "random": a square of `share` of the short side, anywhere. "center": the same in the middle, for evaluation.
            "resized": a box of random area and aspect ratio, distorted to a square (`RandomResizedCrop`).
        flip: mirror left and right with probability 1/2.
        share: edge of the square over the short side of the stored image ("random" and "center").
        scale: range of the box's area over the image's ("resized").
        ratio: range of the box's width over its height ("resized"), log-uniform.
        square: the images should be stored side x side, their aspect distorted, and not with a short side of that length.
    """

    crop: Crop
    flip: bool = False
    share: float = SHOWN
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    square: bool = False

    def __post_init__(self) -> None:
        check_choice(self.crop, get_args(Crop), name="crop", caller="Augment")
        check_positive(self.share, name="share", caller="Augment")
        if self.share > 1:
            raise ValueError(f"Augment: share must be at most 1, the whole short side, got {self.share}")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            check_positive(low, name=name, caller="Augment")
            check_positive(high, name=name, caller="Augment")
            if low > high:
                raise ValueError(f"Augment: {name} must be (least, most), got {(low, high)}")
        if self.scale[1] > 1:
            raise ValueError(f"Augment: scale must be at most 1, the whole image, got {self.scale}")

    @property
    def is_random(self) -> bool:
        """Whether two draws can differ."""
        return self.flip or self.crop != "center"

    def draw(self, shapes: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A box and a mirroring for each image.

        Args:
            shapes: [B, 2] height and width of the stored images, on the CPU.
            generator: a CPU generator; needed unless nothing is random.

        Returns:
            boxes [B, 4] float32 (left, top, width, height), whole pixels inside the image, and flip [B] bool.
        """
        check_tensor(shapes, name="shapes", caller="Augment.draw")
        if shapes.ndim != 2 or shapes.shape[1] != 2:
            raise ValueError(f"Augment.draw: shapes must be [images, 2], height and width, got shape {shape_of(shapes)}")
        if self.is_random and generator is None:
            raise ValueError(
                "Augment.draw: a generator is needed, this augmentation is random; see rankgrad.data.seeds.generator"
            )
        height, width = shapes.double().unbind(1)
        if self.crop == "resized":
            box_height, box_width, found = self._resized(height, width, generator)
            # the fallback lies in the middle, which torchvision rounds down here and to even in CenterCrop
            top = torch.where(found, _anywhere(height, box_height, generator), ((height - box_height) / 2).floor())
            left = torch.where(found, _anywhere(width, box_width, generator), ((width - box_width) / 2).floor())
        else:
            box_height = box_width = (torch.minimum(height, width) * self.share).round().clamp(min=1)
            place = _middle if self.crop == "center" else _anywhere
            top, left = place(height, box_height, generator), place(width, box_width, generator)
        no_flip = torch.zeros(len(shapes), dtype=torch.bool)
        flip = torch.rand(len(shapes), generator=generator) < 0.5 if self.flip else no_flip
        return torch.stack((left, top, box_width, box_height), dim=1).float(), flip

    def _resized(self, height: Tensor, width: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Heights and widths, the first of ten attempts that fits, and whether one did; else as much as the ratio allows."""
        tries = (ATTEMPTS, len(height))
        area = height * width * _between(*self.scale, tries, generator)
        ratio = _between(math.log(self.ratio[0]), math.log(self.ratio[1]), tries, generator).exp()
        box_width, box_height = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (box_width > 0) & (box_width <= width) & (box_height > 0) & (box_height <= height)
        first = fits.int().argmax(0, keepdim=True)
        found = fits.any(0)
        fallback_width = torch.minimum(width, (height * self.ratio[1]).round()).clamp(min=1)
        fallback_height = torch.minimum(height, (width / self.ratio[0]).round()).clamp(min=1)
        return (
            torch.where(found, box_height.gather(0, first)[0], fallback_height),
            torch.where(found, box_width.gather(0, first)[0], fallback_width),
            found,
        )


def _between(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=generator)


def _anywhere(whole: Tensor, part: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform over the places 0 .. whole - part."""
    places = whole - part + 1
    # the product of a number just below 1 can round up to `places`
    return torch.minimum((_between(0, 1, tuple(whole.shape), generator) * places).floor(), places - 1)


def _middle(whole: Tensor, part: Tensor, _: torch.Generator | None = None) -> Tensor:
    return ((whole - part) / 2).round()


AUGMENTS: Mapping[str, Augment] = MappingProxyType(
    {
        # FastAP, RaMBO: 224 x 224 anywhere in 256 x 256, mirrored; evaluation shows the middle
        "fastap": Augment("random", flip=True, square=True),
        "fastap-center": Augment("center", square=True),
        # RS@k, Smooth-AP: RandomResizedCrop, mirrored; evaluation shows the middle of a short side of 256
        "recall-at-k": Augment("resized", flip=True),
        # ROADMAP's milder crops
        "roadmap": Augment("resized", flip=True, scale=(0.16, 1.0)),
        "center": Augment("center"),
        "whole-square": Augment("center", share=1.0, square=True),
    }
)
