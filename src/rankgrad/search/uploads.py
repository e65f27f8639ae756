"""Images from strangers: told by their content, measured before they are decoded, and refused with a sentence."""

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.image_files import DAMAGE, UnreadableImageError
from rankgrad.search.trained_model import Network

MOST_BYTES = 10_000_000
MOST_PIXELS = 40_000_000
KINDS = "JPEG, PNG, WebP, GIF or BMP"


@dataclass
class RefusedError(Exception):
    """Why a request is not answered: an HTTP status and a sentence for its sender."""

    status: int
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def too_large() -> RefusedError:
    """For an upload of too many bytes."""
    return RefusedError(413, f"The file is larger than {MOST_BYTES // 1_000_000} MB. Choose a smaller one.")


def kind_of(content: bytes) -> str:
    """Pillow's name of the format that `content` begins like."""
    for start, kind in (
        (b"\xff\xd8\xff", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"GIF87a", "GIF"),
        (b"GIF89a", "GIF"),
        (b"BM", "BMP"),
    ):
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    raise RefusedError(415, f"This is no image that can be searched with: wanted is {KINDS}.")


def check_image(content: bytes) -> None:
    """Raises `RefusedError` unless `content` begins like an image of a sane size; decodes no pixel."""
    from PIL import Image

    if not content:
        raise RefusedError(400, "The file is empty.")
    if len(content) > MOST_BYTES:
        raise too_large()
    kind = kind_of(content)
    try:
        with Image.open(io.BytesIO(content), formats=(kind,)) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedError(413, _too_many_pixels()) from None
    except DAMAGE:
        raise RefusedError(422, f"The {kind} file is damaged and cannot be read.") from None
    if width * height > MOST_PIXELS:
        raise RefusedError(413, f"{_too_many_pixels()} This one has {width:,} x {height:,}.")


def embed_upload(network: Network, content: bytes) -> NDArray[np.float32]:
    """[d] of an uploaded image, prepared as files are."""
    check_image(content)
    with tempfile.TemporaryDirectory(prefix="rankgrad-") as folder:
        path = Path(folder) / "upload"
        path.write_bytes(content)
        try:
            return network.embed_file(path)
        except UnreadableImageError as error:
            # the file's name on this machine is nobody's business
            cause = str(error).replace(str(path), "it")
            told = "it is cut off or damaged" if "truncated" in cause or "broken" in cause else cause
            raise RefusedError(422, f"The image cannot be read: {told.removesuffix('.')}.") from None


def _too_many_pixels() -> str:
    return f"The image has too many pixels: at most {MOST_PIXELS // 1_000_000} million are searched with."
