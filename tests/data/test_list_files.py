"""Malformed lists: every error names its file and line, and the first ten come together."""

import pytest
from data.reader_trees import INAT_TEST, INSHOP_LIST, MODELS, SOP_TRAIN, VEHICLES, change, reader_of

from rankgrad.data.readers import read
from rankgrad.data.readers.list_files import MAX_LINE, Column, ReadErrors, read_rows

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
