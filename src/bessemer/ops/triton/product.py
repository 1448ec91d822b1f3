"""The product of tensors scaled in blocks, a b^T, promoted to float32 every 128 of the summed dimension: device code.

Hopper's FP8 units keep about 14 bits while they add up (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), so each block of
128 starts from zero and its sum moves, times the scales, into a float32 accumulator. What a program adds up, and in
which order, doesn't depend on the shape of its tile.

Both operands come by descriptors (on Hopper and later the copy engine fetches their tiles, and fills with zeros what
lies outside), so the summed dimension has to be a multiple of 16 bytes.
Legend: M rows of a, N rows of b, K the dimension that is summed over, X experts.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped, import-not-found, misc, untyped-decorator"
# ruff: noqa: PLR0913, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

from bessemer.ops.triton.blocks import SIDE

__all__ = ["DENSE", "ROWS", "SUMS", "product_kernel"]

DENSE = tl.constexpr(0)
"""One product."""
ROWS = tl.constexpr(1)
"""Runs of a's rows, each with its expert's part of b: forward and the gradient of the input."""
SUMS = tl.constexpr(2)
"""Runs of the summed dimension, a product [M, N] each: the gradient of the experts' weights."""

_BAND = tl.constexpr(8)  # tiles of M that run side by side and so share tiles of b in the second-level cache


@triton.jit
def _place(index, tiles_m, tiles_n):
    """(m, n) of the program's tile: bands of _BAND tiles of M, along N inside a band."""
    per_band = _BAND * tiles_n
    first = index // per_band * _BAND
    height = tl.minimum(tiles_m - first, _BAND)
    return first + index % per_band % height, index % per_band // height


@triton.jit
def product_kernel(
    a, b, a_scale, b_scale, bias, out, ends, M, N, K, a_pitch, b_pitch, experts, b_row_step, b_col_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SQUARE: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = a b^T (+ bias [N]) of descriptors of codes, a [M, K] and b [N, K].

    a has a scale per 1 x 128 elements, b too or, SQUARE, per 128 x 128, laid out as `blocks.store_both` leaves them.
    KIND ROWS and SUMS: `ends` int32 [X] says where the runs of the experts end, in multiples of 128. The b of an expert
    begins `b_row_step` rows and `b_col_step` columns after that of the expert before. Rows behind the last run become
    0. EXPERTS: a power of two that isn't smaller than X.
    """
    m, n = _place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    row0, col0 = m * BLOCK_M, n * BLOCK_N
    first, last = 0, tl.cdiv(K, SIDE)
    b_row, b_block = col0, 0
    if KIND == ROWS:
        each = tl.arange(0, EXPERTS)
        before = tl.load(ends + each, mask=each < experts, other=0x7FFFFFFF) <= row0
        expert = tl.sum(before.to(tl.int32), 0)
        last = tl.where(expert < experts, last, 0)
        b_row += expert * b_row_step
        b_block = expert * b_col_step // SIDE
    if KIND == SUMS:
        expert = tl.program_id(1)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0) // SIDE
        last = tl.load(ends + expert) // SIDE
        out += expert.to(tl.int64) * M * N
    r, c = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, last):
        a_MK = a.load([row0, block * SIDE])
        b_NK = b.load([b_row, (b_block + block) * SIDE])
        part_MN = tl.dot(a_MK, b_NK.T)
        a_scale_M = tl.load(a_scale + block * a_pitch + r, mask=r < M, other=0.0)
        if SQUARE:
            b_scale_1 = tl.load(b_scale + b_row // SIDE * b_pitch + b_block + block)
            sum_MN += part_MN * (a_scale_M * b_scale_1)[:, None]
        else:
            b_scale_N = tl.load(b_scale + block * b_pitch + c, mask=c < N, other=0.0)
            sum_MN += part_MN * (a_scale_M[:, None] * b_scale_N[None, :])
    if BIAS:
        sum_MN += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    at = r.to(tl.int64)[:, None] * N + c[None, :]
    tl.store(out + at, sum_MN.to(out.dtype.element_ty), mask=(r < M)[:, None] & (c < N)[None, :])
