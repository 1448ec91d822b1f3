"""Residual add and normalisation in one pass.

Legend: T tokens (any leading shape), D model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops import native
from bessemer.ops.registry import native_fits, register

__all__ = ["add_norm"]

_CHUNK = 64  # kRowChunk of csrc/vector.cpp


def _reference(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float, kind: str, dtype: Any
) -> tuple[Tensor, Tensor]:
    """(x + delta in x's type, norm(x + delta) in `dtype`); delta None: x itself. Statistics are float32.

    kind "rmsnorm": s (mean(s^2) + eps)^-1/2 w (Zhang and Sennrich 2019); "layernorm": mean and variance, w and b.
    """
    s_TD = x_TD if delta_TD is None else x_TD + delta_TD.to(x_TD.dtype)
    wide, shape = s_TD.float(), (s_TD.shape[-1],)
    weight, bias = weight_D.float(), None if bias_D is None else bias_D.float()
    if kind == "rmsnorm":
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    else:
        y = F.layer_norm(wide, shape, weight, bias, eps)
    return s_TD, y.to(dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: Any) -> Any:
        x = x.contiguous()
        delta = None if delta is None else delta.contiguous()
        wide = weight.detach().float()
        dim = x.shape[-1]
        total = x if delta is None else torch.empty_like(x)
        y = torch.empty_like(x, dtype=dtype)
        rstd = torch.empty(x.numel() // dim, dtype=torch.float32, device=x.device)
        native.kernels(x).bessemer_add_norm(
            x.data_ptr(),
            x.dtype == torch.bfloat16,
            None if delta is None else delta.data_ptr(),
            delta is not None and delta.dtype == torch.bfloat16,
            wide.data_ptr(),
            None if delta is None else total.data_ptr(),
            y.data_ptr(),
            dtype == torch.bfloat16,
            rstd.data_ptr(),
            rstd.numel(),
            dim,
            eps,
            native.threads(),
        )
        ctx.save_for_backward(total, rstd, weight)
        ctx.delta_dtype = None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return total if delta is not None else x.view_as(x), y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gx: Tensor | None, gy: Tensor | None) -> Any:
        if gy is None:
            return gx, None if gx is None or ctx.delta_dtype is None else gx.to(ctx.delta_dtype), None, None, None
        total, rstd, weight = ctx.saved_tensors
        dim, rows = total.shape[-1], rstd.numel()
        wide = weight.detach().float()
        gy = gy.contiguous()
        gx = None if gx is None else gx.to(total.dtype).contiguous()
        dx = torch.empty_like(total)
        apart = ctx.delta_dtype is not None and ctx.delta_dtype != total.dtype
        ddelta = torch.empty_like(total, dtype=ctx.delta_dtype) if apart else None
        partial = torch.empty((rows + _CHUNK - 1) // _CHUNK, dim, dtype=torch.float32, device=total.device)
        native.kernels(total).bessemer_add_norm_backward(
            gy.data_ptr(),
            gy.dtype == torch.bfloat16,
            None if gx is None else gx.data_ptr(),
            total.data_ptr(),
            total.dtype == torch.bfloat16,
            rstd.data_ptr(),
            wide.data_ptr(),
            dx.data_ptr(),
            None if ddelta is None else ddelta.data_ptr(),
            apart and ctx.delta_dtype == torch.bfloat16,
            partial.data_ptr(),
            rows,
            dim,
            native.threads(),
        )
        if ctx.delta_dtype is not None and ddelta is None:
            ddelta = dx
        return dx, ddelta, partial.sum(0).to(weight.dtype), None, None


def _native(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float, kind: str, dtype: Any
) -> tuple[Tensor, Tensor]:
    return _AddNorm.apply(x_TD, delta_TD, weight_D, eps, dtype)


def _fits(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str, dtype: Any
) -> bool:
    return kind == "rmsnorm" and dtype in (torch.float32, torch.bfloat16) and native_fits(x, delta, weight)


add_norm = register("add_norm", reference=_reference, native=_native, fits=_fits)
