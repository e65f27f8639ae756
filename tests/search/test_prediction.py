"""Labels by the votes of neighbours, and the commands that search with many images."""

import csv
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from rankgrad import cli
from rankgrad.search import Gallery, Searcher, folder_of_images, prediction
from rankgrad.search.prediction import predict_labels


def gallery_of(vectors, labels) -> Searcher:
    gallery = Gallery.of(np.array(vectors, np.float32))
    return Searcher(replace(gallery, images=replace(gallery.images, labels=tuple(labels))))


def test_the_majority_wins_and_the_scores_decide_between_equals():
    vectors = [[1, 0], [1, 0.1], [1, 0.2], [1, 0.3], [1, 0.4]]
    searcher = gallery_of(vectors, ["a", "b", "b", "a", "b"])
    (three,) = predict_labels(searcher, np.array([[1.0, 0.0]]), 3)
    assert (three.label, three.nearest) == ("b", 0)
    assert three.agreement == pytest.approx(2 / 3)
    assert three.score == pytest.approx(1 / np.hypot(1, 0.1))
    # a at ranks 1 and 4, b at 2 and 3
    (four,) = predict_labels(searcher, np.array([[1.0, 0.0]]), 4)
    assert (four.label, four.agreement) == ("b", 0.5)


def test_the_image_itself_has_no_vote_and_unlabelled_ones_are_skipped():
    searcher = gallery_of([[1, 0], [1, 0.1], [1, 0.2], [1, 0.3]], ["a", "", "b", "b"])
    assert predict_labels(searcher, np.array([[1.0, 0.0]]), 1)[0].label == "a"
    (found,) = predict_labels(searcher, np.array([[1.0, 0.0]]), 1, exclude=[0])
    assert (found.label, found.nearest) == ("b", 1)
    with pytest.raises(ValueError, match="no image of the gallery has a label"):
        predict_labels(gallery_of([[1, 0]], [""]), np.array([[1.0, 0.0]]))


@pytest.mark.parametrize("near", [0.0, 0.01], ids=["anywhere", "those without a label nearest"])
def test_the_nearest_with_a_label_vote_however_few_they_are(near, monkeypatch):
    monkeypatch.setattr(prediction, "AT_ONCE", 7)
    rng = np.random.default_rng(0)
    labels = ["cat" if row < 5 else "dog" if row < 10 else "" for row in range(200)]
    queries, vectors = rng.normal(size=(20, 8)), rng.normal(size=(200, 8))
    if near:
        vectors[20:] = queries.repeat(9, axis=0) + near * rng.normal(size=(180, 8))
    itself = [-1] * 10 + list(range(10))
    found = predict_labels(gallery_of(vectors, labels), queries, 3, exclude=itself)
    cosines = queries @ vectors.T / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(vectors, axis=1)
    cosines[range(10, 20), range(10)] = -np.inf
    for each, row in zip(found, cosines, strict=True):
        voters = np.argsort(-row[:10])[:3]
        winner = max(("cat", "dog"), key=[labels[voter] for voter in voters].count)
        assert (each.label, each.nearest) == (winner, row.argmax())
        assert each.agreement == pytest.approx([labels[voter] for voter in voters].count(winner) / 3)
        assert each.score == pytest.approx(max(row[voter] for voter in voters if labels[voter] == winner))


def test_the_index_suffices_where_all_or_enough_have_a_label(monkeypatch):
    searched = []
    search = Searcher.search
    monkeypatch.setattr(
        Searcher, "search", lambda self, *given, **kinds: searched.append(kinds) or search(self, *given, **kinds)
    )
    vectors = [[1, 0], [1, 0.1], [1, 0.2], [1, 0.3]]
    for labels in ("abab", ["a", "", "b", "b"], ["a", "", "", "b"]):
        predict_labels(gallery_of(vectors, labels), np.array([[1.0, 0.0]]), 9, exclude=[0])
    assert searched == [{}] * 3


def test_predict_writes_a_label_for_each_image(run_folder, data, searcher, gallery, tmp_path, capsys):
    command = ["predict", str(run_folder), str(data / "test"), "--gallery", str(gallery.folder), "-k", "3", "--device", "cpu"]
    assert cli.main([*command, "--out", str(tmp_path / "labels.csv")]) == 0
    assert "Wrote the labels of 30 images to" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "labels.csv").read_text().splitlines()))
    assert list(rows[0]) == ["path", "label", "agreement", "score", "nearest"]
    images = folder_of_images(data / "test").table
    for row, found in enumerate(rows):
        assert found["path"] == str(images.file(row))
        _, neighbours = searcher.search_from(row, 3)
        names = [gallery.images.labels[other] for other in neighbours]
        assert found["label"] in names
        assert float(found["agreement"]) == pytest.approx(names.count(found["label"]) / 3, abs=1e-3)
        assert found["nearest"] == str(gallery.images.table.file(neighbours[0]))
    # printed, for one file
    assert cli.main([*command[:2], rows[7]["path"], *command[3:]]) == 0
    printed = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert printed == [rows[7]]


def test_many_images_are_searched_with_at_once(data, gallery, tmp_path, capsys):
    index = ["--index", str(gallery.folder), "-k", "2", "--device", "cpu"]
    assert cli.main(["search", str(data / "test"), *index, "--out", str(tmp_path / "found.csv")]) == 0
    assert "Wrote 60 results of 30 queries" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert [row["rank"] for row in rows[:4]] == ["1", "2", "1", "2"]
    assert all(row["query"] == row["path"] for row in rows[::2])
    files = [row["query"] for row in rows[:4:2]]
    assert cli.main(["search", *files, *index]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["query", "rank", "score", "label", "path"]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jpg"], "nowhere.jpg does not exist or is not a file: name images or folders of images"),
        (["{data}", "-k", "0"], "-k must be at least 1, got 0"),
        (["{data}", "--gallery", "{data}"], "holds neither index.json nor embedding.json"),
    ],
)
def test_predict_refuses(run_folder, data, gallery, arguments, message, capsys):
    given = [argument.format(data=data) for argument in arguments]
    with pytest.raises(SystemExit) if "-k" in given else nullcontext():
        assert cli.main(["predict", str(run_folder), "--gallery", str(gallery.folder), *given]) == 2
    assert message in capsys.readouterr().err
