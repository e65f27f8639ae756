"""Galleries of random vectors, without images and without a run."""

import json
from pathlib import Path

import numpy as np

from rankgrad.search import Gallery
from rankgrad.search.gallery import ABOUT


def made_up(
    folder: Path, items: int = 1500, dim: int = 24, seed: int = 0, *, clusters: int = 40, spread: float = 0.6
) -> Gallery:
    """A gallery of clustered unit vectors without images; some vectors are there twice."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, dim))
    vectors = centres[rng.integers(0, clusters, items)] + spread * rng.normal(size=(items, dim))
    vectors[-20:] = vectors[:20]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    folder.mkdir()
    np.save(folder / "embeddings.npy", vectors.astype(np.float32))
    rows = "".join(f"{i},{i}.png,,\n" for i in range(items))
    (folder / "ids.csv").write_text(f"id,path,label,category\n{rows}")
    about = {
        "format": 1, "run": "nowhere", "checkpoint": "last", "step": 1, "weights": "w", "root": str(folder),
        "dim": dim, "ids": "ids.csv", "digest": f"d{seed}", "source": "made up",
    }  # fmt: skip
    (folder / ABOUT).write_text(json.dumps(about))
    return Gallery.open(folder)
