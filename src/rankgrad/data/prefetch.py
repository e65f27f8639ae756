"""Ordered work in threads: results computed before they are asked for, and given in the order of their items."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def prefetch(function: Callable[[S], T], items: Iterable[S], *, threads: int, ahead: int) -> Iterator[tuple[S, T]]:
    """Yield `(item, function(item))` in the order of `items`.

    Threads are enough for images: Pillow releases the interpreter lock while it decodes and resizes.

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


def with_progress(results: Iterable[T], total: int, what: str, progress: bool) -> Iterator[T]:
    """`results`, with a bar on a terminal and an occasional line elsewhere, if they take more than two seconds."""
    if not progress:
        yield from results
    elif sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(results, desc=what, total=total, unit=" images", delay=2, smoothing=0.05)
    else:
        began = time.monotonic()
        due = began + 2
        for count, result in enumerate(results, 1):
            now = time.monotonic()
            if now >= due and count < total:
                left = (total - count) * (now - began) / count
                print(f"{what}: {count:,} of {total:,} images, {left:.0f} s left", file=sys.stderr, flush=True)
                due = now + 15
            yield result
