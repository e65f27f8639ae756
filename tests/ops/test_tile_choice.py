"""Tiles fit in the shared memory of the GPUs that they are chosen for, by calculation."""

import pytest
from benchmarks.other_gpus import CARDS

tiles = pytest.importorskip("rankgrad.ops.triton.tiles")

TABLES = {name: table for name, table in vars(tiles).items() if name.endswith("_TILES")}


def test_there_are_tables_of_both_precisions():
    assert {"COUNT_TILES", "SPLIT_TILES"} <= set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_an_entry_holds_at_least_the_memory_it_takes(name):
    for needed, tile in TABLES[name][:-1]:
        assert tiles.shared_memory(tile) <= needed, tile
    assert TABLES[name][-1][0] == 0, "there is a tile for every GPU"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("name", TABLES)
def test_what_a_gpu_gets_fits(name, card):
    for first in (0, 1):  # with many thresholds the first is left out
        tile = tiles.tile_within(TABLES[name][first:], card.shared)
        assert tiles.shared_memory(tile) <= card.shared


def test_the_calculation_is_what_the_compiler_takes_on_hopper():
    # `python -m benchmarks.other_gpus` for sm_90; before Hopper there is one stage less
    assert tiles.shared_memory(tiles.COUNT_TILES[0][1]) == 147_456
    assert tiles.shared_memory(tiles.DESCRIBED_TILE) == 147_456


@pytest.mark.parametrize(
    ("queries", "others", "splits"),
    [(16384, 2048, 1), (4096, 2048, 4), (4096, 256, 2), (32, 32, 1), (0, 2048, 16)],
    ids=["enough programs", "few", "short lists", "one tile", "none, in a dry run"],
)
def test_lists_are_split_where_queries_are_few(queries, others, splits):
    assert tiles.splits_of({"BM": 32, "BN": 32}, queries, others) == splits
