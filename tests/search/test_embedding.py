"""From images to files: what is written, in which order, and what is refused."""

import copy
import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_datasets import picture
from PIL import Image

from rankgrad.cli.search_commands import main_embed
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.preprocessing import Preprocessing
from rankgrad.runs.embedding import embed_native_shape
from rankgrad.search import Gallery, ImageList, embed_images, folder_of_images, load, manifest_of_images, split_of_data_set
from rankgrad.search.image_lists import names_by_folder


def test_embeddings_are_those_that_the_run_was_tested_with(run_folder, data, trained, tmp_path):
    items, _ = split_of_data_set(f"folder:{data}", "test")
    gallery = embed_images(trained, items, tmp_path / "out", shown=False)
    tested = np.load(run_folder / "eval" / "test" / "embeddings.npy")
    np.testing.assert_allclose(gallery.embeddings, tested, atol=1e-6)


def test_the_folder_says_what_it_holds(gallery, trained, data):
    assert gallery.embeddings.shape == (30, 16)
    assert gallery.embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(gallery.embeddings, axis=1), 1, atol=1e-5)
    assert gallery.images.table.paths[7] == "class-006/1.png"
    assert gallery.images.labels[7] == "class-006"
    assert gallery.images.table.file(7).samefile(data / "test" / "class-006" / "1.png")
    about = json.loads((gallery.folder / "embedding.json").read_text())
    assert (about["images"], about["dim"], about["size"], about["left_out"]) == (30, 16, 32, 0)
    assert about["weights"] == trained.fingerprint
    assert Path(about["run"]).samefile(trained.folder)
    from pyarrow import parquet

    ids = parquet.read_table(gallery.folder / "ids.parquet").to_pydict()
    assert list(ids) == ["id", "path", "label", "category"]
    assert ids["id"] == list(range(30))


def test_row_by_row_and_together_are_the_same(gallery, trained):
    for row in (0, 13, 29):
        np.testing.assert_allclose(trained.embed(gallery.images.table.file(row)), gallery.embeddings[row], atol=1e-5)


def test_csv_ids_hold_the_same_as_parquet(gallery, trained, data, tmp_path):
    other = embed_images(trained, folder_of_images(data / "test"), tmp_path / "csv", ids="csv", shown=False)
    assert (other.images.table.paths, other.images.labels) == (gallery.images.table.paths, gallery.images.labels)
    assert other.digest == gallery.digest
    rows = list(csv.DictReader((tmp_path / "csv" / "ids.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[29] == {"id": "29", "path": "class-009/5.png", "label": "class-009", "category": ""}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for i, place in enumerate((".", "cats", "cats", "wild/cats", ".hidden")):
        (folder / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(i, 0)).save(folder / place / f"{i}.JPG", format="JPEG")
    (folder / "cats" / "notes.txt").write_text("no image")
    return folder


def test_a_folder_is_searched_to_its_depths(images):
    items = folder_of_images(images)
    assert items.table.paths == ("0.JPG", "cats/1.JPG", "cats/2.JPG", "wild/cats/3.JPG")
    # two folders are called cats
    assert items.labels == ("", "cats", "cats", "wild/cats")


def test_links_to_folders_are_followed(images, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cats").symlink_to(images / "cats")
    assert folder_of_images(tmp_path / "linked").table.paths == ("cats/1.JPG", "cats/2.JPG")


def test_a_manifest_may_name_files_by_absolute_paths(images, tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(f"path,label\n{images}/cats/1.JPG,cat\n0.JPG,dog\n")
    with pytest.raises(ValueError, match=r"list.csv:2: a path must be relative .*; name the folder .* by --image-root DIR"):
        manifest_of_images(path)
    items = manifest_of_images(path, images)
    assert [items.table.file(row) for row in range(2)] == [images / "cats" / "1.JPG", images / "0.JPG"]


def test_a_class_is_called_by_its_folder_alone_where_that_is_clear():
    assert names_by_folder(["a/x/1.png", "a/y/2.png", "a/x/3.png"]) == ("x", "y", "x")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "is not a folder: give a folder of images, a CSV file"),
        (lambda folder: [path.unlink() for path in folder.rglob("*.JPG")], "holds no image: wanted are files that end in .bmp"),
    ],
)
def test_a_folder_without_images_is_refused(images, spoil, message):
    spoil(images)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        folder_of_images(images)


def test_unreadable_images_are_an_error_or_left_out_and_listed(images, trained, tmp_path):
    whole = (images / "cats" / "1.JPG").read_bytes()
    (images / "cats" / "1.JPG").write_bytes(whole[: len(whole) // 2])
    (images / "wild" / "cats" / "3.JPG").write_text("not an image")
    items = folder_of_images(images)
    with pytest.raises(UnreadableImageError, match=r"(?s)1\.JPG cannot be read.*3\.JPG is not an image.*--skip-bad"):
        embed_images(trained, items, tmp_path / "out", shown=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]
    said: list[str] = []
    gallery = embed_images(trained, items, tmp_path / "out", skip_bad=True, shown=False, say=said.append)
    assert gallery.images.table.paths == ("0.JPG", "cats/2.JPG")
    assert gallery.images.labels == ("", "cats")
    assert gallery.about["left_out"] == 2
    np.testing.assert_allclose(gallery.embeddings[1], trained.embed(images / "cats" / "2.JPG"), atol=1e-5)
    assert (tmp_path / "out" / "left_out.txt").read_text().count("\n") == 2
    assert "Skipped 2 of 4 images" in said[0]
    assert "1.JPG" in said[0]


def test_nothing_readable_is_an_error_though_bad_images_may_be_skipped(images, trained, tmp_path):
    for path in images.rglob("*.JPG"):
        path.write_text("not an image")
    with pytest.raises(UnreadableImageError, match="No image is left to embed"):
        embed_images(trained, folder_of_images(images), tmp_path / "out", skip_bad=True, shown=False)


def test_a_folder_that_is_not_empty_is_not_written_to(gallery, trained, data):
    with pytest.raises(FileExistsError, match="already exists and is not empty"):
        embed_images(trained, folder_of_images(data / "test"), gallery.folder, shown=False)


def test_a_manifest_may_lack_labels_and_may_cut_boxes(images, trained, tmp_path):
    path = images / "list.csv"
    path.write_text("path,x_1,y_1,x_2,y_2\ncats/1.JPG,,,,\ncats/1.JPG,4,5,30,31\n")
    gallery = embed_images(trained, manifest_of_images(path), tmp_path / "out", shown=False)
    assert gallery.images.labels == ("", "")
    assert gallery.images.table.boxes is not None
    assert gallery.images.table.boxes[1].tolist() == [4, 5, 30, 31]
    assert np.isnan(gallery.images.table.boxes[0]).all()
    Image.open(images / "cats" / "1.JPG").crop((4, 5, 30, 31)).save(tmp_path / "cut.png")
    np.testing.assert_allclose(gallery.embeddings[1], trained.embed(tmp_path / "cut.png"), atol=1e-5)
    assert np.abs(gallery.embeddings[1] - gallery.embeddings[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\na.jpg,x\n", "the header must name the column path .*got 'file,label'"),
        ("path,label\n../a.jpg,x\n", "list.csv:2: a path must be relative and stay inside"),
        ("path,label\na.jpg\n", r"list.csv:2: 2 columns expected \(path,label\), got 1"),
        ("path,x_1,y_1,x_2,y_2\na.jpg,1,2,three,4\n", "x_1, y_1, x_2, y_2 must be numbers or empty, got 1, 2, three, 4"),
        ("path\n", "lists no image"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path, text, message):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        manifest_of_images(tmp_path / "list.csv")


def test_drawn_images_are_written_beside_their_embeddings(trained, tmp_path):
    items, _ = split_of_data_set("glyphs", "test")
    some = items.select([5, 400])
    gallery = embed_images(trained, some, tmp_path / "out", shown=False)
    assert gallery.about["root"] is None
    assert all(len(label) == 1 for label in gallery.images.labels), "a class is called by its character"
    assert gallery.images.categories == some.categories
    # the folder may be moved
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = Gallery.open(tmp_path / "moved")
    np.testing.assert_array_equal(np.asarray(Image.open(moved.images.table.file(1))), some.table.pixels[1])


@pytest.mark.parametrize(
    ("named", "split", "message"),
    [
        ("nothing:here", "test", "--data must be NAME:DIR with NAME one of sop, .*got 'nothing:here'"),
        ("folder", "test", "--data must be NAME:DIR"),
        ("folder:{data}", "validation", "folder has no split 'validation'; it has train, test"),
    ],
)
def test_a_data_set_that_is_not_there_is_refused(data, named, split, message):
    with pytest.raises(ValueError, match=message):
        split_of_data_set(named.format(data=data), split)


def test_classes_of_several_folders_are_called_by_number(data):
    items, _ = split_of_data_set(f"folder:{data}", "test")
    assert set(items.labels) == {f"class-{i:03d}" for i in range(5, 10)}
    from rankgrad.search.image_lists import _class_names

    merged = replace(items.table, labels=items.table.labels // 2, class_names={})
    assert set(_class_names(merged)) == {str(label) for label in set(merged.labels.tolist())}


def test_items_must_agree(gallery):
    with pytest.raises(ValueError, match=r"equally many, got \(30, 1, 30\)"):
        ImageList(gallery.images.table, ("a",), gallery.images.categories)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "embedding.json").unlink(), "is not a folder that embed wrote"),
        (lambda folder: (folder / "embedding.json").write_text("{"), "cannot be read by this version"),
        (lambda folder: (folder / "ids.parquet").unlink(), "is not a complete folder of embeddings"),
        (lambda folder: np.save(folder / "embeddings.npy", np.zeros((3, 16), np.float32)), r"got float32 of shape \(3, 16\)"),
    ],
)
def test_a_damaged_gallery_is_refused(gallery, tmp_path, spoil, message):
    shutil.copytree(gallery.folder, tmp_path / "copy")
    spoil(tmp_path / "copy")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Gallery.open(tmp_path / "copy")


def test_landmarks_are_embedded_at_their_own_shape(trained, data):
    recipe = replace(trained.recipe, test_on=("roxford5k",), scales=(1.0, 0.5))
    scaled = replace(trained, recipe=recipe, preprocess=recipe.preprocessing())
    items = folder_of_images(data / "test").select([3, 20])
    preprocess = Preprocessing(32, native_shape=True)
    wanted = embed_native_shape(trained.model, items.table, preprocess, scales=(1.0, 0.5), device=trained.device)
    ((rows, found, bad),) = scaled.embed_table(items.table)
    assert (rows, bad) == ([0, 1], [])
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert np.abs(found[0] - trained.embed(items.table.file(0))).max() > 1e-4


def test_a_network_that_diverged_is_refused(trained, data, tmp_path):
    broken = replace(trained, model=copy.deepcopy(trained.model))
    torch.nn.init.constant_(broken.model.head.linear.weight, torch.nan)
    with pytest.raises(ValueError, match="gives numbers that are not finite: train it again"):
        embed_images(broken, folder_of_images(data / "test"), tmp_path / "out", shown=False)


def test_the_command(run_folder, data, tmp_path, capsys):
    arguments = [str(run_folder), str(data / "test"), "--out", str(tmp_path / "out"), "--ids", "csv", "--device", "cpu"]
    assert main_embed(arguments) == 0
    assert f"Wrote 30 embeddings of 16 dimensions to {tmp_path / 'out'}" in capsys.readouterr().out
    assert len(Gallery.open(tmp_path / "out")) == 30


def test_a_single_file_is_embedded(run_folder, data, tmp_path, gallery, capsys):
    image = data / "test" / "class-006" / "1.png"
    assert main_embed([str(run_folder), str(image), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "Wrote 1 embedding of 16 dimensions" in capsys.readouterr().out
    single = Gallery.open(tmp_path / "out")
    assert single.images.table.file(0).samefile(image)
    np.testing.assert_allclose(single.embeddings, gallery.embeddings[[7]], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the images: a folder, an image or a CSV file"),
        (["here", "--data", "glyphs"], "and not both"),
        (["here", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["here", "--skipbad"], "unknown flag --skipbad: did you mean --skip-bad?"),
    ],
)
def test_the_command_refuses(run_folder, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main_embed([str(run_folder), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path, run_folder):
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        load(tmp_path)
    with pytest.raises(ValueError, match="checkpoint must be 'best' or 'last', got 'first'"):
        load(run_folder, checkpoint="first")


def test_a_list_of_images_from_elsewhere_may_have_nulls_and_numbers(gallery, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    shutil.copytree(gallery.folder, tmp_path / "copy")
    table = parquet.read_table(gallery.folder / "ids.parquet")
    labels = pa.array([None if row == 3 else row % 4 for row in range(len(table))])
    parquet.write_table(table.set_column(2, "label", labels).drop(["id"]), tmp_path / "copy" / "ids.parquet")
    found = Gallery.open(tmp_path / "copy").images
    assert found.labels[:5] == ("0", "1", "2", "", "0")
    assert found.table.paths == gallery.images.table.paths
    names, codes = found.label_codes
    assert [names[code] for code in codes] == list(found.labels)
    assert Gallery.open(tmp_path / "copy").class_sizes == {"0": 8, "1": 8, "2": 7, "3": 6}


def test_a_large_list_opens_without_a_look_at_every_path(tmp_path):
    """A million images open in about a second (`python -m benchmarks.gallery`); a call for each path takes several."""
    from fake_galleries import made_up

    from rankgrad.data import table

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "path_complaint", calls.append)
        made_up(tmp_path / "many", items=5000, dim=4)
    assert not calls
