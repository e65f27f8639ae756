"""The model: pixels to unit embeddings."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rankgrad._checks import check_count, check_tensor, shape_of
from rankgrad.models.frozen_norm import use_frozen_norm
from rankgrad.models.pooling import First, GeM, Maximum, Mean
from rankgrad.models.spec import ModelSpec
from rankgrad.models.trunks import IMAGENET_MEAN, IMAGENET_STD, Trunk, build_trunk
from rankgrad.models.weights import load_weights, read_weights


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
        with _without_autocast(features.device.type):
            embeddings = self.pooled(features)
            if self.linear is not None:
                embeddings = self.linear(embeddings.to(self.linear.weight.dtype))
            return F.normalize(_wide(embeddings))

    def pooled(self, features: Tensor) -> Tensor:
        """[B, channels]: what the linear layer is given."""
        with _without_autocast(features.device.type):
            pooled: Tensor = self.pool(_wide(features))
            if self.l2_pooled:
                pooled = F.normalize(pooled)
            if self.norm is not None:
                # layers work in the type of their weights, which is float32 unless the whole model was converted
                pooled = self.norm(pooled.to(self.norm.weight.dtype))
            return pooled


class Embedder(nn.Module):
    """Images [B, 3, H, W], uint8 or float, of values 0..255 -> unit embeddings [B, dim] in float32.

    It normalises pixels itself and repeats a single grey channel. Pixels of 0..1 are not noticed and give poor embeddings.
    `train()` keeps to the batch-norm mode of the spec.

    Attributes:
        spec: what it was made from, `pool` resolved.
        input_size: side of the images that the trunk was made for.
        channels: of the trunk's features.
        dim: of the embeddings.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, spec: ModelSpec, trunk: Trunk) -> None:
        super().__init__()
        if spec.pool == "auto":
            spec = replace(spec, pool="cls" if trunk.class_token else "avg" if trunk.tokens else "gem")
        if spec.pool == "cls" and not trunk.class_token:
            raise ValueError(f"build_model: pool 'cls' needs a class token, {trunk.name} has none; use 'gem', 'avg' or 'max'")
        self.spec, self.input_size, self.channels = spec, trunk.input_size, trunk.channels
        self.dim = spec.dim or trunk.channels
        self.trunk, self.head = trunk.body, Head(spec, trunk.channels)
        self._tokens, self._channels_last = trunk.tokens, trunk.channels_last
        self._prefix = 0 if spec.pool == "cls" else trunk.prefix
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
        """[B, channels], what the linear layer is given: the descriptors to learn whitening from."""
        return self.head.pooled(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """[B, channels, positions], a position being a place of the feature map or a token."""
        features: Tensor = self.trunk(self.normalised(images))
        if self._tokens:
            return features[:, self._prefix :].transpose(1, 2)
        return features.flatten(1, 2).transpose(1, 2) if self._channels_last else features.flatten(2)

    def normalised(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] as the trunk expects them."""
        check_tensor(images, name="images", caller="Embedder")
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"Embedder: images must be [batch, 3 or 1, height, width], got shape {shape_of(images)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"Embedder: images must be uint8 or floating-point, of values 0..255, got {images.dtype}")
        return (images.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std

    def train(self, mode: bool = True) -> "Embedder":
        """Dropout and the like follow `mode`; batch norm does so only where it is live."""
        super().train(mode)
        if self.spec.batch_norm != "live":
            for layer in _batch_norms(self.trunk):
                layer.eval()
        return self


def build_model(spec: ModelSpec, *, seed: int | None = None) -> Embedder:
    """The model that `spec` describes, in training mode.

    Args:
        seed: of the random weights; torch's generator is left as it was. None draws from that generator.
    """
    with contextlib.nullcontext() if seed is None else _seeded(seed):
        trunk = build_trunk(spec.trunk, pretrained=spec.weights == "default")
        model = Embedder(spec, trunk)
    if spec.weights not in ("none", "default"):
        load_weights(trunk, model.head, read_weights(Path(spec.weights).expanduser()), source=spec.weights)
    return model


def live_batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that normalise with the statistics of the batch at hand, which makes embeddings depend on it."""
    return tuple(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    )


def _batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    return (layer for layer in module.modules() if isinstance(layer, _BatchNorm))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    # devices without autocast, such as meta, refuse even to switch it off
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    check_count(seed, name="seed", caller="build_model", least=0)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the GPUs, whose state is not put back
        torch.default_generator.manual_seed(seed)
        yield
