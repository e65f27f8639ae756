"""What kernels of several modules compute with."""

import triton
import triton.language as tl


@triton.jit
def reciprocal(b_x, ASM: tl.constexpr):
    """1 / x."""
    if ASM:  # one instruction, where a division takes six; relative error 2**-23
        b_y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        b_y = 1.0 / b_x
    return b_y


@triton.jit
def packed(b_low, b_high):
    """Two float32 in an int64, which memory delivers at once."""
    b_low = b_low.to(tl.int32, bitcast=True).to(tl.int64) & 4294967295
    return b_low | (b_high.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def unpacked(b_pair):
    """The two float32 of `packed`."""
    return b_pair.to(tl.int32).to(tl.float32, bitcast=True), (b_pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
