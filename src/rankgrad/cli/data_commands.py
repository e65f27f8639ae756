"""`rankgrad check-data`: read a data set, decode its images, and describe it."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rankgrad._messages import did_you_mean, drop_empty_columns, first_ten, format_duration, plural, printable, table
from rankgrad.cli.parser import Parser
from rankgrad.data.image_files import UnreadableImageError, unreadable_images
from rankgrad.data.readers import READERS, DataSet, Reader, find_reader, read
from rankgrad.data.readers.base import SplitSize
from rankgrad.data.readers.records import Columns
from rankgrad.data.table import Table


def check_data(arguments: Sequence[str]) -> int:
    """`rankgrad check-data NAME DIR`."""
    parser = Parser(
        "rankgrad check-data",
        "Read a data set, compare it with what is published, decode every image, and describe it. Decoding takes about 2 ms of "
        "one core for an image of 500 x 375 pixels.",
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(READERS)}")
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="its folder, or the CSV file")
    parser.add_argument("--partial", action="store_true", help="accept an incomplete copy and list what is absent")
    parser.add_argument("--image-root", metavar="DIR", type=Path, help="folder of the images that a CSV file lists")
    columns = Columns()
    for name, about in (("text", "the texts"), ("label", "the classes of texts, or of images of a saved dataset")):
        parser.add_argument(
            f"--{name}-column", metavar="NAME", default=getattr(columns, name), help=f"column of {about} [%(default)s]"
        )
    parser.add_argument(
        "--pair-columns",
        metavar="A,B",
        default=",".join(columns.pair),
        help="columns of texts that belong together [%(default)s]",
    )
    parser.add_argument(
        "--image-column", metavar="NAME", default=columns.image, help="column of the images of a saved dataset [%(default)s]"
    )
    parser.add_argument("--no-decode", dest="decode", action="store_false", help="check names and lists only")
    parser.add_argument("--workers", metavar="N", type=int, help="threads that decode [one per core, 16 at most]")
    given = parser.parse(arguments)
    if given.name not in READERS:
        parser.error(f"there is no data set {given.name!r}: {did_you_mean(given.name, READERS)}")
    if given.workers is not None and given.workers < 1:
        parser.error(f"--workers must be at least 1, got {given.workers}")
    columns = Columns(given.text_column, given.label_column, tuple(given.pair_columns.split(",")), given.image_column)
    data = read(given.name, given.folder, partial=given.partial, image_root=given.image_root, columns=columns)
    print(describe(find_reader(given.name), data))
    of_texts = any(split.texts is not None for split in data.splits.values())
    if given.decode and READERS[given.name].needs_folder and not of_texts:
        print(f"\n{check_images(data, given.workers)}")
    return 0


def check_images(data: DataSet, workers: int | None = None) -> str:
    """Decode all images of a data set; those that cannot be read are an error that lists them."""
    began = time.monotonic()
    total = sum(len(split) for split in data.splits.values())
    bad = [message for split in data.splits.values() for message in unreadable_images(split, workers=workers)]
    if bad:
        raise UnreadableImageError(
            f"{len(bad):,} of {plural(total, 'image')} cannot be read:\n{first_ten(bad)}\n"
            "Repair or remove these files, or train with --skip-bad"
        )
    return f"decoded {plural(total, 'image')} in {format_duration(time.monotonic() - began)}: all of them can be read"


def describe(reader: Reader, data: DataSet) -> str:
    """The data set as a text of aligned columns."""
    places = dict.fromkeys(str(split.root) for split in data.splits.values() if split.pixels is None)
    noun = next(iter(data.splits.values())).noun
    header = ["split", f"{noun}s", "classes", "categories", "queries", "gallery", "smallest", "median", "largest", "protocol"]
    body = [[name, *_figures(split), data.protocols.get(name, "-")] for name, split in data.splits.items()]
    header, body = drop_empty_columns(header, body)
    lines = [f"{reader.name}: {reader.title}", *(f"in {printable(place)}" for place in places), ""]
    lines.append(table(header, body))
    if "smallest" in header:
        lines.append(f"smallest, median, largest: {noun}s per class")
    lines += ["", *_published(reader, data)]
    for note in (*data.notes, *reader.remarks):
        lines += ["", f"note: {note}"]
    return "\n".join(lines).rstrip()


def _figures(split: Table) -> list[str]:
    of_class = split.labels[split.labels != -1]
    counts = np.unique(of_class, return_counts=True)[1]
    categories = None if split.categories is None else len(np.unique(split.categories[split.categories >= 0]))
    spread = (counts.min(), np.median(counts), counts.max()) if len(counts) else (None, None, None)
    flags = [None if flag is None else flag.sum() for flag in (split.is_query, split.is_gallery)]
    return [_number(value) for value in (len(split), split.num_classes or None, categories, *flags, *spread)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,g}" if value < 1e5 else f"{int(value):,}"


def _published(reader: Reader, data: DataSet) -> list[str]:
    lines = []
    for split, sizes in reader.sizes.items():
        got = SplitSize.of(data.splits[split]) if split in data.splits else None
        verdict = "as published" if got in sizes else "differs"
        lines.append(f"expected {split}: {' or '.join(map(str, sizes))}: {verdict}")
    return lines or ["expected: no published sizes"]
