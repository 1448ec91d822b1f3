"""The linear projection of many experts at once: rows sorted by expert, each run through its expert's weight.

Legend: T rows, X experts, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.deferred import weight_gradient
from bessemer.ops.linear import product

__all__ = ["grouped_linear"]


class _GroupedLinear(torch.autograd.Function):
    """Saves the master weights, not their converted copy, for the reason that `linear` does."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_XOI: Tensor, counts_X: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_XOI, counts_X)
        ctx.leaf = weight_XOI
        return _rows(x_TI, weight_XOI.to(x_TI.dtype).transpose(1, 2), counts_X)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> Any:
        x_TI, weight_XOI, counts_X = ctx.saved_tensors
        grad_TO = grad_TO.contiguous()  # grouped_mm refuses an expanded gradient
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _rows(grad_TO, weight_XOI.to(grad_TO.dtype), counts_X)
        if ctx.needs_input_grad[1]:
            x_TI = x_TI.detach()  # or it would hold its graph, where the gradient is put off
            dw = weight_gradient(ctx.leaf, partial(_outer, grad_TO, x_TI, counts_X, weight_XOI.dtype))
        return dx, dw, None


def grouped_linear(x_TI: Tensor, weight_XOI: Tensor, counts_X: Tensor) -> Tensor:
    """x W_x^T of each row with the weight of its expert -> [T, O], in the type of x; no row is dropped.

    Rows are sorted by expert: the first counts_X[0] (int64) belong to expert 0, and so on; 0 is allowed. Gradients
    come back in the types of the arguments; an expert without rows gets zeros.
    """
    return _GroupedLinear.apply(x_TI, weight_XOI, counts_X)


def _grouped_mm_works(x: Tensor) -> bool:
    """F.grouped_mm of torch 2.13 takes float32 on a CPU only, bfloat16 on GPUs too, and rows of 16 bytes on those."""
    if x.device.type == "cpu":
        return x.shape[0] > 0
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0


def _ends(counts_X: Tensor) -> Tensor:
    return counts_X.cumsum(0).to(torch.int32)


def _rows(a_TI: Tensor, b_XIO: Tensor, counts_X: Tensor) -> Tensor:
    """Each run of rows times its expert's matrix -> [T, O]."""
    if a_TI.device.type == "meta":
        return a_TI.new_empty(a_TI.shape[0], b_XIO.shape[2])
    if _grouped_mm_works(a_TI) and b_XIO.shape[2] % 8 == 0:
        return F.grouped_mm(a_TI, b_XIO, offs=_ends(counts_X))
    out = a_TI.new_empty(a_TI.shape[0], b_XIO.shape[2])
    at = 0
    for expert, count in enumerate(counts_X.tolist()):
        if count:
            product(a_TI[at : at + count], b_XIO[expert], out=out[at : at + count])
        at += count
    return out


def _outer(a_TO: Tensor, b_TI: Tensor, counts_X: Tensor, dtype: torch.dtype) -> Tensor:
    """For each expert the product a^T b of its rows -> [X, O, I] in `dtype`."""
    shape = (counts_X.shape[0], a_TO.shape[1], b_TI.shape[1])
    if a_TO.device.type == "meta":
        return a_TO.new_empty(shape).to(dtype)
    if _grouped_mm_works(a_TO) and b_TI.shape[1] % 8 == 0:
        return F.grouped_mm(a_TO.t(), b_TI, offs=_ends(counts_X)).to(dtype)
    out = a_TO.new_zeros(shape)
    at = 0
    for expert, count in enumerate(counts_X.tolist()):
        if count:
            torch.mm(a_TO[at : at + count].t(), b_TI[at : at + count], out=out[expert])
        at += count
    return out.to(dtype)
