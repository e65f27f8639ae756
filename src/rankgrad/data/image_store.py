"""Images ready to be cropped: decoded in one buffer, or decoded every time they are used.

    images, table = open_images(table, side=256, square=False, cache=Path("~/.cache/rankgrad").expanduser())
    boxes, flip = Augment("resized", flip=True).draw(images.shapes[index], generator(seed, "augment", epoch, step))
    pixels = images.crops(index, boxes, flip, size=224)

A batch of crops is made on the device that holds the buffer. An epoch reads a flat file of bytes through the page cache, or,
after `.to("cuda")`, nothing at all: 60,000 images of 256 x 256 take 11.8 GB.
"""

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rankgrad._checks import check_count, check_tensor, shape_of
from rankgrad._device import available_bytes, triton_obstacle
from rankgrad._gpu import has_gpu
from rankgrad.data.image_files import ImageDecoder, map_images, or_raise
from rankgrad.data.prefetch import with_progress
from rankgrad.data.table import Table

# bytes of float32 pixels resampled at once: fits a processor's caches, and enough to fill a GPU
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}

Item: TypeAlias = tuple[int, tuple[float, float, float, float], bool]
"""A row, its box (left, top, width, height), and whether it is mirrored."""


class ImageBuffer:
    """Decoded images of any heights and widths.

    Args:
        flat: uint8, the images one after the other, each as [3, height, width], then at least as many bytes as the widest
            image is wide. In memory, mapped from a file, or on a GPU.
        shapes: [N, 2] int64 height and width, on the CPU.
        skipped: one message for each image of the table that could not be read.
    """

    def __init__(self, flat: Tensor, shapes: Tensor, skipped: tuple[str, ...] = ()) -> None:
        check_tensor(flat, name="flat", caller="ImageBuffer")
        check_tensor(shapes, name="shapes", caller="ImageBuffer")
        if flat.dtype != torch.uint8 or flat.ndim != 1 or not flat.is_contiguous():
            raise ValueError(f"ImageBuffer: flat must be contiguous 1-D uint8, got {flat.dtype} of shape {shape_of(flat)}")
        if shapes.ndim != 2 or shapes.shape[1] != 2 or shapes.dtype != torch.int64:
            raise ValueError(f"ImageBuffer: shapes must be [N, 2] int64, got {shapes.dtype} of shape {shape_of(shapes)}")
        self.shapes = shapes.cpu()
        sizes = 3 * self.shapes.prod(dim=1)
        wanted = bytes_needed(self.shapes)
        if len(flat) < wanted:
            raise ValueError(f"ImageBuffer: flat must have {wanted} bytes for shapes of {len(shapes)} images, got {len(flat)}")
        self.flat, self.skipped = flat, skipped
        self._offsets = sizes.cumsum(0) - sizes

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def nbytes(self) -> int:
        return len(self.flat)

    def to(self, device: torch.device | str) -> "ImageBuffer":
        """The same images on another device."""
        return ImageBuffer(self.flat.to(device), self.shapes, self.skipped)

    def fits_on(self, device: torch.device | str, share: float = 0.5) -> bool:
        """Whether the buffer takes at most `share` of the memory that is free there; a model needs some, too."""
        free = available_bytes(device)
        return free is None or self.nbytes <= share * free

    def crops(
        self,
        index: Tensor,
        boxes: Tensor,
        flip: Tensor,
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Boxes of images at size x size, on the device of the buffer.

        A box is resampled by one matrix from the left and one from the right, whose rows are triangles as wide as a target
        pixel, or as a source pixel where that is wider. So enlarging is bilinear interpolation and shrinking averages:
        torchvision's `resized_crop` with antialias. Pixel centres lie at halves, and nothing outside the box contributes. Boxes
        of size x size whole pixels are copied.

        Args:
            index: [B] rows, any order, repeats allowed.
            boxes: [B, 4] left, top, width, height in pixels of the stored image, not necessarily whole. Outside of the
                image its edge is repeated.
            flip: [B] bool, mirror left and right.
            size: height and width of the result.
            dtype: torch.float32, or torch.uint8 for rounded values.
            memory_format: of the result.

        Returns:
            [B, 3, size, size], 0 .. 255. With `index`, `boxes` and `flip` on the CPU, it does not synchronise with a GPU.
        """
        index, boxes, flip = self._checked(index, boxes, flip, size, dtype)
        crops = torch.empty(len(index), 3, size, size, dtype=dtype, device=self.device, memory_format=memory_format)
        if not len(index):
            return crops
        heights, widths = self.shapes[index].unbind(1)
        left, width = boxes[:, 0], boxes[:, 2]
        top, height = boxes[:, 1], boxes[:, 3]
        x, y = _Span.of(left, width, widths), _Span.of(top, height, heights)
        rows = self._offsets[index] + y.first * widths + x.first
        whole = torch.stack((rows, widths, heights * widths, y.count, x.count, flip.long()))
        real = torch.stack((left - x.first, width, top - y.first, height)).float()
        whole, real = _sent(whole, self.device), _sent(real, self.device)
        if _has_kernel(self.device):
            from rankgrad.data.crop_kernel import crop_images

            crop_images(self.flat, whole, real, crops)
            return crops
        exact = bool((boxes == boxes.floor()).all() and (boxes[:, 2:] == size).all())
        exact = exact and bool((x.count == size).all() and (y.count == size).all())
        seen = int(y.count.max()), int(x.count.max())
        self._fill(crops, whole, real, seen, exact=exact)
        return crops

    def _fill(self, crops: Tensor, whole: Tensor, real: Tensor, seen: tuple[int, int], *, exact: bool) -> None:
        """The crops by matrices; `seen` are the height and width of the largest window."""
        images, _, _, size = crops.shape
        step = max(1, CHUNK_BYTES.get(self.device.type, 2**28) // (12 * seen[0] * seen[1]))
        for start in range(0, images, step):
            part = slice(start, start + step)
            window = self._windows(whole[:, part], *seen)
            mirrored = whole[5, part].bool()
            if exact:
                shown = torch.where(mirrored[:, None, None, None], window.flip(3), window)
            else:
                shown = _resampled(window, whole[3:5, part], real[:, part], mirrored, size)
                # rows of weights sum to 1 up to rounding, and so can pass the brightest by as much
                shown.clamp_(max=255)
                if crops.dtype == torch.uint8:
                    shown.round_()
            crops[part] = shown

    def _windows(self, whole: Tensor, height: int, width: int) -> Tensor:
        """[B, 3, height, width] bytes from each image's first row and column on; rows past an image's last repeat it.

        Columns past the last of an image are bytes of its next row, or of its neighbour: they get no weight.
        """
        first, stride, plane, rows = whole[0], whole[1], whole[2], whole[3]
        down = torch.arange(height, device=self.device).minimum(rows[:, None] - 1)
        channel = torch.arange(3, device=self.device)
        starts = first[:, None, None] + channel[:, None] * plane[:, None, None] + (down * stride[:, None])[:, None]
        return (_runs_copied if self.device.type == "cpu" else _runs_gathered)(self.flat, starts, width)

    def _checked(
        self, index: Tensor, boxes: Tensor, flip: Tensor, size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        caller = "ImageBuffer.crops"
        check_count(size, name="size", caller=caller)
        if dtype not in {torch.float32, torch.uint8}:
            raise ValueError(f"{caller}: dtype must be torch.float32 or torch.uint8, got {dtype}")
        for name, value, shape in (("index", index, ()), ("boxes", boxes, (4,)), ("flip", flip, ())):
            check_tensor(value, name=name, caller=caller)
            wanted = (len(index), *shape)
            if value.shape != wanted:
                raise ValueError(f"{caller}: {name} must have shape {wanted}, got {shape_of(value)}")
        index, boxes, flip = index.long().cpu(), boxes.double().cpu(), flip.bool().cpu()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(f"{caller}: index must lie in [0, {len(self)}), got {int(index.min())} to {int(index.max())}")
        if not bool(torch.isfinite(boxes).all() and (boxes[:, 2:] > 0).all()):
            raise ValueError(f"{caller}: boxes must be finite with width and height above 0")
        return index, boxes, flip


class _Span:
    """The whole pixels that a box touches along one axis: `count` of them from `first` on, inside the image."""

    def __init__(self, first: Tensor, count: Tensor) -> None:
        self.first, self.count = first, count

    @classmethod
    def of(cls, begin: Tensor, extent: Tensor, length: Tensor) -> "_Span":
        # a box entirely outside gets the nearest pixel
        first = begin.floor().long().clamp(min=0).minimum(length - 1)
        last = (begin + extent).ceil().long().minimum(length).maximum(first + 1)
        return cls(first, last - first)


def _has_kernel(device: torch.device) -> bool:
    return has_gpu(device) and triton_obstacle(device) is None


def _runs_copied(flat: Tensor, starts: Tensor, width: int) -> Tensor:
    """The `width` bytes from each of `starts` on, run by run: four times as fast as byte by byte on a CPU."""
    # a view in which row i begins at byte i
    return flat.unfold(0, width, 1).index_select(0, starts.flatten()).view(*starts.shape, width)


def _runs_gathered(flat: Tensor, starts: Tensor, width: int) -> Tensor:
    """The same, byte by byte."""
    return flat[starts[..., None] + torch.arange(width, device=flat.device)]


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronising."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _resampled(window: Tensor, counts: Tensor, real: Tensor, flip: Tensor, size: int) -> Tensor:
    """float32 [B, 3, size, size] of windows [B, 3, height, width]."""
    images, channels, height, width = window.shape
    left, box_width, top, box_height = real
    across = _weights(left, box_width, counts[1], width, size, flip)
    down = _weights(top, box_height, counts[0], height, size, torch.zeros_like(flip))
    narrow = window.float().reshape(images, channels * height, width) @ across.mT
    narrow = narrow.reshape(images, channels, height, size)
    shown = narrow.new_empty(images, channels, size, size)
    for channel in range(channels):
        torch.bmm(down, narrow[:, channel], out=shown[:, channel])
    return shown


def _weights(begin: Tensor, extent: Tensor, count: Tensor, window: int, size: int, flip: Tensor) -> Tensor:
    """[B, size, window]: how much of each source pixel is in each target pixel; rows sum to 1.

    `begin` and `extent` are the box in pixels from the window's first, `count` the pixels of the window that it touches.
    """
    target = torch.arange(size, device=begin.device) + 0.5
    source = torch.arange(window, device=begin.device) + 0.5
    step = extent[:, None] / size
    centre = begin[:, None] + torch.where(flip[:, None], size - target, target) * step
    # beyond the outermost pixel centres there is nothing to interpolate with
    centre = centre.clamp(min=0.5).minimum(count[:, None] - 0.5)
    slope = 1 / step.clamp(min=1)
    weights = (source - centre[:, :, None]).abs_().mul_(-slope[:, :, None]).add_(1).clamp_(min=0)
    weights.mul_(source < count[:, None, None])
    return weights.div_(weights.sum(2, keepdim=True))


def bytes_needed(shapes: Tensor) -> int:
    """Length of the buffer for images of these shapes."""
    return int(3 * shapes.prod(dim=1).sum()) + (int(shapes[:, 1].max()) if len(shapes) else 0)


class OnDemandImages(Dataset[Tensor]):
    """Images decoded every time they are used, for tables too large to keep decoded.

    A map-style data set indexed by (row, box, flip): one `Augment` serves it and `ImageBuffer`, and the pixels agree to a
    rounding of the last bit. `ImageBatches` uses it with worker processes.

    Args:
        table: files or pixels.
        size: height and width of an item.
        side: length of the short side (`square`: of both) to which an image is resized before it is cropped.
        square: resize to side x side, whatever the aspect ratio.
        shapes: [N, 2] heights and widths at `side` if known; otherwise the headers of all files are read now.
        progress: show progress on standard error.
        workers: threads that read them; by default one per core, 16 at most.
    """

    def __init__(
        self,
        table: Table,
        size: int,
        *,
        side: int,
        square: bool = False,
        shapes: Tensor | None = None,
        progress: bool = True,
        workers: int | None = None,
    ) -> None:
        check_count(size, name="size", caller="OnDemandImages")
        self.size, self._decoder = size, ImageDecoder(table, side, square)
        if shapes is None:
            results = map_images(self._decoder.shape, range(len(table)), workers)
            measured = with_progress(results, len(table), f"measuring {table.name}", progress)
            shapes = torch.tensor([or_raise(shape) for _, shape in measured], dtype=torch.int64).reshape(-1, 2)
        if shapes.shape != (len(table), 2):
            raise ValueError(f"OnDemandImages: shapes must be [{len(table)}, 2], got shape {tuple(shapes.shape)}")
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, item: Item) -> Tensor:
        """uint8 [3, size, size] of the box (left, top, width, height) of a row, mirrored or not."""
        from PIL import Image

        row, (left, top, width, height), flip = item
        # cropped before it is resized, so that nothing outside the box is averaged in
        crop = self._decoder.image(row).crop((round(left), round(top), round(left + width), round(top + height)))
        shown = crop.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if flip:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(shown).transpose(2, 0, 1).copy())
