"""Scales: their values, their edges, what they cost, and what Inf and NaN do."""

from __future__ import annotations

import pytest
import torch

from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.recipes import RECIPES
from bessemer.precision import INT8_WEIGHT, Grain, Scheme, advance, numerics, quantise, reference_amax
from bessemer.precision.formats import E2M1, E4M3, E5M2, E8M0
from bessemer.precision.outliers import relative_error
from bessemer.precision.scaled import ROW, TENSOR, scale_from

SCHEMES = {
    "tensor": Scheme(E4M3, TENSOR),
    "tensor-e5m2": Scheme(E5M2, TENSOR),
    "row": Scheme(E4M3, ROW),
    "1x128": Scheme(E4M3, Grain(1, 128)),
    "128x128": Scheme(E4M3, Grain(128, 128)),
    "mxfp8": Scheme(E4M3, Grain(1, 32), E8M0),
    "nvfp4": Scheme(E2M1, Grain(1, 16), E4M3),
    "nvfp4-2d": Scheme(E2M1, Grain(16, 16), E4M3),
    "int8": INT8_WEIGHT,
}
RELAXED = {
    f"{k}-fp32": Scheme(s.format, s.grain, s.scale_format, False) for k, s in SCHEMES.items() if s.scale_format != E8M0
}
EVERY = pytest.mark.parametrize("scheme", {**SCHEMES, **RELAXED}.values(), ids={**SCHEMES, **RELAXED}.keys())


def _x(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return (torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()).to(dtype)


def _by_hand(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Tile by tile in float64, with scales of the definition: the nearest value of the format's whole table."""
    from bessemer.precision.formats import values

    grid = values(scheme.format).double()
    grid = grid[grid.isfinite() & (grid.abs() <= scheme.format.max)]
    out = torch.empty_like(x, dtype=torch.float64)
    scales = quantise(x, scheme).scales().double()
    tall, wide = scheme.grain.rows or x.shape[0], scheme.grain.cols or x.shape[1]
    for a in range(scales.shape[0]):
        for b in range(scales.shape[1]):
            at = (slice(a * tall, (a + 1) * tall), slice(b * wide, (b + 1) * wide))
            tile = x[at].double() / scales[a, b]
            out[at] = grid[(tile[..., None] - grid).abs().argmin(-1)] * scales[a, b]
    return out


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tile_is_the_nearest_value_under_its_scale(scheme: Scheme, dtype: torch.dtype) -> None:
    x = _x(130, 140, dtype)
    got, want = quantise(x, scheme).dequantise().double(), _by_hand(x, scheme)
    close = (got - want).abs() <= 1e-6 * want.abs()
    missed, best = (got - x.double()).abs(), (want - x.double()).abs()
    tied = (missed - best).abs() <= 1e-6 * x.double().abs()  # within float32 rounding of a midpoint
    assert (close | tied).all() and close.float().mean() > 0.9  # bfloat16 meets many midpoints of int8


@EVERY
def test_scales_fit_the_amax_of_each_tile(scheme: Scheme) -> None:
    x = _x(256, 256)
    made = quantise(x, scheme)
    tall, wide = scheme.grain.rows or 256, scheme.grain.cols or 256
    amax = x.view(256 // tall, tall, 256 // wide, wide).abs().amax((1, 3))
    full = made.scales() * scheme.format.max
    slack = 2.0 if scheme.power_of_two or scheme.scale_format is E8M0 else 1.0 + 1e-6
    if scheme.scale_format is E4M3:  # block scales are rounded to nearest in e4m3: 1/16 either way
        assert (full >= amax * (1 - 1 / 16)).all() and (full <= amax * (1 + 1 / 16)).float().mean() > 0.99
    else:
        assert (full >= amax * (1 - 1e-6)).all() and (full <= amax * slack).all()
    if scheme.exact and scheme.scale_format is not E4M3:
        assert torch.equal(made.scales().log2(), made.scales().log2().round())
    assert made.amax == x.abs().max()


@EVERY
def test_zero_empty_tiny_and_huge(scheme: Scheme) -> None:
    zero = quantise(torch.zeros(128, 128), scheme)
    assert (zero.scales() == 1).all() and (zero.dequantise() == 0).all() and zero.amax == 0
    for rows, cols in ((0, 128), (128, 0)):
        assert quantise(torch.zeros(rows, cols), scheme).dequantise().shape == (rows, cols)
    for size in (1e-45, 1e-38, 1e-30, 1e30, 1.7e38):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((16, 16), size).to(dtype)
            back = quantise(x, scheme).dequantise()
            assert back.isfinite().all(), size
            if size >= 1e-30:
                assert ((back - x.float()) / x.float()).abs().max() < 0.2, size


@EVERY
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inf_and_nan_spoil_what_shares_their_scale(scheme: Scheme, bad: float, dtype: torch.dtype) -> None:
    x = _x(256, 256).to(dtype)
    x[3, 5] = bad
    made = quantise(x, scheme)
    assert not made.amax.isfinite() and made.dequantise()[3, 5].isnan()
    assert made.dequantise(torch.bfloat16)[3, 5].isnan()
    spoilt = made.dequantise().isnan()
    if scheme.scale_format is E4M3 or scheme.grain == TENSOR:
        assert spoilt.all()
    else:
        tall, wide = scheme.grain.rows or 256, scheme.grain.cols or 256
        top = 3 // tall * tall
        assert spoilt.sum() == tall * wide and spoilt[top : top + tall, :wide].all()


def test_a_past_amax_saturates_and_still_shows_infinity() -> None:
    x = torch.tensor([[1.0, 100.0, -3.0]])
    for fmt in (E4M3, E5M2):
        made = quantise(x, Scheme(fmt, TENSOR), past=torch.tensor(1.0))
        assert made.amax == 100 and made.dequantise()[0, 1] == fmt.max * made.scales()  # saturated, not Inf or NaN
        spoilt = quantise(torch.tensor([[1.0, torch.inf]]), Scheme(fmt, TENSOR), past=torch.tensor(1.0))
        assert spoilt.dequantise().isnan().all()
    unclamped = (x / quantise(x, Scheme(E5M2, TENSOR), past=torch.tensor(1.0)).scales()).to(torch.float8_e5m2)
    assert unclamped.float().isinf().any()  # what the clamp is for
    for other in (torch.nan, torch.inf):  # another rank's
        assert quantise(x, Scheme(E4M3, TENSOR), past=torch.tensor(other)).dequantise().isnan().all()
    with pytest.raises(RequestError, match="whole tensors only"):
        quantise(x, Scheme(E4M3, ROW), past=torch.tensor(1.0))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_bfloat16_holds_every_dequantised_value(scheme: Scheme) -> None:
    made = quantise(_x(130, 140), scheme)
    assert scheme.exact and torch.equal(made.dequantise(torch.bfloat16).float(), made.dequantise())


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.quantised])
def test_bytes_are_those_of_the_recipe_that_the_planner_reads(name: str) -> None:
    x = torch.randn(512, 4096)
    assert quantise(x, numerics(name).x).nbytes / x.numel() == pytest.approx(RECIPES[name].operand_bytes, rel=5e-3)


def test_weights_in_int8_are_off_by_half_a_step_at_most() -> None:
    """Normal weights, a scale per output: half of bfloat16's bytes and a scale a row; the error of rounding evenly
    spaced numbers, step / sqrt(12), in the weights and in a product alike."""
    draws = torch.Generator().manual_seed(0)
    weight, x = torch.randn(512, 1024, generator=draws) / 32, torch.randn(256, 1024, generator=draws)
    made = quantise(weight, INT8_WEIGHT)
    assert made.nbytes == weight.numel() + 512 * 4
    read, step = made.dequantise(), made.scale
    assert (read - weight).abs().le(step / 2).all()
    expected = (step.square().mean() / 12 / weight.square().mean()).sqrt().item()
    assert 0.007 < expected < 0.016  # 3.3 deviations / 127 / sqrt(12), and up to twice that by rounding the scale up
    assert relative_error(read, weight) == pytest.approx(expected, rel=0.02)
    assert relative_error(x @ read.t(), x.double() @ weight.double().t()) == pytest.approx(expected, rel=0.02)


def test_scale_of_amax() -> None:
    got = scale_from(torch.tensor([0.0, 448.0, 449.0, torch.inf, torch.nan, 1e-45]), 448.0)
    assert got[:3].tolist() == [1.0, 1.0, 2.0] and got[3:5].isnan().all() and got[5] == 2.0**-126
    assert scale_from(torch.tensor(449.0), 448.0, power_of_two=False) == torch.tensor(449 / 448)


def test_history_is_a_pure_function_of_state_and_amax() -> None:
    state = torch.zeros(2, 3)
    for step, amax in enumerate(([4.0, 1.0], [2.0, torch.inf], [1.0, 8.0], [0.5, torch.nan])):
        before = state.clone()
        after = advance(state, torch.tensor(amax))
        assert torch.equal(state, before) and torch.equal(after, advance(state, torch.tensor(amax))), step
        state = after
    assert state.tolist() == [[0.5, 1.0, 2.0], [8.0, 8.0, 1.0]]
    assert reference_amax(state, "max").tolist() == [2.0, 8.0]
    assert reference_amax(state, "most_recent", margin=1).tolist() == [1.0, 16.0]
    x = torch.tensor([[3.0, 1.0]])
    empty = reference_amax(torch.zeros(2, 3), "max")[0]
    assert torch.equal(quantise(x, Scheme(E4M3, TENSOR), past=empty).scale, quantise(x, Scheme(E4M3, TENSOR)).scale)


def test_recipes_and_shapes() -> None:
    assert {n for n, r in RECIPES.items() if r.quantised} == {
        n for n in RECIPES if n not in ("fp32", "bf16", "fp16") and numerics(n).recipe == n
    }
    for name, recipe in RECIPES.items():
        if recipe.quantised:
            assert {0: 0, -1: 0}.get(recipe.scale_block, recipe.scale_block) == numerics(name).x.grain.cols
    with pytest.raises(RequestError, match="quantises nothing"):
        numerics("bf16")
    with pytest.raises(ConfigError, match="fp8-current"):
        numerics("fp8-curent")
    assert not numerics("nvfp4", power_of_two=False).x.exact and numerics("mxfp8", power_of_two=False).x.exact


def test_wrong_operands_are_refused() -> None:
    with pytest.raises(RequestError, match="3 dimensions"):
        quantise(torch.zeros(1, 2, 3), SCHEMES["row"])
    with pytest.raises(RequestError, match="float64"):
        quantise(torch.zeros(2, 3, dtype=torch.float64), SCHEMES["row"])


def test_float16_is_scaled_in_float32() -> None:
    """A scale of 2^-29 is no float16 number."""
    x = torch.tensor([[1e-6, 0.0, -2e-7]], dtype=torch.float16)
    for scheme in SCHEMES.values():
        assert torch.equal(quantise(x, scheme).dequantise(), quantise(x.float(), scheme).dequantise())
        assert quantise(x, scheme).dequantise()[0, 0] == pytest.approx(x[0, 0].item(), rel=0.2)


def test_a_faint_block_beside_a_loud_one_keeps_what_it_can() -> None:
    """NVFP4: its scale would round to zero in e4m3; the smallest one is taken."""
    x = torch.ones(1, 32)
    x[0, 16:] = 0.4 * 2.0**-9 * 6 * 2.0**-11
    made = quantise(x, SCHEMES["nvfp4"])
    assert made.scale.view(torch.uint8).tolist()[0][1] == 1 and made.dequantise()[0, 16:].all()
