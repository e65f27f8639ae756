"""The GPU that kernels are chosen and compiled for: that of a tensor, or one that is elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from rankgrad._messages import did_you_mean

# KiB of shared memory that a thread block can have, by compute capability (CUDA C++ Programming Guide)
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
CAPABILITIES = {
    "a100": (8, 0),
    "a10": (8, 6),
    "a40": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "rtx5090": (12, 0),
}


@dataclass(frozen=True)
class Gpu:
    """What the choice of kernels depends on."""

    capability: tuple[int, int]
    shared_memory: int  # bytes that a thread block can have

    @classmethod
    def named(cls, name: str, *, caller: str) -> "Gpu":
        """From a model ("h100") or its compute capability ("9.0", "sm_90")."""
        known = {**CAPABILITIES, **{f"{major}.{minor}": (major, minor) for major, minor in SHARED_KIB}}
        known |= {f"sm_{major}{minor}": (major, minor) for major, minor in SHARED_KIB}
        word = name.strip().lower().replace(" ", "")
        if word not in known:
            raise ValueError(f"{caller}: there is no GPU {name!r} in the list: {did_you_mean(word, known)}")
        return cls(known[word], SHARED_KIB[known[word]] * 1024)

    def __str__(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


_elsewhere: ContextVar[Gpu | None] = ContextVar("rankgrad_gpu", default=None)


@contextmanager
def as_if_on(gpu: Gpu) -> Iterator[None]:
    """Tensors on a CPU are taken for tensors on this GPU, by this thread. Kernels can be compiled then, but not run."""
    token = _elsewhere.set(gpu)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def has_gpu(device: torch.device) -> bool:
    """Whether kernels for tensors on `device` are compiled, and not run by Triton's interpreter."""
    return device.type == "cuda" or _elsewhere.get() is not None


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that kernels for tensors on `device` are compiled for; None where they are not compiled."""
    if device.type != "cuda":
        return _elsewhere.get()
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.shared_memory_per_block_optin)
