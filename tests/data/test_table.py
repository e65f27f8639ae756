"""Table: what it refuses, and what selecting rows does to everything that belongs to a row."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankgrad.data.table import GroundTruth, Table, first_complaint, halves, path_complaint


def table(n: int = 6, **changes) -> Table:
    values = {
        "name": "toy/test",
        "root": Path("/nowhere"),
        "paths": tuple(f"a/{i}.jpg" for i in range(n)),
        "labels": np.arange(n) // 2,
        "categories": np.arange(n) % 3 - 1,
        "category_names": ("x", "y"),
        "is_query": np.arange(n) % 2 == 0,
        "is_gallery": np.arange(n) % 2 == 1,
        "boxes": np.tile(np.arange(n, dtype=np.float64)[:, None], 4),
        "pixels": np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2),
    }
    return Table(**{**values, **changes})


def positions(*lists: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(entries, dtype=np.int64) for entries in lists)


def test_knows_its_length_classes_and_files():
    plain = table(pixels=None)
    assert len(plain) == 6
    assert plain.num_classes == 3
    assert plain.file(4) == Path("/nowhere/a/4.jpg")
    assert replace(plain, labels=np.array([-1, -1, 5, 7, 7, -1])).num_classes == 2


def test_a_table_of_pixels_has_no_files():
    with pytest.raises(ValueError, match=r"Table toy/test: its images are not files, use pixels\[2\]"):
        table().file(2)


@pytest.mark.parametrize("index", [[4, 1, 1], np.array([4, 1, 1]), (4, 1, 1)])
def test_select_takes_every_column_along(index):
    chosen = table().select(index)
    assert chosen.paths == ("a/4.jpg", "a/1.jpg", "a/1.jpg")
    for name in ("labels", "categories", "is_query", "is_gallery", "boxes", "pixels"):
        assert np.array_equal(getattr(chosen, name), getattr(table(), name)[[4, 1, 1]]), name
    assert chosen.category_names == ("x", "y")


def test_select_takes_masks_and_nothing():
    assert table().select(table().labels == 1).paths == ("a/2.jpg", "a/3.jpg")
    assert len(table().select([])) == 0


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([0, 6], IndexError, r"positions must lie in \[0, 6\), got 0 to 6"),
        ([-1], IndexError, r"got -1 to -1"),
        ([True, False], ValueError, r"a mask must have shape \(6,\), got \(2,\)"),
        ([0.5], TypeError, "a mask or positions, got float64"),
        ([[0]], TypeError, r"got int64 of shape \(1, 1\)"),
    ],
)
def test_select_refuses(index, error, message):
    with pytest.raises(error, match=message):
        table().select(index)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels": np.zeros(5, np.int64)}, ValueError, r"labels must have shape \(6,\) for 6 paths, got \(5,\)"),
        ({"labels": np.zeros(6)}, TypeError, "labels must be a numpy array of int64, got float64"),
        ({"labels": np.zeros(6, np.int32)}, TypeError, "got int32"),
        ({"labels": [0] * 6}, TypeError, "got list"),
        ({"labels": None}, TypeError, "labels must be a numpy array of int64, got NoneType"),
        ({"categories": np.full(6, 2)}, ValueError, r"categories must lie in \[-1, 2\).*got 2 to 2"),
        ({"categories": np.full(6, -2)}, ValueError, "got -2 to -2"),
        ({"is_query": np.zeros(6, np.int64)}, TypeError, "is_query must be a numpy array of bool"),
        ({"is_gallery": None}, ValueError, "is_query and is_gallery must be given together"),
        ({"boxes": np.zeros((6, 3))}, ValueError, r"boxes must have shape \(6, 4\)"),
        ({"boxes": np.zeros((6, 4), np.int64)}, TypeError, "boxes must be a numpy array of floating"),
        ({"pixels": np.zeros((6, 2, 2))}, TypeError, "pixels must be uint8, got float64"),
        ({"pixels": np.zeros((6, 2, 2, 4), np.uint8)}, ValueError, r"\[N, H, W\] or \[N, H, W, 3\].*got shape \(6, 2, 2, 4\)"),
        ({"pixels": np.zeros((5, 2, 2), np.uint8)}, ValueError, "for N = 6 paths"),
    ],
)
def test_checks_its_columns(changes, error, message):
    with pytest.raises(error, match=f"Table toy/test: .*{message}"):
        table(**changes)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x.jpg", "a/../../x.jpg", "a/..", "C:\\x.jpg", "\\\\host\\x.jpg", "c:/x", "a\\..\\x"]
)
def test_a_path_must_stay_inside(path):
    with pytest.raises(ValueError, match="a path must be relative and stay inside its folder"):
        table(paths=(*table().paths[:5], path))


@pytest.mark.parametrize(("path", "message"), [("", "must name a file"), ("a/", "must name a file"), ("a\0b", "NUL")])
def test_a_path_must_name_a_file(path, message):
    with pytest.raises(ValueError, match=message):
        table(paths=(*table().paths[:5], path))


@pytest.mark.parametrize("path", ["a..b/c.jpg", "..a.jpg", "a b/c.jpg", "ü/ß.jpg", "a/...jpg", "C:x.jpg"])
def test_odd_names_are_fine(path):
    assert table(paths=(*table().paths[:5], path)).paths[5] == path


def test_ground_truth_follows_the_rows():
    # rows 0 2 4 are the queries, rows 1 3 5 the gallery
    truth = GroundTruth(easy=positions([0], [1, 2], []), hard=positions([1], [], [2]), junk=positions([2], [0], [0, 1]))
    whole = table(ground_truth=truth)
    chosen = whole.select([5, 4, 1, 2]).ground_truth
    # queries are now rows 4 and 2, the gallery is rows 5 and 1: its old places 2 and 0
    assert [entry.tolist() for entry in chosen.easy] == [[], [0]]
    assert [entry.tolist() for entry in chosen.hard] == [[0], []]
    assert [entry.tolist() for entry in chosen.junk] == [[1], [1]]
    with pytest.raises(ValueError, match="rows cannot be repeated"):
        whole.select([0, 1, 1])


def test_ground_truth_is_checked():
    fine = positions([0], [1], [2])
    none = positions([], [], [])
    with pytest.raises(ValueError, match=r"one array per query, got \(3, 3, 2\) arrays"):
        GroundTruth(fine, none, none[:2])
    with pytest.raises(ValueError, match="query 1: an image may be in one of easy, hard and junk only, once"):
        GroundTruth(fine, none, positions([], [1], []))
    with pytest.raises(TypeError, match="query 0: positions must be int64, got float64"):
        GroundTruth((np.array([0.0]), *fine[1:]), none, none)
    with pytest.raises(ValueError, match=r"ground_truth must lie in \[0, 3\), the gallery, got 0 to 3"):
        table(ground_truth=GroundTruth(positions([0], [1], [3]), none, none))
    with pytest.raises(ValueError, match="ground_truth has 2 queries, the table 3"):
        table(ground_truth=GroundTruth(fine[:2], none[:2], none[:2]))
    with pytest.raises(ValueError, match="ground_truth needs is_query and is_gallery"):
        table(ground_truth=GroundTruth(fine, none, none), is_query=None, is_gallery=None)


def test_halves_are_by_class_not_by_row():
    labels = np.array([30, 10, 50, 20, 10, 40])
    first, second = halves(table(labels=labels))
    # five classes: three and two
    assert (first.labels.tolist(), second.labels.tolist()) == ([30, 10, 20, 10], [50, 40])
    assert (first.paths, second.paths) == (("a/0.jpg", "a/1.jpg", "a/3.jpg", "a/4.jpg"), ("a/2.jpg", "a/5.jpg"))
    assert (first.name, second.name) == ("toy/test-first-half", "toy/test-second-half")


def test_halves_need_classes():
    with pytest.raises(ValueError, match="toy/test must have at least 2 classes to be split in halves, got 1"):
        halves(table(labels=np.zeros(6, np.int64)))
    with pytest.raises(ValueError, match="images without a class"):
        halves(table(labels=np.array([0, 0, 1, 1, -1, 2])))


def labelled(labels, **known) -> Table:
    labels = np.asarray(labels, dtype=np.int64)
    return Table("some/train", Path("/images"), tuple(f"{i}.jpg" for i in range(len(labels))), labels, **known)


def test_a_subset_takes_classes_from_the_categories_in_turn():
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, 20, 200))
    categories = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1])[labels]
    order = rng.permutation(200)
    rows = labelled(labels[order], categories=categories[order], category_names=("a", "b"))
    found = rows.subset(7, 3)
    # -1 comes first, then a, then b; seven classes are three, two and two of them
    assert sorted(set(found.labels.tolist())) == [0, 1, 8, 9, 15, 16, 17]
    for label in set(found.labels.tolist()):
        wanted = [path for path, own in zip(rows.paths, rows.labels, strict=True) if own == label][:3]
        assert [path for path, own in zip(found.paths, found.labels, strict=True) if own == label] == wanted
    assert rows.subset(0, 0) is rows
    assert len(set(rows.subset(100, 0).labels.tolist())) == 20


def test_a_subset_keeps_queries_and_gallery_and_ground_truth():
    labels = np.repeat(np.arange(4), 10)
    is_query = np.arange(40) % 10 < 5
    found = labelled(labels, is_query=is_query, is_gallery=~is_query).subset(2, 2)
    assert (found.is_query.sum(), found.is_gallery.sum()) == (4, 4)

    lists = [tuple(np.array(part) for part in kind) for kind in (([0, 1, 2], [3]), ([4], [5, 6, 7]), ([8], [9]))]
    rows = labelled([-1] * 12, is_query=np.arange(12) < 2, is_gallery=np.arange(12) >= 2, ground_truth=GroundTruth(*lists))
    found = rows.subset(1, 2)
    assert found.paths == ("0.jpg", "2.jpg", "3.jpg", "6.jpg", "10.jpg")
    assert [part.tolist() for part in found.ground_truth.easy] == [[0, 1]]
    assert len(labelled([-1] * 50).subset(3, 4)) == 12


def files(root: Path, *, order=(0, 1, 2), **changes) -> Table:
    root.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        (root / f"{i}.jpg").write_bytes(bytes(10 + i))
    known = {"labels": np.array([0, 0, 1]), "is_query": np.array([True, False, True]), "is_gallery": np.ones(3, np.bool_)}
    return Table(**{"name": "some/test", "root": root, "paths": tuple(f"{i}.jpg" for i in order), **known, **changes})


def test_a_fingerprint_knows_paths_labels_marks_and_sizes_and_not_the_root(tmp_path):
    first = files(tmp_path / "a").fingerprint()
    assert files(tmp_path / "b").fingerprint() == first
    others = [
        files(tmp_path / "a", labels=np.array([0, 1, 1])),
        files(tmp_path / "a", order=(0, 2, 1)),
        files(tmp_path / "a", is_query=np.array([True, True, True])),
        files(tmp_path / "a", is_gallery=np.array([True, True, False])),
        files(tmp_path / "a", is_query=None, is_gallery=None),
        files(tmp_path / "a", boxes=np.ones((3, 4))),
        files(tmp_path / "a", categories=np.zeros(3, np.int64), category_names=("x",)),
        files(tmp_path / "a", pixels=np.zeros((3, 2, 2), np.uint8)),
        files(tmp_path / "a", pixels=np.ones((3, 2, 2), np.uint8)),
    ]
    changed = files(tmp_path / "c")
    (tmp_path / "c" / "1.jpg").write_bytes(b"replaced")
    missing = files(tmp_path / "d")
    (tmp_path / "d" / "1.jpg").unlink()
    found = [table.fingerprint() for table in (*others, changed, missing)]
    assert len({first, *found}) == 1 + len(found)
    truths = [GroundTruth(positions([0], []), positions([], [1]), positions([], [where])) for where in (0, 2)]
    assert len({files(tmp_path / "e", ground_truth=truth).fingerprint() for truth in truths}) == 2


def test_classes_are_called_by_name_or_by_number():
    named = labelled([7, 8, -1], class_names={7: "seven"})
    assert [named.class_name(label) for label in (7, 8, -1)] == ["seven", "8", ""]
    assert named.select([0]).class_names == {7: "seven"}


@given(st.lists(st.text(alphabet="ab./\\:\n\0", max_size=6), max_size=6))
def test_many_paths_are_refused_for_what_one_is_refused_for(paths):
    assert first_complaint(paths) == next(filter(None, map(path_complaint, paths)), None)


def test_files_are_looked_at_once(tmp_path, monkeypatch):
    from rankgrad.data import table as module
    from rankgrad.runs.data_cache import identity_of

    looked = []
    size = module._file_size
    monkeypatch.setattr(module, "_file_size", lambda path: looked.append(path) or size(path))
    listed = files(tmp_path / "a")
    first = identity_of(listed)
    assert identity_of(listed) == first
    assert looked == [str(listed.file(row)) for row in range(len(listed))]
