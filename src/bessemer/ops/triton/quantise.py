"""Quantises a tensor in blocks, row-wise and column-wise (transposed) in one read: device code.

Legend: R rows, C columns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped, import-not-found, misc, untyped-decorator"
# ruff: noqa: PLR0913, PLR0917
from __future__ import annotations

import triton
import triton.language as tl

from bessemer.ops.triton.blocks import SIDE, store_both

__all__ = ["quantise_kernel"]


@triton.jit
def quantise_kernel(
    x, codes, scales, codes_t, scales_t, amax, x_rows, x_cols, rows, cols, pitch, pitch_t,
    SQUARE: tl.constexpr, BOTH: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """x [x_rows, x_cols] into codes [rows, cols], which may be larger (filled with zeros); see `store_both`. A program
    for each tile of 128 x 128, the tiles of a row side by side."""
    col0, row0 = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    r, c = tl.arange(0, SIDE), tl.arange(0, SIDE)
    inside = (row0 + r < x_rows)[:, None] & (col0 + c < x_cols)[None, :]
    start = row0.to(tl.int64) * x_cols + col0
    x_RC = tl.load(x + start + r[:, None] * x_cols + c[None, :], mask=inside, other=0.0).to(tl.float32)
    store_both(
        x_RC, row0, col0, rows, cols, codes, scales, codes_t, scales_t, amax, pitch, pitch_t,
        SQUARE, BOTH, POWER_OF_TWO, ROUND_FIRST,
    )  # fmt: skip
