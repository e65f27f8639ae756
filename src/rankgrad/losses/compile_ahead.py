"""Kernels that are compiled before a job starts, for a GPU that need not be there."""

import os
from collections.abc import Callable
from importlib.util import find_spec

from rankgrad._gpu import Gpu


def compile_kernels(call: Callable[[], object], gpu: str) -> int:
    """Compile the kernels that losses and `evaluate` launch in `call`, for a GPU that need not be there, into Triton's cache.

    The first training step on such a GPU loads them, if it finds the cache: `~/.triton/cache`, or the folder that
    `TRITON_CACHE_DIR` names. Kernels differ by loss, precision, dimension and the number of relevant items per query, in powers
    of 2, but not by batch size. They are those of the installed versions of rankgrad and Triton, and others are not loaded.

        def step():
            loss(torch.randn(256, 512, requires_grad=True), torch.arange(256) // 4)

        rg.compile_kernels(step, gpu="h100")

    Args:
        call: calls losses with embeddings or scores on the CPU, of the dimension and dtype that training will have, and under
            autocast if training uses it, and `rg.evaluate` with float32 embeddings if that is used. Nothing is computed:
            values, gradients and metrics have no meaning.
        gpu: a model, such as "h100" or "a100", or a compute capability, such as "9.0" or "sm_90".

    Returns:
        The number of kernels, those that were in the cache before included.
    """
    target = Gpu.named(gpu, caller="compile_kernels")
    if find_spec("triton") is None:
        raise ValueError("compile_kernels: triton is not installed, which compiles the kernels")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("compile_kernels: TRITON_INTERPRET=1 is set, with which Triton compiles nothing; unset it")
    from rankgrad.ops.triton.absent_gpu import compiled_for

    return len(compiled_for(target, call))
