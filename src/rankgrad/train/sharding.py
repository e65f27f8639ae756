"""A model on several processes: copies that average their gradients (DDP), or one that is divided among them (FSDP2)."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.train.gradient_check import live_batch_norms
from rankgrad.train.processes import Processes

Parallel: TypeAlias = Literal["ddp", "fsdp"]
PARALLELS = ("ddp", "fsdp")
Groups: TypeAlias = Sequence[dict[str, Any]]


def spread(model: nn.Module, groups: Groups, parallel: Parallel, processes: Processes) -> tuple[nn.Module, Groups]:
    """What is trained in place of `model`, and its parameter groups.

    With one process, and for a model that is wrapped already, that is `model`. DDP shares the parameters of `model`; FSDP2
    divides those of a copy, from which `fetch` brings them back.
    """
    if processes.size == 1 or exchanges(model):
        return model, groups
    if parallel == "ddp":
        devices = [processes.device] if processes.device.type == "cuda" else None
        wrapper: Any = nn.parallel.DistributedDataParallel
        # every process has the same buffers, as what would change them is refused; the option has got another name
        known = inspect.signature(wrapper).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return wrapper(model, device_ids=devices, **{option: False}), groups
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    divided = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in divided.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 takes no channels_last
        for tensor in (*divided.parameters(), *divided.buffers()):
            dist.broadcast(tensor, 0)  # as DDP does: all begin with the weights of the first
    fully_shard(divided, mesh=init_device_mesh(processes.device.type, (processes.size,)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(divided.named_parameters())
    return divided, [{**group, "params": [_renamed(p, names, parameters) for p in group["params"]]} for group in groups]


def _renamed(parameter: nn.Parameter, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    return parameters[names[id(parameter)]] if id(parameter) in names else parameter


def fetch(model: nn.Module, trained: nn.Module) -> None:
    """Brings the weights of a divided copy back to `model`; all processes must call it."""
    if is_divided(trained) and trained is not model:
        model.load_state_dict(whole(trained.state_dict()))


def give(model: nn.Module, trained: nn.Module) -> None:
    """The other way round, after `model` has got weights from a checkpoint."""
    if is_divided(trained) and trained is not model:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(trained, model.state_dict(), options=StateDictOptions(full_state_dict=True))


def exchanges(model: nn.Module) -> bool:
    """Whether a model exchanges gradients with other processes."""
    return hasattr(model, "no_sync") or is_divided(model)


def is_divided(model: nn.Module) -> bool:
    """Whether a model is FSDP2's, which needs the same passes on all processes."""
    return hasattr(model, "set_requires_gradient_sync")


def whole(tree: Any) -> Any:
    """Nested dicts and lists with every tensor that is divided among processes put together; all must call it."""
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole(value) for value in tree)
    return tree.full_tensor() if isinstance(tree, Tensor) and hasattr(tree, "full_tensor") else tree


def divided_like(state: dict[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state for these parameters, divided where they are."""
    if not any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return state
    from torch.distributed.tensor import DTensor, distribute_tensor

    def like(value: Any, parameter: nn.Parameter) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)

    moments = {
        index: {key: like(value, parameters[index]) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}


def refuse_local_statistics(model: nn.Module) -> None:
    """Batch normalisation over the images of one process is not that over the batch."""
    synchronised = {name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    names = [name for name in live_batch_norms(model) if name not in synchronised]
    if names:
        raise ValueError(
            f"fit: with several processes batch normalisation must not use the statistics of one, but {names[0]} would "
            f"(of {len(names)}). Freeze it (batch_norm='frozen' in a recipe), or convert the model to SyncBatchNorm on GPUs"
        )
