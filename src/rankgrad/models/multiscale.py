"""One descriptor of an image from several sizes of it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad._checks import check_positive, check_tensor, shape_of

SCALES = (1.0, math.sqrt(2.0), math.sqrt(0.5))


@torch.no_grad()
def describe(model: nn.Module, images: Tensor, scales: Sequence[float] = SCALES, power: float = 1.0) -> Tensor:
    """Unit descriptors [B, dim]: the images at each scale (bilinear), their embeddings averaged, brought back to length 1.

    Args:
        model: images [B, C, H, W] -> unit embeddings, in evaluation mode.
        images: of one size; images of different sizes go one at a time.
        power: average powers of the embeddings and take the root. Landmark models without a linear layer use GeM's p here;
            it needs embeddings without negative values.
    """
    check_tensor(images, name="images", caller="describe")
    if images.ndim != 4:
        raise ValueError(f"describe: images must be [batch, channels, height, width], got shape {shape_of(images)}")
    if not scales:
        raise ValueError("describe: scales must hold at least one number, got none")
    for scale in scales:
        check_positive(scale, name="scales", caller="describe")
    check_positive(power, name="power", caller="describe")
    if model.training:
        raise ValueError("describe: model is in training mode; call model.eval() first")

    total: Tensor | None = None
    for scale in scales:
        embeddings = model(_resized(images, scale))
        if power != 1.0 and bool((embeddings < 0).any()):
            raise ValueError(
                f"describe: power {power:g} needs embeddings without negative values, as of pool 'gem' with dim 0 and no "
                "layer norm; use power 1"
            )
        raised = embeddings.pow(power)
        total = raised if total is None else total + raised
    assert total is not None
    return F.normalize((total / len(scales)).pow(1 / power))


def _resized(images: Tensor, scale: float) -> Tensor:
    if scale == 1.0:
        return images
    size = [max(1, round(side * scale)) for side in images.shape[-2:]]
    pixels = images if images.is_floating_point() else images.float()
    return F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
