"""Images and labels in a folder that `datasets` saved, written as files once."""

import hashlib
import os
from pathlib import Path
from typing import Any

from rankgrad._files import atomic_folder
from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext
from rankgrad.data.readers.list_files import as_labels
from rankgrad.data.readers.records import load_saved, read_records

# first bytes of a file -> its ending
ENDINGS = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"RI": ".webp", b"GI": ".gif", b"BM": ".bmp"}


def read_saved_images(context: ReaderContext) -> DataSet:
    """The images of each split; without splits, half of the classes train and the others test."""
    loaded, columns = load_saved(context.root), context.columns
    for rows in loaded.values():
        absent = [name for name in (columns.image, columns.label) if name not in rows.column_names]
        if absent:
            raise ValueError(
                f"{context.name}: {context.root} lacks the column {' and '.join(absent)}, got "
                f"{shorten(', '.join(rows.column_names))}; name them with --image-column and --label-column"
            )
    root = _written(context, loaded)
    texts = {
        part.split: [str(value) for value in part.columns[columns.label]] for part in read_records(context.root, context.errors)
    }
    labels, class_names = as_labels([text for part in texts.values() for text in part])
    splits, begin = {}, 0
    for split, own in texts.items():
        paths = sorted(path.relative_to(root).as_posix() for path in (root / (split or "all")).iterdir())
        of_split = labels[begin : begin + len(own)]
        splits[split] = context.table(split or "all", root, paths, of_split, seen=True, class_names=class_names)
        begin += len(own)
    if "" in splits:
        splits = context.split_classes(splits[""])
    protocols = {split: "all-vs-all" for split in splits if split != "train"}
    return context.finish(splits, protocols=protocols, ks=(1, 10, 100), split_seed=context.split_seed)


def _written(context: ReaderContext, loaded: Any) -> Path:
    """The images as files below the cache, by the fingerprint of the dataset."""
    from datasets import Image

    column = context.columns.image
    key = hashlib.sha256("\n".join([column, *(rows._fingerprint for rows in loaded.values())]).encode()).hexdigest()[:16]  # noqa: SLF001
    cache = Path(os.environ.get("RANKGRAD_CACHE") or Path.home() / ".cache" / "rankgrad")
    folder = cache / "datasets" / key
    if folder.is_dir():
        return folder
    with atomic_folder(folder) as unfinished:
        for split, rows in loaded.items():
            (unfinished / (split or "all")).mkdir()
            encoded = rows.cast_column(column, Image(decode=False))
            for number, image in enumerate(encoded[column]):
                content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
                ending = ENDINGS.get(content[:2], ".img")
                (unfinished / (split or "all") / f"{number:09d}{ending}").write_bytes(content)
    return folder


SAVED_IMAGES = Reader(
    name="datasets",
    title="your images, in a folder that Hugging Face `datasets` saved",
    layout="a folder of `datasets.save_to_disk` with the columns image and label, and splits train, validation, test or none",
    load=read_saved_images,
)
