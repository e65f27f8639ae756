"""Memory of a device, autocast, which GPU is current and runs Triton's kernels, what disturbs a capture and what it leaves."""

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from rankgrad._gpu import gpu_of

P = ParamSpec("P")
T = TypeVar("T")

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# asked once: older torch.compile cannot trace the question
AUTOCAST_DEVICES = {kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(kind)}
# Ampere: what Triton supports and the kernels are compiled for in `benchmarks.other_gpus`
LEAST_CAPABILITY = (8, 0)


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes that this process can still allocate on `device`; None where the system does not tell.

    On a GPU that includes what torch's allocator holds unused, on a CPU the limit of the container counts, too.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [left for left in (_available_on_machine(), _available_in_container()) if left is not None]
    return min(limits, default=None)


def memory_of(device: torch.device) -> float:
    """Bytes that a GPU has; without limit for other devices."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else math.inf


def _available_on_machine() -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _available_in_container() -> int | None:
    """A container is killed at its own limit, whatever the machine still has."""
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return max(int(limit) - int(used), 0) if limit != "max" else None
    except (OSError, ValueError):
        return None


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on tensors on `device`, None where they can: on a CPU only in the interpreter."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if (gpu := gpu_of(device)) is None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else f"the tensors are on {device} and TRITON_INTERPRET=1 is not set"
    if gpu.capability < LEAST_CAPABILITY:
        wanted, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, gpu.capability))
        return f"the kernels need compute capability {wanted}, and this GPU has {found}"
    return None


def on_its_device(function: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """Run a function with the GPU of its first argument as the current one, where Triton launches and graphs are captured."""

    @wraps(function)
    def wrapper(tensor: Tensor, /, *args: P.args, **options: P.kwargs) -> T:
        with torch.cuda.device_of(tensor):  # nothing for a tensor on a CPU
            return function(tensor, *args, **options)

    return wrapper


def autocast_disabled(device: torch.device) -> Any:
    """A context in which autocast leaves operations on `device` in their own precision: ranks of 16-bit scores lose order."""
    if device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def release_memory(device: torch.device) -> None:
    """Return unused memory of a GPU to the system, with the cuBLAS workspaces that torch keeps for every stream it has seen."""
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001  torch has no public name for it
        torch.cuda.empty_cache()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Garbage that holds events or graphs must not be collected during a capture, which it would end."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def forget_failed_capture(device: torch.device) -> None:
    """Lets torch draw random numbers again: its generator believes that the capture still goes on, and refuses."""
    torch.cuda.synchronize(device)
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())
