"""Stanford Cars 196: the first 98 models train, the others test. Reads both annotation layouts in circulation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.table import path_complaint

CLASSES = 196
TRAINING_CLASSES = 98
ALL = "cars_annos.mat"
# folder of images and its annotations
DEVKIT = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}


def read_cars(context: ReaderContext) -> DataSet:
    """cars_annos.mat, or the devkit's two files, whose own split is for classification and not used."""
    folder, mark = context.folder(ALL, "devkit/cars_train_annos.mat", "cars_train_annos.mat")
    if mark == ALL:
        listed = list(_records(context, folder / ALL, "relative_im_path", prefix=""))
    else:
        listed = []
        for images, name in DEVKIT.items():
            # the labelled test list was published later and is found beside the devkit as often as in it
            places = [folder / "devkit" / name, folder / name]
            path = next((place for place in places if place.is_file()), places[0])
            listed += _records(context, context.file(path), "fname", prefix=f"{images}/")
    _check_duplicates(context, listed)
    context.errors.raise_if_any()

    labels = np.array([label for _, label, _ in listed], dtype=np.int64)
    splits = {}
    for split, chosen in (("train", labels <= TRAINING_CLASSES), ("test", labels > TRAINING_CLASSES)):
        index = np.flatnonzero(chosen)
        splits[split] = context.table(split, folder, [listed[i][0] for i in index], labels[index])
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 2, 4, 8))


def _records(context: ReaderContext, path: Path, field: str, *, prefix: str) -> Iterator[tuple[str, int, str]]:
    """Image, class and location of every valid record."""
    for number, record in enumerate(_annotations(path, (field, "class")), start=1):
        image, label = record[field], record["class"]
        where = f"{path}: annotation {number}"
        complaint = path_complaint(image) if isinstance(image, str) else f"{field} must be text, got {shorten(image)}"
        if complaint:
            context.errors.add(where, complaint)
        elif not isinstance(label, (int, np.integer)) or not 1 <= label <= CLASSES:
            context.errors.add(where, f"class must be an integer from 1 to {CLASSES}, got {shorten(label)}")
        else:
            yield f"{prefix}{image}", int(label), where


def _annotations(path: Path, fields: tuple[str, ...]) -> Any:
    from scipy.io import loadmat

    try:
        content = loadmat(path, squeeze_me=True, variable_names=["annotations"])
    except Exception as error:  # scipy raises anything on a damaged file
        raise ValueError(f"cars: {path} is not a readable MATLAB file ({type(error).__name__}: {error})") from error
    annotations = np.atleast_1d(content.get("annotations", np.empty(0)))
    names = annotations.dtype.names or ()
    absent = [name for name in fields if name not in names]
    if absent:
        raise ValueError(
            f"cars: {path} must contain a struct array 'annotations' with the fields {' and '.join(fields)}, "
            f"got {'the fields ' + ', '.join(names) if names else 'none'}"
        )
    return annotations


def _check_duplicates(context: ReaderContext, listed: list[tuple[str, int, str]]) -> None:
    first: dict[str, str] = {}
    for image, _, where in listed:
        if first.setdefault(image, where) != where:
            context.errors.add(where, f"{shorten(image)} is already listed at {first[image]}")


CARS = Reader(
    name="cars",
    title="Stanford Cars 196",
    layout=f"{ALL} and car_ims, or devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat, cars_train and cars_test",
    load=read_cars,
    sizes={"train": (SplitSize(8_054, 98),), "test": (SplitSize(8_131, 98),)},
)
