"""Boxes against torchvision's own draws: the same rules exactly where nothing is random, the same distribution where it is."""

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from rankgrad.data.preprocessing import AUGMENTS, Augment, stored_side
from rankgrad.data.seeds import generator

DRAWS = 4000


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
    side = stored_side(size)
    boxes, _ = AUGMENTS["center"].draw(torch.tensor([[side, side], [side, 2 * side], [side + 5, side]]))
    assert (boxes[:, 2:] == size).all()


def test_stored_sides_of_the_field():
    assert stored_side(224) == 256
    assert stored_side(112) == 128


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
