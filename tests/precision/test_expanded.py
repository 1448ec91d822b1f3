"""FP8 with a range for each group: what encoding loses, what it never loses, and that results encode to themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bessemer.precision.expanded import (
    decode_expanded,
    empty_ranges,
    encode_expanded,
    num_groups,
    round_by_chance,
)

GROUP = 128
OCTAVES = math.log2(448 / 2**-6)
ROUNDED = 1 + 2**-8
"""Decoded numbers and the ends of a range are bfloat16 numbers."""


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 1 << 16, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def ratio(top: float, floor: float) -> float:
    """By what a number may be off that is rounded to the nearest code: half a step of e4m3, to the power of 1/k."""
    return float((1 + 2**-4) ** (math.log2(top / floor) / OCTAVES) * ROUNDED)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def spread_groups(draw: st.DrawFn) -> list[float]:
    """Some groups, each around a size of its own, some with zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        centre = draw(st.integers(-149, 127))
        octaves = draw(st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.9, 2.0, 2.1, 5.0, 31.9, 32.0, 40.0, 200.0]))
        x = torch.rand(draw(st.integers(1, GROUP)), generator=generator, dtype=torch.float64)
        x = torch.exp2(centre - octaves * x).clamp(max=torch.finfo(torch.float32).max)
        x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = 0
        groups += torch.nn.functional.pad(x, (0, GROUP - len(x))).tolist()
    return groups[: len(groups) - draw(st.integers(0, GROUP - 1))]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(numbers=spread_groups() | st.lists(FLOATS, max_size=300), seed=st.none() | st.integers(0, 2**31))
@example(numbers=[2.0**-149], seed=None)
@example(numbers=[2.0**-88, 2.0**-120, 2.0**-126], seed=3)
@example(numbers=[torch.finfo(torch.float32).max, -1.0, 1e-30], seed=1)
@example(numbers=[1.0, 0.25], seed=2)
def test_what_was_decoded_encodes_to_the_same_bits(numbers: list[float], seed: int | None) -> None:
    """However it was rounded: codes and ranges of all groups that aren't zeros, and so the values; all of them
    bfloat16 numbers. 0 stays 0, and nothing else becomes 0 or changes its sign."""
    x = torch.tensor(numbers, dtype=torch.float32)
    codes, ranges = encode_expanded(x, None if seed is None else noise(len(x), seed))
    values = decode_expanded(codes, ranges)
    assert torch.equal(values, values.to(torch.bfloat16).float())
    assert torch.equal(values.sign(), x.sign())
    again, found = encode_expanded(values)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    some = torch.nn.functional.pad(x, (0, -len(x) % GROUP)).view(-1, GROUP).any(1)
    assert torch.equal(found[some], ranges[some])
    assert torch.equal(decode_expanded(again, found), values)


def test_the_ends_of_a_range_are_found_again_however_they_were_rounded() -> None:
    """A largest number that is rounded up by almost a bfloat16 step lies nearer to the code below."""
    x = torch.tensor([1 + 2**-20, 0.25, 0.3])
    codes, ranges = encode_expanded(x, torch.tensor([0xFFFF, 0, 0], dtype=torch.int32))
    assert ranges.tolist() == [[1 + 2**-7, 0.25]]
    assert decode_expanded(codes, ranges)[:2].tolist() == [1 + 2**-7, 0.25]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(spread_groups())
def test_the_error_is_bounded_by_the_groups_own_range(numbers: list[float]) -> None:
    """Of everything above 2^-32 of its group's largest; what is smaller is raised to that. 2^-88 is the least size
    that a group's largest counts as."""
    x = torch.tensor(numbers, dtype=torch.float32)
    codes, ranges = encode_expanded(x)
    values = decode_expanded(codes, ranges).double()
    for at, (top, floor) in enumerate(ranges.double().tolist()):
        assert 4 <= top / floor <= 2**32
        group = slice(at * GROUP, (at + 1) * GROUP)
        for given_x, value in zip(x[group].double().tolist(), values[group].tolist(), strict=True):
            if abs(given_x) >= floor:
                assert 1 / ratio(top, floor) <= value / given_x <= ratio(top, floor), (given_x, value, top, floor)
            elif given_x:
                assert floor <= abs(value) <= floor * ratio(top, floor)


def test_decoding_is_the_documented_formula() -> None:
    """Every code, under a few ranges, against float64."""
    codes = torch.arange(256, dtype=torch.uint8)
    for top, floor in ((1.0, 0.25), (3.0, 2.0**-12), (2.0**-80, 2.0**-112)):
        ends = torch.tensor([[top, floor]] * 2, dtype=torch.bfloat16)
        k = OCTAVES / math.log2(top / floor)
        wide = codes.view(torch.float8_e4m3fn).double()
        wanted = wide.sign() * top * (wide.abs() / 448) ** (1 / k)
        found = decode_expanded(codes.view(torch.float8_e4m3fn), ends).double()
        finite = ~wide.isnan()
        assert torch.equal(found.isnan(), wide.isnan())
        torch.testing.assert_close(found[finite], wanted[finite], rtol=2**-8, atol=0)


def test_rounding_by_chance_keeps_the_mean() -> None:
    """Of numbers all over a range, its ends among them, over 20,000 draws each: within 5 standard errors, where the
    nearest codes are off by up to a tenth."""
    x = torch.exp2(-torch.linspace(0, 12.3, GROUP)).float()
    many = x.repeat(20_000)
    codes, ranges = encode_expanded(many, noise(len(many), 7))
    drawn = decode_expanded(codes, ranges).view(-1, GROUP).double()
    error = (drawn.mean(0) - x.double()).abs() / (drawn.std(0) / 20_000**0.5).clamp(1e-4 * x)
    assert error.max() < 5
    nearest = decode_expanded(*encode_expanded(x)).double()
    assert ((nearest - x.double()).abs() / x.double()).max() > 0.02


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_becomes_nan_and_spoils_nothing_else(bad: float) -> None:
    x = torch.linspace(1, 2, 2 * GROUP)
    clean = decode_expanded(*encode_expanded(x))
    x[3] = bad
    values = decode_expanded(*encode_expanded(x))
    assert values[3].isnan()
    assert torch.equal(values[4:], clean[4:])


def test_rounding_to_bfloat16_by_chance() -> None:
    x = torch.tensor([1.0, 1 + 2**-9, 1 + 2**-8, -3.3, 1e-30, 0.0]).repeat(40_000)
    drawn = round_by_chance(x, noise(len(x), 1)).double().view(-1, 6)
    down = x[:6].view(torch.int32).bitwise_and(-0x10000).view(torch.float32).double()
    assert (drawn.mean(0) - x[:6].double()).abs().max() < 2e-4
    assert ((drawn == down).double().mean(0)[[0, 5]] == 1).all()
    ends = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(round_by_chance(ends, torch.full((3,), 0xFFFF, dtype=torch.int32)).float()[:2], ends[:2])
    assert round_by_chance(ends, torch.full((3,), 0xFFFF, dtype=torch.int32))[2].isnan()


def test_nothing_and_zeros() -> None:
    assert [num_groups(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
    codes, ranges = encode_expanded(torch.zeros(0))
    assert codes.shape == (0,) and ranges.shape == (0, 2)
    codes, ranges = encode_expanded(torch.zeros(130))
    assert torch.equal(ranges, empty_ranges(2, torch.device("cpu")))
    assert not decode_expanded(codes, ranges).any()
