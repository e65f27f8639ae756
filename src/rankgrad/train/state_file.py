"""The state of a run as one safetensors file: tensors, and everything else as JSON in its header.

Nothing is pickled, so reading a state never runs code. Values come back exactly: types, dtypes, memory layout.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# in the JSON of a state, a dict with one of these keys stands for something that JSON does not have
_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """The content of a state file."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    encoded = _encode(state, tensors, "state")
    return save(tensors, metadata={"state": json.dumps(encoded)})


def read_state(path: Path) -> Any:
    """What `state_bytes` was given; raises ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            encoded = json.loads((file.metadata() or {})["state"])
            return _decode(encoded, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a mapping)
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not the state of a run ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from error


def read_pickled_state(path: Path) -> Any:
    """A state as it was written before: by torch.save. Only tensors and plain values are read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a forged pickle fails with whatever its bytes ask for; torch's advice is to run it
        raise ValueError(f"{path} is not the state of a run ({type(error).__name__})") from error


def _encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """`value` as JSON; its tensors are put into `tensors`."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        # moments in channels_last must come back so: fused optimizers want the layout of the parameter
        return {_TENSOR: name} if value.is_contiguous() else {_TENSOR: name, "stride": list(value.stride())}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not {_TENSOR, _TUPLE, _ITEMS} & value.keys():
            return {key: _encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [_encode([key, item], tensors, f"{where}.{key}") for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: _encode(list(value), tensors, where)}
    if isinstance(value, list):
        return [_encode(item, tensors, where) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: use tensors, numbers, strings, lists, tuples or "
        "dicts"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        tensor = tensors[value[_TENSOR]]
        return _with_stride(tensor, value["stride"]) if "stride" in value else tensor
    if _TUPLE in value:
        return tuple(_decode(value[_TUPLE], tensors))
    if _ITEMS in value:
        return dict(_decode(value[_ITEMS], tensors))
    return {key: _decode(item, tensors) for key, item in value.items()}


def _with_stride(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """The same values, laid out by `stride` if that is a permutation of the dimensions."""
    order = sorted(range(tensor.ndim), key=lambda dim: (-stride[dim], dim))
    permuted = torch.empty([tensor.shape[dim] for dim in order], dtype=tensor.dtype)
    return permuted.permute([order.index(dim) for dim in range(tensor.ndim)]).copy_(tensor)
