"""The quantised linear layer: forward, dgrad and wgrad each from operands quantised from high precision.

Legend: T tokens (any leading shape), I inputs, O outputs; three roles x, weight, grad (in this order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.core.errors import NonFinite, RequestError
from bessemer.ops.linear import product
from bessemer.precision.casts import amax, keyed_generator
from bessemer.precision.delayed import advance, reference_amax
from bessemer.precision.numerics import Numerics
from bessemer.precision.product import hadamard, working_dtype
from bessemer.precision.scaled import TENSOR, Scaled, Scheme, quantise

__all__ = ["ROLES", "Call", "QuantLinear", "quant_linear"]

ROLES = ("x", "weight", "grad")


@dataclass(frozen=True)
class Call:
    """What one use of the layer needs besides its tensors. `history` float32 [3, H] of delayed recipes. `seen`
    float32 [3], if given, becomes max(seen, amax) a role, in place. `generator` for recipes that round stochastically.
    `reduce`: the maximum of an amax () over the ranks that hold parts of the same tensor or batch, for scales per
    tensor; every rank must make the same calls. Delayed recipes use it only while the history is empty; after that
    the caller reduces `seen` once a step.
    """

    numerics: Numerics
    history: Tensor | None = None
    seen: Tensor | None = None
    generator: torch.Generator | None = None
    reduce: Callable[[Tensor], Tensor] | None = None

    def quantised(self, role: str, x_RC: Tensor, *, again: bool = False) -> Scaled:
        """`again`: in another layout, already seen."""
        scheme: Scheme = getattr(self.numerics, role)
        past = None
        if self.numerics.delayed:
            if self.history is None:
                raise RequestError("delayed scaling needs a history", code="precision-history", fix="Call(history=...)")
            past = reference_amax(self.history, self.numerics.choice, self.numerics.margin)
            past = past[ROLES.index(role)]
        if self.reduce is not None and scheme.grain == TENSOR and (past is None or float(past) == 0):
            past = self.reduce(amax(x_RC.detach()))
        rounding = self.generator if role == "grad" and self.numerics.stochastic else None
        made = quantise(x_RC, scheme, past=past, generator=rounding)
        if not again:
            self.observe(role, made.amax)
        return made

    def observe(self, role: str, amax: Tensor) -> None:
        if self.seen is not None:
            index = ROLES.index(role)
            self.seen[index] = torch.maximum(self.seen[index], amax)


class _QuantLinear(torch.autograd.Function):
    """A tensor with one scale is kept as its codes (a byte an element) for wgrad; otherwise x itself is kept, since
    wgrad needs it quantised along the other dimension. The weight is quantised again from its master in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        qx, qw = call.quantised("x", rows), call.quantised("weight", weight)
        work = working_dtype(x.dtype, qx, qw)
        if work == torch.bfloat16:  # the bias before the only rounding
            low = None if bias is None else bias.to(work)
            y = F.linear(qx.dequantise(work), qw.dequantise(work), low)
        else:
            y = product(qx.dequantise(work), qw.dequantise(work).t())
            y = (y if bias is None else y.add_(bias)).to(x.dtype)
        ctx.call, ctx.shape, ctx.bias_dtype = call, x.shape, None if bias is None else bias.dtype
        ctx.history = None if call.history is None else call.history.clone()  # `advance` may come before backward
        kept = (qx.codes, qx.scale, qx.amax) if call.numerics.x.grain == TENSOR else (rows,)
        ctx.save_for_backward(weight, *kept)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        call = replace(ctx.call, history=ctx.history)
        rows = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        whole = call.numerics.grad.grain == TENSOR
        q = call.quantised("grad", rows) if needs_x or (needs_weight and whole) else None
        if needs_x:
            assert q is not None
            dx = _dgrad(call, q, weight, grad.dtype).view(ctx.shape)
        if needs_weight:
            if q is None:
                call.observe("grad", amax(rows))
            dw = _wgrad(call, rows if q is None or not whole else q, kept, grad.dtype).to(weight.dtype)
        if needs_bias and ctx.bias_dtype is not None:
            db = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None


def _dgrad(call: Call, q_TO: Scaled, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """g w [T, I]; the weight with scales along O, which square tiles have already."""
    if call.numerics.weight.grain.symmetric:
        qw = call.quantised("weight", weight_OI, again=True)
        work = working_dtype(dtype, q_TO, qw)
        return product(q_TO.dequantise(work), qw.dequantise(work)).to(dtype)
    qw = call.quantised("weight", weight_OI.t().contiguous(), again=True)
    work = working_dtype(dtype, q_TO, qw)
    return product(q_TO.dequantise(work), qw.dequantise(work).t()).to(dtype)


def _wgrad(call: Call, grad: Tensor | Scaled, kept: list[Tensor], dtype: torch.dtype) -> Tensor:
    """g^T x [O, I], summed over T."""
    if isinstance(grad, Scaled):
        codes, scale, seen = kept
        qx = Scaled(codes, scale, None, seen, call.numerics.x)
        work = working_dtype(dtype, grad, qx)
        return (grad.dequantise(work).t() @ qx.dequantise(work)).to(dtype)
    sides = (grad.t().contiguous(), kept[0].t().contiguous())
    if call.numerics.hadamard:
        sides = (hadamard(sides[0]), hadamard(sides[1]))
    q = call.quantised("grad", sides[0], again=True)
    qx = call.quantised("x", sides[1], again=True)
    work = working_dtype(dtype, q, qx)
    return (q.dequantise(work) @ qx.dequantise(work).t()).to(dtype)


def quant_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, call: Call) -> Tensor:
    """x W^T + b [T, O] in x's type (bfloat16 or float32), differentiable; dx in x's type, dW in the weight's.

    Inf or NaN in any operand come out as NaN (of the whole tensor, row or block that shares a scale with it).
    RequestError for a stochastic recipe without a generator, a delayed one without a history.
    """
    if call.numerics.stochastic and call.generator is None:
        fix = "Call(generator=casts.keyed_generator(seed, layer, step))"
        raise RequestError(f"{call.numerics.recipe} rounds gradients stochastically", code="precision-seed", fix=fix)
    return _QuantLinear.apply(x_TI, weight_OI, bias_O, call)


class QuantLinear(nn.Module):
    """A linear layer of a quantised recipe, with its states as buffers, so that a checkpoint resumes bitwise.

    Buffers: `history` float32 [3, H]; `seen` float32 [3], the amaxes of the step so far (a caller with several ranks
    reduces it by maximum before `advance`); `step` int64: committed steps, part of the key of stochastic rounding.
    Recomputing a forward changes nothing. `reduce`: see `Call`.
    """

    history: Tensor
    seen: Tensor
    step: Tensor
    reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics, *, name: str, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.numerics, self.name, self.seed = numerics, name, seed
        length = numerics.history if numerics.delayed else 1
        self.register_buffer("history", torch.zeros(3, length, device=weight.device))
        self.register_buffer("seen", torch.zeros(3, device=weight.device))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x_TI: Tensor, *, micro: int = 0) -> Tensor:
        """`micro`: the micro-batch, part of the key of stochastic rounding."""
        generator = None
        if self.numerics.stochastic and torch.is_grad_enabled():
            generator = keyed_generator(self.seed, self.name, int(self.step), micro, device=x_TI.device)
        elif self.numerics.stochastic:
            generator = torch.Generator(x_TI.device)  # no gradient will be rounded
        call = Call(self.numerics, self.history, self.seen, generator, self.reduce)
        return quant_linear(x_TI, self.weight, self.bias, call)

    def refuse_non_finite(self) -> None:
        """NonFinite with layer, role and step if an amax of this step is NaN or infinite: before the update."""
        for role, seen in zip(ROLES, self.seen.tolist(), strict=True):
            if not seen < float("inf"):
                text = f"{self.name}: the amax of its {role} is {seen}"
                raise NonFinite(text, code="non-finite-amax", step=int(self.step))

    @torch.no_grad()
    def advance(self) -> None:
        """Once a committed step: history' = f(history, seen); starts the next step's amaxes."""
        self.history.copy_(advance(self.history, self.seen))
        self.seen.zero_()
        self.step += 1
