"""Numbers narrower on their way between ranks than where they are computed: what is sent, and what it stands for.

    packed = coded_rows(rows, ROWS)                        uint8 [R, C + ceil(C / 128)]: codes, then their scales
    decoded_rows(packed, C, ROWS, torch.bfloat16)          [R, C]
    to_odd(weights)                                        bfloat16 that any FP8 recipe rounds as it would float32

Legend: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer.precision import Grain, Scaled, Scheme, quantise
from bessemer.precision.formats import E4M3, E8M0

__all__ = ["ROWS", "coded_rows", "decoded_rows", "to_odd"]

ROWS = Scheme(E4M3, Grain(1, 128), E8M0)
"""Of activations and gradients on their way to experts (DeepSeek-V3, arXiv 2412.19437, section 3.2.2): a scale for each
128 of a row, a power of two, so that a block of finite numbers never saturates and decoding is exact."""


def coded_rows(x_RC: Tensor, scheme: Scheme) -> Tensor:
    """uint8 [R, C + ceil(C / the scheme's columns)]: each row's codes of a byte, then its scales of a byte. x float32
    or bfloat16. A block with Inf or NaN comes out as NaN."""
    made = quantise(x_RC, scheme)
    return torch.cat((made.codes.view(torch.uint8), made.scale.view(torch.uint8)), 1)


def decoded_rows(packed: Tensor, columns: int, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """[R, columns] in `dtype`, bfloat16 or float32: exactly what the codes stand for."""
    codes, scales = packed[:, :columns], packed[:, columns:]
    unknown = torch.full((), torch.nan, device=packed.device)  # the amax stays where the row came from
    made = Scaled(codes.view(E4M3.dtype), scales.view(E8M0.dtype), None, unknown, scheme)
    return made.dequantise(dtype)


def to_odd(x: Tensor) -> Tensor:
    """bfloat16 of float32 x, rounded to odd: what isn't exact is cut, and its last bit set. So no number lands on, or
    crosses, one with fewer bits, and rounding it on to 6 bits or fewer gives what rounding x itself does (Boldo and
    Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Trans. Comput. 57, 2008). NaN and Inf stay."""
    bits = x.view(torch.int32)
    return ((bits >> 16) | ((bits & 0xFFFF) != 0)).to(torch.int16).view(torch.bfloat16)
