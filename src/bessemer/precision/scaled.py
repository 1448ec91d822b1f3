"""Scaled tensors: narrow codes with a scale per tensor, row or block, x = codes * scale.

    Scheme(E4M3, TENSOR)                     one scale
    Scheme(E4M3, Grain(1, 128))              1 x 128 blocks, float32 scales (powers of two by default)
    Scheme(E4M3, Grain(1, 32), E8M0)         MXFP8
    Scheme(E2M1, Grain(1, 16), E4M3)         NVFP4: e4m3 scales under one float32 scale of the tensor

A scale is amax / max of the format, rounded up to a power of two where asked (so nothing saturates and dividing is
exact); 1 where amax is 0; NaN where amax isn't finite, so that Inf or NaN spoil what they touched and never vanish.
Legend: R rows, C columns (the dimension that is summed over), A x B tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.ops import narrow
from bessemer.ops.registry import native_fits, register
from bessemer.precision.casts import amax as amax_of
from bessemer.precision.casts import clamped_codes, decode, decode_finite, encode, round_up
from bessemer.precision.formats import E4M3, E8M0, Format

__all__ = ["ROW", "TENSOR", "Grain", "Scaled", "Scheme", "quantise", "scale_from"]

_TINY = 2.0**-126  # the smallest normal float32: a smaller scale would turn x / scale into Inf


@dataclass(frozen=True)
class Grain:
    """The rows x columns that share a scale; 0 means all of them."""

    rows: int
    cols: int

    @property
    def symmetric(self) -> bool:
        """Whether a tensor and its transpose get the same scales."""
        return self.rows == self.cols


TENSOR, ROW = Grain(0, 0), Grain(1, 0)


@dataclass(frozen=True)
class Scheme:
    """`scale_format` None: float32 scales; E8M0: powers of two in a byte; E4M3: two levels (see the module)."""

    format: Format
    grain: Grain
    scale_format: Format | None = None
    power_of_two: bool = True

    @property
    def exact(self) -> bool:
        """Whether the dequantised values are bfloat16 numbers, so that bfloat16 products emulate exactly."""
        return self.power_of_two or self.scale_format is E8M0


@dataclass(frozen=True)
class Scaled:
    """`codes` [R, C], `scale` [A, B] in its stored type, `tensor_scale` float32 () of the two-level kind ([A, 1] or
    [1, B] of several tensors), `amax` float32 (): what the tensor had, also where it was quantised by another."""

    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    amax: Tensor
    scheme: Scheme

    @property
    def nbytes(self) -> float:
        """Bytes of codes and scales as stored on a device (e2m1: half a byte)."""
        codes = self.codes.numel() * self.scheme.format.bits / 8
        extra = 0 if self.tensor_scale is None else self.tensor_scale.element_size()
        return codes + self.scale.numel() * self.scale.element_size() + extra

    def scales(self) -> Tensor:
        """float32 [A, B]: what each tile's codes are multiplied with."""
        if self.scheme.scale_format is None:
            return self.scale
        wide = decode(self.scale, self.scheme.scale_format)
        return wide if self.tensor_scale is None else wide * self.tensor_scale

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[R, C] in `dtype`; exact in bfloat16 if `scheme.exact`, else rounded once to it."""
        fmt, scales = self.scheme.format, self.scales()
        work = dtype if self.scheme.exact else torch.float32
        if work == torch.bfloat16:  # codes are finite wherever their scale is
            read: Tensor = _decoded(self.codes, scales, self.scheme)
            return read
        values = decode(self.codes, fmt, work)
        if scales.numel() == 1:
            return values.mul_(scales.view(())).to(dtype)
        tiles, shape = _tiles(values, self.scheme.grain)
        return _untile(tiles * scales.to(work)[:, None, :, None], shape).to(dtype)


def scale_from(amax: Tensor, largest: float, *, power_of_two: bool = True) -> Tensor:
    """float32 amax / largest, rounded up to a power of two if asked; 1 for amax 0, NaN for an amax not finite."""
    scale = (amax / largest).clamp(min=_TINY)
    scale = round_up(scale) if power_of_two else scale
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))


def quantise(
    x_RC: Tensor,
    scheme: Scheme,
    *,
    past: Tensor | None = None,
    whole: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Scaled:
    """Codes and scales of x (float32, bfloat16 or float16, two dimensions; ragged last tiles are allowed).

    `past`: an amax () to scale by instead of x's own (of past steps, or reduced over ranks; per tensor only); larger
    values saturate. 0, an empty history, stands for x's own.
    `whole`: for scales of two levels where x holds several tensors, the amax [A, 1] or [1, B] of the one that each tile
    belongs to. `generator`: rounds stochastically. Raises RequestError for another type or number of dimensions.
    """
    x_RC = x_RC.detach()
    if x_RC.dim() != 2 or x_RC.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        what = f"can't quantise {x_RC.dtype} of {x_RC.dim()} dimensions"
        raise RequestError(what, code="precision-dtype", fix="x.float().reshape(-1, x.shape[-1])")
    if x_RC.dtype == torch.float16:
        x_RC = x_RC.float()  # dividing by a small scale would leave float16's range
    grain = scheme.grain
    amax_AB = _tile_amax(x_RC, grain)
    seen = amax_AB.amax() if amax_AB.numel() else amax_of(x_RC)
    if past is not None:
        if grain != TENSOR:
            raise RequestError("a given amax scales whole tensors only", code="precision-past", fix="TENSOR")
        amax_AB = torch.where(seen.isfinite() & (past != 0), past, seen).view(1, 1)
    scale, tensor_scale, wide = _scales(amax_AB, seen if whole is None else whole, scheme)
    return Scaled(_coded(x_RC, wide, scheme, generator), scale, tensor_scale, seen, scheme)


def _scales(amax_AB: Tensor, seen: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None, Tensor]:
    """(stored, of the tensor, effective float32 [A, B])."""
    kind, largest = scheme.scale_format, scheme.format.max
    if kind is not E4M3:
        wide = scale_from(amax_AB, largest, power_of_two=scheme.exact)
        return (wide if kind is None else encode(wide, kind)), None, wide
    # With `largest * kind.max` the block that holds the tensor's amax gets the largest e4m3 scale.
    tensor_scale = scale_from(seen, largest * kind.max, power_of_two=scheme.power_of_two)
    block = torch.where(amax_AB == 0, torch.ones_like(amax_AB), amax_AB / largest / tensor_scale)
    stored = encode(block.clamp(min=kind.smallest), kind)
    return stored, tensor_scale, decode(stored, kind) * tensor_scale


def _tiles(x_RC: Tensor, grain: Grain) -> tuple[Tensor, tuple[int, int]]:
    """([A, r, B, c], (R, C)): ragged edges are filled with zeros, which change no amax."""
    rows, cols = x_RC.shape
    tall, wide = grain.rows or max(rows, 1), grain.cols or max(cols, 1)
    pad_rows, pad_cols = -rows % tall, -cols % wide
    if pad_rows or pad_cols:
        x_RC = F.pad(x_RC, (0, pad_cols, 0, pad_rows))
    count_rows, count_cols = (rows + pad_rows) // tall, (cols + pad_cols) // wide
    if grain == TENSOR:
        return x_RC.reshape(1, rows, 1, cols), (rows, cols)
    return x_RC.reshape(count_rows, tall, count_cols, wide), (rows, cols)


def _untile(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    across, tall, along, wide = tiles.shape
    whole = tiles.reshape(across * tall, along * wide)
    return whole if tuple(whole.shape) == shape else whole[: shape[0], : shape[1]].contiguous()


def _torch_amax(x_RC: Tensor, grain: Grain) -> Tensor:
    """float32 [A, B]; NaN and Inf show."""
    if grain == TENSOR:
        return amax_of(x_RC).view(1, 1)
    tiles, _ = _tiles(x_RC, grain)
    if tiles.numel() == 0:
        return torch.zeros(tiles.shape[0], tiles.shape[2], dtype=torch.float32, device=tiles.device)
    if tiles.dtype == torch.bfloat16:  # as integers without the sign: the same order, and measured 6 times as fast
        return (tiles.view(torch.int16) & 0x7FFF).amax(3).amax(1).view(torch.bfloat16).float()
    return tiles.abs().amax(3).amax(1)


def _torch_codes(x_RC: Tensor, wide_AB: Tensor, scheme: Scheme, generator: torch.Generator | None) -> Tensor:
    """Codes [R, C] of x over the scale of its tile."""
    tiles, shape = _tiles(x_RC, scheme.grain)
    if scheme.exact:
        scaled = tiles / wide_AB.to(tiles.dtype)[:, None, :, None]
    else:
        scaled = tiles.float() / wide_AB[:, None, :, None]
    return _untile(clamped_codes(scaled, scheme.format, generator), shape)


def _torch_values(codes_RC: Tensor, scales_AB: Tensor, scheme: Scheme) -> Tensor:
    """bfloat16 [R, C] of codes that are finite wherever their scale is."""
    values = decode_finite(codes_RC, scheme.format)
    if scales_AB.numel() == 1:
        return values.mul_(scales_AB.view(()))
    tiles, shape = _tiles(values, scheme.grain)
    return _untile(tiles * scales_AB.to(values.dtype)[:, None, :, None], shape)


def _native_amax(x_RC: Tensor, grain: Grain) -> Tensor:
    return narrow.tile_amax(x_RC, (grain.rows, grain.cols))


def _native_codes(x_RC: Tensor, wide_AB: Tensor, scheme: Scheme, generator: torch.Generator | None) -> Tensor:
    noise_RC = None
    if generator is not None:
        noise_RC = torch.rand(x_RC.shape, generator=generator, device=x_RC.device)
    scale_AB = wide_AB.to(x_RC.dtype).float().contiguous()
    grain = scheme.grain
    codes = narrow.encode_tiles(x_RC, scale_AB, (grain.rows, grain.cols), scheme.format.name, noise_RC)
    return codes.view(scheme.format.dtype)


def _native_values(codes_RC: Tensor, scales_AB: Tensor, scheme: Scheme) -> Tensor:
    scales_AB, grain = scales_AB.to(torch.bfloat16).float().contiguous(), scheme.grain
    return narrow.decode_tiles(codes_RC, scales_AB, (grain.rows, grain.cols), scheme.format.name)


def _flat(x_RC: Tensor) -> bool:
    return x_RC.is_contiguous() and x_RC.numel() > 0


def _codes_fit(x_RC: Tensor, wide_AB: Tensor, scheme: Scheme, generator: torch.Generator | None) -> bool:
    """Draws come in the order of tiles, which is that of numbers where no tile is ragged."""
    grain, (rows, cols) = scheme.grain, x_RC.shape
    ragged = rows % (grain.rows or rows or 1) or cols % (grain.cols or cols or 1)
    known = scheme.exact and scheme.format.name in narrow.FORMATS
    return known and native_fits(x_RC, wide_AB) and _flat(x_RC) and not (generator is not None and ragged)


def _values_fit(codes_RC: Tensor, scales_AB: Tensor, scheme: Scheme) -> bool:
    return scheme.format.name in narrow.FORMATS and native_fits(scales_AB) and _flat(codes_RC)


_tile_amax = register(
    "tile_amax", reference=_torch_amax, native=_native_amax, fits=lambda x, grain: native_fits(x) and _flat(x)
)
_coded = register("encode_tiles", reference=_torch_codes, native=_native_codes, fits=_codes_fit)
_decoded = register("decode_tiles", reference=_torch_values, native=_native_values, fits=_values_fit)
