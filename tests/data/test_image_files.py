"""Files of every kind become RGB; damaged ones are named."""

import warnings

import numpy as np
import pytest
import torch
from data.sample_images import image_of, picture, table_of
from PIL import Image
from torchvision.transforms import v2

from rankgrad.data.image_cache import open_images
from rankgrad.data.image_files import ImageDecoder, UnreadableImageError, map_images, resized_rgb

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


@pytest.mark.parametrize("name", ["turned.png", "turned.tif", "packed.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright_after_their_box_is_cut(folder, orientation, name):
    colours = picture(40, 60, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    # Pillow turns a TIFF itself, by one function for plain pixels and by another for packed ones
    Image.fromarray(colours).save(folder.root / name, exif=exif, compression="tiff_lzw" if name == "packed.tif" else None)
    boxes = np.array([[np.nan] * 4, [5.0, 10.4, 41.0, 39.6]])
    table = table_of(folder.root, [name, name], boxes=boxes)
    images, _ = open_images(table, side=30, cache=None, square=False)
    assert [ImageDecoder(table, 30, square=False).shape(row) for row in range(2)] == list(map(tuple, images.shapes.tolist()))

    def upright(array):
        tagged = Image.fromarray(array)
        tagged.info["exif"] = exif.tobytes()
        from PIL import ImageOps

        return v2.functional.pil_to_tensor(v2.functional.resize(ImageOps.exif_transpose(tagged), [30]))

    assert torch.equal(image_of(images, 0), upright(colours))
    assert torch.equal(image_of(images, 1), upright(colours[10:40, 5:41]))


@pytest.mark.parametrize("said_at_once", [True, False], ids=["at once", "when loaded"])
def test_a_turned_tiff_has_one_shape_whenever_pillow_says_it(tmp_path, said_at_once):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture(40, 60)).save(tmp_path / "turned.tif", exif=exif)
    wanted = Image.fromarray(picture(40, 60)).transpose(Image.Transpose.ROTATE_270)
    with Image.open(tmp_path / "turned.tif") as image:
        image._size = (40, 60) if said_at_once else (60, 40)  # as versions of Pillow differ
        assert np.array_equal(resized_rgb(image, side=40, square=False), wanted)
        # loaded now
        assert np.array_equal(resized_rgb(image, side=40, square=False), wanted)


def test_a_box_outside_its_image_is_an_error(folder):
    table = table_of(folder.root, ["0.png"], boxes=np.array([[70.0, 0, 90, 30]]))
    with pytest.raises(UnreadableImageError, match=r"0\.png: the box \(70, 0, 90, 30\) lies outside the 60 x 40 image"):
        open_images(table, side=24, cache=None, square=False)


@pytest.mark.parametrize("make", [list, iter], ids=["in groups", "one by one"])
def test_images_come_in_order_and_the_unreadable_one_does_not_end_the_others(make):
    def read(item):
        if item == 3:
            raise UnreadableImageError("number 3")
        return 10 * item

    found = list(map_images(read, make(range(100)), workers=2))
    assert [item for item, _ in found] == list(range(100))
    assert str(found[3][1]) == "number 3"
    assert [result for item, result in found if item != 3] == [10 * item for item in range(100) if item != 3]
