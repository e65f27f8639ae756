"""iNaturalist 2018 in the split of Smooth-AP: species, disjoint between training and test."""

from pathlib import PurePosixPath

import numpy as np

from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column, ParsedRows, positions

LIST = "Inaturalist_{}_set1.txt"


def read_inat(context: ReaderContext) -> DataSet:
    """Lists of paths train_val2018/<supercategory>/<category>/<image>; the two folders together are the class."""
    folder, mark = context.folder(f"Inat_dataset_splits/{LIST.format('train')}", LIST.format("train"))
    where = (folder / mark).parent
    lists = {
        split: context.rows(where / LIST.format(split), Column("path", "path", unique=True)) for split in ("train", "test")
    }
    for rows in lists.values():
        _check(rows, context)
    context.errors.raise_if_any()

    together = [path for rows in lists.values() for path in rows.texts["path"]]
    parts = [PurePosixPath(path).parts for path in together]
    # by number, not by text: category 10 comes after 9
    classes = sorted({(part[1], int(part[2])) for part in parts})
    place = {key: i for i, key in enumerate(classes)}
    labels = np.array([place[part[1], int(part[2])] for part in parts], dtype=np.int64)
    names, categories = positions([part[1] for part in parts])
    splits, start = {}, 0
    for split, rows in lists.items():
        chosen = slice(start, start + len(rows))
        splits[split] = context.table(
            split,
            folder,
            rows.texts["path"],
            labels[chosen],
            categories=categories[chosen],
            category_names=names,
            class_names={i: f"{group}/{category}" for i, (group, category) in enumerate(classes)},
            listed_at=rows,
        )
        start += len(rows)
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 4, 16, 32))


def _check(rows: ParsedRows, context: ReaderContext) -> None:
    for i, path in enumerate(rows.texts["path"]):
        parts = PurePosixPath(path).parts
        if len(parts) != 4 or not (parts[2].isascii() and parts[2].isdigit()):
            context.errors.add(rows.where(i), f"expected a path like train_val2018/Aves/3021/x.jpg, got {shorten(path)}")


INAT = Reader(
    name="inat",
    title="iNaturalist 2018, split of Smooth-AP",
    layout=f"{LIST.format('train')} and {LIST.format('test')} (of Smooth-AP) in Inat_dataset_splits, beside it train_val2018",
    load=read_inat,
    sizes={"train": (SplitSize(325_846, 5_690),), "test": (SplitSize(136_093, 2_452),)},
)
