"""The first call of a loss compiles its kernels at the same time, and not one after the other as they are launched.

Its launches are known before it runs: by a rehearsal of the same call. Triton's passes, LLVM and ptxas run without Python's
lock, so that threads are enough. What is compiled lies in Triton's cache, on disk, under the source of the kernel and the
versions of Triton and ptxas; a later process only loads it.
"""

import contextvars
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.ops.autograd import Objective, Ranks
from rankgrad.ops.rehearsal import rehearsal

_compiled: set[Hashable] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class StandIn:
    """In place of an objective in a rehearsal, where ranks are arbitrary numbers: a sum of all that it may depend on."""

    graded: bool

    @classmethod
    def of(cls, objective: Objective) -> "StandIn":
        return cls(getattr(objective, "graded", False))

    def __call__(self, ranks: Ranks) -> Tensor:
        fields = [ranks.rank, ranks.positive_rank, ranks.mass, ranks.gain]
        if ranks.graded_rank is not None:
            fields.append(ranks.graded_rank)
        return torch.stack([values.sum(dim=1) for values in fields]).sum(dim=0)


def compile_together(kinds: frozenset[Hashable], call: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `call` will launch on a GPU, once for all calls of these kinds in this process.

    Without a GPU, with a Triton before 3.5, and while a CUDA graph is captured, kernels are compiled when they are launched.
    """
    kinds = frozenset((device, kind) for kind in kinds)
    if kinds <= _compiled or device.type != "cuda" or not hasattr(triton, "AsyncCompileMode"):
        return
    if torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if not kinds <= _compiled:
            # a context of its own: Triton's mode, too, ends with it whatever happens
            contextvars.copy_context().run(_compile, call, device)
            _compiled.update(kinds)


class Address:
    """All that Triton asks of a tensor when it compiles; the tensor itself need not be kept."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.address, self.bytes = tensor.dtype, tensor.data_ptr(), tensor.untyped_storage().size()

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.bytes


def _compile(call: Callable[[], object], device: torch.device) -> None:
    launches: list[partial[Any]] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        bare = {name: Address(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        launches.append(partial(kernel.warmup, grid=grid, **bare))
        if len(launches) == 1:  # Triton prepares itself meanwhile
            begun.append(pool.submit(on_device, launches[0]))

    def on_device(function: Callable[[], Any]) -> Any:
        with torch.cuda.device(device):
            return function()

    def load(kernel: Any) -> None:
        on_device(lambda: (kernel.result() if hasattr(type(kernel), "result") else kernel).run)

    begun: list[Future[Any]] = []
    # whatever goes wrong here goes wrong again in the call, which says so
    with suppress(Exception), torch.cuda.device(device), ThreadPoolExecutor() as pool:
        with rehearsal(note):
            call()
        begun[0].result()
        # those of the most arguments take longest
        launches.sort(key=lambda launch: -len(launch.keywords))
        with triton.AsyncCompileMode(pool):
            found = [launch() for launch in launches]
        list(pool.map(load, found))
