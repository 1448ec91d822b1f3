"""Narrow number formats: what each code means.

Sources: OCP 8-bit floating point specification 1.0 (e4m3, e5m2), OCP microscaling formats specification 1.0 (e2m1,
e8m0). int8 is symmetric (-128 is not used); its bias makes its steps 1. Formats without hardware (`float_format`) are
there to try what a number of bits would do: their values are kept as bfloat16 numbers instead of codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["E2M1", "E4M3", "E5M2", "E8M0", "FORMATS", "INT8", "Format", "float_format", "value", "values"]


@dataclass(frozen=True)
class Format:
    """`dtype` stores one code an element; e2m1 is kept one code a byte here and packed by `casts.pack` (two a byte).
    bfloat16: no codes, the values themselves.

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


@cache
def float_format(exponent_bits: int, mantissa_bits: int) -> Format:
    """The signed float format eXmY of 1 to 8 exponent and 0 to 7 mantissa bits (ValueError beyond), with subnormals
    and, as in e2m1, every code a finite number. The bias is 2^(X-1) - 1, the IEEE 754 one, for which e2m1 is OCP's.
    e1mY is the symmetric integer of Y + 2 bits: evenly spaced. e8 ends where bfloat16 does, so e8m7 is bfloat16."""
    if not (1 <= exponent_bits <= 8 and 0 <= mantissa_bits <= 7):
        raise ValueError(f"e{exponent_bits}m{mantissa_bits}: exponent bits are 1 to 8, mantissa bits 0 to 7")
    bias = 2 ** (exponent_bits - 1) - 1
    largest = math.ldexp(2 - 2.0**-mantissa_bits, min(2**exponent_bits - 1 - bias, 127))
    bits, name = 1 + exponent_bits + mantissa_bits, f"emulated-e{exponent_bits}m{mantissa_bits}"
    return Format(name, bits, exponent_bits, mantissa_bits, bias, largest, torch.bfloat16, has_nan=False)


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
