"""Data sets from the folders that their archives unpack to, checked before anything is trained on them.

read("sop", Path("/data/sop"))      a `DataSet` of tables; a `ValueError` or `FileNotFoundError` says what is wrong
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rankgrad._messages import did_you_mean
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext
from rankgrad.data.readers.builtin_glyphs import GLYPHS
from rankgrad.data.readers.cars import CARS
from rankgrad.data.readers.cub import CUB
from rankgrad.data.readers.folder import FOLDER, OMNIGLOT
from rankgrad.data.readers.gldv1 import GLDV1
from rankgrad.data.readers.inat import INAT
from rankgrad.data.readers.inshop import INSHOP
from rankgrad.data.readers.manifest import CSV
from rankgrad.data.readers.records import Columns, column_names, is_saved_dataset
from rankgrad.data.readers.roxford import ROXFORD5K, RPARIS6K
from rankgrad.data.readers.saved_images import SAVED_IMAGES
from rankgrad.data.readers.sop import SOP
from rankgrad.data.readers.texts import TEXTS
from rankgrad.data.readers.vehicleid import VEHICLEID

__all__ = ["READERS", "Columns", "DataSet", "Reader", "find_reader", "own_data_set", "read"]

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        reader.name: reader
        for reader in (
            *(SOP, INSHOP, VEHICLEID, INAT, CUB, CARS, GLDV1, ROXFORD5K, RPARIS6K, OMNIGLOT),
            *(FOLDER, CSV, SAVED_IMAGES, TEXTS, GLYPHS),
        )
    }
)


def read(
    name: str,
    root: Path | None,
    *,
    partial: bool = False,
    split_seed: int | None = 0,
    image_root: Path | None = None,
    columns: Columns | None = None,
) -> DataSet:
    """Read the data set `name` from `root`, the folder of its archive or the one above it.

    Args:
        name: one of `READERS`.
        root: where it is; for "csv" the file or its folder; not used by "glyphs".
        partial: accept absent images and other counts than published, leaving out what is absent and saying so in `notes`.
            Malformed lists are refused all the same.
        split_seed: "folder" and "csv" without a split draw the training classes with this seed; None takes the first half of
            the classes by name.
        image_root: "csv" only: the folder that its paths are relative to, or that its absolute paths start with.
        columns: "texts" and "datasets" only: names of the columns.
    """
    reader = find_reader(name)
    if not reader.needs_folder:
        return reader.load(ReaderContext(reader, Path(), partial=partial))
    if root is None:
        raise ValueError(f"{name}: give its folder. Expected: {reader.layout}")
    place = Path(root).expanduser().absolute()
    if not place.exists():
        raise FileNotFoundError(f"{name}: {place} does not exist. Expected: {reader.layout}")
    if not place.is_dir() and not reader.takes_file:
        raise ValueError(f"{name}: {place} is a file, not a folder. Expected: {reader.layout}")
    if image_root is not None:
        if reader is not CSV:
            raise ValueError(f"{name}: only a CSV file takes the folder of its images (--image-root)")
        image_root = Path(image_root).expanduser().absolute()
        if not image_root.is_dir():
            raise FileNotFoundError(f"{name}: the folder of the images (--image-root), {image_root}, does not exist")
    context = ReaderContext(
        reader, place, partial=partial, split_seed=split_seed, image_root=image_root, columns=columns
    )  # fmt: skip
    return reader.load(context)


def own_data_set(place: Path, columns: Columns | None = None) -> str:
    """Which reader a user's own data at `place` is for: "folder", "csv", "datasets" or "texts"."""
    columns = columns or Columns()
    if is_saved_dataset(place):
        names = column_names(place)
        return "texts" if columns.are_texts(names) and columns.image not in names else "datasets"
    if (place / "dataset.csv").is_file():
        return "csv"
    kind = place.suffix.lower()
    if kind in (".jsonl", ".parquet"):
        return "texts"
    if kind == ".csv":
        names = column_names(place)
        return "texts" if "path" not in names and columns.are_texts(names) else "csv"
    return "folder"


def find_reader(name: str) -> Reader:
    """The reader called `name`; an unknown name is an error with the nearest one."""
    if name not in READERS:
        raise ValueError(f"unknown data set {name!r}: {did_you_mean(name, READERS)}")
    return READERS[name]
