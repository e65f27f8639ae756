"""Kernels as the rest of the package launches them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton

from rankgrad._dry_run import launch_instead

# Products are fused with sums unless a launch says otherwise: what Triton does where it is not told is about to change.
DEFAULTS = {"enable_fp_fusion": True}


class Kernel:
    """A function compiled by Triton, launched as `kernel[grid](name=value, ...)`; in a dry run it is not run."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        self.jit = triton.jit(function, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        instead = launch_instead()
        if instead is not None:
            return lambda **arguments: instead(self.jit, grid, {**DEFAULTS, **arguments})
        return partial(self.jit[grid], **DEFAULTS)


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator in place of `triton.jit`, with its options, for what is launched and not called by another kernel."""
    return partial(Kernel, **options)
