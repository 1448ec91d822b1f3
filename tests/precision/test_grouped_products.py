"""Products of quantised experts: each expert as if it were alone, whatever the others and however few its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer import ops
from bessemer.ops.deferred import put_off_weight_gradients
from bessemer.precision import QuantProducts, Scheme, keyed_generator, numerics, quantise
from bessemer.precision.grouped import QuantGrouped
from bessemer.precision.outliers import relative_error
from bessemer.precision.product import hadamard
from bessemer.precision.products import ROLES
from bessemer.precision.watch import TensorWatch

RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block128", "mxfp8", "nvfp4")
LOADS = {"some": [37, 150, 0, 4, 261, 128], "one": [0, 0, 0, 290, 0, 0], "none": [0] * 6}
INPUTS, OUTPUTS = 72, (136, 40)


def _numerics(recipe: str) -> Any:
    return replace(numerics(recipe), stochastic=False)


def _operands(load: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """x, weights, the gradient of the results and counts; experts differ in size by powers of ten, so that one in
    another's scale would show."""
    counts = torch.tensor(LOADS[load])
    draw = torch.Generator().manual_seed(3)
    size = 10.0 ** torch.arange(-2, 4)
    rows = size.repeat_interleave(counts)[:, None]
    x = (torch.randn(int(counts.sum()), INPUTS, generator=draw) * rows).to(dtype)
    grad = (torch.randn(int(counts.sum()), sum(OUTPUTS), generator=draw) / rows).to(dtype)
    weights = [torch.randn(6, out, INPUTS, generator=draw) * size.flip(0)[:, None, None] for out in OUTPUTS]
    return x, weights, grad, counts


def _read(x: Tensor, scheme: Scheme, *, turned: bool = False, rotated: bool = False) -> Tensor:
    """float64 of what the codes say; turned: scales run along the first dimension."""
    rows = x.t().contiguous() if turned else x.contiguous()
    rows = hadamard(rows) if rotated else rows
    made = quantise(rows, scheme).dequantise(torch.float64)
    return made.t() if turned else made


def _run(how: QuantGrouped, x: Tensor, weights: list[Tensor], grad: Tensor, counts: Tensor) -> list[Tensor]:
    """y, dx and the gradients of the weights."""
    x = x.clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in weights]
    y = ops.grouped_linear(x, weights, counts, how)
    torch.autograd.backward(y, grad)
    return [y.detach(), _gradient(x), *map(_gradient, weights)]


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _parts(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_expert_is_quantised_by_itself(recipe: str, load: str, dtype: torch.dtype) -> None:
    """Against float64 products of each expert's own dequantised operands. 1.66e-3 is bfloat16's own rounding."""
    n = _numerics(recipe)
    x, weights, grad, counts = _operands(load, dtype)
    y, dx, *dws = _run(QuantGrouped(n, dtype), x, weights, grad, counts)
    assert y.dtype == dx.dtype == dtype and all(dw.dtype == torch.float32 for dw in dws)
    across, sideways = not n.grad.grain.symmetric, not n.weight.grain.symmetric
    bar = 2.4e-3 if dtype == torch.bfloat16 else 1e-6
    at = 0
    for expert, count in enumerate(counts.tolist()):
        own = slice(at, at + count)
        at += count
        if not count:
            assert all((dw[expert] == 0).all() for dw in dws)
            continue
        g_parts = _parts(grad[own], OUTPUTS, 1)
        want_dx = torch.zeros(count, INPUTS, dtype=torch.float64)
        for place, (w, g) in enumerate(zip(weights, g_parts, strict=True)):
            want = _read(x[own], n.x) @ _read(w[expert], n.weight).t()
            assert relative_error(_parts(y[own], OUTPUTS, 1)[place], want) < bar
            want_dx += _read(g, n.grad) @ _read(w[expert], n.weight, turned=sideways)
            how = {"turned": across, "rotated": n.hadamard}
            want_dw = _read(g, n.grad, **how).t() @ _read(x[own], n.x, **how)
            assert relative_error(dws[place][expert], want_dw) < bar
        assert relative_error(dx[own], want_dx) < bar


@pytest.mark.parametrize("recipe", RECIPES)
def test_putting_off_and_keeping_codes(recipe: str) -> None:
    """Weight gradients that are put off are the same bits; `coded` costs at most another rounding of x."""
    x, weights, grad, counts = _operands("some")
    wanted = _run(QuantGrouped(_numerics(recipe), torch.bfloat16), x, weights, grad, counts)
    leaves = [w.clone().requires_grad_() for w in weights]
    with put_off_weight_gradients() as queue:
        how = QuantGrouped(_numerics(recipe), torch.bfloat16)
        torch.autograd.backward(ops.grouped_linear(x.clone().requires_grad_(), leaves, counts, how), grad)
        work = queue.take()
    assert len(work) == 2 and leaves[0].grad is None
    work.run()
    assert all(torch.equal(_gradient(leaf), want) for leaf, want in zip(leaves, wanted[2:], strict=True))
    coded = _run(QuantGrouped(_numerics(recipe), torch.bfloat16, coded=True), x, weights, grad, counts)
    assert torch.equal(coded[0], wanted[0]) and torch.equal(coded[1], wanted[1])
    whole = recipe in ("fp8-delayed", "fp8-current")
    for got, want in zip(coded[2:], wanted[2:], strict=True):
        assert torch.equal(got, want) or (
            not whole and relative_error(got, want) < (0.2 if recipe == "nvfp4" else 0.05)
        )


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "fp8-block128"])
def test_what_is_kept_for_backward(recipe: str) -> None:
    """Under one scale an expert the codes of x and the scales; otherwise x itself, once for both weights."""
    x, weights, _, counts = _operands("some")
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ops.grouped_linear(
            x.requires_grad_(), [w.requires_grad_() for w in weights], counts, QuantGrouped(numerics(recipe), x.dtype)
        )
    kept = sum(t.nbytes for t in saved if t.dtype != torch.int64 and t.dim() != 3)
    assert kept == (x.numel() + 4 * 6 if recipe == "fp8-current" else 2 * x.numel())


def test_delayed_scaling_reads_the_past_and_notes_the_present() -> None:
    """An expert whose past is known is scaled by it; one that has none by its own; one without rows notes nothing."""
    x, weights, grad, counts = _operands("some")
    n, past = numerics("fp8-delayed"), torch.zeros(2, 6, 3)
    own = QuantGrouped(n, torch.bfloat16, seen=torch.zeros(2, 6, 3))
    alone = _run(own, x, weights, grad, counts)
    seen = own.seen
    assert seen is not None
    runs = _parts(x.float().abs(), counts.tolist())
    assert seen[0, :, 0].tolist() == seen[1, :, 0].tolist() == [float(r.max()) if len(r) else 0.0 for r in runs]
    assert torch.equal(seen[:, :, 1], torch.stack([w.abs().amax((1, 2)) for w in weights]))
    assert (seen[:, 2, ROLES.index("grad")] == 0).all() and (seen[:, [0, 1, 3, 4, 5], 2] > 0).all()
    past[:, 1] = 2.0**-12 * seen[:, 1]  # which saturates almost everything
    moved = _run(QuantGrouped(n, torch.bfloat16, past), x, weights, grad, counts)
    for got, want in zip(moved[:2], alone[:2], strict=True):
        for expert, (a, b) in enumerate(zip(*(_parts(made, counts.tolist()) for made in (got, want)), strict=True)):
            assert torch.equal(a, b) == (expert != 1)
    for got, want in zip(moved[2:], alone[2:], strict=True):
        assert [torch.equal(got[e], want[e]) for e in range(6)] == [True, False, True, True, True, True]


def test_ranks_are_asked_once_for_the_result_and_once_for_the_gradient() -> None:
    x, weights, grad, counts = _operands("some")
    n = numerics("fp8-delayed")
    asked: list[tuple[int, ...]] = []

    def reduce(own_XN: Tensor) -> Tensor:
        asked.append(tuple(own_XN.shape))
        return own_XN * 4

    _run(QuantGrouped(n, torch.bfloat16, reduce=reduce), x, weights, grad, counts)
    assert asked == [(6, 3), (6, 2)]
    past = torch.ones(2, 6, 3)
    _run(QuantGrouped(n, torch.bfloat16, past, known=True, reduce=reduce), x, weights, grad, counts)
    assert len(asked) == 2
    _run(QuantGrouped(numerics("fp8-row"), torch.bfloat16, reduce=reduce), x, weights, grad, counts)
    assert len(asked) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_channels_change_no_function(recipe: str) -> None:
    """Smooth-SwiGLU of experts: powers of two that x is divided and the weight multiplied by, each expert its own."""
    x, [weight, _], _, counts = _operands("some")
    grad = torch.randn(x.shape[0], OUTPUTS[0]).bfloat16()
    draw = torch.Generator().manual_seed(5)
    channels = 2.0 ** torch.randint(-6, 7, (6, INPUTS), generator=draw)
    spread = x * channels.repeat_interleave(counts, 0).bfloat16()
    n = _numerics(recipe)
    found = _run(QuantGrouped(n, torch.bfloat16, channels=channels), spread, [weight / channels[:, None]], grad, counts)
    y, dx, dw = _run(QuantGrouped(n, torch.bfloat16), x, [weight], grad, counts)
    assert torch.equal(found[0], y)
    assert torch.equal(found[1], dx / channels.repeat_interleave(counts, 0).bfloat16())
    assert torch.equal(found[2], dw * channels[:, None])


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block128", "nvfp4"])
def test_stochastic_rounding_keeps_the_mean(recipe: str) -> None:
    x, weights, grad, counts = _operands("some")
    n = replace(numerics(recipe), stochastic=True)

    def draw(key: int) -> list[Tensor]:
        generator = keyed_generator(key, "experts")
        return _run(QuantGrouped(n, torch.bfloat16, generator=generator), x, weights, grad, counts)

    nearest = _run(QuantGrouped(_numerics(recipe), torch.bfloat16), x, weights, grad, counts)
    first = draw(0)
    assert all(torch.equal(a, b) for a, b in zip(first, draw(0), strict=True))
    assert torch.equal(first[0], nearest[0]) and not torch.equal(first[1], draw(1)[1])
    for expert in (0, 1, 4, 5):
        mean = torch.stack([draw(key)[2][expert] for key in range(12)]).mean(0)
        want = nearest[2][expert]
        assert relative_error(mean, want) < relative_error(first[2][expert], want) < 0.5


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_spoils_its_own_expert_only(recipe: str) -> None:
    x, weights, grad, counts = _operands("some")
    wanted = _run(QuantGrouped(_numerics(recipe), torch.bfloat16), x, weights, grad, counts)
    x[40, 3] = torch.inf  # of expert 1
    y, _, *dws = _run(QuantGrouped(_numerics(recipe), torch.bfloat16), x, weights, grad, counts)
    assert not y[40].isfinite().any() and not dws[0][1].isfinite().all()
    others = [e for e in range(6) if e != 1]
    assert torch.equal(y[:37], wanted[0][:37]) and torch.equal(y[187:], wanted[0][187:])
    assert all(torch.equal(dw[others], want[others]) for dw, want in zip(dws, wanted[2:], strict=True))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "fp8-block128"])
def test_a_watch_sees_what_it_would_see_of_each_expert_alone(recipe: str) -> None:
    """(Of gradients under scales of rows or blocks a dense layer shows both directions, experts one.)"""
    x, weights, grad, counts = _operands("some")
    n, device = numerics(recipe), torch.device("cpu")
    together, alone = TensorWatch(OUTPUTS, device), TensorWatch(OUTPUTS, device)
    leaves = [w.clone().requires_grad_() for w in weights]
    with together.window:
        how = QuantGrouped(n, torch.bfloat16, watch=together)
        y = ops.grouped_linear(x.clone().requires_grad_(), leaves, counts, how)
    torch.autograd.backward(y, grad)
    for expert, (own, g) in enumerate(zip(*(_parts(part, counts.tolist()) for part in (x, grad)), strict=True)):
        packed = torch.cat([weight[expert] for weight in weights]).requires_grad_()
        with alone.window:
            one = QuantProducts(n, x.dtype, OUTPUTS, watch=alone)
            y = ops.linear(own.clone().requires_grad_(), packed, None, one)
        torch.autograd.backward(y, g)
    roles = slice(3 if recipe == "fp8-current" else 2)
    counted = [0, 1, *range(4, together.sums.shape[2])]  # between them two sums of squares, in float32
    assert torch.equal(together.sums[:, roles][..., counted], alone.sums[:, roles][..., counted])
    torch.testing.assert_close(together.sums[:, roles], alone.sums[:, roles], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(together.results, alone.results, rtol=1e-4, atol=0.0)
    assert torch.equal(together.tops[:, roles, :3], alone.tops[:, roles, :3])
    assert (together.sums[:, 2, 4:].sum(1) == grad.shape[0] * torch.tensor(OUTPUTS)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_on_the_meta_device(recipe: str) -> None:
    x = torch.empty(50, INPUTS, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.empty(4, out, INPUTS, device="meta", requires_grad=True) for out in OUTPUTS]
    counts = torch.empty(4, dtype=torch.int64, device="meta")
    y = ops.grouped_linear(x, weights, counts, QuantGrouped(_numerics(recipe), torch.bfloat16))
    torch.autograd.backward(y.sum())
    assert y.shape == (50, sum(OUTPUTS))
    assert all(_gradient(leaf).shape == leaf.shape for leaf in (x, *weights))
