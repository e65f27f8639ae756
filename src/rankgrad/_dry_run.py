"""Calls whose kernels are not launched but handed to a function, which may list them or compile them.

In a dry run the results of kernels are whatever was in memory. So nothing may be indexed by them, and no function of the
user is called with them. A function with a backward pass goes through it at once: the gradient will not be asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# a kernel as Triton made it, its grid, and its arguments by name
Launch = Callable[[Any, tuple[int, ...], Mapping[str, Any]], None]

# of this thread: others launch meanwhile
_instead: ContextVar[Launch | None] = ContextVar("rankgrad_launch", default=None)


@contextmanager
def dry_run(instead: Launch) -> Iterator[None]:
    """Calls `instead` where a kernel would be launched."""
    token = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(token)


def launch_instead() -> Launch | None:
    """What the dry run under way does with a launch; None where there is none."""
    return _instead.get()
