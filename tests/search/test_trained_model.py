"""A run in use from Python: everything that `embed` and `search` take, and what they refuse."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import rankgrad as rg
from rankgrad import cli
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.search import Gallery, Searcher, folder_of_images


@pytest.fixture(scope="module")
def paths(data: Path) -> list[Path]:
    images = folder_of_images(data / "test")
    return [images.table.file(row) for row in range(len(images))]


def test_five_lines(run_folder, data, gallery, paths):
    model = rg.load(str(run_folder))
    embedding = model.embed(str(paths[7]))
    hits = model.search(str(paths[7]), str(gallery.folder), k=3)
    assert embedding.shape == (16,)
    assert embedding.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embedding), 1, atol=1e-5)
    assert hits[0].row == 7
    assert (hits[0].label, hits[0].path.name) == ("class-006", "1.png")
    assert hits[0].score == pytest.approx(1, abs=1e-5)
    assert hits[0].score >= hits[1].score >= hits[2].score
    assert model.preprocess(paths[7]).shape == (3, 32, 32)
    assert model.model(model.preprocess(paths[7])[None]).shape == (1, 16)


def test_a_model_is_shown_in_one_line(trained, run_folder):
    assert re.fullmatch(
        rf"TrainedModel\({str(run_folder)!r}: convnet, images of 32 pixels, 16 dimensions, last checkpoint, step \d+, cpu\)",
        repr(trained),
    )


def test_one_image_in_every_form(trained, gallery, paths):
    image = Image.open(paths[7]).convert("RGB")
    pixels = np.asarray(image)
    forms = [
        paths[7],
        str(paths[7]),
        paths[7].read_bytes(),
        image,
        pixels,
        torch.from_numpy(pixels.copy()).permute(2, 0, 1),
    ]
    for form in forms:
        found = trained.embed(form)
        assert found.shape == (16,)
        np.testing.assert_allclose(found, gallery.embeddings[7], atol=1e-5)
    np.testing.assert_allclose(trained.embed(forms), np.tile(gallery.embeddings[7], (6, 1)), atol=1e-5)
    np.testing.assert_allclose(trained.embed(tuple(forms)), trained.embed(form for form in forms), atol=1e-6)
    image.close()


def test_several_images_in_every_form(trained, gallery, data, paths):
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((40, 50))) for path in paths[:3]])
    batch = trained.embed(pixels)
    assert batch.shape == (3, 16)
    np.testing.assert_allclose(batch, trained.embed(torch.from_numpy(pixels).permute(0, 3, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(batch, np.stack([trained.embed(one) for one in pixels]), atol=1e-5)
    for folder in (data / "test", str(data / "test")):
        np.testing.assert_allclose(trained.embed(folder), gallery.embeddings, atol=1e-5)
    assert trained.embed([]).shape == (0, 16)


def test_galleries_in_every_form(trained, gallery, searcher, data, paths):
    wanted = [hit.row for hit in trained.search(paths[7], searcher, k=5)]
    embeddings = np.array(gallery.embeddings)
    for form in (
        gallery.folder,
        str(gallery.folder),
        gallery,
        embeddings,
        torch.from_numpy(embeddings),
        embeddings * 1e20,
        data / "test",
        str(data / "test"),
        paths,
    ):
        hits = trained.search(paths[7], form, k=5)
        assert [hit.row for hit in hits] == wanted
    assert trained.search(paths[7], embeddings, k=1)[0].path is None
    assert trained.search(paths[7], data / "test", k=1)[0].path == paths[7]


def test_queries_may_be_several_or_embeddings(trained, gallery, searcher, paths):
    several = trained.search(paths[:3], searcher, k=4)
    assert [hits[0].row for hits in several] == [0, 1, 2]
    for query in (gallery.embeddings[7], torch.from_numpy(gallery.embeddings[7].copy()), 1e30 * gallery.embeddings[7]):
        assert trained.search(query, searcher, k=1)[0].row == 7
    assert [len(hits) for hits in trained.search(gallery.embeddings[:2].astype(np.float64), searcher, k=100)] == [30, 30]


def test_what_cannot_be_embedded_is_answered_with_a_sentence(trained, paths, tmp_path):
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(UnreadableImageError, match=r"text\.jpg is not an image"):
        trained.embed(tmp_path / "text.jpg")
    with pytest.raises(UnreadableImageError, match=r"(?s)images that cannot be read:.*none\.jpg does not exist.*text\.jpg"):
        trained.embed([paths[0], tmp_path / "none.jpg", tmp_path / "text.jpg"])
    with pytest.raises(UnreadableImageError, match="does not exist"):
        trained.embed("nowhere/at/all.jpg")
    with pytest.raises(TypeError, match="an image must be a path, bytes, a PIL image, an array or a tensor, got int"):
        trained.embed(3)
    with pytest.raises(ValueError, match="must be uint8"):
        trained.embed(np.zeros((8, 8, 3)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        trained.search(paths[0], tmp_path / "empty")
    with pytest.raises(ValueError, match=r"queries must be \[Q, 16\]"):
        trained.search(np.zeros(3, np.float32), paths[:2])
    with pytest.raises(ValueError, match="there are 30 embeddings and 2 images"):
        Gallery.of(np.ones((30, 4), np.float32), folder_of_images(paths[0].parent).select([0, 1]))


def test_a_gallery_of_other_weights_is_refused(trained, gallery, paths, tmp_path):
    shutil.copytree(gallery.folder, tmp_path / "copy")
    about = json.loads((tmp_path / "copy" / "embedding.json").read_text())
    (tmp_path / "copy" / "embedding.json").write_text(json.dumps({**about, "weights": "0"}))
    with pytest.raises(ValueError, match="has other weights"):
        trained.search(paths[0], tmp_path / "copy")
    with pytest.raises(ValueError, match="has other weights"):
        trained.search(paths[0], Searcher.open(tmp_path / "copy"))


def test_a_checkpoint_can_be_chosen(run_folder):
    assert rg.load(run_folder, "cpu", "last").checkpoint == "last"
    with pytest.raises(ValueError, match="checkpoint must be 'best' or 'last', got 'first'"):
        rg.load(run_folder, checkpoint="first")
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        rg.load(run_folder / "checkpoints")


def test_folders_that_are_links_are_followed_and_loops_end(data, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "linked").symlink_to(data / "test" / "class-006")
    (tmp_path / "photos" / "loop").symlink_to(tmp_path / "photos")
    images = folder_of_images(tmp_path / "photos")
    assert images.table.paths == tuple(f"linked/{i}.png" for i in range(6))
    assert set(images.labels) == {"linked"}


OWN_TRUNK = """
from torch import nn

def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU())
"""


def test_a_network_of_ones_own_from_the_command_line_to_search(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_trunk.py").write_text(OWN_TRUNK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rankgrad.models.trunks._trusted", set())
    small = "--weights none --size 32 --dim 8 --epochs 1 --batch-size 8 --per-class 4 --no-whiten --warmup 0 --device cpu"
    train = [
        "train",
        "--data",
        str(data),
        "--trunk",
        "own_trunk:network",
        "--out",
        "run",
        "--cache",
        "none",
        "--no-tensorboard",
        *small.split(),
    ]
    assert cli.main(train) == 0
    monkeypatch.setattr("rankgrad.models.trunks._trusted", set())
    embed = ["embed", "run", str(data / "test"), "--out", "emb", "--device", "cpu"]
    assert cli.main(embed) == 2
    assert "trunk 'own_trunk:network' runs Python code. If you trust it, add --trust-code" in capsys.readouterr().err
    with pytest.raises(ValueError, match="trust_code=True"):
        rg.load("run")
    assert cli.main([*embed, "--trust-code"]) == 0
    monkeypatch.setattr("rankgrad.models.trunks._trusted", set())
    assert rg.load("run", "cpu", trust_code=True).embed(data / "test").shape == (30, 8)
    sys.modules.pop("own_trunk")
