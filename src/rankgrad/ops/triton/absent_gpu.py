"""Triton compiles for a GPU that is not there, as it would if it were: into the same cache, under the same names."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from rankgrad._gpu import Gpu, as_if_on
from rankgrad.ops.triton.first_call import launches_of, longest_first


def compiled_for(gpu: Gpu, call: Callable[[], object], pattern: str = "") -> list[Any]:
    """The different kernels that `call` launches for tensors on a CPU, as Triton has compiled them.

    Only those in whose names the regular expression `pattern` is found.
    """
    with as_if_on(gpu):
        launches = longest_first(launches_of(call, pattern))
    at_once = getattr(triton, "AsyncCompileMode", nullcontext)  # came with Triton 3.5
    with ThreadPoolExecutor(os.cpu_count()) as compilers, _driver_of(gpu):
        with at_once(compilers):
            kernels = [launch() for launch in launches]
        made = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in kernels]
    return list({kernel.hash: kernel for kernel in made}.values())


class AbsentDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_current_device(self) -> str:
        # under its number Triton keeps what it has compiled for a GPU of this process
        return f"absent {self.gpu}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        major, minor = self.gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)


@contextmanager
def _driver_of(gpu: Gpu) -> Iterator[None]:
    """For all threads of the process, so that nothing may be launched meanwhile."""
    drivers = triton.runtime.driver
    # Triton looks for a GPU only when it is asked for one, and without a GPU that is an error: so it is not asked here
    kept = vars(drivers)
    before = kept["_active"] if "_active" in kept else kept["active"]  # so called before Triton 3.4
    drivers.set_active(AbsentDriver(gpu))
    try:
        yield
    finally:
        drivers.set_active(before)
