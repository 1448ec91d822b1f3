"""Narrow codes of tensors with a scale per tile, by native CPU kernels; `bessemer.precision.scaled` has the torch form.

A tile is `tall` rows by `wide` columns, ragged at the edges; 0 means all of them. Codes are one a byte.
Legend: R rows, C columns, A x B tiles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bessemer.ops import native

__all__ = ["FORMATS", "decode_tiles", "encode_tiles", "tile_amax"]

FORMATS = ("e4m3", "e5m2", "e2m1")
"""By name, in the order of `Narrow` in csrc/narrow.cpp."""

Tile = tuple[int, int]


def tile_amax(x_RC: Tensor, tile: Tile) -> Tensor:
    """float32 [A, B]: the largest |x| of each tile of contiguous float32 or bfloat16 x; NaN and Inf show."""
    (rows, cols), (tall, wide) = x_RC.shape, _whole(tile, x_RC)
    every = not tile[0]  # rows apart first, for threads to share them
    amax_AB = x_RC.new_empty(rows if every else math.ceil(rows / tall), math.ceil(cols / wide), dtype=torch.float32)
    native.kernels(x_RC).bessemer_tile_amax(
        x_RC.data_ptr(), x_RC.dtype == torch.bfloat16, amax_AB.data_ptr(), rows, cols, 1 if every else tall, wide,
        native.threads(),
    )  # fmt: skip
    return amax_AB.amax(0, keepdim=True) if every else amax_AB


def encode_tiles(x_RC: Tensor, scale_AB: Tensor, tile: Tile, fmt: str, noise_RC: Tensor | None = None) -> Tensor:
    """uint8 [R, C]: x over its scale (float32, contiguous) in the type of x, clamped, as the nearest code, ties to
    even; with noise, uniform in [0, 1), up where it is below what the next code down leaves of a step. NaN stays, in
    e4m3 and e5m2."""
    codes_RC = torch.empty_like(x_RC, dtype=torch.uint8)
    native.kernels(x_RC).bessemer_encode_tiles(
        x_RC.data_ptr(), x_RC.dtype == torch.bfloat16, scale_AB.data_ptr(),
        None if noise_RC is None else noise_RC.data_ptr(), codes_RC.data_ptr(), FORMATS.index(fmt), *x_RC.shape,
        *_whole(tile, x_RC), native.threads(),
    )  # fmt: skip
    return codes_RC


def decode_tiles(codes_RC: Tensor, scale_AB: Tensor, tile: Tile, fmt: str) -> Tensor:
    """bfloat16 [R, C]: codes (a byte each, contiguous, finite wherever their scale is) times the float32 scale."""
    out_RC = torch.empty_like(codes_RC, dtype=torch.bfloat16)
    native.kernels(codes_RC).bessemer_decode_tiles(
        codes_RC.data_ptr(), scale_AB.data_ptr(), out_RC.data_ptr(), FORMATS.index(fmt), *codes_RC.shape,
        *_whole(tile, codes_RC), native.threads(),
    )  # fmt: skip
    return out_RC


def _whole(tile: Tile, x_RC: Tensor) -> Tile:
    return tile[0] or x_RC.shape[0], tile[1] or x_RC.shape[1]
