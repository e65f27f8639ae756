"""Crops of decoded images: against torchvision, on any device, from any buffer."""

import contextlib

import numpy as np
import pytest
import torch
from data.sample_images import picture
from torchvision.transforms import v2

from rankgrad.data import crop_kernel, image_store
from rankgrad.data.image_store import ImageBuffer, bytes_needed
from rankgrad.data.preprocessing import Augment
from rankgrad.data.seeds import generator


def store_of(arrays):
    """`ImageBuffer` of [H, W, 3] arrays."""
    shapes = torch.tensor([array.shape[:2] for array in arrays])
    flat = torch.zeros(bytes_needed(shapes), dtype=torch.uint8)
    whole = np.concatenate([array.transpose(2, 0, 1).ravel() for array in arrays])
    flat[: len(whole)] = torch.from_numpy(whole)
    return ImageBuffer(flat, shapes)


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


def test_the_kernel_shows_what_the_matrices_do(monkeypatch):
    store, index, boxes, flip = cases(3, fraction=0.2, seed=3)
    monkeypatch.setattr(crop_kernel, "ROWS", 32)
    monkeypatch.setattr(crop_kernel, "COLUMNS", 32)
    index, boxes, flip = (torch.cat(parts) for parts in ((index, OVER[0]), (boxes, OVER[1]), (flip, OVER[2])))
    for size in (13, 34):  # part of a tile, and several
        by_matrices = store.crops(index, boxes, flip, size)
        with by_kernel(monkeypatch):
            shown = store.to(KERNEL_DEVICE).crops(index, boxes, flip, size).cpu()
            last = {"dtype": torch.uint8, "memory_format": torch.channels_last}
            rounded = store.to(KERNEL_DEVICE).crops(index, boxes, flip, size, **last).cpu()
        # where a centre lies is known to a few units in the last place of some hundred pixels
        torch.testing.assert_close(shown, by_matrices, atol=2e-3, rtol=0)
        assert rounded.dtype == torch.uint8
        assert rounded.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(rounded, shown.round().to(torch.uint8))


def test_the_kernel_copies_a_box_of_the_size(monkeypatch):
    store, index, _, flip = cases(6)
    boxes = torch.tensor([[2.0, 1, 16, 16]]).repeat(6, 1)
    expected = store.crops(index, boxes, flip, 16)
    with by_kernel(monkeypatch):
        assert torch.equal(store.to(KERNEL_DEVICE).crops(index, boxes, flip, 16).cpu(), expected)


# compiled where there is a GPU, else in Triton's interpreter
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def by_kernel(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(image_store, "_has_kernel", lambda device: True)
        yield


# boxes between pixels, and such that reach over an edge or lie beyond it
OVER = (
    torch.tensor([0, 1, 2, 3]),
    torch.tensor([[10.25, 5.5, 20, 20], [-5.0, -3, 40, 30], [120.5, 100, 30, 10.5], [200.0, 50, 8, 8]]),
    torch.tensor([False, True, True, False]),
)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_without_kernels_shows_the_same(monkeypatch):
    store, index, boxes, flip = cases(60)
    monkeypatch.setattr(image_store, "_has_kernel", lambda device: False)
    torch.testing.assert_close(
        store.to("cuda").crops(index, boxes, flip, 31).cpu(), store.crops(index, boxes, flip, 31), atol=1e-2, rtol=0
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


def test_a_buffer_knows_whether_it_fits(monkeypatch):
    store = store_of(RAGGED)
    for free, fits in ((store.nbytes * 2, True), (store.nbytes * 2 - 1, False), (None, True)):
        monkeypatch.setattr(image_store, "available_bytes", lambda _, free=free: free)
        assert store.fits_on("cpu") == fits
