"""The linear projection with a float32 master weight, computed in another type.

Legend: T tokens (any leading shape), I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.deferred import putting_off, weight_gradient
from bessemer.ops.registry import native_fits
from bessemer.ops.tracing import made_again, traced
from bessemer.runtime.kernels import native_kernel

__all__ = ["linear", "product"]

_FEW_ROWS = 16  # below, a product is bound by reading the weight and the choice doesn't matter


class _Linear(torch.autograd.Function):
    """Saves the master weight, not its converted copy: the copy would live from forward to backward, and under
    full sharding keep alive what FSDP frees. All type conversions together are 2 % of a profiled step on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaves = weight, bias
        low = weight.to(x.dtype)
        if x.dtype != torch.float32:
            return F.linear(x, low, None if bias is None else bias.to(x.dtype))
        y = product(x.reshape(-1, x.shape[-1]), low.t()).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = product(rows, weight.to(grad.dtype)).view(x.shape)
        weight_leaf, bias_leaf = ctx.leaves
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(weight_leaf, partial(_outer, grad, x, weight.dtype))
        if ctx.needs_input_grad[2]:
            db = weight_gradient(bias_leaf, partial(_sum, grad, bias_leaf.dtype))
        return dx, dw, db


def _outer(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])).to(dtype)


def _sum(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def product(a_TI: Tensor, b_IO: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, outside of autograd. float32 on a CPU goes through oneDNN instead of the BLAS that torch was built with:
    MKL reaches 88-96 GFLOP/s on a Zen 4 core where oneDNN reaches 100-107, forward and for the gradient of a.
    (For the gradient of b, whose long side is summed over, MKL is the faster.)"""
    onednn = a_TI.dtype == torch.float32 and a_TI.device.type == "cpu" and a_TI.shape[0] >= _FEW_ROWS
    if not (onednn and torch.backends.mkldnn.is_available()):
        return torch.mm(a_TI, b_IO, out=out)
    with native_kernel("linear", a_TI.dtype, lambda: 2.0 * a_TI.numel() * b_IO.shape[1]):
        made = torch.ops.mkldnn._linear_pointwise(a_TI, b_IO.t(), None, "none", [], "")
    return made if out is None else out.copy_(made)


def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b with the product in `dtype`; gradients come back in the types of the arguments."""
    x_TI = x_TI.to(dtype)
    if traced():
        low_OI = weight_OI if weight_OI.dtype == dtype else made_again(_converted, weight_OI, dtype)
        return F.linear(x_TI, low_OI, None if bias_O is None else bias_O.to(dtype))
    own = putting_off() or (dtype == torch.float32 and native_fits(x_TI, weight_OI))
    if weight_OI.dtype == dtype and not own:
        return F.linear(x_TI, weight_OI, None if bias_O is None else bias_O.to(dtype))
    return _Linear.apply(x_TI, weight_OI, bias_O)
