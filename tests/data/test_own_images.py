"""Your own images: a folder per class, or a CSV file."""

import os
from pathlib import Path

import numpy as np
import pytest
from data.reader_trees import images, write_csv

from rankgrad.data.image_files import unreadable_images
from rankgrad.data.readers import read
from rankgrad.data.readers.folder_tree import images_below


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
