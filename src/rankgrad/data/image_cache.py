"""Decode the images of a table once: into memory, or into a cache file that all processes map."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.data.image_files import ImageDecoder, UnreadableImageError, map_images
from rankgrad.data.image_store import ImageBuffer, available_memory, bytes_needed
from rankgrad.data.prefetch import with_progress
from rankgrad.data.table import Table

try:
    import fcntl
except ImportError:  # on Windows, where an open file cannot be deleted anyway
    fcntl = None  # type: ignore[assignment]

# part of a cache file's name; raise it when the same table and settings would give other bytes
FORMAT = 1

# problems listed in one message, and after which decoding gives up
SHOWN_PROBLEMS = 10


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
    """The images of a table, decoded now or at an earlier call, and the table of those that could be read.

    Args:
        table: files or pixels; see `rankgrad.data.image_files` for what is done to them.
        side: length of the short side, `stored_side(size)` for images shown at `size`.
        cache: folder for the decoded bytes, which are then mapped and shared by all processes; None keeps them in memory.
            The file's name stands for the list of files, their sizes and dates, and these settings, so a change makes a new
            one; old ones may be deleted.
        square: store side x side and give up the aspect ratio.
        skip_bad: leave out images that cannot be read, with a warning that lists them; otherwise they are an error.
        progress: show it on stderr when it takes more than two seconds.
        workers: threads that decode; by default one per core, 16 at most.
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
        opened = _decode_to_file(decoder, path, skip_bad, progress, workers) if found is None else found
    images, rows = opened
    if images.skipped:
        if not skip_bad:
            raise _complaint(table, images.skipped)
        warnings.warn(f"open_images: skipped {_listed(images.skipped, len(table))}", stacklevel=2)
    return images, table if len(rows) == len(table) else table.select(rows)


def _decode_to_memory(
    decoder: ImageDecoder, skip_bad: bool, progress: bool, workers: int | None
) -> tuple[ImageBuffer, NDArray[np.int64]]:
    needed = _estimate(decoder, skip_bad, progress, workers)
    free = available_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"open_images: {decoder.table.name} decoded takes {_gigabytes(needed)} of memory and {_gigabytes(free)} are free; "
            "give a cache folder, from which images are mapped, or lower side"
        )
    flat = torch.empty(needed, dtype=torch.uint8)
    buffer, filled = flat.numpy(), 0

    def store(planes: NDArray[np.uint8]) -> None:
        nonlocal filled
        buffer[filled : filled + planes.size] = planes.ravel()
        filled += planes.size

    shapes, rows, skipped = _decode(decoder, store, skip_bad, progress, workers)
    # the end is read, though never seen
    flat[filled:].zero_()
    return ImageBuffer(flat, shapes, skipped), rows


def _decode_to_file(
    decoder: ImageDecoder, path: Path, skip_bad: bool, progress: bool, workers: int | None
) -> tuple[ImageBuffer, NDArray[np.int64]]:
    """Decode to a temporary name and move the finished file to its place, its head last: a head says that all is there."""
    needed = _estimate(decoder, skip_bad, progress, workers)
    unfinished: list[Path] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise OSError(f"only {_gigabytes(free)} are free")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp", delete=False) as file:
            unfinished.append(Path(file.name))
            with contextlib.suppress(OSError):  # a disk without locks: what is left there then stays
                _lock(file.fileno())

            def store(planes: NDArray[np.uint8]) -> None:
                file.write(planes.data)

            shapes, rows, skipped = _decode(decoder, store, skip_bad, progress, workers)
            file.write(bytes(int(shapes[:, 1].max())))
            file.flush()
            os.fsync(file.fileno())
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp", delete=False) as head:
            unfinished.append(Path(head.name))
            np.savez(head, shapes=shapes.numpy(), rows=rows, left_out=np.array(skipped, dtype=str), spots=_spots(unfinished[0]))
            head.flush()
            os.fsync(head.fileno())
        unfinished[0].replace(path)
        unfinished[1].replace(path.with_suffix(".npz"))
    except OSError as error:
        raise OSError(
            f"open_images: {decoder.table.name} decoded takes {_gigabytes(needed)}, which cannot be written to {path.parent}: "
            f"{error.strerror or error}; nothing was left there. Give another cache folder, or None to keep images in memory"
        ) from error
    finally:
        for leftover in unfinished:
            leftover.unlink(missing_ok=True)
    opened = _mapped(path)
    if opened is None:
        raise OSError(f"open_images: {path} was written but does not read back: its disk is failing, give another cache folder")
    return opened


def _sweep(path: Path) -> None:
    """Removes what processes that were killed while they decoded have left; who still writes holds a lock."""
    for leftover in path.parent.glob(f"{path.stem}-*.tmp"):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            _lock(file.fileno())
            leftover.unlink(missing_ok=True)


def _lock(descriptor: int) -> None:
    """Held until the file is closed or its process ends; raises where another process holds it."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _mapped(path: Path) -> tuple[ImageBuffer, NDArray[np.int64]] | None:
    """What `_decode_to_file` left at `path`; None when there is nothing or it is damaged, which decoding again mends."""
    try:
        # opened here, because numpy leaves a damaged file open
        with path.with_suffix(".npz").open("rb") as file, np.load(file, allow_pickle=False) as head:
            shapes, rows, skipped = torch.from_numpy(head["shapes"]), head["rows"], tuple(head["left_out"].tolist())
            spots = int(head["spots"])
        if path.stat().st_size != bytes_needed(shapes) or _spots(path) != spots:
            return None
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; nothing here writes, and a writable map of more than the
            # machine's memory may be refused
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            flat = torch.from_numpy(mapped)
        return ImageBuffer(flat, shapes, skipped), rows
    except (OSError, EOFError, KeyError, ValueError, IndexError, zipfile.BadZipFile, zlib.error):
        return None


def _spots(path: Path, count: int = 64, length: int = 4096) -> int:
    """A checksum of blocks all over the file: cheap, and a file that lost pages or was cut does not keep it."""
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        for place in range(count):
            file.seek(max(size - length, 0) * place // (count - 1))
            checksum = zlib.crc32(file.read(length), checksum)
    return checksum


def _decode(
    decoder: ImageDecoder, store: Callable[[NDArray[np.uint8]], None], skip_bad: bool, progress: bool, workers: int | None
) -> tuple[Tensor, NDArray[np.int64], tuple[str, ...]]:
    """Hand each readable image to `store`, in order; their shapes and rows, and what is wrong with the others."""
    table, rows, shapes, problems = decoder.table, list[int](), list[tuple[int, ...]](), list[str]()
    results = map_images(decoder.planes, range(len(table)), workers)
    for row, planes in with_progress(results, len(table), f"decoding {table.name}", progress):
        if isinstance(planes, UnreadableImageError):
            problems.append(str(planes))
            if not skip_bad and len(problems) == SHOWN_PROBLEMS:
                break
            continue
        store(planes)
        rows.append(row)
        shapes.append(planes.shape[1:])
    if problems and not (skip_bad and rows):
        raise _complaint(table, problems)
    return torch.tensor(shapes), np.array(rows), tuple(problems)


def _estimate(decoder: ImageDecoder, skip_bad: bool, progress: bool, workers: int | None) -> int:
    """Bytes of the decoded table, from the heads of its files; a missing file is found here, before the long work."""
    items = len(decoder.table)
    if decoder.square:
        return bytes_needed(torch.tensor([[decoder.side, decoder.side]]).expand(items, 2))
    results = map_images(decoder.shape, range(items), workers)
    found = [shape for _, shape in with_progress(results, items, f"measuring {decoder.table.name}", progress)]
    problems = [str(shape) for shape in found if isinstance(shape, UnreadableImageError)]
    readable = [shape for shape in found if not isinstance(shape, UnreadableImageError)]
    if problems and not (skip_bad and readable):
        raise _complaint(decoder.table, problems)
    return bytes_needed(torch.tensor(readable))


def _complaint(table: Table, problems: Iterable[str]) -> UnreadableImageError:
    return UnreadableImageError(
        f"open_images: {_listed(tuple(problems), len(table))}\nMend or remove these files, or leave them out with skip_bad"
    )


def _listed(problems: tuple[str, ...], items: int) -> str:
    more = f"\n  and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    lines = "".join(f"\n  {problem}" for problem in problems[:SHOWN_PROBLEMS])
    return f"{len(problems)} of {items} images that cannot be read:{lines}{more}"


def _fingerprint(decoder: ImageDecoder) -> str:
    """Stands for the files (names, sizes, dates) and all that decides what is made of them."""
    table = decoder.table
    digest = hashlib.blake2b(f"{FORMAT} {decoder.side} {decoder.square} {len(table)}".encode(), digest_size=8)
    if table.boxes is not None:
        digest.update(np.ascontiguousarray(table.boxes, dtype=np.float64).tobytes())
    if table.pixels is not None:
        digest.update(str(table.pixels.shape).encode() + np.ascontiguousarray(table.pixels).tobytes())
        return digest.hexdigest()
    for path in table.paths:
        try:
            state = (table.root / path).stat()
            known = f"{state.st_size} {state.st_mtime_ns}"
        except OSError:
            known = "missing"
        digest.update(f"{path}\0{known}\0".encode())
    return digest.hexdigest()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
