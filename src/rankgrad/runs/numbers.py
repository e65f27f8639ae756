"""How a row of a printed table becomes `Published` values."""

from collections.abc import Sequence

from rankgrad.runs.recipe import Published

# the k of each data set's columns, as the papers head them
KS = {
    "sop": (1, 10, 100, 1000),
    "inat": (1, 4, 16, 32),
    "cars": (1, 2, 4, 8),
    "cub": (1, 2, 4, 8),
    "vehicleid": (1, 5),
}
VEHICLEID_SPLITS = ("small", "medium", "large")


def hits(
    ks: Sequence[int], values: Sequence[float], source: str, *, split: str = "test", note: str = ""
) -> tuple[Published, ...]:
    """R@k for each k."""
    return tuple(Published(f"R@{k}", value, source, split, note) for k, value in zip(ks, values, strict=True))


def columns(data: str, values: Sequence[float], source: str, *, note: str = "") -> tuple[Published, ...]:
    """A row of `data`'s columns: R@k, for VehicleID of the small, medium and large list in turn."""
    ks = KS[data]
    if data != "vehicleid":
        return hits(ks, values, source, note=note)
    lists = zip(VEHICLEID_SPLITS, values[0::2], values[1::2], strict=True)
    return tuple(number for split, *pair in lists for number in hits(ks, pair, source, split=split, note=note))
