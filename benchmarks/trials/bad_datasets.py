"""Lists, annotations and folders of every data set, gone wrong."""

import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fake_datasets
import numpy as np

from benchmarks.trials.corruption import copy_tree, damaged, malformed_lines, malicious_pickle, put, replaced
from benchmarks.trials.fuzz_case import Case, command
from rankgrad.data.readers import read


@dataclass(frozen=True)
class Layout:
    """A tree of `tests/fake_datasets.py`, its reader, its list files, and what separates their columns ("" is a single one)."""

    reader: str
    lists: Sequence[str]
    separator: str | None = None


LAYOUTS: Mapping[str, Layout] = {
    "sop": Layout("sop", ("Stanford_Online_Products/Ebay_train.txt", "Stanford_Online_Products/Ebay_test.txt")),
    "inshop": Layout("inshop", ("Eval/list_eval_partition.txt",)),
    "vehicleid": Layout(
        "vehicleid",
        (
            *(f"VehicleID_V1.0/train_test_split/{name}.txt" for name in ("train_list", "test_list_800", "test_list_2400")),
            "VehicleID_V1.0/attribute/model_attr.txt",
        ),
    ),
    "inat": Layout("inat", tuple(f"Inat_dataset_splits/Inaturalist_{split}_set1.txt" for split in ("train", "test")), ""),
    "cub": Layout("cub", ("CUB_200_2011/images.txt", "CUB_200_2011/image_class_labels.txt")),
    "gldv1": Layout("gldv1", ("train.csv",), ","),
    "gldv1-list": Layout("gldv1", ("landmarks18/lists/train.txt",)),
    "roxford5k": Layout("roxford5k", ("revisitop1m/revisitop1m.txt",), ""),
    "csv": Layout("csv", ("dataset.csv",), ","),
}


class Trees:
    """Good trees, each written once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def copy(self, name: str, folder: Path) -> Path:
        good = self.root / name
        if not good.exists():
            fake_datasets.build(name, good, classes=3, per_class=2)
        return copy_tree(good, folder / name)


class Lists:
    """Text lists of every data set that has any."""

    name = "lists"

    def __init__(self, good: Trees) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        name = rng.choice(tuple(LAYOUTS))
        layout = LAYOUTS[name]
        root = self.good.copy(name, folder)
        path = root / rng.choice(layout.lists)
        if rng.random() < 0.05:
            what, refused = replaced(path, rng), False
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            what, content, refused = malformed_lines(lines, rng, layout.separator)
            put(path, content)
        # some lists may name a thing twice, and the distractors may be none
        refused = refused and path.name != "revisitop1m.txt" and "twice" not in what
        return Case(f"{name}: {path.name}: {what}", reading(layout.reader, root, rng), (path.name, str(root)), refused)


def reading(reader: str, root: Path, rng: random.Random) -> Any:
    """One of the ways to a reader."""
    return rng.choice(
        (
            partial(read, reader, root, partial=True),
            partial(command, "check-data", reader, str(root), "--partial"),
            partial(command, "check-data", reader, str(root), "--partial", "--no-decode"),
        )
    )


class Annotations:
    """Files of other formats: pickles of ROxford and RParis, MATLAB files of Cars."""

    name = "annotations"

    def __init__(self, good: Trees) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        name = rng.choice(("roxford5k", "rparis6k", "cars", "cars-devkit"))
        root = self.good.copy(name, folder)
        if name in ("cars", "cars-devkit"):
            what, path, refused = self._cars(name, root, rng)
        else:
            path = root / name / f"gnd_{name}.pkl"
            what, refused = self._revisited(path, canary, rng)
        reader = name.removesuffix("-devkit")
        return Case(f"{name}: {path.name}: {what}", reading(reader, root, rng), (path.name, str(root)), refused)

    def _cars(self, name: str, root: Path, rng: random.Random) -> tuple[str, Path, bool]:
        choices = ("cars_annos.mat",) if name == "cars" else ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat")
        path = root / rng.choice(choices)
        if rng.random() < 0.6:
            what, content = damaged(path.read_bytes(), rng)
            put(path, content)
            return what, path, False
        field = "relative_im_path" if name == "cars" else "fname"
        rows: list[tuple[Any, Any]] = [(f"car_ims/{i:06d}.jpg", i) for i in range(1, 7)]
        what, row = rng.choice(
            (
                ("a path to the outside", ("../../x.jpg", 1)),
                ("an absolute path", ("/etc/passwd", 1)),
                ("class 0", ("a.jpg", 0)),
                ("class 255", ("a.jpg", 255)),
                ("a number as path", (7, 1)),
                ("no path", ("", 1)),
                ("a path twice", rows[0]),
            )
        )
        path.unlink()
        fake_datasets.write_annotations(path, field if rng.random() < 0.9 else "other", [*rows, row])
        return what, path, True

    def _revisited(self, path: Path, canary: Path, rng: random.Random) -> tuple[str, bool]:
        content = pickle.loads(path.read_bytes())
        draw = rng.random()
        if draw < 0.3:
            put(path, malicious_pickle(canary, rng, content))
            return "a program in it", True
        if draw < 0.55:
            what, raw = damaged(path.read_bytes(), rng)
            put(path, raw)
            return what, False
        if draw < 0.6:
            depth = rng.choice((2000, 200_000))
            put(path, b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
            return f"{depth} lists in each other", True
        what = rng.choice(tuple(_CHANGES))
        _CHANGES[what](content)
        put(path, pickle.dumps(content, protocol=rng.choice((2, 4))))
        return what, what not in ("boxes as arrays", "more keys")


def _set(*keys: Any, value: Any) -> Any:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


_CHANGES: Mapping[str, Any] = {
    "a name to the outside": _set("imlist", 0, value="../../etc/passwd"),
    "an absolute name": _set("qimlist", 0, value="/etc/passwd"),
    "a number as name": _set("imlist", 0, value=3),
    "a name twice": lambda content: content["imlist"].append(content["imlist"][0]),
    "a box without extent": _set("gnd", 0, "bbx", value=[5, 5, 5, 5]),
    "a box of three": _set("gnd", 0, "bbx", value=[1, 2, 3]),
    "a box of nan": _set("gnd", 0, "bbx", value=[float("nan")] * 4),
    "a box of text": _set("gnd", 0, "bbx", value="box"),
    "a box of huge numbers": _set("gnd", 0, "bbx", value=[0, 0, 10**400, 10**400]),
    "boxes as arrays": _set("gnd", 0, "bbx", value=np.array([1.0, 2.0, 30.0, 40.0])),
    "a position beyond": _set("gnd", 0, "easy", value=[10**9]),
    "a negative position": _set("gnd", 0, "junk", value=[-1]),
    "a huge position": _set("gnd", 0, "hard", value=[10**400]),
    "positions as text": _set("gnd", 0, "hard", value="12"),
    "a list of lists": _set("gnd", 0, "easy", value=[[1]]),
    "an image twice": _set("gnd", 0, "easy", value=[0, 0]),
    "a query too few": lambda content: content["gnd"].pop(),
    "no list": _set("imlist", value=None),
    "an entry that is none": _set("gnd", 0, value=7),
    "more keys": _set("more", value={"x": 1}),
}


class Folders:
    """Trees of folders: your own images and Omniglot."""

    name = "folders"

    def __init__(self, good: Trees) -> None:
        self.good = good

    def case(self, rng: random.Random, folder: Path, canary: Path) -> Case:
        name = rng.choice(("folder", "folder-flat", "folder-categories", "omniglot"))
        root = self.good.copy(name, folder)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        what = rng.choice(tuple(_TREE_CHANGES))
        changed = _TREE_CHANGES[what](rng.choice(files), rng)
        reader = name.partition("-")[0]
        return Case(f"{name}: {what}", reading(reader, root, rng), (changed.name, str(root), repr(changed.name)[1:-1]))


def _moved(target: Any) -> Any:
    def change(path: Path, rng: random.Random) -> Path:
        new: Path = target(path)
        new.parent.mkdir(parents=True, exist_ok=True)
        return path.rename(new)

    return change


def _instead(path: Path, rng: random.Random) -> Path:
    replaced(path, rng)
    return path


def _not_utf8(path: Path, rng: random.Random) -> Path:
    return path.rename(path.parent / b"caf\xe9.png".decode("utf-8", "surrogateescape"))


def _loop(path: Path, rng: random.Random) -> Path:
    (path.parent / "loop").symlink_to(path.parent, target_is_directory=True)
    return path


def _class_as_loop(path: Path, rng: random.Random) -> Path:
    (path.parent.parent / "loop").symlink_to(path.parent.parent, target_is_directory=True)
    return path


def _no_images(path: Path, rng: random.Random) -> Path:
    for file in path.parent.parent.rglob("*.png"):
        file.unlink()
    return path


_TREE_CHANGES: Mapping[str, Any] = {
    "something else in the place of an image": _instead,
    "an image above its class": _moved(lambda path: path.parent.parent / path.name),
    "an image below its class": _moved(lambda path: path.parent / "more" / path.name),
    "an image far below": _moved(lambda path: path.parent / "a" / "b" / "c" / path.name),
    "a hidden image": _moved(lambda path: path.parent / f".{path.name}"),
    "a name with a line end": _moved(lambda path: path.parent / "a\nb.png"),
    "a name with an escape sequence": _moved(lambda path: path.parent / "a\x1b[2Jb.png"),
    "a class with an escape sequence": _moved(lambda path: path.parent.parent / "a\x1b[2Jb" / path.name),
    "a name that is no UTF-8": _not_utf8,
    "a name of dots": _moved(lambda path: path.parent / "...png"),
    "a long name": _moved(lambda path: path.parent / f"{'x' * 240}.png"),
    "an unknown extension": _moved(lambda path: path.with_suffix(".exe")),
    "no extension": _moved(lambda path: path.with_suffix("")),
    "a folder with the name of an image": _moved(lambda path: path.parent / "folder.png" / path.name),
    "a link to its own class": _loop,
    "a link to all classes": _class_as_loop,
    "no images": _no_images,
}
