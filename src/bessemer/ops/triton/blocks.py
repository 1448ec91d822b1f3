"""What the kernels share on the device: scales of blocks, casts to a narrow type, and storing a tile both ways.

The numbers are those of `bessemer.precision`: a scale is amax / largest value, rounded up to a power of two where
asked, 1 for a block of zeros, NaN for a block with Inf or NaN (so that all of it comes out as NaN, whatever its codes).

ROUND_FIRST rounds to the grid of the narrow type with float32 arithmetic before the cast, which then is exact. A GPU
needs no such help (its cast rounds to nearest, ties to even, and saturates); Triton's interpreter does, since its casts
lose the carry out of the mantissa and its cast to bfloat16 truncates.

A kernel's arguments are flat, so these functions have more than other code here.
Legend: R rows, C columns of a tile, SIDE = 128 of both.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped, import-not-found, misc, untyped-decorator"
# ruff: noqa: PLR0913, PLR0917, SIM300
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["SIDE", "encode", "round_to", "scale_of", "store_both"]

SIDE = tl.constexpr(128)
"""Elements that share a scale: a tile is one block of them in each direction."""


@triton.jit
def round_to(x, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """float32 x rounded (nearest, ties to even) to numbers of that many mantissa bits; below 2^MIN_EXPONENT steps stay
    the same. Inf and NaN come out as NaN."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    # a float32 that is 1.5 x 2^23 steps large has no bits below a step
    shift = tl.maximum(power, 2.0**MIN_EXPONENT) * (1.5 * 2.0 ** (23 - MANTISSA_BITS))
    rounded = ((x + shift) - shift).to(tl.int32, bitcast=True)
    return (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)  # -0 where a negative number vanishes


@triton.jit
def scale_of(amax_bits, DTYPE: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, its inverse) of blocks whose largest |x| has these bits, float32. As integers NaN lies above Inf, so
    that neither is lost. Inverses are of use, and exact, for powers of two only."""
    if POWER_OF_TWO:  # 448 = 1.75 x 2^8, 57344 = 1.75 x 2^15: the next power of two, counted from 1.75
        BELOW: tl.constexpr = 8 if DTYPE == tl.float8e4nv else 15
        bits = ((amax_bits + (0x7FFFFF - 0x600000)) & 0x7F800000) - (BELOW << 23)
        bits = tl.where(amax_bits == 0, 127 << 23, tl.maximum(bits, 1 << 23))  # 1; 2^-126, the smallest normal number
        scale = bits.to(tl.float32, bitcast=True)
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    else:
        LARGEST: tl.constexpr = 448.0 if DTYPE == tl.float8e4nv else 57344.0
        scale = tl.maximum(tl.div_rn(amax_bits.to(tl.float32, bitcast=True), LARGEST), 2.0**-126)
        scale = tl.where(amax_bits == 0, 1.0, scale)
        inverse = scale
    return tl.where(amax_bits < 0x7F800000, scale, float("nan")), inverse


@triton.jit
def encode(x, scale, inverse, DTYPE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """x / scale in DTYPE. A scale that was made from x leaves nothing beyond the largest value."""
    if POWER_OF_TWO:
        scaled = x * inverse
    else:
        scaled = tl.div_rn(x, scale)
    if ROUND_FIRST:
        if DTYPE == tl.float8e4nv:
            scaled = round_to(scaled, 3, -6)
        else:
            scaled = round_to(scaled, 2, -14)
    return scaled.to(DTYPE)


@triton.jit
def store_both(
    x_RC, row0, col0, rows, cols, codes, scales, codes_t, scales_t, amax, pitch, pitch_t,
    SQUARE: tl.constexpr, BOTH: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Stores the tile x, which begins at (row0, col0), as codes [rows, cols] with a scale per 1 x 128 elements, and
    with BOTH also as codes_t [cols, rows] of the transpose, with a scale per 128 elements of a column; SQUARE: one
    scale for the tile. x is 0 where it lies outside of its tensor.

    scales (float32) hold that of row r and block c at c * pitch + r, SQUARE that of block (r, c) at r * pitch + c;
    scales_t likewise for the transpose. So the scales of a product's rows lie side by side. amax (int32, 0 before)
    becomes the bits of the largest |x| of all tiles.
    """
    DTYPE: tl.constexpr = codes.dtype.element_ty
    r, c = tl.arange(0, SIDE), tl.arange(0, SIDE)
    in_row, in_col = row0 + r < rows, col0 + c < cols
    bits_RC = x_RC.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    row_bits = tl.max(bits_RC, 1)
    if SQUARE:
        scale, inverse = scale_of(tl.max(row_bits, 0), DTYPE, POWER_OF_TWO)
        codes_RC = encode(x_RC, scale, inverse, DTYPE, POWER_OF_TWO, ROUND_FIRST)
        tl.store(scales + row0 // SIDE * pitch + col0 // SIDE, scale)
    else:
        scale_R, inverse_R = scale_of(row_bits, DTYPE, POWER_OF_TWO)
        codes_RC = encode(x_RC, scale_R[:, None], inverse_R[:, None], DTYPE, POWER_OF_TWO, ROUND_FIRST)
        tl.store(scales + col0 // SIDE * pitch + row0 + r, scale_R, mask=in_row)
    start = row0.to(tl.int64) * cols + col0  # a tensor may have more than 2^31 elements, a tile's rows don't span that
    tl.store(codes + start + r[:, None] * cols + c[None, :], codes_RC, mask=in_row[:, None] & in_col[None, :])
    if BOTH:
        if SQUARE:
            tl.store(scales_t + col0 // SIDE * pitch_t + row0 // SIDE, scale)
        else:
            scale_C, inverse_C = scale_of(tl.max(bits_RC, 0), DTYPE, POWER_OF_TWO)
            codes_RC = encode(x_RC, scale_C[None, :], inverse_C[None, :], DTYPE, POWER_OF_TWO, ROUND_FIRST)
            tl.store(scales_t + row0 // SIDE * pitch_t + col0 + c, scale_C, mask=in_col)
        start = col0.to(tl.int64) * rows + row0
        mask = in_col[:, None] & in_row[None, :]
        tl.store(codes_t + start + c[:, None] * rows + r[None, :], tl.trans(codes_RC), mask=mask)
    tl.atomic_max(amax, tl.max(row_bits, 0))
