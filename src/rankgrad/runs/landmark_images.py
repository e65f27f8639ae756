"""Descriptors of landmark images at their own shape, as ROxford and RParis are evaluated.

A database image is shrunk until its long side is `size`; of a query the box is cut out first, and it is shrunk by as much as
the whole image would be. Nothing is enlarged. Each image is described at several scales.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad.data.image_files import read_guarded, to_rgb
from rankgrad.data.table import Table
from rankgrad.models import Embedder, embed_multiscale
from rankgrad.train.progress import Progress


def describe_landmarks(
    model: Embedder, table: Table, *, size: int, scales: Sequence[float], device: torch.device, out: Path | None = None
) -> NDArray[np.float32]:
    """[N, d], one image at a time because no two have the same shape; in a file that is mapped where `out` is given."""
    model.eval()
    shape = (len(table), model.dim)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        found: NDArray[np.float32] = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
    else:
        found = np.empty(shape, dtype=np.float32)
    with Progress(len(table), f"describing {table.name}", unit="images") as progress:
        for row in range(len(table)):
            pixels = torch.from_numpy(landmark(table, row, size)).permute(2, 0, 1)[None].to(device)
            found[row] = embed_multiscale(model, pixels, scales)[0].float().cpu().numpy()
            progress.advance()
    return found


def landmark(table: Table, row: int, size: int) -> NDArray[np.uint8]:
    """[H, W, 3], the long side at most `size`."""
    from PIL import Image

    image = read_guarded(table.file(row), to_rgb)
    longest = max(image.size)
    box = None if table.boxes is None else table.boxes[row]
    if box is not None and not np.isnan(box).any():
        left, top, right, bottom = box.tolist()
        image = image.crop((int(left), int(top), max(int(right), int(left) + 1), max(int(bottom), int(top) + 1)))
    side = max(1, round(size * max(image.size) / longest))
    # never enlarges
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.array(image)
