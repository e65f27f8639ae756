"""How much of the scores a program takes on at once: tiles, and which of them a GPU has the memory for."""

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeAlias

import torch

from rankgrad._gpu import gpu_of

# Rows of a tile of queries, most columns of a tile, step of a product; operands are padded to whole multiples.
TILE = 128
WIDEST = 256
STEP = 64

# Tiles and schedules, best first, found by timing on an H200: an entry holds the shared memory it needs. They are not tuned at
# run time: to compile one more candidate takes longer than a training step gains from it in a thousand calls.
Tiles: TypeAlias = Sequence[tuple[int, dict[str, int]]]
COUNT_TILES: Tiles = (  # two programs for each multiprocessor of Hopper: one multiplies while the other compares
    (200_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 4, "num_stages": 3}),
    (99_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
SPLIT_TILES: Tiles = (
    (200_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 4}),
    (99_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
STORE_TILES: Tiles = (
    (190_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 4, "num_stages": 3}),
    (99_000, {"BM": TILE, "BN": TILE, "BK": 64, "num_warps": 8, "num_stages": 3}),
    (0, {"BM": TILE, "BN": TILE, "BK": 32, "num_warps": 8, "num_stages": 2}),
)
# where operands come by tensor descriptors, which need no registers for addresses
DESCRIBED_TILE = {"BM": TILE, "BN": WIDEST, "BK": 64, "num_warps": 8, "num_stages": 3}
STRIPE = 16

# Where scores are made and their gradient is taken, and where they are counted for both of their queries: several programs for
# each multiprocessor, so that one multiplies while another compares, as many as `maxnreg` registers of a thread allow. A
# program has the thresholds of one of PARTS of its columns at a time.
BACKWARD_TILES: Tiles = (
    (190_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 3, "PARTS": 2, "maxnreg": 168}),
    (99_000, {"BM": TILE // 2, "BN": TILE, "BK": 64, "num_warps": 4, "num_stages": 3, "PARTS": 2}),
    (0, {"BM": TILE // 2, "BN": TILE, "BK": 32, "num_warps": 4, "num_stages": 2, "PARTS": 2}),
)
SPLIT_BACKWARD_TILES: Tiles = (
    (190_000, {"BM": TILE // 2, "BN": TILE, "BK": 64, "num_warps": 4, "num_stages": 3, "PARTS": 2, "maxnreg": 168}),
    *BACKWARD_TILES[1:],
)
COUNT_BOTH_TILES: Tiles = (
    (190_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 3, "PARTS": 2, "maxnreg": 168}),
    (99_000, {"BM": TILE, "BN": TILE // 2, "BK": 64, "num_warps": 4, "num_stages": 3, "PARTS": 2}),
    (0, {"BM": TILE, "BN": TILE // 2, "BK": 32, "num_warps": 4, "num_stages": 2, "PARTS": 2}),
)

# Of stored scores: what is looked up for each row and each column of a tile makes a square the best shape.
GRADIENT_TILE = {"BM": TILE // 2, "BN": TILE // 2, "num_warps": 8}


@cache
def _has_descriptors() -> bool:
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None  # came with Triton 3.4


def takes_descriptors(device: torch.device) -> bool:
    """Whether Triton has tensor descriptors and the GPU copies what they describe without threads, from Hopper on."""
    gpu = gpu_of(device)
    if gpu is None or not _has_descriptors():
        return _has_descriptors()
    return gpu.capability >= (9, 0) and gpu.shared_memory >= shared_memory(DESCRIBED_TILE)


def tile_for(tiles: Tiles, device: torch.device) -> dict[str, int]:
    """The first tile whose needs the device meets."""
    gpu = gpu_of(device)
    return next(tile for needed, tile in tiles if gpu is None or gpu.shared_memory >= needed)


def shared_memory(tile: Mapping[str, int]) -> int:
    """Most bytes that a program takes: every stage holds a step of both operands in float16."""
    return tile["num_stages"] * tile["BK"] * (tile["BM"] + tile["BN"]) * torch.float16.itemsize
