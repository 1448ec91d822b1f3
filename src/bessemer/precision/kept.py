"""SwiGLU that keeps its input in a byte an element for the backward pass (as DeepSeek-V3 does: arXiv 2412.19437).

    h, codes, scale = kept_swiglu(gate_up)      # h of the exact input; codes e4m3, a power of two for each 1 x 128
    swiglu_again(codes, scale, h.dtype)           # h of what the codes say: for the product that reads it

The forward pass is SwiGLU's, bit for bit; its gradient, and that of the weight behind it, are those at the codes.
Legend: T tokens (any leading shape), F feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bessemer.ops import swiglu, swiglu_backward
from bessemer.precision.formats import E4M3, E8M0
from bessemer.precision.scaled import Grain, Scaled, Scheme, quantise

__all__ = ["KEPT", "kept_swiglu", "swiglu_again"]

KEPT = Scheme(E4M3, Grain(1, 128), E8M0)


class _KeptSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Any:
        made = quantise(gate_up_T2F.reshape(-1, gate_up_T2F.shape[-1]), KEPT)
        codes = made.codes.view(gate_up_T2F.shape)
        ctx.dtype = gate_up_T2F.dtype
        ctx.save_for_backward(codes, made.scale)
        ctx.mark_non_differentiable(codes, made.scale)
        return swiglu(gate_up_T2F), codes, made.scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TF: Tensor, *_codes: Any) -> Tensor:
        codes, scale = ctx.saved_tensors
        made: Tensor = swiglu_backward(_read(codes, scale, ctx.dtype), grad_TF)
        return made


def kept_swiglu(gate_up_T2F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) * up [..., F], codes uint8 or float8 [..., 2F], their scales, one for 128 of a row)."""
    made: tuple[Tensor, Tensor, Tensor] = _KeptSwiglu.apply(gate_up_T2F)  # type: ignore[no-untyped-call]
    return made


def swiglu_again(codes_T2F: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up of what the codes say, in `dtype`."""
    made: Tensor = swiglu(_read(codes_T2F, scale, dtype))
    return made


def _read(codes_T2F: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows = codes_T2F.view(-1, codes_T2F.shape[-1])
    return Scaled(rows, scale, None, scale, KEPT).dequantise(dtype).view(codes_T2F.shape)
