"""Decoding once: equal to torchvision, shared by processes, made again when damaged, safe on a full disk."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from data.sample_images import image_of, picture, table_of
from PIL import Image
from torchvision.transforms import v2

from rankgrad import _messages
from rankgrad.data import image_cache, image_files
from rankgrad.data.image_cache import open_images


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("square", [False, True])
def test_decodes_as_torchvision_resizes(folder, tmp_path, where, square):
    images, table = open_images(folder, side=24, cache=tmp_path / "cache" if where == "file" else None, square=square)
    assert table is folder
    for row in range(len(folder)):
        with Image.open(folder.file(row)) as original:
            wanted = v2.functional.resize(original.convert("RGB"), [24, 24] if square else [24])
        assert torch.equal(image_of(images, row), v2.functional.pil_to_tensor(wanted)), row


def test_the_second_call_maps_the_file(folder, tmp_path, monkeypatch):
    first, _ = open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    monkeypatch.setattr(image_files.ImageDecoder, "planes", None)
    second, table = open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    assert torch.equal(first.flat, second.flat)
    assert torch.equal(first.shapes, second.shapes)
    assert table is folder
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".npz", ".u8"]


def test_another_process_reads_the_same_bytes(folder, tmp_path):
    images, _ = open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    code = (
        "import sys, numpy as np; from pathlib import Path; from rankgrad.data.table import Table\n"
        "from rankgrad.data.image_cache import open_images\n"
        "import rankgrad.data.image_files as d; d.ImageDecoder.planes = None\n"
        "root, cache = map(Path, sys.argv[1:])\n"
        "table = Table('fake/train', root, tuple(f'{i}.png' for i in range(6)), np.arange(6))\n"
        "print(int(open_images(table, side=24, cache=cache, square=False)[0].flat.long().sum()))"
    )
    run = [sys.executable, "-c", code, str(folder.root), str(tmp_path / "cache")]
    assert int(subprocess.run(run, check=True, capture_output=True, text=True).stdout) == int(images.flat.long().sum())


def changed_file(table):
    Image.fromarray(picture(40, 61, 99)).save(table.file(0))
    return {}


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {"side": 25},
        lambda _: {"square": True},
        lambda table: {"table": table.select([1, 0, 2, 3, 4, 5])},
        lambda table: {"table": table_of(table.root, table.paths, boxes=np.tile([0.0, 0, 30, 30], (6, 1)))},
        changed_file,
    ],
    ids=["side", "square", "order", "boxes", "a file"],
)
def test_what_decides_the_pixels_decides_the_file(folder, tmp_path, change):
    settings = {"table": folder, "side": 24, "square": False}
    open_images(**settings, cache=tmp_path / "cache")
    images, _ = open_images(**{**settings, **change(folder)}, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.u8"))) == 2
    fresh, _ = open_images(**{**settings, **change(folder)}, cache=None)
    assert torch.equal(images.flat, fresh.flat)


def folder_of(root, value):
    """Files that differ in their content only, as those that are unpacked from an archive without dates."""
    root.mkdir()
    for row in range(100):
        Image.new("RGB", (32, 32), (value, row, 0)).save(root / f"{row}.bmp")
        os.utime(root / f"{row}.bmp", (315532800, 315532800))
    return table_of(root, [f"{row}.bmp" for row in range(100)])


def test_files_that_differ_in_their_content_only_are_not_mistaken(tmp_path):
    for value in (10, 200):
        images, _ = open_images(folder_of(tmp_path / str(value), value), side=32, cache=tmp_path / "cache", square=False)
        assert int(images.flat[0]) == value


def test_a_folder_that_was_moved_needs_no_decoding_and_few_files_are_opened(tmp_path, monkeypatch):
    table = folder_of(tmp_path / "images", 10)
    images, _ = open_images(table, side=32, cache=tmp_path / "cache", square=False)
    moved = table_of(table.root.rename(tmp_path / "moved"), table.paths)
    monkeypatch.setattr(image_files.ImageDecoder, "planes", None)
    looked_at, checksum = [], image_cache._spot_checksum
    monkeypatch.setattr(image_cache, "_spot_checksum", lambda path, **how: looked_at.append(path) or checksum(path, **how))
    again, _ = open_images(moved, side=32, cache=tmp_path / "cache", square=False)
    assert torch.equal(again.flat, images.flat)
    assert len([path for path in looked_at if path.suffix == ".bmp"]) == 32


def test_a_named_pipe_among_the_files_does_not_block(folder, tmp_path):
    folder.file(0).unlink()
    os.mkfifo(folder.file(0))
    with pytest.warns(UserWarning, match=r"skipped 1 of 6 images that cannot be read:\n  .*0\.png is not a file"):
        open_images(folder, side=24, cache=tmp_path / "cache", square=False, skip_bad=True)


@pytest.mark.parametrize("skip_bad", [True, False])
def test_what_was_skipped_is_tried_again(folder, tmp_path, monkeypatch, skip_bad):
    settings = {"side": 24, "cache": tmp_path / "cache", "square": False}
    Image.fromarray(picture(200, 200)).save(folder.file(5))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)  # twice as many are an error
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"skipped 1 of 6 images that cannot be read:\n  .*5\.png is suspiciously large"):
            _, table = open_images(folder, **settings, skip_bad=True)
        assert len(table) == 5
        monkeypatch.setattr(image_files.ImageDecoder, "planes", None)  # nothing is decoded as long as nothing has changed
    monkeypatch.undo()
    images, table = open_images(folder, **settings, skip_bad=skip_bad)
    assert table is folder
    assert torch.equal(images.flat, open_images(folder, **{**settings, "cache": None})[0].flat)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def damage(path, how):
    data, head = path.read_bytes(), path.with_suffix(".npz")
    if how == "cut":
        path.write_bytes(data[:-100])
    elif how == "zeroed":
        path.write_bytes(bytes(len(data) // 2) + data[len(data) // 2 :])
    elif how == "gone":
        path.unlink()
    elif how == "head gone":
        head.unlink()
    elif how == "head cut":
        head.write_bytes(head.read_bytes()[:50])
    elif how == "head foreign":
        head.write_bytes(b"hello")


def test_what_a_killed_process_left_is_swept_away_and_what_another_still_writes_is_not(folder, tmp_path):
    cache = tmp_path / "cache"
    open_images(folder, side=24, cache=cache, square=False)
    (whole,) = cache.glob("*.u8")
    left, written = (cache / f".writing-{token}-{whole.name}" for token in ("0123abcd", "4567abcd"))
    left.write_bytes(b"half of it")
    whole.unlink()
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        open_images(folder, side=24, cache=cache, square=False)
        assert not left.exists()
        assert written.exists()


@pytest.mark.parametrize("how", ["cut", "zeroed", "gone", "head gone", "head cut", "head foreign"])
def test_a_damaged_cache_is_made_again(folder, tmp_path, how):
    good = open_images(folder, side=24, cache=tmp_path / "cache", square=False)[0].flat.clone()
    (path,) = (tmp_path / "cache").glob("*.u8")
    damage(path, how)
    assert torch.equal(open_images(folder, side=24, cache=tmp_path / "cache", square=False)[0].flat, good)
    assert torch.equal(torch.from_numpy(np.fromfile(path, np.uint8)), good)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_full_disk_is_said_beforehand(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(
        OSError, match=r"fake/train takes 1\d\.\d KiB when decoded, which cannot be written to .*: only 1000 B are free"
    ):
        open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    assert not list((tmp_path / "cache").iterdir())


def test_a_disk_that_fills_up_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot be written to .*: the disk or quota is full; nothing was left there"):
        open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.undo()
    assert len(open_images(folder, side=24, cache=tmp_path / "cache", square=False)[0]) == 6


def test_a_real_limit_on_file_sizes_is_a_sentence(folder, tmp_path):
    code = (
        "import resource, signal, sys, numpy as np; from pathlib import Path; from rankgrad.data.table import Table\n"
        "from rankgrad.data.image_cache import open_images\n"
        "root, cache = map(Path, sys.argv[1:])\n"
        "table = Table('fake/train', root, tuple(f'{i}.png' for i in range(6)), np.arange(6))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try: open_images(table, side=24, cache=cache, square=False)\n"
        "except OSError as error: print(error)"
    )
    run = [sys.executable, "-c", code, str(folder.root), str(tmp_path / "cache")]
    said = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert "the disk or quota is full; nothing was left there. Give another cache folder" in said
    assert not list((tmp_path / "cache").iterdir())


def test_an_unwritable_cache_is_a_sentence(folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match=r"cannot be written to .*file: .*Give another cache folder, or none"):
        open_images(folder, side=24, cache=tmp_path / "file", square=False)


def test_too_little_memory_is_said(folder, monkeypatch):
    monkeypatch.setattr(image_cache, "available_bytes", lambda: 2000)
    with pytest.raises(
        ValueError, match=r"fake/train takes 10\.1 KiB of memory when decoded, and 2\.0 KiB are free; give a cache folder"
    ):
        open_images(folder, side=24, cache=None, square=True)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_cache_files_have_the_permissions_that_the_umask_leaves(folder, tmp_path, umask):
    before = os.umask(umask)
    try:
        open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("channels", [1, 3])
def test_tables_with_pixels_need_no_files(tmp_path, channels):
    pixels = np.stack([picture(20, 26, i) for i in range(4)])
    pixels = pixels if channels == 3 else pixels[..., 0]
    table = table_of(tmp_path, ["a", "b", "c", "d"], pixels=pixels)
    images, _ = open_images(table, side=20, cache=tmp_path / "cache", square=False)
    for row in range(4):
        expected = torch.from_numpy(pixels[row] if channels == 3 else np.dstack([pixels[row]] * 3)).permute(2, 0, 1)
        assert torch.equal(image_of(images, row), expected)
    other = table_of(tmp_path, ["a", "b", "c", "d"], pixels=255 - pixels)
    assert not torch.equal(open_images(other, side=20, cache=tmp_path / "cache", square=False)[0].flat, images.flat)


def test_says_what_is_wrong_with_its_arguments(folder):
    with pytest.raises(ValueError, match="side must be at least 1, got 0"):
        open_images(folder, side=0, cache=None, square=False)
    with pytest.raises(ValueError, match="fake/train has no images"):
        open_images(folder.select([]), side=8, cache=None, square=False)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        open_images(folder, side=8, cache=None, square=False, workers=0)


def test_progress_is_lines_where_there_is_no_terminal(folder, monkeypatch, capsys):
    monkeypatch.setattr(_messages, "BETWEEN_LINES", 0)
    open_images(folder, side=24, cache=None, square=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [f"decoding fake/train: {i} of 6 images" for i in range(1, 7)]
    open_images(folder, side=24, cache=None, square=True, progress=False)
    assert capsys.readouterr().err == ""
