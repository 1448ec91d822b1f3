"""Formats without hardware: rounding, scaling and products of eXmY for any X and Y."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from bessemer.precision import casts
from bessemer.precision.formats import E2M1, E4M3, E5M2, FORMATS, float_format, value
from bessemer.precision.numerics import BF16, emulated
from bessemer.precision.products import QuantProducts
from bessemer.precision.scaled import Grain, Scheme, quantise

ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("known", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
def test_values_are_those_of_the_known_formats_where_both_are_finite(known) -> None:
    """OCP's e4m3 and e5m2 give their last codes to NaN and Inf; here all are numbers."""
    made = float_format(known.exponent_bits, known.mantissa_bits)
    assert (made.bits, made.bias, made.smallest) == (known.bits, known.bias, known.smallest)
    for code in range(2**known.bits):
        if math.isfinite(value(known, code)):
            assert value(made, code) == value(known, code)
        assert abs(value(made, code)) <= made.max
    assert made.max == max(value(made, code) for code in range(2**made.bits))


def test_one_exponent_bit_is_an_integer() -> None:
    assert [value(float_format(1, 2), code) for code in range(8)] == [i / 2 for i in range(8)]


@pytest.mark.parametrize("exponent_bits", range(1, 9))
def test_rounding_bfloat16_equals_exact_arithmetic(exponent_bits: int) -> None:
    """Every bfloat16 number, by the faster path where there is one, against fractions: nearest, ties to even steps."""
    x = ALL_BF16[ALL_BF16.isfinite()]
    for mantissa_bits in range(8):
        fmt = float_format(exponent_bits, mantissa_bits)
        got = casts.clamped_codes(x, fmt)
        assert torch.equal(got.float(), casts.clamped_codes(x.float(), fmt).float())
        for number, rounded in zip(x[::97].tolist(), got[::97].tolist(), strict=True):
            size = min(abs(number), fmt.max)
            exponent = max(math.frexp(size)[1] - 1, fmt.min_exponent)
            step = Fraction(2) ** (exponent - mantissa_bits)
            assert abs(rounded) == float(round(Fraction(size) / step) * step)
            assert rounded == 0 or (rounded > 0) == (number > 0)
    assert casts.clamped_codes(torch.tensor([math.nan]).bfloat16(), float_format(exponent_bits, 1)).isnan()


def test_decoding_gives_memory_of_its_own() -> None:
    made = quantise(torch.randn(8, 64).bfloat16(), Scheme(float_format(3, 2), Grain(1, 32)))
    before = made.codes.clone()
    made.dequantise(torch.bfloat16).mul_(3)
    casts.decode_finite(made.codes, made.scheme.format).mul_(3)
    assert torch.equal(made.codes, before)


def test_bf16_changes_nothing() -> None:
    x, w, g = torch.randn(16, 64).bfloat16(), torch.randn(32, 64), torch.randn(16, 32).bfloat16()
    products = QuantProducts(emulated(BF16, BF16), torch.bfloat16)
    y, kept = products.output(x, w, None)
    assert torch.equal(y, x @ w.bfloat16().t())
    grad = products.gradient(g)
    assert torch.equal(products.input_gradient(grad, w), g @ w.bfloat16())
    assert torch.equal(products.weight_gradient(grad, kept, torch.float32), (g.t() @ x).float())


def test_products_read_the_rounded_operands_forward_and_backward() -> None:
    """The straight-through estimator: the gradients of the product of the rounded operands."""
    torch.manual_seed(0)
    x, w, g = torch.randn(16, 64).bfloat16(), torch.randn(32, 64), torch.randn(16, 32).bfloat16()
    numerics = emulated(float_format(2, 1), float_format(4, 3))
    products = QuantProducts(numerics, torch.bfloat16)
    y, kept = products.output(x, w, None)
    wide_x, wide_w = quantise(x, numerics.x).dequantise(), quantise(w, numerics.weight).dequantise()
    assert len(wide_x.unique()) <= 15 and len(wide_w.abs().unique()) <= 128
    assert torch.allclose(y.float(), wide_x @ wide_w.t(), rtol=2**-8, atol=1e-3)
    grad = products.gradient(g)
    assert torch.allclose(products.input_gradient(grad, w).float(), g.float() @ wide_w, rtol=2**-8, atol=1e-3)
    assert torch.allclose(
        products.weight_gradient(grad, kept, torch.float32), g.float().t() @ wide_x, rtol=2**-8, atol=1e-3
    )


@pytest.mark.parametrize("bits", [(0, 3), (9, 1), (4, 8)])
def test_formats_that_bfloat16_cannot_hold_are_refused(bits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="exponent bits are 1 to 8"):
        float_format(*bits)


def test_the_formats_of_recipes_are_untouched() -> None:
    """None of theirs is called as one of these, by whose names kernels for codes are found."""
    assert set(FORMATS) == {"e4m3", "e5m2", "e2m1", "e8m0", "int8"}
    made = {
        float_format(exponent_bits, mantissa_bits).name for exponent_bits in range(1, 9) for mantissa_bits in range(8)
    }
    assert len(made) == 64 and not made & set(FORMATS)
