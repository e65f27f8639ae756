"""The nearest candidates of each query: exact, block by block, in one order whatever the blocks."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad._checks import check_count
from rankgrad.eval.embedding_blocks import Array, Index, Rows, exact_products, row_tile
from rankgrad.ops.sources import split, tile_side

# Tiles that are looked through at once, and most scores of them: one search of many is cheaper than several of a tile each.
SEARCHED_TILES = 8
SEARCHED_NUMBERS = 2**21


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
    """[Q, k] scores and row numbers of the k candidates with the highest scores, the lower row number first where scores tie.

    The gallery may be larger than memory (a numpy memmap): a block of it is held at a time, beside the queries.

    Args:
        queries: [Q, d] embeddings, a tensor or a numpy array.
        gallery: [C, d] embeddings.
        k: how many, at most what the gallery has for every query.
        self_index: [Q] row of the gallery that is the query itself and is left out, -1 where there is none.
        normalize: bring all rows to length 1, so that scores are cosines.
        device: where to compute; by default where the queries are.
        progress: called with the scores done and the scores to do.
    """
    caller = "neighbours"
    on = queries.device if device is None and isinstance(queries, Tensor) else torch.device(device or "cpu")
    asking = Rows.of([queries], device=on, normalize=normalize, name="queries", caller=caller)
    asked = Rows.of([gallery], device=on, normalize=normalize, name="gallery", caller=caller, dim=asking.dim)
    check_count(k, name="k", caller=caller)
    if k > len(asked) - (self_index is not None):
        raise ValueError(f"{caller}: k must be at most the number of candidates, got k={k} and {len(asked)} in the gallery")
    own = np.full(len(asking), -1) if self_index is None else np.asarray(self_index)
    if own.shape != (len(asking),) or own.max() >= len(asked):
        raise ValueError(f"{caller}: self_index must hold {len(asking)} rows of a gallery of {len(asked)}, got {own.shape}")
    with exact_products(on):
        return nearest(asking, asked, k, own, progress)


def nearest(
    queries: Rows, gallery: Rows, k: int, own: Index, progress: Callable[[int, int], None] | None = None
) -> tuple[NDArray[np.float32], Index]:
    """`neighbours` of checked rows."""
    side = tile_side(queries.device)
    height = row_tile(len(queries), side)
    chunks = split(len(queries), height)
    tiles = [queries.padded(chunk, height) for chunk in chunks]
    best = [torch.full((height, k), torch.iinfo(torch.int64).min, device=queries.device) for _ in chunks]
    span = side * min(max(SEARCHED_NUMBERS // (height * side), 1), SEARCHED_TILES)
    done, total = 0, len(queries) * len(gallery)
    for block in gallery.blocks(span):
        candidates = gallery.padded(block, side)
        for i, chunk in enumerate(chunks):
            for first in range(0, len(candidates), span):
                panel = candidates[first : first + span]
                scores = torch.cat([tiles[i] @ tile.t() for tile in panel.split(side)], dim=1)
                begin = block.start + first
                hide_own(scores, own[chunk], begin)
                keys = sort_keys(scores, begin)[:, : block.stop - begin]
                best[i] = torch.cat((best[i], keys), dim=1).topk(k, dim=1).values
            done += (chunk.stop - chunk.start) * (block.stop - block.start)
            if progress:
                progress(done, total)
    found = torch.cat([keys[: chunk.stop - chunk.start] for keys, chunk in zip(best, chunks, strict=True)]).cpu()
    return scores_of(found), candidates_of(found)


def hide_own(scores: Tensor, own: Index, begin: int) -> None:
    """Sets the scores of queries with themselves, at the candidates `own`, to -inf in a tile of candidates from `begin` on."""
    here = np.flatnonzero((own >= begin) & (own < begin + scores.shape[1]))
    rows, columns = torch.from_numpy(here), torch.from_numpy(own[here] - begin)
    scores[rows.to(scores.device), columns.to(scores.device)] = -torch.inf


def ordered_bits(scores: Tensor) -> Tensor:
    """int64 in [-2**31, 2**31) with the order of the float32 scores; 0.0 and -0.0 are one number."""
    bits = (scores + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -(2**31) - bits - 1, bits)


def sort_keys(scores: Tensor, begin: int) -> Tensor:
    """int64 that order by score and, where scores are equal, the earlier candidate first: no two keys are equal."""
    candidate = torch.arange(begin, begin + scores.shape[1], device=scores.device)
    return ordered_bits(scores) * 2**32 + (2**32 - 1 - candidate)


def candidates_of(keys: Tensor) -> Index:
    """The candidates that made these keys."""
    index: Index = (2**32 - 1 - (keys & (2**32 - 1))).numpy()
    return index


def scores_of(keys: Tensor) -> NDArray[np.float32]:
    """The scores that made these keys."""
    bits = keys >> 32
    scores: NDArray[np.float32] = torch.where(bits < 0, -(2**31) - bits - 1, bits).to(torch.int32).view(torch.float32).numpy()
    return scores
