"""The quantised linear layer as a function and as a module of its own.

Legend: T tokens (any leading shape), I inputs, O outputs; three roles x, weight, grad (in this order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.core.errors import NonFinite, RequestError
from bessemer.ops.linear import linear
from bessemer.precision.casts import keyed_generator
from bessemer.precision.delayed import advance, reference_amax
from bessemer.precision.gpu import Path
from bessemer.precision.numerics import Numerics
from bessemer.precision.products import ROLES, QuantProducts

__all__ = ["ROLES", "Call", "QuantLinear", "quant_linear"]


@dataclass(frozen=True)
class Call:
    """What one use of the layer needs besides its tensors. `history` float32 [3, H] of delayed recipes. `seen`
    float32 [3], if given, becomes max(seen, amax) a role, in place. `generator` for recipes that round stochastically.
    `reduce`: the elementwise maximum of amaxes over the ranks that hold parts of the same tensor or batch, for scales
    per tensor; every rank must make the same calls. Delayed recipes use it only while the history is empty; after that
    the caller reduces `seen` once a step. `path`: of the device (`gpu.path_for`).
    """

    numerics: Numerics
    history: Tensor | None = None
    seen: Tensor | None = None
    generator: torch.Generator | None = None
    reduce: Callable[[Tensor], Tensor] | None = None
    path: Path = "emulated"

    def products(self, dtype: torch.dtype) -> QuantProducts:
        """Of this use, for `ops.linear`: what the history says now holds for its backward pass too."""
        past = self._past()
        return QuantProducts(
            self.numerics,
            dtype,
            past=None if past is None else past[None],
            known=past is not None and self.reduce is not None and bool((past != 0).all()),
            seen=None if self.seen is None else self.seen[None],
            generator=self.generator,
            reduce=self.reduce,
            path=self.path,
        )

    def _past(self) -> Tensor | None:
        """float32 [3] of a delayed recipe."""
        if not self.numerics.delayed:
            return None
        if self.history is None:
            raise RequestError("delayed scaling needs a history", code="precision-history", fix="Call(history=...)")
        return reference_amax(self.history, self.numerics.choice, self.numerics.margin)


def quant_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, call: Call) -> Tensor:
    """x W^T + b [T, O] in x's type (bfloat16 or float32), differentiable; dx in x's type, dW in the weight's.

    Inf or NaN in any operand come out as NaN (of the whole tensor, row or block that shares a scale with it).
    RequestError for a stochastic recipe without a generator, a delayed one without a history.
    """
    if call.numerics.stochastic and call.generator is None:
        fix = "Call(generator=casts.keyed_generator(seed, layer, step))"
        raise RequestError(f"{call.numerics.recipe} rounds gradients stochastically", code="precision-seed", fix=fix)
    return linear(x_TI, weight_OI, bias_O, call.products(x_TI.dtype))


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
