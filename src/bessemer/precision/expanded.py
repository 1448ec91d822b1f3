"""FP8 for numbers of many magnitudes: e4m3 of a power of them, with a range for each group of 128.

The dynamic-range expansion of COAT (Xi et al. 2024, arXiv 2410.19313) for the states of an optimizer: sign(x) |x|^k is
stored, with k such that the group's range fills the format's. Here a group keeps the two ends of its range, `top` and
`floor`, as bfloat16 numbers, and

    k = log2(448 / 2^-6) / log2(top / floor),    x = sign(code) top (|value of code| / 448)^(1/k),  as a bfloat16 number

Different from the paper on purpose: the range is that of e4m3's normal numbers, so that all steps are of one relative
size; what isn't 0 never becomes 0; and `encode(*decode(...))` gives the same bits back, since the ends of a range are
numbers of the group. So decoded values, bfloat16, say all that a group holds.
"""

# N elements, G groups of E = 128 elements, the last perhaps shorter; 2: top and floor

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from bessemer.core.rank_memory import MOMENT_GROUP
from bessemer.precision.formats import E4M3, value

__all__ = ["decode_expanded", "empty_ranges", "encode_expanded", "num_groups", "round_by_chance"]

_TOP, _LOW, _NAN = 126, 8, 127
"""Codes of 448, of the smallest normal number and of NaN."""
_LOWEST = 2.0**E4M3.min_exponent
_OCTAVES = math.log2(E4M3.max / _LOWEST)
_NARROWEST, _WIDEST = 2.0**2, 2.0**32
"""Bounds of top / floor. Under the first codes would lie closer than bfloat16 numbers; beyond the second, which as a
second moment means gradients 65536 times as small as the group's largest, what is smaller is raised to the floor."""
_LEAST_TOP = 2.0**-88
"""So that every floor is a normal bfloat16 number."""
_LARGEST = float(torch.finfo(torch.bfloat16).max)


def num_groups(elements: int) -> int:
    """Ranges that so many elements need."""
    return -(-elements // MOMENT_GROUP)


def empty_ranges(groups: int, device: torch.device) -> Tensor:
    """bfloat16 [G, 2]: ranges of groups of zeros."""
    ends = torch.tensor([_LEAST_TOP, _LEAST_TOP / _NARROWEST], dtype=torch.bfloat16, device=device)
    return ends.repeat(groups, 1)


def round_by_chance(x: Tensor, noise: Tensor) -> Tensor:
    """float32 x as bfloat16, up or down so that the mean is x where `noise` (int32, in [0, 65536)) is even; Inf and NaN
    stay."""
    bits = (x.view(torch.int32) + noise) & -0x10000
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def encode_expanded(x_N: Tensor, noise_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(e4m3 codes [N], bfloat16 ranges [G, 2]) of float32 [N].

    Rounds to the nearest code, or with `noise_N` (int32, in [0, 65536)) to one of the two around x, so that the mean is
    x. A number that isn't finite becomes NaN. 0 stays 0 and nothing else becomes 0.
    """
    x_GE = _grouped(x_N)
    size_GE = x_GE.abs()
    lost_GE = ~(size_GE < math.inf)
    size_GE.masked_fill_(lost_GE, 0.0)
    noise_GE = None if noise_N is None else _grouped(noise_N)
    most_G1, least_G1, range_G2 = _ranges(size_GE, noise_GE)
    ends = _ends(range_G2)
    top_G1, spread_G1 = ends
    grown_GE = (size_GE / top_G1).log2_().div_(spread_G1).exp2_().mul_(E4M3.max)
    code_GE = grown_GE.clamp_(max=E4M3.max).to(E4M3.dtype).view(torch.uint8)
    if noise_GE is not None:
        code_GE = _by_chance(size_GE, code_GE, noise_GE, ends)
    # the ends of the range must be found again among the decoded numbers
    code_GE.masked_fill_(size_GE <= least_G1, _LOW).masked_fill_(size_GE >= most_G1, _TOP)
    code_GE.masked_fill_(size_GE == 0, 0).masked_fill_(lost_GE, _NAN)
    code_GE |= (x_GE < 0).view(torch.uint8) << 7
    return code_GE.view(-1)[: x_N.numel()].view(E4M3.dtype), range_G2


def decode_expanded(code_N: Tensor, range_G2: Tensor) -> Tensor:
    """float32 [N], all of them bfloat16 numbers."""
    code_GE = _grouped(code_N.view(torch.uint8))
    size_GE = _sizes(code_GE & 0x7F, _ends(range_G2))
    sign_GE = (code_GE & 0x80).to(torch.int32) << 24
    return (size_GE.view(torch.int32) | sign_GE).view(torch.float32).view(-1)[: code_N.numel()]


def _grouped(x_N: Tensor) -> Tensor:
    missing = -x_N.numel() % MOMENT_GROUP
    return (pad(x_N, (0, missing)) if missing else x_N).view(-1, MOMENT_GROUP)


def _ranges(size_GE: Tensor, noise_GE: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(what gets the top, what at most gets the floor, both [G, 1]; the range [G, 2]). An end is rounded by chance like
    the element that it is, whose code is then certain."""
    most_G1, at_most = size_GE.max(1, keepdim=True)
    least_G1, at_least = size_GE.masked_fill(size_GE == 0, math.inf).min(1, keepdim=True)
    most_G1 = most_G1.clamp(_LEAST_TOP, _LARGEST)
    least_G1 = torch.minimum(least_G1, most_G1)
    if noise_GE is None:
        top_G1, low_G1 = most_G1.to(torch.bfloat16).float(), least_G1.to(torch.bfloat16).float()
    else:
        top_G1 = round_by_chance(most_G1, noise_GE.gather(1, at_most)).float()
        low_G1 = round_by_chance(least_G1, noise_GE.gather(1, at_least)).float()
    top_G1 = top_G1.clamp(max=_LARGEST)
    widest_G1, narrowest_G1 = top_G1 / _WIDEST, top_G1 / _NARROWEST
    floor_G1 = torch.minimum(torch.maximum(low_G1, widest_G1), narrowest_G1)
    # a range that was widened begins below all elements
    least_G1 = torch.where(low_G1 > narrowest_G1, -1.0, torch.maximum(least_G1, floor_G1))
    return most_G1, least_G1, torch.cat((top_G1, floor_G1), 1).to(torch.bfloat16)


def _ends(range_G2: Tensor) -> tuple[Tensor, Tensor]:
    """(top, 1/k), float32 [G, 1]."""
    top_G1, floor_G1 = range_G2[:, :1].float(), range_G2[:, 1:].float()
    return top_G1, torch.log2(top_G1 / floor_G1) / _OCTAVES


@cache
def _powers(device: torch.device) -> Tensor:
    """float32 [128]: log2(value / 448) of each code without sign; -Inf of 0."""
    values = [value(E4M3, code) / E4M3.max for code in range(_NAN)]
    return torch.tensor([math.log2(v) if v else -math.inf for v in values] + [math.nan], device=device)


def _sizes(code_GE: Tensor, ends: tuple[Tensor, Tensor]) -> Tensor:
    """|x|, float32, of uint8 codes without sign. Rounding makes the floor of its code exactly."""
    top_G1, spread_G1 = ends
    powers_GE = _powers(code_GE.device).index_select(0, code_GE.view(-1).to(torch.int32)).view(code_GE.shape)
    return powers_GE.mul_(spread_G1).exp2_().mul_(top_G1).to(torch.bfloat16).float()


def _by_chance(size_GE: Tensor, code_GE: Tensor, noise_GE: Tensor, ends: tuple[Tensor, Tensor]) -> Tensor:
    """The nearest codes, or by chance those on the other side of `size_GE`."""
    near_GE = _sizes(code_GE, ends)
    up_GE = (size_GE > near_GE).view(torch.uint8)
    other_GE = (code_GE + (up_GE << 1) - 1).clamp_(_LOW, _TOP)
    chance_GE = (size_GE - near_GE).div_(_sizes(other_GE, ends).sub_(near_GE))  # 0/0 where there is no other: none
    return torch.where(noise_GE < chance_GE.mul_(0x10000), other_GE, code_GE)
