"""Products of scaled tensors on a GPU: which path a device takes, operands as the path wants them, the product itself.

    path = path_for(numerics("fp8-block128"), unit_of(device))    # RequestError below the needed capability
    rows, turned = both_ways(x, Operand(scheme, multiple))        # filled up with zeros
    y = multiply_on(path, rows, weight)

| path | what runs | for |
| --- | --- | --- |
| scaled_mm | `F.scaled_mm`: cuBLASLt, CUTLASS for rows | per tensor, per row; blocks of 128 on Hopper; MXFP8, NVFP4 |
| triton | the product of `bessemer.ops.triton` | blocks of 128 on Blackwell, and on Hopper with CUDA before 12.9 |
| emulated | decoded to bfloat16, `product.multiply` | a CPU; any other device if asked for |

`precision.products` makes the three products of a layer of these. Not one of the GPU paths has been run on a GPU of
this project. On a CPU the tests run `F.scaled_mm` itself for scales per tensor and row, the Triton path in Triton's
interpreter, and torch's own checks of shapes, strides and types (those of CUDA) on the meta device for all of them.

Legend: M, N, K of a product, R rows, C columns, A x B tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.ops import triton as triton_ops
from bessemer.precision.casts import pack
from bessemer.precision.formats import E2M1, E4M3, E8M0
from bessemer.precision.numerics import Numerics
from bessemer.precision.product import hadamard, multiply
from bessemer.precision.scaled import ROW, TENSOR, Grain, Scaled, Scheme, quantise

__all__ = ["Operand", "Path", "Unit", "across", "along", "both_ways", "filled", "multiply_on", "path_for", "unit_of"]

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
    fix = "the recipe bf16, or one with a scale per tensor; or precision.emulate = true"
    raise RequestError(what, code="precision-capability", fix=fix)


def _path(numerics: Numerics, unit: Unit) -> tuple[Path | None, str]:
    """(path, "") or (None, what it lacks). Sources: `scaled_mm_arch_allowed` and `_check_deepseek_support` of torch's
    aten/native/cuda/ScaledBlas.cpp; cuBLAS documentation, "Narrow precision data types usage" (MXFP8 and NVFP4 from
    10.0; 12.x isn't taken, of which nothing is known here); Moore Threads' first units for FP8 are those of MP31 (the
    S5000)."""
    grain = numerics.x.grain
    least = {"cuda": (8, 9), "musa": (3, 1)}[unit.kind]
    if grain in (TENSOR, ROW):
        if unit.capability >= least and unit.scaled_mm:
            return "scaled_mm", ""
        return None, f"compute capability {least[0]}.{least[1]} and torch's scaled_mm for {unit.kind}"
    if unit.kind == "cuda" and numerics.x.scale_format is not None:
        if unit.capability[0] == 10 and unit.cuda >= (12, 8) and unit.scaled_mm:
            return "scaled_mm", ""
        return None, "compute capability 10.x with CUDA 12.8 or later"
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
    b. Sizes are whole multiples, see `core.linear_layers.multiples`; torch or `ops.triton` refuse others."""
    if path == "emulated" or not (a_MK.codes.numel() and b_NK.codes.numel()):
        y = multiply(a_MK, b_NK, dtype)
        return y if bias_N is None else y + bias_N.to(dtype)
    if path == "triton":
        kernels = triton_ops.kernels()
        sides = (kernels.Blocks(s.codes, _side_by_side(s), s.amax, s.scheme.grain == _SQUARE) for s in (a_MK, b_NK))
        product: Tensor = kernels.multiply(*sides, dtype, bias_N=bias_N)
        return product
    fused = None if bias_N is None or dtype == torch.float32 else bias_N.to(dtype)
    (codes_a, scale_a, kind_a, order_a), (codes_b, scale_b, kind_b, order_b) = _given(a_MK), _given(b_NK, second=True)
    y = F.scaled_mm(
        codes_a, codes_b.t(), scale_a, kind_a, scale_b, kind_b, order_a, order_b, bias=fused, output_dtype=dtype
    )  # without fast accumulation: sums are promoted
    return y if fused is not None or bias_N is None else y.add_(bias_N)


def _given(side: Scaled, *, second: bool = False) -> tuple[Tensor, Any, Any, Any]:
    """Codes, scales, their kind and order as `F.scaled_mm` takes them. Those of squares of 128 lie K first, in rows of
    16 bytes; those of MXFP8 and NVFP4 in tiles (`_swizzled`), of which the second has a scale of the tensor besides."""
    grain, kinds, orders = side.scheme.grain, F.ScalingType, F.SwizzleType
    if grain == TENSOR:
        return side.codes, side.scale.view(()), kinds.TensorWise, None
    if grain == ROW:
        return side.codes, side.scale.t() if second else side.scale, kinds.RowWise, None
    if grain == _BLOCK:
        return side.codes, _side_by_side(side), kinds.BlockWise1x128, None
    if side.scheme.scale_format is E8M0:
        return side.codes, _swizzled(side.scale), kinds.BlockWise1x32, orders.SWIZZLE_32_4_4
    if side.scheme.format is E2M1:
        scale = side.scale if grain.rows == 1 else side.scale.repeat_interleave(grain.rows, 0)
        two = [_swizzled(scale[: side.codes.shape[0]]), side.tensor_scale]
        codes = pack(side.codes).view(torch.float4_e2m1fn_x2)
        return codes, two, [kinds.BlockWise1x16, kinds.TensorWise], [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE]
    return side.codes, F.pad(side.scale, (0, -side.scale.shape[1] % 4)).t(), kinds.BlockWise128x128, None


def _swizzled(scale_AB: Tensor) -> Tensor:
    """One-byte scales in the order in which Blackwell's units read them: tiles of 128 rows by 4 columns, one after the
    other along a row of tiles, in each the four rows r, r + 32, r + 64, r + 96 side by side (cuBLAS documentation,
    "1D block scaling factors layout")."""
    rows, cols = scale_AB.shape
    bytes_AB = F.pad(scale_AB.view(torch.uint8), (0, -cols % 4, 0, -rows % 128))
    tiles = bytes_AB.view(bytes_AB.shape[0] // 128, 4, 32, bytes_AB.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().flatten().view(scale_AB.dtype)


def _side_by_side(side: Scaled) -> Tensor:
    """Scales per 1 x 128 with those of a block's rows side by side, which is how the kernels store them."""
    return side.scale if side.scheme.grain == _SQUARE else side.scale.t().contiguous().t()


@dataclass(frozen=True)
class Operand:
    """How to quantise one: `multiple` of both its sizes (`multiples(...).k`), up to which it is filled with
    zeros, which changes no scale and no result; `rotated`: its transpose by a Hadamard matrix first; `past` and
    `generator` as `quantise` takes them."""

    scheme: Scheme
    multiple: int
    rotated: bool = False
    past: Tensor | None = None
    generator: torch.Generator | None = None


def filled(x_RC: Tensor, multiple: int) -> Tensor:
    """x with zeros up to whole multiples in both dimensions."""
    rows, cols = x_RC.shape
    if not (rows % multiple or cols % multiple):
        return x_RC
    return F.pad(x_RC, (0, -cols % multiple, 0, -rows % multiple))


def along(x_RC: Tensor, how: Operand) -> Scaled:
    """x with scales along its columns, filled up."""
    if _by_kernel(x_RC, how):
        return _kernel(x_RC, how, both=False)[0]
    return quantise(filled(x_RC, how.multiple), how.scheme, past=how.past, generator=how.generator)


def across(x_RC: Tensor, how: Operand) -> Scaled:
    """The transpose of x with scales along what were its rows, filled up."""
    if how.scheme.grain.symmetric and not how.rotated:
        return both_ways(x_RC, how)[1]
    x_CR = x_RC.t().contiguous()
    return along(hadamard(x_CR) if how.rotated else x_CR, how)


def both_ways(x_RC: Tensor, how: Operand) -> tuple[Scaled, Scaled]:
    """`along` and `across`; in one read where a kernel does it."""
    if _by_kernel(x_RC, how) and not how.rotated:
        first, *second = _kernel(x_RC, how, both=True)
        return first, second[0]
    made = along(x_RC, how)
    if how.scheme.grain.symmetric and not how.rotated:
        return made, replace(made, codes=made.codes.t().contiguous(), scale=made.scale.t())
    return made, across(x_RC, how)


def _by_kernel(x: Tensor, how: Operand) -> bool:
    """Whether Triton quantises x: blocks of 128, rounded to nearest, on CUDA or anywhere in its interpreter."""
    if how.scheme.grain not in (_BLOCK, _SQUARE) or how.scheme.format is not E4M3 or how.generator is not None:
        return False
    return not triton_ops.why_absent() and bool(triton_ops.kernels().runs_on(x.device))


def _kernel(x_RC: Tensor, how: Operand, *, both: bool) -> list[Scaled]:
    kernels = triton_ops.kernels()
    settings = kernels.Quantising(power_of_two=how.scheme.power_of_two, multiple=how.multiple, both=both)
    made = kernels.quantise_blocks(x_RC, settings, square=how.scheme.grain == _SQUARE)
    return [Scaled(b.codes, b.scale, None, b.amax, how.scheme) for b in made if b is not None]
