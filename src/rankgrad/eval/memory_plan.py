"""Memory of an evaluation, known before it starts: what it needs, and how it keeps to a limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankgrad._checks import check_count
from rankgrad._messages import format_bytes
from rankgrad.eval import embedding_blocks, rank_counts
from rankgrad.eval.embedding_blocks import EmbeddingRows, Index, row_tile
from rankgrad.eval.graded import SORTED_NUMBERS
from rankgrad.eval.metrics import metric_columns
from rankgrad.eval.rank_counts import MAX_PAIRS, PAIR_BYTES, pair_bytes
from rankgrad.ops.tile_layout import split, tile_side

# Blocks in memory while one is converted to rows, and tiles while one is counted or searched for neighbours.
BLOCKS_ALIVE, TILES_ALIVE = 3, 64
# The kernels keep their tiles in registers; what the search for neighbours or graded lists make of a tile on a GPU.
KERNEL_TILES_ALIVE = 16


@dataclass(frozen=True)
class MemoryPlan:
    """How an evaluation uses memory."""

    pair_budget: int  # bytes for relevant pairs at a time
    block_numbers: int  # numbers in a block that is read at once
    symmetric: bool  # copy one set of embeddings into counting order, so that a product serves a tile and its transpose
    total: int  # upper bound of the bytes in addition to the given embeddings


def plan_memory(
    queries: EmbeddingRows,
    gallery: EmbeddingRows | None,
    num_relevant: Index,
    *,
    ks: Sequence[int],
    neighbours: int = 0,
    graded: bool = False,
    kernels: bool = False,
    subsets: bool = False,
    listed: bool = False,
    memory_limit: int | None,
    caller: str,
) -> MemoryPlan:
    """Choose how to count, or refuse a limit that nothing fits in.

    Args:
        queries: rows of the queries.
        gallery: rows of the gallery, None if the queries are ranked among themselves.
        num_relevant: [Q] positives of each query.
        ks: cut-offs.
        neighbours: number of neighbours kept per query.
        graded: whether whole lists are sorted.
        kernels: whether fused kernels count.
        subsets: whether queries and gallery are drawn from the rows and copied.
        listed: whether relevance is given in place of labels.
        memory_limit: bytes for everything; None bounds the relevant pairs only.
        caller: function that error messages name.
    """
    if memory_limit is not None:
        check_count(memory_limit, name="memory_limit", caller=caller)
    candidates = queries if gallery is None else gallery
    dim, side = queries.dim, tile_side(queries.device)
    widths = np.sort(num_relevant[num_relevant > 0])
    tiles = TILES_ALIVE if not kernels else KERNEL_TILES_ALIVE if neighbours or graded else 0
    fixed = (
        16 * 8 * (len(queries) + len(candidates))  # labels and orders
        + 2 * 8 * len(queries) * (len(metric_columns(ks)) + 2 + 2 * neighbours)  # results
        + tiles * 4 * side**2
        + (64 * min(SORTED_NUMBERS, len(queries) * len(candidates)) if graded else 0)
        + (2 * 4 * dim * len(queries) if neighbours else 0)
        + (4 * dim * len(queries) if subsets else 0)
        # rows in float32 and as two float16 halves; all metrics of a slice of pairs
        + (8 * dim * (len(queries) + len(candidates)) + PAIR_BYTES * min(MAX_PAIRS, int(widths.sum())) if kernels else 0)
    )
    one_set = gallery is None and not queries.on_disk and not kernels and not subsets and not listed
    least = 0
    for symmetric in (True, False) if one_set else (False,):
        height = side if symmetric else row_tile(len(widths), side)
        row_bytes = 0 if symmetric or kernels else 4 * height * dim
        chunk_bytes = [pair_bytes(height, int(widths[chunk.stop - 1])) + row_bytes for chunk in split(len(widths), height)]
        needed = fixed + (4 * dim * len(candidates) if symmetric else 0)
        fewest = min(dim * side, dim * len(candidates))  # one tile
        least = needed + BLOCKS_ALIVE * 4 * fewest + max(chunk_bytes, default=0)
        if memory_limit is None or memory_limit >= least:
            most = min(embedding_blocks.BLOCK_NUMBERS, dim * len(candidates))
            spare = most if memory_limit is None else fewest + (memory_limit - least) // 2 // (BLOCKS_ALIVE * 4)
            numbers = min(max(most, fewest), spare)
            needed += BLOCKS_ALIVE * 4 * numbers
            budget = rank_counts.MEMORY_LIMIT if memory_limit is None else memory_limit - needed
            pairs = max(min(sum(chunk_bytes), budget), *chunk_bytes, 0)
            return MemoryPlan(budget, numbers, symmetric, needed + pairs)
    raise limit_error(memory_limit, least, caller)


def limit_error(memory_limit: int | None, least: int, caller: str) -> ValueError:
    """The error about a limit that nothing fits in."""
    return ValueError(
        f"{caller}: memory_limit must be at least {least} ({format_bytes(least)}) for these embeddings, got {memory_limit}"
    )
