"""Data sets from the folders that their archives unpack to, checked before anything is trained on them.

read("sop", Path("/data/sop"))      a `DataSet` of tables; a `ValueError` or `FileNotFoundError` says what is wrong
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rankgrad.data.readers.base import DataSet, Reader, ReaderContext
from rankgrad.data.readers.builtin_glyphs import GLYPHS
from rankgrad.data.readers.cars import CARS
from rankgrad.data.readers.cub import CUB
from rankgrad.data.readers.folder import FOLDER, OMNIGLOT
from rankgrad.data.readers.gldv1 import GLDV1
from rankgrad.data.readers.inat import INAT
from rankgrad.data.readers.inshop import INSHOP
from rankgrad.data.readers.manifest import CSV
from rankgrad.data.readers.roxford import ROXFORD5K, RPARIS6K
from rankgrad.data.readers.sop import SOP
from rankgrad.data.readers.summary import describe
from rankgrad.data.readers.vehicleid import VEHICLEID

__all__ = ["READERS", "DataSet", "Reader", "check_data", "read"]

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        reader.name: reader
        for reader in (
            *(SOP, INSHOP, VEHICLEID, INAT, CUB, CARS, GLDV1, ROXFORD5K, RPARIS6K, OMNIGLOT),
            *(FOLDER, CSV, GLYPHS),
        )
    }
)


def read(name: str, root: Path | None, *, partial: bool = False) -> DataSet:
    """Read the data set `name` from `root`, the folder of its archive or the one above it.

    Args:
        name: one of `READERS`.
        root: where it lies; for "csv" the file or its folder; not used by "glyphs".
        partial: accept absent images and other counts than published, leaving out what is absent and saying so in `notes`.
            Malformed lists are refused all the same.
    """
    reader = _reader(name)
    if not reader.needs_folder:
        return reader.load(ReaderContext(reader, Path(), partial=partial))
    if root is None:
        raise ValueError(f"{name}: a folder is wanted, got none. Wanted: {reader.layout}")
    place = Path(root).expanduser().absolute()
    if not place.exists():
        raise FileNotFoundError(f"{name}: {place} does not exist. Wanted: {reader.layout}")
    if not place.is_dir() and reader is not CSV:
        raise ValueError(f"{name}: {place} is a file, a folder is wanted. Wanted: {reader.layout}")
    return reader.load(ReaderContext(reader, place, partial=partial))


def check_data(name: str, root: Path | None, *, partial: bool = False) -> str:
    """Read a data set and describe it: splits, classes, categories, published counts, notes."""
    return describe(_reader(name), read(name, root, partial=partial))


def _reader(name: str) -> Reader:
    if name not in READERS:
        near = difflib.get_close_matches(name, READERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(READERS)}"
        raise ValueError(f"read: unknown data set {name!r}: {hint}")
    return READERS[name]
