"""CUB-200-2011: birds; the first hundred species train, the others test."""

import numpy as np

from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column, ParsedRows

TRAINING_CLASSES = 100


def read_cub(context: ReaderContext) -> DataSet:
    """images.txt and image_class_labels.txt, joined by image id. train_test_split.txt is for classification."""
    folder, _ = context.folder("images.txt")
    images = context.rows(
        folder / "images.txt", Column("image_id", "integer", unique=True), Column("path", "path", unique=True)
    )
    classes = context.rows(
        folder / "image_class_labels.txt",
        Column("image_id", "integer", unique=True),
        Column("class_id", "integer", choices=tuple(str(i) for i in range(1, 201))),
    )
    class_of = dict(zip(classes.integers("image_id").tolist(), classes.integers("class_id").tolist(), strict=True))
    for i, image in enumerate(images.integers("image_id").tolist()):
        if image not in class_of:
            context.errors.add(images.where(i), f"image {image} has no class in {classes.path.name}")
    context.errors.raise_if_any()

    labels = np.array([class_of[image] for image in images.integers("image_id").tolist()], dtype=np.int64)
    # 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
    names = {label: path.partition("/")[0] for label, path in zip(labels.tolist(), images.texts["path"], strict=True)}
    splits = {}
    for split, chosen in (("train", labels <= TRAINING_CLASSES), ("test", labels > TRAINING_CLASSES)):
        index = np.flatnonzero(chosen)
        splits[split] = context.table(
            split,
            folder,
            [f"images/{images.texts['path'][i]}" for i in index],
            labels[index],
            class_names=names,
            listed_at=ParsedRows(images.path, [images.lines[i] for i in index]),
        )
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 2, 4, 8))


CUB = Reader(
    name="cub",
    title="Caltech-UCSD Birds 200-2011",
    layout="CUB_200_2011.tgz unpacked: images.txt, image_class_labels.txt and images",
    load=read_cub,
    sizes={"train": (SplitSize(5_864, 100),), "test": (SplitSize(5_924, 100),)},
)
