"""The three products of a quantised linear layer: what `ops.linear` runs in the place of a type.

Each operand of each product is quantised from high precision. A weight may pack several logical tensors in its rows
(query, key and value): each of them, and its columns of the gradient, is scaled by itself, so that neither packing nor
sharding shows in a scale. The same class emulates and runs on a GPU (`precision.gpu`): emulation decodes all parts and
multiplies once, a GPU multiplies codes part by part, for its units take one scale a tensor, row or block.

Legend: T tokens (any leading shape), I inputs, O outputs, P logical tensors of a weight; three roles x, weight, grad
(in this order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.core.linear_layers import Shape, multiples
from bessemer.core.recipes import RECIPES
from bessemer.ops.linear import product
from bessemer.precision import gpu
from bessemer.precision.casts import amax
from bessemer.precision.numerics import Numerics
from bessemer.precision.product import hadamard, working_dtype
from bessemer.precision.scaled import TENSOR, Scaled, Scheme, quantise

__all__ = ["ROLES", "QuantProducts", "Watch"]

ROLES = ("x", "weight", "grad")


class Watch(Protocol):
    """Looks at what a sampled call does. All tensors are this rank's own; nothing may be changed."""

    def operand(self, role: str, place: int, x_RC: Tensor, made: Scaled) -> None:
        """An operand before and after it was quantised; `place`: of the logical tensor in the weight (0 for x). A role
        may come twice in a call, once along each dimension. On a GPU both are filled up with zeros."""
        ...

    def result(self, x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor) -> None:
        """What the forward product read, in high precision, and gave, the bias left out."""
        ...


class _Gradient(NamedTuple):
    """Of each logical tensor. `rows` [T, O] as they came, where emulation quantises them apart for both products; else
    `made`, and on a GPU their transposes `turned`."""

    rows: Tensor | None
    made: list[Scaled]
    turned: list[Scaled]


@dataclass(eq=False)
class QuantProducts:
    """One call's products under a recipe (`ops.linear.Products`), on the path of `gpu.path_for`.

    dtype: bfloat16 or float32, of x, the result and gradients. sizes: rows of each logical tensor of the weight; None:
    it is one. past: float32 [P, 3], the amaxes that a delayed recipe scales by, 0 where nothing is known yet: then, and
    under current scaling, the tensor's own counts; `known`: nowhere 0. seen: float32 [P, 3], if given, becomes
    max(seen, amax), in place. generator: for recipes that round gradients stochastically.
    reduce: the elementwise maximum over all ranks that hold a part of the same tensors. It is called at most once
    for the result (x and weights together) and once for a gradient, by all of those ranks alike.
    channels: float32 [I], powers of two: x is divided and the weight multiplied by them before they are quantised
    (Smooth-SwiGLU); gradients are those of x and the weight. coded: keep x as its codes for wgrad also where that reads
    it along the other dimension, for which it is then quantised a second time. (A GPU otherwise keeps the codes along
    that dimension, where emulation keeps x.)
    """

    numerics: Numerics
    dtype: torch.dtype
    sizes: tuple[int, ...] | None = None
    past: Tensor | None = None
    known: bool = False
    seen: Tensor | None = None
    generator: torch.Generator | None = None
    reduce: Callable[[Tensor], Tensor] | None = None
    channels: Tensor | None = None
    coded: bool = False
    watch: Watch | None = None
    path: gpu.Path = "emulated"
    _weight_amax: list[Tensor | None] = field(default_factory=list, init=False)
    _held: tuple[Tensor, _Gradient] | None = field(default=None, init=False)
    _shape: Shape = field(default=Shape(0, 0, 0), init=False)

    @property
    def _whole(self) -> bool:
        return self.numerics.x.grain == TENSOR

    @property
    def _emulated(self) -> bool:
        return self.path == "emulated"

    def output(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """With one scale a tensor the codes of x are kept (a byte an element), otherwise x: wgrad needs it quantised
        along the other dimension. The weight is quantised again from its master in backward."""
        rows, parts = self._smoothed(x_TI.reshape(-1, x_TI.shape[-1])), self._weights(weight_OI)
        self._shape = Shape(rows.shape[0], rows.shape[1], weight_OI.shape[0])
        x_amax, *self._weight_amax = self._agreed([("x", rows, 0), *(("weight", w, p) for p, w in enumerate(parts))])
        again = self._whole or self.coded
        kept: tuple[Tensor, ...] = (x_TI,)
        if self._emulated or (self.coded and not self._whole):
            qx = self._quantised("x", rows, x_amax)
            kept = _stored(qx) if again else kept
        else:
            qx, turned = self._both("x", rows, x_amax)
            kept = _stored(turned)
        weights = [
            self._quantised("weight", w, a, p) for p, (w, a) in enumerate(zip(parts, self._weight_amax, strict=True))
        ]
        self._observe("x", [qx.amax] * len(parts))
        self._observe("weight", [w.amax for w in weights])
        y = (self._emulated_output if self._emulated else self._output)(qx, weights, bias_O)
        if self.watch is not None:
            self.watch.result(x_TI.reshape(-1, x_TI.shape[-1]), weight_OI, y if bias_O is None else y - bias_O)
        return y.view(*x_TI.shape[:-1], weight_OI.shape[0]), kept

    def _emulated_output(self, qx: Scaled, weights: list[Scaled], bias_O: Tensor | None) -> Tensor:
        work = working_dtype(self.dtype, qx, *weights)
        wide_OI = _joined([w.dequantise(work) for w in weights], 0)
        if work == torch.bfloat16:  # the bias before the only rounding
            return F.linear(qx.dequantise(work), wide_OI, None if bias_O is None else bias_O.to(work))
        y = product(qx.dequantise(work), wide_OI.t())
        return (y if bias_O is None else y.add_(bias_O)).to(self.dtype)

    def _output(self, qx: Scaled, weights: list[Scaled], bias_O: Tensor | None) -> Tensor:
        biases: Sequence[Tensor | None] = [None] * len(weights) if bias_O is None else self._parts(bias_O, 0)
        found = []
        for w, bias, size in zip(weights, biases, self._sizes, strict=True):
            fit = None if bias is None else F.pad(bias, (0, w.codes.shape[0] - size))
            found.append(gpu.multiply_on(self.path, qx, w, self.dtype, fit)[: self._shape.tokens, :size])
        return _joined(found, 1).contiguous()

    def gradient(self, grad_TO: Tensor, *, again: bool = False) -> _Gradient:
        held, self._held = self._held, None
        if held is not None and _same(held[0], grad_TO):
            made = held[1]
        elif self._whole or not self._emulated:
            parts = self._parts(grad_TO, 1)
            agreed = self._agreed([("grad", g, p) for p, g in enumerate(parts)])
            sides = list(zip(parts, agreed, range(len(parts)), strict=True))
            if self._emulated:
                made = _Gradient(None, [self._quantised("grad", *side) for side in sides], [])
            else:
                both = [self._both("grad", *side) for side in sides]
                made = _Gradient(None, [rows for rows, _ in both], [turned for _, turned in both])
            self._observe("grad", [q.amax for q in made.made])
        else:
            made = _Gradient(grad_TO, [], [])
        if again:
            self._held = (grad_TO, made)
        return made

    def input_gradient(self, grad: _Gradient, weight_OI: Tensor) -> Tensor:
        """g W [T, I]; the weight with scales along O, which square tiles have already."""
        if not self._emulated:
            return self._smoothed(self._input_gradient(grad, weight_OI))
        sides = grad.made
        if grad.rows is not None:
            sides = [self._quantised("grad", g, None, p) for p, g in enumerate(self._parts(grad.rows, 1))]
            self._observe("grad", [q.amax for q in sides])
        turned = not self.numerics.weight.grain.symmetric
        parts = [w.t().contiguous() if turned else w for w in self._weights(weight_OI)]
        weights = [
            self._quantised("weight", w, a, p) for p, (w, a) in enumerate(zip(parts, self._weight_amax, strict=True))
        ]
        work = working_dtype(self.dtype, *sides, *weights)
        wide = [w.dequantise(work) for w in weights]
        wide_OI = _joined([w.t() for w in wide] if turned else wide, 0)
        return self._smoothed(product(_joined([g.dequantise(work) for g in sides], 1), wide_OI).to(self.dtype))

    def _input_gradient(self, grad: _Gradient, weight_OI: Tensor) -> Tensor:
        """The parts are summed in float32, and rounded once as they are in emulation."""
        parts = list(zip(grad.made, self._weights(weight_OI), self._weight_amax, strict=True))
        wide = self.dtype if len(parts) == 1 else torch.float32
        found = None
        for place, (g, w, past) in enumerate(parts):
            one = gpu.multiply_on(self.path, g, self._across("weight", w, past, place), wide)
            found = one if found is None else found.add_(one)
        assert found is not None, "a weight has a part"
        return found[: self._shape.tokens, : self._shape.inputs].to(self.dtype).contiguous()

    def weight_gradient(self, grad: _Gradient, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """g^T x [O, I] in `dtype`, summed over T."""
        if not self._emulated:
            return self._roughened(self._weight_gradient(grad, kept).to(dtype))
        if grad.rows is None:
            qx = self._kept(kept)
            work = working_dtype(self.dtype, qx, *grad.made)
            wide_TO = _joined([g.dequantise(work) for g in grad.made], 1)
            return self._roughened((wide_TO.t() @ qx.dequantise(work)).to(self.dtype).to(dtype))
        turned = [g.t().contiguous() for g in self._parts(grad.rows, 1)]
        x_TI = (
            self._kept(kept).dequantise(self.dtype)
            if self.coded
            else self._smoothed(kept[0].reshape(-1, kept[0].shape[-1]))
        )
        x_IT = x_TI.t().contiguous()
        if self.numerics.hadamard:
            self._observe("grad", [amax(g) for g in turned])
            turned, x_IT = [hadamard(g) for g in turned], hadamard(x_IT)
        sides, qx = [self._quantised("grad", g, None, p) for p, g in enumerate(turned)], self._quantised("x", x_IT)
        if not self.numerics.hadamard:
            self._observe("grad", [q.amax for q in sides])
        work = working_dtype(self.dtype, qx, *sides)
        wide_OT = _joined([g.dequantise(work) for g in sides], 0)
        return self._roughened((wide_OT @ qx.dequantise(work).t()).to(self.dtype).to(dtype))

    def _weight_gradient(self, grad: _Gradient, kept: tuple[Tensor, ...]) -> Tensor:
        qx = self._kept(kept)
        if self.coded and not self._whole:
            qx = self._across("x", qx.dequantise(self.dtype))
        found = [gpu.multiply_on(self.path, g, qx, self.dtype) for g in grad.turned]
        cut = [dw[:size, : self._shape.inputs] for dw, size in zip(found, self._sizes, strict=True)]
        return _joined(cut, 0).contiguous()

    def _kept(self, kept: tuple[Tensor, ...]) -> Scaled:
        codes, scale, seen, *of_tensor = kept
        return Scaled(codes, scale, of_tensor[0] if of_tensor else None, seen, self.numerics.x)

    def _smoothed(self, x_TI: Tensor) -> Tensor:
        """Divided by the channels: of x, and of its gradient, which is that of the quotient over them once more."""
        return x_TI if self.channels is None else x_TI / self.channels.to(x_TI.dtype)

    def _roughened(self, weight_OI: Tensor) -> Tensor:
        """Multiplied by the channels: the weight, and its gradient likewise."""
        return weight_OI if self.channels is None else weight_OI * self.channels.to(weight_OI.dtype)

    def _weights(self, weight_OI: Tensor) -> Sequence[Tensor]:
        return self._parts(self._roughened(weight_OI), 0)

    @property
    def _sizes(self) -> Sequence[int]:
        return (self._shape.outputs,) if self.sizes is None else self.sizes

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

    def _quantised(self, role: str, x_RC: Tensor, past: Tensor | None = None, place: int = 0) -> Scaled:
        how = self._how(role, past)
        if self._emulated:
            made = quantise(x_RC, how.scheme, past=past, generator=how.generator)
        else:
            made = gpu.along(x_RC, how)
        self._watched(role, place, x_RC, made)
        return made

    def _across(self, role: str, x_RC: Tensor, past: Tensor | None = None, place: int = 0) -> Scaled:
        """On a GPU the transpose, with scales along what were rows."""
        made = gpu.across(x_RC, self._how(role, past))
        self._watched(role, place, x_RC.t(), made)
        return made

    def _both(self, role: str, x_RC: Tensor, past: Tensor | None = None, place: int = 0) -> tuple[Scaled, Scaled]:
        """On a GPU, for two products."""
        made, turned = gpu.both_ways(x_RC, self._how(role, past))
        self._watched(role, place, x_RC, made)
        if not made.scheme.grain.symmetric:
            self._watched(role, place, x_RC.t(), turned)
        return made, turned

    def _how(self, role: str, past: Tensor | None) -> gpu.Operand:
        scheme: Scheme = getattr(self.numerics, role)
        rounding = self.generator if role == "grad" and self.numerics.stochastic else None
        rotated = self.numerics.hadamard and role != "weight"
        return gpu.Operand(scheme, multiples(RECIPES[self.numerics.recipe]).k, rotated, past, rounding)

    def _watched(self, role: str, place: int, x_RC: Tensor, made: Scaled) -> None:
        if self.watch is not None:
            if x_RC.shape != made.codes.shape:
                rows, cols = made.codes.shape
                x_RC = F.pad(x_RC, (0, cols - x_RC.shape[1], 0, rows - x_RC.shape[0]))
            self.watch.operand(role, place, x_RC, made)

    def _observe(self, role: str, amaxes: list[Tensor]) -> None:
        if self.seen is not None:
            column = self.seen[:, ROLES.index(role)]
            column.copy_(torch.maximum(column, torch.stack(amaxes)))


def _stored(made: Scaled) -> tuple[Tensor, ...]:
    return made.codes, made.scale, made.amax, *(() if made.tensor_scale is None else (made.tensor_scale,))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same memory, which `a` keeps from being anything else in between."""
    alike: Any = (a.data_ptr(), a.shape, a.stride(), a.dtype)
    return bool(alike == (b.data_ptr(), b.shape, b.stride(), b.dtype))
