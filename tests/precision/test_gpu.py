"""The paths of a GPU: which device takes which, and the layer on them as far as a machine without a GPU can tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.core.recipes import RECIPES
from bessemer.precision import Call, Grain, Scheme, numerics, quant_linear, quantise
from bessemer.precision.formats import E4M3
from bessemer.precision.gpu import Unit, linear_on, multiply_on, path_for, unit_of
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
        ("mxfp8", Unit("cuda", BLACKWELL, (13, 0)), "1 x 32"),
        ("nvfp4", Unit("cuda", BLACKWELL, (13, 0)), "1 x 16"),
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
    path: str, recipe: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu", bias: bool = True
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
    y = linear_on(path, x, w, b if bias else None, Call(n, history, seen))
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
@pytest.mark.parametrize("recipe", FP8)
def test_cuda_takes_the_arguments(recipe: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """On the meta device torch checks types, shapes, strides and multiples as for CUDA: all three products."""
    tokens, inputs, outputs = shape
    made = _trained("scaled_mm", recipe, shape, dtype, device="meta")
    assert [tuple(t.shape) for t in made[:4]] == [(tokens, outputs), (tokens, inputs), (outputs, inputs), (outputs,)]


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


def test_the_emulated_path_is_quant_linear() -> None:
    x, w = _draw(8, 16), _draw(24, 16, seed=1)
    call = Call(numerics("fp8-current"))
    assert torch.equal(linear_on("emulated", x, w, None, call), quant_linear(x, w, None, call))


@pytest.mark.parametrize("recipe", FP8[:3])
def test_no_tokens(recipe: str) -> None:
    y, dx, dw, _ = _trained("scaled_mm", recipe, (0, 32, 48), torch.bfloat16, bias=False)
    assert y.shape == (0, 48) and dx.shape == (0, 32) and not dw.any()


@pytest.mark.parametrize("recipe", FP8[:3])
def test_non_finite_inputs_spoil_the_result(recipe: str) -> None:
    n = numerics(recipe)
    x = _draw(32, 64, dtype=torch.bfloat16)
    x[3, 5] = float("inf")
    call = Call(n, torch.zeros(3, n.history) if n.delayed else None)
    assert linear_on("scaled_mm", x, _draw(48, 64, seed=1), None, call)[3].isnan().all()
