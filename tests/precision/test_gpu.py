"""The paths of a GPU: which device takes which, and the layer on them as far as a machine without a GPU can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from parallel.precision_parity import job_of
from torch import Tensor
from train.toy import run_steps, toy_parts

from bessemer.core.errors import RequestError
from bessemer.core.recipes import RECIPES
from bessemer.models.quantised import Quantised
from bessemer.ops.linear import linear
from bessemer.precision import (
    Call,
    Grain,
    QuantProducts,
    Scaled,
    Scheme,
    keyed_generator,
    numerics,
    quant_linear,
    quantise,
)
from bessemer.precision.formats import E4M3, E8M0
from bessemer.precision.gpu import Path, Unit, _swizzled, multiply_on, path_for, unit_of
from bessemer.precision.outliers import relative_error

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
FP8 = ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block128"]
SHAPES = [(256, 128, 384), (100, 72, 40), (1, 130, 17), (129, 576, 2112)]


def _draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("recipe", "unit", "path"),
    [
        ("fp8-current", Unit("cuda", ADA, (13, 0)), "scaled_mm"),
        ("fp8-delayed", Unit("cuda", HOPPER, (12, 6)), "scaled_mm"),
        ("fp8-row", Unit("cuda", BLACKWELL, (13, 0)), "scaled_mm"),
        ("fp8-block128", Unit("cuda", HOPPER, (13, 0)), "scaled_mm"),
        ("fp8-block128", Unit("cuda", HOPPER, (12, 8)), "triton"),
        ("fp8-block128", Unit("cuda", BLACKWELL, (13, 0)), "triton"),
        ("fp8-current", Unit("musa", (3, 1)), "scaled_mm"),
        ("mxfp8", Unit("cuda", BLACKWELL, (12, 8)), "scaled_mm"),
        ("nvfp4", Unit("cuda", (10, 3), (13, 0)), "scaled_mm"),
        *((name, Unit("cpu"), "emulated") for name in (*FP8, "mxfp8", "nvfp4")),
    ],
)
def test_the_path_of_a_device(recipe: str, unit: Unit, path: str) -> None:
    assert path_for(numerics(recipe), unit) == path
    assert path_for(numerics(recipe), unit, emulate=True) == path  # asking for emulation replaces no real path


@pytest.mark.parametrize(
    ("recipe", "unit", "lacks"),
    [
        ("fp8-current", Unit("cuda", (8, 0), (13, 0)), "8.9"),
        ("fp8-row", Unit("cuda", (8, 6), (13, 0)), "8.9"),
        ("fp8-block128", Unit("cuda", ADA, (13, 0)), "9.0"),
        ("fp8-block128", Unit("cuda", HOPPER, (12, 8), triton=False), "Triton"),
        ("fp8-block128", Unit("musa", (3, 1)), "1 x 128"),
        ("fp8-current", Unit("musa", (2, 2)), "3.1"),
        ("fp8-current", Unit("musa", (3, 1), scaled_mm=False), "scaled_mm for musa"),
        ("mxfp8", Unit("cuda", HOPPER, (13, 0)), "10.x"),
        ("mxfp8", Unit("cuda", BLACKWELL, (12, 6)), "12.8"),
        ("nvfp4", Unit("cuda", (12, 0), (13, 0)), "10.x"),
        ("nvfp4", Unit("musa", (3, 1)), "1 x 16"),
    ],
)
def test_a_device_that_cannot_is_refused_or_emulates(recipe: str, unit: Unit, lacks: str) -> None:
    with pytest.raises(RequestError, match=lacks) as refused:
        path_for(numerics(recipe), unit)
    assert refused.value.code == "precision-capability" and refused.value.exit_code == 2
    assert path_for(numerics(recipe), unit, emulate=True) == "emulated"


def test_this_cpu_emulates() -> None:
    unit = unit_of(torch.device("cpu"))
    assert unit.kind == "cpu" and unit.scaled_mm
    assert all(path_for(numerics(n), unit) == "emulated" for n, r in RECIPES.items() if r.quantised)


def _trained(
    path: Path, recipe: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu", bias: bool = True
) -> list[Tensor]:
    tokens, inputs, outputs = shape
    n = numerics(recipe)
    history = torch.zeros(3, n.history, device=device) if n.delayed else None
    x, w, b, g = (
        t.to(device)
        for t in (
            _draw(tokens, inputs, dtype=dtype),
            _draw(outputs, inputs, seed=1) / 16,
            _draw(outputs, seed=2),
            _draw(tokens, outputs, seed=3, dtype=dtype),
        )
    )
    leaves = [x, w, b] if bias else [x, w]
    for leaf in leaves:
        leaf.requires_grad_()
    seen = torch.zeros(3, device=device)
    rounding = keyed_generator(4) if n.stochastic and device == "cpu" else None
    if n.stochastic and device == "meta":
        n = replace(n, stochastic=False)
    y = quant_linear(x, w, b if bias else None, Call(n, history, seen, rounding, path=path))
    y.backward(g)
    return [y.detach(), *(leaf.grad for leaf in leaves), seen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", FP8[:3])
def test_the_layer_on_scaled_mm_is_the_emulated_one(
    recipe: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """torch's operator itself, as a CPU has it, for all three products, filled up to multiples of 16."""
    bound = 2e-6 if dtype == torch.float32 else 3.4e-3  # bfloat16: each side rounds its result once
    got, want = (_trained(path, recipe, shape, dtype) for path in ("scaled_mm", "emulated"))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", [*FP8, "mxfp8", "nvfp4"])
def test_cuda_takes_the_arguments(recipe: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """On the meta device torch checks types, shapes, strides and multiples as for CUDA: all three products."""
    tokens, inputs, outputs = shape
    made = _trained("scaled_mm", recipe, shape, dtype, device="meta")
    assert [tuple(t.shape) for t in made[:4]] == [(tokens, outputs), (tokens, inputs), (outputs, inputs), (outputs,)]


def _packed(path: Path, recipe: str, *, device: str = "cpu", coded: bool = False, smooth: bool = False) -> list[Tensor]:
    """Query, key and value of very different size in one weight, none of them whole multiples; result, gradients, the
    amaxes seen, and how often each operand was watched."""
    n, sizes = replace(numerics(recipe), stochastic=False), (40, 24, 72)
    x, w, b, g = (
        _draw(50, 104).to(device),
        torch.cat([_draw(rows, 104, seed=rows) * 2.0**-rows for rows in sizes]).to(device),
        _draw(136, seed=2).to(device),
        torch.cat([_draw(50, rows, seed=rows) * 2.0**-rows for rows in sizes], 1).to(device),
    )
    seen, watch = torch.zeros(3, 3, device=device), _Heard()
    channels = torch.exp2(torch.arange(104) % 5.0).to(device) if smooth else None
    past = torch.zeros(3, 3, device=device) if n.delayed else None
    products = QuantProducts(n, x.dtype, sizes, past, seen=seen, channels=channels, coded=coded, watch=watch, path=path)
    for leaf in (x, w, b):
        leaf.requires_grad_()
    y = linear(x, w, b, products)
    y.backward(g)
    return [y.detach(), x.grad, w.grad, b.grad, seen, torch.tensor(watch.heard)]


class _Heard:
    """What a watch is told, of the forward pass and of gradients: as many operands, of the codes' size."""

    def __init__(self) -> None:
        self.heard = [0, 0, 0]

    def operand(self, role: str, place: int, x_RC: Tensor, made: Scaled) -> None:
        assert x_RC.shape == made.codes.shape and place < 3
        self.heard[("x", "weight", "grad").index(role)] += 1

    def result(self, x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor) -> None:
        assert y_TO.shape == (x_TI.shape[0], weight_OI.shape[0])


@pytest.mark.parametrize(("coded", "smooth"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("recipe", FP8[:3])
def test_packed_tensors_keep_their_own_scales(recipe: str, coded: bool, smooth: bool) -> None:
    got, want = (_packed(path, recipe, coded=coded, smooth=smooth) for path in ("scaled_mm", "emulated"))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape and relative_error(ours.double(), theirs.double()) < 2e-6
    for ours, theirs in zip(got[2].split((40, 24, 72)), want[2].split((40, 24, 72)), strict=True):
        assert relative_error(ours, theirs) < 2e-6  # of each tensor, the smallest too


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("recipe", [*FP8, "mxfp8", "nvfp4"])
def test_cuda_takes_packed_tensors(recipe: str, coded: bool) -> None:
    y, dx, dw, db, *_ = _packed("scaled_mm", recipe, device="meta", coded=coded)
    assert [tuple(t.shape) for t in (y, dx, dw, db)] == [(50, 136), (50, 104), (136, 104), (136,)]
    assert y.is_contiguous() and dx.is_contiguous() and dw.is_contiguous()


def test_the_scales_of_blackwell_lie_in_its_order() -> None:
    """cuBLAS: in a tile of 128 x 4 the scale of row r and column c stands at (r % 32) * 16 + r // 32 * 4 + c; tiles
    follow each other along a row of tiles."""
    rows, cols = 200, 6
    side = quantise(torch.exp2(_draw(rows, 32 * cols) * 8), Scheme(E4M3, Grain(1, 32), E8M0))
    found = _swizzled(side.scale).view(torch.uint8).tolist()
    assert len(found) == 256 * 8
    scale = side.scale.view(torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = r // 128 * 2 + c // 4
            assert found[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] == scale[r, c]


def test_the_checks_of_cuda_can_fail() -> None:
    """What the tests above rely on: the same product without filling up, and scales in another order."""
    a, b = (quantise(_draw(64, 72).to("meta"), Scheme(E4M3, Grain(0, 0))) for _ in range(2))
    with pytest.raises(RuntimeError, match="divisible by 16"):
        multiply_on("scaled_mm", a, b)
    codes = torch.empty(128, 256, dtype=torch.float8_e4m3fn, device="meta")
    rows, kind = torch.empty(128, 2, device="meta"), F.ScalingType.BlockWise1x128
    with pytest.raises(RuntimeError, match="blockwise scaling"):
        F.scaled_mm(codes, codes.t(), rows, kind, rows, kind)
    sideways = rows.t().contiguous().t()
    assert F.scaled_mm(codes, codes.t(), sideways, kind, sideways, kind).shape == (128, 128)


@pytest.mark.parametrize("recipe", FP8[:3])
def test_no_tokens(recipe: str) -> None:
    y, dx, dw, _ = _trained("scaled_mm", recipe, (0, 32, 48), torch.bfloat16, bias=False)
    assert y.shape == (0, 48) and dx.shape == (0, 32) and not dw.any()


@pytest.mark.parametrize("recipe", FP8[:3])
def test_non_finite_inputs_spoil_the_result(recipe: str) -> None:
    n = numerics(recipe)
    x = _draw(32, 64, dtype=torch.bfloat16)
    x[3, 5] = float("inf")
    call = Call(n, torch.zeros(3, n.history) if n.delayed else None, path="scaled_mm")
    assert quant_linear(x, _draw(48, 64, seed=1), None, call)[3].isnan().all()


def _steps(
    recipe: str, unit: Unit | None, monkeypatch: pytest.MonkeyPatch, **precision: object
) -> tuple[set[str], list[float]]:
    """The paths and losses of three training steps on a device that says it is `unit`."""
    if unit is not None:
        monkeypatch.setattr("bessemer.train.assembly.unit_of", lambda device: unit)
    parts = toy_parts(job_of(recipe, precision=precision))
    parts.module.compute_dtype = torch.float32
    paths = {m.path for m in parts.module.modules() if isinstance(m, Quantised)}
    return paths, [result.loss for result in run_steps(parts, 0, 3)]


@pytest.mark.parametrize("recipe", FP8[:3])
def test_training_takes_the_path_of_its_device(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's scaled product on this CPU, in every projection; packed ones, histories and padding among them."""
    emulated, want = _steps(recipe, None, monkeypatch)
    paths, losses = _steps(recipe, Unit("cuda", HOPPER, (13, 0)), monkeypatch)
    assert (emulated, paths) == ({"emulated"}, {"scaled_mm"})
    assert losses == pytest.approx(want, rel=1e-5)


def test_training_on_a_device_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = Unit("cuda", (8, 0), (13, 0))
    with pytest.raises(RequestError, match=r"8\.9"):
        _steps("fp8-current", ampere, monkeypatch)
    assert _steps("fp8-current", ampere, monkeypatch, emulate=True)[0] == {"emulated"}
