"""Every reader on a small tree in the original layout, on damaged ones, and on real data where RANKGRAD_DATA has it."""

import dataclasses
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import fake_datasets
import numpy as np
import pytest
from PIL import Image

from rankgrad.data.glyphs import Glyphs
from rankgrad.data.image_files import unreadable_images
from rankgrad.data.readers import READERS, read
from rankgrad.data.readers import base as source_module
from rankgrad.data.readers import builtin_glyphs as drawn_module
from rankgrad.data.readers.base import DataSet, ReaderContext, SplitSize
from rankgrad.data.readers.folder_tree import images_below
from rankgrad.data.readers.list_files import MAX_LINE, Column, ReadErrors, read_rows
from rankgrad.data.readers.roxford import read_ground_truth

# images, classes and categories of each split of a tree of 6 classes and 5 images a class
EXPECTED = {
    "sop": {"train": (30, 6, 3), "test": (30, 6, 3)},
    "inshop": {"train": (30, 6, 3), "test": (30, 6, 3)},
    "vehicleid": {"train": (30, 6, 2), "small": (30, 6, 2), "medium": (35, 7, 2), "large": (40, 8, 2)},
    "inat": {"train": (30, 6, 3), "test": (30, 6, 3)},
    "cub": {"train": (30, 6, 0), "test": (30, 6, 0)},
    "cars": {"train": (30, 6, 0), "test": (30, 6, 0)},
    "cars-devkit": {"train": (30, 6, 0), "test": (30, 6, 0)},
    "gldv1": {"train": (30, 6, 0)},
    "gldv1-list": {"train": (30, 6, 0)},
    "roxford5k": {"test": (36, 0, 0), "distractors": (2, 0, 0)},
    "rparis6k": {"test": (36, 0, 0), "distractors": (2, 0, 0)},
    "omniglot": {"train": (30, 6, 3), "test": (30, 6, 3)},
    "folder": {"train": (30, 6, 0), "test": (30, 6, 0)},
    "folder-flat": {"train": (15, 3, 0), "test": (15, 3, 0)},
    "folder-categories": {"train": (30, 6, 3), "validation": (30, 6, 3), "test": (30, 6, 3)},
    "csv": {"train": (30, 6, 3), "test": (30, 6, 3)},
}
PROTOCOLS = {
    "inshop": {"test": "query-gallery"},
    "csv": {"test": "query-gallery"},
    "vehicleid": {"small": "all-vs-all", "medium": "all-vs-all", "large": "all-vs-all"},
    "gldv1": {},
    "roxford5k": {"test": "roxford"},
    "rparis6k": {"test": "roxford"},
    "folder-categories": {"validation": "all-vs-all", "test": "all-vs-all"},
}
SOP_TRAIN = "Stanford_Online_Products/Ebay_train.txt"
INSHOP_LIST = "Eval/list_eval_partition.txt"
VEHICLES = "VehicleID_V1.0/train_test_split/test_list_800.txt"
MODELS = "VehicleID_V1.0/attribute/model_attr.txt"
INAT_TEST = "Inat_dataset_splits/Inaturalist_test_set1.txt"


def reader_of(tree: str) -> str:
    return tree.partition("-")[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One tree of each kind, not to be changed."""
    top = tmp_path_factory.mktemp("trees")
    return {name: fake_datasets.build(name, top / name) for name in EXPECTED}


@pytest.fixture
def tree(built, tmp_path):
    """A tree to damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(built[name], tmp_path / name))

    return copy


def change(path: Path, line: int, new: str | bytes | None) -> None:
    """Put `new` in the place of a line (from 1), or take the line away."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1 : line] = [] if new is None else [new.encode() + b"\n" if isinstance(new, str) else new + b"\n"]
    path.write_bytes(b"".join(lines))


def categories_of(table) -> int:
    return 0 if table.categories is None else len(np.unique(table.categories[table.categories >= 0]))


@pytest.mark.parametrize("name", EXPECTED)
def test_reads_its_tree(built, name):
    data = read(reader_of(name), built[name], partial=True)
    sizes = {split: (len(table), table.num_classes, categories_of(table)) for split, table in data.splits.items()}
    assert sizes == EXPECTED[name]
    assert data.name == reader_of(name)
    assert data.protocols == PROTOCOLS.get(name, PROTOCOLS.get(reader_of(name), {"test": "all-vs-all"}))
    for split, table in data.splits.items():
        assert table.name == f"{data.name}/{split}"
        assert all(table.file(i).is_file() for i in range(len(table)))
        assert len(set(table.paths)) == len(table)
        if split not in ("train", "distractors") and "train" in data.splits:
            assert not set(table.labels) & set(data.splits["train"].labels)


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith(("roxford", "rparis"))])
def test_images_of_a_label_are_of_one_class_of_the_tree(built, name):
    """Labels are held against the pixels: the tree draws every class in a colour of its own."""
    data = read(reader_of(name), built[name], partial=True)
    table = data.splits["train"]
    hues = {}
    for i, label in enumerate(table.labels.tolist()):
        colour = np.asarray(Image.open(table.file(i)).convert("RGB"), dtype=np.float64).mean(axis=(0, 1))
        hues.setdefault(label, []).append(colour / colour.max())
    within = max(np.ptp(colours, axis=0).max() for colours in hues.values())
    means = [np.mean(colours, axis=0) for colours in hues.values()]
    between = min(np.abs(a - b).max() for i, a in enumerate(means) for b in means[:i])
    assert within < between


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("sop", "Stanford_Online_Products"),
        ("vehicleid", "VehicleID_V1.0"),
        ("cub", "CUB_200_2011"),
        ("gldv1-list", "landmarks18"),
        ("roxford5k", "roxford5k"),
    ],
)
def test_takes_the_folder_of_the_archive_and_the_one_above(built, name, inner):
    above, own = (read(reader_of(name), root, partial=True) for root in (built[name], built[name] / inner))
    for split, table in above.splits.items():
        assert own.splits[split].root == table.root
        assert own.splits[split].paths == table.paths


@pytest.mark.parametrize("name", ["inshop", "cars", "cars-devkit", "omniglot", "inat", "gldv1"])
def test_takes_the_folder_above_a_flat_archive(tree, tmp_path, name):
    tree(name)
    assert {s: len(t) for s, t in read(reader_of(name), tmp_path, partial=True).splits.items()} == {
        split: size[0] for split, size in EXPECTED[name].items()
    }


def test_two_copies_side_by_side_are_not_chosen_between(tree, tmp_path):
    shutil.copytree(tree("cars"), tmp_path / "again")
    with pytest.raises(ValueError, match=r"cars: several folders below .* qualify \(.*again.*cars\): name the one"):
        read("cars", tmp_path, partial=True)


def test_labels_are_the_data_sets_own(built):
    def classes(name: str, split: str) -> list[int]:
        return np.unique(read(name, built[name], partial=True).splits[split].labels).tolist()

    assert classes("sop", "test") == [11_319, 11_320, 11_321, 11_322, 11_323, 11_324]
    assert classes("cub", "test") == [101, 102, 103, 104, 105, 106]
    assert classes("cars", "test") == [99, 100, 101, 102, 103, 104]
    assert classes("inshop", "train") == [1, 2, 3, 4, 5, 6]
    assert classes("vehicleid", "large") == [7, 8, 9, 10, 11, 12, 13, 14]
    assert classes("gldv1", "train") == [100, 101, 102, 103, 104, 105]


def test_categories_are_named(built):
    sop = read("sop", built["sop"], partial=True).splits["train"]
    for path, category in zip(sop.paths, sop.categories, strict=True):
        assert path.startswith(f"{sop.category_names[category]}_final/")
    for name, start, end in (("inshop", 1, 3), ("inat", 1, 2), ("omniglot", 1, 2), ("folder-categories", 1, 2)):
        table = read(reader_of(name), built[name], partial=True).splits["test"]
        for path, category in zip(table.paths, table.categories, strict=True):
            assert "/".join(path.split("/")[start:end]) == table.category_names[category]


def test_an_item_may_have_several_categories(tree):
    root = tree("inshop")
    moved = "img/MEN/Denim/id_00000001/00_1_front.jpg"
    fake_datasets.save(root / moved, 1, 0, 0)
    change(root / INSHOP_LIST, 3, f"{moved}   id_00000001   train")
    table = read("inshop", root, partial=True).splits["train"]
    names = {table.category_names[category] for category in table.categories[table.labels == 1]}
    assert names == {"MEN/Denim", "WOMEN/Tees_Tanks"}


def test_inshop_queries_and_gallery_share_classes_and_no_image(built):
    test = read("inshop", built["inshop"], partial=True).splits["test"]
    assert np.array_equal(test.is_query, ~test.is_gallery)
    assert set(test.labels[test.is_query]) == set(test.labels[test.is_gallery])
    assert int(test.is_query.sum()) == 18
    assert read("inshop", built["inshop"], partial=True).splits["train"].is_query is None


def test_inshop_is_found_with_its_list_beside_the_images_and_with_images_in_img(tree):
    root = tree("inshop")
    (root / INSHOP_LIST).rename(root / "list_eval_partition.txt")
    assert len(read("inshop", root, partial=True).splits["train"]) == 30
    (root / "Img").mkdir()
    (root / "img").rename(root / "Img" / "img")
    assert read("inshop", root, partial=True).splits["train"].root == root / "Img"


def test_vehicle_models_are_categories_and_may_be_unknown(built):
    data = read("vehicleid", built["vehicleid"], partial=True)
    for table in data.splits.values():
        for vehicle, category in zip(table.labels, table.categories, strict=True):
            # as the tree has it; 999999 has a model and is in no list
            assert category == (vehicle % 3 or -1)
        assert len(table.category_names) == 250
    assert any("vehicleid-official" in remark for remark in READERS["vehicleid"].remarks)


def test_vehicle_models_may_be_absent_from_a_partial_copy(tree):
    root = tree("vehicleid")
    (root / MODELS).unlink()
    data = read("vehicleid", root, partial=True)
    assert data.splits["train"].categories is None
    assert any("model_attr.txt does not exist" in note for note in data.notes)
    with pytest.raises(FileNotFoundError, match=r"vehicleid: .*model_attr\.txt is missing"):
        read("vehicleid", root)


def test_species_are_numbered_by_folder_pair(tmp_path):
    """9 before 10, and the same number below another supercategory is another class."""
    for split, paths in (("train", ("Aves/10/a", "Aves/9/b", "Fungi/9/c")), ("test", ("Aves/11/d", "Aves/11/e"))):
        listed = [f"train_val2018/{path}.jpg" for path in paths]
        for path in listed:
            fake_datasets.save(tmp_path / path, 0, 0, 0)
        fake_datasets.write_lines(tmp_path / f"Inaturalist_{split}_set1.txt", listed)
    data = read("inat", tmp_path, partial=True)
    assert data.splits["train"].labels.tolist() == [1, 0, 3]
    assert data.splits["test"].labels.tolist() == [2, 2]


def test_the_devkit_of_cars_is_split_by_class_again(built):
    data = read("cars", built["cars-devkit"], partial=True)
    assert data.splits["train"].labels.max() <= 98 < data.splits["test"].labels.min()
    for table in data.splits.values():
        assert {path.split("/")[0] for path in table.paths} == {"cars_train", "cars_test"}


def test_revisited_queries_come_first_and_are_cropped(built):
    test = read("roxford5k", built["roxford5k"], partial=True).splits["test"]
    assert test.is_query.tolist() == [True] * 6 + [False] * 30
    assert np.array_equal(test.is_gallery, ~test.is_query)
    assert test.boxes[0].tolist() == [2.5, 3.0, 30.0, 31.5]
    assert np.isnan(test.boxes[6:]).all()
    assert test.paths[6] == "jpg/building_000_000000.jpg"
    gallery = np.flatnonzero(test.is_gallery)
    for query in range(6):
        for lists in (test.ground_truth.easy, test.ground_truth.hard, test.ground_truth.junk):
            assert all(test.paths[gallery[i]].startswith(f"jpg/building_{query:03d}_") for i in lists[query])
        assert [len(lists[query]) for lists in vars(test.ground_truth).values()] == [1, 3, 1]


def test_revisited_ground_truth_survives_an_absent_image(tree):
    root = tree("roxford5k")
    for gone in ("building_000_000000", "building_002_query"):
        (root / "roxford5k" / "jpg" / f"{gone}.jpg").unlink()
    test = read("roxford5k", root, partial=True).splits["test"]
    assert (int(test.is_query.sum()), int(test.is_gallery.sum())) == (5, 29)
    gallery = np.flatnonzero(test.is_gallery)
    names = [[test.paths[gallery[i]] for i in entry] for entry in test.ground_truth.easy]
    assert names == [[], *([f"jpg/building_{label:03d}_000000.jpg"] for label in (1, 3, 4, 5))]


def test_distractors_are_found_from_inside_the_data_set(built, monkeypatch):
    monkeypatch.chdir(built["roxford5k"] / "roxford5k")
    assert len(read("roxford5k", Path(), partial=True).splits["distractors"]) == 2


def test_revisited_does_without_distractors(tree):
    root = tree("rparis6k")
    shutil.rmtree(root / "revisitop1m")
    data = read("rparis6k", root, partial=True)
    assert list(data.splits) == ["test"]
    assert any("without the 1M distractors" in note for note in data.notes)


def test_glyphs_carry_their_pixels(monkeypatch):
    def drawn(split: str) -> Glyphs:
        images = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4)
        chars = ("a", "\U0001f600") if split == "train" else ("b", "c")
        return Glyphs(images, np.array([0, 0, 0, 1, 1, 1]), np.array([1, 1, 1, 0, 0, 0]), chars, ("Pictures", "Latin"))

    monkeypatch.setattr(drawn_module, "load_glyphs", drawn)
    data = read("glyphs", None)
    train = data.splits["train"]
    assert train.paths[2:4] == ("glyphs/Latin/U+0061/2", "glyphs/Pictures/U+1F600/0")
    assert len(set(train.paths)) == 6
    assert np.array_equal(train.pixels, drawn("train").images)
    assert (train.num_classes, train.category_names) == (2, ("Pictures", "Latin"))
    assert data.splits["test"].paths[0] == "glyphs/Latin/U+0062/0"
    assert data.splits["test"].labels.tolist() == [2, 2, 2, 3, 3, 3]
    assert data.notes == ()
    assert data.protocols == {"test": "all-vs-all"}


def complete(name: str, root: Path, sizes: dict[str, SplitSize]) -> DataSet:
    """`read` without partial, as if `sizes` were what is published."""
    reader = dataclasses.replace(READERS[name], sizes={split: (size,) for split, size in sizes.items()})
    return reader.load(ReaderContext(reader, root, partial=False))


def test_a_complete_copy_needs_no_leave(built):
    data = complete("sop", built["sop"], {"train": SplitSize(30, 6), "test": SplitSize(30, 6)})
    assert data.notes == ()
    test_size = SplitSize(30, 6, queries=18)
    assert "partial" not in " ".join(complete("inshop", built["inshop"], {"train": SplitSize(30, 6), "test": test_size}).notes)
    with pytest.raises(ValueError, match=r"test: 30 images of 6 classes, 18 of them queries; the complete .* 17 of them"):
        complete("inshop", built["inshop"], {"train": SplitSize(30, 6), "test": SplitSize(30, 6, queries=17)})


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith(("folder", "csv"))])
def test_published_counts_are_wanted_unless_partial(built, name):
    with pytest.raises(ValueError, match=r"other counts than published:\n  t.*the complete one has .*\n(?s:.*)--partial"):
        read(reader_of(name), built[name])
    notes = read(reader_of(name), built[name], partial=True).notes
    assert any("partial copy, other counts than published" in note for note in notes)


def test_published_counts_are_those_of_the_files():
    sizes = {
        (name, split): (size[0].images, size[0].classes)
        for name, reader in READERS.items()
        for split, size in reader.sizes.items()
    }
    assert sizes == {
        ("sop", "train"): (59_551, 11_318),
        ("sop", "test"): (60_502, 11_316),
        ("inshop", "train"): (25_882, 3_997),
        ("inshop", "test"): (14_218 + 12_612, 3_985),
        ("vehicleid", "train"): (113_346, 13_164),
        ("vehicleid", "small"): (6_493, 800),
        ("vehicleid", "medium"): (13_377, 1_600),
        ("vehicleid", "large"): (19_777, 2_400),
        ("inat", "train"): (325_846, 5_690),
        ("inat", "test"): (136_093, 2_452),
        ("cub", "train"): (5_864, 100),
        ("cub", "test"): (5_924, 100),
        ("cars", "train"): (8_054, 98),
        ("cars", "test"): (8_131, 98),
        ("gldv1", "train"): (1_225_029, 14_951),
        ("roxford5k", "test"): (4_993 + 70, 0),
        ("rparis6k", "test"): (6_322 + 70, 0),
        ("omniglot", "train"): (19_280, 964),
        ("omniglot", "test"): (13_180, 659),
    }


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("sop", "Stanford_Online_Products/Ebay_train.txt"),
        ("sop", "Stanford_Online_Products/Ebay_test.txt"),
        ("inshop", INSHOP_LIST),
        ("vehicleid", "VehicleID_V1.0/train_test_split/train_list.txt"),
        ("vehicleid", VEHICLES),
        ("inat", INAT_TEST),
        ("cub", "CUB_200_2011/images.txt"),
        ("cub", "CUB_200_2011/image_class_labels.txt"),
        ("cars", "cars_annos.mat"),
        ("cars-devkit", "cars_test_annos_withlabels.mat"),
        ("gldv1", "train.csv"),
        ("roxford5k", "roxford5k/gnd_roxford5k.pkl"),
        ("csv", "dataset.csv"),
    ],
)
def test_a_missing_file_is_named_and_partial_does_not_excuse_it(tree, name, gone):
    root = tree(name)
    (root / gone).unlink()
    wanted = (
        "must contain dataset.csv or a single CSV file"
        if name == "csv"
        else f"{re.escape(Path(gone).name)}.* is missing.*Expected: "
    )
    with pytest.raises(FileNotFoundError, match=f"{reader_of(name)}: .*{wanted}"):
        read(reader_of(name), root, partial=True)


def test_a_missing_folder_is_named(tree):
    root = tree("omniglot")
    shutil.rmtree(root / "images_evaluation")
    with pytest.raises(FileNotFoundError, match=r"omniglot: .*images_evaluation is missing.*side by side"):
        read("omniglot", root, partial=True)


LINES = [
    # a column too few, too many; a number that is none; a duplicate; a path that leads out; a value that cannot be
    (
        "sop",
        SOP_TRAIN,
        3,
        "2 1 bicycle_final/x.JPG",
        r":3: 4 columns expected \(image_id class_id super_class_id path\), got 3",
    ),
    ("sop", SOP_TRAIN, 3, "2 1 1 x.JPG y.JPG", ":3: 4 columns expected .* got 5: '2 1 1 x.JPG y.JPG'"),
    ("sop", SOP_TRAIN, 4, "3 one 1 x.JPG", ":4: class_id must be an integer, got 'one'"),
    ("sop", SOP_TRAIN, 4, "3 -1 1 x.JPG", ":4: class_id must be an integer, got '-1'"),
    ("sop", SOP_TRAIN, 4, "3 1.0 1 x.JPG", ":4: class_id must be an integer, got '1.0'"),
    ("sop", SOP_TRAIN, 4, f"3 {10**30} 1 x.JPG", ":4: class_id must be an integer, got '1000"),
    ("sop", SOP_TRAIN, 4, "3 ٣ 1 x.JPG", ":4: class_id must be an integer"),
    ("sop", SOP_TRAIN, 5, "1 1 1 x.JPG", ":5: image_id '1' is already listed in line 2"),
    ("sop", SOP_TRAIN, 4, "3 1 13 x.JPG", ":4: super_class_id must be one of 1, 2, .*, got '13'"),
    ("sop", SOP_TRAIN, 4, "3 1 1 /etc/passwd", ":4: a path must be relative and stay inside its folder, got '/etc/passwd'"),
    ("sop", SOP_TRAIN, 4, "3 1 1 a/../../x.JPG", r":4: a path must be relative .* got 'a/\.\./\.\./x\.JPG'"),
    (
        "sop",
        SOP_TRAIN,
        1,
        "id class super path",
        ":1: expected the header 'image_id class_id super_class_id path', got 'id class",
    ),
    ("sop", SOP_TRAIN, 6, b"5 1 1 caf\xe9.JPG", r":6: not UTF-8 at byte 10 of the line \(b'\\xe9'\)"),
    ("sop", SOP_TRAIN, 6, b"5 1 1 \0.JPG", ":6: the line contains a NUL byte"),
    ("sop", SOP_TRAIN, 6, b"x" * (MAX_LINE + 10), ":6: the line is longer than 64 KiB"),
    ("inshop", INSHOP_LIST, 1, "5000", ":1: 5,000 rows announced, 60 found"),
    ("inshop", INSHOP_LIST, 1, "many", ":1: expected the number of rows, got 'many'"),
    ("inshop", INSHOP_LIST, 2, "image item status", ":2: expected the header 'image_name item_id evaluation_status'"),
    (
        "inshop",
        INSHOP_LIST,
        9,
        "img/MEN/Denim/id_1/a.jpg id_1 test",
        ":9: evaluation_status must be one of train, query, gallery",
    ),
    ("inshop", INSHOP_LIST, 9, "img/MEN/Denim/id_1/a.jpg 1 train", ":9: item_id must be like id_00000002, got '1'"),
    ("inshop", INSHOP_LIST, 9, "img/a.jpg id_1 train", ":9: image_name must be like img/WOMEN/Dresses"),
    ("inshop", INSHOP_LIST, 9, None, ":1: 60 rows announced, 59 found"),
    ("vehicleid", VEHICLES, 2, "0000031 7", ":2: image '0000031' is already listed in line 1"),
    ("vehicleid", VEHICLES, 2, "31 7", ":2: image '31' is already listed in line 1"),
    ("vehicleid", VEHICLES, 2, "0000032.jpg 7", ":2: image must be an integer, got '0000032.jpg'"),
    ("vehicleid", VEHICLES, 2, "0000032", ":2: 2 columns expected"),
    ("vehicleid", MODELS, 2, "1 250", ":2: model must be one of"),
    ("vehicleid", MODELS, 3, "1 2", ":3: vehicle '1' is already listed in line 2"),
    ("inat", INAT_TEST, 2, "train_val2018/Aves/x.jpg", ":2: expected a path like train_val2018/Aves/3021/x.jpg"),
    ("inat", INAT_TEST, 2, "train_val2018/Aves/owl/x.jpg", ":2: expected a path like train_val2018/Aves/3021/x.jpg"),
    ("inat", INAT_TEST, 2, "../Aves/7/x.jpg", ":2: a path must be relative"),
    ("inat", INAT_TEST, 2, "/train_val2018/Aves/7/x.jpg", ":2: a path must be relative"),
    ("cub", "CUB_200_2011/images.txt", 2, "2", ":2: 2 columns expected"),
    ("cub", "CUB_200_2011/images.txt", 2, "1 002.Bird/x.jpg", ":2: image_id '1' is already listed in line 1"),
    ("cub", "CUB_200_2011/images.txt", 2, "2 ../x.jpg", ":2: a path must be relative"),
    ("cub", "CUB_200_2011/image_class_labels.txt", 2, "2 201", ":2: class_id must be one of"),
    ("cub", "CUB_200_2011/image_class_labels.txt", 2, None, "images.txt:2: image 2 has no class in image_class_labels.txt"),
    ("gldv1", "train.csv", 1, "id,landmark_id", ":1: expected the header 'id,url,landmark_id', got 'id,landmark_id'"),
    ("gldv1", "train.csv", 3, "a,b", r":3: 3 columns expected \(id url landmark_id\), got 2"),
    ("gldv1", "train.csv", 3, "a,b,None", ":3: landmark_id must be an integer, got 'None'"),
    ("gldv1", "train.csv", 3, "../a,b,1", ":3: id must be letters and digits, since it names a file, got '../a'"),
    ("gldv1", "train.csv", 3, '"a,b,1', ":3: the row that begins here is not CSV"),
    ("gldv1", "train.csv", 3, b"a,\xff,1", ":3: not UTF-8"),
    ("gldv1-list", "landmarks18/lists/train.txt", 3, "/a.jpg 1", ":3: a path must be relative"),
    ("gldv1-list", "landmarks18/lists/train.txt", 3, "0/0.jpg 1", ":3: path '0/0.jpg' is already listed in line 1"),
    ("roxford5k", "revisitop1m/revisitop1m.txt", 2, "../a.jpg", ":2: a path must be relative"),
    ("roxford5k", "revisitop1m/revisitop1m.txt", 2, "ab/000000.jpg", ":2: path 'ab/000000.jpg' is already listed in line 1"),
    ("csv", "dataset.csv", 1, "file,label,split,category,is_query,is_gallery", ":1: the header lacks path, got 'file,label"),
    ("csv", "dataset.csv", 1, "path;label;split", r":1: the header lacks path, label, .*separated by commas"),
    ("csv", "dataset.csv", 1, "path,label,path,category,is_query,is_gallery", ":1: the header lacks split"),
    ("csv", "dataset.csv", 1, "path,label,split,label,is_query,is_gallery", ":1: columns named twice: label"),
    ("csv", "dataset.csv", 1, "path,label,split,x_1,is_query,is_gallery", ":1: the header lacks y_1, x_2, y_2"),
    ("csv", "dataset.csv", 3, "images/0_1.jpg,a,train", r":3: 6 columns expected \(path,label,split.*\), got 3"),
    ("csv", "dataset.csv", 3, "images/0_1.jpg,a,val,,,", ":3: split must be one of train, validation, test, got 'val'"),
    ("csv", "dataset.csv", 3, "images/0_1.jpg,,train,,,", ":3: label is empty"),
    ("csv", "dataset.csv", 3, "/images/0_1.jpg,a,train,,,", ":3: a path must be relative"),
    ("csv", "dataset.csv", 3, "images/../../0_1.jpg,a,train,,,", ":3: a path must be relative"),
    ("csv", "dataset.csv", 3, "images/0_0.jpg,a,train,,,", ":3: path 'images/0_0.jpg' is already listed in line 2"),
    ("csv", "dataset.csv", 3, "images/0_1.jpg,a,test,,maybe,", ":3: is_query must be true, false or empty, got 'maybe'"),
    (
        "csv",
        "dataset.csv",
        3,
        "images/0_1.jpg,a,test,,,",
        ":3: an image of test must be a query or in the gallery, this one is neither",
    ),
    ("csv", "dataset.csv", 3, '"images/0_1.jpg,a,train,,,', ":3: the row that begins here is not CSV"),
    ("csv", "dataset.csv", 3, b"images/\xfc.jpg,a,train,,,", ":3: not UTF-8 at byte 8"),
    ("csv", "dataset.csv", 3, b"images/\0.jpg,a,train,,,", ":3: the line contains a NUL byte"),
]


@pytest.mark.parametrize(("name", "path", "line", "new", "message"), LINES)
def test_a_damaged_line_is_named_and_partial_does_not_excuse_it(tree, name, path, line, new, message):
    root = tree(name)
    change(root / path, line, new)
    with pytest.raises(ValueError, match=f"^{reader_of(name)}: .*(?s:.*){message}"):
        read(reader_of(name), root, partial=True)


def test_an_image_of_train_may_not_be_tested_on(tree):
    root = tree("sop")
    change(root / "Stanford_Online_Products/Ebay_test.txt", 2, (root / SOP_TRAIN).read_text().splitlines()[1])
    with pytest.raises(ValueError, match=r"sop: 1 image is both in train and in test:\n  cabinet_final/110000000001_0\.JPG"):
        read("sop", root, partial=True)


def test_ten_problems_of_all_lists_come_in_one_error(tree):
    root = tree("sop")
    for split, damaged in (("train", range(2, 10)), ("test", range(2, 7))):
        for line in damaged:
            change(root / f"Stanford_Online_Products/Ebay_{split}.txt", line, "x")
    with pytest.raises(ValueError, match="sop: 13 errors in its lists:") as caught:
        read("sop", root, partial=True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert "Ebay_train.txt:2: " in lines[1]
    assert "Ebay_test.txt:3: " in lines[10]
    assert lines[11] == "  and 3 more"


def test_line_ends_a_byte_order_mark_and_empty_lines_are_fine(tree):
    root = tree("sop")
    path = root / SOP_TRAIN
    before = read("sop", root, partial=True).splits["train"]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
    assert read("sop", root, partial=True).splits["train"].paths == before.paths


def test_a_bad_line_does_not_shift_the_numbers_of_later_ones(tree):
    root = tree("csv")
    change(root / "dataset.csv", 3, b"images/\xfc.jpg,a,train,,,")
    change(root / "dataset.csv", 6, "images/0_4.jpg,a,nowhere,,,")
    with pytest.raises(ValueError, match=r"2 errors(?s:.*)csv:3: not UTF-8(?s:.*)csv:6: split must be"):
        read("csv", root)


def test_a_huge_line_is_not_read_to_its_end(tmp_path, monkeypatch):
    path = tmp_path / "list.txt"
    with path.open("wb") as file:
        # sparse: a gigabyte that takes no space on disk
        file.truncate(1 << 30)
    errors = ReadErrors("toy")
    assert len(read_rows(path, (Column("path", "path"),), errors)) == 0
    with pytest.raises(ValueError, match=r"list\.txt:1: the line is longer than 64 KiB"):
        errors.raise_if_any()


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("sop", "bicycle_final/110000000003_1.JPG"),
        ("inshop", "img/WOMEN/Dresses/id_00000003/02_1_front.jpg"),
        ("vehicleid", "image/0000004.jpg"),
        ("inat", "train_val2018/Insecta/1/00010002.jpg"),
        ("cub", "images/102.Some_Bird/Some_Bird_0003.jpg"),
        ("cars", "car_ims/000007.jpg"),
        ("cars-devkit", "cars_test/00003.jpg"),
        ("gldv1", "0000000200000003.jpg"),
        ("gldv1-list", "3/4.jpg"),
        ("roxford5k", "jpg/building_001_000002.jpg"),
        ("csv", "images/3_2.jpg"),
    ],
)
def test_a_missing_image_is_named_and_left_out_of_a_partial_copy(tree, name, gone):
    root = tree(name)
    (path,) = [path for path in root.rglob("*") if path.as_posix().endswith(f"/{gone}")]
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"{reader_of(name)}: 1 of [0-9]+ images are missing:\n  {re.escape(str(path))}"
    ):
        read(reader_of(name), root)
    data = read(reader_of(name), root, partial=True)
    assert sum(map(len, data.splits.values())) == sum(size[0] for size in EXPECTED[name].values()) - 1
    assert not any(table.file(i) == path for table in data.splits.values() for i in range(len(table)))
    assert any(f"{path}" in note and "left out 1 of" in note for note in data.notes)


def test_missing_images_are_listed_with_their_lines_up_to_ten(tree):
    root = tree("sop")
    shutil.rmtree(root / "Stanford_Online_Products" / "cabinet_final")
    # a folder of that name is no image
    (root / "Stanford_Online_Products" / "bicycle_final" / "110000000003_0.JPG").unlink()
    (root / "Stanford_Online_Products" / "bicycle_final" / "110000000003_0.JPG").mkdir()
    with pytest.raises(FileNotFoundError, match=r"sop: 21 of 60 images are missing:") as caught:
        read("sop", root)
    text = str(caught.value)
    assert "cabinet_final/110000000001_0.JPG (listed at " in text
    assert "Ebay_train.txt:2)" in text
    assert "  and 11 more" in text
    assert "other counts than published" in text
    assert "--partial" in text


def test_a_split_without_any_image_is_refused_even_when_partial(tree):
    root = tree("cars")
    shutil.rmtree(root / "car_ims")
    with pytest.raises(FileNotFoundError, match="cars: none of the 30 images of train exist"):
        read("cars", root, partial=True)


def test_every_folder_is_listed_once(built, monkeypatch):
    listed = []
    scandir = os.scandir

    def counting(path):
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(source_module.os, "scandir", counting)
    read("sop", built["sop"] / "Stanford_Online_Products", partial=True)
    # three categories in each of two splits
    assert len(listed) == 6


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "version 7.3"])
def test_a_damaged_mat_file_is_a_clear_error(tree, damage):
    root = tree("cars")
    path = root / "cars_annos.mat"
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[128:160] = bytes(byte ^ 0xFF for byte in flipped[128:160])
    header = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
    path.write_bytes(
        {
            "empty": b"",
            "cut": good[: len(good) // 2],
            "flipped": bytes(flipped),
            "text": b"hello " * 100,
            "version 7.3": header * 4,
        }[damage]
    )
    with pytest.raises(ValueError, match=r"cars: .*cars_annos\.mat is not a readable MATLAB file \("):
        read("cars", root, partial=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("car_ims/000001.jpg", 197)], r"annotation 1: class must be an integer from 1 to 196, got "),
        ([("car_ims/000001.jpg", 0)], r"annotation 1: class must be an integer from 1 to 196, got "),
        ([("car_ims/000001.jpg", 1), ("/etc/passwd", 1)], "annotation 2: a path must be relative"),
        ([("car_ims/000001.jpg", 1), ("car_ims/../../x.jpg", 1)], "annotation 2: a path must be relative"),
        (
            [("car_ims/000001.jpg", 1), ("car_ims/000001.jpg", 2)],
            "annotation 2: 'car_ims/000001.jpg' is already listed at .*annotation 1",
        ),
        (
            [("car_ims/000001.jpg", 1), ("", 1)],
            "annotation 2: relative_im_path must be text|annotation 2: a path must name a file",
        ),
    ],
)
def test_a_wrong_annotation_is_named(tree, rows, message):
    root = tree("cars")
    fake_datasets.write_annotations(root / "cars_annos.mat", "relative_im_path", rows)
    with pytest.raises(ValueError, match=f"cars: (?s:.*){message}"):
        read("cars", root, partial=True)


def test_other_fields_than_the_annotations_are_refused(tree):
    root = tree("cars")
    fake_datasets.write_annotations(root / "cars_annos.mat", "fname", [("1.jpg", 1)])
    with pytest.raises(ValueError, match=r"with the fields relative_im_path and class, got the fields fname, bbox_x1"):
        read("cars", root, partial=True)


class Malice:
    """What a pickle can do to its reader."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return Path.write_text, (self.proof, "it ran")


@pytest.mark.parametrize(
    "bad",
    [
        Malice,
        lambda proof: {"imlist": [Malice(proof)], "qimlist": [], "gnd": []},
        lambda proof: {"imlist": np.array([Malice(proof)], dtype=object), "qimlist": [], "gnd": []},
        lambda proof: eval,
        lambda proof: os.system,
    ],
)
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, bad):
    proof, path = tmp_path / "proof", tmp_path / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(bad(proof)))
    with pytest.raises(ValueError, match=r"gnd_roxford5k\.pkl: .*it asks for .*which could run a program: refused"):
        read("roxford5k", tmp_path, partial=True)
    assert not proof.exists()
    if not callable(bad(proof)):
        # the plain unpickler would have run it
        pickle.loads(path.read_bytes())
        assert proof.exists()


def test_an_array_of_objects_is_refused_whatever_it_holds(tmp_path):
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({"imlist": np.array(["a"], dtype=object), "qimlist": [], "gnd": []}))
    with pytest.raises(ValueError, match=r"it asks for an array of 'O8', which could run a program: refused"):
        read_ground_truth(path)


@pytest.mark.parametrize("protocol", range(6))
def test_ground_truth_may_be_of_numpy_arrays(tmp_path, protocol):
    entry = {
        "bbx": np.array([1.0, 2.0, 3.0, 4.0]),
        "easy": np.array([1]),
        "hard": [np.int64(0)],
        "junk": np.array([], dtype=np.int32),
    }
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({"imlist": ["a", "b"], "qimlist": ["q"], "gnd": [entry]}, protocol=protocol))
    content = read_ground_truth(path)
    assert content.boxes.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert [lists[0].tolist() for lists in vars(content.truth).values()] == [[1], [0], []]


def with_entry(**changes) -> dict:
    entry = {"bbx": [0, 0, 5, 5], "easy": [0], "hard": [1], "junk": [], **changes}
    return {"imlist": ["a", "b"], "qimlist": ["q"], "gnd": [entry]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected a dict with the lists imlist, qimlist and gnd, got list"),
        ({"imlist": [], "gnd": []}, "gnd, got a dict of 'imlist', 'gnd'"),
        ({**with_entry(), "imlist": ["a", 3]}, r"imlist\[1\] must be the name of an image, got int"),
        ({**with_entry(), "imlist": ["a", "a"]}, r"imlist\[1\]: 'a' is already listed"),
        ({**with_entry(), "imlist": ["a", "../b"]}, r"imlist\[1\]: a path must be relative"),
        ({**with_entry(), "qimlist": ["/q"]}, r"qimlist\[0\]: a path must be relative"),
        ({**with_entry(), "qimlist": ["q", "r"]}, "gnd must have one entry per query, 2, got 1"),
        ({**with_entry(), "gnd": [[]]}, r"gnd\[0\] must be a dict, got list"),
        (with_entry(bbx=[0, 0, 5]), r"gnd\[0\]: bbx must be x1, y1, x2, y2"),
        (with_entry(bbx=[5, 0, 0, 5]), r"gnd\[0\]: bbx must be"),
        (with_entry(bbx=[0, 0, float("nan"), 5]), r"gnd\[0\]: bbx must be"),
        (with_entry(bbx=None), r"gnd\[0\]: bbx must be"),
        (with_entry(easy=[2]), r"gnd\[0\]\['easy'\] must lie in \[0, 2\), the images of imlist, got 2 to 2"),
        (with_entry(easy=[-1]), "got -1 to -1"),
        (with_entry(hard=["a"]), r"gnd\[0\]\['hard'\] must be a list of positions"),
        (with_entry(hard=[[0], [0, 1]]), "must be a list of positions"),
        (with_entry(junk=None), "must be a list of positions in imlist, got 'None'"),
        (with_entry(junk=[True]), "must be a list of positions"),
        (with_entry(junk=[2**80]), r"must lie in \[0, 2\)"),
        (with_entry(junk=[0]), "query 0: an image may be in one of easy, hard and junk"),
    ],
)
def test_wrong_ground_truth_is_named(tmp_path, content, message):
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=rf"gnd\.pkl: .*{message}"):
        read_ground_truth(path)


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_pickle_is_a_clear_error(tree, damage):
    root = tree("roxford5k")
    path = root / "roxford5k" / "gnd_roxford5k.pkl"
    path.write_bytes({"empty": b"", "cut": path.read_bytes()[:200], "text": b"hello"}[damage])
    with pytest.raises(ValueError, match=r"gnd_roxford5k\.pkl: not a pickle that can be read safely \("):
        read("roxford5k", root, partial=True)


def images(root: Path, *paths: str) -> Path:
    for path in paths:
        fake_datasets.save(root / path, 0, 0, 0)
    return root


def test_folders_are_classes_by_name(tmp_path):
    images(tmp_path, "train/owl/1.png", "train/ant/1.jpg", "train/ant/2.JPEG", "test/owl/9.png", "test/bee/1.webp")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "ant" / ".hidden.png").write_bytes(b"")
    (tmp_path / "test" / "cow").mkdir()
    data = read("folder", tmp_path)
    # ant 0, bee 1, owl 2 in both splits
    assert data.splits["train"].paths == ("train/ant/1.jpg", "train/ant/2.JPEG", "train/owl/1.png")
    assert data.splits["train"].labels.tolist() == [0, 0, 2]
    assert data.splits["test"].labels.tolist() == [1, 2]
    notes = "\n".join(data.notes)
    assert "1 of the 2 classes of test are in train, too" in notes
    assert "skipped 1 file that is not an image:\n  train/ant/notes.txt" in notes
    assert "1 folder without images:\n  test/cow" in notes


def test_classes_alone_are_split_by_name_on_request(tmp_path):
    images(tmp_path, *(f"{name}/{i}.png" for name in "dacbe" for i in range(2)))
    data = read("folder", tmp_path, split_seed=None)
    assert data.splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.splits["test"].paths == ("d/0.png", "d/1.png", "e/0.png", "e/1.png")
    assert data.notes == ("there is no split: 3 classes train (the first by name), the other 2 test",)
    assert data.split_seed is None


def train_classes(root: Path, **settings) -> set[str]:
    return {path.split("/")[0] for path in read("folder", root, **settings).splits["train"].paths}


def test_classes_alone_are_drawn_at_random(tmp_path):
    names = [f"{kind}{i}" for kind in ("cat", "dog") for i in range(20)]
    images(tmp_path, *(f"{name}/{i}.png" for name in names for i in range(2)))
    data = read("folder", tmp_path)
    assert data.notes == ("there is no split: 20 classes train (drawn at random with seed 0), the other 20 test",)
    assert data.split_seed == 0
    drawn = train_classes(tmp_path)
    assert drawn == train_classes(tmp_path, split_seed=0), "the seed decides"
    assert drawn != train_classes(tmp_path, split_seed=1)
    # not only cats: of 20 drawn from 40, fewer than 5 of one kind have probability 2e-4
    assert 5 <= sum(name.startswith("cat") for name in drawn) <= 15
    # a class more moves at most one other
    images(tmp_path, "ant/0.png", "ant/1.png")
    assert len(drawn ^ train_classes(tmp_path)) <= 2
    test = read("folder", tmp_path).splits["test"]
    assert not train_classes(tmp_path) & {path.split("/")[0] for path in test.paths}


def test_a_manifest_without_split_is_drawn_at_random_too(tmp_path):
    images(tmp_path, *(f"{i}.png" for i in range(12)))
    text = "path,label\n" + "".join(f"{i}.png,{'abcdef'[i // 2]}\n" for i in range(12))
    root = write_csv(tmp_path, text)
    seen = {tuple(read("csv", root, split_seed=seed).splits["train"].labels.tolist()) for seed in range(9)}
    assert len(seen) > 3
    assert read("csv", root, split_seed=None).splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert read("csv", root).split_seed == 0


def test_categories_alone_are_split_by_class(tmp_path):
    data = read("folder", images(tmp_path, "x/a/1.png", "x/b/1.png", "y/a/1.png", "y/b/1.png"), split_seed=None)
    # a below x and a below y are two classes
    assert [table.labels.tolist() for table in data.splits.values()] == [[0, 1], [2, 3]]
    assert data.splits["test"].category_names == ("x", "y")
    assert data.splits["test"].categories.tolist() == [1, 1]
    assert data.splits["test"].class_names == {0: "x/a", 1: "x/b", 2: "y/a", 3: "y/b"}


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        (("train/1.png", "train/a/1.png", "test/a/1.png"), ValueError, r"train/1\.png: the image is in no class"),
        (
            ("a/1.png", "b/c/1.png"),
            ValueError,
            r"all be in CLASS or all in CATEGORY/CLASS, got both: 'a/1\.png' and 'b/c/1\.png'",
        ),
        (("train/a/1.png", "test/x/a/1.png"), ValueError, "the same levels of folders, got train CLASS, test CATEGORY/CLASS"),
        (("x/y/z/1.png",), ValueError, "folders must end at CATEGORY/CLASS, got 'z' below it"),
        (("a/1.png",), ValueError, "at least 2 classes are needed to train and test on, got 1"),
        (("a/1.txt",), ValueError, "has no images for 'all'"),
        (("train/a/1.png", "test/a/1.txt"), ValueError, "has no images for 'test'"),
        (("train/a/1.png", "val/a/1.png", "validation/a/1.png"), ValueError, "has both val and validation: keep one"),
    ],
)
def test_folders_that_cannot_be_meant(tmp_path, paths, error, message):
    with pytest.raises(error, match=f"folder: (?s:.*){message}"):
        read("folder", images(tmp_path, *paths))


def test_a_folder_without_test_says_so(tmp_path):
    data = read("folder", images(tmp_path, "train/a/1.png", "train/a/2.png"))
    assert list(data.splits) == ["train"]
    assert data.protocols == {}
    assert data.notes == ("there is neither test nor val: nothing to evaluate on",)


@pytest.mark.skipif(os.name != "posix", reason="other systems do not store such names")
def test_a_name_that_is_no_text_is_named(tmp_path):
    images(tmp_path, "a/1.png", "b/1.png")
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/a/\xff.png")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system refuses such names")
    with pytest.raises(ValueError, match=r"folder: (?s:.*)\\udcff\.png'.*the name is not UTF-8"):
        read("folder", tmp_path)


def write_csv(root: Path, text: str, name: str = "dataset.csv", encoding: str = "utf-8") -> Path:
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(text.encode(encoding))
    return root


def test_a_manifest_of_integers_keeps_them_and_needs_no_split(tmp_path):
    images(tmp_path, "a.png", "b.png", "c.png")
    write_csv(tmp_path, "label,path\n7,a.png\n100,b.png\n7,c.png\n", "mine.csv")
    for root in (tmp_path, tmp_path / "mine.csv"):
        data = read("csv", root, split_seed=None)
        assert data.splits["train"].labels.tolist() == [7, 7]
        assert data.splits["test"].labels.tolist() == [100]
        assert "1 classes train (the first by name)" in data.notes[0]


def test_a_manifest_may_come_from_a_spreadsheet(tmp_path):
    """Byte order mark, CRLF, quotes around commas and line ends, spaces, a column of another use."""
    images(tmp_path, "a, b.png", "c.png")
    text = 'path,label,split,remark\r\n"a, b.png", "x ""y""",train,"two\r\nlines"\r\nc.png,z, test ,\r\n\r\n'
    data = read("csv", write_csv(tmp_path, text, encoding="utf-8-sig"))
    assert data.splits["train"].paths == ("a, b.png",)
    assert data.splits["test"].paths == ("c.png",)
    assert data.notes[0] == "ignored columns: 'remark'"


def test_flags_of_a_manifest(tmp_path):
    images(tmp_path, *(f"{i}.png" for i in range(6)))
    header = "path,label,split,is_query,is_gallery\n"
    train = "0.png,a,train,,\n1.png,a,train,True,True\n"
    data = read("csv", write_csv(tmp_path, header + train + "2.png,b,test,1,0\n3.png,b,test,,TRUE\n4.png,c,test,1.0,1.0\n"))
    test = data.splits["test"]
    assert data.splits["train"].is_query is None
    assert (test.is_query.tolist(), test.is_gallery.tolist()) == ([True, False, True], [False, True, True])
    assert data.protocols == {"test": "query-gallery"}
    # flags that say nothing: none, or all
    for flags in (",", "true,true"):
        data = read("csv", write_csv(tmp_path, f"{header}{train}2.png,b,validation,{flags}\n3.png,b,validation,{flags}\n"))
        assert data.splits["validation"].is_query is None
        assert data.protocols == {"validation": "all-vs-all"}
    with pytest.raises(ValueError, match=r"dataset\.csv: test has no image with is_gallery"):
        read("csv", write_csv(tmp_path, f"{header}2.png,b,test,true,false\n"))


def test_categories_and_boxes_of_a_manifest(tmp_path):
    images(tmp_path, "a.png", "b.png")
    header = "path,label,split,category,x_1,y_1,x_2,y_2\n"
    rows = "a.png,1,train,shoes,0,1,20,21.5\na.png,1,train,,5,5,9,9\nb.png,2,test,hats,,,,\n"
    data = read("csv", write_csv(tmp_path, header + rows))
    train, test = data.splits["train"], data.splits["test"]
    assert train.category_names == test.category_names == ("hats", "shoes")
    assert (train.categories.tolist(), test.categories.tolist()) == ([1, -1], [0])
    # one file twice is fine when it is not the same part of it
    assert train.boxes.tolist() == [[0, 1, 20, 21.5], [5, 5, 9, 9]]
    assert np.isnan(test.boxes).all()
    for box in ("0,0,0,5", "-1,0,5,5", "0,0,5,", "0,0,x,5", "0,0,inf,5"):
        with pytest.raises(ValueError, match=r":2: a box must have 0 <= x_1 < x_2"):
            read("csv", write_csv(tmp_path, f"{header}a.png,1,train,,{box}\n"))


def test_a_manifest_must_be_found(tmp_path):
    write_csv(tmp_path, "path,label\n", "a.csv")
    with pytest.raises(ValueError, match=r"csv: .*a\.csv lists no images"):
        read("csv", tmp_path)
    write_csv(tmp_path, "", "a.csv")
    with pytest.raises(ValueError, match=r"a\.csv:1: the header lacks path, label, got ''"):
        read("csv", tmp_path)
    write_csv(tmp_path, "", "b.csv")
    with pytest.raises(
        FileNotFoundError, match=r"must contain dataset\.csv or a single CSV file, got a\.csv, b\.csv: name the file"
    ):
        read("csv", tmp_path)


def test_a_manifest_may_name_files_elsewhere(tmp_path):
    images(tmp_path / "pictures", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    root = tmp_path / "pictures"
    paths = [f"{root}/a/1.png", "a/2.png", f"{root}/b/1.png", f"{root}/b/2.png"]
    splits = ("train", "train", "test", "test")
    rows = [f"{path},{path.split('/')[-2]},{split}\n" for path, split in zip(paths, splits, strict=True)]
    text = "path,label,split\n" + "".join(rows)
    listed = write_csv(tmp_path, text)
    with pytest.raises(ValueError, match=r"(?s):2: a path must be relative .*; name the folder .* by --image-root DIR"):
        read("csv", listed)
    data = read("csv", listed, image_root=root)
    assert data.splits["train"].paths == ("a/1.png", "a/2.png")
    assert data.splits["test"].file(1) == root / "b" / "2.png"
    with pytest.raises(ValueError, match=rf":4: a path must be relative .*; --image-root is {root / 'a'}"):
        read("csv", listed, image_root=root / "a")
    with pytest.raises(FileNotFoundError, match=r"--image-root\), .*nowhere, does not exist"):
        read("csv", listed, image_root=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="folder: only a CSV file takes the folder of its images"):
        read("folder", root, image_root=root)
    whole = read("csv", write_csv(tmp_path, text.replace("\na/2.png", f"\n{root}/a/2.png")), image_root=Path("/"))
    assert whole.splits["train"].file(1) == root / "a" / "2.png"
    escaping = write_csv(tmp_path, text.replace(f"{root}/a/1.png", f"{root}/a/../../../x.png"))
    with pytest.raises(ValueError, match=":2: a path must be relative and stay inside its folder"):
        read("csv", escaping, image_root=root)


def test_queries_with_nothing_to_find_and_lone_images_are_mentioned(tmp_path):
    images(tmp_path, "train/a/1.png", "train/a/2.png", "train/b/1.png", "test/c/1.png", "test/d/1.png", "test/d/2.png")
    assert read("folder", tmp_path).notes == (
        "1 class of train has a single image: without a second one there is no positive pair",
        "1 query of test has no other image of the same class to find: evaluation skips it",
    )
    header = "path,label,split,is_query,is_gallery\ntrain/a/1.png,a,train,,\ntrain/a/2.png,a,train,,\n"
    rows = "test/c/1.png,c,test,1,1\ntest/d/1.png,d,test,1,0\ntest/d/2.png,d,test,0,1\ntrain/b/1.png,b,test,1,0\n"
    assert read("csv", write_csv(tmp_path, header + rows)).notes == (
        "2 queries of test have no other image of the same class to find: evaluation skips them",
    )


@pytest.mark.parametrize("name", ["folder", "csv", "omniglot", "inat", "cub", "inshop"])
def test_classes_have_names(built, name):
    data = read(name, built[name], partial=True)
    labels = {label for table in data.splits.values() for label in table.labels.tolist()}
    names = {table.class_name(label) for table in data.splits.values() for label in table.labels.tolist()}
    assert len(names) == len(labels)
    assert not any(name.isdigit() for name in names)


def test_glyphs_are_called_by_their_character():
    train = read("glyphs", None).splits["train"]
    code = train.paths[0].split("/")[2]
    assert train.class_name(int(train.labels[0])) == chr(int(code.removeprefix("U+"), 16))


@pytest.mark.skipif(os.name != "posix", reason="other systems do not allow such names")
def test_names_do_not_drive_the_terminal(tmp_path):
    escape = "\x1b[2J\x07"
    images(tmp_path, f"train/{escape}/1.png", f"train/{escape}/2.png", f"train/b{escape}.png")
    with pytest.raises(ValueError, match="in no class") as caught:
        read("folder", tmp_path)
    assert "\x1b" not in str(caught.value)
    (tmp_path / "train" / f"b{escape}.png").rename(tmp_path / "train" / escape / f"{escape}.txt")
    data = read("folder", tmp_path)
    assert "\x1b" not in "".join(data.notes)
    table = data.splits["train"]
    table.file(0).write_bytes(b"no image")
    (message,) = unreadable_images(table)
    assert "\x1b" not in message
    assert "\\x1b[2J" in message


def test_links_to_folders_and_files_are_followed(tmp_path):
    images(tmp_path / "store", "ant/1.png", "ant/2.png", "owl/1.png", "owl/2.png")
    (tmp_path / "set").mkdir()
    for name in ("ant", "owl"):
        (tmp_path / "set" / name).symlink_to(tmp_path / "store" / name)
    assert sum(len(table) for table in read("folder", tmp_path / "set").splits.values()) == 4
    assert list(images_below(tmp_path / "set")) == ["ant/1.png", "ant/2.png", "owl/1.png", "owl/2.png"]
    (tmp_path / "store" / "ant" / "loop").symlink_to(tmp_path / "set")
    assert len(list(images_below(tmp_path / "set"))) == 4


def test_says_which_data_set_and_folder_it_wants(tmp_path):
    with pytest.raises(ValueError, match="unknown data set 'incub': did you mean 'cub'"):
        read("incub", tmp_path)
    with pytest.raises(ValueError, match="unknown data set 'zzz': choose one of sop, inshop, "):
        read("zzz", tmp_path)
    with pytest.raises(ValueError, match=r"sop: give its folder. Expected: Stanford_Online_Products\.zip unpacked"):
        read("sop", None)
    with pytest.raises(FileNotFoundError, match=r"sop: .*nowhere does not exist"):
        read("sop", tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"sop: .*file is a file, not a folder"):
        read("sop", tmp_path / "file")


def test_names_of_the_readers():
    assert list(READERS) == [
        *("sop", "inshop", "vehicleid", "inat", "cub", "cars", "gldv1", "roxford5k", "rparis6k", "omniglot"),
        *("folder", "csv", "glyphs"),
    ]


def test_a_data_set_checks_itself(built):
    data = read("cub", built["cub"], partial=True)
    with pytest.raises(ValueError, match="DataSet cub: splits must not be empty"):
        dataclasses.replace(data, splits={}, protocols={})
    with pytest.raises(ValueError, match="protocols for splits it does not have: val"):
        dataclasses.replace(data, protocols={"val": "all-vs-all"})


def test_pictures_of_a_tree_are_seeded(tmp_path):
    assert np.array_equal(fake_datasets.picture(3, 1), fake_datasets.picture(3, 1))
    assert not np.array_equal(fake_datasets.picture(3, 1)[:40, :40], fake_datasets.picture(3, 1, seed=1)[:40, :40])
    for name in fake_datasets.BUILDERS:
        assert reader_of(name) in READERS


@pytest.fixture
def real():
    root = os.environ.get("RANKGRAD_DATA")
    if not root:
        pytest.skip("RANKGRAD_DATA names no folder of real data")

    def folder(name: str) -> Path:
        place = Path(root) / name
        return place if place.is_dir() else pytest.skip(f"there is no {name}")

    return folder


def lay_out(archives: list[Path], root: Path) -> None:
    """The tree of the archives with empty files: a reader looks at names only."""
    for archive in archives:
        with zipfile.ZipFile(archive) as content:
            for name in content.namelist():
                if not name.endswith("/"):
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).touch()


def test_real_omniglot_is_complete(real, tmp_path):
    root = real("omniglot")
    if not (root / "images_background").is_dir():
        lay_out(sorted(root.glob("images_*.zip")), tmp_path)
        root = tmp_path
    data = read("omniglot", root)
    train, test = data.splits["train"], data.splits["test"]
    assert (len(train), train.num_classes, categories_of(train)) == (19_280, 964, 30)
    assert (len(test), test.num_classes, categories_of(test)) == (13_180, 659, 20)
    assert set(np.unique(train.labels, return_counts=True)[1]) == {20}
    assert data.notes == ()


def test_real_cars_are_a_partial_copy(real, tmp_path):
    root = real("cars196")
    if not (root / "car_ims").is_dir():
        lay_out(sorted(root.glob("car_ims*.zip")), tmp_path)
        shutil.copy(root / "cars_annos.mat", tmp_path)
        root = tmp_path
    data = read("cars", root, partial=True)
    assert {split: (len(table), table.num_classes) for split, table in data.splits.items()} == {
        "train": (8_048, 98),
        "test": (8_122, 98),
    }
    with pytest.raises((ValueError, FileNotFoundError), match="complete it has 8,054 images of 98 classes"):
        read("cars", root)


@pytest.mark.parametrize(("name", "gallery", "easy"), [("roxford5k", 4_993, 68), ("rparis6k", 6_322, 70)])
def test_real_ground_truth(real, name, gallery, easy):
    content = read_ground_truth(real("revisitop") / f"gnd_{name}.pkl")
    assert (len(content.gallery), len(content.queries), len(content.truth)) == (gallery, 70, 70)
    assert sum(len(found) > 0 for found in content.truth.easy) == easy
    assert sum(len(found) > 0 for found in content.truth.hard) == 70
    assert np.isfinite(content.boxes).all()
