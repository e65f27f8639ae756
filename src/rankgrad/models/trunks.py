"""Trunks: networks from normalised pixels to a feature at every position. Ours, torchvision's, timm's, and your own.

A new trunk is one entry of `TRUNKS`. Besides those, a trunk may be any model name of timm, the folder of a timm model on disk
(`./mynet`, with config.json and weights), or a function of yours, `package.module:factory`.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rankgrad._messages import did_you_mean, install_hint, shorten

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

# the weights behind the names are those of RS@k: trained on ImageNet-21k, not fine-tuned on ImageNet-1k
SHORT_NAMES = {
    "vit-b32": "vit_base_patch32_224.augreg_in21k",
    "vit-b16": "vit_base_patch16_224.augreg_in21k",
    "vit-s32": "vit_small_patch32_224.augreg_in21k",
    "vit-s16": "vit_small_patch16_224.augreg_in21k",
}

# timm's families that resample their position embeddings to the size of the image when asked to
ANY_SIZE = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva")

# what files call the layers after the features; `last_linear` and `pre_logits` are those of older collections
CLASSIFIERS = ("fc", "head", "head_dist", "classifier", "last_linear", "pre_logits", "fc_norm", "aux1", "aux2")

# the two forms of a ResNet of bottleneck blocks, which names and shapes of the weights do not tell apart: the stride of a
# stage stands in the first, 1 x 1 convolution of a block (He et al., Caffe, Keras) or in the second, 3 x 3 (torchvision, timm)
V1, V1_5 = "v1", "v1.5"

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# seconds that the server of the weights has to answer before it counts as unreachable
PROBE_SECONDS = 5


@dataclass(frozen=True, eq=False)
class Trunk:
    """A network and what its users must know about it.

    Attributes:
        name: as it was asked for.
        body: normalised pixels [B, 3, H, W] -> a map [B, C, H', W'], or [B, H', W', C], tokens [B, T, C], or vectors [B, C].
        channels: C.
        input_size: image side that it was designed for.
        mean: of the pixels it was trained on, in 0..1.
        std: likewise.
        tokens: `body` returns tokens.
        prefix: number of tokens before those of the patches.
        class_token: the first of them is the class token.
        channels_last: a map comes as [B, H', W', C].
        vectors: `body` pools its features itself and returns [B, C].
        classifiers: first parts of the names that a file of its weights may hold beyond it.
        form: `V1` or `V1_5` for a network that exists in both, else "".
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
    vectors: bool = False
    classifiers: tuple[str, ...] = CLASSIFIERS
    form: str = ""


def trunk_names() -> tuple[str, ...]:
    """Names of `TRUNKS`; any name of `timm.list_models()` works as well."""
    return tuple(TRUNKS)


def build_trunk(name: str, *, pretrained: bool = False) -> Trunk:
    """The trunk called `name`, with its published weights (`pretrained`) or random ones."""
    if name in TRUNKS:
        return TRUNKS[name](name, pretrained)
    if _FACTORY.fullmatch(name):
        return _from_factory(name, pretrained)
    if _is_path(name):
        return _from_folder(name, pretrained)
    return _from_timm(name, pretrained)


def describe_first_weights(name: str, weights: str) -> str:
    """What training began with, in a sentence for a model card; the licence where timm states one."""
    if weights == "none":
        return "Training began with random weights."
    if weights != "default":
        return f"Training began with the weights in {Path(weights).name}."
    if name in TRUNKS and name not in SHORT_NAMES:
        return f"Training began with torchvision's ImageNet weights of {name}."
    if _FACTORY.fullmatch(name) or _is_path(name):
        return f"Training began with the weights that {Path(name).name} brings."
    _require("timm", name)
    import timm

    config = timm.models.get_pretrained_cfg(SHORT_NAMES.get(name, name.removeprefix("timm/")), allow_unregistered=True)
    address = f" (https://huggingface.co/{config.hf_hub_id})" if config and config.hf_hub_id else ""
    licence = f", licence {config.license}" if config and config.license else ""
    return f"Training began with timm's published weights of {name}{address}{licence}."


def form_of(name: str) -> str:
    """`Trunk.form` of a name, without building the trunk."""
    plain = name.removeprefix("timm/").partition(".")[0]
    return V1 if name == "resnet50-v1" else V1_5 if plain in ("resnet50", "resnet101") else ""


def convnet() -> nn.Sequential:
    """389,000 weights, images of 32 to 64 pixels -> [B, 256, H / 8, W / 8], without batch norm."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 2), (32, 64, 2), (64, 128, 2), (128, 256, 1)):
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers)


def _convnet(name: str, pretrained: bool) -> Trunk:
    if pretrained:
        raise ValueError(_nothing_published(name))
    return Trunk(name, convnet(), channels=256, input_size=32, mean=HALF, std=HALF)


def _from_torchvision(name: str, pretrained: bool) -> Trunk:
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
        # the weights of the papers; the V2 sets score higher on ImageNet and come from another training
        weights = models.get_model_weights(name).IMAGENET1K_V1
        try:
            state = weights.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network, or the download has the wrong hash
            raise _no_download(name, weights.url, error) from error
        layers = dict(body.named_children())
        body.load_state_dict({key: value for key, value in state.items() if key.partition(".")[0] in layers})
    return Trunk(name, body, channels, input_size=224, mean=mean, std=std, form=form_of(name))


def _resnet50_v1(name: str, pretrained: bool) -> Trunk:
    """ResNet-50 as first published, which the weights of Caffe and Keras belong to."""
    if pretrained:
        raise ValueError(_nothing_published(name))
    trunk = _from_torchvision("resnet50", pretrained=False)
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = trunk.body.get_submodule(f"{stage}.0")
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return replace(trunk, name=name, form=V1)


def _from_timm(name: str, pretrained: bool) -> Trunk:
    _require("timm", name)
    import timm

    wanted = SHORT_NAMES.get(name, name.removeprefix("timm/"))
    if not timm.is_model(wanted):
        otherwise = f"choose one of {', '.join(trunk_names())}, or a name of timm.list_models()"
        near = did_you_mean(
            wanted,
            {**dict.fromkeys(trunk_names()), **dict.fromkeys(timm.list_models())},
            most=4,
            cutoff=0.5,
            otherwise=otherwise,
        )
        raise ValueError(f"build_model: unknown trunk {name!r}; {near}")
    try:
        config = timm.models.get_pretrained_cfg(wanted, allow_unregistered="." not in wanted)
    except RuntimeError as error:
        known = timm.list_pretrained(f"{wanted.partition('.')[0]}.*")
        raise ValueError(f"build_model: timm has no weights {name!r}; {did_you_mean(wanted, known, most=4)}") from error
    if pretrained and not (config and config.has_weights):
        raise ValueError(_nothing_published(name))
    address = f"https://huggingface.co/{config.hf_hub_id}" if config and config.hf_hub_id else str(config and config.url)
    return _timm_trunk(name, wanted, pretrained, address, any_size=timm.models.is_model_in_modules(wanted, ANY_SIZE))


def _from_folder(name: str, pretrained: bool) -> Trunk:
    """A timm model that was saved to a folder: config.json, and weights where they are wanted."""
    _require("timm", name)
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"build_model: trunk {name!r} is not the folder of a timm model: it has no config.json")
    try:
        return _timm_trunk(name, f"local-dir:{folder}", pretrained, str(folder), any_size=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"build_model: the timm model in {folder} cannot be loaded ({_first_line(error)})") from error


def _timm_trunk(name: str, wanted: str, pretrained: bool, address: str, *, any_size: bool) -> Trunk:
    import timm
    from timm.data.config import resolve_model_data_config

    options: dict[str, Any] = {"num_classes": 0, "global_pool": ""}
    if any_size:
        options.update(dynamic_img_size=True, dynamic_img_pad=True)
    try:
        with offline_if_unreachable() if pretrained else contextlib.nullcontext():
            body: Any = timm.create_model(wanted, pretrained=pretrained, **options)
    except OSError as error:
        raise _no_download(name, address, error) from error
    except (AssertionError, TypeError) as error:
        raise ValueError(f"build_model: timm's {name!r} cannot be built without its own pooling; choose another") from error
    data = resolve_model_data_config(body)
    own = body.pretrained_cfg.get("classifier") or ()
    classifiers = (*CLASSIFIERS, *((own,) if isinstance(own, str) else own))
    side, mean, std = int(data["input_size"][-1]), tuple(data["mean"]), tuple(data["std"])
    return replace(_inspected(name, body, side, mean, std), classifiers=classifiers, form=form_of(name))


def _inspected(name: str, body: Any, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Trunk:
    """`body` as a trunk, the layout of its features read off the shape that one image gives."""
    shape = _feature_shape(body, side)
    if len(shape) not in (2, 3, 4) or shape[0] != 1:
        raise ValueError(
            f"build_model: trunk {name!r} must turn images [B, 3, {side}, {side}] into features [B, C, H, W], tokens "
            f"[B, T, C] or vectors [B, C], got shape {tuple(shape)} for one image"
        )
    tokens, channels_last = len(shape) == 3, len(shape) == 4 and getattr(body, "output_fmt", "NCHW") == "NHWC"
    class_token = tokens and getattr(body, "cls_token", None) is not None
    return Trunk(
        name,
        body,
        channels=shape[-1] if tokens or channels_last else shape[1],
        input_size=side,
        mean=mean,
        std=std,
        tokens=tokens,
        prefix=getattr(body, "num_prefix_tokens", int(class_token)) if tokens else 0,
        class_token=class_token,
        channels_last=channels_last,
        vectors=len(shape) == 2,
    )


def _feature_shape(body: nn.Module, side: int) -> torch.Size:
    """Shape of the features of one image, found without computing: a model's own number of features is not always right."""
    was_training = body.training
    body.eval()
    state = {key: value.to("meta") for key, value in chain(body.named_parameters(), body.named_buffers())}
    with torch.no_grad():
        try:
            features: Any = functional_call(body, state, torch.empty(1, 3, side, side, device="meta"))
        except (NotImplementedError, RuntimeError):  # an operation that has no shape function, or constants on the CPU
            features = body(torch.zeros(1, 3, side, side))
    body.train(was_training)
    if not isinstance(features, Tensor):
        raise ValueError(f"build_model: a trunk must return a tensor, got {type(features).__name__}")
    return features.shape


_trusted: set[str] = set()


def trust_factory(name: str) -> None:
    """Allow `build_trunk` to import and call the factory `name`, or any factory for "*".

    A factory runs code, and a run folder from elsewhere may name one: so nothing that was only read from a file is called.
    """
    _trusted.add(name)


def _from_factory(name: str, pretrained: bool) -> Trunk:
    if not {name, "*"} & _trusted:
        raise ValueError(
            f"build_model: trunk {name!r} runs Python code. If you trust it, add --trust-code on the command line, "
            "trust_code=True in rankgrad.load, or call rankgrad.models.trust_factory first"
        )
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        # as in `python -m`; at the end, so that nothing installed is hidden
        sys.path.append(str(Path.cwd()))
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except ImportError as error:
        raise ValueError(
            f"build_model: trunk {name!r} cannot be imported ({_first_line(error)}); run the command from the folder that "
            f"holds {module_name.partition('.')[0]}, or install it"
        ) from error
    except AttributeError as error:
        near = did_you_mean(attribute, [key for key in vars(sys.modules[module_name]) if not key.startswith("_")])
        raise ValueError(f"build_model: {module_name} has no {attribute!r}; {near}") from error
    if not callable(factory):
        raise ValueError(f"build_model: trunk {name!r} must be a function or class, got {type(factory).__name__}")
    signature = inspect.signature(factory)
    arguments = {"pretrained": pretrained} if "pretrained" in signature.parameters else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"build_model: trunk {name!r} must be callable without arguments, or with pretrained=True or False alone: {error}"
        ) from None
    body = factory(**arguments)
    if isinstance(body, Trunk):
        return replace(body, name=name)
    if not isinstance(body, nn.Module):
        raise ValueError(f"build_model: trunk {name!r} must return an nn.Module or a Trunk, got {shorten(body)}")
    side = int(getattr(body, "input_size", 224))
    mean, std = (tuple(getattr(body, key, default)) for key, default in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)))
    return _inspected(name, body, side, mean, std)


def _is_path(name: str) -> bool:
    return name.startswith(("./", "../", "~", os.sep)) or (os.sep in name and not name.startswith("timm/"))


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Without a network the Hub's client retries for a minute; here it uses its cache at once, or fails."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or not _is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _is_reachable(address: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:  # it answered
        return True
    except OSError:
        return False
    return True


def _require(package: str, trunk: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"build_model: trunk {trunk!r} needs {package}, which is missing. Install it with {install_hint('train')}",
            name=package,
        )


def _nothing_published(name: str) -> str:
    return f"build_model: {name!r} has no published weights to download; pass a file (--weights FILE), or --weights none"


def _no_download(name: str, address: str, error: Exception) -> OSError:
    return OSError(
        f"build_model: the weights of {name!r} could not be downloaded ({_first_line(error)}). Without a network, download "
        f"them from {address} on another machine and pass the file (--weights FILE), or start from random ones "
        "(--weights none)"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


TRUNKS: Mapping[str, Callable[[str, bool], Trunk]] = {
    "convnet": _convnet,
    **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "googlenet"), _from_torchvision),
    "resnet50-v1": _resnet50_v1,
    **dict.fromkeys(SHORT_NAMES, _from_timm),
}
"""What builds each trunk that has a name of its own; called with the name and whether published weights are wanted."""
