"""The network of a run, and images prepared for it as the run's own tests prepare them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankgrad.data.image_files import ImageDecoder, UnreadableImageError, map_images
from rankgrad.data.image_store import ImageBuffer, bytes_needed
from rankgrad.data.preprocessing import Preprocessing
from rankgrad.data.table import Table
from rankgrad.models import Embedder, embed_multiscale
from rankgrad.runs.data_cache import Split
from rankgrad.runs.embedding import MultiScale, embed
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.runs.retrieval_task import EMBEDDING_BATCH, RetrievalTask, ordered_batches
from rankgrad.runs.run_folder import RunFolder
from rankgrad.runs.task import RunContext
from rankgrad.train.checkpoints import MANIFEST, WEIGHTS


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network that embeds images the way its run was tested.

    Attributes:
        folder: of the run.
        recipe: what it was trained with, which says how images are prepared.
        model: in evaluation mode.
        device: where it computes.
        checkpoint: "best" or "last".
        step: of the checkpoint.
        fingerprint: of the weights; embeddings of two networks can be compared only where these are equal.
        debug: whether the run was a shrunk one, whose embeddings mean nothing.
    """

    folder: Path
    recipe: Recipe
    model: Embedder
    device: torch.device
    checkpoint: str
    step: int
    fingerprint: str
    debug: bool = False

    @property
    def at_own_shape(self) -> bool:
        """Whether images keep their shape, as landmarks are tested, or are cropped to a square."""
        return bool(self.recipe.test_on)

    @property
    def described(self) -> nn.Module:
        """From pixels to embeddings, at all scales of the recipe."""
        return self.model if self.recipe.scales == (1.0,) else MultiScale(self.model, self.recipe.scales).eval()

    def embed_table(
        self, table: Table, workers: int | None = None
    ) -> Iterator[tuple[list[int], NDArray[np.float32], list[UnreadableImageError]]]:
        """Rows, their embeddings and the images that could not be read, a batch at a time and in the order of the table.

        Files are decoded in threads while the network computes; no more than a few batches are in memory.
        """
        recipe = self.recipe
        cropped = ImageDecoder(table, recipe.stored, recipe.aspect == "square").planes
        make = partial(_at_own_shape, table, recipe.size) if self.at_own_shape else cropped
        rows: list[int] = []
        found: list[NDArray[np.uint8]] = []
        bad: list[UnreadableImageError] = []
        for row, planes in map_images(make, range(len(table)), workers):
            if isinstance(planes, UnreadableImageError):
                bad.append(planes)
                continue
            rows.append(row)
            found.append(planes)
            if len(rows) == EMBEDDING_BATCH:
                yield rows, self._embeddings(found), bad
                rows, found, bad = [], [], []
        if rows or bad:
            yield rows, self._embeddings(found), bad

    def embed_file(self, path: Path) -> NDArray[np.float32]:
        """[d] of one image file."""
        table = Table("query", path.parent, (path.name,), np.zeros(1, np.int64))
        for _, embeddings, bad in self.embed_table(table, workers=1):
            for error in bad:
                raise error
            found: NDArray[np.float32] = embeddings[0]
            return found
        raise AssertionError("a table of one image gives one batch")

    def _embeddings(self, planes: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
        if not planes:
            return np.empty((0, self.model.dim), np.float32)
        if self.at_own_shape:
            parts = [torch.from_numpy(image)[None].to(self.device) for image in planes]
            return torch.cat([embed_multiscale(self.model, part, self.recipe.scales) for part in parts]).float().cpu().numpy()
        # of the table only its length is asked
        table = Table("batch", Path(), ("image",) * len(planes), np.full(len(planes), -1))
        batches = ordered_batches(self.recipe, Split(_images(planes), table), RunContext(None, self.device))
        precision = self.recipe.precision
        found: Tensor = embed(self.described, batches, device=self.device, precision=precision, shown=False)
        return found.numpy()


def _at_own_shape(table: Table, size: int, row: int) -> NDArray[np.uint8]:
    """[3, H, W] of a row, its long side at most `size`."""
    return Preprocessing(size, native_shape=True).from_table(table, row).numpy()


def _images(planes: list[NDArray[np.uint8]]) -> ImageBuffer:
    shapes = torch.tensor([image.shape[1:] for image in planes])
    flat = torch.zeros(bytes_needed(shapes), dtype=torch.uint8)
    joined = np.concatenate([image.ravel() for image in planes])
    flat[: len(joined)] = torch.from_numpy(joined)
    return ImageBuffer(flat, shapes)


def open_run(folder: Path, device: torch.device | str = "cpu", *, checkpoint: str | None = None) -> Network:
    """The network of the run in `folder`.

    Args:
        folder: where `rankgrad train` wrote.
        device: where to compute.
        checkpoint: "best" or "last"; by default the best where there is one.
    """
    if checkpoint not in (None, "best", "last"):
        raise ValueError(f"open_run: checkpoint must be 'best' or 'last', got {checkpoint!r}")
    run = RunFolder(folder)
    task = RetrievalTask.from_run(run, RunContext(None, torch.device(device)), {})
    which: Literal["best", "last"] = (
        "last" if checkpoint == "last" or not (checkpoint or run.checkpoints.pointer("best")) else "best"
    )
    found = run.checkpoints.checkpoint(which)
    # all weights come from the checkpoint: the file or download that training began with is not needed
    model = task.make_model(pretrained=False)
    found.load_into(model)
    manifest = json.loads((found.folder / MANIFEST).read_text(encoding="utf-8"))
    return Network(
        folder=folder,
        recipe=task.recipe,
        model=model.eval(),
        device=torch.device(device),
        checkpoint=which,
        step=found.step,
        fingerprint=manifest[WEIGHTS]["blake2b"],
        debug=run.read().debug,
    )
