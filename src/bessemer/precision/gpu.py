"""The quantised linear layer on a GPU: which path a device takes, and the three products on that path.

    path = path_for(numerics("fp8-block128"), unit_of(device))    # RequestError below the needed capability
    y = linear_on(path, x, weight, None, call)                    # `quant_linear` on that path

| path | what runs | for |
| --- | --- | --- |
| scaled_mm | `F.scaled_mm`: cuBLASLt, or CUTLASS for scales per row | a scale per tensor or row; blocks on Hopper |
| triton | the product of `bessemer.ops.triton` | blocks on newer GPUs, and on Hopper with CUDA before 12.9 |
| emulated | `quant_linear`: decoded to bfloat16 | a CPU; any other device if asked for |

Not one of the GPU paths has been run on a GPU of this project. On a CPU the tests run `F.scaled_mm` itself for scales
per tensor and row, the Triton path in Triton's interpreter, and torch's own checks of shapes, strides and types (those
of CUDA) on the meta device for all three.

Legend: T tokens, I inputs, O outputs; M, N, K of a product, R rows, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.ops import triton as triton_ops
from bessemer.precision.formats import E4M3
from bessemer.precision.linear import Call, quant_linear
from bessemer.precision.numerics import Numerics
from bessemer.precision.product import multiply
from bessemer.precision.scaled import ROW, TENSOR, Grain, Scaled, Scheme
from bessemer.precision.shapes import multiples

__all__ = ["Path", "Unit", "linear_on", "multiply_on", "path_for", "unit_of"]

Path = Literal["scaled_mm", "triton", "emulated"]
_BLOCK, _SQUARE = Grain(1, 128), Grain(128, 128)
_DISPATCH = {"cuda": "CUDA", "musa": "PrivateUse1", "cpu": "CPU"}  # torch_musa takes the key for outside devices


@dataclass(frozen=True)
class Unit:
    """What decides the path of a device: `capability` as its vendor numbers it, `cuda` torch's version of CUDA,
    `scaled_mm` whether torch has the operator for it, `triton` whether Triton is installed."""

    kind: str
    capability: tuple[int, int] = (0, 0)
    cuda: tuple[int, int] = (0, 0)
    scaled_mm: bool = True
    triton: bool = True


def unit_of(device: torch.device) -> Unit:
    """Of a device of kind cpu, cuda or musa that torch can use."""
    capability = (0, 0)
    if device.type != "cpu":
        capability = getattr(torch, device.type).get_device_capability(device)
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    key = _DISPATCH[device.type]
    has = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", key)
    return Unit(device.type, capability, (int(major), int(minor)), has, not triton_ops.why_absent())


def path_for(numerics: Numerics, unit: Unit, *, emulate: bool = False) -> Path:
    """The path of a recipe on a device. Where the device can't: RequestError `precision-capability` with the reason,
    or "emulated" if that was asked for (many times slower than bfloat16 without quantising)."""
    if unit.kind == "cpu":
        return "emulated"
    path, lacks = _path(numerics, unit)
    if path is not None:
        return path
    if emulate:
        return "emulated"
    at = ".".join(str(n) for n in unit.capability)
    what = f"{numerics.recipe} needs {lacks}; this {unit.kind} device is of compute capability {at}"
    fix = "the recipe bf16, or one with a scale per tensor; or path_for(..., emulate=True)"
    raise RequestError(what, code="precision-capability", fix=fix)


def _path(numerics: Numerics, unit: Unit) -> tuple[Path | None, str]:
    """(path, "") or (None, what it lacks). Sources: `scaled_mm_arch_allowed` and `_check_deepseek_support` of torch's
    aten/native/cuda/ScaledBlas.cpp; Moore Threads' first units for FP8 are those of MP31 (the S5000)."""
    grain = numerics.x.grain
    least = {"cuda": (8, 9), "musa": (3, 1)}[unit.kind]
    if grain in (TENSOR, ROW):
        if unit.capability >= least and unit.scaled_mm:
            return "scaled_mm", ""
        return None, f"compute capability {least[0]}.{least[1]} and torch's scaled_mm for {unit.kind}"
    if grain != _BLOCK or unit.kind != "cuda":
        return None, f"products scaled per {grain.rows} x {grain.cols}, which no {unit.kind} path here has"
    if unit.capability[0] == 9 and unit.cuda >= (12, 9) and unit.scaled_mm:
        return "scaled_mm", ""
    if unit.capability[0] >= 9 and unit.triton:
        return "triton", ""
    return None, f"compute capability 9.0, and CUDA 12.9 on 9.0 or Triton ({triton_ops.INSTALL})"


def multiply_on(
    path: Path, a_MK: Scaled, b_NK: Scaled, dtype: torch.dtype = torch.bfloat16, bias_N: Tensor | None = None
) -> Tensor:
    """a b^T (+ bias) [M, N] in `dtype` (bfloat16 or float32) on a path that `path_for` gave for the schemes of a and
    b. Sizes are whole multiples, see `shapes.multiples`; torch or `ops.triton` refuse others."""
    if path == "emulated" or not (a_MK.codes.numel() and b_NK.codes.numel()):
        y = multiply(a_MK, b_NK, dtype)
        return y if bias_N is None else y + bias_N.to(dtype)
    if path == "triton":
        kernels = triton_ops.kernels()
        sides = (kernels.Blocks(s.codes, _side_by_side(s), s.amax, s.scheme.grain == _SQUARE) for s in (a_MK, b_NK))
        product: Tensor = kernels.multiply(*sides, dtype, bias_N=bias_N)
        return product
    (scale_a, kind_a), (scale_b, kind_b) = _scale_of(a_MK), _scale_of(b_NK, second=True)
    fused = None if bias_N is None or dtype == torch.float32 else bias_N.to(dtype)
    y = F.scaled_mm(
        a_MK.codes, b_NK.codes.t(), scale_a, kind_a, scale_b, kind_b, bias=fused, output_dtype=dtype
    )  # without fast accumulation: sums are promoted
    return y if fused is not None or bias_N is None else y.add_(bias_N)


def _scale_of(side: Scaled, *, second: bool = False) -> tuple[Tensor, Any]:
    """The scales as `F.scaled_mm` takes them, with their kind. Those of squares lie K first, in rows of 16 bytes."""
    grain = side.scheme.grain
    if grain == TENSOR:
        return side.scale.view(()), F.ScalingType.TensorWise
    if grain == ROW:
        return (side.scale.t() if second else side.scale), F.ScalingType.RowWise
    if grain == _BLOCK:
        return _side_by_side(side), F.ScalingType.BlockWise1x128
    return F.pad(side.scale, (0, -side.scale.shape[1] % 4)).t(), F.ScalingType.BlockWise128x128


def _side_by_side(side: Scaled) -> Tensor:
    """Scales per 1 x 128 with those of a block's rows side by side, which is how the kernels store them."""
    return side.scale if side.scheme.grain == _SQUARE else side.scale.t().contiguous().t()


class _LinearOn(torch.autograd.Function):
    """Keeps the codes of x transposed for wgrad, a byte an element. The weight is quantised again in backward: its
    transpose would live as long as the activations otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, path: Path) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        x_rows, x_cols = _both_ways(call, "x", rows)
        w_rows, _ = _both_ways(call, "weight", weight)
        filled = None if bias is None else F.pad(bias, (0, w_rows.codes.shape[0] - weight.shape[0]))
        y = multiply_on(path, x_rows, w_rows, x.dtype, filled)
        ctx.call, ctx.path, ctx.shape = call, path, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.history = None if call.history is None else call.history.clone()  # `advance` may come before backward
        ctx.save_for_backward(weight, x_cols.codes, x_cols.scale, x_cols.amax)
        return _cut(y, rows.shape[0], weight.shape[0]).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, codes, scale, amax = ctx.saved_tensors
        call = replace(ctx.call, history=ctx.history)
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        g_rows, g_cols = _both_ways(call, "grad", rows)
        if ctx.needs_input_grad[0]:
            w_cols = _both_ways(call, "weight", weight, again=True)[1]
            dx = multiply_on(ctx.path, g_rows, w_cols, grad.dtype)
            dx = _cut(dx, rows.shape[0], weight.shape[1]).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            x_cols = Scaled(codes, scale, None, amax, call.numerics.x)
            dw = _cut(multiply_on(ctx.path, g_cols, x_cols, grad.dtype), *weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[2] and ctx.bias_dtype is not None:
            db = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def linear_on(path: Path, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, call: Call) -> Tensor:
    """`quant_linear` on a path: x W^T + b [T, O] in x's type (bfloat16 or float32), differentiable. Sizes that the
    path can't take are filled up with zeros, which changes no scale and no result."""
    if path == "emulated":
        return quant_linear(x_TI, weight_OI, bias_O, call)
    y: Tensor = _LinearOn.apply(x_TI, weight_OI, bias_O, call, path)  # type: ignore[no-untyped-call]
    return y


def _cut(x_RC: Tensor, rows: int, cols: int) -> Tensor:
    return x_RC if x_RC.shape == (rows, cols) else x_RC[:rows, :cols].contiguous()


def _both_ways(call: Call, role: str, x_RC: Tensor, *, again: bool = False) -> tuple[Scaled, Scaled]:
    """x and its transpose, each with scales along its columns and filled up to whole multiples. `again`: already
    seen in this step."""
    scheme: Scheme = getattr(call.numerics, role)
    multiple = multiples(call.numerics).k
    if scheme.grain in (_BLOCK, _SQUARE) and scheme.format is E4M3 and _kernels_run_on(x_RC):
        made, turned = _by_kernel(scheme, x_RC, multiple)
        if not again:
            call.observe(role, made.amax)
        return made, turned
    rows, cols = x_RC.shape
    x_RC = F.pad(x_RC, (0, -cols % multiple, 0, -rows % multiple)) if rows % multiple or cols % multiple else x_RC
    made = call.quantised(role, x_RC, again=again)
    if scheme.grain.symmetric:
        return made, replace(made, codes=made.codes.t().contiguous(), scale=made.scale.t())
    return made, call.quantised(role, x_RC.t().contiguous(), again=True)


def _kernels_run_on(x: Tensor) -> bool:
    """Whether Triton can quantise x: on CUDA, or anywhere in its interpreter."""
    return not triton_ops.why_absent() and bool(triton_ops.kernels().runs_on(x.device))


def _by_kernel(scheme: Scheme, x_RC: Tensor, multiple: int) -> tuple[Scaled, Scaled]:
    """Both in one read."""
    kernels = triton_ops.kernels()
    how = kernels.Quantising(power_of_two=scheme.power_of_two, multiple=multiple)
    made = kernels.quantise_blocks(x_RC, how, square=scheme.grain == _SQUARE)
    first, second = (Scaled(b.codes, b.scale, None, b.amax, scheme) for b in made)
    return first, second
