"""The pixels that a network sees: the fixed preprocessing of evaluation and search, and the random crops of training.

    preprocess = Preprocessing(224)
    preprocess("cat.jpg")           uint8 [3, 224, 224], as the images of a table are evaluated

Images are stored a little larger than they are cropped: 256 pixels for crops of 224.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_choice, check_count, check_positive, check_tensor, shape_of
from rankgrad.data.image_files import (
    DAMAGE,
    ImageDecoder,
    UnreadableImageError,
    planes_of,
    read_guarded,
    read_row,
    resized_rgb,
    to_rgb,
)
from rankgrad.data.table import Table

if TYPE_CHECKING:
    from PIL import Image

Crop: TypeAlias = Literal["random", "resized", "center"]
ImageInput: TypeAlias = Union[str, Path, bytes, "Image.Image", NDArray[Any], Tensor]
"""A file, its bytes, a PIL image, a uint8 array [H, W] or [H, W, 3 or 4], or a uint8 tensor [H, W] or [1 or 3, H, W]."""

# side of the crop over the side of the stored image, the field's 224 of 256
CROPPED = 224 / 256
ATTEMPTS = 10


@dataclass(frozen=True)
class Preprocessing:
    """An image as a network is evaluated on it. Every image of a run goes through the same one.

    Called with one image it returns uint8 [3, H, W]; `from_table` does the same for a row of a table, and batches of a whole
    table use `augment` on images stored at `stored_side`. The pixels are equal to the last bit.

    Attributes:
        size: height and width of the result; of `native_shape`, the longest side at most.
        stored_side: length of the short side (`square`: of both) before the center crop; 0: size x 256 / 224.
        square: resize to stored_side x stored_side, distorting the aspect ratio.
        native_shape: keep the image's shape and shrink it until its long side is `size`, as ROxford and RParis are
            evaluated. Nothing is enlarged and nothing cropped. An image with a box is shrunk by as much as its whole file would
            be. EXIF orientation is ignored, as in the published code.
    """

    size: int
    stored_side: int = 0
    square: bool = False
    native_shape: bool = False

    def __post_init__(self) -> None:
        check_count(self.size, name="size", caller="Preprocessing")
        check_count(self.stored_side, name="stored_side", caller="Preprocessing", least=0)
        if not self.stored_side:
            object.__setattr__(self, "stored_side", round(self.size / CROPPED))
        if self.stored_side < self.size:
            raise ValueError(f"Preprocessing: stored_side must be at least size ({self.size}), got {self.stored_side}")
        for name in ("square", "native_shape"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Preprocessing: {name} must be True or False, got {getattr(self, name)!r}")

    def __call__(self, image: ImageInput) -> Tensor:
        """uint8 [3, H, W] on the CPU.

        Args:
            image: see `ImageInput`. Files and bytes that cannot be read raise `UnreadableImageError`.
        """
        from PIL import Image

        if isinstance(image, (str, Path)):
            return read_guarded(Path(image), self._prepare)
        if isinstance(image, (bytes, bytearray, memoryview)):
            return read_guarded(bytes(image), self._prepare)
        if not isinstance(image, Image.Image):
            return self._prepare(Image.fromarray(_pixels_of(image)))
        try:
            return self._prepare(image)
        except DAMAGE as error:
            raise UnreadableImageError(f"Preprocessing: the image cannot be read: {error}") from error

    def from_table(self, table: Table, row: int) -> Tensor:
        """The image of a row, cropped to its box if it has one."""
        if self.native_shape:
            box = None if table.boxes is None or np.isnan(table.boxes[row]).any() else table.boxes[row]
            return read_row(table, row, lambda image: self._at_native_shape(image, box))
        return self._center(ImageDecoder(table, self.stored_side, self.square).planes(row))

    def augment(self) -> "Augment":
        """The crop of this preprocessing for batches of images stored at `stored_side`."""
        if self.native_shape:
            raise ValueError("Preprocessing.augment: images at their native shape are not cropped; use from_table")
        return Augment("center", share=self.size / self.stored_side)

    def as_dict(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """The inverse of `as_dict`; unknown or missing settings are an error."""
        names = {entry.name for entry in fields(cls)}
        if set(settings) != names:
            raise ValueError(
                f"Preprocessing.from_dict: the settings must be {', '.join(sorted(names))}, got {', '.join(sorted(settings))}"
            )
        return cls(**settings)

    def _prepare(self, image: "Image.Image") -> Tensor:
        if self.native_shape:
            return self._at_native_shape(image, None)
        return self._center(planes_of(resized_rgb(image, side=self.stored_side, square=self.square)))

    def _center(self, planes: NDArray[np.uint8]) -> Tensor:
        stored = torch.from_numpy(planes)
        boxes, _ = self.augment().draw(torch.tensor([planes.shape[1:]]))
        left, top, width, height = boxes[0].int().tolist()
        return stored[:, top : top + height, left : left + width].contiguous()

    def _at_native_shape(self, image: "Image.Image", box: NDArray[np.float64] | None) -> Tensor:
        from PIL import Image

        rgb = to_rgb(image)
        longest = max(rgb.size)
        if box is not None:
            left, top, right, bottom = map(int, box.tolist())
            rgb = rgb.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        side = max(1, round(self.size * max(rgb.size) / longest))
        # never enlarges
        rgb.thumbnail((side, side), Image.Resampling.LANCZOS)
        return torch.from_numpy(planes_of(rgb))


def _pixels_of(image: NDArray[Any] | Tensor) -> NDArray[np.uint8]:
    """uint8 [H, W] or [H, W, C] of an array or a tensor."""
    if isinstance(image, Tensor):
        array, layout = image.detach().cpu().numpy(), "[H, W], [1, H, W] or [3, H, W]"
        is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[0] in (1, 3))
    elif isinstance(image, np.ndarray):
        array, layout = image, "[H, W], [H, W, 3] or [H, W, 4]"
        is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    else:
        raise TypeError(
            f"Preprocessing: an image must be a path, bytes, a PIL image, an array or a tensor, got {type(image).__name__}"
        )
    if array.dtype != np.uint8 or not is_image or not array.size:
        kind = type(image).__name__
        raise ValueError(f"Preprocessing: a {kind} must be uint8 {layout}, got {array.dtype} of shape {tuple(array.shape)}")
    if isinstance(image, Tensor) and array.ndim == 3:
        array = array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)
    return np.ascontiguousarray(array)


@dataclass(frozen=True)
class Augment:
    """How a box is chosen, and whether half of the images are mirrored.

    The distributions are those of torchvision's `RandomCrop`, `RandomResizedCrop` and `CenterCrop`. FastAP and RaMBO train
    with "random", RS@k and Smooth-AP with "resized", both mirrored; all evaluate with "center".

    Attributes:
        crop: "random": a square of `share` of the short side, anywhere. "center": the same in the middle, for evaluation.
            "resized": a box of random area and aspect ratio, distorted to a square.
        flip: mirror left and right with probability 1/2.
        share: edge of the square over the short side of the stored image ("random" and "center").
        scale: range of the box's area over the image's ("resized").
        ratio: range of the box's width over its height ("resized"), log-uniform.
    """

    crop: Crop
    flip: bool = False
    share: float = CROPPED
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

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
        """Height and width of the first attempt that fits, else the largest that `ratio` allows, and whether one fits."""
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
