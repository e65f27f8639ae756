"""The built-in glyphs as a data set: tables of pixels instead of files."""

from collections import Counter
from pathlib import Path

from rankgrad.data.glyphs import SPLITS, load_glyphs
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext
from rankgrad.data.table import Table


def read_glyphs(context: ReaderContext) -> DataSet:
    """A character is a class, its script the category, an example one of its fonts."""
    splits: dict[str, Table] = {}
    classes = 0
    for split in SPLITS:
        glyphs = load_glyphs(split)
        example: Counter[int] = Counter()
        paths = []
        for label, category in zip(glyphs.labels.tolist(), glyphs.categories.tolist(), strict=True):
            script, char = glyphs.category_names[category], glyphs.class_names[label]
            paths.append(f"glyphs/{script}/U+{ord(char):04X}/{example[label]}")
            example[label] += 1
        splits[split] = Table(
            f"{context.name}/{split}",
            Path(),
            tuple(paths),
            # the splits share no character, so they share no label
            glyphs.labels + classes,
            categories=glyphs.categories,
            category_names=glyphs.category_names,
            class_names={classes + i: char for i, char in enumerate(glyphs.class_names)},
            pixels=glyphs.images,
        )
        classes += len(glyphs.class_names)
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 2, 4, 8))


GLYPHS = Reader(
    name="glyphs",
    title="characters drawn with matplotlib's fonts",
    layout="no folder: it is drawn",
    load=read_glyphs,
    needs_folder=False,
)
