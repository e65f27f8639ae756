"""Decoded images and crops: against torchvision and Pillow, with damaged files, damaged caches and a full disk."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from rankgrad import _messages
from rankgrad.data import image_cache, image_files, image_store
from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_cache import open_images
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.image_store import ImageBuffer, OnDemandImages, bytes_needed
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import ClassBalanced, Sequential
from rankgrad.data.seeds import generator
from rankgrad.data.table import Table


def picture(height, width, seed=0):
    """Smooth colours with some noise: [height, width, 3] uint8."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8)


def table_of(root, paths, **fields):
    return Table(name="fake/train", root=root, paths=tuple(paths), labels=np.arange(len(paths)), **fields)


@pytest.fixture
def folder(tmp_path):
    """Six readable images of different shapes."""
    root = tmp_path / "images"
    root.mkdir()
    for i, (height, width) in enumerate([(40, 60), (60, 40), (50, 50), (32, 90), (33, 47), (64, 64)]):
        Image.fromarray(picture(height, width, i)).save(root / f"{i}.png")
    return table_of(root, [f"{i}.png" for i in range(6)])


def store_of(arrays):
    """`ImageBuffer` of [H, W, 3] arrays."""
    shapes = torch.tensor([array.shape[:2] for array in arrays])
    flat = torch.zeros(bytes_needed(shapes), dtype=torch.uint8)
    whole = np.concatenate([array.transpose(2, 0, 1).ravel() for array in arrays])
    flat[: len(whole)] = torch.from_numpy(whole)
    return ImageBuffer(flat, shapes)


def image_of(images, row):
    """The stored image [3, H, W] by the definition of the buffer."""
    sizes = (3 * images.shapes.prod(1)).tolist()
    start = sum(sizes[:row])
    return images.flat[start : start + sizes[row]].reshape(3, *images.shapes[row].tolist())


RAGGED = [picture(40, 60, 1), picture(61, 33, 2), picture(128, 128, 3), picture(17, 90, 4), picture(64, 64, 5)]


def cases(count, fraction=1.0, seed=0):
    """Random whole boxes in random images."""
    random = generator(seed, "cases")
    store = store_of(RAGGED)
    index = torch.randint(0, len(RAGGED), (count,), generator=random)
    boxes, flip = Augment("resized", flip=True, scale=(0.05 * fraction, fraction), ratio=(0.4, 2.5)).draw(
        store.shapes[index], random
    )
    return store, index, boxes, flip


@pytest.mark.parametrize("size", [5, 16, 31, 50, 112])
def test_crops_are_torchvisions_resized_crop(size):
    store, index, boxes, flip = cases(60)
    ours = store.crops(index, boxes, flip, size)
    assert ours.shape == (60, 3, size, size)
    assert ours.dtype == torch.float32
    for i in range(60):
        left, top, width, height = boxes[i].int().tolist()
        whole = torch.from_numpy(RAGGED[index[i]]).permute(2, 0, 1).float()
        theirs = v2.functional.resized_crop(whole, top, left, height, width, [size, size], antialias=True)
        theirs = theirs.flip(2) if flip[i] else theirs
        torch.testing.assert_close(ours[i], theirs, atol=2e-3, rtol=0)
        if size >= max(width, height):
            plain = v2.functional.resized_crop(whole, top, left, height, width, [size, size], antialias=False)
            torch.testing.assert_close(ours[i], plain.flip(2) if flip[i] else plain, atol=2e-3, rtol=0)


def test_bytes_are_rounded_floats():
    store, index, boxes, flip = cases(30)
    exact, rounded = (store.crops(index, boxes, flip, 20, dtype=dtype) for dtype in (torch.float32, torch.uint8))
    assert rounded.dtype == torch.uint8
    assert torch.equal(rounded, exact.round().to(torch.uint8))
    assert exact.min() >= 0
    assert exact.max() <= 255


def test_a_box_of_the_size_is_copied():
    store = store_of(RAGGED)
    index = torch.tensor([2, 0, 4, 2])
    boxes = torch.tensor([[7.0, 90, 30, 30], [30, 10, 30, 30], [0, 0, 30, 30], [98, 98, 30, 30]])
    flip = torch.tensor([False, True, False, True])
    for dtype in (torch.uint8, torch.float32):
        pixels = store.crops(index, boxes, flip, 30, dtype=dtype)
        for i, row in enumerate(index.tolist()):
            left, top = boxes[i, :2].int().tolist()
            cut = torch.from_numpy(RAGGED[row]).permute(2, 0, 1)[:, top : top + 30, left : left + 30]
            assert torch.equal(pixels[i], (cut.flip(2) if flip[i] else cut).to(dtype))


def test_boxes_between_pixels_shift_smoothly():
    ramp = np.repeat(np.arange(0, 200, 2, dtype=np.uint8)[None, :, None], 40, axis=0).repeat(3, axis=2)
    store = store_of([ramp])
    flip = torch.tensor([False])
    whole = store.crops(torch.tensor([0]), torch.tensor([[10.0, 5, 20, 20]]), flip, 20)
    shifted = store.crops(torch.tensor([0]), torch.tensor([[10.25, 5, 20, 20]]), flip, 20)
    # 2 per pixel, a quarter of a pixel further; the outermost column has nothing beyond the box to mix with
    torch.testing.assert_close(shifted[..., 1:-1], whole[..., 1:-1] + 0.5)


def test_what_reaches_over_the_edge_repeats_it():
    store = store_of([np.full((20, 30, 3), 7, np.uint8)])
    boxes = torch.tensor([[-10.0, -10, 60, 60], [28, 18, 10, 10], [100, 100, 5, 5], [-50, 3, 5, 5]])
    pixels = store.crops(torch.zeros(4, dtype=torch.long), boxes, torch.zeros(4, dtype=torch.bool), 12)
    torch.testing.assert_close(pixels, torch.full_like(pixels, 7))


def test_neighbours_in_the_buffer_do_not_leak():
    arrays = [np.full((10 + i, 9 + 3 * i, 3), 20 * i, np.uint8) for i in range(10)]
    index = torch.arange(10).repeat(3)
    store = store_of(arrays)
    boxes, flip = Augment("resized", flip=True).draw(store.shapes[index], generator(0))
    pixels = store.crops(index, boxes, flip, 16)
    expected = (20.0 * index)[:, None, None, None].expand_as(pixels)
    torch.testing.assert_close(pixels, expected, atol=1e-3, rtol=0)


def test_shrinking_averages():
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, ::2] = 200
    pixels = store_of([stripes]).crops(torch.tensor([0]), torch.tensor([[0.0, 0, 128, 128]]), torch.tensor([False]), 16)
    torch.testing.assert_close(pixels[..., 1:-1], torch.full((1, 3, 16, 14), 100.0))
    # where the box ends, half of the triangle is missing
    assert (pixels - 100).abs().max() < 5


def test_chunks_make_no_difference(monkeypatch):
    store, index, boxes, flip = cases(40)
    together = store.crops(index, boxes, flip, 24)
    monkeypatch.setitem(image_store.CHUNK_BYTES, "cpu", 1)
    torch.testing.assert_close(store.crops(index, boxes, flip, 24), together, atol=1e-3, rtol=0)


def test_both_ways_to_read_the_buffer_agree():
    flat = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=generator(0))
    starts = torch.randint(0, 4900, (7, 3, 11), generator=generator(1))
    copied = image_store._runs_copied(flat, starts, 100)
    assert torch.equal(copied, image_store._runs_gathered(flat, starts, 100))
    assert torch.equal(copied[4, 2, 5], flat[starts[4, 2, 5] :][:100])


def test_no_images_give_no_crops():
    pixels = store_of(RAGGED).crops(torch.empty(0, dtype=torch.long), torch.empty(0, 4), torch.empty(0, dtype=torch.bool), 8)
    assert pixels.shape == (0, 3, 8, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_shows_the_same():
    store, index, boxes, flip = cases(60)
    on_gpu = store.to("cuda")
    assert on_gpu.fits_on("cuda")
    torch.testing.assert_close(
        on_gpu.crops(index, boxes, flip, 31).cpu(), store.crops(index, boxes, flip, 31), atol=1e-2, rtol=0
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"index": torch.tensor([5])}, IndexError, r"index must lie in \[0, 5\), got 5 to 5"),
        ({"index": torch.tensor([-1])}, IndexError, "got -1 to -1"),
        ({"boxes": torch.zeros(1, 3)}, ValueError, r"boxes must have shape \(1, 4\), got \(1, 3\)"),
        ({"boxes": torch.tensor([[0.0, 0, 0, 5]])}, ValueError, "boxes must be finite with width and height above 0"),
        ({"boxes": torch.tensor([[0.0, torch.nan, 5, 5]])}, ValueError, "boxes must be finite"),
        ({"flip": torch.zeros(2, dtype=torch.bool)}, ValueError, r"flip must have shape \(1,\), got \(2,\)"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"dtype": torch.float16}, ValueError, "dtype must be torch.float32 or torch.uint8, got torch.float16"),
    ],
)
def test_crops_say_what_is_wrong(change, error, message):
    good = {"index": torch.tensor([0]), "boxes": torch.tensor([[0.0, 0, 5, 5]]), "flip": torch.tensor([False]), "size": 4}
    with pytest.raises(error, match=message):
        store_of(RAGGED).crops(**{**good, **change})


def test_images_check_their_buffer():
    shapes = torch.tensor([[4, 5]])
    with pytest.raises(ValueError, match="flat must have 65 bytes for shapes of 1 images, got 64"):
        ImageBuffer(torch.zeros(64, dtype=torch.uint8), shapes)
    with pytest.raises(ValueError, match=r"flat must be contiguous 1-D uint8, got torch.float32"):
        ImageBuffer(torch.zeros(65), shapes)


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


def test_a_buffer_knows_whether_it_fits(monkeypatch):
    store = store_of(RAGGED)
    for free, fits in ((store.nbytes * 2, True), (store.nbytes * 2 - 1, False), (None, True)):
        monkeypatch.setattr(image_store, "available_bytes", lambda _, free=free: free)
        assert store.fits_on("cpu") == fits


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_cache_files_have_the_permissions_that_the_umask_leaves(folder, tmp_path, umask):
    before = os.umask(umask)
    try:
        open_images(folder, side=24, cache=tmp_path / "cache", square=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()} == {0o666 & ~umask}


BAD = {
    "truncated.jpg": "cannot be read: .*truncated",
    "text.jpg": "is not an image that Pillow can read",
    "empty.png": "is not an image that Pillow can read",
    "missing.png": "does not exist",
    "float.tif": "floating-point values of unknown range",
    "stripe.png": "its aspect ratio is too large: 900 x 2 pixels",
    "broken.png": "cannot be read",
}


@pytest.fixture
def bad(folder):
    root = folder.root
    Image.fromarray(picture(80, 80)).save(root / "whole.jpg", quality=95)
    whole = (root / "whole.jpg").read_bytes()
    (root / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "text.jpg").write_text("not an image")
    (root / "empty.png").write_bytes(b"")
    Image.fromarray(np.random.default_rng(0).random((30, 30), np.float32)).save(root / "float.tif")
    Image.fromarray(picture(2, 900)).save(root / "stripe.png")
    noise = (root / "0.png").read_bytes()
    (root / "broken.png").write_bytes(noise[:60] + b"\xff" * 40 + noise[100:])
    return root


@pytest.mark.parametrize("name", sorted(BAD))
@pytest.mark.parametrize("where", ["memory", "file"])
def test_an_unreadable_image_is_an_error_that_names_it(bad, tmp_path, name, where):
    table = table_of(bad, ["0.png", name, "1.png"])
    cache = tmp_path / "cache" if where == "file" else None
    with pytest.raises(UnreadableImageError, match=rf"1 of 3 images that cannot be read:\n  .*images/{name}\W.*{BAD[name]}"):
        open_images(table, side=24, cache=cache, square=False)
    assert cache is None or not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("where", ["memory", "file"])
def test_unreadable_images_can_be_left_out(bad, tmp_path, where):
    names = ["0.png", *sorted(BAD), "1.png", "2.png"]
    table = table_of(bad, names)
    cache = tmp_path / "cache" if where == "file" else None
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"skipped 7 of 10 images that cannot be read:(\n  .*){7}$"):
            images, kept = open_images(table, side=24, cache=cache, square=False, skip_bad=True)
        assert kept.paths == ("0.png", "1.png", "2.png")
        assert kept.labels.tolist() == [0, 8, 9]
        assert len(images) == 3
        assert len(images.skipped) == 7
        clean, _ = open_images(kept, side=24, cache=None, square=False)
        for row in range(3):
            assert torch.equal(image_of(images, row), image_of(clean, row))
    # the file that was made then is no excuse later; without one the heads are read first, which shows four of them
    with pytest.raises(UnreadableImageError, match=f"{7 if cache else 4} of 10 images"):
        open_images(table, side=24, cache=cache, square=False)


def test_nothing_readable_is_an_error(bad):
    with (
        warnings.catch_warnings(),
        pytest.raises(UnreadableImageError, match="2 of 2 images"),
    ):
        open_images(table_of(bad, ["text.jpg", "empty.png"]), side=24, cache=None, square=True, skip_bad=True)


def test_a_decompression_bomb_is_an_error_that_names_it(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableImageError, match=r"images/0\.png is suspiciously large: .*MAX_IMAGE_PIXELS"):
        open_images(folder, side=24, cache=None, square=True)


def test_every_kind_of_image_becomes_rgb(folder):
    root, colours = folder.root, picture(30, 40, 7)
    grey = colours[:, :, 0]
    deep = grey.astype(np.uint16) * 257
    Image.fromarray(grey).save(root / "grey.png")
    Image.fromarray(deep).save(root / "deep.png")
    Image.fromarray(deep.astype(np.int32)).save(root / "deep.tif")
    Image.fromarray(colours).convert("CMYK").save(root / "cmyk.tif")
    Image.fromarray(colours).quantize(64).save(root / "palette.png", transparency=bytes(range(64)))
    Image.fromarray(np.dstack([colours, np.full((30, 40), 9, np.uint8)])).save(root / "alpha.png")
    Image.fromarray(colours).save(root / "png-inside.jpg", format="PNG")
    others = [Image.fromarray(picture(30, 40, seed)) for seed in (8, 9)]
    Image.fromarray(colours).save(root / "moving.webp", save_all=True, append_images=others, lossless=True)
    Image.fromarray(grey > 127).save(root / "bits.png")
    wanted = {
        "grey.png": np.dstack([grey] * 3),
        "deep.png": np.dstack([grey] * 3),
        "deep.tif": np.dstack([grey] * 3),
        "cmyk.tif": colours,
        "palette.png": np.asarray(Image.fromarray(colours).quantize(64).convert("RGB")),
        "alpha.png": colours,
        "png-inside.jpg": colours,
        "moving.webp": colours,
        "bits.png": np.dstack([(grey > 127) * np.uint8(255)] * 3),
    }
    images, _ = open_images(table_of(root, wanted), side=30, cache=None, square=False)
    for row, (name, expected) in enumerate(wanted.items()):
        difference = np.abs(image_of(images, row).permute(1, 2, 0).numpy().astype(int) - expected.astype(int))
        assert difference.max() <= (1 if name == "cmyk.tif" else 0), name


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright_after_their_box_is_cut(folder, orientation):
    colours = picture(40, 60, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(colours).save(folder.root / "turned.png", exif=exif)
    boxes = np.array([[np.nan] * 4, [5.0, 10.4, 41.0, 39.6]])
    table = table_of(folder.root, ["turned.png", "turned.png"], boxes=boxes)
    images, _ = open_images(table, side=30, cache=None, square=False)

    def upright(array):
        tagged = Image.fromarray(array)
        tagged.info["exif"] = exif.tobytes()
        from PIL import ImageOps

        return v2.functional.pil_to_tensor(v2.functional.resize(ImageOps.exif_transpose(tagged), [30]))

    assert torch.equal(image_of(images, 0), upright(colours))
    assert torch.equal(image_of(images, 1), upright(colours[10:40, 5:41]))


def test_a_box_outside_its_image_is_an_error(folder):
    table = table_of(folder.root, ["0.png"], boxes=np.array([[70.0, 0, 90, 30]]))
    with pytest.raises(UnreadableImageError, match=r"0\.png: the box \(70, 0, 90, 30\) lies outside the 60 x 40 image"):
        open_images(table, side=24, cache=None, square=False)


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


@pytest.fixture
def classes(tmp_path):
    """24 images of 6 classes."""
    root = tmp_path / "images"
    root.mkdir()
    for i in range(24):
        Image.fromarray(picture(40 + i, 60 - i, i)).save(root / f"{i}.png")
    return Table("fake/train", root, tuple(f"{i}.png" for i in range(24)), np.repeat(np.arange(6), 4))


def batches_of(table, source, size=20, **settings):
    return ImageBatches(
        source, table.labels, ClassBalanced(table.labels, 8, 2, seed=1), Augment("resized", flip=True), size, **settings
    )


def shown(batches, epoch=0, start=0):
    batches.set_epoch(epoch)
    return list(batches.iterate(start))


def same(a, b):
    return len(a) == len(b) and all(
        x.step == y.step
        and torch.equal(x.indices, y.indices)
        and torch.equal(x.images, y.images)
        and torch.equal(x.labels, y.labels)
        for x, y in zip(a, b, strict=True)
    )


def test_batches_show_what_was_drawn(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    batches = batches_of(classes, images, seed=5)
    epoch = shown(batches, epoch=2)
    sampler = ClassBalanced(classes.labels, 8, 2, seed=1)
    sampler.set_epoch(2)
    assert [batch.indices.tolist() for batch in epoch] == list(sampler)
    assert [batch.step for batch in epoch] == list(range(len(batches)))
    for batch in epoch:
        boxes, flip = batches.augment.draw(images.shapes[batch.indices], generator(5, "augment", 2, batch.step))
        assert torch.equal(batch.images, images.crops(batch.indices, boxes, flip, 20, dtype=torch.uint8))
        assert batch.labels.tolist() == classes.labels[batch.indices].tolist()


def test_seed_epoch_and_step_decide_the_pixels(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    reference = shown(batches_of(classes, images), epoch=1)
    assert same(shown(batches_of(classes, images), epoch=1), reference)
    for start in range(len(reference) + 1):
        assert same(shown(batches_of(classes, images), epoch=1, start=start), reference[start:])
    assert not same(shown(batches_of(classes, images), epoch=2), reference)
    other = shown(batches_of(classes, images, seed=1), epoch=1)
    assert not same(other, reference)
    assert all(torch.equal(a.indices, b.indices) for a, b in zip(other, reference, strict=True))


def test_an_iterator_keeps_its_epoch(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    reference = shown(batches_of(classes, images), epoch=1)
    batches = batches_of(classes, images)
    batches.set_epoch(1)
    running = batches.iterate()
    batches.set_epoch(2)
    assert same(list(running), reference)


# since Python 3.12 forking with threads around is warned of; a worker of a loader only decodes
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_decoding_shows_the_same_with_any_number_of_workers(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    source = OnDemandImages(classes, 20, side=24)
    assert torch.equal(source.shapes, images.shapes)
    before = torch.get_rng_state()
    alone = shown(batches_of(classes, source), epoch=1)
    assert same(shown(batches_of(classes, source, workers=2), epoch=1), alone)
    assert same(shown(batches_of(classes, source, workers=1), epoch=1, start=1), alone[1:])
    decoded = shown(batches_of(classes, images), epoch=1)
    assert torch.equal(torch.get_rng_state(), before)
    for ours, theirs in zip(decoded, alone, strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        # Pillow rounds between its two passes
        assert (ours.images.int() - theirs.images.int()).abs().max() <= 1


def test_decoding_is_torchvisions_resized_crop(classes):
    source = OnDemandImages(classes, 20, side=24)
    for row, box, flip in [(3, (2.0, 1.0, 20.0, 13.0), False), (9, (0.0, 3.0, 11.0, 20.0), True)]:
        with Image.open(classes.file(row)) as original:
            stored = v2.functional.resize(original.convert("RGB"), [24])
        left, top, width, height = map(int, box)
        expected = v2.functional.pil_to_tensor(v2.functional.resized_crop(stored, top, left, height, width, [20, 20]))
        assert torch.equal(source[row, box, flip], expected.flip(2) if flip else expected)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_asks_the_run_to_stop_leaves_its_workers_to_it(classes, number):
    source = OnDemandImages(classes, 20, side=24)
    alone = shown(batches_of(classes, source), epoch=1)
    batches = batches_of(classes, source, workers=1)
    batches.set_epoch(1)
    running = batches.iterate()
    came = [next(running)]
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, number)
    assert same([*came, *running], alone)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_later_stops_decoding_with_its_path(classes, workers):
    source = OnDemandImages(classes, 20, side=24)
    classes.file(7).write_text("gone bad")
    with pytest.raises(UnreadableImageError, match=r"images/7\.png is not an image that Pillow can read"):
        shown(batches_of(classes, source, workers=workers))


def test_decoding_finds_unreadable_images_at_once(classes):
    classes.file(7).write_text("gone bad")
    with pytest.raises(UnreadableImageError, match=r"7\.png is not an image"):
        OnDemandImages(classes, 20, side=24)
    # a square needs no shapes
    assert OnDemandImages(classes, 20, side=24, square=True).shapes.tolist() == [[24, 24]] * 24


def test_evaluation_goes_through_the_table_in_order(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    batches = ImageBatches(images, classes.labels, Sequential(24, 7), Augment("center"), 21, dtype=torch.float32)
    seen = list(batches)
    assert torch.cat([batch.indices for batch in seen]).tolist() == list(range(24))
    assert [len(batch.images) for batch in seen] == [7, 7, 7, 3]
    for row, pixels in enumerate(torch.cat([batch.images for batch in seen])):
        assert torch.equal(pixels, v2.functional.center_crop(image_of(images, row), [21, 21]).float())


def test_a_loop_may_be_left_early(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    batches = batches_of(classes, images)
    for batch in batches.iterate():
        assert batch.step == 0
        break
    assert same(shown(batches), shown(batches_of(classes, images)))


def test_batches_say_what_is_wrong(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    with pytest.raises(ValueError, match="labels must have one entry per image, 24, got 3"):
        ImageBatches(images, [0, 1, 2], Sequential(24, 4), Augment("center"), 20)
    with pytest.raises(ValueError, match="size must be that of its OnDemandImages, 20, got 24"):
        ImageBatches(OnDemandImages(classes, 20, side=24), classes.labels, Sequential(24, 4), Augment("center"), 24)
    with pytest.raises(ValueError, match=r"position must be at most 3, the batches, got 4"):
        batches_of(classes, images).iterate(4)
