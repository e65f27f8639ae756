"""Galleries and indexes from elsewhere are not followed out of their own folder, and damaged ones end in a sentence."""

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from fake_datasets import picture
from fake_galleries import made_up
from PIL import Image

from rankgrad.search import Gallery, Searcher, build_index, embed_images, folder_of_images
from rankgrad.search.gallery import ABOUT
from rankgrad.search.search_service import RefusedError, SearchService
from rankgrad.search.signatures import is_own, sign


def change(folder: Path, name: str = ABOUT, **entries: object) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **entries}))


@pytest.fixture
def copy(gallery, tmp_path) -> Path:
    return Path(shutil.copytree(gallery.folder, tmp_path / "copy"))


def test_what_this_user_wrote_is_trusted_wherever_it_is_moved(copy, trained):
    gallery = Gallery.open(copy)
    assert gallery.source == "trusted"
    assert SearchService(trained, Searcher(gallery)).thumb(3).startswith(b"\xff\xd8")


@pytest.mark.parametrize("root", ["/", "/etc", "..", "relative/../../up"])
def test_another_root_is_refused_until_the_user_confirms_it(copy, trained, data, root):
    change(copy, root=root)
    gallery = Gallery.open(copy)
    assert gallery.source == "claimed"
    with pytest.raises(ValueError, match=r"was not written by you on this machine. If these images .* --images"):
        SearchService(trained, Searcher(gallery))
    with pytest.raises(ValueError, match="--images"):
        gallery.image_file(0)
    confirmed = SearchService(trained, Searcher.open(copy, images=data / "test"))
    assert confirmed.gallery.image_file(0) == data / "test" / "class-005" / "0.png"
    assert confirmed.thumb(0).startswith(b"\xff\xd8")


def test_another_list_of_images_is_not_covered_by_the_signature(trained, data, tmp_path):
    gallery = embed_images(trained, folder_of_images(data / "test"), tmp_path / "out", ids="csv", shown=False)
    ids = gallery.folder / "ids.csv"
    ids.write_text(ids.read_text().replace("class-005/0.png", "class-009/0.png"))
    assert Gallery.open(gallery.folder).source == "claimed"


def test_another_users_signature_counts_for_nothing(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert Gallery.open(copy).source == "claimed"


def test_the_key_is_for_its_owner_alone_and_can_be_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    signature = sign({"a": 1})
    assert stat.S_IMODE((tmp_path / "rankgrad" / "key").stat().st_mode) == 0o600
    assert is_own({"a": 1}, signature)
    assert not is_own({"a": 2}, signature)
    assert not any(is_own({"a": 1}, other) for other in (None, "", 3, "é", signature[:-1]))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert sign({"a": 1}) == ""
    assert not is_own({"a": 1}, "")


@pytest.mark.parametrize("ids", ["../ids.csv", "/etc/passwd", "embedding.json", "sub/ids.csv"])
def test_a_list_of_images_elsewhere_is_not_read(copy, ids):
    change(copy, ids=ids)
    with pytest.raises(ValueError, match=r"its ids must be one of ids.parquet, ids.csv"):
        Gallery.open(copy)


@pytest.mark.parametrize("path", ["../../secret.png", "/etc/secret.png", "a/../../b.png"])
def test_paths_that_leave_the_root_are_refused(trained, data, tmp_path, path):
    gallery = embed_images(trained, folder_of_images(data / "test"), tmp_path / "out", ids="csv", shown=False)
    ids = gallery.folder / "ids.csv"
    ids.write_text(ids.read_text().replace("class-005/0.png", path))
    with pytest.raises(ValueError, match="a path must be relative and stay inside its folder"):
        Gallery.open(gallery.folder)


@pytest.mark.parametrize("name", ["embeddings.npy", "ids.parquet"])
def test_files_that_are_links_out_of_the_folder_are_refused(copy, tmp_path, name):
    (copy / name).rename(tmp_path / name)
    (copy / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} leads out of the folder"):
        Gallery.open(copy)


def test_links_among_the_images_inside_a_gallery_are_not_followed(trained, tmp_path):
    (tmp_path / "secret").mkdir()
    Image.fromarray(picture(1, 0)).save(tmp_path / "secret" / "a.png")
    gallery = embed_images(trained, folder_of_images(tmp_path / "secret"), tmp_path / "out", shown=False)
    (gallery.folder / "images").mkdir()
    (gallery.folder / "images" / "a.png").symlink_to(tmp_path / "secret" / "a.png")
    change(gallery.folder, root=None)
    service = SearchService(trained, Searcher.open(gallery.folder))
    assert service.gallery.source == "inside"
    with pytest.raises(RefusedError, match="is missing or cannot be read"):
        service.thumb(0)


def test_an_index_that_points_at_other_embeddings_is_refused(tmp_path):
    gallery = made_up(tmp_path / "gallery", 100)
    build_index(gallery, tmp_path / "index", shown=False)
    # the user's own index beside its embeddings is followed, also when both are moved
    assert len(Searcher.open(tmp_path / "index").gallery) == 100
    shutil.copytree(tmp_path / "gallery", tmp_path / "elsewhere")
    for pointer in ("../elsewhere", str(tmp_path / "elsewhere")):
        change(tmp_path / "index", "index.json", embeddings=pointer)
        for exact in (True, False):
            with pytest.raises(ValueError, match=r"was not written by you on this machine. Rebuild it with: rankgrad index"):
                Searcher.open(tmp_path / "index", exact=exact)


HEADS = {
    "an open bracket": b"{'descr': '<f4', 'fortran_order': False, 'shape': (30, 16), " + b" " * 60 + b"\n",
    "an unfinished text": b"{'descr': '<f4" + b" " * 100 + b"\n",
    "no dictionary": b"[1, 2, 3]" + b" " * 100 + b"\n",
    "many brackets": b"(" * 5000 + b"\n",
    "a negative size": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 16), }" + b" " * 60 + b"\n",
    "a huge size": b"{'descr': '<f4', 'fortran_order': False, 'shape': (10**18, 16), }" + b" " * 60 + b"\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00"])
def test_a_damaged_head_of_embeddings_ends_in_a_sentence(copy, head, version):
    length = len(head).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    (copy / "embeddings.npy").write_bytes(b"\x93NUMPY" + version + length + head + bytes(30 * 16 * 4))
    with pytest.raises(ValueError, match=r"is not a complete folder of embeddings .*make it again with embed"):
        Gallery.open(copy)


def test_lengths_other_than_one_are_normalised_and_nothing_overflows(copy, gallery, trained):
    embeddings = np.load(copy / "embeddings.npy")
    query = embeddings[7] * np.float32(1e30)
    for factor in (1e30, 1e-30, 7.0):
        np.save(copy / "embeddings.npy", embeddings * np.float32(factor))
        searcher = Searcher(Gallery.open(copy))
        scores, rows = searcher.search(query[None], 5)
        assert rows[0, 0] == 7
        np.testing.assert_allclose(scores, Searcher(gallery).search(embeddings[[7]], 5)[0], atol=1e-5)
    build_index(Gallery.open(copy), copy, kind="hnsw", shown=False)
    assert Searcher.open(copy).search(query[None], 1)[0] == pytest.approx(1, abs=1e-5)
    np.save(copy / "embeddings.npy", np.where(embeddings == embeddings[3, 3], np.nan, embeddings))
    with pytest.raises(ValueError, match="must be finite, got NaN or infinite numbers: make it again"):
        Gallery.open(copy)


def test_files_have_the_permissions_that_the_umask_leaves(trained, data, tmp_path):
    before = os.umask(0o027)
    try:
        gallery = embed_images(trained, folder_of_images(data / "test"), tmp_path / "out", shown=False)
        build_index(gallery, gallery.folder, shown=False)
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in gallery.folder.iterdir()}
    assert modes == dict.fromkeys(("embeddings.npy", "embedding.json", "ids.parquet", "index.faiss", "index.json"), "0o640")
    assert stat.S_IMODE(gallery.folder.stat().st_mode) == 0o750
