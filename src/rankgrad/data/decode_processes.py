"""Images decoded by several processes into one file, each of them written where it belongs.

Threads of one process hand Python's lock to each other a dozen times for an image, which with more than a few cores takes
longer than the work that is done without it.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from rankgrad._messages import printable
from rankgrad.data.image_files import ImageDecoder, UnreadableImageError
from rankgrad.data.prefetch import default_threads
from rankgrad.data.worker_process import init_worker

Measured: TypeAlias = tuple[int, int] | UnreadableImageError
"""Height and width of a decoded image, or why there is none."""
Place: TypeAlias = tuple[int, int, tuple[int, int]]
"""A row of the table, its first byte in the file, and its height and width."""

S = TypeVar("S")
T = TypeVar("T")

# from so many on processes are worth their start
LEAST_PROCESSES, LEAST_IMAGES = 4, 1000
# images that a process decodes, and headers that it reads, before it asks for more
IMAGES_AT_ONCE, HEADERS_AT_ONCE = 32, 256
# signals that end a process
ENDING = (signal.SIGINT, signal.SIGTERM)


def places_of(shapes: Sequence[Measured]) -> list[Place]:
    """Images one after the other, but for those that cannot be read."""
    places, begin = [], 0
    for row, shape in enumerate(shapes):
        if not isinstance(shape, UnreadableImageError):
            places.append((row, begin, shape))
            begin += 3 * shape[0] * shape[1]
    return places


def close_gaps(path: Path, places: Sequence[Place], kept: set[int]) -> None:
    """Move the images of the rows `kept` together, in the same order, where those of other rows have left their places."""
    end = 0
    with path.open("r+b") as file:
        for row, begin, (height, width) in places:
            if row in kept:
                size = 3 * height * width
                if begin > end:
                    file.seek(begin)
                    pixels = file.read(size)
                    file.seek(end)
                    file.write(pixels)
                end += size
        file.truncate(end)


class DecodeProcesses:
    """Worker processes for the images of one table. What they say of a row comes in the order of rows."""

    def __init__(self, decoder: ImageDecoder, pool: ProcessPoolExecutor, processes: int) -> None:
        self.decoder, self.pool, self.processes = decoder, pool, processes

    @classmethod
    @contextmanager
    def of(cls, decoder: ImageDecoder, workers: int | None) -> "Iterator[DecodeProcesses | None]":
        """So many worker processes; None where threads do better, or where processes cannot be forked."""
        processes = default_threads() if workers is None else workers
        few = processes < LEAST_PROCESSES or len(decoder.table) < LEAST_IMAGES or decoder.table.pixels is not None
        # macOS has libraries that do not survive a fork, Windows has none, and a daemon may not have children
        if few or sys.platform != "linux" or multiprocessing.current_process().daemon:
            yield None
            return
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=_begin, initargs=(decoder,))
        try:
            _start(pool)
            yield cls(decoder, pool, processes)
        finally:
            pool.shutdown(cancel_futures=True)

    def shapes(self) -> Generator[tuple[int, Measured]]:
        """What each image will take, from the header of its file."""
        return self._each(_measured, range(len(self.decoder.table)), HEADERS_AT_ONCE)

    def decode_into(self, path: Path, shapes: Sequence[Measured]) -> Generator[tuple[int, Measured]]:
        """Write images to a file, each as [3, height, width] at its place. Those that cannot be read have none."""
        row = 0
        for (place, _, shape), message in self._each(partial(_written, path), places_of(shapes), IMAGES_AT_ONCE):
            yield from enumerate(shapes[row:place], row)
            yield place, shape if message is None else UnreadableImageError(message)
            row = place + 1
        yield from enumerate(shapes[row:], row)

    def _each(self, function: Callable[[S], T], items: Sequence[S], at_once: int) -> Generator[tuple[S, T]]:
        try:
            yield from zip(items, self.pool.map(function, items, chunksize=at_once), strict=True)
        except BrokenProcessPool as error:
            _end_all(self.pool)
            raise ChildProcessError(
                f"a process that decodes {self.decoder.table.name} has ended, most likely because the memory is full; "
                f"decode with fewer than {self.processes} (--workers)"
            ) from error


def _start(pool: ProcessPoolExecutor) -> None:
    """Fork all processes of a pool, and let signals wait meanwhile.

    A process that is interrupted before it ignores signals takes the pool with it, and a pool that is interrupted before it has
    all its processes forgets those it has, which then keep this process from ending.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        pool.submit(os.getpid)  # the first task starts them
    except BaseException:  # of a signal, too, which another thread of this process may have taken
        _end_all(pool)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_all(pool: ProcessPoolExecutor) -> None:
    """End the other processes of a pool that has lost one, as `kill_workers` of Python 3.14 does.

    The pool asks them to end and then waits for them without limit, but workers ignore that signal, and those that wait for a
    lock which the lost one held would never end. They write to a temporary file only, so nothing of worth is cut short.
    """
    for process in list(pool._processes.values()):  # noqa: SLF001
        process.kill()


class _Worker:
    """What a process decodes."""

    decoder: ImageDecoder


def _begin(decoder: ImageDecoder) -> None:
    init_worker()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    _Worker.decoder = decoder


def _measured(row: int) -> Measured:
    try:
        return _Worker.decoder.shape(row)
    except UnreadableImageError as error:
        return error


def _written(path: Path, place: Place) -> str | None:
    """Write an image to a file; what is wrong with one that cannot be read."""
    row, begin, shape = place
    try:
        planes = _Worker.decoder.planes(row)
    except UnreadableImageError as error:
        return str(error)
    if planes.shape[1:] != shape:
        return f"{printable(str(_Worker.decoder.table.file(row)))} has changed since its header was read"
    file, left = os.open(path, os.O_WRONLY), planes.ravel().data
    try:
        while left:
            done = os.pwrite(file, left, begin)
            left, begin = left[done:], begin + done
    finally:
        os.close(file)
    return None
