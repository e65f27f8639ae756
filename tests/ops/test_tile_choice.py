"""Tiles fit in the shared memory of the GPUs that they are chosen for, by calculation."""

import pytest
import torch
from benchmarks.other_gpus import CARDS

from rankgrad._gpu import as_if_on

tiles = pytest.importorskip("rankgrad.ops.triton.tiles")

TABLES = {name: table for name, table in vars(tiles).items() if name.endswith("_TILES")}


def test_there_are_tables_of_both_precisions():
    assert {"COUNT_TILES", "SPLIT_TILES", "BACKWARD_TILES"} <= set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_an_entry_holds_at_least_the_memory_it_takes(name):
    for needed, tile in TABLES[name][:-1]:
        assert tiles.shared_memory(tile) <= needed, tile
    assert TABLES[name][-1][0] == 0, "there is a tile for every GPU"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("name", TABLES)
def test_what_a_gpu_gets_fits(name, card):
    with as_if_on(card.gpu):
        tile = tiles.tile_for(TABLES[name], torch.device("cpu"))
    assert tiles.shared_memory(tile) <= card.gpu.shared_memory


def test_the_calculation_is_what_the_compiler_takes_on_hopper():
    # `python -m benchmarks.other_gpus` for sm_90; before Hopper there is one stage less
    assert tiles.shared_memory(tiles.COUNT_TILES[0][1]) == 98_304
    assert tiles.shared_memory(tiles.DESCRIBED_TILE) == 147_456
    assert tiles.shared_memory(tiles.BACKWARD_TILES[0][1]) == 73_728
