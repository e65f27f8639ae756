"""A model and its batches on several processes: replicas that average gradients (DDP) or sharded parameters (FSDP2)."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad.train.batch_tree import select_rows
from rankgrad.train.gradient_check import live_batch_norms
from rankgrad.train.processes import Processes

if TYPE_CHECKING:
    from rankgrad.train.loop import Batches

Parallel: TypeAlias = Literal["ddp", "fsdp"]
ParamGroups: TypeAlias = Sequence[dict[str, Any]]


def wrap_model(
    model: nn.Module, groups: ParamGroups, parallel: Parallel, processes: Processes
) -> tuple[nn.Module, ParamGroups]:
    """Wraps `model` for several processes; returns it with its parameter groups.

    With one process, and for a model that is wrapped already, both are returned as they are. DDP shares the parameters of
    `model`; FSDP2 shards those of a copy, from which `gather_weights` brings them back.
    """
    if processes.size == 1 or is_distributed(model):
        return model, groups
    if parallel == "ddp":
        devices = [processes.device] if processes.device.type == "cuda" else None
        wrapper: Any = nn.parallel.DistributedDataParallel
        # buffers are equal on all processes, since whatever would change them is refused; the option was renamed
        known = inspect.signature(wrapper).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return wrapper(model, device_ids=devices, **{option: False}), groups
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 does not take channels_last
        for tensor in (*sharded.parameters(), *sharded.buffers()):
            dist.broadcast(tensor, 0)  # as DDP does: all start from the weights of the first process
    fully_shard(sharded, mesh=init_device_mesh(processes.device.type, (processes.size,)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(sharded.named_parameters())
    return sharded, [{**group, "params": [_renamed(p, names, parameters) for p in group["params"]]} for group in groups]


def _renamed(parameter: nn.Parameter, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    return parameters[names[id(parameter)]] if id(parameter) in names else parameter


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def gather_weights(model: nn.Module, trained: nn.Module) -> None:
    """Copies the weights of a sharded copy back into `model`; a collective call."""
    if is_sharded(trained) and trained is not model:
        model.load_state_dict(full_tensors(trained.state_dict()))


def load_weights(model: nn.Module, trained: nn.Module) -> None:
    """Copies the weights of `model` into its sharded copy, after a checkpoint was loaded; a collective call."""
    if is_sharded(trained) and trained is not model:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(trained, model.state_dict(), options=StateDictOptions(full_state_dict=True))


def is_distributed(model: nn.Module) -> bool:
    """Whether a model synchronises gradients with other processes."""
    return hasattr(model, "no_sync") or is_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is wrapped in FSDP2, which needs the same passes on all processes."""
    return hasattr(model, "set_requires_gradient_sync")


def full_tensors(tree: Any) -> Any:
    """Nested dicts and lists with every sharded tensor gathered; a collective call."""
    if isinstance(tree, Mapping):
        return {key: full_tensors(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(full_tensors(value) for value in tree)
    return tree.full_tensor() if isinstance(tree, Tensor) and hasattr(tree, "full_tensor") else tree


def shard_like(state: dict[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state, sharded as `parameters` are."""
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


def check_batch_norm_is_synchronised(model: nn.Module) -> None:
    """Refuses batch normalisation that would use the statistics of one process instead of the whole batch."""
    synchronised = {name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    names = [name for name in live_batch_norms(model) if name not in synchronised]
    if names:
        raise ValueError(
            f"fit: {names[0]} (and {len(names) - 1} more) would normalise with the statistics of one process. With several "
            "processes, freeze batch normalisation (--batch-norm frozen) or convert the model to SyncBatchNorm on GPUs"
        )


class ShardedBatches:
    """This process's shard of batches that all processes iterate alike.

    `ImageBatches` does this without decoding the images of the other processes; use this for batches of your own.
    """

    def __init__(self, batches: "Batches", processes: Processes) -> None:
        self.batches, self.processes = batches, processes

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, Any, Tensor]]:
        for step, indices, images, labels in self.batches.iterate(start):
            shard = self.processes.shard(len(labels))
            yield step, indices[shard], select_rows(images, shard), labels[shard]
