"""The products and the layer against float64, autograd and torch's scaled product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.errors import NonFinite, RequestError
from bessemer.core.recipes import RECIPES
from bessemer.precision import (
    Call,
    Numerics,
    QuantLinear,
    Scheme,
    keyed_generator,
    multiply,
    numerics,
    promoted,
    quant_linear,
    quantise,
)
from bessemer.precision.formats import E4M3, E5M2
from bessemer.precision.outliers import relative_error
from bessemer.precision.product import hadamard
from bessemer.precision.scaled import ROW, TENSOR

NAMES = [n for n, r in RECIPES.items() if r.quantised]
TOKENS, INPUTS, OUTPUTS = 96, 256, 160
BF16_ROUNDING = 1.7e-3  # 2^-8 / sqrt(6): what rounding to nearest leaves of a bfloat16 result, as a share of its norm


def _draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_off_by_its_output_rounding_only(name: str, power_of_two: bool) -> None:
    n = numerics(name, power_of_two=power_of_two)
    pairs = ((n.x, n.weight, INPUTS), (n.grad, n.weight, OUTPUTS), (n.grad, n.x, TOKENS))
    for seed, (left, right, inner) in enumerate(pairs):
        a, b = quantise(_draw(64, inner, seed=seed), left), quantise(_draw(80, inner, seed=seed + 9), right)
        want = a.dequantise(torch.float64) @ b.dequantise(torch.float64).t()
        assert relative_error(multiply(a, b), want) < BF16_ROUNDING
        assert relative_error(multiply(a, b, torch.float32), want) < 1e-6


def test_a_product_refuses_operands_that_share_nothing() -> None:
    a = quantise(_draw(4, 32), Scheme(E4M3, TENSOR))
    with pytest.raises(RequestError, match="don't share"):
        multiply(a, quantise(_draw(4, 16), Scheme(E4M3, TENSOR)))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("left", "grain"), [(E4M3, TENSOR), (E5M2, TENSOR), (E4M3, ROW)], ids=["e4m3", "e5m2", "row"])
def test_torch_agrees(left: object, grain: object, power_of_two: bool) -> None:
    a = quantise(_draw(48, 64), Scheme(left, grain, None, power_of_two))
    b = quantise(_draw(32, 64, seed=1), Scheme(E4M3, grain, None, power_of_two))
    kind = F.ScalingType.TensorWise if grain == TENSOR else F.ScalingType.RowWise
    scale_a, scale_b = (a.scale.view(()), b.scale.view(())) if grain == TENSOR else (a.scale, b.scale.t())
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2 * BF16_ROUNDING)):
        theirs = F.scaled_mm(a.codes, b.codes.t(), scale_a, kind, scale_b, kind, output_dtype=dtype)
        assert relative_error(multiply(a, b, dtype), theirs) < bound


def _call(n: Numerics, **more: Tensor) -> Call:
    history = torch.zeros(3, n.history) if n.delayed else None
    return Call(n, history, generator=keyed_generator(5) if n.stochastic else None, **more)


class _Straight(torch.autograd.Function):
    """Quantise-dequantise in float64 with a straight-through gradient that is itself replaced where asked."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Tensor | None, backward: object) -> Tensor:
        ctx.replace = backward
        return x.clone() if forward is None else forward.double()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad if ctx.replace is None else ctx.replace(grad), None, None


def _back(x: Tensor, scheme: Scheme, transpose: bool = False) -> Tensor:
    x = x.t().contiguous() if transpose else x
    made = quantise(x, scheme).dequantise()
    return made.t() if transpose else made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "nvfp4"])
def test_gradients_are_autograd_of_quantise_dequantise(name: str, dtype: torch.dtype) -> None:
    n = numerics(name)
    x, w, b, g = (
        _draw(TOKENS, INPUTS, dtype=dtype),
        _draw(OUTPUTS, INPUTS, seed=1) / 16,
        _draw(OUTPUTS, seed=2),
        _draw(TOKENS, OUTPUTS, seed=3, dtype=dtype),
    )
    x.requires_grad_(), w.requires_grad_(), b.requires_grad_()
    y = quant_linear(x, w, b, _call(n))
    y.backward(g)
    assert y.dtype == x.grad.dtype == dtype and w.grad.dtype == b.grad.dtype == torch.float32

    def by_autograd(sideways: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Operands quantised as dgrad needs them (w sideways) or as wgrad does (x and g sideways)."""
        x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
        xq = _Straight.apply(x64, _back(x, n.x, transpose=sideways), None)
        wq = _Straight.apply(w64, _back(w, n.weight, transpose=not sideways), None)
        out = _Straight.apply(F.linear(xq, wq), None, lambda _: _back(g, n.grad, transpose=sideways).double())
        out.backward(g.double())
        return out, x64.grad, w64.grad

    bound = 2e-6 if dtype == torch.float32 else BF16_ROUNDING
    want = F.linear(_back(x, n.x).double(), _back(w, n.weight).double(), b.to(dtype).double())
    assert relative_error(y.detach(), want.detach()) < bound
    assert relative_error(x.grad, by_autograd(False)[1]) < bound
    assert relative_error(w.grad, by_autograd(True)[2]) < bound
    assert torch.allclose(b.grad, g.float().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_against_the_unquantised_layer_is_that_of_the_format(name: str) -> None:
    x, w, g = (
        _draw(TOKENS, INPUTS, dtype=torch.bfloat16).requires_grad_(),
        _draw(OUTPUTS, INPUTS, seed=1).requires_grad_(),
        _draw(TOKENS, OUTPUTS, seed=3),
    )
    y = quant_linear(x, w, None, _call(numerics(name)))
    y.backward(g.bfloat16())
    forward, backward = {"nvfp4": (0.15, 0.22)}.get(name, (0.045, 0.07))
    assert 0.02 < relative_error(y.detach(), x.detach().double() @ w.detach().double().t()) < forward
    assert relative_error(x.grad, g.double() @ w.detach().double()) < backward
    assert relative_error(w.grad, g.double().t() @ x.detach().double()) < backward


@pytest.mark.parametrize("name", NAMES)
def test_odd_and_empty_shapes(name: str) -> None:
    for tokens, inputs, outputs in ((7, 33, 130), (0, 32, 16), (1, 1, 1)):
        x = _draw(2, tokens, inputs, dtype=torch.bfloat16).requires_grad_()
        w = _draw(outputs, inputs, seed=1).requires_grad_()
        y = quant_linear(x, w, None, _call(numerics(name)))
        y.sum().backward()
        assert y.shape == (2, tokens, outputs) and x.grad.shape == x.shape and w.grad.shape == w.shape
        assert y.isfinite().all() and x.grad.isfinite().all() and w.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_gradients_give_zero(name: str) -> None:
    x, w = _draw(32, 64).requires_grad_(), _draw(48, 64, seed=1).requires_grad_()
    seen = torch.zeros(3)
    (quant_linear(x, w, None, _call(numerics(name), seen=seen)) * 0).sum().backward()
    assert not x.grad.any() and not w.grad.any() and seen[2] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["x", "weight", "grad"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_inf_and_nan_reach_the_result_and_the_layer_names_them(name: str, role: str, bad: float) -> None:
    layer = QuantLinear(_draw(48, 64) / 8, None, numerics(name), name="layers.3.mlp.down")
    x = _draw(32, 64, seed=1).requires_grad_()
    if role == "weight":
        layer.weight.data[2, 3] = bad
    y = layer(torch.where(torch.arange(64) == 5, bad, x) if role == "x" else x)
    g = torch.ones_like(y)
    if role == "grad":
        g[4, 6] = bad
    y.backward(g)
    assert y.isnan().any() == (role != "grad")
    assert not layer.weight.grad.isfinite().all() or role == "weight"
    assert not x.grad.isfinite().all() or role == "x"
    with pytest.raises(NonFinite, match=f"layers.3.mlp.down: the amax of its {role} is") as caught:
        layer.refuse_non_finite()
    assert caught.value.step == 0 and caught.value.code == "non-finite-amax"


@pytest.mark.parametrize("name", NAMES)
def test_frozen_operands_get_no_gradient_and_the_amax_is_seen(name: str) -> None:
    for x_wants, w_wants in ((True, False), (False, True)):
        x, w = _draw(32, 64).requires_grad_(x_wants), _draw(48, 64, seed=1).requires_grad_(w_wants)
        seen = torch.zeros(3)
        quant_linear(x, w, None, _call(numerics(name), seen=seen)).mul(3).sum().backward()
        assert (x.grad is not None, w.grad is not None) == (x_wants, w_wants)
        assert seen.tolist() == [x.abs().max(), w.abs().max(), 3.0]


def _steps(layer: QuantLinear, first: int, last: int, *, micros: int = 1, redo: bool = False) -> list[Tensor]:
    """Plain gradient descent on given data; per step the layer's output."""
    out = []
    for step in range(first, last):
        x, g = _draw(32, 64, seed=step) * (1 + step), _draw(32, 48, seed=step + 50) / (1 + step)
        for micro in range(micros):
            part = slice(micro * 32 // micros, (micro + 1) * 32 // micros)
            if redo:
                layer(x[part], micro=micro)  # as recomputing activations does
            y = layer(x[part], micro=micro)
            y.backward(g[part])
        out.append(y.detach())
        layer.refuse_non_finite()
        layer.advance()
        with torch.no_grad():
            layer.weight -= 0.01 * layer.weight.grad
        layer.weight.grad = None
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_layer_goes_on_bitwise(name: str) -> None:
    def fresh() -> QuantLinear:
        return QuantLinear(_draw(48, 64) / 8, None, numerics(name), name="layers.0.attn.q", seed=3)

    whole, first, second = fresh(), fresh(), fresh()
    _steps(whole, 0, 6)
    _steps(first, 0, 3)
    second.load_state_dict(first.state_dict())
    _steps(second, 3, 6)
    for key, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key


def test_states_do_not_depend_on_micro_batches_or_recomputing() -> None:
    """The weight is frozen and the history is compared: amax over micro-batches is the amax of the batch."""
    states = []
    for micros, redo in ((1, False), (4, False), (2, True)):
        layer = QuantLinear(_draw(48, 64) / 8, None, numerics("fp8-delayed"), name="a")
        for _ in range(2):
            x, g = _draw(32, 64, seed=1), _draw(32, 48, seed=2)
            for a, b in zip(x.chunk(micros), g.chunk(micros), strict=True):
                if redo:
                    layer(a)
                layer(a).backward(b)
            layer.advance()
        states.append(layer.history)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2]) and states[0][:, :2].all()


def test_delayed_scaling_survives_a_burst_that_breaks_it_unclamped() -> None:
    """Stale scale: the step's amax is 8 times the history's. Clamped it's finite, and worse than current scaling."""
    layer = QuantLinear(_draw(48, 64) / 8, None, numerics("fp8-delayed"), name="a")
    layer(_draw(32, 64)).backward(_draw(32, 48, seed=1))
    layer.advance()
    x, g = _draw(32, 64, seed=2) * 8, _draw(32, 48, seed=3) * 8
    x.requires_grad_()
    y = layer(x)
    y.backward(g)
    assert y.isfinite().all() and x.grad.isfinite().all() and layer.weight.grad.isfinite().all()
    want = x.detach().double() @ layer.weight.detach().double().t()
    current = quant_linear(x.detach(), layer.weight, None, _call(numerics("fp8-current")))
    assert relative_error(y.detach(), want) > 3 * relative_error(current.detach(), want)
    stale = quantise(g, Scheme(E5M2, TENSOR), past=layer.history[2].max())
    assert (g / stale.scales()).to(torch.float8_e5m2).float().isinf().any()


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("split", ["outputs", "inputs", "tokens"])
def test_parts_with_a_reduced_amax_equal_the_whole(split: str, name: str) -> None:
    """Tensor parallel by columns and by rows, data parallel: two parts, told the maximum over both (if delayed, in
    the first step)."""
    x, w, g = _draw(64, 48), _draw(80, 48, seed=1), _draw(64, 80, seed=2)
    whole_x, whole_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = quant_linear(whole_x, whole_w, None, _call(numerics(name)))
    y.backward(g)
    dims = {"outputs": (None, 0, 1), "inputs": (1, 1, None), "tokens": (0, None, 0)}[split]
    sides = [[t, t] if d is None else list(t.chunk(2, d)) for t, d in zip((x, w, g), dims, strict=True)]
    outs, grads_x, grads_w = [], [], []
    for px, pw, pg in zip(*sides, strict=True):
        told = iter([torch.stack([x.abs().max(), w.abs().max()]), g.abs().max()[None]])  # the order of the calls
        px_, pw_ = px.clone().requires_grad_(), pw.clone().requires_grad_()
        out = quant_linear(px_, pw_, None, replace(_call(numerics(name)), reduce=lambda own, t=told: next(t)))
        out.backward(pg)
        outs.append(out), grads_x.append(px_.grad), grads_w.append(pw_.grad)
    for parts, dim, want in (
        (outs, {"outputs": 1, "tokens": 0}.get(split), y),
        (grads_x, {"inputs": 1, "tokens": 0}.get(split), whole_x.grad),
        (grads_w, {"outputs": 0, "inputs": 1}.get(split), whole_w.grad),
    ):
        joined = parts[0] + parts[1] if dim is None else torch.cat(parts, dim)
        assert relative_error(joined.detach(), want.detach()) < 1e-6


def test_missing_pieces_are_named() -> None:
    x, w = _draw(4, 16), _draw(8, 16)
    with pytest.raises(RequestError, match="stochastically"):
        quant_linear(x, w, None, Call(numerics("nvfp4")))
    with pytest.raises(RequestError, match="history"):
        quant_linear(x, w, None, Call(numerics("fp8-delayed")))


def test_advance_between_forward_and_backward_changes_nothing() -> None:
    grads = []
    for early in (False, True):
        layer = QuantLinear(_draw(48, 64) / 8, None, replace(numerics("fp8-delayed"), choice="most_recent"), name="a")
        layer(_draw(32, 64)).backward(_draw(32, 48, seed=1))
        layer.advance()
        x = (_draw(32, 64, seed=2) * 9).requires_grad_()
        y = layer(x)
        if early:
            layer.advance()
        y.backward(_draw(32, 48, seed=3) * 64)  # saturates under the history of the forward
        grads.append((x.grad, layer.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_a_rotation_changes_no_product_and_spreads_an_outlier() -> None:
    a, b = _draw(24, 50), _draw(30, 50, seed=1)
    assert relative_error(hadamard(a) @ hadamard(b).t(), a @ b.t()) < 1e-6
    spike = torch.zeros(1, 16)
    spike[0, 3] = 8
    assert hadamard(spike).abs().tolist() == [[2.0] * 16]


def test_promotion_is_what_a_narrow_accumulator_needs() -> None:
    n = numerics("fp8-block128")
    a, b = (
        quantise(_draw(32, 4096).abs(), n.x).dequantise(),
        quantise(_draw(32, 4096, seed=1).abs(), n.weight).dequantise(),
    )
    want = a.double() @ b.double().t()
    plain, helped = (relative_error(promoted(a, b, bits=14, every=e), want) for e in (None, 128))
    assert helped < 1e-4 < 10 * helped < plain
    assert relative_error(promoted(a, b, bits=23, every=128), want) < 1e-6


def test_fp4_rotates_wgrad_and_rounds_gradients_by_its_key() -> None:
    n = numerics("nvfp4")
    x, w, g = _draw(64, 48).requires_grad_(), _draw(80, 48, seed=1).requires_grad_(), _draw(64, 80, seed=2)
    quant_linear(x, w, None, _call(n)).backward(g)
    draws = keyed_generator(5)
    dgrad = quantise(g, n.grad, generator=draws).dequantise() @ quantise(w, n.weight).dequantise()
    left = quantise(hadamard(g.t().contiguous()), n.grad, generator=draws).dequantise()
    wgrad = left @ quantise(hadamard(x.t().contiguous()), n.x).dequantise().t()
    assert relative_error(x.grad, dgrad) < 1e-6 and relative_error(w.grad, wgrad) < 1e-6


def test_a_step_starts_anew() -> None:
    layer = QuantLinear(_draw(48, 64) / 8, None, numerics("nvfp4"), name="a")
    grads = []
    for _ in range(3):
        x = _draw(32, 64).requires_grad_()
        layer(x).backward(_draw(32, 48, seed=1))
        assert layer.seen.all()
        layer.advance()
        assert not layer.seen.any()
        grads.append(x.grad)
    assert layer.step == 3 and not torch.equal(grads[0], grads[1]) and not torch.equal(grads[1], grads[2])
