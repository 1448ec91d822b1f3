"""The linear projection of many experts at once: rows sorted by expert, each run through its expert's weight.

Legend: T rows, X experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.deferred import weight_gradient
from bessemer.ops.linear import product

__all__ = ["GroupedProducts", "grouped_linear", "outer_runs", "product_runs"]


class GroupedProducts(Protocol):
    """How the three products of one call of `grouped_linear` are computed. An object may remember what its own call
    made. `counts_X` says how many rows each expert has, as in `grouped_linear`."""

    dtype: torch.dtype
    """Of x, of the result and of gradients."""

    def output(
        self, x_TI: Tensor, weights: Sequence[Tensor], counts_X: Tensor
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """x W^T [T, O] for each of the weights [X, O, I], and what `weight_gradient` needs of x."""
        ...

    def gradient(self, grad_TO: Tensor, counts_X: Tensor) -> Any:
        """Of the results beside each other, in the form that the other two take."""
        ...

    def input_gradient(self, grad: Any, weights: Sequence[Tensor], counts_X: Tensor) -> Tensor:
        """The sum of g W over the weights [T, I]."""
        ...

    def weight_gradient(
        self, grad: Any, kept: tuple[Tensor, ...], counts_X: Tensor, place: int, dtype: torch.dtype
    ) -> Tensor:
        """g^T x [X, O, I] in `dtype`, of the weight number `place`."""
        ...


class _Plain:
    """Products in the type of x, of converted weights."""

    def __init__(self, dtype: torch.dtype, outputs: list[int]) -> None:
        self.dtype, self._outputs = dtype, outputs

    def output(
        self, x_TI: Tensor, weights: Sequence[Tensor], counts_X: Tensor
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        return [product_runs(x_TI, w.to(self.dtype).transpose(1, 2), counts_X) for w in weights], (x_TI,)

    def gradient(self, grad_TO: Tensor, counts_X: Tensor) -> list[Tensor]:
        del counts_X  # grouped_mm refuses an expanded gradient
        return [part.contiguous() for part in torch.split(grad_TO, self._outputs, 1)]

    def input_gradient(self, grad: list[Tensor], weights: Sequence[Tensor], counts_X: Tensor) -> Tensor:
        first, *rest = (product_runs(g, w.to(g.dtype), counts_X) for g, w in zip(grad, weights, strict=True))
        for other in rest:
            first = first.add_(other)
        return first

    def weight_gradient(
        self, grad: list[Tensor], kept: tuple[Tensor, ...], counts_X: Tensor, place: int, dtype: torch.dtype
    ) -> Tensor:
        return outer_runs(grad[place], kept[0], counts_X).to(dtype)


class _GroupedLinear(torch.autograd.Function):
    """Saves the master weights, not their converted copies, for the reason that `linear` does."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, counts_X: Tensor, products: GroupedProducts, *weights: Tensor) -> Tensor:
        made, kept = products.output(x_TI, weights, counts_X)
        ctx.save_for_backward(counts_X, *weights, *kept)
        ctx.leaves, ctx.products = weights, products
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> Any:
        products, leaves = ctx.products, ctx.leaves
        counts_X, *saved = ctx.saved_tensors
        weights, kept = saved[: len(leaves)], saved[len(leaves) :]
        made = products.gradient(grad_TO, counts_X)
        dx = products.input_gradient(made, weights, counts_X) if ctx.needs_input_grad[0] else None
        kept = tuple(t.detach() for t in kept)  # or they would hold their graph, where the gradient is put off
        dw: list[Tensor | None] = [None] * len(leaves)
        for place, leaf in enumerate(leaves):
            if ctx.needs_input_grad[3 + place]:
                make = partial(products.weight_gradient, made, kept, counts_X, place, leaf.dtype)
                dw[place] = weight_gradient(leaf, make)
        return dx, None, None, *dw


def grouped_linear(
    x_TI: Tensor, weights: Tensor | Sequence[Tensor], counts_X: Tensor, how: GroupedProducts | None = None
) -> Tensor:
    """x W_x^T of each row with the weight [X, O, I] of its expert -> [T, O]; no row is dropped. Of several weights the
    results stand beside each other.

    Rows are sorted by expert: the first counts_X[0] (int64) belong to expert 0, and so on; 0 is allowed. Products run
    in the type of x, or as `how` makes them. Gradients come back in the types of the arguments; an expert without rows
    gets zeros.
    """
    several = [weights] if isinstance(weights, Tensor) else list(weights)
    how = how or _Plain(x_TI.dtype, [w.shape[1] for w in several])
    made: Tensor = _GroupedLinear.apply(x_TI.to(how.dtype), counts_X, how, *several)  # type: ignore[no-untyped-call]
    return made


def _grouped_mm_works(x: Tensor) -> bool:
    """F.grouped_mm of torch 2.13 takes float32 on a CPU only, bfloat16 on GPUs too, and rows of 16 bytes on those."""
    if x.device.type == "cpu":
        return x.shape[0] > 0
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0


def _ends(counts_X: Tensor) -> Tensor:
    return counts_X.cumsum(0).to(torch.int32)


def product_runs(a_TI: Tensor, b_XIO: Tensor, counts_X: Tensor) -> Tensor:
    """Each run of rows times its expert's matrix -> [T, O], outside of autograd."""
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


def outer_runs(a_TO: Tensor, b_TI: Tensor, counts_X: Tensor) -> Tensor:
    """For each expert the product a^T b of its rows -> [X, O, I] in the type of a, outside of autograd."""
    shape = (counts_X.shape[0], a_TO.shape[1], b_TI.shape[1])
    if a_TO.device.type == "meta":
        return a_TO.new_empty(shape)
    if _grouped_mm_works(a_TO) and b_TI.shape[1] % 8 == 0:
        return F.grouped_mm(a_TO.t(), b_TI, offs=_ends(counts_X))
    out = a_TO.new_zeros(shape)
    at = 0
    for expert, count in enumerate(counts_X.tolist()):
        if count:
            torch.mm(a_TO[at : at + count].t(), b_TI[at : at + count], out=out[expert])
        at += count
    return out
