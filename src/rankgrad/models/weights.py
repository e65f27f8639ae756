"""Weights from a file or a run folder: what it holds, under which names, and whether they fit the model."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad._checks import shape_of
from rankgrad.models.trunks import V1, V1_5, Trunk, form_of

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar")

# where training scripts put the weights beside epoch, optimizer and so on
NESTED = ("state_dict", "model", "model_state_dict", "teacher", "weights")

# names that hold the weights in the folder of a checkpoint, and in one that `rankgrad export` wrote
CHECKPOINT_WEIGHTS, EXPORTED_WEIGHTS = "weights.safetensors", "model.safetensors"

# the original Caffe ResNet-50, whose weights Keras and others ship, is of the first form; conversions keep these scales
CAFFE_SCALES = ("layer1.0.bn1.weight", (0.8936, 1.8299, 1.5251, 1.0469, 1.5622, 0.8609))
TORCHVISION_FILE = re.compile(r"resnet(50|101)-[0-9a-f]{8}\.pth")


@dataclass(frozen=True, eq=False)
class Weights:
    """Tensors by name, and where they come from.

    Attributes:
        state: the tensors.
        path: the file that was read.
        trunk: name of the trunk they were saved from, "" where nothing says so.
    """

    state: Mapping[str, Tensor]
    path: Path
    trunk: str = ""


def read_weights(path: Path) -> Weights:
    """Read a .safetensors or PyTorch file, or the best checkpoint of a run folder; nothing in it is executed."""
    file, trunk = _in_folder(path) if path.is_dir() else (path, "")
    if file.suffix not in SUFFIXES:
        raise ValueError(
            f"build_model: weights must be 'none', 'default', a file that ends in {', '.join(SUFFIXES)} or a run folder, "
            f"got {str(file)!r}"
        )
    if not file.is_file():
        raise FileNotFoundError(f"build_model: the weights file {str(file)!r} does not exist")
    content: Mapping[str, Any]
    if file.suffix == ".safetensors":
        content, recorded = _read_safetensors(file)
        trunk = trunk or recorded
    else:
        content = _read_pickle(file)
    state = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not state:
        raise ValueError(
            f"build_model: {file} holds no tensors by name, nor under one of {', '.join(NESTED)}; "
            "save model.state_dict() into it"
        )
    return Weights(state, file, trunk)


def _in_folder(folder: Path) -> tuple[Path, str]:
    """The weights file of a run, of its best checkpoint where there is one, or of an export; and the trunk's name."""
    if (folder / EXPORTED_WEIGHTS).is_file():
        return folder / EXPORTED_WEIGHTS, _json_entry(folder / "recipe.json", "settings", "trunk")
    for pointer in ("best", "last"):
        name = _json_entry(folder / "checkpoints" / f"{pointer}.json", "folder")
        # a pointer names a folder beside itself and nothing else
        if re.fullmatch(r"step-[0-9]+", name) and (folder / "checkpoints" / name / CHECKPOINT_WEIGHTS).is_file():
            return folder / "checkpoints" / name / CHECKPOINT_WEIGHTS, _json_entry(folder / "recipe.json", "settings", "trunk")
    raise ValueError(
        f"build_model: {folder} is a folder without weights: wanted is a run with a checkpoint, an export of one, or a file"
    )


def _json_entry(path: Path, *keys: str) -> str:
    """The text under `keys` in a JSON file, "" where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            content = content[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return content if isinstance(content, str) else ""


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, metadata.get("trunk", "")  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"build_model: {path} is not a complete safetensors file ({error}); copy it again") from error


def _read_pickle(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged pickle fails with whatever its bytes happen to ask for
        # torch's own message is not passed on: it advises to load the file without protection
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"it holds a {named[1]}" if named else "it is damaged or holds other objects"
        raise ValueError(
            f"build_model: {path} cannot be read as plain tensors: {found}. Ask its author for the state_dict() alone, "
            "best as .safetensors"
        ) from None
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return content if isinstance(content, Mapping) else {}


def load_weights(trunk: Trunk, head: nn.Module, weights: Weights) -> None:
    """Fill `trunk` from `weights`, and `head` where they are of a complete embedder with the same head.

    The trunk's names may stand behind any prefix ("module.", "backbone.", ...). Layers of a classifier are left out.
    """
    expected, state, source = trunk.body.state_dict(), weights.state, weights.path
    prefix = _prefix_of(expected, state)
    if prefix is None:
        raise ValueError(
            f"build_model: {source} holds no weights of {trunk.name}: its names are like {_first_three(state)}, "
            f"the trunk's like {_first_three(expected)}"
        )
    found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    # files older than the counter of batches lack it, and nothing needs it
    missing = [key for key in expected if key not in found and not key.endswith("num_batches_tracked")]
    foreign = [key for key in found if key not in expected and not _of_classifier(key, trunk.classifiers)]
    shapes = [
        f"{key} {shape_of(found[key])} instead of {shape_of(value)}"
        for key, value in expected.items()
        if key in found and found[key].shape != value.shape
    ]
    useless = [key for key in expected if key in found and not _is_usable(found[key])]
    kinds = (
        ("missing", missing),
        ("not in the trunk", foreign),
        ("of another shape", shapes),
        ("not finite real numbers", useless),
    )
    complaints = [f"{len(which)} {what} ({_first_three(which)})" for what, which in kinds if which]
    if complaints:
        raise ValueError(
            f"build_model: {source} does not fit trunk {trunk.name} of {len(expected)} tensors: {'; '.join(complaints)}"
        )
    _check_form(trunk, found, weights)
    trunk.body.load_state_dict({key: found.get(key, value) for key, value in expected.items()})
    if prefix.endswith("trunk."):
        outer = prefix.removesuffix("trunk.") + "head."
        _load_head(head, {k.removeprefix(outer): v for k, v in state.items() if k.startswith(outer)}, source=source)


def _check_form(trunk: Trunk, found: Mapping[str, Tensor], weights: Weights) -> None:
    """Weights of the two forms of ResNet-50 have the same names and shapes, and work badly in the other form."""
    if not trunk.form:
        return
    form, reason = _form_in(found, weights)
    place = {V1: "the first, 1 x 1 convolution", V1_5: "the 3 x 3 convolution"}
    other = {V1: "resnet50-v1", V1_5: "resnet50"}
    if not form:
        rival = V1 if trunk.form == V1_5 else V1_5
        warnings.warn(
            f"build_model: {weights.path} does not say which form of ResNet it belongs to. It is loaded as {trunk.form}, with "
            f"the stride of a stage in {place[trunk.form]}; weights from Caffe or Keras are {V1}, from torchvision or timm "
            f"{V1_5}. If it is {rival}, use --trunk {other[rival]}",
            stacklevel=5,
        )
    elif form != trunk.form:
        raise ValueError(
            f"build_model: {weights.path} holds weights of a ResNet {form}, with the stride of a stage in {place[form]} "
            f"({reason}), and trunk {trunk.name} is {trunk.form}: names and shapes agree, results would be poor. "
            f"Use --trunk {other[form]}"
        )


def _form_in(found: Mapping[str, Tensor], weights: Weights) -> tuple[str, str]:
    """The form of the weights and how it is known, "" where it is not."""
    if form_of(weights.trunk):
        return form_of(weights.trunk), f"it was saved from trunk {weights.trunk}"
    name, scales = CAFFE_SCALES
    start = found[name][: len(scales)].double() if name in found else torch.empty(0)
    if len(start) == len(scales) and torch.allclose(start, torch.tensor(scales).double(), atol=2e-3, rtol=0):
        return V1, "these are the weights of the original Caffe model, as Keras ships them"
    if TORCHVISION_FILE.fullmatch(weights.path.name):
        return V1_5, "its name is that of a download of torchvision"
    if any(key.endswith("num_batches_tracked") for key in found):
        return V1_5, "it was saved from a PyTorch model, which is usually of this form"
    return "", ""


def _is_usable(value: Tensor) -> bool:
    """Whether a network can compute with a tensor of a file: dense, real and finite."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_complex():
        return False
    return bool(torch.isfinite(value).all())


def _load_head(head: nn.Module, state: Mapping[str, Tensor], *, source: Path) -> None:
    if not state:
        return
    have, want = (sorted(f"{key} {shape_of(value)}" for key, value in side.items()) for side in (state, head.state_dict()))
    useless = [key for key, value in state.items() if not _is_usable(value)]
    if useless:
        raise ValueError(
            f"build_model: {source} has weights of the head that are not finite real numbers ({_first_three(useless)})"
        )
    if have == want:
        head.load_state_dict(dict(state))
    else:
        warnings.warn(
            f"build_model: only the trunk of {source} is loaded, the head starts anew: "
            f"the file has {', '.join(have)}, the model {', '.join(want) or 'nothing'}",
            stacklevel=4,
        )


def _prefix_of(expected: Iterable[str], state: Iterable[str]) -> str | None:
    """What stands before most of the expected names; None when none of them is there."""
    names = set(expected)
    found: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in names:
                found["".join(f"{part}." for part in parts[:start])] += 1
    # the shortest of equals
    return max(found, key=lambda prefix: (found[prefix], -len(prefix)), default=None)


def _of_classifier(key: str, classifiers: tuple[str, ...]) -> bool:
    return any(key.startswith(f"{name}.") for name in classifiers)


def _first_three(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
