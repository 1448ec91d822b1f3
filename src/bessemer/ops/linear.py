"""The linear projection with a float32 master weight, computed in another type.

Legend: T tokens (any leading shape), I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear"]


class _Linear(torch.autograd.Function):
    """Saves the master weight, not its converted copy: the copy would live from forward to backward, and under
    full sharding keep alive what FSDP frees. Converting again costs about 1 % of a step on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (rows @ weight.to(grad.dtype)).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b with the product in `dtype`; gradients come back in the types of the arguments."""
    x_TI = x_TI.to(dtype)
    if weight_OI.dtype == dtype:
        return F.linear(x_TI, weight_OI, None if bias_O is None else bias_O.to(dtype))
    return _Linear.apply(x_TI, weight_OI, bias_O)
