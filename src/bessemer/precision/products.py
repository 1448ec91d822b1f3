"""The three products of a quantised linear layer: what `ops.linear` runs in the place of a type.

Each operand of each product is quantised from high precision. A weight may pack several logical tensors in its rows
(query, key and value): each of them, and its columns of the gradient, is scaled by itself, so that neither packing nor
sharding shows in a scale.

Legend: T tokens (any leading shape), I inputs, O outputs, P logical tensors of a weight; three roles x, weight, grad
(in this order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.ops.linear import product
from bessemer.precision.casts import amax
from bessemer.precision.numerics import Numerics
from bessemer.precision.product import hadamard, working_dtype
from bessemer.precision.scaled import TENSOR, Scaled, Scheme, quantise

__all__ = ["ROLES", "QuantProducts"]

ROLES = ("x", "weight", "grad")


class _Gradient(NamedTuple):
    """`whole`: quantised, where one scale serves both products; else `rows` [T, O] as they came."""

    rows: Tensor | None
    whole: list[Scaled]


@dataclass(eq=False)
class QuantProducts:
    """One call's products under a recipe, emulated (`ops.linear.Products`).

    dtype: bfloat16 or float32, of x, the result and gradients. sizes: rows of each logical tensor of the weight; None:
    it is one. past: float32 [P, 3], the amaxes that a delayed recipe scales by, 0 where nothing is known yet: then, and
    under current scaling, the tensor's own counts; `known`: nowhere 0. seen: float32 [P, 3], if given, becomes
    max(seen, amax), in place. generator: for recipes that round gradients stochastically.
    reduce: the elementwise maximum over all ranks that hold a part of the same tensors. It is called at most once
    for the result (x and weights together) and once for a gradient, by all of those ranks alike.
    """

    numerics: Numerics
    dtype: torch.dtype
    sizes: tuple[int, ...] | None = None
    past: Tensor | None = None
    known: bool = False
    seen: Tensor | None = None
    generator: torch.Generator | None = None
    reduce: Callable[[Tensor], Tensor] | None = None
    _weight_amax: list[Tensor | None] = field(default_factory=list, init=False)
    _held: tuple[Tensor, _Gradient] | None = field(default=None, init=False)

    @property
    def _whole(self) -> bool:
        return self.numerics.x.grain == TENSOR

    def output(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """With one scale a tensor the codes of x are kept (a byte an element), otherwise x: wgrad needs it quantised
        along the other dimension. The weight is quantised again from its master in backward."""
        rows, parts = x_TI.reshape(-1, x_TI.shape[-1]), self._parts(weight_OI, 0)
        x_amax, *self._weight_amax = self._agreed([("x", rows, 0), *(("weight", w, p) for p, w in enumerate(parts))])
        qx = self._quantised("x", rows, x_amax)
        weights = [self._quantised("weight", w, a) for w, a in zip(parts, self._weight_amax, strict=True)]
        self._observe("x", [qx.amax] * len(parts))
        self._observe("weight", [w.amax for w in weights])
        work = working_dtype(self.dtype, qx, *weights)
        wide_OI = _joined([w.dequantise(work) for w in weights], 0)
        if work == torch.bfloat16:  # the bias before the only rounding
            y = F.linear(qx.dequantise(work), wide_OI, None if bias_O is None else bias_O.to(work))
        else:
            y = product(qx.dequantise(work), wide_OI.t())
            y = (y if bias_O is None else y.add_(bias_O)).to(self.dtype)
        kept = (qx.codes, qx.scale, qx.amax) if self._whole else (x_TI,)
        return y.view(*x_TI.shape[:-1], weight_OI.shape[0]), kept

    def gradient(self, grad_TO: Tensor, *, again: bool = False) -> _Gradient:
        held, self._held = self._held, None
        if held is not None and _same(held[0], grad_TO):
            made = held[1]
        elif self._whole:
            parts = self._parts(grad_TO, 1)
            agreed = self._agreed([("grad", g, p) for p, g in enumerate(parts)])
            made = _Gradient(None, [self._quantised("grad", g, a) for g, a in zip(parts, agreed, strict=True)])
            self._observe("grad", [q.amax for q in made.whole])
        else:
            made = _Gradient(grad_TO, [])
        if again:
            self._held = (grad_TO, made)
        return made

    def input_gradient(self, grad: _Gradient, weight_OI: Tensor) -> Tensor:
        """g W [T, I]; the weight with scales along O, which square tiles have already."""
        sides = grad.whole
        if grad.rows is not None:
            sides = [self._quantised("grad", g) for g in self._parts(grad.rows, 1)]
            self._observe("grad", [q.amax for q in sides])
        turned = not self.numerics.weight.grain.symmetric
        parts = [w.t().contiguous() if turned else w for w in self._parts(weight_OI, 0)]
        weights = [self._quantised("weight", w, a) for w, a in zip(parts, self._weight_amax, strict=True)]
        work = working_dtype(self.dtype, *sides, *weights)
        wide = [w.dequantise(work) for w in weights]
        wide_OI = _joined([w.t() for w in wide] if turned else wide, 0)
        return product(_joined([g.dequantise(work) for g in sides], 1), wide_OI).to(self.dtype)

    def weight_gradient(self, grad: _Gradient, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """g^T x [O, I] in `dtype`, summed over T."""
        if grad.rows is None:
            codes, scale, seen = kept
            qx = Scaled(codes, scale, None, seen, self.numerics.x)
            work = working_dtype(self.dtype, qx, *grad.whole)
            wide_TO = _joined([g.dequantise(work) for g in grad.whole], 1)
            return (wide_TO.t() @ qx.dequantise(work)).to(self.dtype).to(dtype)
        turned = [g.t().contiguous() for g in self._parts(grad.rows, 1)]
        x_IT = kept[0].reshape(-1, kept[0].shape[-1]).t().contiguous()
        if self.numerics.hadamard:
            self._observe("grad", [amax(g) for g in turned])
            turned, x_IT = [hadamard(g) for g in turned], hadamard(x_IT)
        sides, qx = [self._quantised("grad", g) for g in turned], self._quantised("x", x_IT)
        if not self.numerics.hadamard:
            self._observe("grad", [q.amax for q in sides])
        work = working_dtype(self.dtype, qx, *sides)
        wide_OT = _joined([g.dequantise(work) for g in sides], 0)
        return (wide_OT @ qx.dequantise(work).t()).to(self.dtype).to(dtype)

    def _parts(self, x: Tensor, dim: int) -> Sequence[Tensor]:
        return [x] if self.sizes is None or len(self.sizes) == 1 else torch.split(x, list(self.sizes), dim)

    def _agreed(self, tensors: list[tuple[str, Tensor, int]]) -> list[Tensor | None]:
        """Of each (role, tensor, place in the weight) the amax to scale by; None: its own."""
        if not self._whole:
            return [None] * len(tensors)
        past = None
        if self.past is not None:
            past = torch.stack([self.past[p, ROLES.index(role)] for role, _, p in tensors])
        if self.reduce is not None and not (past is not None and self.known):
            agreed = self.reduce(torch.stack([amax(x.detach()) for _, x, _ in tensors]))
            past = agreed if past is None else torch.where(past == 0, agreed, past)
        return [None] * len(tensors) if past is None else list(past.unbind())

    def _quantised(self, role: str, x_RC: Tensor, past: Tensor | None = None) -> Scaled:
        scheme: Scheme = getattr(self.numerics, role)
        rounding = self.generator if role == "grad" and self.numerics.stochastic else None
        return quantise(x_RC, scheme, past=past, generator=rounding)

    def _observe(self, role: str, amaxes: list[Tensor]) -> None:
        if self.seen is not None:
            column = self.seen[:, ROLES.index(role)]
            column.copy_(torch.maximum(column, torch.stack(amaxes)))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same memory, which `a` keeps from being anything else in between."""
    alike: Any = (a.data_ptr(), a.shape, a.stride(), a.dtype)
    return bool(alike == (b.data_ptr(), b.shape, b.stride(), b.dtype))
