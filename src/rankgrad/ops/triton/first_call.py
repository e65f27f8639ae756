"""The first call of a loss compiles its kernels in parallel, not one after another as they are launched.

A dry run of the call tells which kernels it will launch. Triton's passes, LLVM and ptxas release Python's lock, so threads
are enough. Triton keeps compiled kernels in its cache on disk, by their source and the versions of Triton and ptxas; a later
process only loads them.
"""

import contextvars
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad.ops.autograd import Objective, Ranks, own_derivative
from rankgrad.ops.dry_run import dry_run

_compiled: set[Hashable] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class StandIn:
    """In place of an objective in a dry run, where ranks are arbitrary numbers: a sum of all that it may depend on."""

    graded: bool
    derivative: Callable[..., tuple[Tensor, ...] | None] | None  # launches kernels, if there is one

    @classmethod
    def of(cls, objective: Objective) -> "StandIn":
        return cls(getattr(objective, "graded", False), own_derivative(objective))

    def __call__(self, ranks: Ranks) -> Tensor:
        fields = [ranks.rank, ranks.positive_rank, ranks.mass, ranks.gain]
        if ranks.graded_rank is not None:
            fields.append(ranks.graded_rank)
        return torch.stack([values.sum(dim=1) for values in fields]).sum(dim=0)

    def with_gradient(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        return None if self.derivative is None else self.derivative(*arguments)


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
            # a context of its own: a mode that is active outside is not that of these kernels, and theirs ends with it
            contextvars.Context().run(_compile, call, device)
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
    begun: list[Future[Any]] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        bare = {name: Address(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        launches.append(partial(kernel.warmup, grid=grid, **bare))
        if not begun:  # Triton prepares itself meanwhile
            begun.append(pool.submit(on_device, launches[0]))
            begun[0].add_done_callback(load)  # by the thread that has compiled it

    def on_device(function: Callable[[], Any]) -> Any:
        with torch.cuda.device(device):
            return function()

    def load(compiled: Future[Any]) -> None:
        with suppress(Exception):  # reported by the compiler, or when the kernel is launched
            on_device(lambda: compiled.result().run)

    with torch.cuda.device(device), ThreadPoolExecutor() as pool:
        with suppress(Exception), dry_run(note):  # whatever goes wrong here goes wrong again in the call, which says so
            call()
        if not begun:
            return
        wait(begun)
        # those with the most arguments take longest
        launches.sort(key=lambda launch: -len(launch.keywords))
        with triton.AsyncCompileMode(pool):  # on exit, raises the errors of the compiler
            for launch in launches:
                with suppress(Exception):
                    kernel = launch()
                    if isinstance(future := getattr(kernel, "future", None), Future):
                        future.add_done_callback(load)
