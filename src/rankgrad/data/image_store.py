"""Decoded images in one buffer, and batches of crops out of it, on the device where the buffer lies.

    images, table = open_images(table, side=256, square=False, cache=Path("~/.cache/rankgrad").expanduser())
    boxes, flip = AUGMENTS["recall-at-k"].draw(images.shapes[index], generator(seed, "augment", epoch, step))
    pixels = images.crops(index, boxes, flip, size=224)

Files are decoded once. Afterwards an epoch reads a flat file of bytes through the page cache, or, after `.to("cuda")`, none at
all: 60,000 images of 256 x 256 take 11.8 GB.
"""

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

from rankgrad._checks import check_count, check_tensor, shape_of
from rankgrad.data.image_files import Decoder, UnreadableImageError, in_order, with_progress
from rankgrad.data.table import Table

try:
    import fcntl
except ImportError:  # on Windows, where nobody can delete a file that another has open
    fcntl = None  # type: ignore[assignment]

# changes whenever the same table and settings would give other bytes
FORMAT = 1

# bytes of float32 pixels resampled at once: what stays in a processor's caches, and enough to fill a GPU
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}

# problems shown in one message, and after which decoding gives up
SHOWN_PROBLEMS = 10


class Images:
    """Decoded images of any heights and widths.

    Args:
        flat: uint8, the images one after the other, each as [3, height, width], then at least as many bytes as the widest
            image is wide. In memory, mapped from a file, or on a GPU.
        shapes: [N, 2] int64 height and width, on the CPU.
        left_out: one sentence for each image of the table that could not be read.
    """

    def __init__(self, flat: Tensor, shapes: Tensor, left_out: tuple[str, ...] = ()) -> None:
        check_tensor(flat, name="flat", caller="Images")
        check_tensor(shapes, name="shapes", caller="Images")
        if flat.dtype != torch.uint8 or flat.ndim != 1 or not flat.is_contiguous():
            raise ValueError(f"Images: flat must be one contiguous row of uint8, got {flat.dtype} of shape {shape_of(flat)}")
        if shapes.ndim != 2 or shapes.shape[1] != 2 or shapes.dtype != torch.int64:
            raise ValueError(f"Images: shapes must be [N, 2] int64, got {shapes.dtype} of shape {shape_of(shapes)}")
        self.shapes = shapes.cpu()
        sizes = 3 * self.shapes.prod(dim=1)
        wanted = bytes_needed(self.shapes)
        if len(flat) < wanted:
            raise ValueError(f"Images: flat must have {wanted} bytes for {len(shapes)} images of these shapes, got {len(flat)}")
        self.flat, self.left_out = flat, left_out
        self._offsets = sizes.cumsum(0) - sizes

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def nbytes(self) -> int:
        return len(self.flat)

    def to(self, device: torch.device | str) -> "Images":
        """The same images on another device."""
        return Images(self.flat.to(device), self.shapes, self.left_out)

    def fits_on(self, device: torch.device | str, share: float = 0.5) -> bool:
        """Whether the buffer takes no more than `share` of the memory that is free there, which a model needs too."""
        device = torch.device(device)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        return free is None or self.nbytes <= share * free

    def crops(self, index: Tensor, boxes: Tensor, flip: Tensor, size: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Boxes of images at size x size, on the device of the buffer.

        A box is resampled by one matrix from the left and one from the right, whose rows are triangles as wide as a target
        pixel, or as a source pixel where that is wider. So enlarging is bilinear interpolation and shrinking averages:
        torchvision's `resized_crop` with antialias. Pixel centres lie at halves, and nothing outside the box is seen. Boxes of
        size x size whole pixels are copied.

        Args:
            index: [B] rows, any order, repeats allowed.
            boxes: [B, 4] left, top, width, height in pixels of the stored image, not necessarily whole. What reaches over
                the image's edge repeats the edge.
            flip: [B] bool, mirror left and right.
            size: height and width of the result.
            dtype: torch.float32, or torch.uint8 for rounded values.

        Returns:
            [B, 3, size, size], 0 .. 255. With `index`, `boxes` and `flip` on the CPU, nobody waits for a GPU.
        """
        index, boxes, flip = self._checked(index, boxes, flip, size, dtype)
        result = torch.empty(len(index), 3, size, size, dtype=dtype, device=self.device)
        if not len(index):
            return result
        heights, widths = self.shapes[index].unbind(1)
        left, width = boxes[:, 0], boxes[:, 2]
        top, height = boxes[:, 1], boxes[:, 3]
        x, y = _Span.of(left, width, widths), _Span.of(top, height, heights)
        exact = bool((boxes == boxes.floor()).all() and (boxes[:, 2:] == size).all())
        exact = exact and bool((x.count == size).all() and (y.count == size).all())
        rows = self._offsets[index] + y.first * widths + x.first
        whole = torch.stack((rows, widths, heights * widths, y.count, x.count, flip.long()))
        real = torch.stack((left - x.first, width, top - y.first, height)).float()
        whole, real = _sent(whole, self.device), _sent(real, self.device)

        seen = int(y.count.max()), int(x.count.max())
        step = max(1, CHUNK_BYTES.get(self.device.type, 2**28) // (12 * seen[0] * seen[1]))
        for start in range(0, len(index), step):
            part = slice(start, start + step)
            window = self._windows(whole[:, part], *seen)
            mirrored = whole[5, part].bool()
            if exact:
                shown = torch.where(mirrored[:, None, None, None], window.flip(3), window)
            else:
                shown = _resampled(window, whole[3:5, part], real[:, part], mirrored, size)
                # rows of weights sum to 1 up to rounding, and so can pass the brightest by as much
                shown.clamp_(max=255)
                if dtype == torch.uint8:
                    shown.round_()
            result[part] = shown
        return result

    def _windows(self, whole: Tensor, height: int, width: int) -> Tensor:
        """[B, 3, height, width] bytes from each image's first row and column on; rows past an image's last repeat it.

        Columns past the last of an image are bytes of its next row, or of its neighbour: they get no weight.
        """
        first, stride, plane, rows = whole[0], whole[1], whole[2], whole[3]
        down = torch.arange(height, device=self.device).minimum(rows[:, None] - 1)
        channel = torch.arange(3, device=self.device)
        starts = first[:, None, None] + channel[:, None] * plane[:, None, None] + (down * stride[:, None])[:, None]
        return (_runs_copied if self.device.type == "cpu" else _runs_gathered)(self.flat, starts, width)

    def _checked(
        self, index: Tensor, boxes: Tensor, flip: Tensor, size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        caller = "Images.crops"
        check_count(size, name="size", caller=caller)
        if dtype not in {torch.float32, torch.uint8}:
            raise ValueError(f"{caller}: dtype must be torch.float32 or torch.uint8, got {dtype}")
        for name, value, shape in (("index", index, ()), ("boxes", boxes, (4,)), ("flip", flip, ())):
            check_tensor(value, name=name, caller=caller)
            wanted = (len(index), *shape)
            if value.shape != wanted:
                raise ValueError(f"{caller}: {name} must have shape {wanted}, got {shape_of(value)}")
        index, boxes, flip = index.long().cpu(), boxes.double().cpu(), flip.bool().cpu()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(f"{caller}: index must lie in [0, {len(self)}), got {int(index.min())} to {int(index.max())}")
        if not bool(torch.isfinite(boxes).all() and (boxes[:, 2:] > 0).all()):
            raise ValueError(f"{caller}: boxes must be finite with width and height above 0")
        return index, boxes, flip


class _Span:
    """The whole pixels that a box touches along one axis: `count` of them from `first` on, inside the image."""

    def __init__(self, first: Tensor, count: Tensor) -> None:
        self.first, self.count = first, count

    @classmethod
    def of(cls, begin: Tensor, extent: Tensor, length: Tensor) -> "_Span":
        # a box wholly outside sees the nearest pixel
        first = begin.floor().long().clamp(min=0).minimum(length - 1)
        last = (begin + extent).ceil().long().minimum(length).maximum(first + 1)
        return cls(first, last - first)


def _runs_copied(flat: Tensor, starts: Tensor, width: int) -> Tensor:
    """The `width` bytes from each of `starts` on, run by run: four times as fast as byte by byte on a CPU."""
    # a view in which row i begins at byte i
    return flat.unfold(0, width, 1).index_select(0, starts.flatten()).view(*starts.shape, width)


def _runs_gathered(flat: Tensor, starts: Tensor, width: int) -> Tensor:
    """The same, byte by byte."""
    return flat[starts[..., None] + torch.arange(width, device=flat.device)]


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for what it is doing."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _resampled(window: Tensor, counts: Tensor, real: Tensor, flip: Tensor, size: int) -> Tensor:
    """float32 [B, 3, size, size] of windows [B, 3, height, width]."""
    images, channels, height, width = window.shape
    left, box_width, top, box_height = real
    across = _weights(left, box_width, counts[1], width, size, flip)
    down = _weights(top, box_height, counts[0], height, size, torch.zeros_like(flip))
    narrow = window.float().reshape(images, channels * height, width) @ across.mT
    narrow = narrow.reshape(images, channels, height, size)
    shown = narrow.new_empty(images, channels, size, size)
    for channel in range(channels):
        torch.bmm(down, narrow[:, channel], out=shown[:, channel])
    return shown


def _weights(begin: Tensor, extent: Tensor, count: Tensor, window: int, size: int, flip: Tensor) -> Tensor:
    """[B, size, window]: how much of each source pixel is in each target pixel; rows sum to 1.

    `begin` and `extent` are the box in pixels from the window's first, `count` the pixels of the window that it touches.
    """
    target = torch.arange(size, device=begin.device) + 0.5
    source = torch.arange(window, device=begin.device) + 0.5
    step = extent[:, None] / size
    centre = begin[:, None] + torch.where(flip[:, None], size - target, target) * step
    # beyond the outermost pixel centres there is nothing to interpolate with
    centre = centre.clamp(min=0.5).minimum(count[:, None] - 0.5)
    slope = 1 / step.clamp(min=1)
    weights = (source - centre[:, :, None]).abs_().mul_(-slope[:, :, None]).add_(1).clamp_(min=0)
    weights.mul_(source < count[:, None, None])
    return weights.div_(weights.sum(2, keepdim=True))


def bytes_needed(shapes: Tensor) -> int:
    """Length of the buffer of `Images`."""
    return int(3 * shapes.prod(dim=1).sum()) + (int(shapes[:, 1].max()) if len(shapes) else 0)


def open_images(
    table: Table,
    *,
    side: int,
    cache: Path | None,
    square: bool,
    skip_bad: bool = False,
    progress: bool = True,
    workers: int | None = None,
) -> tuple[Images, Table]:
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
    decoder = Decoder(table, side, square)
    if cache is None:
        opened = _decode_to_memory(decoder, skip_bad, progress, workers)
    else:
        path = cache / f"images-{_slug(table.name)}-{side}px{'-square' if square else ''}-{_fingerprint(decoder)}.u8"
        found = _mapped(path)
        opened = _decode_to_file(decoder, path, skip_bad, progress, workers) if found is None else found
    images, rows = opened
    if images.left_out:
        if not skip_bad:
            raise _complaint(table, images.left_out)
        warnings.warn(f"open_images: left out {_listed(images.left_out, len(table))}", stacklevel=2)
    return images, table if len(rows) == len(table) else table.select(rows)


def _decode_to_memory(
    decoder: Decoder, skip_bad: bool, progress: bool, workers: int | None
) -> tuple[Images, NDArray[np.int64]]:
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

    shapes, rows, left_out = _decode(decoder, store, skip_bad, progress, workers)
    # the end is read, though never seen
    flat[filled:].zero_()
    return Images(flat, shapes, left_out), rows


def _decode_to_file(
    decoder: Decoder, path: Path, skip_bad: bool, progress: bool, workers: int | None
) -> tuple[Images, NDArray[np.int64]]:
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

            shapes, rows, left_out = _decode(decoder, store, skip_bad, progress, workers)
            file.write(bytes(int(shapes[:, 1].max())))
            file.flush()
            os.fsync(file.fileno())
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp", delete=False) as head:
            unfinished.append(Path(head.name))
            np.savez(
                head, shapes=shapes.numpy(), rows=rows, left_out=np.array(left_out, dtype=str), spots=_spots(unfinished[0])
            )
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


def _mapped(path: Path) -> tuple[Images, NDArray[np.int64]] | None:
    """What `_decode_to_file` left at `path`; None when there is nothing or it is damaged, which decoding again mends."""
    try:
        # opened here, because numpy leaves a damaged file open
        with path.with_suffix(".npz").open("rb") as file, np.load(file, allow_pickle=False) as head:
            shapes, rows, left_out = torch.from_numpy(head["shapes"]), head["rows"], tuple(head["left_out"].tolist())
            spots = int(head["spots"])
        if path.stat().st_size != bytes_needed(shapes) or _spots(path) != spots:
            return None
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; nothing here writes, and a writable map of more than the
            # machine's memory may be refused
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            flat = torch.from_numpy(mapped)
        return Images(flat, shapes, left_out), rows
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
    decoder: Decoder, store: Callable[[NDArray[np.uint8]], None], skip_bad: bool, progress: bool, workers: int | None
) -> tuple[Tensor, NDArray[np.int64], tuple[str, ...]]:
    """Hand each readable image to `store`, in order; their shapes and rows, and what is wrong with the others."""
    table, rows, shapes, problems = decoder.table, list[int](), list[tuple[int, ...]](), list[str]()
    results = in_order(decoder.planes, range(len(table)), workers)
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


def _estimate(decoder: Decoder, skip_bad: bool, progress: bool, workers: int | None) -> int:
    """Bytes of the decoded table, from the heads of its files; a missing file is found here, before the long work."""
    items = len(decoder.table)
    if decoder.square:
        return bytes_needed(torch.tensor([[decoder.side, decoder.side]]).expand(items, 2))
    results = in_order(decoder.shape, range(items), workers)
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


def _fingerprint(decoder: Decoder) -> str:
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


def available_memory() -> int | None:
    """Bytes that a process may still take, by the machine and by the container around it; None where nobody says."""
    known = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            known.append(max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        pass
    return min(known, default=None)
