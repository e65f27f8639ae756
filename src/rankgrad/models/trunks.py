"""Networks that turn normalised pixels into a feature at every position: ours, torchvision's and timm's, under one roof."""

import difflib
import importlib.util
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")
TORCHVISION = (*RESNETS, "googlenet")

# the weights behind the names are those of RS@k: trained on ImageNet-21k, not fine-tuned on ImageNet-1k
SHORT_NAMES = {
    "vit-b32": "vit_base_patch32_224.augreg_in21k",
    "vit-b16": "vit_base_patch16_224.augreg_in21k",
    "vit-s32": "vit_small_patch32_224.augreg_in21k",
    "vit-s16": "vit_small_patch16_224.augreg_in21k",
}

# timm's families that resample their position embeddings to the image at hand when asked to
ANY_SIZE = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva")

# what files call the layers after the features; `last_linear` and `pre_logits` are those of older collections
CLASSIFIERS = ("fc", "head", "head_dist", "classifier", "last_linear", "pre_logits", "fc_norm", "aux1", "aux2")


@dataclass(frozen=True, eq=False)
class Trunk:
    """A network and what its users must know about it.

    Attributes:
        name: as it was asked for.
        body: normalised pixels [B, 3, H, W] -> a map [B, C, H', W'], or [B, H', W', C], or tokens [B, T, C].
        channels: C.
        input_size: side of the images it was made for.
        mean: of the pixels it was trained on, in 0..1.
        std: likewise.
        tokens: whether `body` gives tokens.
        prefix: tokens before those of the patches.
        class_token: whether the first of them is the class token.
        channels_last: whether a map comes as [B, H', W', C].
        classifiers: first parts of the names that a file of its weights may hold beyond it.
    """

    name: str
    body: nn.Module
    channels: int
    input_size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    tokens: bool = False
    prefix: int = 0
    class_token: bool = False
    channels_last: bool = False
    classifiers: tuple[str, ...] = CLASSIFIERS


def trunk_names() -> tuple[str, ...]:
    """Names that need no timm to be known; any name of `timm.list_models()` works as well."""
    return ("convnet", *TORCHVISION, *SHORT_NAMES)


def build_trunk(name: str, *, pretrained: bool = False) -> Trunk:
    """The trunk called `name`, with the weights its makers publish (`pretrained`) or random ones."""
    if name == "convnet":
        if pretrained:
            raise ValueError('build_model: there are no published weights of "convnet"; use weights="none" or a file')
        return Trunk(name, convnet(), channels=256, input_size=32, mean=HALF, std=HALF)
    if name in TORCHVISION:
        return _from_torchvision(name, pretrained=pretrained)
    return _from_timm(name, pretrained=pretrained)


def convnet() -> nn.Sequential:
    """389,000 weights, 32 to 64 pixels wide images -> [B, 256, H / 8, W / 8], without batch norm."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 2), (32, 64, 2), (64, 128, 2), (128, 256, 1)):
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers)


def _from_torchvision(name: str, *, pretrained: bool) -> Trunk:
    _require("torchvision", name)
    from torchvision import models

    if name == "googlenet":
        # its published weights expect pixels in -1..1; torchvision turns ImageNet's normalisation into that inside the
        # network, here the pixels are normalised so from the start
        net = models.googlenet(weights=None, aux_logits=False, transform_input=False, init_weights=not pretrained)
        mean = std = HALF
    else:
        net = models.get_model(name, weights=None)
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    channels = net.fc.in_features
    # both are plain chains whose children stand in the order of the forward pass; the names of the weights stay
    kept = ((key, child) for key, child in net.named_children() if key not in ("avgpool", "dropout", "fc"))
    body = nn.Sequential(OrderedDict(kept))
    if pretrained:
        try:
            # the weights of the papers; the V2 sets score higher on ImageNet and come from another training
            state = models.get_model_weights(name).IMAGENET1K_V1.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, or what came has the wrong hash
            raise _no_download(name, error) from error
        layers = dict(body.named_children())
        body.load_state_dict({key: value for key, value in state.items() if key.partition(".")[0] in layers})
    return Trunk(name, body, channels, input_size=224, mean=mean, std=std)


def _from_timm(name: str, *, pretrained: bool) -> Trunk:
    _require("timm", name)
    import timm
    from timm.data.config import resolve_model_data_config

    wanted = SHORT_NAMES.get(name, name.removeprefix("timm/"))
    if not timm.is_model(wanted):
        raise ValueError(f"build_model: there is no trunk {name!r}; {_near(wanted, [*trunk_names(), *timm.list_models()])}")
    try:
        config = timm.models.get_pretrained_cfg(wanted, allow_unregistered="." not in wanted)
    except RuntimeError as error:
        known = timm.list_pretrained(f"{wanted.partition('.')[0]}.*")
        raise ValueError(f"build_model: timm has no weights {name!r}; {_near(wanted, known)}") from error
    if pretrained and not (config and config.has_weights):
        raise ValueError(f'build_model: timm has no published weights of {name!r}; use weights="none" or a file')

    options: dict[str, Any] = {"num_classes": 0, "global_pool": ""}
    if timm.models.is_model_in_modules(wanted, ANY_SIZE):
        options.update(dynamic_img_size=True, dynamic_img_pad=True)
    try:
        body: Any = timm.create_model(wanted, pretrained=pretrained, **options)
    except OSError as error:
        raise _no_download(name, error) from error
    except (AssertionError, TypeError) as error:
        raise ValueError(f"build_model: timm's {name!r} cannot be built without a pooling of its own; take another") from error
    data = resolve_model_data_config(body)
    side = int(data["input_size"][-1])
    shape = _feature_shape(body, side)
    tokens, channels_last = len(shape) == 3, getattr(body, "output_fmt", "NCHW") == "NHWC"
    class_token = tokens and getattr(body, "cls_token", None) is not None
    own = body.pretrained_cfg.get("classifier") or ()
    return Trunk(
        name,
        body,
        channels=shape[-1] if tokens or channels_last else shape[1],
        input_size=side,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        tokens=tokens,
        prefix=getattr(body, "num_prefix_tokens", int(class_token)) if tokens else 0,
        class_token=class_token,
        channels_last=channels_last,
        classifiers=(*CLASSIFIERS, *((own,) if isinstance(own, str) else own)),
    )


def _feature_shape(body: nn.Module, side: int) -> torch.Size:
    """What one image becomes, found without computing anything: a model's own number of features is not always the answer."""
    was_training = body.training
    body.eval()
    state = {key: value.to("meta") for key, value in chain(body.named_parameters(), body.named_buffers())}
    with torch.no_grad():
        features: Tensor = functional_call(body, state, torch.empty(1, 3, side, side, device="meta"))
    body.train(was_training)
    return features.shape


def _near(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    return f"did you mean {', '.join(matches)}?" if matches else f"known are {', '.join(trunk_names())} and timm.list_models()"


def _require(package: str, trunk: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"build_model: trunk {trunk!r} needs {package}, which is missing. Install it with: pip install 'rankgrad[train]'",
            name=package,
        )


def _no_download(name: str, error: Exception) -> OSError:
    first_line = str(error).partition("\n")[0]
    return OSError(
        f"build_model: the weights of {name!r} could not be downloaded ({first_line}). "
        "Without a network give a local file as weights, or weights='none'"
    )
