"""Stanford Online Products: product photographs in 12 categories."""

from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import Column

# of super_class_id 1 to 12
CATEGORIES = (
    *("bicycle", "cabinet", "chair", "coffee_maker", "fan", "kettle"),
    *("lamp", "mug", "sofa", "stapler", "table", "toaster"),
)
COLUMNS = (
    Column("image_id", "integer", unique=True),
    Column("class_id", "integer"),
    Column("super_class_id", "integer", choices=tuple(str(i + 1) for i in range(len(CATEGORIES)))),
    Column("path", "path", unique=True),
)


def read_sop(context: ReaderContext) -> DataSet:
    """Ebay_train.txt and Ebay_test.txt, a header and a line per image."""
    folder, _ = context.folder("Ebay_train.txt")
    lists = {split: context.rows(folder / f"Ebay_{split}.txt", *COLUMNS, header=True) for split in ("train", "test")}
    splits = {
        split: context.table(
            split,
            folder,
            rows.texts["path"],
            rows.integers("class_id"),
            categories=rows.integers("super_class_id") - 1,
            category_names=CATEGORIES,
            listed_at=rows,
        )
        for split, rows in lists.items()
    }
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 10, 100, 1000))


SOP = Reader(
    name="sop",
    title="Stanford Online Products",
    layout="Stanford_Online_Products.zip unpacked: Ebay_train.txt, Ebay_test.txt and folders like bicycle_final",
    load=read_sop,
    sizes={"train": (SplitSize(59_551, 11_318),), "test": (SplitSize(60_502, 11_316),)},
)
