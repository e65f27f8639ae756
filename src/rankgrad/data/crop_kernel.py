"""Crops of `ImageBuffer` in one Triton kernel: bytes are read where they lie, and nothing but the crops is written.

The pixels are those of the two matrices in `image_store`, whose rows are triangles with a few weights above zero: here only
these are summed, first along a row and then over rows.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankgrad._kernel import kernel

# rows and columns of a crop that a program makes
ROWS, COLUMNS = 8, 64


def crop_images(flat: Tensor, whole: Tensor, real: Tensor, crops: Tensor) -> None:
    """Fill `crops`, [B, 3, size, size] in either memory format, with images in `flat`.

    Args:
        flat: uint8, the buffer.
        whole: [6, B] int64: first byte of the window in the first channel, bytes of a row and of a channel, rows and columns of
            the window, whether it is mirrored.
        real: [4, B] float32: left, width, top and height of the box, in pixels from the window's first.
        crops: torch.float32, or torch.uint8 for rounded values.
    """
    images, _, _, size = crops.shape
    tiles = triton.cdiv(size, ROWS) * triton.cdiv(size, COLUMNS)
    with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
        crop_kernel[(images * tiles,)](
            p_flat=flat,
            p_whole=whole,
            p_real=real,
            p_crops=crops,
            images=images,
            size=size,
            ROUNDED=crops.dtype == torch.uint8,
            CHANNELS_LAST=crops.is_contiguous(memory_format=torch.channels_last),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )


# one kernel for all sizes: the last batch of an evaluation would compile another
@kernel(do_not_specialize=["images", "size"])
def crop_kernel(
    p_flat, p_whole, p_real, p_crops, images, size,
    ROUNDED: tl.constexpr, CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS x COLUMNS pixels of one crop, all channels."""
    across = tl.cdiv(size, COLUMNS)
    tiles = across * tl.cdiv(size, ROWS)
    i_image = tl.program_id(0) // tiles
    i_tile = tl.program_id(0) % tiles
    o_row = i_tile // across * ROWS + tl.arange(0, ROWS)
    o_column = i_tile % across * COLUMNS + tl.arange(0, COLUMNS)

    first = tl.load(p_whole + i_image)
    stride = tl.load(p_whole + images + i_image)
    plane = tl.load(p_whole + 2 * images + i_image)
    rows = tl.load(p_whole + 3 * images + i_image).to(tl.int32)
    columns = tl.load(p_whole + 4 * images + i_image).to(tl.int32)
    mirrored = tl.load(p_whole + 5 * images + i_image)
    left = tl.load(p_real + i_image)
    width = tl.load(p_real + images + i_image)
    top = tl.load(p_real + 2 * images + i_image)
    height = tl.load(p_real + 3 * images + i_image)

    o_source = tl.where(mirrored != 0, size - 1 - o_column, o_column)
    b_centre_x, b_first_x, slope_x, taps_x = _reach(o_source, left, width, columns, size)
    b_centre_y, b_first_y, slope_y, taps_y = _reach(o_row, top, height, rows, size)
    b_sum_x = tl.zeros([COLUMNS], tl.float32)
    for tap in range(taps_x):
        b_sum_x += _weight(b_first_x + tap, b_centre_x, slope_x, columns)
    b_sum_y = tl.zeros([ROWS], tl.float32)
    for tap in range(taps_y):
        b_sum_y += _weight(b_first_y + tap, b_centre_y, slope_y, rows)
    b_share_x = tl.div_rn(1.0, b_sum_x)
    b_share_y = tl.div_rn(1.0, b_sum_y)

    b_red = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_green = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_blue = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tap_y in range(taps_y):
        b_y = b_first_y + tap_y
        b_down = _weight(b_y, b_centre_y, slope_y, rows) * b_share_y
        p_row = p_flat + first + b_y.to(tl.int64) * stride
        b_red_row = tl.zeros([ROWS, COLUMNS], tl.float32)
        b_green_row = tl.zeros([ROWS, COLUMNS], tl.float32)
        b_blue_row = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tap_x in range(taps_x):
            b_x = b_first_x + tap_x
            b_along = (_weight(b_x, b_centre_x, slope_x, columns) * b_share_x)[None, :]
            # a weight above zero is that of a pixel of the window
            mask = (b_down[:, None] > 0.0) & (b_along > 0.0)
            p_pixel = p_row[:, None] + b_x[None, :]
            b_red_row += b_along * tl.load(p_pixel, mask=mask, other=0).to(tl.float32)
            b_green_row += b_along * tl.load(p_pixel + plane, mask=mask, other=0).to(tl.float32)
            b_blue_row += b_along * tl.load(p_pixel + 2 * plane, mask=mask, other=0).to(tl.float32)
        b_red += b_down[:, None] * b_red_row
        b_green += b_down[:, None] * b_green_row
        b_blue += b_down[:, None] * b_blue_row

    area = size * size
    o_pixel = o_row[:, None] * size + o_column[None, :]
    p_crop = p_crops + i_image.to(tl.int64) * 3 * area + (3 * o_pixel if CHANNELS_LAST else o_pixel)
    channel = 1 if CHANNELS_LAST else area
    mask = (o_row[:, None] < size) & (o_column[None, :] < size)
    _store(p_crop, b_red, mask, ROUNDED)
    _store(p_crop + channel, b_green, mask, ROUNDED)
    _store(p_crop + 2 * channel, b_blue, mask, ROUNDED)


@triton.jit
def _reach(o_target, begin, extent, count, size):
    """Centres of target pixels in the window, the first pixel that is in each, how its weights fall, and how many there are."""
    step = tl.div_rn(extent, size.to(tl.float32))
    reach = tl.maximum(step, 1.0)
    # beyond the outermost pixel centres there is nothing to interpolate with
    b_centre = tl.minimum(tl.maximum(begin + (o_target.to(tl.float32) + 0.5) * step, 0.5), count.to(tl.float32) - 0.5)
    b_first = tl.floor(b_centre - 0.5 - reach).to(tl.int32)
    return b_centre, b_first, tl.div_rn(1.0, reach), tl.ceil(2.0 * reach).to(tl.int32) + 1


@triton.jit
def _weight(b_pixel, b_centre, slope, count):
    """How much of a pixel is in a target pixel, before the weights of that are made to sum to 1; 0 outside of the window."""
    b_weight = tl.maximum(1.0 - tl.abs(b_pixel.to(tl.float32) + 0.5 - b_centre) * slope, 0.0)
    return tl.where((b_pixel >= 0) & (b_pixel < count), b_weight, 0.0)


@triton.jit
def _store(p_crop, b_value, mask, ROUNDED: tl.constexpr):
    # weights sum to 1 up to rounding, and so can pass the brightest by as much
    b_value = tl.minimum(b_value, 255.0)
    if ROUNDED:
        # to the nearest whole number, of two to the even one: a float32 as large as this has no digits after the point
        b_value = (b_value + 12582912.0) - 12582912.0
    tl.store(p_crop, b_value.to(p_crop.dtype.element_ty), mask=mask)
