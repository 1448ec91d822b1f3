"""Narrow number formats: what each code means.

Sources: OCP 8-bit floating point specification 1.0 (e4m3, e5m2), OCP microscaling formats specification 1.0 (e2m1,
e8m0). int8 is symmetric (-128 is not used); its bias makes its steps 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["E2M1", "E4M3", "E5M2", "E8M0", "FORMATS", "INT8", "Format", "value", "values"]


@dataclass(frozen=True)
class Format:
    """`dtype` stores one code an element; e2m1 is kept one code a byte here and packed by `casts.pack` (two a byte).

    `max` is the largest finite value. e4m3 has NaN but no Inf, e5m2 both, e2m1 and int8 neither, e8m0 only NaN."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    dtype: torch.dtype
    has_nan: bool
    has_inf: bool = False

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; below it the steps stay the same (subnormals)."""
        return 1 - self.bias

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)


E4M3 = Format("e4m3", 8, 4, 3, 7, 448.0, torch.float8_e4m3fn, True)
E5M2 = Format("e5m2", 8, 5, 2, 15, 57344.0, torch.float8_e5m2, True, True)
E2M1 = Format("e2m1", 4, 2, 1, 1, 6.0, torch.uint8, False)
E8M0 = Format("e8m0", 8, 8, 0, 127, 2.0**127, torch.float8_e8m0fnu, True)
INT8 = Format("int8", 8, 0, 7, -6, 127.0, torch.int8, False)
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1, E8M0, INT8)}


def value(fmt: Format, code: int) -> float:
    """What the code (0 to 2^bits - 1) stands for, by the definition of the format."""
    if fmt is E8M0:
        return float("nan") if code == 255 else math.ldexp(1.0, code - fmt.bias)
    if fmt is INT8:
        return float(code - 256 if code > 127 else code)
    sign = -1.0 if code >> (fmt.bits - 1) else 1.0
    exponent = (code >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    mantissa = code & (2**fmt.mantissa_bits - 1)
    if fmt.has_inf and exponent == 2**fmt.exponent_bits - 1:
        return float("nan") if mantissa else sign * float("inf")
    if fmt.has_nan and not fmt.has_inf and code & (2 ** (fmt.bits - 1) - 1) == 2 ** (fmt.bits - 1) - 1:
        return float("nan")
    fraction = mantissa / 2**fmt.mantissa_bits
    if exponent == 0:
        return sign * math.ldexp(fraction, fmt.min_exponent)
    return sign * math.ldexp(1 + fraction, exponent - fmt.bias)


@cache
def values(fmt: Format, device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008 (a constant)
    """float32 [2^bits]: the value of every code."""
    return torch.tensor([value(fmt, c) for c in range(2**fmt.bits)], dtype=torch.float32, device=device)
