"""Small pictures for tests of images, and tables of their files."""

import numpy as np
from PIL import Image

from rankgrad.data.table import Table


def picture(height, width, seed=0):
    """Smooth colours with some noise: [height, width, 3] uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8)


def table_of(root, paths, **fields):
    return Table(name="fake/train", root=root, paths=tuple(paths), labels=np.arange(len(paths)), **fields)


def image_of(images, row):
    """The stored image [3, H, W] by the definition of the buffer."""
    sizes = (3 * images.shapes.prod(1)).tolist()
    start = sum(sizes[:row])
    return images.flat[start : start + sizes[row]].reshape(3, *images.shapes[row].tolist())
