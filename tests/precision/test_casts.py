"""Formats and casts against exact arithmetic: every code, every midpoint and its neighbours."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch

from bessemer.core.errors import NonFinite, RequestError
from bessemer.precision import casts
from bessemer.precision.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, INT8, Format, value, values

FLOATS = (E4M3, E5M2, E2M1)
SPELT_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _positive(fmt: Format) -> list[Fraction]:
    """Exact finite values of the codes without sign, in the order of the codes; from torch's decoder or spelt out,
    not from `formats`."""
    if fmt is E2M1:
        return [Fraction(v) for v in SPELT_E2M1]
    wide = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).double().tolist()
    return [Fraction(v) for v in wide if math.isfinite(v)]


def _nearest(x: Fraction, grid: list[Fraction]) -> int:
    """Code of the nearest value of x >= 0, ties to the even code, beyond the last value the last."""
    above = bisect_left(grid, x)
    if above == len(grid):
        return above - 1
    if above == 0 or grid[above] == x:
        return above
    low, high = x - grid[above - 1], grid[above] - x
    if low == high:
        return above if above % 2 == 0 else above - 1
    return above if high < low else above - 1


def _probes(fmt: Format) -> list[float]:
    """Every value, every midpoint, the float32 numbers next to each, and what lies beyond the ends."""
    grid = _positive(fmt)
    exact = [float(v) for v in grid] + [float((a + b) / 2) for a, b in itertools.pairwise(grid)]
    base = torch.tensor([*exact, fmt.max * 1.0357, fmt.max * 1.08, fmt.max * 4, 1e30, 3e38], dtype=torch.float32)
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    return torch.cat((base, base.nextafter(up), base.nextafter(down), base / 1024)).tolist()


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_and_midpoint_rounds_as_exact_arithmetic_says(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.tensor(_probes(fmt), dtype=torch.float32).to(dtype)
    x = x[x.isfinite()]
    want = [_nearest(Fraction(v), _positive(fmt)) for v in x.double().tolist()]
    sign = 1 << (fmt.bits - 1)
    assert casts.encode(x, fmt).view(torch.uint8).tolist() == want
    assert casts.encode(-x, fmt).view(torch.uint8).tolist() == [w | sign for w in want]
    grid = casts.on_grid(x.float(), fmt)
    assert torch.equal(grid, casts.decode(casts.encode(x, fmt), fmt))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_codes_decode_as_torch_or_the_definition_says(fmt: Format) -> None:
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    want = {
        E2M1: lambda: torch.tensor([*SPELT_E2M1, *(-v for v in SPELT_E2M1)]),
        INT8: lambda: codes.view(torch.int8).float(),
    }.get(fmt, lambda: codes.view(fmt.dtype).float())()
    stored = codes.view(fmt.dtype)
    assert torch.equal(casts.decode(stored, fmt).nan_to_num(nan=-7.5, posinf=1e38), want.nan_to_num(-7.5, 1e38))
    assert torch.equal(values(fmt).isnan(), want.isnan())
    assert values(fmt)[values(fmt).isfinite()].max() == fmt.max
    if fmt is not E8M0:
        low = casts.decode(stored, fmt, torch.bfloat16).float()
        assert torch.equal(low.nan_to_num(-7.5, 1e38), want.bfloat16().float().nan_to_num(-7.5, 1e38))
        assert min(abs(v) for v in want.tolist() if v) == fmt.smallest


@pytest.mark.parametrize("fmt", [*FLOATS, INT8], ids=lambda f: f.name)
def test_every_code_comes_back(fmt: Format) -> None:
    finite = [c for c in range(2**fmt.bits) if math.isfinite(value(fmt, c)) and abs(value(fmt, c)) <= fmt.max]
    codes = torch.tensor(finite, dtype=torch.uint8)
    quick = casts.decode_finite(codes.view(fmt.dtype), fmt)
    slow = casts.decode(codes.view(fmt.dtype), fmt, torch.bfloat16)
    assert torch.equal(quick.view(torch.int16), slow.view(torch.int16))
    again = casts.encode(casts.decode(codes.view(fmt.dtype), fmt), fmt)
    assert torch.equal(again.view(torch.uint8), codes)


def test_infinity_and_nan_survive_a_cast() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert casts.decode(casts.encode(x, E4M3), E4M3)[:3].isnan().all()
    wide = casts.decode(casts.encode(x, E5M2), E5M2)
    assert wide[:2].tolist() == [torch.inf, -torch.inf] and wide[2].isnan() and wide[3] == 1
    for fmt in (E2M1, INT8):
        for bad in (torch.inf, torch.nan):
            with pytest.raises(NonFinite, match="can't hold"):
                casts.encode(torch.tensor([1.0, bad]), fmt)


def test_what_torch_alone_would_do() -> None:
    """Counter-examples, and the reason to clamp: if torch changes this, the module's text must too."""
    assert torch.tensor(torch.inf).to(torch.float8_e4m3fn).float() == 448  # Inf is lost
    assert torch.tensor(61440.0).to(torch.float8_e5m2).float() == torch.inf  # and here it is made
    assert casts.decode(casts.encode(torch.tensor([61440.0]), E5M2), E5M2) == 57344


def test_unknown_types_are_refused() -> None:
    with pytest.raises(RequestError, match="float64"):
        casts.encode(torch.zeros(2, dtype=torch.float64), E4M3)


def test_int8_rounds_to_even_and_is_symmetric() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 126.5, 127.4, 300, -300, 3e38])
    assert casts.encode(x, INT8).tolist() == [0, 2, 2, 0, 126, 127, 127, -127, 127]


def test_scales_round_up_to_powers_of_two() -> None:
    for exponent in range(-126, 127):
        power = 2.0**exponent
        x = torch.tensor([power, power * (1 + 2.0**-23), power * 1.5, power * 1.9999998])
        want = [power, 2 * power, 2 * power, 2 * power]
        assert casts.round_up(x).tolist() == want
        assert casts.decode(casts.encode(x, E8M0), E8M0).tolist() == want
    assert casts.decode(casts.encode(torch.tensor([torch.nan]), E8M0), E8M0).isnan()


@pytest.mark.parametrize("fmt", [*FLOATS, INT8], ids=lambda f: f.name)
def test_stochastic_rounding_keeps_the_mean_and_only_takes_neighbours(fmt: Format) -> None:
    draws = 20000
    step = 1.0 if fmt is INT8 else 2.0**-fmt.mantissa_bits
    for x, low in ((1 + step * 0.3, 1.0), (-1 - step * 0.75, -1 - step), (fmt.smallest * 0.2, 0.0)):
        width = fmt.smallest if abs(x) < fmt.smallest else step
        made = casts.decode(
            casts.encode(torch.full((draws,), x), fmt, generator=casts.keyed_generator(1, fmt.name)), fmt
        )
        assert set(made.tolist()) == {low, low + width}
        up = (x - low) / width
        assert abs(float((made == low + width).float().mean()) - up) < 4 * (up * (1 - up) / draws) ** 0.5
    grid = torch.tensor([v for v in values(fmt).tolist() if math.isfinite(v) and abs(v) <= fmt.max])
    kept = casts.decode(casts.encode(grid, fmt, generator=casts.keyed_generator(2)), fmt)
    assert torch.equal(kept, grid)
    beyond = casts.encode(torch.full((1000,), fmt.max * 3), fmt, generator=casts.keyed_generator(3))
    assert (casts.decode(beyond, fmt) == fmt.max).all()


def test_a_key_gives_the_same_draws_and_another_key_others() -> None:
    x = torch.full((256,), 1.06)
    made = [
        casts.encode(x, E4M3, generator=casts.keyed_generator(7, "layers.0", step)).view(torch.uint8).tolist()
        for step in (3, 3, 4)
    ]
    assert made[0] == made[1] != made[2]


def test_packing_two_a_byte() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    assert casts.pack(codes).shape == (3, 16) and torch.equal(casts.unpack(casts.pack(codes)), codes)
    assert casts.pack(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]
