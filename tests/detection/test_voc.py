"""The reader of VOC's layout on small trees, on damaged ones, and on real boxes where there are any."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from detection.voc_tree import annotation, write_image, write_voc

from rankgrad.detection import VOC_CLASSES, read_voc
from rankgrad.detection.voc import lists_in


@pytest.fixture
def devkit(tmp_path):
    """Both years of a devkit, two images each."""
    for year in ("2007", "2012"):
        write_voc(
            tmp_path / "VOCdevkit" / f"VOC{year}",
            {
                f"{year}_1": [("dog", (1, 1, 64, 48)), ("person", (10, 20, 30, 40), True)],
                f"{year}_2": [("cat", (5, 6, 5.5, 8), False)],
            },
            {"trainval": [f"{year}_1", f"{year}_2"], "test": [f"{year}_2"]},
        )
    return tmp_path


def one(tmp_path, objects, **options):
    folder = write_voc(tmp_path / "set", {"a": objects}, {"train": ["a"]})
    return read_voc(folder, "train", **options)


def test_boxes_counted_from_1_with_their_last_pixel_become_edges(devkit):
    scenes = read_voc(devkit, "trainval", years=["2007"])
    assert scenes.class_names == VOC_CLASSES
    assert len(scenes) == 2
    first, second = scenes.scenes
    # the whole image, and one that is difficult; parts of a person are no objects
    assert first.boxes.tolist() == [[0, 0, 64, 48], [9, 19, 30, 40]]
    assert first.labels.tolist() == [VOC_CLASSES.index("dog") + 1, VOC_CLASSES.index("person") + 1]
    assert first.difficult.tolist() == [False, True]
    assert first.clear.boxes.tolist() == [[0, 0, 64, 48]]
    assert second.boxes.tolist() == [[4, 5, 5.5, 8]]
    assert scenes.image(0).shape == (3, 48, 64)
    assert scenes.counts()["dog"] == 1
    assert scenes.counts()["person"] == 0


@pytest.mark.parametrize("root", [".", "VOCdevkit"])
def test_both_years_together_from_any_root(devkit, root):
    scenes = read_voc(devkit / root, "trainval", years=["2007", "2012"])
    assert [scene.name for scene in scenes.scenes] == ["2007_1.jpg", "2007_2.jpg", "2012_1.jpg", "2012_2.jpg"]
    assert np.array_equal(scenes.load(3), read_voc(devkit, "trainval", years=["2012"]).load(1))
    assert np.array_equal(scenes.select([3, 0]).load(0), scenes.load(3))


def test_the_folder_of_a_year_itself(devkit):
    assert len(read_voc(devkit / "VOCdevkit" / "VOC2007", "test", years=["2007"])) == 1
    assert lists_in(devkit / "VOCdevkit" / "VOC2007") == ["test", "trainval"]


def test_classes_of_any_other_folder_are_those_that_occur(tmp_path):
    scenes = one(tmp_path, [("zebra", (1, 1, 9, 9)), ("ape", (1, 1, 9, 9))])
    assert scenes.class_names == ("ape", "zebra")
    assert scenes.scenes[0].labels.tolist() == [2, 1]


def test_an_image_without_objects_stays_and_is_noted(tmp_path):
    folder = write_voc(tmp_path / "set", {"a": [], "b": [("ape", (1, 1, 9, 9))]}, {"train": ["a", "b"]})
    scenes = read_voc(folder, "train")
    assert scenes.scenes[0].boxes.shape == (0, 4)
    assert scenes.notes == ("1 images without an object (a.xml)",)


def test_a_class_never_present_is_noted(tmp_path):
    scenes = one(tmp_path, [("ape", (1, 1, 9, 9))], class_names=("ape", "bear"))
    assert scenes.notes == ("no object of bear in train",)


def test_a_box_that_sticks_out_is_cut(tmp_path):
    scenes = one(tmp_path, [("ape", (-3, 0, 70, 20))])
    assert scenes.scenes[0].boxes.tolist() == [[0, 0, 64, 20]]
    assert scenes.notes == ("1 boxes clipped to their image (a.xml)",)


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ((9, 9, 9, 20), r"a\.xml: the box of a ape has no area \(9, 9, 9, 20\)"),
        ((20, 9, 9, 20), r"a\.xml: the box of a ape has no area"),
        ((70, 9, 90, 20), r"a\.xml: the box of a ape lies outside of its 64 x 48 pixels \(70, 9, 90, 20\)"),
        ((1, "", 9, 20), r"a\.xml: the box of a ape must be xmin, ymin, xmax, ymax, got 1, , 9, 20"),
        ((1, "nan", 9, 20), r"a\.xml: the box of a ape must be finite"),
    ],
)
def test_bad_boxes_are_named_with_their_file(tmp_path, box, message):
    with pytest.raises(ValueError, match=message):
        one(tmp_path, [("ape", box)])


def test_boxes_without_area_or_outside_can_be_left_out(tmp_path):
    objects = [("ape", (9, 9, 9, 20)), ("ape", (70, 9, 90, 20)), ("ape", (1, 1, 9, 20))]
    scenes = one(tmp_path, objects, skip_bad=True)
    assert scenes.scenes[0].boxes.tolist() == [[0, 0, 9, 20]]
    assert scenes.notes == ("2 objects skipped that have no area or lie outside of their image (a.xml, a.xml)",)


def test_an_unknown_class_is_named_with_its_file_and_the_nearest_one(devkit):
    path = devkit / "VOCdevkit" / "VOC2007" / "Annotations" / "2007_1.xml"
    path.write_text(annotation([("dogg", (1, 1, 9, 9))]))
    with pytest.raises(ValueError, match=r"2007_1\.xml has an object of the unknown class 'dogg': did you mean 'dog'\?"):
        read_voc(devkit, "trainval", years=["2007"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.xml is empty"),
        ("<annotation><object>", r"a\.xml is not XML"),
        ("<annotation><object></object></annotation>", r"a\.xml has an object without a name"),
        (annotation([], width="wide"), r"a\.xml: width and height must be whole numbers, got wide and 48"),
    ],
)
def test_damaged_annotations_are_named(tmp_path, text, message):
    folder = write_voc(tmp_path / "set", {"a": [("ape", (1, 1, 9, 9))]}, {"train": ["a"]})
    (folder / "Annotations" / "a.xml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_voc(folder, "train", class_names=("ape",))


def test_a_size_that_is_not_given_is_that_of_the_image(tmp_path):
    folder = write_voc(tmp_path / "set", {"a": []}, {"train": ["a"]})
    (folder / "Annotations" / "a.xml").write_text(annotation([("ape", (1, 1, 64, 48))], width=0, height=0))
    assert read_voc(folder, "train").scenes[0].boxes.tolist() == [[0, 0, 64, 48]]


def test_missing_files_are_named(devkit):
    folder = devkit / "VOCdevkit" / "VOC2007"
    with pytest.raises(FileNotFoundError, match=r"val\.txt is missing; there is test, trainval"):
        read_voc(folder, "val")
    (folder / "Annotations" / "2007_2.xml").unlink()
    with pytest.raises(FileNotFoundError, match=r"the annotation .*2007_2\.xml is missing"):
        read_voc(folder, "test", class_names=VOC_CLASSES)
    (folder / "JPEGImages" / "2007_2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"the image .*2007_2\.jpg is missing"):
        read_voc(folder, "test", class_names=VOC_CLASSES)
    with pytest.raises(FileNotFoundError, match="VOC2010/Annotations is missing"):
        read_voc(devkit, "trainval", years=["2010"])
    with pytest.raises(FileNotFoundError, match="is not a folder; expected a folder with JPEGImages"):
        read_voc(devkit / "nowhere", "trainval")
    with pytest.raises(ValueError, match=r"several folders in .* have annotations \(VOC2007, VOC2012\): name one"):
        read_voc(devkit / "VOCdevkit", "trainval")


def test_lists_that_cannot_be_are_refused(devkit):
    path = devkit / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main" / "test.txt"
    path.write_text("2007_1  1\n2007_1 -1\n")
    with pytest.raises(ValueError, match=r"test\.txt lists 2007_1 more than once"):
        read_voc(devkit, "test", years=["2007"])
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"test\.txt lists no image"):
        read_voc(devkit, "test", years=["2007"])


def test_images_that_are_not_as_annotated_are_named(devkit):
    scenes = read_voc(devkit, "trainval", years=["2007"])
    folder = devkit / "VOCdevkit" / "VOC2007" / "JPEGImages"
    write_image(folder / "2007_1.jpg", width=32, height=32)
    with pytest.raises(ValueError, match=r"2007_1\.jpg is 32 x 32 pixels, but its annotation says 64 x 48"):
        scenes.image(0)
    (folder / "2007_2.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2007_2\.jpg cannot be read: it is not an image"):
        scenes.image(1)


def test_real_boxes(tmp_path):
    """BCCD: 364 images, 4,888 boxes, 3 classes; two boxes have no area."""
    root = os.environ.get("RANKGRAD_DATA")
    archive = Path(root or "") / "detection" / "bccd.zip"
    if not root or not archive.is_file():
        pytest.skip("RANKGRAD_DATA names no folder with detection/bccd.zip")
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path)
    with pytest.raises(ValueError, match=r"BloodImage_00338\.xml: the box of a RBC has no area \(504, 337, 504, 337\)"):
        read_voc(tmp_path, "trainval")
    parts = [read_voc(tmp_path, split, skip_bad=True) for split in ("trainval", "test")]
    assert [len(part) for part in parts] == [292, 72]
    assert parts[0].class_names == ("Platelets", "RBC", "WBC")
    assert sum(len(scene.labels) for part in parts for scene in part.scenes) == 4888 - 2
    assert parts[1].image(0).shape == (3, 480, 640)
