"""Every reader on a small copy of its data set: what it finds, what it misses, what it refuses."""

import dataclasses
import os
import re
import shutil
import zipfile
from pathlib import Path

import fake_datasets
import numpy as np
import pytest
from data.reader_trees import INAT_TEST, INSHOP_LIST, MODELS, SOP_TRAIN, VEHICLES, change, reader_of
from PIL import Image

from rankgrad.data.glyphs import Glyphs
from rankgrad.data.readers import READERS, read
from rankgrad.data.readers import base as source_module
from rankgrad.data.readers import builtin_glyphs as drawn_module
from rankgrad.data.readers.base import DataSet, ReaderContext, SplitSize
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


def test_an_image_of_train_may_not_be_tested_on(tree):
    root = tree("sop")
    change(root / "Stanford_Online_Products/Ebay_test.txt", 2, (root / SOP_TRAIN).read_text().splitlines()[1])
    with pytest.raises(ValueError, match=r"sop: 1 image is both in train and in test:\n  cabinet_final/110000000001_0\.JPG"):
        read("sop", root, partial=True)


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
        *("folder", "csv", "datasets", "texts", "glyphs"),
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
