"""Images sorted into folders: your own, a folder per class, and Omniglot."""

from dataclasses import dataclass, field
from pathlib import Path

from rankgrad._messages import first_ten, plural, printable
from rankgrad.data.readers.base import DataSet, Reader, ReaderContext, SplitSize
from rankgrad.data.readers.folder_tree import scan_folder
from rankgrad.data.readers.list_files import positions
from rankgrad.data.table import Table

SPLITS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
ALPHABETS = {"train": "images_background", "test": "images_evaluation"}


@dataclass
class ClassTree:
    """The images below a folder, sorted: for each its path, its category (if there is that level) and its class."""

    paths: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def has_categories(self) -> bool:
        return bool(self.categories)


def read_classes(context: ReaderContext, root: Path, below: str = "") -> ClassTree:
    """Images in CLASS or in CATEGORY/CLASS, all on the same level."""
    by_level: dict[int, list[str]] = {1: [], 2: [], 3: []}
    tree = ClassTree()
    _collect(context, root, below, 1, by_level, tree)
    for path in by_level[1]:
        context.errors.add(str(root / path), "the image is in no class: put each image into the folder of its class")
    if by_level[2] and by_level[3]:
        context.errors.add(
            str(root / below),
            f"images must all be in CLASS or all in CATEGORY/CLASS, got both: {by_level[2][0]!r} and {by_level[3][0]!r}",
        )
    tree.paths = sorted(by_level[2] or by_level[3])
    inside = [path.removeprefix(f"{below}/" if below else "").split("/") for path in tree.paths]
    tree.classes = ["/".join(parts[:-1]) for parts in inside]
    tree.categories = [parts[0] for parts in inside if len(parts) == 3]
    return tree


def _collect(
    context: ReaderContext, root: Path, below: str, level: int, by_level: dict[int, list[str]], tree: ClassTree
) -> None:
    found = scan_folder(root / below)
    prefix = f"{below}/" if below else ""
    for name in found.undecodable:
        context.errors.add(repr(str(root / below / name)), "the name is not UTF-8: rename it")
    by_level[level] += [f"{prefix}{name}" for name in found.images]
    tree.others += [f"{prefix}{name}" for name in found.others]
    if found.folders and level == 3:
        context.errors.add(str(root / below), f"folders must end at CATEGORY/CLASS, got {found.folders[0]!r} below it")
    elif found.folders:
        for name in found.folders:
            _collect(context, root, f"{prefix}{name}", level + 1, by_level, tree)
    elif not found.images:
        tree.empty.append(below)


def tables(context: ReaderContext, root: Path, trees: dict[str, ClassTree]) -> dict[str, Table]:
    """One table per tree, with labels and categories that mean the same in all of them."""
    context.errors.raise_if_any()
    class_names, labels = positions([name for tree in trees.values() for name in tree.classes])
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
            class_names=dict(enumerate(_short_names(class_names))),
            seen=True,
        )
        start += len(tree.paths)
    others = sorted(path for tree in trees.values() for path in tree.others)
    if others:
        is_or_are = "is not an image" if len(others) == 1 else "are not images"
        context.notes.append(f"skipped {plural(len(others), 'file')} that {is_or_are}:\n{first_ten(others)}")
    empty = sorted(path for tree in trees.values() for path in tree.empty)
    if empty:
        context.notes.append(f"{plural(len(empty), 'folder')} without images:\n{first_ten(empty)}")
    return result


def _short_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The last folder of each path, or the whole paths where two end alike."""
    short = tuple(path.rpartition("/")[2] for path in paths)
    return short if len(set(short)) == len(short) else paths


def read_folder(context: ReaderContext) -> DataSet:
    """train, test and val below the root, or the classes themselves."""
    found = {split: [name for name in names if (context.root / name).is_dir()] for split, names in SPLITS.items()}
    if found["train"]:
        for split, names in found.items():
            if len(names) > 1:
                both = " and ".join(names)
                raise ValueError(f"{context.name}: {printable(str(context.root))} has both {both}: keep one for {split}")
        trees = {split: read_classes(context, context.root, names[0]) for split, names in found.items() if names}
        splits = tables(context, context.root, trees)
    else:
        everything = tables(context, context.root, {"all": read_classes(context, context.root)})["all"]
        splits = context.split_classes(everything)
    if len(splits) == 1:
        context.notes.append("there is neither test nor val: nothing to evaluate on")
    return context.finish(
        splits,
        protocols={split: "all-vs-all" for split in splits if split != "train"},
        ks=(1, 10, 100),
        split_seed=context.split_seed,
    )


def read_omniglot(context: ReaderContext) -> DataSet:
    """Background alphabets train, evaluation alphabets test; the alphabet is the category, the character the class."""
    folder, _ = context.folder(ALPHABETS["train"])
    for name in ALPHABETS.values():
        if not (folder / name).is_dir():
            raise FileNotFoundError(f"{context.name}: {folder / name} is missing. Expected: {context.reader.layout}")
    trees = {split: read_classes(context, folder, name) for split, name in ALPHABETS.items()}
    splits = tables(context, folder, trees)
    for split, tree in trees.items():
        if not tree.has_categories:
            raise ValueError(
                f"{context.name}: {folder / ALPHABETS[split]} must contain folders ALPHABET/CHARACTER. "
                f"Expected: {context.reader.layout}"
            )
    return context.finish(splits, protocols={"test": "all-vs-all"}, ks=(1, 2, 4, 8, 16))


FOLDER = Reader(
    name="folder",
    title="your images, a folder per class",
    layout="train/CLASS/image and test/CLASS/image (optionally val), or CLASS/image; with categories CATEGORY/CLASS/image",
    load=read_folder,
)
OMNIGLOT = Reader(
    name="omniglot",
    title="Omniglot",
    layout="images_background.zip and images_evaluation.zip, unpacked side by side: ALPHABET/CHARACTER/image.png",
    load=read_omniglot,
    sizes={"train": (SplitSize(19_280, 964),), "test": (SplitSize(13_180, 659),)},
)
