"""A split of a data set before it is decoded: a checked list of files with their classes."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rankgrad.data.seeds import derive

# absolute (also a Windows drive), or a way up and out
_OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(?:^|[/\\])\.\.(?:[/\\]|$)")
# one of these stands in any list of paths, each between line feeds, that has something to complain about
_SIGNS = ("\n\n", "\n/", "/\n", "\\", ":/", "..", "\0")


def path_complaint(path: str) -> str | None:
    """Why `path` cannot name a file below a root; None if it can."""
    if not path or path.endswith("/"):
        return f"a path must name a file, got {path!r}"
    if "\0" in path:
        return f"a path cannot contain a NUL character, got {path!r}"
    if _OUTSIDE.search(path):
        return f"a path must be relative and stay inside its folder, got {path!r}"
    return None


def first_complaint(paths: Sequence[str]) -> str | None:
    """`path_complaint` of the first path that has one; a million paths without any take a fraction of a second."""
    joined = "\n".join(("", *paths, ""))
    if not paths or not any(sign in joined for sign in _SIGNS):
        return None
    return next(filter(None, map(path_complaint, paths)), None)


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The relevant images of each query, where classes do not say it (ROxford5k, RParis6k).

    Each field has one int64 array per query, in the order of the table's query rows, of positions among its gallery rows.

    Attributes:
        easy: clearly visible.
        hard: visible, but severely changed or occluded.
        junk: neither right nor wrong, removed from the ranking.
    """

    easy: tuple[NDArray[np.int64], ...]
    hard: tuple[NDArray[np.int64], ...]
    junk: tuple[NDArray[np.int64], ...]

    def __post_init__(self) -> None:
        lengths = len(self.easy), len(self.hard), len(self.junk)
        if len(set(lengths)) != 1:
            raise ValueError(f"GroundTruth: easy, hard and junk must have one array per query, got {lengths} arrays")
        for query, lists in enumerate(zip(self.easy, self.hard, self.junk, strict=True)):
            together = np.concatenate(lists)
            if together.dtype != np.int64:
                raise TypeError(f"GroundTruth: query {query}: positions must be int64, got {together.dtype}")
            if len(np.unique(together)) != len(together):
                raise ValueError(f"GroundTruth: query {query}: an image may be in one of easy, hard and junk only, once")

    def __len__(self) -> int:
        return len(self.easy)

    def select(self, queries: NDArray[np.int64], gallery: NDArray[np.int64], size: int) -> "GroundTruth":
        """Of these queries, among these of `size` gallery images; what is no longer in the gallery leaves the lists."""
        place = np.full(size, -1, dtype=np.int64)
        place[gallery] = np.arange(len(gallery))

        def kept(lists: tuple[NDArray[np.int64], ...]) -> tuple[NDArray[np.int64], ...]:
            moved = (place[lists[query]] for query in queries)
            return tuple(positions[positions >= 0] for positions in moved)

        return GroundTruth(kept(self.easy), kept(self.hard), kept(self.junk))


@dataclass(frozen=True, eq=False)
class Table:
    """The images, or texts, of one split and what is known about each.

    Attributes:
        name: data set and split, "sop/train".
        root: folder that `paths` are relative to.
        paths: [N] files, or names if the items are in `pixels` or `texts`.
        labels: [N] int64, the class of each image: any integers, -1 for an image without a class.
        categories: [N] int64, positions in `category_names`, -1 for unlabelled. A property of the image: a class may
            have images in several.
        category_names: the names of the categories.
        class_names: label -> name, where the data set names its classes; see `class_name`.
        is_query: [N] bool. Without `is_query` and `is_gallery` every image is a query and a candidate for all others.
        is_gallery: [N] bool.
        boxes: [N, 4] float x1, y1, x2, y2 in pixels, the part of the file that is the image; nan for all of it.
        pixels: [N, H, W] or [N, H, W, 3] uint8, the images themselves where there are no files.
        texts: [N] the texts themselves, where the items are texts and not images.
        ground_truth: the relevant images of each query, where labels do not say it.
    """

    name: str
    root: Path
    paths: tuple[str, ...]
    labels: NDArray[np.int64]
    categories: NDArray[np.int64] | None = None
    category_names: tuple[str, ...] = ()
    class_names: Mapping[int, str] = field(default_factory=dict)
    is_query: NDArray[np.bool_] | None = None
    is_gallery: NDArray[np.bool_] | None = None
    boxes: NDArray[np.float64] | None = None
    pixels: NDArray[np.uint8] | None = None
    texts: tuple[str, ...] | None = None
    ground_truth: GroundTruth | None = None

    def __post_init__(self) -> None:
        self._check_arrays()
        complaint = first_complaint(self.paths)
        if complaint:
            raise ValueError(f"Table {self.name}: {complaint}")
        if self.categories is not None and len(self.categories):
            low, high = self.categories.min(), self.categories.max()
            if low < -1 or high >= len(self.category_names):
                raise ValueError(
                    f"Table {self.name}: categories must lie in [-1, {len(self.category_names)}), the number of "
                    f"category_names, got {low} to {high}"
                )
        if (self.is_query is None) != (self.is_gallery is None):
            raise ValueError(f"Table {self.name}: is_query and is_gallery must be given together, got only one of them")
        if self.ground_truth is not None:
            self._check_ground_truth(self.ground_truth)

    def _check_arrays(self) -> None:
        items = len(self.paths)
        for name, wanted, shape in (
            ("labels", np.int64, (items,)),
            ("categories", np.int64, (items,)),
            ("is_query", np.bool_, (items,)),
            ("is_gallery", np.bool_, (items,)),
            ("boxes", np.floating, (items, 4)),
        ):
            array = getattr(self, name)
            if array is None and name != "labels":
                continue
            if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, wanted):
                got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"Table {self.name}: {name} must be a numpy array of {wanted.__name__}, got {got}")
            if array.shape != shape:
                raise ValueError(f"Table {self.name}: {name} must have shape {shape} for {items} paths, got {array.shape}")
        if self.pixels is not None:
            self._check_pixels(self.pixels)
        if self.texts is not None and len(self.texts) != items:
            raise ValueError(f"Table {self.name}: texts must be one per path, {items}, got {len(self.texts)}")

    def _check_pixels(self, pixels: NDArray[np.uint8]) -> None:
        if pixels.dtype != np.uint8:
            raise TypeError(f"Table {self.name}: pixels must be uint8, got {pixels.dtype}")
        if len(pixels) != len(self.paths) or not (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3)):
            raise ValueError(
                f"Table {self.name}: pixels must be [N, H, W] or [N, H, W, 3] for N = {len(self.paths)} paths, "
                f"got shape {pixels.shape}"
            )

    def _check_ground_truth(self, truth: GroundTruth) -> None:
        if self.is_query is None or self.is_gallery is None:
            raise ValueError(f"Table {self.name}: ground_truth needs is_query and is_gallery")
        queries, gallery = int(self.is_query.sum()), int(self.is_gallery.sum())
        if len(truth) != queries:
            raise ValueError(f"Table {self.name}: ground_truth has {len(truth)} queries, the table {queries}")
        positions = np.concatenate([*truth.easy, *truth.hard, *truth.junk, np.empty(0, np.int64)])
        if len(positions) and not 0 <= positions.min() <= positions.max() < gallery:
            raise ValueError(
                f"Table {self.name}: ground_truth must lie in [0, {gallery}), the gallery, "
                f"got {positions.min()} to {positions.max()}"
            )

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def noun(self) -> str:
        """What its rows are, for messages: "image" or "text"."""
        return "image" if self.texts is None else "text"

    @cached_property
    def num_classes(self) -> int:
        """Number of distinct labels, not counting -1."""
        return int((np.unique(self.labels) != -1).sum())

    def class_name(self, label: int) -> str:
        """The name of a class, its number where it has none; "" for -1."""
        return "" if label == -1 else self.class_names.get(label, str(label))

    def file(self, i: int) -> Path:
        """The file of row `i`."""
        if self.pixels is not None:
            raise ValueError(f"Table {self.name}: its images are not files, use pixels[{i}]")
        if self.texts is not None:
            raise ValueError(f"Table {self.name}: its items are texts and not files, use texts[{i}]")
        return self.root / self.paths[i]

    @cached_property
    def file_sizes(self) -> tuple[str, ...]:
        """[N] bytes of each file when they were first asked for; "" where it is missing or the images are pixels."""
        if self.pixels is not None:
            return ("",) * len(self)
        return tuple(_file_size(f"{self.root}{os.sep}{path}") for path in self.paths)

    def select(self, index: ArrayLike) -> "Table":
        """The rows of a boolean mask or of positions, in the order given."""
        rows = np.asarray(index)
        if rows.dtype == np.bool_:
            if rows.shape != (len(self),):
                raise ValueError(f"Table {self.name}: a mask must have shape ({len(self)},), got {rows.shape}")
            rows = np.flatnonzero(rows)
        elif rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise TypeError(f"Table {self.name}: select takes a mask or positions, got {rows.dtype} of shape {rows.shape}")
        rows = rows.astype(np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"Table {self.name}: positions must lie in [0, {len(self)}), got {rows.min()} to {rows.max()}")
        return replace(
            self,
            paths=tuple(self.paths[row] for row in rows.tolist()),
            labels=self.labels[rows],
            categories=None if self.categories is None else self.categories[rows],
            is_query=None if self.is_query is None else self.is_query[rows],
            is_gallery=None if self.is_gallery is None else self.is_gallery[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
            pixels=None if self.pixels is None else self.pixels[rows],
            texts=None if self.texts is None else tuple(self.texts[row] for row in rows.tolist()),
            ground_truth=self._selected_truth(rows),
        )

    def subset(self, classes: int = 0, images_per_class: int = 0) -> "Table":
        """The first `images_per_class` images of `classes` classes, taken from the categories in turn; 0: no limit.

        Where the images have no classes, a query with a ground truth counts as one, and distractors are cut to as many.
        """
        if not (classes or images_per_class):
            return self
        if self.ground_truth is not None:
            return self.select(_rows_of_queries(self, classes, images_per_class))
        if not self.num_classes:
            return self.select(np.arange(min(len(self), (classes or len(self)) * (images_per_class or len(self)))))
        keep = np.ones(len(self), dtype=np.bool_)
        if classes:
            keep &= np.isin(self.labels, _classes_in_turn(self, classes))
        if images_per_class:
            keep &= _position_in_class(self) < images_per_class
        return self.select(keep)

    def fingerprint(self) -> str:
        """A digest of all that decides a result: paths, file sizes, labels, categories, boxes, query and gallery marks.

        Equal on every machine and for any `root`. A missing file has no size; pixels and texts count by content.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name in ("labels", "categories", "is_query", "is_gallery", "boxes", "pixels"):
            array = getattr(self, name)
            digest.update(f"{name} {None if array is None else array.shape}\n".encode())
            if array is not None:
                digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
        for path, content in zip(self.paths, self.texts or self.file_sizes, strict=True):
            digest.update(f"{path}\0{content}\n".encode())
        if self.ground_truth is not None:
            for lists in (self.ground_truth.easy, self.ground_truth.hard, self.ground_truth.junk):
                digest.update(repr([positions.tolist() for positions in lists]).encode())
        return digest.hexdigest()

    def _selected_truth(self, rows: NDArray[np.int64]) -> GroundTruth | None:
        if self.ground_truth is None or self.is_query is None or self.is_gallery is None:
            return None
        if len(np.unique(rows)) != len(rows):
            raise ValueError(f"Table {self.name}: rows cannot be repeated, since its ground truth names each image once")
        # position of a row among the queries, and among the gallery
        nth_query, nth_gallery = np.cumsum(self.is_query) - 1, np.cumsum(self.is_gallery) - 1
        return self.ground_truth.select(
            nth_query[rows[self.is_query[rows]]], nth_gallery[rows[self.is_gallery[rows]]], int(self.is_gallery.sum())
        )


def halves(table: Table, seed: int | None = None) -> tuple[Table, Table]:
    """The images of one half of the classes and of the other. Of an odd number of classes the first half has one more.

    Args:
        table: at least two classes.
        seed: draws the first half at random, by the names of the classes: adding or removing one moves at most one other.
            None: the first half by label, which is how RS@k sets training classes aside for validation.
    """
    classes = np.unique(table.labels)
    if np.any(classes == -1):
        raise ValueError(f"{table.name} has images without a class (label -1), which belong to neither half of the classes")
    if len(classes) < 2:
        raise ValueError(f"{table.name} must have at least 2 classes to be split in halves, got {len(classes)}")
    if seed is not None:
        order = np.argsort([derive(seed, "class split", table.class_name(label)) for label in classes.tolist()])
        classes = classes[order]
    in_first = np.isin(table.labels, classes[: (len(classes) + 1) // 2])
    first, second = table.select(in_first), table.select(~in_first)
    return replace(first, name=f"{table.name}-first-half"), replace(second, name=f"{table.name}-second-half")


def _file_size(path: str) -> str:
    try:
        # many files: a Path for each would take longer than the call
        return str(os.stat(path).st_size)  # noqa: PTH116
    except OSError:
        return ""


def _rows_of_queries(table: Table, queries: int, images: int) -> NDArray[np.bool_]:
    """The first queries, and of the gallery the first images of each of their lists."""
    truth = table.ground_truth
    assert truth is not None
    assert table.is_query is not None
    assert table.is_gallery is not None
    chosen = np.flatnonzero(table.is_query)[: queries or None]
    listed = [found[: images or None] for lists in (truth.easy, truth.hard, truth.junk) for found in lists[: len(chosen)]]
    keep = np.zeros(len(table), dtype=np.bool_)
    keep[chosen] = True
    keep[np.flatnonzero(table.is_gallery)[np.concatenate(listed)]] = True
    return keep


def _position_in_class(table: Table) -> NDArray[np.int64]:
    """0 for the first image of a class, 1 for the second, and so on; queries and gallery are counted separately."""
    kind = np.zeros(len(table), dtype=np.int64) if table.is_query is None else table.is_query.astype(np.int64)
    order = np.lexsort((np.arange(len(table)), kind, table.labels))
    labels, kinds = table.labels[order], kind[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(labels) != 0) | (np.diff(kinds) != 0)])
    lengths = np.diff(np.r_[starts, len(table)])
    position = np.empty(len(table), dtype=np.int64)
    position[order] = np.arange(len(table)) - np.repeat(starts, lengths)
    return position


def _classes_in_turn(table: Table, classes: int) -> NDArray[np.int64]:
    """`classes` labels: the first of every category, then the second, until there are enough."""
    labels, first = np.unique(table.labels, return_index=True)
    labels, first = labels[labels != -1], first[labels != -1]
    category = np.zeros(len(labels), dtype=np.int64) if table.categories is None else table.categories[first]
    order = np.argsort(category, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(category[order]) != 0])
    turn = np.empty(len(labels), dtype=np.int64)
    turn[order] = np.arange(len(labels)) - np.repeat(starts, np.diff(np.r_[starts, len(labels)]))
    chosen: NDArray[np.int64] = labels[np.lexsort((category, turn))[:classes]]
    return chosen
