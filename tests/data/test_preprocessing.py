"""Single images against tables, to the last bit; boxes against torchvision's draws, exactly or in distribution."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import v2

from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_cache import open_images
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.preprocessing import Augment, Preprocessing
from rankgrad.data.samplers import Sequential
from rankgrad.data.seeds import generator
from rankgrad.data.table import Table

DRAWS = 4000
AUGMENTS = {
    "fastap": Augment("random", flip=True),
    "recall-at-k": Augment("resized", flip=True),
    "roadmap": Augment("resized", flip=True, scale=(0.16, 1.0)),
    "center": Augment("center"),
    "whole": Augment("center", share=1.0),
}


def shapes_of(height, width, count=DRAWS):
    return torch.tensor([[height, width]]).expand(count, 2)


def torchvision_boxes(transform, height, width):
    """Its parameters for many images: [DRAWS, 4] left, top, width, height."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    draw = getattr(transform, "make_params", None) or transform._get_params  # the public name came with torchvision 0.20
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [draw([image]) for _ in range(DRAWS)]
    return np.array([[params["left"], params["top"], params["width"], params["height"]] for params in drawn])


@pytest.mark.parametrize(("height", "width"), [(256, 256), (256, 341), (37, 60)])
def test_resized_boxes_are_distributed_as_torchvisions(height, width):
    boxes, _ = AUGMENTS["recall-at-k"].draw(shapes_of(height, width), generator(0, "boxes"))
    theirs = torchvision_boxes(v2.RandomResizedCrop(224), height, width)
    for column in range(4):
        assert stats.ks_2samp(boxes[:, column].numpy(), theirs[:, column]).pvalue > 0.001
    # together, not only one by one
    area, ratio = boxes[:, 2] * boxes[:, 3], boxes[:, 2] / boxes[:, 3]
    assert stats.ks_2samp(area.numpy(), theirs[:, 2] * theirs[:, 3]).pvalue > 0.001
    assert stats.ks_2samp(ratio.numpy(), theirs[:, 2] / theirs[:, 3]).pvalue > 0.001


def test_the_comparison_notices_another_distribution():
    boxes, _ = AUGMENTS["roadmap"].draw(shapes_of(256, 341), generator(0, "boxes"))
    theirs = torchvision_boxes(v2.RandomResizedCrop(224), 256, 341)
    assert stats.ks_2samp((boxes[:, 2] * boxes[:, 3]).numpy(), theirs[:, 2] * theirs[:, 3]).pvalue < 1e-6


@pytest.mark.parametrize(("height", "width"), [(20, 200), (200, 20), (21, 100), (10, 10)])
def test_where_no_attempt_fits_the_fallback_is_torchvisions(height, width):
    # a box of the whole area and an aspect other than the image's never fits
    ratio = (0.75, 0.75) if (height, width) == (10, 10) else (3 / 4, 4 / 3)
    augment = Augment("resized", scale=(1.0, 1.0), ratio=ratio)
    boxes, _ = augment.draw(shapes_of(height, width, 50), generator(0))
    theirs = torchvision_boxes(v2.RandomResizedCrop(224, scale=(1.0, 1.0), ratio=ratio), height, width)[:50]
    assert np.array_equal(boxes.numpy(), theirs)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (256, 341), (300, 256)])
def test_random_boxes_are_uniform_over_all_places(height, width):
    boxes, _ = Augment("random").draw(shapes_of(height, width), generator(1))
    assert (boxes[:, 2:] == 224).all()
    for places, drawn in ((width - 223, boxes[:, 0]), (height - 223, boxes[:, 1])):
        counts = torch.bincount(drawn.long(), minlength=places)
        assert len(counts) == places
        assert stats.chisquare(counts.numpy()).pvalue > 0.001
    assert abs(np.corrcoef(boxes[:, 0], boxes[:, 1])[0, 1]) < 0.06


@pytest.mark.parametrize(("height", "width"), [(256, 256), (256, 341), (257, 256), (384, 256), (256, 258)])
def test_the_center_is_torchvisions(height, width):
    boxes, flip = AUGMENTS["center"].draw(shapes_of(height, width, 1))
    image = torch.arange(height * width).reshape(1, height, width)
    left, top, w, h = boxes[0].int().tolist()
    assert torch.equal(image[:, top : top + h, left : left + w], v2.functional.center_crop(image, [224, 224]))
    assert not flip.any()


def test_half_of_the_images_are_mirrored():
    _, flip = AUGMENTS["fastap"].draw(shapes_of(256, 256), generator(2))
    assert stats.binomtest(int(flip.sum()), DRAWS).pvalue > 0.001
    assert not Augment("random").draw(shapes_of(256, 256), generator(2))[1].any()


@pytest.mark.parametrize("name", sorted(AUGMENTS))
def test_boxes_are_whole_pixels_inside_images_of_any_shape(name):
    shapes = torch.randint(1, 400, (2000, 2), generator=generator(3))
    boxes, flip = AUGMENTS[name].draw(shapes, generator(4))
    assert boxes.dtype == torch.float32
    assert flip.dtype == torch.bool
    assert torch.equal(boxes, boxes.round())
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, 0] + boxes[:, 2] <= shapes[:, 1]).all()
    assert (boxes[:, 1] + boxes[:, 3] <= shapes[:, 0]).all()


@pytest.mark.parametrize("name", ["fastap", "recall-at-k"])
def test_the_generator_decides_everything(name):
    def draw(*parts):
        return torch.cat([part.float().reshape(len(part), -1) for part in AUGMENTS[name].draw(shapes, generator(*parts))], 1)

    shapes = shapes_of(256, 341, 50)
    torch.manual_seed(0)
    first = draw(0, "augment", 1, 2)
    torch.manual_seed(1)
    assert torch.equal(first, draw(0, "augment", 1, 2))
    assert not torch.equal(first, draw(0, "augment", 1, 3))


@pytest.mark.parametrize("size", [16, 28, 32, 64, 96, 100, 112, 160, 224, 299, 384])
def test_a_stored_side_shows_exactly_the_size(size):
    side = Preprocessing(size).stored_side
    boxes, _ = AUGMENTS["center"].draw(torch.tensor([[side, side], [side, 2 * side], [side + 5, side]]))
    assert (boxes[:, 2:] == size).all()


def test_stored_sides_of_the_field():
    assert Preprocessing(224).stored_side == 256
    assert Preprocessing(112).stored_side == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop": "middle"}, "crop must be one of 'random', 'resized', 'center', got 'middle'"),
        ({"crop": "center", "share": 1.5}, "share must be at most 1, the whole short side, got 1.5"),
        ({"crop": "center", "share": 0.0}, "share must be a finite number above 0"),
        ({"crop": "resized", "scale": (0.5, 0.1)}, r"scale must be \(least, most\), got \(0.5, 0.1\)"),
        ({"crop": "resized", "scale": (0.5, 2.0)}, "scale must be at most 1, the whole image"),
        ({"crop": "resized", "ratio": (0.0, 1.0)}, "ratio must be a finite number above 0, got 0.0"),
    ],
)
def test_says_what_is_wrong_with_its_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        Augment(**arguments)


def test_says_what_is_wrong_with_a_draw():
    with pytest.raises(ValueError, match="a generator is needed, this augmentation is random"):
        AUGMENTS["fastap"].draw(shapes_of(8, 8, 1))
    with pytest.raises(ValueError, match=r"shapes must be \[images, 2\], height and width, got shape \(3,\)"):
        AUGMENTS["center"].draw(torch.ones(3))


def photograph(height, width, seed=0):
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, height * width * 3).reshape(height, width, 3)
    return (ramp + rng.integers(0, 55, ramp.shape)).astype(np.uint8)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Files of several kinds and shapes, one of them turned by EXIF."""
    root = tmp_path_factory.mktemp("photographs")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(photograph(90, 61)).save(root / "a.png")
    Image.fromarray(photograph(50, 120, 1)).save(root / "b.jpg", exif=exif)
    Image.fromarray(photograph(33, 33, 2)).convert("L").save(root / "c.png")
    Image.fromarray(photograph(45, 47, 3)).convert("P").save(root / "d.gif")
    names = ("a.png", "b.jpg", "c.png", "d.gif")
    return Table("fake/test", root, names, np.arange(4))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("size", "stored_side"), [(24, 0), (20, 33), (31, 31)])
def test_a_table_and_a_single_image_give_the_same_pixels(photographs, size, stored_side, square):
    preprocess = Preprocessing(size, stored_side, square)
    images, _ = open_images(photographs, side=preprocess.stored_side, cache=None, square=square)
    batches = ImageBatches(images, photographs.labels, Sequential(4, 4), preprocess.augment(), size)
    (batch,) = batches
    for row in range(4):
        path = photographs.file(row)
        with Image.open(path) as opened:
            ways = [str(path), path, path.read_bytes(), opened]
            singles = [preprocess(way) for way in ways] + [preprocess.from_table(photographs, row)]
        for single in singles:
            assert single.dtype == torch.uint8
            assert single.is_contiguous()
            assert torch.equal(single, batch.images[row])


def test_arrays_and_tensors_are_images_too():
    preprocess, array = Preprocessing(24), photograph(40, 52)
    wanted = preprocess(Image.fromarray(array))
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    assert torch.equal(preprocess(array), wanted)
    assert torch.equal(preprocess(tensor), wanted)
    assert torch.equal(preprocess(np.dstack([array, array[..., :1]])), wanted)
    grey = preprocess(array[..., 0])
    assert torch.equal(grey, preprocess(tensor[0]))
    assert torch.equal(grey, preprocess(tensor[:1]))
    assert torch.equal(grey[0], wanted[0])


def test_boxes_of_a_table_are_cropped_first(photographs):
    boxes = np.full((4, 4), np.nan)
    boxes[0] = (5, 10, 55, 80)
    table = replace(photographs, boxes=boxes)
    preprocess = Preprocessing(24)
    assert torch.equal(preprocess.from_table(table, 0), preprocess(photograph(90, 61)[10:80, 5:55]))
    assert torch.equal(preprocess.from_table(table, 1), preprocess.from_table(photographs, 1))


def test_an_image_at_its_native_shape_is_shrunk_and_never_enlarged(photographs):
    preprocess = Preprocessing(45, native_shape=True)
    assert preprocess(photographs.file(0)).shape == (3, 45, 31)
    assert preprocess(photographs.file(2)).shape == (3, 33, 33)
    # without regard to EXIF
    assert preprocess(photographs.file(1)).shape == (3, 19, 45)
    assert torch.equal(preprocess(photographs.file(3).read_bytes()), preprocess.from_table(photographs, 3))
    # a box is shrunk by as much as its file
    boxes = np.tile(np.array([0.0, 0.0, 60.0, 40.0]), (4, 1))
    assert preprocess.from_table(replace(photographs, boxes=boxes), 0).shape == (3, 20, 30)
    pixels = Table("fake/pixels", photographs.root, ("a",), np.zeros(1, np.int64), pixels=photograph(90, 60)[None])
    assert preprocess.from_table(pixels, 0).shape == (3, 45, 30)
    with pytest.raises(ValueError, match="native shape are not cropped"):
        preprocess.augment()


def test_preprocessing_is_saved_and_read_back():
    preprocess = Preprocessing(224, square=True)
    assert preprocess.as_dict() == {"size": 224, "stored_side": 256, "square": True, "native_shape": False}
    assert Preprocessing.from_dict(json.loads(json.dumps(preprocess.as_dict()))) == preprocess
    with pytest.raises(ValueError, match="the settings must be native_shape, size, square, stored_side, got mean, size"):
        Preprocessing.from_dict({"size": 224, "mean": 0})
    with pytest.raises(ValueError, match=r"stored_side must be at least size \(224\), got 200"):
        Preprocessing(224, 200)


def test_says_what_is_wrong_with_an_image(tmp_path):
    preprocess = Preprocessing(16)
    Image.fromarray(photograph(90, 90)).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableImageError, match=r"cut.jpg cannot be read: .*truncated"):
        preprocess(tmp_path / "cut.jpg")
    with pytest.raises(UnreadableImageError, match=r"^the image cannot be read: .*truncated"):
        preprocess(whole[: len(whole) // 2])
    with pytest.raises(UnreadableImageError, match="the image is not an image that Pillow can read"):
        preprocess(b"hello")
    with pytest.raises(UnreadableImageError, match=r"none\.jpg does not exist"):
        preprocess(str(tmp_path / "none.jpg"))
    with Image.open(tmp_path / "cut.jpg") as opened, pytest.raises(UnreadableImageError, match="the image cannot be read"):
        preprocess(opened)
    with pytest.raises(ValueError, match=r"a Tensor must be uint8 \[H, W\], \[1, H, W\] or \[3, H, W\], got float32 of shape"):
        preprocess(torch.rand(3, 8, 8))
    with pytest.raises(ValueError, match=r"a ndarray must be uint8 .* got uint8 of shape \(3, 8, 8\)"):
        preprocess(np.zeros((3, 8, 8), np.uint8))
    with pytest.raises(TypeError, match="a path, bytes, a PIL image, an array or a tensor, got int"):
        preprocess(3)


def test_images_at_native_shape_are_shrunk_by_their_long_side_and_queries_with_their_image(tmp_path):
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[:, 100:] = (250, 0, 0)
    for name in ("0.jpg", "1.jpg"):
        Image.fromarray(pixels).save(tmp_path / name, quality=95)
    boxes = np.array([[np.nan] * 4, [100, 0, 200, 100]])
    rows = Table("some/test", tmp_path, ("0.jpg", "1.jpg"), np.array([-1, -1]), boxes=boxes)

    def landmark(row, size):
        return Preprocessing(size, native_shape=True).from_table(rows, row).permute(1, 2, 0).numpy()

    assert landmark(0, 50).shape == (25, 50, 3)
    assert landmark(0, 1024).shape == (100, 200, 3), "nothing is enlarged"
    # the image would become 50 wide, so its right half becomes 25
    query = landmark(1, 50)
    assert query.shape == (25, 25, 3)
    assert query[:, 2:, 0].min() > 200
    (tmp_path / "0.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"0\.jpg is not an image that Pillow can read"):
        landmark(0, 50)
