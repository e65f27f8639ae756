"""Embeddings of many images: in batches, or one by one at their native shape."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankgrad._messages import Progress
from rankgrad.data.preprocessing import Preprocessing
from rankgrad.data.table import Table
from rankgrad.models import Embedder, embed_multiscale
from rankgrad.train.batch_tree import num_rows, select_rows
from rankgrad.train.loop import Batches
from rankgrad.train.settings import AUTOCAST, Precision


class MultiScale(nn.Module):
    """A network that embeds each image at several scales.

    Args:
        model: the network.
        scales: relative to the image's own size.
    """

    def __init__(self, model: Embedder, scales: Sequence[float]) -> None:
        super().__init__()
        self.model, self.scales = model, tuple(scales)

    def forward(self, images: Tensor) -> Tensor:
        return embed_multiscale(self.model, images, self.scales)


@torch.no_grad()
def embed(
    model: nn.Module,
    batches: Batches,
    *,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    name: str = "embedding",
    shown: bool = True,
) -> Tensor:
    """Embeddings [N, d] of all images of `batches`, in float32 on the CPU, row i for index i.

    The model is in evaluation mode meanwhile. A batch that does not fit in memory is halved until it fits.

    Args:
        model: from images to embeddings.
        batches: visit each of the indices 0 .. N - 1 once, such as `ImageBatches` with a `Sequential` sampler.
        device: where to compute, by default where the model is.
        precision: of autocast around the model.
        name: shown beside the progress bar.
        shown: whether to show progress.
    """
    parameter = next(model.parameters(), None)
    target = (
        torch.device(device) if device is not None else (parameter.device if parameter is not None else torch.device("cpu"))
    )
    was_training = model.training
    model.eval()
    found: list[Tensor] = []
    index: list[Tensor] = []
    noun = getattr(batches, "noun", "image")
    try:
        with Progress(len(batches), name, unit="batches", shown=shown) as progress:
            for _, indices, images, _ in batches.iterate(0):
                found.append(embed_batch(model, images, target, precision).cpu())
                index.append(indices.cpu())
                progress.advance(note=f"{sum(map(len, index)):,} {noun}s")
    finally:
        model.train(was_training)
    order = torch.cat(index)
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        raise ValueError(f"embed: batches must visit each index from 0 to {len(order) - 1} once, got others")
    embeddings = torch.cat(found)
    result = torch.empty_like(embeddings)
    result[order] = embeddings
    return result


def embed_native_shape(
    model: Embedder,
    table: Table,
    preprocess: Preprocessing,
    *,
    scales: Sequence[float] = (1.0,),
    device: torch.device,
    out: Path | None = None,
) -> NDArray[np.float32]:
    """Embeddings [N, d] of a table whose images keep their shape, one image at a time.

    Args:
        model: put into evaluation mode.
        table: the images; of queries with a box that part is embedded.
        preprocess: with `native_shape`.
        scales: sizes at which an image is embedded, relative to its own.
        device: where to compute.
        out: write the result to this file and return it mapped.
    """
    model.eval()
    shape = (len(table), model.dim)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        found: NDArray[np.float32] = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
    else:
        found = np.empty(shape, dtype=np.float32)
    with Progress(len(table), f"embedding {table.name}", unit="images") as progress:
        for row in range(len(table)):
            pixels = preprocess.from_table(table, row)[None].to(device)
            found[row] = embed_multiscale(model, pixels, scales)[0].float().cpu().numpy()
            progress.advance()
    return found


def embed_batch(model: nn.Module, images: Any, device: torch.device, precision: Precision) -> Tensor:
    """Embeddings [B, d] of a batch, in float32 on `device`; halved until it fits in memory."""
    autocast = AUTOCAST[precision]
    items = size = num_rows(images)
    while True:
        try:
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                parts = [model(select_rows(images, slice(start, start + size), device)) for start in range(0, items, size)]
            return torch.cat(parts).float()
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        # outside of the handler, whose traceback holds the failed pass
        size = (size + 1) // 2
        torch.cuda.empty_cache()
