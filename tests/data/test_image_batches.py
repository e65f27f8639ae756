"""Batches of pixels: decided by seed, epoch and step alone, however they are decoded."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from data.sample_images import image_of, picture
from PIL import Image
from torchvision.transforms import v2

from rankgrad.data.image_batches import ImageBatches
from rankgrad.data.image_cache import open_images
from rankgrad.data.image_files import UnreadableImageError
from rankgrad.data.image_store import OnDemandImages
from rankgrad.data.preprocessing import Augment
from rankgrad.data.samplers import ClassBalanced, Sequential
from rankgrad.data.seeds import generator
from rankgrad.data.table import Table


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


def test_channels_last_is_another_order_of_the_same_pixels(classes):
    images, _ = open_images(classes, side=24, cache=None, square=False)
    plain, last = (
        shown(batches_of(classes, images, memory_format=format_)) for format_ in (torch.contiguous_format, torch.channels_last)
    )
    assert same(plain, last)
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in last)
    assert all(batch.images.is_contiguous() for batch in plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_crops_made_beside_other_work_of_a_gpu_are_the_same(classes):
    images = open_images(classes, side=24, cache=None, square=False)[0].to("cuda")
    batches = batches_of(classes, images, device="cuda", memory_format=torch.channels_last)
    work, seen = torch.randn(2048, 2048, device="cuda"), []
    for batch in batches:
        work = work @ work / 50
        seen.append(batch.images.clone())  # after the product, and not waited for
        torch.empty_like(batch.images).fill_(7)  # would take memory that is still in use
        del batch
    again = batches_of(classes, images)
    for plan, found in zip(again._plans(enumerate(iter(again.sampler)), 0), seen, strict=True):
        assert torch.equal(found, images.crops(plan.indices, plan.boxes, plan.flip, 20, dtype=torch.uint8))


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
    with pytest.raises(ValueError, match=r"position must be at most 3 \(batches\), got 4"):
        batches_of(classes, images).iterate(4)
