"""PKU VehicleID: cars seen by traffic cameras, three test lists of growing size."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column

LISTS = {"train": "train_list", "small": "test_list_800", "medium": "test_list_1600", "large": "test_list_2400"}
MODELS = tuple(f"model {i}" for i in range(250))
COLUMNS = (Column("image", "integer", unique=True), Column("vehicle", "integer"))
ATTRIBUTE_COLUMNS = (
    Column("vehicle", "integer", unique=True),
    Column("model", "integer", choices=tuple(map(str, range(len(MODELS))))),
)


def read_vehicleid(context: ReaderContext) -> DataSet:
    """Lists of image and vehicle ids; the category of an image is the model of its vehicle, where that is known."""
    folder, _ = context.folder("train_test_split/train_list.txt")
    lists = {split: context.rows(folder / "train_test_split" / f"{name}.txt", *COLUMNS) for split, name in LISTS.items()}
    model_of = _models(context, folder / "attribute" / "model_attr.txt")
    splits = {
        split: context.table(
            split,
            folder,
            [f"image/{image:07d}.jpg" for image in rows.integers("image").tolist()],
            rows.integers("vehicle"),
            categories=None if model_of is None else _categories(rows.integers("vehicle"), model_of),
            category_names=() if model_of is None else MODELS,
            listed_at=rows,
        )
        for split, rows in lists.items()
    }
    return context.finish(splits, protocols=dict.fromkeys(("small", "medium", "large"), "all-vs-all"), ks=(1, 5))


def _models(context: ReaderContext, path: Path) -> dict[int, int] | None:
    if context.partial and not path.is_file():
        context.notes.append(f"no categories: {path} does not exist")
        return None
    rows = context.rows(path, *ATTRIBUTE_COLUMNS)
    return dict(zip(rows.integers("vehicle").tolist(), rows.integers("model").tolist(), strict=True))


def _categories(vehicles: NDArray[np.int64], model_of: dict[int, int]) -> NDArray[np.int64]:
    # many vehicles have no model, and some vehicles with a model are in no list
    return np.array([model_of.get(vehicle, -1) for vehicle in vehicles.tolist()], dtype=np.int64)


VEHICLEID = Reader(
    name="vehicleid",
    title="PKU VehicleID",
    layout="VehicleID_V1.0.zip unpacked: image, train_test_split and attribute",
    load=read_vehicleid,
    remarks=(
        (
            "the papers state 110,178 training and 7,332 / 12,995 / 20,038 test images; the released files, cleaned of fake "
            "plates, have 113,346 and 6,493 / 13,377 / 19,777"
        ),
        (
            "the papers rank every image of a test list against all others; re-identification papers draw one gallery image "
            "per vehicle (protocol vehicleid-official), which gives far lower numbers. Do not compare the two"
        ),
    ),
    sizes={
        "train": (SplitSize(113_346, 13_164),),
        "small": (SplitSize(6_493, 800),),
        "medium": (SplitSize(13_377, 1_600),),
        "large": (SplitSize(19_777, 2_400),),
    },
)
