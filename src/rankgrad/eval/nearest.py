"""Exact nearest neighbours of each query, block by block, in an order that does not depend on the blocks."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.eval.embedding_blocks import Array, EmbeddingRows, Index, exact_products, row_tile
from rankgrad.ops.cpu_products import dot_products
from rankgrad.ops.tile_layout import split, tile_side

# Tiles searched at once and the limit of their scores: one top-k over many tiles is cheaper than one for each.
TOPK_TILES = 8
TOPK_NUMBERS = 2**21


def neighbours(
    queries: Array,
    gallery: Array,
    k: int,
    self_index: Index | None = None,
    *,
    normalize: bool = True,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[NDArray[np.float32], Index]:
    """[Q, k] scores and row numbers of the k candidates with the highest scores; of tied ones the lower row number is first.

    The gallery may be larger than memory (a numpy memmap): one block of it is in memory at a time, beside the queries.

    Args:
        queries: [Q, d] embeddings, a tensor or a numpy array.
        gallery: [C, d] embeddings.
        k: number of neighbours, at most the number of candidates of every query.
        self_index: [Q] row of the gallery that is the query itself and is excluded, -1 where there is none.
        normalize: scale all rows to length 1, so that scores are cosines.
        device: device to compute on; by default that of the queries.
        progress: called with the number of scores done and in all.
    """
    caller = "neighbours"
    on = queries.device if device is None and isinstance(queries, Tensor) else torch.device(device or "cpu")
    query_rows = EmbeddingRows.from_arrays([queries], device=on, normalize=normalize, name="queries", caller=caller)
    gallery_rows = EmbeddingRows.from_arrays(
        [gallery], device=on, normalize=normalize, name="gallery", caller=caller, dim=query_rows.dim
    )
    check_count(k, name="k", caller=caller)
    if k > len(gallery_rows) - (self_index is not None):
        raise ValueError(
            f"{caller}: k must be at most the number of candidates, got k={k} and {len(gallery_rows)} in the gallery"
        )
    itself = np.full(len(query_rows), -1) if self_index is None else np.asarray(self_index)
    if itself.shape != (len(query_rows),) or itself.max() >= len(gallery_rows):
        raise ValueError(
            f"{caller}: self_index must hold {len(query_rows)} rows of a gallery of {len(gallery_rows)}, got {itself.shape}"
        )
    with exact_products(on):
        return nearest(query_rows, gallery_rows, k, itself, progress)


def nearest(
    queries: EmbeddingRows,
    gallery: EmbeddingRows,
    k: int,
    self_index: Index,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[NDArray[np.float32], Index]:
    """`neighbours` of checked arguments."""
    side = tile_side(queries.device)
    height = row_tile(len(queries), side)
    chunks = split(len(queries), height)
    tiles = [queries.padded(chunk, height) for chunk in chunks]
    best = [torch.full((height, k), torch.iinfo(torch.int64).min, device=queries.device) for _ in chunks]
    span = side * min(max(TOPK_NUMBERS // (height * side), 1), TOPK_TILES)
    done, total = 0, len(queries) * len(gallery)
    for block in gallery.blocks(span):
        candidates = gallery.padded(block, side)
        for i, chunk in enumerate(chunks):
            for first in range(0, len(candidates), span):
                columns = candidates[first : first + span]
                scores = torch.cat([dot_products(tiles[i], tile) for tile in columns.split(side)], dim=1)
                begin = block.start + first
                hide_self(scores, self_index[chunk], begin)
                keys = sort_keys(scores, begin)[:, : block.stop - begin]
                best[i] = torch.cat((best[i], keys), dim=1).topk(k, dim=1).values
            done += (chunk.stop - chunk.start) * (block.stop - block.start)
            if progress:
                progress(done, total)
    found = torch.cat([keys[: chunk.stop - chunk.start] for keys, chunk in zip(best, chunks, strict=True)]).cpu()
    return scores_of(found), candidates_of(found)


def hide_self(scores: Tensor, self_index: Index, begin: int) -> None:
    """Set the scores of queries with themselves to -inf in a tile whose first candidate is `begin`."""
    here = np.flatnonzero((self_index >= begin) & (self_index < begin + scores.shape[1]))
    rows, columns = torch.from_numpy(here), torch.from_numpy(self_index[here] - begin)
    scores[rows.to(scores.device), columns.to(scores.device)] = -torch.inf


def ordered_bits(scores: Tensor) -> Tensor:
    """int64 in [-2**31, 2**31) in the order of the float32 scores; 0.0 and -0.0 are equal."""
    bits = (scores + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -(2**31) - bits - 1, bits)


def sort_keys(scores: Tensor, begin: int) -> Tensor:
    """int64 keys that order by score and, where scores are equal, the earlier candidate first; no two are equal."""
    candidate = torch.arange(begin, begin + scores.shape[1], device=scores.device)
    return ordered_bits(scores) * 2**32 + (2**32 - 1 - candidate)


def candidates_of(keys: Tensor) -> Index:
    """Candidates that these keys were made from."""
    index: Index = (2**32 - 1 - (keys & (2**32 - 1))).numpy()
    return index


def scores_of(keys: Tensor) -> NDArray[np.float32]:
    """Scores that these keys were made from."""
    bits = keys >> 32
    scores: NDArray[np.float32] = torch.where(bits < 0, -(2**31) - bits - 1, bits).to(torch.int32).view(torch.float32).numpy()
    return scores
