"""The kernels' numbers, in Triton's interpreter, against the exact emulation of `bessemer.precision`.

Not collected by itself: `test_triton_kernels.py` runs it in a process of its own, with TRITON_INTERPRET=1, which Triton
reads when it is imported. The interpreter's own casts are wrong (see `ops/triton/blocks.py`), so ROUND_FIRST is on.
"""

from __future__ import annotations

from itertools import product as every

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.ops.linear import linear
from bessemer.ops.triton import kernels
from bessemer.precision import Call, Grain, QuantProducts, Scaled, Scheme, multiply, numerics, quant_linear, quantise
from bessemer.precision.formats import E4M3, E5M2
from bessemer.precision.gpu import multiply_on

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Inf and NaN
launch = kernels()
ONE, SQUARE = Grain(1, 128), Grain(128, 128)
FORMATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def _draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wild = torch.randn(shape[0], 1, generator=generator).mul(3).exp()
    return (torch.randn(*shape, generator=generator) * wild).to(dtype)


def _same(got: launch.Blocks, want: Scaled) -> None:
    """Bitwise, but for the codes under a NaN scale, which mean nothing."""
    assert torch.equal(got.scale.nan_to_num(-1.0), want.scale.nan_to_num(-1.0))
    assert torch.equal(got.amax.nan_to_num(-1.0), want.amax.nan_to_num(-1.0))
    tall = 128 if got.square else 1
    live = ~got.scale.isnan().repeat_interleave(tall, 0).repeat_interleave(128, 1)
    live = live[: want.codes.shape[0], : want.codes.shape[1]]
    assert torch.equal(got.codes.view(torch.uint8)[live], want.codes.view(torch.uint8)[live])


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("fmt", list(FORMATS), ids=lambda f: f.name)
def test_every_bfloat16_number(fmt: object, power_of_two: bool) -> None:
    """All 65536 with Inf and NaN among them: in order (a block has one exponent), and mixed. The interpreter widens
    subnormal ones wrongly, so those go in as float32 alone."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(512, 128)
    mixed = bits.flatten()[torch.randperm(65536, generator=torch.Generator().manual_seed(1))].view(256, 256)
    how = launch.Quantising(FORMATS[fmt], power_of_two)
    wide = [pattern.view(torch.bfloat16).float() for pattern in (bits, mixed)]
    for x in (*wide, *(torch.where(x.abs() < 2.0**-126, 0.0, x).bfloat16() for x in wide)):
        rows, columns = launch.quantise_blocks(x, how)
        _same(rows, quantise(x, Scheme(fmt, ONE, None, power_of_two)))
        _same(columns, quantise(x.t().contiguous(), Scheme(fmt, ONE, None, power_of_two)))


@pytest.mark.parametrize("power_of_two", [True, False])
def test_amax_at_every_edge_of_a_scale(power_of_two: bool) -> None:
    """float32 just below, at and above 448 x 2^n and 2^n, over the whole range; subnormals; zeros."""
    centres = torch.tensor([2.0**n * m for n in range(-126, 119) for m in (1.0, 448.0 / 256)])
    bits = centres.view(torch.int32)
    edges = torch.stack([bits - 1, bits, bits + 1]).flatten().view(torch.float32)
    edges = torch.cat((edges, torch.tensor([0.0, 1e-45, 2.0**-127, 3.4e38])))
    x = torch.zeros(edges.numel(), 128)
    x[:, 5] = edges
    x[:, 6] = -edges / 3
    for fmt, dtype in FORMATS.items():
        how = launch.Quantising(dtype, power_of_two, both=False)
        rows, columns = launch.quantise_blocks(x, how)
        assert columns is None
        _same(rows, quantise(x, Scheme(fmt, ONE, None, power_of_two)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (256, 128), (17, 400)], ids=str)
def test_ragged_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _draw(*shape, dtype=dtype)
    for square, grain in ((False, ONE), (True, SQUARE)):
        rows, columns = launch.quantise_blocks(x, launch.Quantising(), square=square)
        _same(rows, quantise(x, Scheme(E4M3, grain)))
        _same(columns, quantise(x.t().contiguous(), Scheme(E4M3, grain)))


def test_codes_are_filled_up_with_zeros() -> None:
    x = _draw(100, 72)
    for multiple, square in every((16, 128), (False, True)):
        rows, columns = launch.quantise_blocks(x, launch.Quantising(multiple=multiple), square=square)
        size = [-(-n // multiple) * multiple for n in x.shape]
        wide = F.pad(x, (0, size[1] - 72, 0, size[0] - 100))
        _same(rows, quantise(wide, Scheme(E4M3, SQUARE if square else ONE)))
        _same(columns, quantise(wide.t().contiguous(), Scheme(E4M3, SQUARE if square else ONE)))


def test_non_finite_numbers_spoil_their_blocks_and_no_other() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = _draw(256, 256)
        x[3, 200] = bad
        rows, columns = launch.quantise_blocks(x, launch.Quantising())
        assert rows.scale.isnan().nonzero().tolist() == [[3, 1]]
        assert columns.scale.isnan().nonzero().tolist() == [[200, 0]]
        square, _ = launch.quantise_blocks(x, launch.Quantising(), square=True)
        assert square.scale.isnan().nonzero().tolist() == [[0, 1]]


def _close(got: launch.Blocks, want: Scaled) -> None:
    """Equal scales, and codes that differ by a step in a few places: the exponential rounds otherwise."""
    assert torch.equal(got.scale, want.scale)
    apart = (got.codes.view(torch.uint8).int() - want.codes.view(torch.uint8).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu(dtype: torch.dtype, smooth: bool) -> None:
    tokens, width = 150, 160
    packed = torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(3)).mul(2).to(dtype)
    scales = 2.0 ** torch.arange(width).remainder(9).sub(4).float() if smooth else None
    gate, up = packed.double().chunk(2, -1)
    h = (F.silu(gate) * up).float().to(dtype)
    h = h if scales is None else h / scales.to(dtype)
    rows, columns = launch.swiglu_blocks(packed, launch.Quantising(), scales)
    _close(rows, quantise(h, Scheme(E4M3, ONE)))
    _close(columns, quantise(h.t().contiguous(), Scheme(E4M3, ONE)))


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_swiglu(dtype: torch.dtype, smooth: bool) -> None:
    tokens, width = 140, 256
    generator = torch.Generator().manual_seed(4)
    packed = torch.randn(tokens, 2 * width, generator=generator).mul(2).to(dtype)
    grad = torch.randn(tokens, width, generator=generator).to(dtype)
    scales = 2.0 ** torch.arange(width).remainder(9).sub(4).float() if smooth else torch.ones(width)
    wide = packed.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (F.silu(gate) * up / scales.double()).backward(grad.double())
    want = wide.grad.float().to(dtype)
    rows, columns = launch.swiglu_backward_blocks(
        grad, packed, launch.Quantising(torch.float8_e5m2), scales if smooth else None
    )
    _close(rows, quantise(want, Scheme(E5M2, ONE)))
    _close(columns, quantise(want.t().contiguous(), Scheme(E5M2, ONE)))


def test_the_gradient_of_swiglu_wants_whole_blocks() -> None:
    with pytest.raises(RequestError, match="whole blocks"):
        launch.swiglu_backward_blocks(torch.zeros(4, 96), torch.zeros(4, 192), launch.Quantising())


def _emulated(x: Tensor, square: bool, fmt: object = E4M3) -> Scaled:
    return quantise(x, Scheme(fmt, SQUARE if square else ONE))


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("square", [True, False], ids=["square", "rows"])
@pytest.mark.parametrize("shape", [(144, 160, 272), (64, 48, 16), (128, 256, 384)], ids=str)
def test_a_product(shape: tuple[int, int, int], square: bool) -> None:
    """Against the emulation, with every tile: the same bits, whichever it is."""
    rows, cols, depth = shape
    a, b = _draw(rows, depth), _draw(cols, depth, seed=1)
    left = launch.quantise_blocks(a, launch.Quantising(both=False))[0]
    right = launch.quantise_blocks(b, launch.Quantising(both=False), square=square)[0]
    bias = torch.randn(cols, generator=torch.Generator().manual_seed(2))
    made = [launch.multiply(left, right, torch.float32, bias_N=bias, tile=tile) for tile in launch.TILES]
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    want = multiply(_emulated(a, False), _emulated(b, square), torch.float32)
    assert _error(made[0] - bias, want) < 1e-6
    assert _error(launch.multiply(left, right, torch.float32), want) < 1e-6


def test_a_product_of_both_formats() -> None:
    a, b = _draw(80, 256), _draw(64, 256, seed=1)
    left = launch.quantise_blocks(a, launch.Quantising(torch.float8_e5m2))[0]
    right = launch.quantise_blocks(b, launch.Quantising())[0]
    want = multiply(_emulated(a, False, E5M2), _emulated(b, False), torch.float32)
    assert _error(launch.multiply(left, right, torch.float32), want) < 1e-6


def test_a_spoilt_block_reaches_the_rows_that_read_it() -> None:
    a, b = _draw(64, 256), _draw(64, 256, seed=1)
    a[7, 130] = float("inf")
    left = launch.quantise_blocks(a, launch.Quantising())[0]
    right = launch.quantise_blocks(b, launch.Quantising(), square=True)[0]
    out = launch.multiply(left, right, torch.float32)
    assert out[7].isnan().all() and out.isnan().sum() == 64


def test_a_product_refuses_what_the_copy_engine_cannot_read() -> None:
    blocks = launch.quantise_blocks(_draw(16, 24), launch.Quantising())[0]
    with pytest.raises(RequestError, match="multiple of 16"):
        launch.multiply(blocks, blocks)


def test_an_empty_sum_is_zero() -> None:
    nothing = launch.quantise_blocks(torch.zeros(16, 0), launch.Quantising())[0]
    assert torch.equal(launch.multiply(nothing, nothing, torch.float32), torch.zeros(16, 16))


def test_the_three_products_of_experts() -> None:
    """Runs of 128, 0, 256 and 128 rows, of which real rows fill a part, and 128 rows behind them that are nobody's."""
    experts, inputs, outputs = 4, 256, 128
    ends = torch.tensor([128, 128, 384, 512], dtype=torch.int32)
    taken = [range(100), range(0), range(128, 128 + 200), range(384, 384 + 128)]
    x, g = torch.zeros(640, inputs), torch.zeros(640, outputs)
    for run in taken:
        x[list(run)], g[list(run)] = _draw(len(run), inputs, seed=5), _draw(len(run), outputs, seed=6)
    w = _draw(experts * outputs, inputs, seed=7)
    how = launch.Quantising()
    (x_rows, x_cols), (g_rows, g_cols) = launch.quantise_blocks(x, how), launch.quantise_blocks(g, how)
    w_rows, w_cols = launch.quantise_blocks(w, how, square=True)
    for tile in launch.TILES[::2]:
        y = launch.multiply_rows(x_rows, w_rows, ends, (outputs, 0), torch.float32, tile=tile)
        dx = launch.multiply_rows(g_rows, w_cols, ends, (0, outputs), torch.float32, tile=tile)
        dw = launch.multiply_sums(g_cols, x_cols, ends, torch.float32, tile=tile)
        assert not y[512:].any() and not dx[512:].any() and not dw[1].any()
        for e, run in enumerate(taken):
            if not run:
                continue
            at = slice(run.start, run.stop)
            part = w[e * outputs : (e + 1) * outputs]
            assert _error(y[at], multiply(_emulated(x[at], False), _emulated(part, True), torch.float32)) < 1e-6
            turned = _emulated(part.t().contiguous(), True)
            assert _error(dx[at], multiply(_emulated(g[at], False), turned, torch.float32)) < 1e-6
            sides = [_emulated(t[at].t().contiguous(), False) for t in (g, x)]
            assert _error(dw[e], multiply(*sides, torch.float32)) < 1e-6


@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_layer_on_the_path_of_triton(power_of_two: bool) -> None:
    """Forward and both gradients of `quant_linear`, with sizes that have to be filled up."""
    recipe = numerics("fp8-block128", power_of_two=power_of_two)
    found = []
    for path in ("triton", "emulated"):
        x, w, g = _draw(100, 144), _draw(72, 144, seed=1), _draw(100, 72, seed=2)
        x.requires_grad_(), w.requires_grad_()
        seen = torch.zeros(3)
        y = quant_linear(x, w, torch.arange(72.0), Call(recipe, seen=seen, path=path))
        y.backward(g)
        found.append((y.detach(), x.grad, w.grad, seen))
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and _error(got, want) < 1e-6


@pytest.mark.parametrize("coded", [False, True])
def test_packed_tensors_on_the_path_of_triton(coded: bool) -> None:
    """Two tensors in a weight, the one 2^12 times the other; neither is whole blocks."""
    sizes, found = (40, 72), []
    for path in ("triton", "emulated"):
        x, g = _draw(100, 144), torch.cat([_draw(100, n, seed=n) * 2.0**-n for n in sizes], 1)
        w = torch.cat([_draw(n, 144, seed=n) * 2.0 ** (n - 60) for n in sizes])
        x.requires_grad_(), w.requires_grad_()
        y = linear(x, w, None, QuantProducts(numerics("fp8-block128"), x.dtype, sizes, coded=coded, path=path))
        y.backward(g)
        found.append((*y.detach().split(sizes, 1), x.grad, *w.grad.split(sizes)))
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and _error(got, want) < 1e-6


def test_the_product_takes_what_torch_quantised() -> None:
    a, b = _emulated(_draw(48, 256), False), _emulated(_draw(160, 256, seed=1), True)
    assert _error(multiply_on("triton", a, b, torch.float32), multiply(a, b, torch.float32)) < 1e-6


def test_experts_want_whole_blocks() -> None:
    blocks = launch.quantise_blocks(_draw(96, 128), launch.Quantising(), square=True)[0]
    with pytest.raises(RequestError, match="whole blocks"):
        launch.multiply_rows(blocks, blocks, torch.tensor([128], dtype=torch.int32), (96, 0))


def test_a_tile_for_every_processor() -> None:
    assert launch.tile_for(8192, 4096, 132) == launch.TILES[0]
    assert launch.tile_for(1024, 2048, 132) == launch.TILES[1]
    assert launch.tile_for(128, 128, 132) == launch.TILES[2]


def test_scales_in_another_order_are_refused() -> None:
    codes = torch.zeros(32, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="strides"):
        launch.Blocks(codes, torch.ones(32, 2), torch.ones(()))
    with pytest.raises(ValueError, match="scales"):
        launch.Blocks(codes, torch.ones(1, 1), torch.ones(()), square=True)
