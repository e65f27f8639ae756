"""The papers' figures, computed with this library: one module each, in one style, and the embeddings they share."""

from functools import lru_cache

import torch
from torch import Tensor

from rankgrad.data.glyphs import load_glyphs

COMPONENTS = 64


@lru_cache(maxsize=1)
def glyph_components() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Embeddings [N, COMPONENTS] and labels of the training and test characters; the axes are those of the former."""
    train, test = load_glyphs("train"), load_glyphs("test")
    pixels = [torch.from_numpy(glyphs.images).flatten(1).float() / 255 for glyphs in (train, test)]
    centre = pixels[0].mean(dim=0)
    seen, unseen = (each - centre for each in pixels)
    variances, directions = torch.linalg.eigh(seen.t() @ seen / len(seen))
    axes = directions[:, -COMPONENTS:] / variances[-COMPONENTS:].sqrt()
    return (seen @ axes, torch.from_numpy(train.labels)), (unseen @ axes, torch.from_numpy(test.labels))
