"""An image, from its file, its bytes or a table's own pixels, to RGB at the size it is stored.

1. `Table.boxes`, where given, are cropped first, in the file's own pixels.
2. The EXIF orientation is applied: the image is what a viewer shows. The papers' code ignores it.
3. Everything becomes RGB: grey is repeated, a palette is looked up, CMYK is converted, 16 bits are scaled to 8, transparency is
   dropped, an animation gives its first frame.
4. The short side is resized to `side`, or the image to side x side, with Pillow's bilinear filter, which averages when it
   shrinks: torchvision's `Resize` on a PIL image.

A file that cannot be read completely is an error that names it, and is never replaced by another one.
"""

import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_count
from rankgrad._messages import printable
from rankgrad.data.prefetch import default_threads, prefetch, with_progress
from rankgrad.data.table import Table

if TYPE_CHECKING:
    from PIL import Image

S = TypeVar("S")
T = TypeVar("T")
PixelBox: TypeAlias = tuple[int, int, int, int]
"""Left, top, right, bottom in whole pixels."""

# raised by Pillow's readers on a damaged file, besides their own DecompressionBombError
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)

# formats Pillow may detect, by content and regardless of the file name. Not PostScript, which is a program for Ghostscript; a
# JPEG with several pictures is one of these too
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# images that a thread decodes before it asks for more
AT_ONCE = 8

# largest aspect ratio that is stored with its aspect kept
LONGEST = 32

ORIENTATION_TAG = 0x0112


class UnreadableImageError(ValueError):
    """A file that is missing, damaged or not an image; the message names it."""


class ImageDecoder:
    """Decodes the images of `table` at the size they are stored.

    Args:
        table: files or pixels.
        side: length of the short side, or of both.
        square: resize to side x side, whatever the aspect ratio.
    """

    def __init__(self, table: Table, side: int, square: bool) -> None:
        check_count(side, name="side", caller="ImageDecoder")
        self.table, self.side, self.square = table, side, square

    def shape(self, row: int) -> tuple[int, int]:
        """Height and width at which the image will be stored; reads the header of its file only."""
        if self.square:
            return self.side, self.side
        return self._read(row, lambda image, box: stored_shape(*_upright_size(image, box), side=self.side, square=False))

    def image(self, row: int) -> "Image.Image":
        """The image in RGB, at the size it is stored."""
        return self._read(row, lambda image, box: resized_rgb(image, side=self.side, square=self.square, box=box))

    def planes(self, row: int) -> NDArray[np.uint8]:
        """The image as [3, height, width]."""
        return planes_of(self.image(row))

    def check(self, row: int) -> None:
        """Raise `UnreadableImageError` if `image` would; in about half the time, since JPEG is decoded at 1/8 of its size."""

        def decode(image: "Image.Image", box: PixelBox | None) -> None:
            stored_shape(*_upright_size(image, box), side=self.side, square=self.square)
            # no size is this small, so JPEG takes its smallest; other formats ignore it
            image.draft(None, (1, 1))
            to_rgb(image)

        self._read(row, decode)

    def _read(self, row: int, read: "Callable[[Image.Image, PixelBox | None], T]") -> T:
        return read_row(self.table, row, lambda image: read(image, _box_of(self.table, row, image)))


def read_row(table: Table, row: int, read: "Callable[[Image.Image], T]") -> T:
    """`read` of the whole image of a row, from its file or from the table's pixels."""
    from PIL import Image

    if table.pixels is not None:
        return read(Image.fromarray(table.pixels[row]))
    return read_guarded(table.file(row), read)


def read_guarded(source: Path | bytes, read: "Callable[[Image.Image], T]") -> T:
    """`read` of the image in a file or in memory; anything wrong with it is an `UnreadableImageError` that names the file."""
    from PIL import Image, UnidentifiedImageError

    name = printable(str(source)) if isinstance(source, Path) else "the image"
    try:
        # opening a named pipe would block
        if isinstance(source, Path) and not source.is_file():
            raise UnreadableImageError(f"{name} {'is not a file' if source.exists() else 'does not exist'}")
        with Image.open(source if isinstance(source, Path) else io.BytesIO(source), formats=FORMATS) as image:
            return read(image)
    except UnreadableImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableImageError(
            f"{name} is suspiciously large: {error} Raise PIL.Image.MAX_IMAGE_PIXELS if it is genuine"
        ) from error
    except UnidentifiedImageError as error:
        raise UnreadableImageError(f"{name} is not an image that Pillow can read as one of {', '.join(FORMATS)}") from error
    except DAMAGE as error:
        raise UnreadableImageError(f"{name} cannot be read: {error}") from error


def map_images(
    function: Callable[[S], T], items: Iterable[S], workers: int | None
) -> Iterator[tuple[S, T | UnreadableImageError]]:
    """Each item and `function` of it, in order, computed in `workers` threads; an unreadable image is yielded, not raised."""
    threads = default_threads() if workers is None else max(workers, 1)

    def attempt(item: S) -> T | UnreadableImageError:
        try:
            return function(item)
        except UnreadableImageError as error:
            return error

    # several at a time: a thread that is handed its work image by image waits for the interpreter's lock as often. A few for
    # each thread keep all of them busy when one image takes longer, without filling memory
    at_once = max(1, min(len(items) // (4 * threads), AT_ONCE)) if isinstance(items, Sized) else 1
    groups = prefetch(
        lambda group: [attempt(item) for item in group],
        _in_groups(items, at_once),
        threads=threads,
        ahead=AT_ONCE * threads // at_once,
    )
    return (pair for group, results in groups for pair in zip(group, results, strict=True))


def _in_groups(items: Iterable[S], size: int) -> Iterator[list[S]]:
    left = iter(items)
    while group := list(itertools.islice(left, size)):
        yield group


def unreadable_images(table: Table, *, progress: bool = True, workers: int | None = None) -> list[str]:
    """Decode every image of a table and return a message for each one that cannot be read.

    Args:
        table: files or pixels.
        progress: show progress on standard error.
        workers: threads that decode; by default one per core, 16 at most.
    """
    # the side makes no difference to what can be read
    decoder = ImageDecoder(table, 1, square=False)
    results = with_progress(
        map_images(decoder.check, range(len(table)), workers), len(table), f"checking {table.name}", progress
    )
    return [str(result) for _, result in results if isinstance(result, UnreadableImageError)]


def or_raise(result: T | UnreadableImageError) -> T:
    """What `map_images` yielded; raises if it is an error."""
    if isinstance(result, UnreadableImageError):
        raise result
    return result


def resized_rgb(image: "Image.Image", *, side: int, square: bool, box: PixelBox | None = None) -> "Image.Image":
    """`image`, cropped to `box`, upright, in RGB, at the size it is stored."""
    from PIL import Image

    turn = _turn(image)
    height, width = stored_shape(*_upright_size(image, box), side=side, square=square)
    if box is not None:
        image = _as_in_file(image).crop(box)
    elif image.format == "TIFF":
        # Pillow turns these itself when it loads them, which some versions do only after they have looked at the size to resize
        image.load()
        turn = None
    rgb = image
    if rgb.mode != "RGB":  # Pillow would copy an image that is RGB already
        rgb = to_rgb(rgb)
    if turn is not None:
        rgb = rgb.transpose(turn)
    return rgb.resize((width, height), Image.Resampling.BILINEAR)


def stored_shape(height: int, width: int, *, side: int, square: bool) -> tuple[int, int]:
    """Height and width at which an image of `height` x `width` is stored."""
    if square:
        return side, side
    short, long = min(height, width), max(height, width)
    if long > LONGEST * short:
        raise ValueError(
            f"its aspect ratio is too large: {width} x {height} pixels cannot be stored with a short side of {side}; "
            "remove it, or store images square"
        )
    # truncated, as torchvision does
    long = int(side * long / short)
    return (side, long) if height <= width else (long, side)


def planes_of(image: "Image.Image") -> NDArray[np.uint8]:
    """An RGB image as [3, height, width]."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def to_rgb(image: "Image.Image") -> "Image.Image":
    """8-bit RGB; `ValueError` where the conversion is ambiguous."""
    from PIL import Image

    if image.mode.startswith("I"):
        # 16-bit grey; Pillow itself would clip at 255
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"its values, {values.min()} to {values.max()}, are not 16-bit")
        return Image.fromarray((values // 256).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("it has floating-point values of unknown range; save it with 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        # what Pillow recommends, with a warning, for palettes with transparency
        image = image.convert("RGBA")
    return image.convert("RGB")


def _box_of(table: Table, row: int, image: "Image.Image") -> PixelBox | None:
    """The part of the file that is the image, in whole pixels inside it."""
    if table.boxes is None or np.isnan(table.boxes[row]).any():
        return None
    left, top, right, bottom = (round(float(edge)) for edge in table.boxes[row])
    width, height = _size_in_file(image)
    box = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    if box[0] >= box[2] or box[1] >= box[3]:
        raise UnreadableImageError(
            f"{printable(str(table.root / table.paths[row]))}: the box {(left, top, right, bottom)} lies outside the "
            f"{width} x {height} image"
        )
    return box


def _turn(image: "Image.Image") -> "Image.Transpose | None":
    """The transposition that makes the pixels of the file upright; None for a TIFF that is loaded, and so upright already."""
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
    # not image.getexif(): for some formats it decodes the image, and an error there would be mistaken for damaged metadata
    # and leave half an image behind
    exif = Image.Exif()
    try:
        if "exif" in image.info:
            exif.load(image.info["exif"])
        elif image.format == "TIFF":
            exif = image.getexif()
        orientation = exif.get(ORIENTATION_TAG)
    except DAMAGE:
        # damaged metadata does not make a photograph unreadable
        return None
    return turns.get(orientation) if isinstance(orientation, int) else None


def _size_in_file(image: "Image.Image") -> tuple[int, int]:
    """Width and height of the pixels as the file holds them; some versions of Pillow say those of the upright TIFF."""
    from PIL import TiffImagePlugin

    if isinstance(image, TiffImagePlugin.TiffImageFile) and _turn(image) is not None:
        return image.tag_v2[TiffImagePlugin.IMAGEWIDTH], image.tag_v2[TiffImagePlugin.IMAGELENGTH]
    return image.size


def _as_in_file(image: "Image.Image") -> "Image.Image":
    """The pixels as the file holds them: turned back where Pillow turns them when it loads them."""
    from PIL import Image

    turn = _turn(image) if image.format == "TIFF" else None
    if turn is None:
        return image
    back = {Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270, Image.Transpose.ROTATE_270: Image.Transpose.ROTATE_90}
    return image.transpose(back.get(turn, turn))  # the others undo themselves


def _upright_size(image: "Image.Image", box: PixelBox | None) -> tuple[int, int]:
    """Height and width after the crop and upright."""
    from PIL import Image

    left, top, right, bottom = box or (0, 0, *_size_in_file(image))
    sideways = {Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90}
    return (right - left, bottom - top) if _turn(image) in sideways else (bottom - top, right - left)
