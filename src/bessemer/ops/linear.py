"""The linear projection with a float32 master weight, computed in another type or as a recipe's `Products`.

Legend: T tokens (any leading shape), I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.deferred import putting_off, weight_gradient
from bessemer.ops.registry import native_fits
from bessemer.ops.tracing import made_again, traced
from bessemer.runtime.kernels import native_kernel

__all__ = ["How", "Plain", "Products", "linear", "product", "products_of"]

_FEW_ROWS = 16  # below, a product is bound by reading the weight and the choice doesn't matter


class Products(Protocol):
    """How the three products of one call of `linear` are computed. An object may remember what its own call made.

    `gradient` turns a gradient into what the other two take, so that it is made once for both; with `again` it will be
    asked for the same tensor once more (by the node that makes the weight's gradient).
    """

    dtype: torch.dtype
    """Of x, of the result and of gradients."""

    def output(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x W^T + b [T, O], and what `weight_gradient` needs of x."""
        ...

    def gradient(self, grad_TO: Tensor, *, again: bool = False) -> Any:
        """Of the result, T one dimension, in the form that the other two take."""
        ...

    def input_gradient(self, grad: Any, weight_OI: Tensor) -> Tensor:
        """g W [T, I], T one dimension."""
        ...

    def weight_gradient(self, grad: Any, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """g^T x [O, I] in `dtype`."""
        ...


class Plain:
    """Products in `dtype`, of converted operands."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def output(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        low_OI = weight_OI.to(self.dtype)
        if self.dtype != torch.float32:
            return F.linear(x_TI, low_OI, None if bias_O is None else bias_O.to(self.dtype)), (x_TI,)
        y = product(x_TI.reshape(-1, x_TI.shape[-1]), low_OI.t()).view(*x_TI.shape[:-1], -1)
        return (y if bias_O is None else y.add_(bias_O)), (x_TI,)

    def gradient(self, grad_TO: Tensor, *, again: bool = False) -> Tensor:
        del again
        return grad_TO

    def input_gradient(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        return product(grad, weight_OI.to(grad.dtype))

    def weight_gradient(self, grad: Tensor, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return (grad.t() @ kept[0].reshape(-1, kept[0].shape[-1])).to(dtype)


How = torch.dtype | Products
"""What `linear` is told: the type of the products, or how to compute them."""


def products_of(how: How) -> Products:
    """`how` as an object."""
    return Plain(how) if isinstance(how, torch.dtype) else how


class _Linear(torch.autograd.Function):
    """Saves the master weight, not its converted copy: the copy would live from forward to backward, and under
    full sharding keep alive what FSDP frees. All type conversions together are 2 % of a profiled step on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        y, kept = products.output(x, weight, bias)
        ctx.save_for_backward(weight, *kept)
        ctx.leaves, ctx.products, ctx.shape = (weight, bias), products, x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        products = ctx.products
        dx = dw = db = None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x or needs_weight:
            made = products.gradient(grad.reshape(-1, grad.shape[-1]))
        if needs_x:
            dx = products.input_gradient(made, weight).view(ctx.shape)
        weight_leaf, bias_leaf = ctx.leaves
        if needs_weight:
            inputs = tuple(t.detach() for t in kept)  # or they would hold their graph, where the gradient is put off
            dw = weight_gradient(weight_leaf, partial(products.weight_gradient, made, inputs, weight.dtype))
        if needs_bias:
            db = weight_gradient(bias_leaf, partial(_sum, grad, bias_leaf.dtype))
        return dx, dw, db, None


def _sum(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def product(a_TI: Tensor, b_IO: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, outside of autograd. float32 on a CPU goes through oneDNN instead of the BLAS that torch was built with:
    MKL reaches 88-96 GFLOP/s on a Zen 4 core where oneDNN reaches 100-107, forward and for the gradient of a.
    (For the gradient of b, whose long side is summed over, MKL is the faster.)"""
    onednn = a_TI.dtype == torch.float32 and a_TI.device.type == "cpu" and a_TI.shape[0] >= _FEW_ROWS
    if not (onednn and torch.backends.mkldnn.is_available()):
        return torch.mm(a_TI, b_IO, out=out)
    with native_kernel("linear", a_TI.dtype, lambda: 2.0 * a_TI.numel() * b_IO.shape[1]):
        made = torch.ops.mkldnn._linear_pointwise(a_TI, b_IO.t(), None, "none", [], "")
    return made if out is None else out.copy_(made)


def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, how: How) -> Tensor:
    """x W^T + b with the products in a type, or as `Products` make them; gradients come back in the types of the
    arguments."""
    if not isinstance(how, torch.dtype):
        made: Tensor = _Linear.apply(x_TI.to(how.dtype), weight_OI, bias_O, how)  # type: ignore[no-untyped-call]
        return made
    x_TI = x_TI.to(how)
    if traced():
        low_OI = weight_OI if weight_OI.dtype == how else made_again(_converted, weight_OI, how)
        return F.linear(x_TI, low_OI, None if bias_O is None else bias_O.to(how))
    own = putting_off() or (how == torch.float32 and native_fits(x_TI, weight_OI))
    if weight_OI.dtype == how and not own:
        return F.linear(x_TI, weight_OI, None if bias_O is None else bias_O.to(how))
    return _Linear.apply(x_TI, weight_OI, bias_O, Plain(how))
