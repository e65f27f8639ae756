"""Google Landmarks, first version (2018): for training only."""

import re
from pathlib import Path

from rankgrad._messages import shorten
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column, ParsedRows, as_labels, check_rows, numbered_csv

CSV_COLUMNS = (Column("id", unique=True), Column("url"), Column("landmark_id", "integer"))
LIST_COLUMNS = (Column("path", "path", unique=True), Column("label"))
# where the images usually are; neither list says it
IMAGE_FOLDERS = ("train", "images", "jpg", "")
_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


def read_gldv1(context: ReaderContext) -> DataSet:
    """Kaggle's train.csv with images named <id>.jpg, or a list of paths and labels as in naver's landmarks18."""
    folder, mark = context.folder("train.csv", "lists/train.txt")
    if mark == "train.csv":
        rows = _csv_rows(context, folder / mark)
        paths, labels = [f"{image}.jpg" for image in rows.texts["id"]], rows.integers("landmark_id")
        names: dict[int, str] = {}
    else:
        rows = context.rows(folder / mark, *LIST_COLUMNS)
        paths, (labels, names) = rows.texts["path"], as_labels(rows.texts["label"])
    context.errors.raise_if_any()

    root = _image_folder(folder, paths)
    train = context.table("train", root, paths, labels, class_names=names, listed_at=rows)
    return context.finish({"train": train}, protocols={}, ks=())


def _csv_rows(context: ReaderContext, path: Path) -> ParsedRows:
    lines = numbered_csv(path, context.errors)
    expected = [column.name for column in CSV_COLUMNS]
    number, header = next(lines, (1, []))
    if header != expected:
        context.errors.add(f"{path}:{number}", f"expected the header {','.join(expected)!r}, got {shorten(','.join(header))}")
    rows = check_rows(path, lines, CSV_COLUMNS, context.errors)
    for i, image in enumerate(rows.texts["id"]):
        if not _ID.fullmatch(image):
            context.errors.add(rows.where(i), f"id must be letters and digits, since it names a file, got {shorten(image)}")
    return rows


def _image_folder(folder: Path, paths: list[str]) -> Path:
    """The first of the usual folders that contains any of the first thousand images."""
    for name in IMAGE_FOLDERS:
        if any((folder / name / path).is_file() for path in paths[:1000]):
            return folder / name
    return folder / IMAGE_FOLDERS[0]


GLDV1 = Reader(
    name="gldv1",
    title="Google Landmarks v1 (2018)",
    layout="train.csv (id,url,landmark_id) with images train/<id>.jpg, or lists/train.txt (path label) with those paths",
    load=read_gldv1,
    remarks=(
        "RS@k trained on 1,060,709 images of 12,894 landmarks, chosen from the 1,225,029 of 14,951 by an unpublished rule",
    ),
    sizes={"train": (SplitSize(1_225_029, 14_951), SplitSize(1_060_709, 12_894))},
)
