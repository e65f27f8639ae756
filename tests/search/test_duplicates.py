"""Near-duplicates and likely label errors: what is found, what is not, and the files that `rankgrad duplicates` writes."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from rankgrad import cli
from rankgrad.search import Gallery, Searcher
from rankgrad.search.duplicates import label_errors, near_duplicates, nearest_neighbours

# two classes of six around two directions; 3 is a copy of 2, 7 a copy of 1 under the other label
LABELS = ["a"] * 6 + ["b"] * 6


def embeddings():
    rng = np.random.default_rng(0)
    centres = np.eye(16)[[0] * 6 + [1] * 6]
    found = centres + 0.15 * rng.standard_normal((12, 16))
    found[3], found[7] = found[2] + 0.005 * rng.standard_normal(16), found[1]
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """A folder as `embed` writes it, with pictures."""
    root, out = tmp_path / "pictures", tmp_path / "emb"
    root.mkdir()
    out.mkdir()
    rows = embeddings()
    paths = [f"{label}{i}.png" for i, label in enumerate(LABELS)]
    for i, path in enumerate(paths):
        Image.new("RGB", (40, 30), (20 * i, 255 - 20 * i, 90)).save(root / path)
    np.save(out / "embeddings.npy", rows)
    with (out / "ids.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "path", "label", "category"), *((i, p, LABELS[i], "") for i, p in enumerate(paths))])
    about = {
        "format": 1,
        "ids": "ids.csv",
        "digest": "0",
        "weights": "0",
        "run": "r",
        "checkpoint": "best",
        "dim": 16,
        "step": 1,
    }
    (out / "embedding.json").write_text(json.dumps({**about, "digest": "0", "weights": "0", "root": str(root)}))
    return out


@pytest.fixture
def lists(folder):
    return nearest_neighbours(Searcher(Gallery.open(folder)), 5)


def test_no_image_is_its_own_neighbour(lists):
    scores, rows = lists
    assert (rows != np.arange(12)[:, None]).all()
    assert (np.diff(scores, axis=1) <= 1e-6).all()


def test_copies_are_grouped_with_their_nearest_score(lists):
    found = near_duplicates(*lists, 0.99)
    assert [group.rows for group in found] == [(1, 7), (2, 3)]
    assert found[0].scores == pytest.approx((1, 1), abs=1e-5)
    assert near_duplicates(*lists, 1.01) == []


def test_chains_are_one_group():
    scores = np.array([[0.99], [0.99], [0.98], [0.2]], np.float32)
    rows = np.array([[1], [2], [1], [0]])
    assert [group.rows for group in near_duplicates(scores, rows, 0.97)] == [(0, 1, 2)]


def test_the_image_under_the_wrong_label_is_found_with_the_right_one(lists):
    (error,), accuracy = label_errors(*lists, LABELS, 5)
    assert accuracy == 11 / 12
    assert (error.row, error.suggested, error.agreement) == (7, "a", 1.0)
    assert error.neighbours[0] == 1


def test_images_without_label_neither_vote_nor_are_judged(lists):
    labels = LABELS.copy()
    labels[1] = labels[8] = ""
    found, _ = label_errors(*lists, labels, 3)
    assert [error.row for error in found] == [7]
    assert not {1, 8} & set(found[0].neighbours)
    labels = [f"only {i}" for i in range(12)]
    assert label_errors(*lists, labels, 5) == ([], 0)


def test_neighbours_that_disagree_with_each_other_suggest_nothing():
    scores, rows = np.full((6, 2), 0.5, np.float32), np.array([[2, 4], [0, 2], [3, 0], [2, 0], [5, 0], [4, 0]])
    labels = ["a", "a", "b", "b", "c", "c"]
    found, _ = label_errors(scores, rows, labels, 2)
    assert [error.row for error in found] == [0]
    assert label_errors(scores, rows, labels, 2, agreement=0.6)[0] == []


def test_the_command_writes_lists_and_a_page(folder, capsys):
    assert (
        cli.main(["duplicates", str(folder), "--threshold", "0.99", "--quiet", "--images", str(folder.parent / "pictures")])
        == 0
    )
    out = capsys.readouterr().out
    assert "2 near-duplicates in 2 groups (cosine 0.99 or more)" in out
    assert "1 likely label error (all 5 nearest neighbours carry another label)" in out
    with (folder / "duplicates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["path"], row["labels_differ"]) for row in rows] == [
        ("1", "a1.png", "yes"),
        ("1", "b7.png", "yes"),
        ("2", "a2.png", "no"),
        ("2", "a3.png", "no"),
    ]
    with (folder / "label_errors.csv").open(newline="") as file:
        assert [(row["path"], row["suggested"]) for row in csv.DictReader(file)] == [("b7.png", "a")]
    page = (folder / "duplicates.html").read_text()
    assert page.count("<img") == 1 + 5 + 4
    assert "labelled b" in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--threshold", "2"], "--threshold must be above 0 and at most 1, got 2"),
        (["--neighbours", "0"], "--neighbours must be at least 1, got 0"),
    ],
)
def test_wrong_flags_are_named(folder, flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["duplicates", str(folder), *flags])
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_embeddings_is_named(tmp_path, capsys):
    assert cli.main(["duplicates", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_images_that_moved_are_asked_for(folder, tmp_path, capsys):
    (tmp_path / "pictures").rename(tmp_path / "elsewhere")
    command = ["duplicates", str(folder), "--images"]
    (tmp_path / "empty").mkdir()
    assert cli.main([*command, str(tmp_path / "empty")]) == 0
    said = f"note: the images of {folder} are no longer in {tmp_path / 'empty'}: say where they are with --images DIR"
    assert said in capsys.readouterr().out
    assert cli.main([*command, str(tmp_path / "elsewhere")]) == 0
    assert "no longer" not in capsys.readouterr().out
