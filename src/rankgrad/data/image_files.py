"""One image of a table: from its file, or from the table's own pixels, to RGB at the size it is stored.

1. `Table.boxes`, where there are any, are cut out first, in the file's own pixels.
2. The orientation that a camera notes in EXIF is applied: the image is what a viewer shows. The papers' code ignores it.
3. Everything becomes RGB: grey is repeated, a palette is looked up, CMYK is converted, 16 bits are scaled to 8, transparency is
   dropped, an animation gives its first frame.
4. The short side is brought to `side`, or the image to side x side, by Pillow's bilinear filter, which averages when it
   shrinks: torchvision's `Resize` on a PIL image.

A file that cannot be read whole is an error that names it, and is never exchanged for another one.
"""

import os
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from rankgrad._checks import check_count
from rankgrad.data.table import Table

if TYPE_CHECKING:
    from PIL import Image

S = TypeVar("S")
T = TypeVar("T")
Item: TypeAlias = tuple[int, tuple[float, float, float, float], bool]
"""A row, its box (left, top, width, height), and whether it is mirrored."""

# what Pillow's readers raise at a damaged file, besides their own DecompressionBombError
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)

# what Pillow may take a file for, by its content and whatever its name: not PostScript, which is a program for Ghostscript; a
# JPEG of several pictures is one of these too
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# longer images would be stored at more than this many squares, megabytes of a stripe
LONGEST = 32

ORIENTATION_TAG = 0x0112


class UnreadableImageError(ValueError):
    """A file that is missing, damaged or no image; the message names it."""


class Decoder:
    """Reads the images of `table` at the size they are stored.

    Args:
        table: files or pixels.
        side: length of the short side, or of both.
        square: both sides get that length, whatever the aspect ratio.
    """

    def __init__(self, table: Table, side: int, square: bool) -> None:
        check_count(side, name="side", caller="Decoder")
        self.table, self.side, self.square = table, side, square

    def shape(self, row: int) -> tuple[int, int]:
        """Height and width at which the image will be stored; reads no more than the head of its file."""
        if self.square:
            return self.side, self.side
        return self._guarded(row, lambda image: self._stored_shape(*_oriented_size(image, self._box(row, image))))

    def image(self, row: int) -> "Image.Image":
        """The image in RGB, at the size it is stored."""
        from PIL import Image

        def read(image: "Image.Image") -> "Image.Image":
            box, turn = self._box(row, image), _turn(image)
            height, width = self._stored_shape(*_oriented_size(image, box))
            rgb = to_rgb(image if box is None else image.crop(box))
            if turn is not None:
                rgb = rgb.transpose(turn)
            return rgb.resize((width, height), Image.Resampling.BILINEAR)

        return self._guarded(row, read)

    def planes(self, row: int) -> NDArray[np.uint8]:
        """The image as [3, height, width]."""
        return np.ascontiguousarray(np.asarray(self.image(row)).transpose(2, 0, 1))

    def _guarded(self, row: int, read: "Callable[[Image.Image], T]") -> T:
        from PIL import Image

        if self.table.pixels is not None:
            return read(Image.fromarray(self.table.pixels[row]))
        return read_guarded(self.table.file(row), read)

    def _box(self, row: int, image: "Image.Image") -> tuple[int, int, int, int] | None:
        """The part of the file that is the image, in whole pixels inside it."""
        if self.table.boxes is None or np.isnan(self.table.boxes[row]).any():
            return None
        left, top, right, bottom = (round(float(edge)) for edge in self.table.boxes[row])
        box = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
        if box[0] >= box[2] or box[1] >= box[3]:
            raise UnreadableImageError(
                f"{self.table.root / self.table.paths[row]}: the box {(left, top, right, bottom)} holds no pixel of the "
                f"{image.width} x {image.height} image"
            )
        return box

    def _stored_shape(self, height: int, width: int) -> tuple[int, int]:
        if self.square:
            return self.side, self.side
        short, long = min(height, width), max(height, width)
        if long > LONGEST * short:
            raise ValueError(
                f"{width} x {height} pixels are too long a stripe to be stored with a short side of {self.side}; "
                "leave it out or use square=True"
            )
        # truncated, as torchvision does
        long = int(self.side * long / short)
        return (self.side, long) if height <= width else (long, self.side)


def read_guarded(path: Path, read: "Callable[[Image.Image], T]") -> T:
    """`read` of the image at `path`; whatever is wrong with the file is an `UnreadableImageError` that names it."""
    from PIL import Image, UnidentifiedImageError

    try:
        # a pipe of that name would be waited for
        if not path.is_file():
            raise UnreadableImageError(f"{path} {'is no file' if path.exists() else 'does not exist'}")
        with Image.open(path, formats=FORMATS) as image:
            return read(image)
    except UnreadableImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImageError(
            f"{path} is too large to be an honest image: {error} Raise PIL.Image.MAX_IMAGE_PIXELS if it is one"
        ) from error
    except UnidentifiedImageError as error:
        raise UnreadableImageError(f"{path} is no image that Pillow can read as one of {', '.join(FORMATS)}") from error
    except DAMAGE as error:
        raise UnreadableImageError(f"{path} cannot be read: {error}") from error


class Decoding(Dataset[Tensor]):
    """Images decoded every time they are shown, for tables too large to keep decoded.

    A map-style data set whose items are asked for by (row, box, flip): one `Augment` serves it and `Images`, and the pixels
    agree to a rounding of the last bit. `Batches` uses it with worker processes.

    Args:
        table: files or pixels.
        size: height and width of an item.
        side: length of the short side (square: of both) to which an image is brought before its box is cut out.
        square: whether the aspect ratio is given up.
        shapes: [N, 2] heights and widths at `side`, when they are known; else the heads of all files are read now.
        progress: show it on stderr when reading them takes more than two seconds.
        workers: threads that read them; by default one per core, 16 at most.
    """

    def __init__(
        self,
        table: Table,
        size: int,
        *,
        side: int,
        square: bool = False,
        shapes: Tensor | None = None,
        progress: bool = True,
        workers: int | None = None,
    ) -> None:
        check_count(size, name="size", caller="Decoding")
        self.size, self._decoder = size, Decoder(table, side, square)
        if shapes is None:
            results = in_order(self._decoder.shape, range(len(table)), workers)
            measured = with_progress(results, len(table), f"measuring {table.name}", progress)
            shapes = torch.tensor([or_raise(shape) for _, shape in measured], dtype=torch.int64).reshape(-1, 2)
        if shapes.shape != (len(table), 2):
            raise ValueError(f"Decoding: shapes must be [{len(table)}, 2] for this table, got shape {tuple(shapes.shape)}")
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, item: Item) -> Tensor:
        """uint8 [3, size, size] of the box (left, top, width, height) of a row, mirrored or not."""
        from PIL import Image

        row, (left, top, width, height), flip = item
        # cut before it is resized, so that nothing outside the box is averaged in
        cut = self._decoder.image(row).crop((round(left), round(top), round(left + width), round(top + height)))
        shown = cut.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if flip:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(shown).transpose(2, 0, 1).copy())


def in_order(
    function: Callable[[S], T], items: Iterable[S], workers: int | None
) -> Iterator[tuple[S, T | UnreadableImageError]]:
    """Each item and `function` of it, computed in threads and given in order; an unreadable image is given, not raised.

    Threads are enough: Pillow lets go of Python's lock while it decodes and resizes.
    """
    threads = default_workers() if workers is None else max(workers, 1)
    waiting: deque[tuple[S, Future[T]]] = deque()

    def first() -> tuple[S, T | UnreadableImageError]:
        item, future = waiting.popleft()
        try:
            return item, future.result()
        except UnreadableImageError as error:
            return item, error

    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            # a few for each thread: enough to keep all busy when one image takes longer, and no more in memory
            if len(waiting) > 8 * threads:
                yield first()
        while waiting:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)


def with_progress(results: Iterable[T], total: int, what: str, progress: bool) -> Iterator[T]:
    """`results`, with a bar on a terminal and a line now and then elsewhere, for what takes more than two seconds."""
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


def default_workers() -> int:
    """One per core this process may use, 16 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def or_raise(result: T | UnreadableImageError) -> T:
    """What `in_order` gave, its unreadable images as the errors they are."""
    if isinstance(result, UnreadableImageError):
        raise result
    return result


def _turn(image: "Image.Image") -> "Image.Transpose | None":
    """What brings the image upright."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    # not image.getexif(): of some formats it decodes the image, and an error in that must not be met here, where it would be
    # taken for damaged notes and leave half an image behind
    exif = Image.Exif()
    try:
        if "exif" in image.info:
            exif.load(image.info["exif"])
        elif image.format == "TIFF":
            exif = image.getexif()
        orientation = exif.get(ORIENTATION_TAG)
    except DAMAGE:
        # a photograph is not lost with its camera's notes
        return None
    return turns.get(orientation) if isinstance(orientation, int) else None


def _oriented_size(image: "Image.Image", box: tuple[int, int, int, int] | None) -> tuple[int, int]:
    """Height and width after the cut and upright."""
    from PIL import Image

    left, top, right, bottom = box or (0, 0, image.width, image.height)
    sideways = {Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90}
    return (right - left, bottom - top) if _turn(image) in sideways else (bottom - top, right - left)


def to_rgb(image: "Image.Image") -> "Image.Image":
    """8 bits of RGB; `ValueError` where it is not clear what they would be."""
    from PIL import Image

    if image.mode.startswith("I"):
        # 16 bits of grey; Pillow itself would cut all above 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"its values, {values.min()} to {values.max()}, are not 16 bits")
        return Image.fromarray((values // 256).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("it has floating-point values of unknown range; save it with 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        # Pillow's own wish, with a warning, for palettes with transparency
        image = image.convert("RGBA")
    return image.convert("RGB")
