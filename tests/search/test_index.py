"""Indexes against brute force, and search from end to end."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_galleries import made_up

from rankgrad.cli.search_commands import main_index, main_search
from rankgrad.search import Gallery, Searcher, build_index
from rankgrad.search.gallery import ABOUT
from rankgrad.search.index import HNSW_FROM, IVFPQ_FROM, _Truth, choose_kind
from rankgrad.search.searcher import Effort


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return made_up(tmp_path_factory.mktemp("vectors") / "gallery")


def brute_force_recall(searcher: Searcher, rows: np.ndarray, k: int) -> float:
    """The share of answers that are among the k best of all others by float64 products; equal scores are as good."""
    vectors = np.asarray(searcher.gallery.embeddings, dtype=np.float64)
    right = 0
    for row in rows:
        scores = vectors @ vectors[row]
        scores[row] = -np.inf
        kth = np.sort(scores)[-k]
        _, found = searcher.search(searcher.gallery.embeddings[row][None], k + 1)
        answers = [other for other in found[0].tolist() if other not in (row, -1)][:k]
        right += sum(scores[other] >= kth - 1e-5 for other in answers)
    return right / (k * len(rows))


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivfpq"])
def test_recall_is_what_brute_force_counts(vectors, kind, tmp_path):
    measured = build_index(vectors, tmp_path, kind=kind, recall=0.9, shown=False)
    searcher = Searcher.open(tmp_path)
    assert searcher.kind == measured.kind == kind
    assert measured.queries == 1000
    # the queries are a sample; over all rows recall is nearly the same
    for k in (1, 10, 100):
        everywhere = brute_force_recall(searcher, np.arange(0, len(vectors), 3), k)
        assert measured.recall[k] == pytest.approx(everywhere, abs=0.03 if kind != "flat" else 0)
    assert measured.recall[10] >= 0.9
    assert measured.bytes == (tmp_path / "index.faiss").stat().st_size
    assert 0 < measured.median_ms <= measured.p95_ms
    stored = json.loads((tmp_path / "index.json").read_text())
    assert stored["measured"]["recall"] == {str(k): value for k, value in measured.recall.items()}


def test_flat_is_exact_also_among_equals(vectors, tmp_path):
    assert build_index(vectors, tmp_path, kind="flat", shown=False).recall == {1: 1.0, 10: 1.0, 100: 1.0}


def test_a_higher_target_takes_more_effort(vectors, tmp_path):
    efforts, recalls = [], []
    for target in (0.3, 0.99):
        measured = build_index(vectors, tmp_path, kind="ivfpq", recall=target, shown=False)
        efforts.append(json.loads((tmp_path / "index.json").read_text())["settings"]["nprobe"])
        recalls.append(measured.recall[10])
    assert efforts[0] < efforts[1]
    assert recalls[0] < recalls[1]


def test_a_target_out_of_reach_is_said_to_be(tmp_path):
    # without structure short codes lose neighbours, however many lists are looked through
    rng = np.random.default_rng(0)
    gallery = made_up(tmp_path / "gallery", 3000, 32)
    noise = rng.normal(size=(3000, 32)).astype(np.float32)
    np.save(tmp_path / "gallery" / "embeddings.npy", noise / np.linalg.norm(noise, axis=1, keepdims=True))
    gallery = Gallery.open(gallery.folder)
    measured = build_index(gallery, tmp_path, kind="ivfpq", recall=1.0, shown=False)
    assert measured.recall[10] < 1
    assert "is the maximum and reaches recall@10" in measured.why


def test_scores_of_compressed_vectors_are_exact(vectors, tmp_path):
    build_index(vectors, tmp_path, kind="ivfpq", shown=False)
    query = np.ascontiguousarray(vectors.embeddings[[70]])
    scores, rows = Searcher.open(tmp_path).search(query, 10)
    np.testing.assert_allclose(scores[0], vectors.embeddings[rows[0]] @ query[0], atol=1e-6)
    assert (np.diff(scores[0]) <= 0).all()
    assert rows[0, 0] == 70


@pytest.mark.parametrize("kind", [None, "flat", "hnsw", "ivfpq"])
def test_an_image_of_the_gallery_is_left_out_of_its_own_neighbours(vectors, kind, tmp_path):
    if kind:
        build_index(vectors, tmp_path, kind=kind, shown=False)
    searcher = Searcher.open(tmp_path) if kind else Searcher(vectors)
    # row 3 is there twice, as 1483
    scores, rows = searcher.search_from(3, 5)
    assert rows.shape == (5,)
    assert 3 not in rows
    assert rows[0] == 1483
    assert scores[0] == pytest.approx(1)


def test_one_query_and_many_are_answered_alike(vectors):
    searcher = Searcher(vectors)
    queries = np.ascontiguousarray(vectors.embeddings[:5])
    scores, rows = searcher.search(queries, 20)
    for i in range(5):
        one_scores, one_rows = searcher.search(queries[i : i + 1], 20)
        np.testing.assert_allclose(one_scores[0], scores[i], atol=1e-6)
        assert len(set(one_rows[0].tolist()) ^ set(rows[i].tolist())) <= 2
    assert searcher.search(queries[:1], 5000)[1].shape == (1, 1500)


def test_the_kind_follows_the_size():
    assert [choose_kind(n)[0] for n in (1, HNSW_FROM - 1, HNSW_FROM, IVFPQ_FROM - 1, IVFPQ_FROM)] == [
        "flat",
        "flat",
        "hnsw",
        "hnsw",
        "ivfpq",
    ]
    assert "49,999 images are below 50,000" in choose_kind(49_999)[1]


def test_what_cannot_be_indexed_is_refused(vectors, tmp_path):
    small = made_up(tmp_path / "small", 100)
    with pytest.raises(ValueError, match="ivfpq needs at least 624 images, got 100: use the kind flat or hnsw"):
        build_index(small, tmp_path, kind="ivfpq", shown=False)
    with pytest.raises(ValueError, match="kind must be one of 'auto', 'flat', 'hnsw', 'ivfpq', got 'tree'"):
        build_index(small, tmp_path, kind="tree", shown=False)
    with pytest.raises(ValueError, match=r"recall must lie in \(0, 1\], got 1.5"):
        build_index(small, tmp_path, recall=1.5, shown=False)
    with pytest.raises(ValueError, match=r"queries must be \[Q, 24\]"):
        Searcher(vectors).search(np.zeros((1, 3), np.float32), 1)


def test_an_index_of_other_embeddings_is_refused(tmp_path):
    gallery = made_up(tmp_path / "gallery", 100)
    build_index(gallery, tmp_path / "index", shown=False)
    shutil.rmtree(gallery.folder)
    made_up(tmp_path / "gallery", 100, seed=1)
    with pytest.raises(ValueError, match="was built from different embeddings than those in"):
        Searcher.open(tmp_path / "index")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "index.faiss").write_bytes(b"nonsense"), "index.faiss cannot be read: rebuild the index"),
        (lambda folder: (folder / "index.json").write_text("{}"), "index.json cannot be read by this version"),
        (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "holds neither index.json nor embedding.json"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, spoil, message):
    build_index(made_up(tmp_path / "gallery", 100), tmp_path / "index", shown=False)
    spoil(tmp_path / "index")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Searcher.open(tmp_path / "index")


def test_an_index_and_its_embeddings_may_be_moved_together(tmp_path):
    (tmp_path / "a").mkdir()
    build_index(made_up(tmp_path / "a" / "gallery", 100), tmp_path / "a" / "i", shown=False)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len(Searcher.open(tmp_path / "b" / "i").gallery) == 100


def test_the_index_command_prints_its_table(searcher, tmp_path, capsys):
    assert main_index([str(searcher.gallery.folder), "--kind", "hnsw", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "hnsw: as asked; efSearch 16 reaches recall@10 0.95" in out
    assert "recall@1" in out
    assert "median ms" in out
    with pytest.raises(SystemExit):
        main_index([str(searcher.gallery.folder), "--recall", "2"])
    assert "--recall must lie in (0, 1], got 2" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--exact"]])
def test_an_image_finds_itself_first(searcher, data, extra, capsys):
    image = data / "test" / "class-007" / "4.png"
    assert main_search([str(image), "--index", str(searcher.gallery.folder), "-k", "3", "--device", "cpu", *extra]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "score", "label", "path"]
    rank, score, label, path = lines[1].split()
    assert (rank, score, label) == ("1", "1.0000", "class-007")
    assert Path(path).samefile(image)
    assert len(lines) == 4


def test_exact_search_needs_no_faiss(searcher, data, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "faiss", None)
    image = str(data / "test" / "class-007" / "4.png")
    assert main_search([image, "--index", str(searcher.gallery.folder), "--exact", "--device", "cpu"]) == 0
    assert "class-007" in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError, match="faiss"):
        Searcher.open(searcher.gallery.folder)


def test_search_refuses(searcher, data, tmp_path, capsys):
    index = ["--index", str(searcher.gallery.folder)]
    with pytest.raises(FileNotFoundError, match="does not exist or is not a file: name images"):
        main_search([str(tmp_path / "none.jpg"), *index])
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(ValueError, match=r"text\.jpg is not an image that Pillow can read"):
        main_search([str(tmp_path / "text.jpg"), *index])
    with pytest.raises(SystemExit):
        main_search([str(data), *index, "-k", "0"])
    assert "-k must be at least 1, got 0" in capsys.readouterr().err


def test_embeddings_of_other_weights_are_refused(searcher, data, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(searcher.gallery.folder, copy)
    about = json.loads((copy / ABOUT).read_text())
    (copy / ABOUT).write_text(json.dumps({**about, "weights": "0" * 32}))
    with pytest.raises(ValueError, match="has other weights: their scores would mean nothing"):
        main_search([str(data / "test" / "class-007" / "4.png"), "--index", str(copy)])


@pytest.mark.parametrize("kind", ["hnsw", "ivfpq"])
def test_effort_follows_the_number_of_neighbours(tmp_path, kind):
    """In small clusters the effort that finds the ten nearest finds two thirds of the hundred nearest."""
    gallery = made_up(tmp_path / "gallery", 6000, 64, clusters=300, spread=0.25)
    report = build_index(gallery, tmp_path / kind, kind=kind, recall=0.9, shown=False)
    assert report.recall[100] >= 0.9
    searcher = Searcher.open(tmp_path / kind)
    fixed = replace(searcher, effort=Effort(searcher.effort.least))
    assert _Truth.of(gallery).recall(fixed, 100, index_alone=True) < 0.8
    for k in (100, 1000):
        _, rows = searcher.search(gallery.embeddings[:20], k)
        assert (rows >= 0).all()
        assert all(len(set(row)) == k for row in rows.tolist())
        assert brute_force_recall(searcher, np.arange(0, 6000, 600), k) >= 0.85


def test_rows_that_the_index_does_not_find_are_searched_for_exactly(vectors, tmp_path):
    build_index(vectors, tmp_path, kind="ivfpq", shown=False)
    searcher = Searcher.open(tmp_path)
    lazy = replace(searcher, effort=Effort(1))
    assert (lazy.search_index(vectors.embeddings[:3], 1500)[1] < 0).any()
    scores, rows = lazy.search(vectors.embeddings[:3], 1500)
    assert (np.sort(rows, axis=1) == np.arange(1500)).all()
    assert (np.diff(scores, axis=1) <= 1e-6).all()


def test_an_index_written_before_effort_followed_k_still_opens(vectors, tmp_path):
    build_index(vectors, tmp_path, kind="hnsw", shown=False)
    about = json.loads((tmp_path / "index.json").read_text())
    del about["settings"]["efSearch_per_neighbour"]
    (tmp_path / "index.json").write_text(json.dumps(about))
    assert Searcher.open(tmp_path).effort.at(100) >= 200


def test_class_names_cannot_drive_the_terminal(searcher, data, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(searcher.gallery.folder, copy)
    from pyarrow import parquet

    ids = parquet.read_table(copy / "ids.parquet").to_pydict()
    ids["label"] = ["\x1b]0;owned\x07\x1b[2J red"] * 30
    import pyarrow as pa

    parquet.write_table(pa.table(ids), copy / "ids.parquet")
    assert main_search([str(data / "test" / "class-007" / "4.png"), "--index", str(copy), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert r"\x1b]0;owned" in out


def test_an_index_is_searched_where_another_library_has_replaced_the_methods_of_faiss(vectors, tmp_path):
    build_index(vectors, tmp_path / "index", kind="hnsw")
    code = (
        "import sys; from pathlib import Path; import faiss.contrib.torch_utils; from rankgrad.search import Searcher\n"
        "searcher = Searcher.open(Path(sys.argv[1])); print(searcher.search_from(3, 5)[1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "index")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(Searcher.open(tmp_path / "index").search_from(3, 5)[1].tolist())
