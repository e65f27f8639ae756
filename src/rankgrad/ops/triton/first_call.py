"""The first call of a loss compiles its kernels in parallel, not one after another as they are launched.

A dry run of the call tells which kernels it will launch. Triton's passes, LLVM and ptxas release Python's lock, so threads
are enough. What Triton does once in a process, and the C functions that launch kernels, are made beside. Triton keeps all that
it compiles in its cache on disk, by source and the versions of Triton and ptxas; a later process only loads it.
"""

import contextvars
import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from rankgrad._dry_run import dry_run
from rankgrad.ops.autograd import Objective, Ranks, own_derivative

_compiled: set[Hashable] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class StandIn:
    """In place of an objective in a dry run, where ranks are arbitrary numbers: a sum of all that it may depend on."""

    graded: bool
    derivative: Callable[..., tuple[Tensor, ...] | None] | None  # launches kernels, if there is one
    kind: Hashable  # equal for objectives with the same kernels

    @classmethod
    def of(cls, objective: Objective) -> "StandIn":
        graded, derivative = getattr(objective, "graded", False), own_derivative(objective)
        return cls(graded, derivative, (graded, None if derivative is None else type(objective)))

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


def launches_of(call: Callable[[], object], pattern: str = "") -> list[partial[Any]]:
    """What compiles the kernels that `call` launches, found by a dry run; those whose names match a regular expression."""
    launches: list[partial[Any]] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        if re.search(pattern, kernel.__name__):
            bare = {name: Address(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
            launches.append(partial(kernel.warmup, grid=grid, **bare))

    with dry_run(note):
        call()
    return launches


def _compile(call: Callable[[], object], device: torch.device) -> None:
    launches: list[partial[Any]] = []

    def on_device(function: Callable[[], Any]) -> Any:
        with torch.cuda.device(device):
            return function()

    def load(launcher: Future[Any] | None, compiled: Future[Any]) -> None:
        if launcher is not None:
            wait([launcher])
        with suppress(Exception):  # reported by the compiler, or when the kernel is launched
            on_device(lambda: compiled.result().run)

    def load_by(builders: ThreadPoolExecutor, launcher: Future[Any] | None, compiled: Future[Any]) -> None:
        builders.submit(load, launcher, compiled)

    with (
        torch.cuda.device(device),
        _short_turns(),
        ThreadPoolExecutor(BUILDERS) as builders,
        ThreadPoolExecutor(COMPILERS) as compilers,
    ):
        begun = [compilers.submit(on_device, prepare) for prepare in PREPARATIONS]
        with suppress(Exception):  # whatever goes wrong here goes wrong again in the call, which says so
            launches = launches_of(call)
        wait(begun)
        launchers = Launchers(lambda build: builders.submit(on_device, build))
        with launchers, triton.AsyncCompileMode(compilers):  # on exit, raises the errors of the compiler
            for launch in longest_first(launches):
                with suppress(Exception):
                    kernel = launch()
                    if isinstance(future := getattr(kernel, "future", None), Future):
                        future.add_done_callback(partial(load_by, builders, launchers.last))


# Kernels that are compiled at the same time. Of a dozen, two or three take as long as all others together, and Python's lock,
# under which each begins, would hold these up.
COMPILERS = 5
BUILDERS = 2


@contextmanager
def _short_turns() -> Iterator[None]:
    """Threads that work without Python's lock get it back at once, and not after the 5 ms that another may keep it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def longest_first(launches: list[partial[Any]]) -> list[partial[Any]]:
    """Those that take longest to compile first: each kernel once, then its other variants; products, then many arguments."""
    seen: dict[Any, Iterator[int]] = {}
    numbered = [(next(seen.setdefault(launch.func, count())), launch) for launch in launches]
    numbered.sort(key=lambda pair: (pair[0], "BK" not in pair[1].keywords, -len(pair[1].keywords)))
    return [launch for _, launch in numbered]


def _hash_triton() -> None:
    import_module("triton.runtime.cache").triton_key()


def _build_driver() -> None:
    triton.runtime.driver.active.get_current_target()


def _import_descriptors() -> None:
    import_module("triton.experimental.gluon.nvidia.hopper")


# what Triton does one after the other when it compiles for the first time in a process; the longest first
PREPARATIONS = _hash_triton, _build_driver, _import_descriptors


class Launchers:
    """A context in which the launcher of a kernel is built while the kernel is compiled, and not after it.

    Triton before 3.7 has a C function for the types of a kernel's arguments and nothing else, and finds it in its cache.

    Args:
        submit: runs a function in another thread.

    Attributes:
        last: that of the kernel that Triton was last asked to compile.
    """

    last: Future[Any] | None = None

    def __init__(self, submit: Callable[[Callable[[], object]], Future[Any]]) -> None:
        self.submit = submit
        self._built: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> None:
        self._hook = triton.knobs.runtime.jit_cache_hook
        if self._hook is None:
            triton.knobs.runtime.jit_cache_hook = self._begin

    def __exit__(self, *raised: object) -> None:
        triton.knobs.runtime.jit_cache_hook = self._hook

    def _begin(self, *, key: Hashable, fn: Any, compile: Mapping[str, Any], **_: Any) -> None:  # noqa: A002  Triton's name
        kernel = id(fn.jit_function), key
        if kernel not in self._built:
            types = compile["signature"]
            source = SimpleNamespace(fn=fn.jit_function, signature=types, constants=compile["constants"])
            # of a descriptor a launcher is handed what the GPU reads; what else it says of one is not for the C function
            descriptors: list[dict[str, Any]] = [{} for type_ in types.values() if str(type_).startswith("tensordesc")]
            known = SimpleNamespace(tensordesc_meta=descriptors)
            # it ends with an error, since what else a launcher knows of its kernel is not there yet
            self._built[kernel] = self.submit(lambda: triton.runtime.driver.active.launcher_cls(source, known))
        self.last = self._built[kernel]
