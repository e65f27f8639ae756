"""The model: from pixels to embeddings of length 1."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rankgrad._checks import check_choice, check_count, check_positive, check_tensor, shape_of
from rankgrad._device import autocast_disabled
from rankgrad.models.frozen_norm import use_frozen_norm
from rankgrad.models.pooling import First, GeM, Maximum, Mean
from rankgrad.models.text_trunks import build_text_trunk
from rankgrad.models.trunks import IMAGENET_MEAN, IMAGENET_STD, Trunk, build_trunk
from rankgrad.models.weights import load_weights, read_weights

Pool: TypeAlias = Literal["auto", "gem", "avg", "max", "cls"]
BatchNorm: TypeAlias = Literal["frozen", "fixed", "live"]
Pixels: TypeAlias = Literal["native", "imagenet"]
Inputs: TypeAlias = Literal["images", "texts"]

SCALES = (1.0, math.sqrt(2.0), math.sqrt(0.5))


@dataclass(frozen=True)
class ModelSpec:
    """Trunk -> pool -> layer norm -> linear -> L2 normalisation; the defaults are the head of RS@k.

    Attributes:
        trunk: a name of `trunk_names()`; any model name of timm, where "timm/resnet50" selects timm's if torchvision has the
            name too; the folder of a timm model, "./mynet"; or a function of yours, "package.module:factory".
        weights: "none", "default" (ImageNet weights of torchvision or timm, downloaded once), or the path of a
            .safetensors, .pth or .pt file, or of a run folder, whose best checkpoint is used.
        pool: "gem", "avg" or "max" over positions, "cls" for the class token; "auto" is cls where there is a class token,
            gem for feature maps, avg for tokens without one and for trunks that pool themselves.
        gem_p: exponent of GeM, initial or constant.
        gem_learned: train the exponent.
        l2_pooled: normalise the pooled feature to length 1 before the linear layer, as landmark models with learned
            whitening do.
        layer_norm: layer norm of the pooled feature, with learned scale and shift.
        dim: dimensions of the embedding; 0 omits the linear layer.
        batch_norm: "frozen" keeps the running statistics and trains scale and shift, "fixed" freezes those too, "live" is
            the ordinary layer. Frozen suits pretrained weights; a trunk trained from scratch learns better "live".
        pixels: "native" normalises pixels as the trunk was trained, "imagenet" with the mean and standard deviation of
            ImageNet whatever the trunk is: RS@k did so for its ViTs.
        inputs: "texts" takes `trunk` as a sentence encoder: the folder of a model of transformers or sentence-transformers,
            or a name on the Hugging Face Hub.
    """

    trunk: str = "resnet50"
    weights: str = "none"
    pool: Pool = "auto"
    gem_p: float = 3.0
    gem_learned: bool = True
    l2_pooled: bool = False
    layer_norm: bool = True
    dim: int = 512
    batch_norm: BatchNorm = "frozen"
    pixels: Pixels = "native"
    inputs: Inputs = "images"

    def __post_init__(self) -> None:
        for name in ("trunk", "weights"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise TypeError(f"ModelSpec: {name} must be a non-empty string, got {value!r}")
        check_choice(self.pool, get_args(Pool), name="pool", caller="ModelSpec")
        check_choice(self.batch_norm, get_args(BatchNorm), name="batch_norm", caller="ModelSpec")
        check_choice(self.pixels, get_args(Pixels), name="pixels", caller="ModelSpec")
        check_choice(self.inputs, get_args(Inputs), name="inputs", caller="ModelSpec")
        check_positive(self.gem_p, name="gem_p", caller="ModelSpec")
        check_count(self.dim, name="dim", caller="ModelSpec", least=0)
        if self.layer_norm and self.l2_pooled:
            raise ValueError("ModelSpec: layer_norm undoes the normalisation of l2_pooled; choose one of the two")


class Head(nn.Module):
    """[B, channels, positions] -> unit embeddings [B, dim], in float32 or wider also under autocast."""

    def __init__(self, spec: ModelSpec, channels: int) -> None:
        super().__init__()
        pools = {"avg": Mean, "max": Maximum, "cls": First}
        self.pool = GeM(spec.gem_p, learned=spec.gem_learned) if spec.pool == "gem" else pools[spec.pool]()
        self.l2_pooled = spec.l2_pooled
        self.norm = nn.LayerNorm(channels) if spec.layer_norm else None
        self.linear = nn.Linear(channels, spec.dim) if spec.dim else None

    def forward(self, features: Tensor) -> Tensor:
        with autocast_disabled(features.device):
            embeddings = self.pooled(features)
            if self.linear is not None:
                embeddings = self.linear(embeddings.to(self.linear.weight.dtype))
            return F.normalize(_at_least_float32(embeddings))

    def pooled(self, features: Tensor) -> Tensor:
        """[B, channels], the input of the linear layer."""
        with autocast_disabled(features.device):
            pooled: Tensor = self.pool(_at_least_float32(features))
            if self.l2_pooled:
                pooled = F.normalize(pooled)
            if self.norm is not None:
                # layers work in the type of their weights, which is float32 unless the whole model was converted
                pooled = self.norm(pooled.to(self.norm.weight.dtype))
            return pooled


class Embedder(nn.Module):
    """Images [B, 3, H, W], uint8 or float with values 0..255 -> unit embeddings [B, dim] in float32.

    It normalises pixels itself and repeats a single grey channel. Pixels in 0..1 are not detected and give poor embeddings.
    `train()` keeps the batch-norm mode of the spec. That of a sentence encoder takes token numbers {"input_ids",
    "attention_mask"} [B, T] in place of images.

    Attributes:
        spec: what it was built from, with `pool` resolved.
        input_size: image side that the trunk was designed for.
        channels: of the trunk's features.
        dim: of the embeddings.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, spec: ModelSpec, trunk: Trunk) -> None:
        super().__init__()
        if spec.pool == "auto":
            spec = replace(spec, pool="cls" if trunk.class_token else "avg" if trunk.tokens or trunk.vectors else "gem")
        if spec.pool == "cls" and not trunk.class_token:
            raise ValueError(f"build_model: pool 'cls' needs a class token, {trunk.name} has none; use 'gem', 'avg' or 'max'")
        self.spec, self.input_size, self.channels = spec, trunk.input_size, trunk.channels
        self.dim = spec.dim or trunk.channels
        self.trunk, self.head = trunk.body, Head(spec, trunk.channels)
        self._tokens, self._channels_last = trunk.tokens, trunk.channels_last
        self._prefix = 0 if spec.pool == "cls" else trunk.prefix
        if spec.inputs == "images":
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if spec.pixels == "imagenet" else (trunk.mean, trunk.std)
            self.register_buffer("pixel_mean", 255 * torch.tensor(mean).view(3, 1, 1))
            self.register_buffer("pixel_std", 255 * torch.tensor(std).view(3, 1, 1))
        if spec.batch_norm != "live":
            for layer in _batch_norms(self.trunk):
                use_frozen_norm(layer)
                if spec.batch_norm == "fixed":
                    layer.requires_grad_(False)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.head(self.features(images))
        return embeddings

    def pooled(self, images: Tensor) -> Tensor:
        """[B, channels], the input of the linear layer: the descriptors to learn whitening from."""
        return self.head.pooled(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """[B, channels, positions], a position being a cell of the feature map or a token."""
        features: Tensor = self.trunk(self.normalised(images) if self.spec.inputs == "images" else images)
        if features.ndim == 2:
            return features[:, :, None]
        if self._tokens:
            return features[:, self._prefix :].transpose(1, 2)
        return features.flatten(1, 2).transpose(1, 2) if self._channels_last else features.flatten(2)

    def normalised(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] as the trunk expects them."""
        check_tensor(images, name="images", caller="Embedder")
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"Embedder: images must be [batch, 3 or 1, height, width], got shape {shape_of(images)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"Embedder: images must be uint8 or floating-point with values 0..255, got {images.dtype}")
        return (images.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std

    def train(self, mode: bool = True) -> "Embedder":
        """Dropout and the like follow `mode`; batch norm does so only where it is live."""
        super().train(mode)
        if self.spec.batch_norm != "live":
            for layer in _batch_norms(self.trunk):
                layer.eval()
        return self


def build_model(spec: ModelSpec, *, seed: int | None = None) -> Embedder:
    """Build the model that `spec` describes, in training mode.

    Args:
        seed: of the random weights; torch's generator keeps its state. None draws from that generator.
    """
    with contextlib.nullcontext() if seed is None else _seeded(seed):
        build = build_trunk if spec.inputs == "images" else build_text_trunk
        trunk = build(spec.trunk, pretrained=spec.weights == "default")
        model = Embedder(spec, trunk)
    if spec.weights not in ("none", "default"):
        load_weights(trunk, model.head, read_weights(Path(spec.weights).expanduser()))
    return model


@torch.no_grad()
def embed_multiscale(model: nn.Module, images: Tensor, scales: Sequence[float] = SCALES, power: float = 1.0) -> Tensor:
    """Unit embeddings [B, dim]: the images resized to each scale (bilinear), their embeddings averaged and normalised.

    Args:
        model: images [B, C, H, W] -> unit embeddings, in evaluation mode.
        images: of one size; images of different sizes go one at a time.
        power: average this power of the embeddings and take the root. Landmark models without a linear layer use GeM's p
            here; it needs embeddings without negative values.
    """
    caller = "embed_multiscale"
    check_tensor(images, name="images", caller=caller)
    if images.ndim != 4:
        raise ValueError(f"{caller}: images must be [batch, channels, height, width], got shape {shape_of(images)}")
    if not scales:
        raise ValueError(f"{caller}: scales must hold at least one number, got none")
    for scale in scales:
        check_positive(scale, name="scales", caller=caller)
    check_positive(power, name="power", caller=caller)
    if model.training:
        raise ValueError(f"{caller}: model is in training mode; call model.eval() first")

    total: Tensor | None = None
    for scale in scales:
        embeddings = model(_resized(images, scale))
        if power != 1.0 and bool((embeddings < 0).any()):
            raise ValueError(
                f"{caller}: power {power:g} needs embeddings without negative values, as of pool 'gem' with dim 0 and no "
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


def _batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    return (layer for layer in module.modules() if isinstance(layer, _BatchNorm))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    check_count(seed, name="seed", caller="build_model", least=0)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the GPUs, whose state is not restored
        torch.default_generator.manual_seed(seed)
        yield
