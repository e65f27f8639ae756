"""Revisited Oxford and Paris: buildings, 70 queries each, three difficulties, optionally a million distractors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column
from rankgrad.data.readers.safe_pickle import load_plain
from rankgrad.data.table import GroundTruth, path_complaint

DISTRACTORS = "revisitop1m"
QUERIES = 70
LARGEST_EDGE = 1e6


@dataclass(frozen=True, eq=False)
class Revisited:
    """The content of gnd_<name>.pkl: names without folder and extension, boxes of the queries, the relevant images of each."""

    gallery: tuple[str, ...]
    queries: tuple[str, ...]
    boxes: NDArray[np.float64]
    truth: GroundTruth


def read_ground_truth(path: Path) -> Revisited:
    """Read gnd_roxford5k.pkl or gnd_rparis6k.pkl without running code from it."""
    content = load_plain(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in ("imlist", "qimlist", "gnd")):
        raise ValueError(f"{path}: expected a dict with the lists imlist, qimlist and gnd, got {_kind(content)}")
    gallery, queries, entries = content["imlist"], content["qimlist"], content["gnd"]
    for key, names in (("imlist", gallery), ("qimlist", queries)):
        _check_names(names, f"{path}: {key}")
    if len(entries) != len(queries):
        raise ValueError(f"{path}: gnd must have one entry per query, {len(queries)}, got {len(entries)}")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: gnd[{i}] must be a dict, got {_kind(entry)}")
    boxes = [_box(entry.get("bbx"), f"{path}: gnd[{i}]") for i, entry in enumerate(entries)]
    lists = {
        key: tuple(_positions(entry.get(key), len(gallery), f"{path}: gnd[{i}][{key!r}]") for i, entry in enumerate(entries))
        for key in ("easy", "hard", "junk")
    }
    try:
        truth = GroundTruth(**lists)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Revisited(tuple(gallery), tuple(queries), np.array(boxes, dtype=np.float64).reshape(-1, 4), truth)


def read_revisited(context: ReaderContext, *, name: str) -> DataSet:
    """The test split: the queries, cropped to their boxes, then the gallery."""
    mark = f"gnd_{name}.pkl"
    # <name>/gnd_<name>.pkl comes first: the distractors are in the folder above both data sets
    folder, found = context.folder(f"{name}/{mark}", mark)
    folder = (folder / found).parent
    content = read_ground_truth(folder / mark)
    names = (*content.queries, *content.gallery)
    is_query = np.arange(len(names)) < len(content.queries)
    boxes = np.full((len(names), 4), np.nan)
    boxes[is_query] = content.boxes
    test = context.table(
        "test",
        folder,
        [f"jpg/{image}.jpg" for image in names],
        np.full(len(names), -1, dtype=np.int64),
        is_query=is_query,
        is_gallery=~is_query,
        boxes=boxes,
        ground_truth=content.truth,
    )
    splits = {"test": test}
    for place in (folder / DISTRACTORS, folder.parent / DISTRACTORS):
        listed = place / f"{DISTRACTORS}.txt"
        if listed.is_file():
            rows = context.rows(listed, Column("path", "path", unique=True))
            labels = np.full(len(rows), -1, dtype=np.int64)
            splits["distractors"] = context.table("distractors", place / "jpg", rows.texts["path"], labels, listed_at=rows)
            break
    else:
        context.notes.append(f"without the 1M distractors: {folder.parent / DISTRACTORS / DISTRACTORS}.txt does not exist")
    return context.finish(splits, protocols={"test": "roxford"}, ks=(1, 5, 10))


def _kind(value: object) -> str:
    return f"a dict of {', '.join(map(repr, value))}" if isinstance(value, dict) else type(value).__name__


def _check_names(names: Sequence[object], where: str) -> None:
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise ValueError(f"{where}[{i}] must be the name of an image, got {_kind(name)}")
        complaint = path_complaint(name)
        if complaint or name in seen:
            raise ValueError(f"{where}[{i}]: {complaint or f'{name!r} is already listed'}")
        seen.add(name)


def _box(value: object, where: str) -> list[float]:
    box = (
        value if isinstance(value, list) and len(value) == 4 and all(type(x) in (int, float) for x in value) else [math.nan] * 4
    )
    # no image is as large; the comparison is also false for nan and, unlike isfinite, takes integers of any size
    if not (all(abs(edge) < LARGEST_EDGE for edge in box) and box[0] < box[2] and box[1] < box[3]):
        raise ValueError(f"{where}: bbx must be x1, y1, x2, y2 with x1 < x2 and y1 < y2, got {shorten(repr(value))}")
    return box


def _positions(value: object, size: int, where: str) -> NDArray[np.int64]:
    if not isinstance(value, list) or not all(type(position) is int for position in value):
        raise ValueError(f"{where} must be a list of positions in imlist, got {shorten(repr(value))}")
    if value and not 0 <= min(value) <= max(value) < size:
        raise ValueError(f"{where} must lie in [0, {size}), the images of imlist, got {min(value)} to {max(value)}")
    return np.array(value, dtype=np.int64)


def _reader(name: str, title: str, gallery: int) -> Reader:
    return Reader(
        name=name,
        title=title,
        layout=f"{name}/gnd_{name}.pkl with {name}/jpg, and optionally {DISTRACTORS}/{DISTRACTORS}.txt with {DISTRACTORS}/jpg",
        load=partial(read_revisited, name=name),
        remarks=("archives downloaded since June 2022 have blurred faces; earlier published numbers are of the originals",),
        sizes={"test": (SplitSize(gallery + QUERIES, 0, queries=QUERIES),)},
    )


ROXFORD5K = _reader("roxford5k", "Revisited Oxford Buildings", 4_993)
RPARIS6K = _reader("rparis6k", "Revisited Paris", 6_322)
