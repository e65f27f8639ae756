"""Decode the images of a table once: into memory, or into a cache file that all processes map."""

import hashlib
import re
import shutil
import stat
import warnings
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad._device import available_bytes
from rankgrad._files import atomic_file, write_error_reason
from rankgrad._messages import FIRST, first_ten, format_bytes
from rankgrad.data.decode_processes import DecodeProcesses, Measured, close_gaps, places_of
from rankgrad.data.image_files import ImageDecoder, UnreadableImageError, map_images
from rankgrad.data.image_store import ImageBuffer, bytes_needed
from rankgrad.data.prefetch import with_progress
from rankgrad.data.table import Table

# part of a cache file's name; raise it when the same table and settings would give other bytes
FORMAT = 2
# files of a table whose content is looked at, besides the names, sizes and dates of all
LOOKED_AT = 32


def open_images(
    table: Table,
    *,
    side: int,
    cache: Path | None,
    square: bool,
    skip_bad: bool = False,
    progress: bool = True,
    workers: int | None = None,
) -> tuple[ImageBuffer, Table]:
    """The images of a table, decoded now or by an earlier call, and the table of those that could be read.

    Args:
        table: files or pixels; see `rankgrad.data.image_files` for what is done to them.
        side: length of the short side.
        cache: folder for the decoded bytes, which are then mapped and shared by all processes; None keeps them in memory.
            The name of a cache file is a digest of the list of files, their sizes and dates, some bytes of a few of them, and
            these settings, so a change makes a new file; old ones may be deleted.
        square: resize to side x side, whatever the aspect ratio.
        skip_bad: skip images that cannot be read, with a warning that lists them; otherwise they are an error. Those that an
            earlier call skipped are tried again.
        progress: show progress on standard error.
        workers: threads that decode, or processes, which are faster with many cores and images, where they are decoded to a
            cache folder; by default one per core, 16 at most.
    """
    check_count(side, name="side", caller="open_images")
    if workers is not None:
        check_count(workers, name="workers", caller="open_images")
    if not len(table):
        raise ValueError(f"open_images: {table.name} has no images")
    decoder = ImageDecoder(table, side, square)
    if cache is None:
        opened = _decode_to_memory(decoder, skip_bad, progress, workers)
    else:
        path = cache / f"images-{_slug(table.name)}-{side}px{'-square' if square else ''}-{_fingerprint(decoder)}.u8"
        found = _mapped(path)
        if found is not None and _any_readable_now(decoder, found[1], workers):
            found = None
        opened = _decode_to_file(decoder, path, skip_bad, progress, workers) if found is None else found
    images, rows = opened
    if images.skipped:
        if not skip_bad:
            raise _unreadable(table, images.skipped)
        warnings.warn(f"skipped {_listed(images.skipped, len(table))}", stacklevel=2)
    return images, table if len(rows) == len(table) else table.select(rows)


def _decode_to_memory(
    decoder: ImageDecoder, skip_bad: bool, progress: bool, workers: int | None
) -> tuple[ImageBuffer, NDArray[np.int64]]:
    needed = bytes_needed(_readable(_measure(decoder, None, skip_bad, progress, workers)))
    free = available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"{decoder.table.name} takes {format_bytes(needed)} of memory when decoded, and {format_bytes(free)} are free; "
            "give a cache folder (--cache), from which images are mapped, or store them smaller (--stored-side)"
        )
    flat = torch.empty(needed, dtype=torch.uint8)
    buffer, filled = flat.numpy(), 0

    def store(planes: NDArray[np.uint8]) -> None:
        nonlocal filled
        buffer[filled : filled + planes.size] = planes.ravel()
        filled += planes.size

    shapes, rows, skipped = _collect(decoder, _decode_by_threads(decoder, store, workers), skip_bad, progress)
    # the padding at the end is read, though it gets no weight
    flat[filled:].zero_()
    return ImageBuffer(flat, shapes, skipped), rows


def _decode_to_file(
    decoder: ImageDecoder, path: Path, skip_bad: bool, progress: bool, workers: int | None
) -> tuple[ImageBuffer, NDArray[np.int64]]:
    with DecodeProcesses.of(decoder, workers) as processes:
        _write(decoder, path, processes, skip_bad, progress, workers)
    opened = _mapped(path)
    if opened is None:
        raise OSError(f"{path} was written but does not read back: its disk is failing, give another cache folder (--cache)")
    return opened


def _write(
    decoder: ImageDecoder,
    path: Path,
    processes: DecodeProcesses | None,
    skip_bad: bool,
    progress: bool,
    workers: int | None,
) -> None:
    """Write the bytes, then the header: a header says that the bytes are complete."""
    measured = _measure(decoder, processes, skip_bad, progress, workers)
    needed = bytes_needed(_readable(measured))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise OSError(f"only {format_bytes(free)} are free")
        # the header is entered first, so that it is put in place last
        with atomic_file(path.with_suffix(".npz")) as header, atomic_file(path) as unfinished:
            if processes is not None:
                results = processes.decode_into(unfinished, measured)
                shapes, rows, skipped = _collect(decoder, results, skip_bad, progress)
                close_gaps(unfinished, places_of(measured), set(rows.tolist()))
            else:
                with unfinished.open("wb") as file:
                    results = _decode_by_threads(decoder, lambda planes: file.write(planes.data), workers)
                    shapes, rows, skipped = _collect(decoder, results, skip_bad, progress)
            with unfinished.open("ab") as file:
                file.write(bytes(int(shapes[:, 1].max())))
            spots = _spot_checksum(unfinished)
            with header.open("wb") as file:
                np.savez(file, shapes=shapes.numpy(), rows=rows, left_out=np.array(skipped, dtype=str), spots=spots)
    except ChildProcessError:  # which says what happened
        raise
    except OSError as error:
        raise OSError(
            f"{decoder.table.name} takes {format_bytes(needed)} when decoded, which cannot be written to {path.parent}: "
            f"{write_error_reason(error)}; nothing was left there. Give another cache folder, or none, which keeps images in "
            "memory (--cache)"
        ) from error


def _mapped(path: Path) -> tuple[ImageBuffer, NDArray[np.int64]] | None:
    """What `_decode_to_file` left at `path`; None when it is absent or damaged, in which case it is decoded again."""
    try:
        # opened here, because numpy leaves a damaged file open
        with path.with_suffix(".npz").open("rb") as file, np.load(file, allow_pickle=False) as header:
            shapes, rows, skipped = torch.from_numpy(header["shapes"]), header["rows"], tuple(header["left_out"].tolist())
            spots = int(header["spots"])
        if path.stat().st_size != bytes_needed(shapes) or _spot_checksum(path) != spots:
            return None
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns; nothing here writes, and a writable map of more than the machine's
            # memory may be refused
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            flat = torch.from_numpy(mapped)
        return ImageBuffer(flat, shapes, skipped), rows
    except (OSError, EOFError, KeyError, ValueError, IndexError, zipfile.BadZipFile, zlib.error):
        return None


def _any_readable_now(decoder: ImageDecoder, rows: NDArray[np.int64], workers: int | None) -> bool:
    """Whether one of the images that are not in the cache can be read by now.

    A limit may have been raised, a permission given or a disk mended since, and none of these changes the file.
    """
    skipped = np.setdiff1d(np.arange(len(decoder.table)), rows).tolist()
    return any(not isinstance(result, UnreadableImageError) for _, result in map_images(decoder.check, skipped, workers))


def _spot_checksum(path: Path, count: int = 64, length: int = 4096) -> int:
    """A checksum of blocks all over the file: cheap, and it changes when the file lost pages or was cut."""
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        for place in range(count):
            file.seek(max(size - length, 0) * place // (count - 1))
            checksum = zlib.crc32(file.read(length), checksum)
    return checksum


def _decode_by_threads(
    decoder: ImageDecoder, store: Callable[[NDArray[np.uint8]], object], workers: int | None
) -> Generator[tuple[int, Measured]]:
    """Hand each readable image to `store`, in order."""
    for row, planes in map_images(decoder.planes, range(len(decoder.table)), workers):
        if isinstance(planes, UnreadableImageError):
            yield row, planes
        else:
            store(planes)
            yield row, (planes.shape[1], planes.shape[2])


def _collect(
    decoder: ImageDecoder, results: Generator[tuple[int, Measured]], skip_bad: bool, progress: bool
) -> tuple[Tensor, NDArray[np.int64], tuple[str, ...]]:
    """Shapes and rows of the images that were decoded, and a message for each of the others."""
    table, rows, shapes, messages = decoder.table, list[int](), list[tuple[int, int]](), list[str]()
    with closing(results):  # after too many errors the rest is not decoded
        for row, shape in with_progress(results, len(table), f"decoding {table.name}", progress):
            if isinstance(shape, UnreadableImageError):
                messages.append(str(shape))
                if not skip_bad and len(messages) == FIRST:
                    break
                continue
            rows.append(row)
            shapes.append(shape)
    if messages and not (skip_bad and rows):
        raise _unreadable(table, messages)
    return torch.tensor(shapes), np.array(rows), tuple(messages)


def _measure(
    decoder: ImageDecoder, processes: DecodeProcesses | None, skip_bad: bool, progress: bool, workers: int | None
) -> list[Measured]:
    """Shapes of the decoded images, from the headers of their files; a missing file is found here, before the long work."""
    items = len(decoder.table)
    if decoder.square:
        return [(decoder.side, decoder.side)] * items
    results = map_images(decoder.shape, range(items), workers) if processes is None else processes.shapes()
    found = [shape for _, shape in with_progress(results, items, f"measuring {decoder.table.name}", progress)]
    messages = [str(shape) for shape in found if isinstance(shape, UnreadableImageError)]
    if messages and not (skip_bad and len(messages) < items):
        raise _unreadable(decoder.table, messages)
    return found


def _readable(measured: Iterable[Measured]) -> Tensor:
    """[N, 2] the shapes of those that can be read."""
    return torch.tensor([shape for shape in measured if not isinstance(shape, UnreadableImageError)])


def _unreadable(table: Table, messages: Iterable[str]) -> UnreadableImageError:
    return UnreadableImageError(
        f"{_listed(tuple(messages), len(table))}\nRepair or remove these files, or skip them with `skip_bad=True`"
    )


def _listed(messages: tuple[str, ...], items: int) -> str:
    return f"{len(messages):,} of {items:,} images that cannot be read:\n{first_ten(messages)}"


def _fingerprint(decoder: ImageDecoder) -> str:
    """A digest of the files (names, sizes, dates, some content) and of all settings that decide what is made of them.

    Not of where they are, so a folder may be moved. Variants of one data set can agree in all names and sizes, and in dates
    which an archive has set to one day, so a few files are looked at.
    """
    table = decoder.table
    digest = hashlib.blake2b(f"{FORMAT} {decoder.side} {decoder.square} {len(table)}".encode(), digest_size=8)
    if table.boxes is not None:
        digest.update(np.ascontiguousarray(table.boxes, dtype=np.float64).tobytes())
    if table.pixels is not None:
        digest.update(str(table.pixels.shape).encode() + np.ascontiguousarray(table.pixels).tobytes())
        return digest.hexdigest()
    looked_at = set(np.linspace(0, len(table) - 1, min(len(table), LOOKED_AT), dtype=int).tolist())
    for row, path in enumerate(table.paths):
        file = table.root / path
        try:
            state = file.stat()
            known = f"{state.st_size} {state.st_mtime_ns}"
            if row in looked_at and stat.S_ISREG(state.st_mode):  # opening a named pipe would block
                known += f" {_spot_checksum(file, count=4, length=1024)}"
        except OSError:
            known = "missing"
        digest.update(f"{path}\0{known}\0".encode())
    return digest.hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name)
