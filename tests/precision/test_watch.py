"""The figures of the precision watch against definitions in float64, and the rules of the fall-back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bessemer.ops.linear import linear
from bessemer.precision import QuantProducts, Scheme, numerics, quantise
from bessemer.precision.formats import E4M3, E5M2
from bessemer.precision.scaled import ROW, TENSOR, Grain
from bessemer.precision.watch import (
    EXPONENTS,
    Figures,
    Limits,
    Table,
    TensorWatch,
    Window,
    expected_error,
    expected_result_error,
    history_moves,
)

CPU = torch.device("cpu")
SCHEMES = [Scheme(E4M3, TENSOR), Scheme(E5M2, TENSOR), Scheme(E4M3, ROW), Scheme(E4M3, Grain(1, 128)),
           Scheme(E4M3, Grain(128, 128))]  # fmt: skip


def numbers(rows: int = 70, cols: int = 200, seed: int = 0) -> Tensor:
    """Over many powers of two, some exact zeros: so that each count has something to count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-24, 3, (rows, cols), generator=generator)
    return torch.where(torch.rand(rows, cols, generator=generator) < 0.1, 0.0, x).bfloat16()


def figures_of(watch: TensorWatch) -> Figures:
    names = tuple(f"layers.0.t{i}" for i in range(len(watch.sizes)))
    table = Table.empty(names, CPU)
    table.take(list(range(len(names))), watch, None)
    return table.figures()


def open_watch(*sizes: int) -> TensorWatch:
    return TensorWatch(sizes, CPU, Window(forward=True))


@pytest.mark.parametrize(
    ("scheme", "past"), [(s, None) for s in SCHEMES] + [(s, 0.5) for s in SCHEMES if s.grain == TENSOR], ids=str
)
def test_figures_are_their_definitions(scheme: Scheme, past: float | None) -> None:
    x = numbers()
    made = quantise(x, scheme, past=None if past is None else torch.tensor(past))
    watch = open_watch(4)
    watch.operand("x", 0, x, made)
    found = figures_of(watch).roles["x"]
    wide, read = x.double(), made.dequantise(torch.float64)
    rows, cols = scheme.grain.rows or 70, scheme.grain.cols or 200
    scale = made.scales().repeat_interleave(rows, 0)[:70].repeat_interleave(cols, 1)[:, :200].double()
    some = wide != 0
    assert found["amax"] == [pytest.approx(float(wide.abs().max()), rel=1e-3)]
    assert found["scale_high"] == [pytest.approx(float(scale[some].max()), rel=1e-3)]
    assert found["scale_low"] == [pytest.approx(float(scale[some].min()), rel=1e-3)]
    clipped = (wide.abs() / scale > scheme.format.max).sum() / some.sum()
    assert found["saturated"] == [pytest.approx(float(clipped), rel=1e-3)]
    assert (float(clipped) > 0) == (past is not None)
    lost = (some & (read == 0)).sum() / some.sum()
    assert float(lost) > 0 or scheme.format is E5M2
    assert found["flushed"] == [pytest.approx(float(lost), rel=1e-3)]
    assert found["error"] == [pytest.approx(float((read - wide).norm() / wide.norm()), rel=1e-3)]
    exponents = torch.log2((wide.abs() / scale)[some]).floor().clamp(EXPONENTS.start, EXPONENTS.stop - 1)
    first, *parts = found["histogram"][0]
    for i, part in enumerate(parts):
        assert part == round(1e4 * float((exponents == first + i).sum() / some.sum()))


def test_the_spread_tells_a_loud_channel() -> None:
    x = numbers().float()
    x[:, 3] = 2.0**12
    watch = open_watch(4)
    watch.operand("x", 0, x, quantise(x, Scheme(E4M3, TENSOR)))
    channels = x.abs().amax(0)
    want = math.log2(float(channels.max() / channels.sort().values[99]))
    assert figures_of(watch).roles["x"]["spread"] == [pytest.approx(want, rel=1e-3)]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "fp8-block128", "mxfp8"])
def test_a_layer_is_seen_whole(recipe: str) -> None:
    """Through `linear`: three roles, three logical tensors, errors of their results; and no bit of the layer moves."""
    x, w = numbers(64, 128).requires_grad_(), torch.randn(12, 128, requires_grad=True)
    grads = []
    watch, sizes = open_watch(6, 4, 2), (6, 4, 2)
    for seen in (None, watch):
        y = linear(x, w, None, QuantProducts(numerics(recipe), torch.bfloat16, sizes, watch=seen))
        y.backward(numbers(64, 12, seed=1))
        grads.append((y.detach(), x.grad, w.grad))
        x.grad = w.grad = None
    for plain, watched in zip(*grads, strict=True):
        assert torch.equal(plain, watched)
    found = figures_of(watch)
    want = (x.detach() @ w.detach().bfloat16().t()).float()
    for n, (mine, right) in enumerate(zip(grads[1][0].split(sizes, 1), want.split(sizes, 1), strict=True)):
        assert found.results[n] == pytest.approx(float((mine.float() - right).norm() / right.norm()), rel=1e-2)
    for role in ("weight", "grad"):
        assert len(set(found.roles[role]["amax"])) == 3, "each tensor has its own"
    assert len(set(found.roles["x"]["amax"])) == 1, "the input is that of all"


def test_only_forward_passes_count_inputs_and_weights() -> None:
    """What is made again for backward is the same once more; gradients come outside of a forward pass."""
    x, scheme = numbers(), Scheme(E4M3, TENSOR)
    watch = TensorWatch((4,), CPU, Window())
    with watch.window:
        watch.operand("x", 0, x, quantise(x, scheme))
    for role in ("x", "weight", "grad"):
        watch.operand(role, 0, x, quantise(x, scheme))
    watch.result(x, torch.ones(4, 200), torch.zeros(70, 4))
    total = [float(s) for s in watch.sums[0].sum(1)]
    assert total[0] == total[2] > 0 and total[1] == 0 and not watch.results.any()


def test_parts_add_up_to_the_whole() -> None:
    """Rows divided among two ranks, with the scale of the whole: sums and maxima."""
    x, scheme = numbers(), Scheme(E4M3, TENSOR)
    made = quantise(x, scheme)
    whole = open_watch(4)
    whole.operand("x", 0, x, made)
    tables = []
    for part in (x[:30], x[30:]):
        watch = open_watch(4)
        watch.operand("x", 0, part, quantise(part, scheme, past=made.amax))
        tables.append(Table.empty(("layers.0.t0",), CPU))
        tables[-1].take([0], watch, None)
    tables[0].put_summed(tables[0].summed() + tables[1].summed())
    tables[0].put_largest(torch.maximum(tables[0].largest(), tables[1].largest()))
    got, want = tables[0].figures().roles["x"], figures_of(whole).roles["x"]
    got.pop("spread"), want.pop("spread")
    assert got == want


def test_zeros_and_nothing_have_no_figures() -> None:
    watch = open_watch(4)
    for rows in (0, 5):
        zeros = torch.zeros(rows, 128)
        watch.operand("grad", 0, zeros, quantise(zeros, Scheme(E4M3, Grain(1, 128))))
    found = figures_of(watch)
    assert found.roles["grad"] == {"amax": [0.0], "histogram": [None]}
    assert found.roles["x"] == {"histogram": [None]} and found.results == [None]
    assert Limits().trouble(found, numerics("fp8-block128")) == [""]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_expected_error_is_that_of_normal_numbers(fmt: object, stochastic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scheme = Scheme(fmt, TENSOR)
    for size in (1.0, 1.3, 1.7):
        x = size * torch.randn(512, 512, generator=generator)
        read = quantise(x, scheme, generator=generator if stochastic else None).dequantise(torch.float64)
        error = float((read - x).norm() / x.double().norm())
        assert error == pytest.approx(expected_error(scheme, stochastic=stochastic), rel=0.02)


def test_the_expected_error_of_a_result() -> None:
    assert expected_result_error(numerics("fp8-current")) == pytest.approx(0.0375, rel=0.01)


def test_moves_of_a_history() -> None:
    """The newest first: 1, 2, 1, 8, then 2, with a 0 of before the first step."""
    jump, burst = history_moves(torch.tensor([[2.0, 8.0, 1.0, 2.0, 1.0, 0.0], [4.0, 4.0, 0.0, 0.0, 0.0, 0.0]]))
    assert jump.tolist() == [3.0, 0.0], "from 1 to 8"
    assert burst.tolist() == [2.0, 0.0], "8 over the 2 that came before it"
    assert [t.tolist() for t in history_moves(torch.tensor([[3.0]]))] == [[0.0], [0.0]]
    assert [t.tolist() for t in history_moves(torch.zeros(1, 4))] == [[0.0], [0.0]]


def made_up(error: float = 0.026, saturated: float = 0.0, grad: float = 0.05, result: float = 0.037) -> Figures:
    tensor = {"error": [error], "saturated": [0.0]}
    return Figures(
        ("layers.0.attn.q",),
        {"x": tensor | {"saturated": [saturated]}, "weight": tensor, "grad": {"error": [grad], "saturated": [0.0]}},
        [result],
    )


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (made_up(), ""),
        (made_up(saturated=0.0099, grad=0.158, result=0.112), ""),
        (made_up(saturated=0.0101), "1.01% of x saturated, above 1%"),
        (made_up(grad=0.16), "error of grad 0.16, above 0.159"),
        (made_up(result=0.1126), "error of the result 0.113, above 0.112"),
        (made_up(grad=0.2, result=0.2), "error of grad 0.2, above 0.159; error of the result 0.2, above 0.112"),
    ],
)
def test_trouble_begins_above_its_limits(figures: Figures, said: str) -> None:
    assert Limits().trouble(figures, numerics("fp8-current")) == [said]
