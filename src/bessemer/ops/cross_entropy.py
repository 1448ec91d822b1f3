"""Softmax cross-entropy of a linear head, without the logits of all tokens ever existing at once.

The logits of a chunk of tokens are computed in the compute type and turned into their own gradient in place, which
goes through the head at once; backward only scales. So nothing is recomputed, and memory is one chunk of logits plus
the gradients of the hidden states and of the head.

Where several ranks hold a share of the head's rows each, a rank makes the logits of its own rows. Of the others it
needs three numbers a token, the largest logit, the sum of exponentials and the logit of the label, which it gets with
one gathering a chunk.

Legend: T tokens, D model, V vocabulary (of this rank, where it is shared), C tokens of a chunk, G ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bessemer.ops import native
from bessemer.ops.linear import product
from bessemer.ops.registry import native_fits, register

__all__ = ["VocabularyShare", "cross_entropy_rows", "linear_cross_entropy"]

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
    loss_C = torch.empty(logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    native.kernels(logits_CV).bessemer_cross_entropy(
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


@dataclass(frozen=True)
class VocabularyShare:
    """Which rows of a head of `vocabulary` entries this rank holds: `rows`, as many as every other rank, from entry
    `first` on. Those past the end of the vocabulary are padding."""

    vocabulary: int
    first: int
    rows: int
    gather: Callable[[Tensor], Tensor]  # [...] -> [G, ...]: those of all ranks, in their order

    @property
    def valid(self) -> int:
        """How many of the rows are entries of the vocabulary."""
        return min(max(self.vocabulary - self.first, 0), self.rows)


def _shared_rows(share: VocabularyShare, logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, grad: bool) -> Tensor:
    """`cross_entropy_rows` of logits of which this rank holds the columns of its share, without the padding."""
    wide_CV = logits_CV.float().masked_fill_((weights_C == 0)[:, None], 0.0)
    local_C = labels_C - share.first
    mine_C = (local_C >= 0) & (local_C < share.valid)
    known_C = (labels_C >= 0) & (labels_C < share.vocabulary)  # gather refuses -1: a wrong label is wrong on all ranks
    at_C1 = torch.where(mine_C, local_C, torch.where(known_C, 0, -1))[:, None]
    label_C = torch.where(mine_C, wide_CV.gather(1, at_C1).squeeze(1), 0.0)
    if share.valid:
        top_C = wide_CV.amax(-1)
        wide_CV.sub_(top_C[:, None]).exp_()
    else:  # one column, of the row of zeros
        top_C = torch.full_like(label_C, -torch.inf)
        wide_CV.zero_()
    tops_GC, sums_GC, labels_GC = share.gather(torch.stack((top_C, wide_CV.sum(-1), label_C))).unbind(1)
    highest_C = tops_GC.amax(0)
    total_C = (sums_GC * (tops_GC - highest_C).exp()).sum(0)
    if grad:
        wide_CV.mul_(((top_C - highest_C).exp() / total_C * weights_C)[:, None])
        wide_CV.scatter_add_(1, at_C1, torch.where(mine_C, -weights_C, 0.0)[:, None])
        if wide_CV is not logits_CV:
            logits_CV.copy_(wide_CV)
    return weights_C * (total_C.log() + (highest_C - labels_GC.sum(0)))


@dataclass(frozen=True)
class _Way:
    """What one call needs besides its tensors."""

    with_grad: bool
    chunk: int  # tokens; the same on all ranks that share the head, which meet once a chunk
    losses: Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # `cross_entropy_rows`, or that of a share


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, way: _Way) -> Tensor:
        low = weight.to(hidden.dtype)
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        dh = torch.empty_like(hidden) if way.with_grad else None
        dw = None
        for at in range(0, hidden.shape[0], way.chunk):
            part = slice(at, at + way.chunk)
            logits = product(hidden[part], low.t())
            losses[part] = way.losses(logits, labels[part], weights[part], way.with_grad)
            if dh is not None:
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


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    share: VocabularyShare | None = None,
) -> Tensor:
    """Sum over tokens of weight * cross-entropy(hidden W^T, label): a float32 scalar.

    The product is in the hidden states' type. Where weights_T (float32) is 0 the label is not looked at.
    Labels outside of the vocabulary with a weight other than 0 raise IndexError (on a GPU, fail an assertion there).
    Can be differentiated once.

    With a `share`, weight_VD holds this rank's rows, and all its ranks call with the same tokens, labels and weights.
    The loss is that of the whole vocabulary, in the same bits on every rank; the gradient of the hidden states is what
    this rank's rows give, to be summed over the ranks; that of padding is 0.
    """
    vocabulary = weight_VD.shape[0] if share is None else share.vocabulary
    counted_T = weights_T != 0
    labels_T = torch.where(counted_T, labels_T, 0).contiguous()
    if hidden_TD.device.type == "cpu" and labels_T.numel():
        low, high = (int(v) for v in torch.aminmax(labels_T))
        if low < 0 or high >= vocabulary:
            raise IndexError(f"label {low if low < 0 else high} outside of the vocabulary [0, {vocabulary})")
    with_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    chunk = max(1, _CHUNK_BYTES // (weight_VD.shape[0] * hidden_TD.element_size()))
    if share is None:
        losses = cross_entropy_rows
    else:
        losses = partial(_shared_rows, share)
        if share.valid == 0:  # a row of zeros, since oneDNN has no product with zero columns
            weight_VD = weight_VD[:1].clone().zero_()
        elif share.valid < share.rows:
            weight_VD = weight_VD[: share.valid]
    way = _Way(with_grad, chunk, losses)
    args = hidden_TD.contiguous(), weight_VD, labels_T, weights_T.contiguous(), way
    loss: Tensor = _LinearCrossEntropy.apply(*args)  # type: ignore[no-untyped-call]
    return loss
