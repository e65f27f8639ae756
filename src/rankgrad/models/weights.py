"""Weights from a file: what it holds, under which names, and whether they are those of the model."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad._checks import shape_of
from rankgrad.models.trunks import Trunk

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar")

# where training scripts put the weights beside epoch, optimizer and so on
NESTED = ("state_dict", "model", "model_state_dict", "teacher", "weights")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Names and tensors of a .safetensors or PyTorch file; nothing in it is executed."""
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"build_model: weights must be 'none', 'default' or a file that ends in {', '.join(SUFFIXES)}, got {str(path)!r}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"build_model: there is no file of weights {str(path)!r}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    state = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not state:
        raise ValueError(
            f"build_model: {path} holds no tensors by name, nor under one of {', '.join(NESTED)}; "
            "save model.state_dict() into it"
        )
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"build_model: {path} is not a whole safetensors file ({error}); copy it again") from error


def _read_pickle(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle fails with whatever its bytes happen to ask for
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"build_model: {path} cannot be read as plain tensors ({first_line}); it is damaged or holds other objects too: "
            "load it where you trust it and save its state_dict() alone"
        ) from error
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return content if isinstance(content, Mapping) else {}


def load_weights(trunk: Trunk, head: nn.Module, state: Mapping[str, Tensor], *, source: str) -> None:
    """Fill `trunk` from `state`, and `head` where `state` is a whole embedder with the same head.

    The trunk's names may stand behind any prefix ("module.", "backbone.", ...). Layers of a classifier are left out.
    """
    expected = trunk.body.state_dict()
    prefix = _prefix_of(expected, state)
    if prefix is None:
        raise ValueError(
            f"build_model: {source} holds no weights of {trunk.name}: its names are like {_some(state)}, "
            f"the trunk's like {_some(expected)}"
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
        ("not of finite real numbers", useless),
    )
    complaints = [f"{len(which)} {what} ({_some(which)})" for what, which in kinds if which]
    if complaints:
        raise ValueError(
            f"build_model: {source} does not fit trunk {trunk.name} of {len(expected)} tensors: {'; '.join(complaints)}"
        )
    trunk.body.load_state_dict({key: found.get(key, value) for key, value in expected.items()})
    if prefix.endswith("trunk."):
        outer = prefix.removesuffix("trunk.") + "head."
        _load_head(head, {k.removeprefix(outer): v for k, v in state.items() if k.startswith(outer)}, source=source)


def _is_usable(value: Tensor) -> bool:
    """Whether a tensor of a file holds what a network can compute with: numbers, all of them there, real and finite."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_complex():
        return False
    return bool(torch.isfinite(value).all())


def _load_head(head: nn.Module, state: Mapping[str, Tensor], *, source: str) -> None:
    if not state:
        return
    have, want = (sorted(f"{key} {shape_of(value)}" for key, value in side.items()) for side in (state, head.state_dict()))
    useless = [key for key, value in state.items() if not _is_usable(value)]
    if useless:
        raise ValueError(f"build_model: {source} has weights of the head that are not finite real numbers ({_some(useless)})")
    if have == want:
        head.load_state_dict(dict(state))
    else:
        warnings.warn(
            f"build_model: of {source} only the trunk is taken, the head is new: "
            f"the file has {', '.join(have)}, the model {', '.join(want) or 'nothing'}",
            stacklevel=4,
        )


def _prefix_of(expected: Iterable[str], state: Iterable[str]) -> str | None:
    """What stands before most of the expected names; None when not one of them is there."""
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


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
