"""How much of the scores a program takes on at once: tiles, and which of them a GPU has the memory for."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

# Rows of a tile of queries, most columns of a tile, step of a product; operands are padded to whole multiples.
TILE = 128
WIDEST = 256
STEP = 64

# Tiles and schedules, best first, found by timing on an H200: an entry holds the shared memory it needs. A counting tile is
# wider than a gradient tile, which needs registers for scores, powers and sums at once. They are not tuned at run time: to
# compile one more candidate takes longer than a training step gains from it in a thousand calls.
Tiles: TypeAlias = Sequence[tuple[int, dict[str, int]]]
COUNT_TILES: Tiles = (
    (190_000, {"BM": TILE, "BN": WIDEST, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (190_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 4, "num_stages": 3}),
    # before Hopper a thread of 4 warps would spill registers
    (99_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
SPLIT_COUNT_TILES: Tiles = (
    (200_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (99_000, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
BACKWARD_TILES: Tiles = (
    (125_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 4}),
    (99_000, {"BM": TILE, "BN": TILE // 4, "BK": 64, "num_warps": 4, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 2}),
)
SPLIT_BACKWARD_TILES: Tiles = (
    (125_000, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 4}),
    (99_000, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 2}),
)
STRIPE = 8

# To read from grids or sorted positives: these tiles leave most of the shared memory to the cache.
LOOK_UP = {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 8, "num_stages": 4}
SPLIT_LOOK_UP = {**LOOK_UP, "num_stages": 2}

# From this number of thresholds on, comparisons with positives are the larger part of a tile's work, and smaller tiles hide
# more of it behind the products; those with the edges of bins are too cheap for that.
MANY_THRESHOLDS = 8


def tile_for(tiles: Tiles, device: torch.device) -> dict[str, int]:
    """The first tile whose needs the device meets."""
    if device.type != "cuda":
        return tiles[0][1]
    return tile_within(tiles, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def tile_within(tiles: Tiles, memory: int) -> dict[str, int]:
    """The first tile that needs at most this shared memory."""
    return next(tile for needed, tile in tiles if memory >= needed)


def shared_memory(tile: Mapping[str, int], *, split: bool) -> int:
    """Most bytes that a program takes: every stage holds a step of both operands in float16, or its high and low parts."""
    return tile["num_stages"] * tile["BK"] * (tile["BM"] + tile["BN"]) * torch.float16.itemsize * (1 + split)
