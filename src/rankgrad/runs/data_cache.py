"""The images that recipes ask for, read and decoded once however many runs use them."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rankgrad.data.image_cache import open_images
from rankgrad.data.image_store import ImageBuffer, OnDemandImages
from rankgrad.data.readers import DataSet, read
from rankgrad.data.table import Table, halves
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.train.processes import ALONE, Processes
from rankgrad.train.sharding import Parallel

# the part of a GPU's free memory that decoded images may take; the rest is for training
SHARE_FOR_IMAGES = 0.4
# ends the name of a test whose gallery has distractors too
WITH_DISTRACTORS = "+r1m"


@dataclass(frozen=True)
class RunContext:
    """Where a recipe runs: what may differ between two runs of the same result."""

    data: Path | None
    device: torch.device
    cache: Path | None = None
    workers: int | None = None
    tensorboard: Literal["auto", "on", "off"] = "off"
    wandb: str = ""
    processes: Processes = ALONE
    parallel: Parallel = "ddp"

    def say(self, text: str) -> None:
        """A line for the user, said by the first process."""
        if self.processes.first:
            print(text, flush=True)


@dataclass(frozen=True, eq=False)
class Split:
    """A split with its images. `rows` are those of its images that are meant; None: all."""

    images: ImageBuffer | OnDemandImages
    table: Table
    rows: NDArray[np.int64] | None = None

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of the rows that are meant."""
        return self.table.labels if self.rows is None else self.table.labels[self.rows]

    @property
    def selected(self) -> Table:
        """The table of the rows that are meant."""
        return self.table if self.rows is None else self.table.select(self.rows)


class DataCache:
    """Opens each data set and each split once."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._data_sets: dict[tuple[str, bool, bool], DataSet] = {}
        self._splits: dict[tuple[object, ...], Split] = {}

    def data_set(self, recipe: Recipe, name: str | None = None) -> DataSet:
        """The data set `name`, by default the one that `recipe` trains on."""
        name = name or recipe.data_set
        key = (name, recipe.partial, bool(recipe.test_on))
        if key not in self._data_sets:
            self._data_sets[key] = read(name, self._folder(name, shared=bool(recipe.test_on)), partial=recipe.partial)
        return self._data_sets[key]

    def _folder(self, name: str, *, shared: bool) -> Path | None:
        """Where `name` lies: in --data, or, where a recipe uses several data sets, in the folder of its name there."""
        root = self.context.data
        if name == "glyphs":
            return None
        if root is None:
            raise ValueError(f"the data set {name!r} needs --data DIR, the folder that holds it")
        return root / name if shared and (root / name).is_dir() else root

    def table(self, recipe: Recipe, split: str, name: str | None = None) -> Table:
        """The images of a split that `recipe` uses."""
        data_set = self.data_set(recipe, name)
        if split not in data_set.splits:
            raise ValueError(f"{data_set.name} has no split {split!r}; it has {', '.join(data_set.splits)}")
        return data_set.splits[split].subset(recipe.classes, recipe.images_per_class)

    def split(self, recipe: Recipe, split: str, name: str | None = None) -> Split:
        """A split with its images: decoded, on the device where they fit there, or to be decoded when they are shown."""
        key = (
            name or recipe.data_set,
            split,
            recipe.partial,
            recipe.skip_bad,
            recipe.classes,
            recipe.images_per_class,
            recipe.stored,
            recipe.aspect,
            recipe.size if recipe.decode == "always" else 0,
        )
        if key not in self._splits:
            self._splits[key] = self._open(recipe, self.table(recipe, split, name))
        return self._splits[key]

    def _open(self, recipe: Recipe, table: Table) -> Split:
        square = recipe.aspect == "square"
        if recipe.decode == "always":
            return Split(
                OnDemandImages(table, recipe.size, side=recipe.stored, square=square, workers=self.context.workers), table
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            images, table = self.context.processes.on_first_then_others(
                lambda: open_images(
                    table,
                    side=recipe.stored,
                    cache=self.context.cache,
                    square=square,
                    skip_bad=recipe.skip_bad,
                    workers=self.context.workers,
                )
            )
        for warning in caught:
            self.context.say(f"note: {warning.message}")
        return Split(self._near(images), table)

    def _near(self, images: ImageBuffer) -> ImageBuffer:
        device = self.context.device
        return images.to(device) if device.type != "cpu" and images.fits_on(device, SHARE_FOR_IMAGES) else images

    def training(self, recipe: Recipe) -> tuple[Split, Split | None]:
        """What `recipe` trains on, and what it validates on if that is not the test split."""
        split = self.split(recipe, "train")
        if recipe.validation == "half":
            first, _ = halves(split.table)
            in_first = np.isin(split.table.labels, np.unique(first.labels))
            return replace(split, rows=np.flatnonzero(in_first)), replace(split, rows=np.flatnonzero(~in_first))
        return split, self.split(recipe, "validation") if recipe.validation == "split" else None

    def tests(self, recipe: Recipe) -> dict[str, tuple[str, str]]:
        """What there is to test on: a name for each -> its data set and split."""
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
