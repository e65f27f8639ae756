"""Files of other formats, damaged and hostile: MATLAB files of Cars, pickles of ROxford and RParis."""

import os
import pickle
from pathlib import Path

import fake_datasets
import numpy as np
import pytest

from rankgrad.data.readers import read
from rankgrad.data.readers.roxford import read_ground_truth


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
