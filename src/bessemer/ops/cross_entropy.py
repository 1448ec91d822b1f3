"""Softmax cross-entropy of a linear head, without the logits of all tokens ever existing at once.

The logits of a chunk of tokens are computed in the compute type and turned into their own gradient in place, which
goes through the head at once; backward only scales. So nothing is recomputed, and memory is one chunk of logits plus
the gradients of the hidden states and of the head.

Legend: T tokens, D model, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bessemer.ops import native
from bessemer.ops.linear import product
from bessemer.ops.registry import native_fits, register

__all__ = ["cross_entropy_rows", "linear_cross_entropy"]

_CHUNK_BYTES = 16 << 20  # of logits: larger gains nothing in the head's products (bench/train.py)


def _reference(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, grad: bool) -> Tensor:
    """weight * (logsumexp(x) - x[label]) of each row, float32. With `grad`, the logits are overwritten by their
    gradients weight * (softmax - onehot). Rows of weight 0 give exactly 0; labels must lie in [0, V)."""
    wide = torch.where(weights_C[:, None] == 0, 0.0, logits_CV.float())
    loss_C = weights_C * (wide.logsumexp(-1) - wide.gather(1, labels_C[:, None]).squeeze(1))
    if grad:
        share = wide.softmax(-1)
        share.scatter_add_(1, labels_C[:, None], torch.full_like(loss_C, -1.0)[:, None])
        logits_CV.copy_(share * weights_C[:, None])
    return loss_C


def _native(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, grad: bool) -> Tensor:
    loss_C = torch.empty(logits_CV.shape[0], dtype=torch.float32)
    native.library().bessemer_cross_entropy(
        logits_CV.data_ptr(),
        logits_CV.dtype == torch.bfloat16,
        labels_C.data_ptr(),
        weights_C.data_ptr(),
        loss_C.data_ptr(),
        logits_CV.shape[0],
        logits_CV.shape[1],
        grad,
        native.threads(),
    )
    return loss_C


def _fits(logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, grad: bool) -> bool:
    parts = (logits_CV, labels_C, weights_C)
    return native_fits(logits_CV, weights_C) and all(t.is_contiguous() for t in parts)


cross_entropy_rows = register("cross_entropy_rows", reference=_reference, native=_native, fits=_fits)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, with_grad: bool) -> Tensor:
        low = weight.to(hidden.dtype)
        rows = max(1, _CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        dh = torch.empty_like(hidden) if with_grad else None
        dw = None
        for at in range(0, hidden.shape[0], rows):
            part = slice(at, at + rows)
            logits = product(hidden[part], low.t())
            losses[part] = cross_entropy_rows(logits, labels[part], weights[part], with_grad)
            if with_grad:
                product(logits, low, out=dh[part])
                if dw is None:
                    dw = (logits.t() @ hidden[part]).to(weight.dtype)
                elif weight.dtype == hidden.dtype:
                    dw.addmm_(logits.t(), hidden[part])
                else:
                    dw += logits.t() @ hidden[part]
        ctx.grads = (dh, dw)
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError("the loss was already differentiated: its gradients were made in forward and are spent")
        (dh, dw), ctx.grads = ctx.grads, None
        return dh.mul_(grad), dw.mul_(grad), None, None, None


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, weights_T: Tensor) -> Tensor:
    """Sum over tokens of weight * cross-entropy(hidden W^T, label): a float32 scalar.

    The product is in the hidden states' type. Where weights_T (float32) is 0 the label is not looked at.
    Labels outside of [0, V) with a weight other than 0 raise IndexError. Can be differentiated once.
    """
    counted_T = weights_T != 0
    labels_T = torch.where(counted_T, labels_T, 0).contiguous()
    if hidden_TD.device.type == "cpu" and labels_T.numel():
        low, high = (int(v) for v in torch.aminmax(labels_T))
        if low < 0 or high >= weight_VD.shape[0]:
            raise IndexError(f"label {low if low < 0 else high} outside of the vocabulary [0, {weight_VD.shape[0]})")
    with_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(hidden_TD.contiguous(), weight_VD, labels_T, weights_T.contiguous(), with_grad)
