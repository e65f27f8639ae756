"""Ordered work in threads: results computed before they are asked for, and given in the order of their items."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rankgrad._messages import Progress

S = TypeVar("S")
T = TypeVar("T")


def prefetch(function: Callable[[S], T], items: Iterable[S], *, threads: int, ahead: int) -> Iterator[tuple[S, T]]:
    """Yield `(item, function(item))` in the order of `items`.

    Threads are enough for images on a few cores: Pillow releases the interpreter lock while it decodes and resizes. With more
    cores threads wait for the lock; see `decode_processes`.

    Args:
        function: called in a thread; an exception is raised when its item is due.
        items: consumed in the calling thread, `ahead` items before they are due.
        threads: number of threads.
        ahead: results computed or in progress beyond the one that is due.
    """
    pending: deque[tuple[S, Future[T]]] = deque()

    def oldest() -> tuple[S, T]:
        item, future = pending.popleft()
        return item, future.result()

    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            pending.append((item, pool.submit(function, item)))
            if len(pending) > ahead:
                yield oldest()
        while pending:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)


def default_threads() -> int:
    """One per core that this process may use, 16 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def with_progress(results: Iterable[T], total: int, name: str, shown: bool) -> Iterator[T]:
    """`results`, with the progress through `total` images on standard error."""
    with Progress(total, name, unit="images", shown=shown, delay=2) as progress:
        for result in results:
            progress.advance()
            yield result
