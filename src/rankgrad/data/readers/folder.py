"""Images sorted into folders: your own, a folder per class, and Omniglot."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.list_files import listing, positions
from rankgrad.data.table import Table, halves

# what Pillow reads and people have
EXTENSIONS = frozenset((".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
ALPHABETS = {"train": "images_background", "test": "images_evaluation"}


@dataclass
class Tree:
    """The images below a folder, sorted: for each its path, the category (if there is that level) and the class."""

    paths: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def has_categories(self) -> bool:
        return bool(self.categories)


def walk(context: ReaderContext, root: Path, below: str = "") -> Tree:
    """Images in CLASS or in CATEGORY/CLASS, all on one level; hidden files and folders are passed over."""
    by_level: dict[int, list[str]] = {1: [], 2: [], 3: []}
    tree = Tree()
    _collect(context, root, below, 1, by_level, tree)
    for path in by_level[1]:
        context.errors.add(str(root / path), "lies in no class: put each image into the folder of its class")
    if by_level[2] and by_level[3]:
        context.errors.add(
            str(root / below),
            f"images must all lie in CLASS or all in CATEGORY/CLASS, got both: {by_level[2][0]!r} and {by_level[3][0]!r}",
        )
    tree.paths = sorted(by_level[2] or by_level[3])
    inside = [path.removeprefix(f"{below}/" if below else "").split("/") for path in tree.paths]
    tree.classes = ["/".join(parts[:-1]) for parts in inside]
    tree.categories = [parts[0] for parts in inside if len(parts) == 3]
    return tree


def _collect(context: ReaderContext, root: Path, below: str, level: int, by_level: dict[int, list[str]], tree: Tree) -> None:
    folders, images = [], 0
    with os.scandir(root / below) as entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith("."):
                continue
            if not _is_unicode(entry.name):
                context.errors.add(repr(str(root / path)), "the name is not UTF-8: rename it")
            elif entry.is_dir():
                folders.append(path)
            elif Path(entry.name).suffix.lower() in EXTENSIONS:
                by_level[level].append(path)
                images += 1
            else:
                tree.others.append(path)
    if folders and level == 3:
        context.errors.add(str(root / below), f"folders must end at CATEGORY/CLASS, got {folders[0]!r} below it")
    elif folders:
        for path in folders:
            _collect(context, root, path, level + 1, by_level, tree)
    elif not images:
        tree.empty.append(below)


def _is_unicode(name: str) -> bool:
    # what is no UTF-8 on disk comes as lone surrogates
    return not any("\ud800" <= char <= "\udfff" for char in name)


def tables(context: ReaderContext, root: Path, trees: dict[str, Tree]) -> dict[str, Table]:
    """One table per tree, with labels and categories that mean the same in all of them."""
    context.errors.raise_if_any()
    _, labels = positions([name for tree in trees.values() for name in tree.classes])
    levels_found = {tree.has_categories for tree in trees.values() if tree.paths}
    if len(levels_found) > 1:
        levels = ", ".join(f"{split} {'CATEGORY/CLASS' if tree.has_categories else 'CLASS'}" for split, tree in trees.items())
        raise ValueError(f"{context.name}: {root}: all splits must have the same levels of folders, got {levels}")
    category_names, categories = positions([name for tree in trees.values() for name in tree.categories])
    result, start = {}, 0
    for split, tree in trees.items():
        chosen = slice(start, start + len(tree.paths))
        result[split] = context.table(
            split,
            root,
            tree.paths,
            labels[chosen],
            categories=categories[chosen] if levels_found == {True} else None,
            category_names=category_names,
            seen=True,
        )
        start += len(tree.paths)
    _note_leftovers(context, list(trees.values()))
    return result


def _note_leftovers(context: ReaderContext, trees: list[Tree]) -> None:
    for found, what in (
        ([path for tree in trees for path in tree.others], "files that are no images were passed over"),
        ([path for tree in trees for path in tree.empty], "folders hold no image"),
    ):
        if found:
            context.notes.append(f"{len(found):,} {what}:\n{listing(sorted(found))}")


def split_by_class(context: ReaderContext, table: Table) -> dict[str, Table]:
    """The first half of the classes as train and the second as test, which the notes say."""
    if table.num_classes < 2:
        raise ValueError(
            f"{context.name}: at least 2 classes are wanted to train and test on, got {table.num_classes} in {table.root}"
        )
    first, second = halves(table)
    context.notes.append(
        f"no split is given: the first {first.num_classes:,} classes by name train, the other {second.num_classes:,} test"
    )
    return {"train": replace(first, name=f"{context.name}/train"), "test": replace(second, name=f"{context.name}/test")}


def read_folder(context: ReaderContext) -> DataSet:
    """train, test and val below the root, or the classes themselves."""
    found = {split: [name for name in names if (context.root / name).is_dir()] for split, names in SPLITS.items()}
    if found["train"]:
        for split, names in found.items():
            if len(names) > 1:
                raise ValueError(f"{context.name}: {context.root} has both {' and '.join(names)}: keep one for {split}")
        trees = {split: walk(context, context.root, names[0]) for split, names in found.items() if names}
        splits = tables(context, context.root, trees)
    else:
        splits = split_by_class(context, tables(context, context.root, {"all": walk(context, context.root)})["all"])
    if len(splits) == 1:
        context.notes.append("there is neither test nor val: nothing to evaluate on")
    return context.finish(splits, protocols={split: "all-vs-all" for split in splits if split != "train"}, ks=(1, 10, 100))


def read_omniglot(context: ReaderContext) -> DataSet:
    """Background alphabets train, evaluation alphabets test; the alphabet is the category, the character the class."""
    folder, _ = context.folder(ALPHABETS["train"])
    for name in ALPHABETS.values():
        if not (folder / name).is_dir():
            raise FileNotFoundError(f"{context.name}: {folder / name} is missing. Wanted: {context.reader.layout}")
    trees = {split: walk(context, folder, name) for split, name in ALPHABETS.items()}
    splits = tables(context, folder, trees)
    for split, tree in trees.items():
        if not tree.has_categories:
            raise ValueError(
                f"omniglot: {folder / ALPHABETS[split]} must hold folders ALPHABET/CHARACTER. Wanted: {context.reader.layout}"
            )
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 2, 4, 8, 16))


FOLDER = Reader(
    name="folder",
    title="your images, a folder per class",
    layout="train/CLASS/image and test/CLASS/image (and val, if wanted), or CLASS/image; categories as CATEGORY/CLASS/image",
    load=read_folder,
)
OMNIGLOT = Reader(
    name="omniglot",
    title="Omniglot",
    layout="images_background.zip and images_evaluation.zip unpacked side by side: ALPHABET/CHARACTER/image.png",
    load=read_omniglot,
    sizes={"train": (SplitSize(19_280, 964),), "test": (SplitSize(13_180, 659),)},
)
