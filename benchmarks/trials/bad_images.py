"""Image files that are none, not whole, not what they say, or larger than any machine."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fake_datasets
import numpy as np
import torch
from PIL import Image

from benchmarks.trials.corruption import damaged, put, replaced
from benchmarks.trials.fuzz_case import Case
from rankgrad.data.image_cache import open_images
from rankgrad.data.image_store import OnDemandImages
from rankgrad.data.preprocessing import Preprocessing
from rankgrad.data.table import Table

SIDE = 24
EXTENSIONS = ("jpg", "png", "gif", "bmp", "tif", "webp", "ppm")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def _picture(rng: random.Random) -> Image.Image:
    return Image.fromarray(fake_datasets.picture(rng.randrange(50), rng.randrange(50)))


def _exif(rng: random.Random) -> bytes:
    image = _picture(rng)
    exif = image.getexif()
    exif[0x0112] = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 0, 99))
    return encoded(image, "JPEG", exif=exif.tobytes())


def _broken_exif(rng: random.Random) -> bytes:
    return encoded(_picture(rng), "JPEG", exif=b"Exif\0\0" + rng.randbytes(rng.choice((1, 8, 200))))


def _animated(rng: random.Random) -> bytes:
    kind = rng.choice(("GIF", "WEBP", "PNG"))
    first, second = _picture(rng).resize((30, 30)), _picture(rng).resize((30, 30))
    return encoded(first, kind, save_all=True, append_images=[second] * 3)


def _sixteen(rng: random.Random) -> bytes:
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 65536, (30, 40), dtype=np.uint16)
    return encoded(Image.fromarray(values), rng.choice(("PNG", "TIFF", "PPM")))


def _integers(rng: random.Random) -> bytes:
    values = np.random.default_rng(rng.randrange(2**32)).integers(-(2**31), 2**31, (30, 40), dtype=np.int32)
    return encoded(Image.fromarray(values), "TIFF")


def _floats(rng: random.Random) -> bytes:
    return encoded(Image.fromarray(np.full((30, 40), rng.choice((np.nan, 0.5, 1e30)), np.float32)), "TIFF")


def _in_mode(mode: str, *kinds: str) -> Callable[[random.Random], bytes]:
    return lambda rng: encoded(_picture(rng).convert(mode), rng.choice(kinds))


def _transparent(rng: random.Random) -> bytes:
    image = _picture(rng).convert("P")
    return encoded(image, "PNG", transparency=rng.choice((0, bytes(rng.randrange(256) for _ in range(256)))))


# read as they are: what a careful program still shows
ODD: Mapping[str, Callable[[random.Random], bytes]] = {
    "CMYK": _in_mode("CMYK", "JPEG", "TIFF"),
    "grey": _in_mode("L", "JPEG", "PNG", "BMP", "WEBP"),
    "two colours": _in_mode("1", "PNG", "BMP", "TIFF", "GIF"),
    "palette": _in_mode("P", "PNG", "GIF", "BMP"),
    "transparent palette": _transparent,
    "grey with alpha": _in_mode("LA", "PNG"),
    "alpha": _in_mode("RGBA", "PNG", "WEBP", "TIFF"),
    "YCbCr": _in_mode("YCbCr", "JPEG", "TIFF"),
    "LAB": _in_mode("LAB", "TIFF"),
    "16 bits": _sixteen,
    "EXIF rotation": _exif,
    "broken EXIF": _broken_exif,
    "animated": _animated,
    "progressive": lambda rng: encoded(_picture(rng), "JPEG", progressive=True),
    "interlaced": lambda rng: encoded(_picture(rng), "GIF", interlace=1),
    "one pixel": lambda rng: encoded(_picture(rng).resize((1, 1)), rng.choice(("PNG", "GIF", "BMP", "JPEG"))),
}


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = _chunk(b"IDAT", zlib.compress(pixels or bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + body + _chunk(b"IEND", b"")


def _large_png(rng: random.Random) -> bytes:
    return _png(*rng.choice(((60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (30_000, 20_000), (1, 2**30))))


def _large_gif(rng: random.Random) -> bytes:
    small = encoded(_picture(rng).convert("P"), "GIF")
    return small[:6] + struct.pack("<HH", 65_535, 65_535) + small[10:]


def _large_bmp(rng: random.Random) -> bytes:
    small = encoded(_picture(rng), "BMP")
    return small[:18] + struct.pack("<ii", 2**30, rng.choice((2**30, -(2**30), 2**31 - 1))) + small[26:]


def _large_jpeg(rng: random.Random) -> bytes:
    small = bytearray(encoded(_picture(rng), "JPEG"))
    start = small.index(b"\xff\xc0") + 5
    small[start : start + 4] = struct.pack(">HH", 65_500, 65_500)
    return bytes(small)


def _large_tiff(rng: random.Random) -> bytes:
    small = encoded(Image.new("RGB", (12_345, 1)), "TIFF")
    return small.replace(struct.pack("<H", 12_345), struct.pack("<H", 65_535), 1)


def _of_no_size(rng: random.Random) -> bytes:
    return rng.choice((_png(0, 0), _png(0, 10), b"P6 0 0 255\n", encoded(_picture(rng), "GIF")[:6] + bytes(20)))


def _large_ppm(rng: random.Random) -> bytes:
    return rng.choice((b"P6 100000 100000 255\n", b"P5 " + b"9" * 400 + b" 9 255\n", b"P6 -5 5 255\n", b"P1 5 5\n" + b"1" * 24))


def _half(rng: random.Random) -> bytes:
    content = encoded(_picture(rng), rng.choice(("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")))
    return content[: len(content) // 2]


# never to be shown
BAD: Mapping[str, Callable[[random.Random], bytes]] = {
    "no bytes": lambda rng: b"",
    "zero bytes": lambda rng: bytes(rng.choice((1, 100, 5000))),
    "noise": lambda rng: rng.randbytes(rng.choice((3, 100, 5000))),
    "a web page": lambda rng: b"<!DOCTYPE html><html><title>404 Not Found</title></html>",
    "a vector drawing": lambda rng: b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "a PostScript program": lambda rng: (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n{ } loop\nshowpage\n"
    ),
    "a huge PNG": _large_png,
    "a huge GIF": _large_gif,
    "a huge BMP": _large_bmp,
    "a huge JPEG": _large_jpeg,
    "a huge TIFF": _large_tiff,
    "a huge or odd PPM": _large_ppm,
    "no size": _of_no_size,
    "a stripe": lambda rng: encoded(Image.new("RGB", (9000, 1)), "PNG"),
    "text that unpacks to gigabytes": lambda rng: _png(
        30, 30, _chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(80_000_000), 9)), pixels=bytes(91 * 30)
    ),
    "integers of 32 bits": _integers,
    "floats": _floats,
    "cut in half": _half,
}


class Pictures:
    """One good image and one other, through each way of decoding."""

    name = "images"

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        what, table, refused = _two_images(rng, folder)
        call, strict = _way(table, folder, what, rng)
        return Case(f"{table.paths[1]}: {what}", call, (table.paths[1],), refused and strict)


class Landmarks:
    """The same files, read at their own shape as landmarks are."""

    name = "landmarks"

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        what, table, refused = _two_images(rng, folder)
        # these may have any shape
        refused = refused and what != "a stripe"
        preprocess = Preprocessing(SIDE, native_shape=True)
        return Case(f"{table.paths[1]}: {what}", partial(preprocess.from_table, table, 1), (table.paths[1],), refused)


def _two_images(rng: random.Random, folder: Path) -> tuple[str, Table, bool]:
    """What is wrong with the second image, a table of the two, and whether the second must be refused."""
    folder.mkdir()
    put(folder / "good.jpg", encoded(_picture(rng), "JPEG"))
    path = folder / f"other.{rng.choice(EXTENSIONS)}"
    draw, refused = rng.random(), False
    if draw < 0.35:
        what = rng.choice(tuple(ODD))
        put(path, ODD[what](rng))
    elif draw < 0.65:
        what, refused = rng.choice(tuple(BAD)), True
        put(path, BAD[what](rng))
    elif draw < 0.72:
        what, refused = replaced(path, rng), True
    else:
        kind = rng.choice(tuple(ODD))
        done, content = damaged(ODD[kind](rng), rng)
        what = f"{kind}, {done}"
        put(path, content)
    return what, Table("some/test", folder, ("good.jpg", path.name), np.arange(2)), refused


def _way(table: Table, folder: Path, what: str, rng: random.Random) -> tuple[Callable[[], object], bool]:
    """How the images are read, and whether a bad one must be an error."""
    square, skip = rng.random() < 0.3, rng.random() < 0.3
    # a stripe may be squared
    strict = not skip and not (square and what == "a stripe")
    if rng.random() < 0.3:
        return partial(_decode_when_shown, table, square), not (square and what == "a stripe")
    cache = folder / "cache" if rng.random() < 0.5 else None
    return partial(_decode_once, table, cache, square, skip), strict


def _decode_once(table: Table, cache: Path | None, square: bool, skip: bool) -> None:
    images, kept = open_images(table, side=SIDE, cache=cache, square=square, skip_bad=skip, progress=False, workers=1)
    boxes = torch.tensor([[0.0, 0.0, SIDE, SIDE]]).repeat(len(images), 1)
    crops = images.crops(torch.arange(len(images)), boxes, torch.zeros(len(images), dtype=torch.bool), 16)
    assert len(kept) == len(images) == len(crops)


def _decode_when_shown(table: Table, square: bool) -> None:
    images = OnDemandImages(table, 16, side=SIDE, square=square, progress=False, workers=1)
    for row in range(len(table)):
        images[row, (0.0, 0.0, float(SIDE), float(SIDE)), False]
