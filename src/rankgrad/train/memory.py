"""How much memory there is, and how much a graph holds."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken on `device`; None where nothing tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
    limits = [left for left in (available, _left_in_container()) if left is not None]
    return min(limits, default=None)


def _left_in_container() -> int | None:
    """A container is killed at its own limit, whatever the machine still has."""
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdigit() else None


class SavedBytes:
    """Bytes of the distinct storages that a graph holds, other than those that are there without it."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        self.total = 0
        self._seen = {_storage(tensor).data_ptr() for tensor in there}

    def note(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Where the numbers are; of a tensor that is divided among processes, this process's."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


@contextmanager
def counting_saved_bytes(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Counts what is saved for backward inside the context besides model and inputs, on any device."""
    counter = SavedBytes((*model.parameters(), *model.buffers(), *inputs))
    with torch.autograd.graph.saved_tensors_hooks(counter.note, lambda tensor: tensor):
        yield counter
