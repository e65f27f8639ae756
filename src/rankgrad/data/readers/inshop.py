"""In-Shop Clothes Retrieval (DeepFashion): garments, a query set and a gallery."""

import re
from pathlib import PurePosixPath

import numpy as np

from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column, ParsedRows, positions

LIST = "list_eval_partition.txt"
COLUMNS = (
    Column("image_name", "path", unique=True),
    Column("item_id"),
    Column("evaluation_status", choices=("train", "query", "gallery")),
)
_ITEM = re.compile(r"id_([0-9]{1,18})")


def read_inshop(context: ReaderContext) -> DataSet:
    """One list for all splits; the category of an image is gender and type in its path, img/WOMEN/Dresses/..."""
    folder, mark = context.folder(f"Eval/{LIST}", LIST)
    rows = context.rows(folder / mark, *COLUMNS, header=True, counted=True)
    _check(rows, context)
    context.errors.raise_if_any()

    paths = rows.texts["image_name"]
    items = np.array([int(item.removeprefix("id_")) for item in rows.texts["item_id"]], dtype=np.int64)
    names, categories = positions(["/".join(PurePosixPath(path).parts[1:3]) for path in paths])
    status = np.array(rows.texts["evaluation_status"])
    # img.zip unpacks to img; the benchmark's own tree keeps it in Img
    root = folder if (folder / "img").is_dir() or not (folder / "Img" / "img").is_dir() else folder / "Img"
    splits = {}
    for split, chosen in (("train", status == "train"), ("test", status != "train")):
        index = np.flatnonzero(chosen)
        splits[split] = context.table(
            split,
            root,
            [paths[i] for i in index],
            items[index],
            categories=categories[index],
            category_names=names,
            class_names=dict(zip(items.tolist(), rows.texts["item_id"], strict=True)),
            listed_at=ParsedRows(rows.path, [rows.lines[i] for i in index]),
            **({} if split == "train" else {"is_query": status[index] == "query", "is_gallery": status[index] == "gallery"}),
        )
    return context.finish(splits, protocols={"test": "query-gallery"}, ks=(1, 10, 20, 30, 40, 50))


def _check(rows: ParsedRows, context: ReaderContext) -> None:
    for i, (path, item) in enumerate(zip(rows.texts["image_name"], rows.texts["item_id"], strict=True)):
        if not _ITEM.fullmatch(item):
            context.errors.add(rows.where(i), f"item_id must be like id_00000002, got {shorten(item)}")
        if len(PurePosixPath(path).parts) < 4:
            context.errors.add(
                rows.where(i), f"image_name must be like img/WOMEN/Dresses/id_00000002/x.jpg, got {shorten(path)}"
            )


INSHOP = Reader(
    name="inshop",
    title="In-Shop Clothes Retrieval (DeepFashion)",
    layout=f"Eval/{LIST} (or {LIST} beside the images) and img.zip, not img_highres.zip, unpacked: img/WOMEN, img/MEN",
    load=read_inshop,
    remarks=(
        (
            "FastAP states 28,760 test images and RaMBO 54,642 images of 11,735 classes in all; the files have 26,830 and "
            "52,712 of 7,982, which is what is used here"
        ),
    ),
    sizes={"train": (SplitSize(25_882, 3_997),), "test": (SplitSize(26_830, 3_985, queries=14_218),)},
)
