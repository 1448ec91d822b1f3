"""What each recipe of `core.recipes` does to the operands of the three products of a linear layer.

    forward  y[T,O]  = x[T,I]  w[O,I]^T      sums over I
    dgrad    dx[T,I] = g[T,O]  w^T[I,O]^T    sums over O
    wgrad    dw[O,I] = g^T[O,T] x^T[I,T]^T   sums over T
Every operand is quantised from high precision with its scales along the dimension that is summed over.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bessemer.core.errors import RequestError
from bessemer.core.recipes import RECIPES, recipe
from bessemer.precision.delayed import Choice
from bessemer.precision.formats import E2M1, E4M3, E5M2, E8M0, INT8, Format, float_format
from bessemer.precision.scaled import ROW, TENSOR, Grain, Scheme

__all__ = ["BF16", "INT8_WEIGHT", "Numerics", "emulated", "numerics"]

INT8_WEIGHT = Scheme(INT8, ROW)
"""Weights alone, a scale per output."""

BF16 = float_format(8, 7)
"""What an operand has anyway where products run in bfloat16: the format of one that isn't to be quantised."""


@dataclass(frozen=True)
class Numerics:
    """`stochastic`: gradients are rounded stochastically. `hadamard`: both operands of wgrad are rotated in blocks of
    16 along T first, which spreads outliers and leaves the product as it is."""

    recipe: str
    x: Scheme
    weight: Scheme
    grad: Scheme
    delayed: bool = False
    history: int = 16
    choice: Choice = "max"
    margin: int = 0
    stochastic: bool = False
    hadamard: bool = False


_ROW = Scheme(E4M3, ROW)
_ONE = Scheme(E4M3, Grain(1, 128))
_MX = Scheme(E4M3, Grain(1, 32), E8M0)
_NV = Scheme(E2M1, Grain(1, 16), E4M3)
_ALL = {
    n.recipe: n
    for n in (
        Numerics("fp8-delayed", Scheme(E4M3, TENSOR), Scheme(E4M3, TENSOR), Scheme(E5M2, TENSOR), delayed=True),
        Numerics("fp8-current", Scheme(E4M3, TENSOR), Scheme(E4M3, TENSOR), Scheme(E5M2, TENSOR)),
        Numerics("fp8-row", _ROW, _ROW, _ROW),
        Numerics("fp8-block128", _ONE, Scheme(E4M3, Grain(128, 128)), _ONE),
        Numerics("mxfp8", _MX, _MX, _MX),
        Numerics("nvfp4", _NV, Scheme(E2M1, Grain(16, 16), E4M3), _NV, stochastic=True, hadamard=True),
    )
}


def numerics(name: str, *, power_of_two: bool = True) -> Numerics:
    """Of a quantised recipe by its name in `core.recipes`; ConfigError for an unknown name, RequestError for a recipe
    that quantises nothing. `power_of_two` False: float32 scales (MXFP8's stay powers of two by format)."""
    if not recipe(name).quantised:
        fix = "one of " + ", ".join(n for n, r in RECIPES.items() if r.quantised)
        raise RequestError(f"recipe {name!r} quantises nothing", code="precision-recipe", fix=fix)
    found = _ALL[name]
    if power_of_two:
        return found
    x, weight, grad = (replace(s, power_of_two=False) for s in (found.x, found.weight, found.grad))
    return replace(found, x=x, weight=weight, grad=grad)


def emulated(x: Format, weight: Format, grad: Format = BF16, *, grain: Grain = TENSOR) -> Numerics:
    """Any signed float formats (`formats.float_format`) for inputs, weights and gradients, each from its own amax, with
    float32 scales that are powers of two. No device runs this; whether a layer is large enough to be quantised is
    decided as for `fp8-current`. With one scale per tensor the backward pass reads the operands that forward read: the
    straight-through estimator. Other grains quantise again along the dimension that is summed over."""
    return Numerics("fp8-current", Scheme(x, grain), Scheme(weight, grain), Scheme(grad, grain))
