"""Casts between wide and narrow numbers that lose nothing silently.

torch's own cast to e4m3 saturates Inf to 448, its cast to e5m2 turns 61440 and more into Inf, and what it does differs
between versions and devices. Here every cast clamps first, Inf and NaN survive or raise, and decoding goes through a
table (measured 4.5 times as fast as torch's cast from e4m3 to bf16 on a Zen 4 core).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from bessemer.core.errors import NonFinite, RequestError
from bessemer.precision.formats import E4M3, E5M2, E8M0, INT8, Format, values

__all__ = [
    "amax",
    "clamped_codes",
    "decode",
    "decode_finite",
    "encode",
    "keyed_generator",
    "on_grid",
    "pack",
    "round_up",
    "unpack",
]

_EXPONENT = 0x7F800000  # the exponent field of a float32


def keyed_generator(seed: int, *key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on seed and key only (a layer's name, a step, a micro-batch), on any layout."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def amax(x: Tensor) -> Tensor:
    """max |x|, float32 without dimensions; NaN if any element is NaN, Inf if one is infinite, 0 of nothing."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if x.dtype == torch.bfloat16:  # as integers without the sign: the same order, NaN above Inf, and faster
        return (x.view(torch.int16) & 0x7FFF).amax(-1).amax().view(torch.bfloat16).float()
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def round_up(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for normal positive float32 x up to 2^127; NaN stays."""
    bits = (x.view(torch.int32) + 0x7FFFFF) & _EXPONENT
    return torch.where(x.isnan(), x, bits.view(torch.float32).clamp_max(2.0**127))


def on_grid(x: Tensor, fmt: Format, generator: torch.Generator | None = None) -> Tensor:
    """float32 x clamped and rounded to values of a signed float format: to nearest, ties to even, or, with a
    generator, up with the probability that keeps the mean (values beyond `max` saturate). NaN stays."""
    size = x.clamp(-fmt.max, fmt.max).abs()
    power = (size.view(torch.int32) & _EXPONENT).view(torch.float32)
    step = power.clamp(min=2.0**fmt.min_exponent) * 2.0**-fmt.mantissa_bits
    steps = size / step  # exact: step is a power of two
    if generator is None:
        whole = steps.round()
    else:
        whole = steps.floor()
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        whole = whole + (noise < steps - whole)
    return (whole * step).copysign(x)


def _on_grid_bf16(x: Tensor, fmt: Format) -> Tensor:
    """`on_grid` to nearest of bfloat16 x for up to 7 exponent and 5 mantissa bits: x + c - c, where c is 1.5 * 2^7
    steps, beside which bfloat16 keeps whole steps. Half the memory traffic of float32, and fewer operations."""
    x = x.clamp(-fmt.max, fmt.max)
    lowest = (fmt.min_exponent + 127) << 7
    bits = (x.view(torch.int16) & 0x7F80).clamp_(min=lowest)
    large = bits.add_((7 - fmt.mantissa_bits << 7) + 0x40).view(torch.bfloat16)
    return (x + large).sub_(large)


def clamped_codes(x: Tensor, fmt: Format, generator: torch.Generator | None = None) -> Tensor:
    """Codes of float32 or bfloat16 x, saturating at +-max, Inf too: only for callers that look at amax first.

    e4m3, e5m2 and formats kept as values keep NaN; codes of NaN in e2m1 and int8 mean nothing, so such a caller spoils
    their scale."""
    if fmt is INT8:
        if generator is None:
            return x.clamp(-fmt.max, fmt.max).round().to(torch.int8)
        low = x.float().clamp(-fmt.max, fmt.max)
        whole = low.floor()
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        return (whole + (noise < low - whole)).to(torch.int8)
    if fmt in (E4M3, E5M2):
        if generator is not None:
            x = on_grid(x.float(), fmt, generator)
        return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
    if fmt is E8M0:
        raise ValueError(f"{fmt.name} has no signed codes")
    if fmt.dtype == x.dtype == torch.bfloat16 and generator is None:
        if fmt.exponent_bits == 8 and fmt.mantissa_bits == 7:
            return x.clamp(-fmt.max, fmt.max)
        if fmt.exponent_bits < 8 and fmt.mantissa_bits < 6:
            return _on_grid_bf16(x, fmt)
    grid = on_grid(x.float(), fmt, generator)
    if fmt.dtype == torch.bfloat16:
        return grid.to(fmt.dtype)
    size = grid.abs()
    normal = (size.view(torch.int32) >> 22) - (126 << 1)  # the two exponent bits and the mantissa bit
    code = torch.where(size >= 1, normal, (size * 2).to(torch.int32))
    return (code | (grid.signbit().to(torch.int32) << 3)).to(torch.uint8)


def encode(x: Tensor, fmt: Format, *, generator: torch.Generator | None = None) -> Tensor:
    """Codes of x without a scale, nearest (ties to even) or stochastic; finite values saturate at +-max.

    x float32, bfloat16 or float16. NaN stays NaN; Inf becomes NaN in e4m3 and stays Inf in e5m2; e2m1 and int8 have
    neither and raise NonFinite. e8m0 rounds up to the next power of two and wants positive x.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RequestError(f"can't quantise {x.dtype}", code="precision-dtype", fix="x.float()")
    if x.dtype == torch.float16:
        x = x.float()
    if fmt is E8M0:
        wide = x.float().clamp(2.0**-126)
        return (round_up(wide).view(torch.int32) >> 23).to(torch.uint8).view(fmt.dtype)
    if not fmt.has_nan:
        seen = amax(x)
        if not bool(seen.isfinite()):
            raise NonFinite(f"amax is {seen.item()}, which {fmt.name} can't hold", code="non-finite-cast")
        return clamped_codes(x, fmt, generator)
    if fmt.has_inf:
        codes = clamped_codes(x, fmt, generator)
        return torch.where(x.isinf(), x.to(fmt.dtype), codes)
    return clamped_codes(torch.where(x.isinf(), torch.nan, x), fmt, generator)


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32, scale: Tensor | None = None) -> Tensor:
    """Values of the codes times one scale without dimensions, in `dtype`: one look-up an element, in memory of its own.

    Exact in bfloat16 for every format here but e8m0's 2^-127 neighbours, if the scale is a power of two."""
    if fmt.dtype == torch.bfloat16:
        return codes.to(dtype, copy=True) if scale is None else (codes.float() * scale).to(dtype)
    table = values(fmt, codes.device)
    table = (table if scale is None else table * scale).to(dtype)
    index = codes.reshape(-1).view(torch.uint8).to(torch.int32)
    return table.index_select(0, index).view(codes.shape)


def decode_finite(codes: Tensor, fmt: Format) -> Tensor:
    """bfloat16 values of codes among which neither Inf nor NaN is (they'd come out finite): moves the bits to their
    place and mends the exponent's bias, measured 2.2 times as fast as `decode` on a Zen 4 core. Subnormal codes pass
    through subnormal bfloat16 numbers, so they'd be lost under `torch.set_flush_denormal(True)`, which nothing here
    sets."""
    if fmt is INT8:
        return codes.to(torch.bfloat16)
    if fmt not in (E4M3, E5M2):
        return decode(codes, fmt, torch.bfloat16)
    shift = 7 - fmt.mantissa_bits
    bits = codes.view(torch.int8).to(torch.int16).mul_(1 << shift)
    bits &= -0x8000 + (0x7F << shift)  # the sign, extended into the bits between, stays in the highest only
    return bits.view(torch.bfloat16).mul_(2.0 ** (127 - fmt.bias))


def pack(codes: Tensor) -> Tensor:
    """Two e2m1 codes a byte, the first in the low half: uint8 [..., C] -> [..., C/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """What `pack` was given."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
