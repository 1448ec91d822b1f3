"""Smooth-SwiGLU: a scale per channel between the gated product and the down projection (arXiv 2409.12517).

    y = Q(h / s) Q(W s)^T       h = silu(gate) * up, s the power of two at or above each channel's amax of h

A channel in which gate and up grow together outgrows the others by the square; dividing by s lets one scale serve all.
s multiplies the columns of W, so the function is unchanged, and `fold` moves it into the weights for good.
`QuantProducts(channels=s)` makes the products.
Legend: T tokens, F feed-forward width, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bessemer.precision.scaled import scale_from

__all__ = ["channel_scales", "fold"]


def channel_scales(h_TF: Tensor, agree: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """float32 [F]: the power of two at or above each channel's amax; 1 for a channel of zeros, NaN for a spoilt one.

    agree: the elementwise maximum over the ranks that hold other tokens of the same channels.
    """
    rows = h_TF.detach().reshape(-1, h_TF.shape[-1])
    if rows.shape[0]:
        least_F, most_F = rows.aminmax(dim=0)
        amax_F = torch.maximum(most_F, -least_F).float()
    else:
        amax_F = torch.zeros(rows.shape[1], device=rows.device)
    return scale_from(amax_F if agree is None else agree(amax_F), 1.0)


def fold(up_FD: Tensor, down_DF: Tensor, scales_F: Tensor) -> tuple[Tensor, Tensor]:
    """(up with row i / s_i, down with column i * s_i), new tensors, also of stacked experts: the model computes the
    same values bit for bit as long as nothing leaves the range of its type, since s are powers of two and silu(gate)
    isn't touched."""
    return up_FD / scales_F.to(up_FD.dtype)[..., None], down_DF * scales_F.to(down_DF.dtype)[..., None, :]
