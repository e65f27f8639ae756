"""Fake data sets for tests of readers, and ways to change them."""

from pathlib import Path

import fake_datasets

SOP_TRAIN = "Stanford_Online_Products/Ebay_train.txt"
INSHOP_LIST = "Eval/list_eval_partition.txt"
VEHICLES = "VehicleID_V1.0/train_test_split/test_list_800.txt"
MODELS = "VehicleID_V1.0/attribute/model_attr.txt"
INAT_TEST = "Inat_dataset_splits/Inaturalist_test_set1.txt"


def reader_of(tree: str) -> str:
    return tree.partition("-")[0]


def change(path: Path, line: int, new: str | bytes | None) -> None:
    """Put `new` in the place of a line (from 1), or take the line away."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1 : line] = [] if new is None else [new.encode() + b"\n" if isinstance(new, str) else new + b"\n"]
    path.write_bytes(b"".join(lines))


def images(root: Path, *paths: str) -> Path:
    for path in paths:
        fake_datasets.save(root / path, 0, 0, 0)
    return root


def write_csv(root: Path, text: str, name: str = "dataset.csv", encoding: str = "utf-8") -> Path:
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(text.encode(encoding))
    return root
