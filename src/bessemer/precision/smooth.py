"""Smooth-SwiGLU: a scale per channel between the gated product and the down projection (arXiv 2409.12517).

    y = Q(h / s) Q(W s)^T       h = silu(gate) * up, s the power of two at or above each channel's amax of h

A channel in which gate and up grow together outgrows the others by the square; dividing by s lets one scale serve all.
s multiplies the columns of W, so the function is unchanged, and `fold` moves it into the weights for good.
Legend: T tokens, F feed-forward width, D model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer.precision.linear import Call, quant_linear
from bessemer.precision.scaled import scale_from

__all__ = ["channel_scales", "fold", "smooth_linear"]


def channel_scales(h_TF: Tensor) -> Tensor:
    """float32 [F]: the power of two at or above each channel's amax; 1 for a channel of zeros, NaN for a spoilt one."""
    rows = h_TF.detach().reshape(-1, h_TF.shape[-1])
    if rows.shape[0] == 0:
        return torch.ones(rows.shape[1], device=rows.device)
    return scale_from(rows.abs().amax(0).float(), 1.0)


def smooth_linear(h_TF: Tensor, down_DF: Tensor, call: Call, scales_F: Tensor | None = None) -> Tensor:
    """h W^T [T, D] with h / s and W s quantised; s from h itself unless given. Gradients are those of h and W."""
    scales_F = channel_scales(h_TF) if scales_F is None else scales_F
    return quant_linear(h_TF / scales_F.to(h_TF.dtype), down_DF * scales_F.to(down_DF.dtype), None, call)


def fold(up_FD: Tensor, down_DF: Tensor, scales_F: Tensor) -> tuple[Tensor, Tensor]:
    """(up with row i / s_i, down with column i * s_i), new tensors: the model computes the same values bit for bit as
    long as nothing leaves the range of its type, since s are powers of two and silu(gate) isn't touched."""
    return up_FD / scales_F.to(up_FD.dtype)[:, None], down_DF * scales_F.to(down_DF.dtype)
