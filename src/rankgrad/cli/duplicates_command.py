"""`rankgrad duplicates`: near-duplicates and likely label errors of embedded images."""

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rankgrad._files import replace_file
from rankgrad._messages import Progress, plural
from rankgrad.cli.parser import Parser
from rankgrad.report.duplicates_page import duplicates_page
from rankgrad.report.run_reader import ItemTable
from rankgrad.report.thumbnails import Thumbnails
from rankgrad.search.duplicates import DuplicateGroup, LabelError, label_errors, near_duplicates, nearest_neighbours
from rankgrad.search.gallery import Gallery
from rankgrad.search.searcher import Searcher

DUPLICATES, ERRORS, PAGE = "duplicates.csv", "label_errors.csv", "duplicates.html"
# accuracy of neighbours from which on a disagreement points at the label
RELIABLE = 0.8
# the page stays below 25 MB
MOST_PICTURE_BYTES = 20_000_000


def main(arguments: list[str]) -> int:
    """`rankgrad duplicates EMB`."""
    options = _options(arguments)
    searcher = Searcher.open(options.embeddings, exact=options.exact, images=options.images)
    gallery = searcher.gallery
    noun = gallery.images.table.noun
    if not options.no_pictures:
        gallery.check_images()
    if len(gallery) < 2:
        raise ValueError(f"{options.embeddings} holds {plural(len(gallery), noun)}: there is nothing to compare it with")
    # some neighbours may have no label
    wanted = options.neighbours if all(gallery.images.labels) else 4 * options.neighbours
    with Progress(len(gallery), "searching", unit=f"{noun}s", shown=not options.quiet) as progress:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            progress.advance(count - done)
            done = count

        scores, rows = nearest_neighbours(searcher, wanted, progress=advance)
    groups = near_duplicates(scores, rows, options.threshold)
    errors, accuracy = label_errors(scores, rows, gallery.images.labels, options.neighbours, agreement=options.agreement)
    out: Path = options.out or options.embeddings
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / DUPLICATES, _groups_csv(gallery, groups))
    replace_file(out / ERRORS, _errors_csv(gallery, errors))
    table = _item_table(gallery)
    page = duplicates_page(
        gallery.folder.resolve().name,
        table,
        [list(zip(group.rows, group.scores, strict=True)) for group in groups],
        [(e.row, e.suggested, e.agreement, list(zip(e.neighbours, e.scores, strict=True))) for e in errors],
        threshold=options.threshold,
        most=options.most,
        pictures=Thumbnails(enabled=not options.no_pictures, max_bytes=MOST_PICTURE_BYTES),
    )
    replace_file(out / PAGE, page)
    copies = sum(len(group.rows) - 1 for group in groups)
    found = f"{plural(copies, 'near-duplicate')} in {plural(len(groups), 'group')}"
    print(f"{found} (cosine {options.threshold:g} or more): {out / DUPLICATES}")
    if any(gallery.images.labels):
        told = f"all {options.neighbours} nearest neighbours carry another label"
        print(f"{plural(len(errors), 'likely label error')} ({told}): {out / ERRORS}")
        if errors and accuracy < RELIABLE:
            print(
                f"note: neighbours predict the label of {accuracy:.0%} of the {noun}s only, so many of these are errors of the "
                "embeddings and not of the labels"
            )
    else:
        print(f"no labels: {out / ERRORS} is empty")
    moved = "" if options.no_pictures else gallery.images_moved()
    print(f"note: {moved}" if moved else f"page: {out / PAGE}")
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "rankgrad duplicates", "Find near-duplicates and likely label errors; write two CSV files and a page with pictures."
    )
    add = parser.add_argument
    add("embeddings", type=Path, metavar="EMB", help="a folder that `rankgrad embed` or `rankgrad index` wrote")
    add(
        "--threshold",
        metavar="COSINE",
        type=float,
        default=0.9,
        help="cosine from which two images are near-duplicates [%(default)s]",
    )
    add(
        "--neighbours",
        type=int,
        default=5,
        metavar="K",
        help="nearest neighbours that must all carry another label [%(default)s]",
    )
    add(
        "--agreement",
        metavar="SHARE",
        type=float,
        default=0.6,
        help="share of them that must carry the same other label [%(default)s]",
    )
    add("--out", type=Path, metavar="DIR", help="where to write [EMB]")
    add("--most", type=int, default=100, metavar="N", help="groups and errors to show on the page, at most [%(default)s]")
    add("--images", type=Path, metavar="DIR", help="folder of the images, where it moved or EMB is someone else's")
    add("--exact", action="store_true", help="search exactly, without the index")
    add("--no-pictures", action="store_true", help="leave the pictures out of the page")
    add("--quiet", action="store_true", help="show no progress")
    options = parser.parse(arguments)
    if not 0 < options.threshold <= 1:
        parser.error(f"--threshold must be above 0 and at most 1, got {options.threshold:g}")
    if not 0 <= options.agreement <= 1:
        parser.error(f"--agreement must be within 0 and 1, got {options.agreement:g}")
    for name in ("neighbours", "most"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


def _item_table(gallery: Gallery) -> ItemTable:
    items = gallery.images
    every = np.ones(len(gallery), np.bool_)
    known = (items.table.name, items.table.root, tuple(items.table.paths), items.labels, items.categories, every, every)
    return ItemTable(*known, texts=items.table.texts or ())


def _groups_csv(gallery: Gallery, groups: list[DuplicateGroup]) -> str:
    names = gallery.images.table.texts or gallery.images.table.paths
    rows = [
        (number, names[row], gallery.images.labels[row], f"{score:.4f}", _conflict(gallery, group))
        for number, group in enumerate(groups, start=1)
        for row, score in zip(group.rows, group.scores, strict=True)
    ]
    return _csv(("group", _column(gallery), "label", "score", "labels_differ"), rows)


def _column(gallery: Gallery) -> str:
    return "path" if gallery.images.table.texts is None else "text"


def _conflict(gallery: Gallery, group: DuplicateGroup) -> str:
    return "yes" if len({gallery.images.labels[row] for row in group.rows}) > 1 else "no"


def _errors_csv(gallery: Gallery, errors: list[LabelError]) -> str:
    paths, labels = gallery.images.table.texts or gallery.images.table.paths, gallery.images.labels
    rows = [
        (paths[e.row], labels[e.row], e.suggested, f"{e.agreement:.2f}", f"{e.score:.4f}", paths[e.neighbours[0]])
        for e in errors
    ]
    return _csv((_column(gallery), "label", "suggested", "agreement", "score", "nearest"), rows)


def _csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
