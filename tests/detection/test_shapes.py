"""The drawn detection set: the same for the same seed, and boxes that fit."""

import numpy as np
import pytest

from rankgrad.detection import draw_shapes
from rankgrad.detection.shapes import CLASSES


@pytest.fixture(scope="module")
def drawn():
    return draw_shapes("train", 120, size=96)


def test_every_class_occurs_and_some_images_are_empty(drawn):
    counts = drawn.counts()
    assert counts.pop("images") == 120
    assert min(counts.values()) > 30
    assert set(counts) == set(CLASSES)
    empty = sum(not len(scene.labels) for scene in drawn.scenes)
    assert 1 <= empty <= 20
    assert any(scene.difficult.any() for scene in drawn.scenes)


def test_an_image_is_a_function_of_seed_split_and_number(drawn):
    again = draw_shapes("train", 3, size=96)
    for number in range(3):
        assert np.array_equal(again.load(number), drawn.load(number))
        assert np.array_equal(again.scenes[number].boxes, drawn.scenes[number].boxes)
    for other in (draw_shapes("test", 1, size=96), draw_shapes("train", 1, size=96, seed=1)):
        assert not np.array_equal(other.load(0), drawn.load(0))


def test_boxes_are_tight(drawn):
    """Each side of a box of an unhidden object that lies alone has pixels unlike the ground beside it."""
    checked = 0
    for number, scene in enumerate(drawn.scenes):
        if len(scene.labels) != 1:
            continue
        pixels = drawn.load(number).astype(np.float64)
        x1, y1, x2, y2 = scene.boxes[0].astype(int)
        if x1 < 3 or y1 < 3 or x2 > 93 or y2 > 93:
            continue
        ground = pixels[y1 - 3 : y2 + 3, x1 - 3 : x2 + 3].copy()
        for side in (pixels[y1, x1:x2], pixels[y2 - 1, x1:x2], pixels[y1:y2, x1], pixels[y1:y2, x2 - 1]):
            edge = np.median(ground[[0, -1]], axis=(0, 1))
            assert abs(side - edge).max() > 40
            checked += 1
    assert checked >= 20


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="split must be one of 'train', 'val', 'test', got 'dev'"):
        draw_shapes("dev", 1)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        draw_shapes("train", 0)
