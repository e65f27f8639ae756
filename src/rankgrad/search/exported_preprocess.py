"""Images for an exported model: a file in, float32 pixels [1, 3, size, size] of 0..255 out, as the model was trained for.

    import onnxruntime
    from preprocess import preprocess

    session = onnxruntime.InferenceSession("model.onnx")
    (embeddings,) = session.run(["embeddings"], {"pixels": preprocess("cat.jpg")})

Reads its settings from model.json beside it. Needs Pillow and numpy, and nothing else.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SETTINGS = Path(__file__).with_name("model.json")
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def preprocess(image: Any, settings: Any = None) -> Any:
    """Pixels of an image: a path, a file opened for reading, or a PIL image. Stack several with numpy.concatenate."""
    if settings is None:
        settings = json.loads(SETTINGS.read_text(encoding="utf-8"))["preprocessing"]
    if settings["native_shape"]:
        raise ValueError("this model embeds images at their own shape; the exported graph takes squares of one size only")
    if isinstance(image, Image.Image):
        image = _rgb(image)
    else:
        with Image.open(image) as opened:
            image = _rgb(opened)
    size, stored = settings["size"], settings["stored_side"]
    width, height = image.size
    if settings["square"]:
        width = height = stored
    else:
        short, long = min(width, height), max(width, height)
        long = int(stored * long / short)
        width, height = (long, stored) if height <= width else (stored, long)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def _rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, turned upright by the orientation that EXIF notes."""
    exif = Image.Exif()
    if image.format == "TIFF":
        image.load()  # Pillow turns these itself
    elif "exif" in image.info:
        exif.load(image.info["exif"])
    turn = TURNS.get(exif.get(0x0112, 1))
    if image.mode.startswith("I"):
        # 16-bit grey, which Pillow would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) // 256).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(path, *preprocess(path).shape)
