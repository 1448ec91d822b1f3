"""Activations of the feed-forward part.

Legend: T tokens (any leading shape), F feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops import native
from bessemer.ops.registry import native_fits, register

__all__ = ["gelu", "swiglu", "swiglu_backward"]


def _reference(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up of a packed [..., 2F] projection (gate first) -> [..., F], in its type (Shazeer 2020)."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return F.silu(gate_TF) * up_TF


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        native.kernels(gate_up).bessemer_swiglu(
            gate_up.data_ptr(),
            out.data_ptr(),
            out.dtype == torch.bfloat16,
            out.numel() // width,
            width,
            native.threads(),
        )
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _native_backward(gate_up, grad)


def _native_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    grad = grad.contiguous()
    width = grad.shape[-1]
    out = torch.empty_like(gate_up)
    native.kernels(gate_up).bessemer_swiglu_backward(
        grad.data_ptr(),
        gate_up.data_ptr(),
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        grad.numel() // width,
        width,
        native.threads(),
    )
    return out


def _reference_backward(gate_up_T2F: Tensor, grad_TF: Tensor) -> Tensor:
    """The gradient of a packed [..., 2F] projection, of which nothing else was kept, from that of `swiglu`'s result."""
    with torch.enable_grad():
        leaf = gate_up_T2F.detach().requires_grad_()
        (made,) = torch.autograd.grad(_reference(leaf), leaf, grad_TF)
    return made


def _fits(gate_up: Tensor, *_grad: Tensor) -> bool:
    return native_fits(gate_up) and gate_up.numel() > 0


swiglu = register("swiglu", reference=_reference, native=_Swiglu.apply, fits=_fits)
swiglu_backward = register("swiglu_backward", reference=_reference_backward, native=_native_backward, fits=_fits)


def gelu(x_TF: Tensor, tanh: bool) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016), exact or with the tanh approximation of GPT-2."""
    return F.gelu(x_TF, approximate="tanh" if tanh else "none")
