"""Data sets and decoded images of retrieval, opened once however many runs use them."""

import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.image_cache import open_images
from rankgrad.data.image_store import ImageBuffer, OnDemandImages
from rankgrad.data.readers import READERS, DataSet, read
from rankgrad.data.table import Table, halves
from rankgrad.data.text_batches import TokenizedTexts
from rankgrad.models import TextTokenizer
from rankgrad.runs.data_identity import DataIdentity
from rankgrad.runs.retrieval_recipe import RetrievalRecipe
from rankgrad.runs.task import RunContext

# fraction of a GPU's free memory that decoded images may take; the rest is for training
IMAGE_MEMORY_FRACTION = 0.4
# ends the name of a test whose gallery includes distractors
WITH_DISTRACTORS = "+r1m"


@dataclass(frozen=True, eq=False)
class Split:
    """A split with its images, or texts.

    Attributes:
        images: of all rows of the table.
        table: the whole split.
        rows: those that are selected, None for all.
    """

    images: ImageBuffer | OnDemandImages | TokenizedTexts
    table: Table
    rows: NDArray[np.int64] | None = None

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels of the selected rows."""
        return self.table.labels if self.rows is None else self.table.labels[self.rows]

    @property
    def selected(self) -> Table:
        """The table of the selected rows."""
        return self.table if self.rows is None else self.table.select(self.rows)


class DataCache:
    """Opens each data set and each split once.

    Args:
        context: where the data is and where decoded images go.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._data_sets: dict[tuple[object, ...], DataSet] = {}
        self._splits: dict[tuple[object, ...], Split] = {}
        self._identities: dict[tuple[object, ...], DataIdentity] = {}

    def data_set(self, recipe: RetrievalRecipe, name: str | None = None) -> DataSet:
        """The data set `name`, by default the one that the recipe trains on."""
        name = name or recipe.data_set
        key = (name, recipe.partial, bool(recipe.test_on), recipe.split_seed, recipe.image_root, recipe.columns)
        if key not in self._data_sets:
            found = read(
                name,
                self._folder(name, shared=bool(recipe.test_on)),
                partial=recipe.partial,
                split_seed=None if recipe.split_seed == "alphabetical" else recipe.split_seed,
                image_root=Path(recipe.image_root) if recipe.image_root else None,
                columns=recipe.columns,
            )
            self._data_sets[key] = found
        return self._data_sets[key]

    def _folder(self, name: str, *, shared: bool) -> Path | None:
        """Where `name` is: --data, or the subfolder of that name if the recipe uses several data sets."""
        root = self.context.data
        if not READERS[name].needs_folder:
            return None
        if root is None:
            raise ValueError(f"the data set {name!r} needs --data DIR, the folder that holds it")
        return root / name if shared and (root / name).is_dir() else root

    def table(self, recipe: RetrievalRecipe, split: str, name: str | None = None) -> Table:
        """The rows of a split that the recipe uses."""
        data_set = self.data_set(recipe, name)
        if split not in data_set.splits:
            raise ValueError(f"{data_set.name} has no split {split!r}; it has {', '.join(data_set.splits)}")
        return data_set.splits[split].subset(recipe.classes, recipe.images_per_class)

    def identity(self, recipe: RetrievalRecipe, split: str, name: str | None = None) -> DataIdentity:
        """Digests of the rows of a split that the recipe uses, by the first process."""
        key = (
            name or recipe.data_set,
            split,
            recipe.partial,
            recipe.split_seed,
            recipe.image_root,
            recipe.columns,
            recipe.classes,
            recipe.images_per_class,
        )
        if key not in self._identities:
            table = self.table(recipe, split, name)
            self._identities[key] = self.context.processes.on_first(lambda: identity_of(table))
        return self._identities[key]

    def split(self, recipe: RetrievalRecipe, split: str, name: str | None = None) -> Split:
        """A split with its images: decoded, on the device if they fit, or to be decoded on every use."""
        key = (
            name or recipe.data_set,
            split,
            recipe.partial,
            recipe.split_seed,
            recipe.image_root,
            recipe.columns,
            (recipe.trunk, recipe.max_length) if recipe.is_text else None,
            recipe.skip_bad,
            recipe.classes,
            recipe.images_per_class,
            recipe.side_of(split),
            recipe.aspect,
            recipe.size if recipe.decode == "always" else 0,
        )
        if key not in self._splits:
            self._splits[key] = self._open(recipe, self.table(recipe, split, name), recipe.side_of(split))
        return self._splits[key]

    def _open(self, recipe: RetrievalRecipe, table: Table, side: int) -> Split:
        if table.texts is not None:
            return Split(TokenizedTexts(table.texts, TextTokenizer(recipe.trunk, recipe.max_length)), table)
        square = recipe.aspect == "square"
        if recipe.decode == "always":
            return Split(OnDemandImages(table, recipe.size, side=side, square=square, workers=self.context.workers), table)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            images, table = self.context.processes.on_first_then_others(
                lambda: open_images(
                    table,
                    side=side,
                    cache=self.context.cache,
                    square=square,
                    skip_bad=recipe.skip_bad,
                    workers=self.context.workers,
                )
            )
        for warning in caught:
            self.context.note(str(warning.message))
        return Split(self._to_device(images), table)

    def _to_device(self, images: ImageBuffer) -> ImageBuffer:
        device = self.context.device
        return images.to(device) if device.type != "cpu" and images.fits_on(device, IMAGE_MEMORY_FRACTION) else images

    def training(self, recipe: RetrievalRecipe) -> tuple[Split, Split | None]:
        """What the recipe trains on, and what it validates on unless that is the test split."""
        split = self.split(recipe, "train")
        if recipe.validation == "half":
            first, _ = halves(split.table, seed=self.data_set(recipe).split_seed)
            in_first = np.isin(split.table.labels, np.unique(first.labels))
            return replace(split, rows=np.flatnonzero(in_first)), replace(split, rows=np.flatnonzero(~in_first))
        return split, self.split(recipe, "validation") if recipe.validation == "split" else None

    def tests(self, recipe: RetrievalRecipe) -> dict[str, tuple[str, str]]:
        """What there is to test on: name -> (data set, split)."""
        if recipe.test_on:
            found = {}
            for name in recipe.test_on:
                found[name] = (name, "test")
                if "distractors" in self.data_set(recipe, name).splits:
                    found[f"{name}{WITH_DISTRACTORS}"] = (name, "test")
            return found
        data_set = self.data_set(recipe)
        names = [split for split in data_set.protocols if split not in ("train", "validation")]
        if not names and recipe.validation != "split":
            names = [split for split in data_set.protocols if split == "validation"]
        if not names:
            raise ValueError(f"{data_set.name} has nothing to test on; it has {', '.join(data_set.splits)}")
        return {split: (data_set.name, split) for split in names}


def identity_of(table: Table) -> DataIdentity:
    """Fingerprint of a table, and digests of its classes."""

    def details(row: int) -> str:
        marks = "".join(str(int(flags[row])) for flags in (table.is_query, table.is_gallery) if flags is not None)
        if table.texts is not None:
            return f"{zlib.crc32(table.texts[row].encode()):08x} {marks}"
        if table.pixels is not None:
            return f"{zlib.crc32(table.pixels[row].tobytes()):08x} {marks}"
        return f"{table.file_sizes[row] or 'missing'} {marks}"

    labels = table.labels.tolist()
    return DataIdentity.of(
        table.fingerprint(),
        ((table.class_name(labels[row]), table.paths[row], details(row)) for row in range(len(table))),
    )
