"""What each recipe of `core.recipes` does to the operands of the three products of a linear layer.

    forward  y[T,O]  = x[T,I]  w[O,I]^T      sums over I
    dgrad    dx[T,I] = g[T,O]  w^T[I,O]^T    sums over O
    wgrad    dw[O,I] = g^T[O,T] x^T[I,T]^T   sums over T
Every operand is quantised from high precision with its scales along the dimension that is summed over.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bessemer.core.errors import RequestError
from bessemer.core.recipes import RECIPES, recipe
from bessemer.precision.delayed import Choice
from bessemer.precision.formats import E2M1, E4M3, E5M2, E8M0, INT8
from bessemer.precision.scaled import ROW, TENSOR, Grain, Scheme

__all__ = ["INT8_WEIGHT", "Numerics", "Shape", "numerics"]

INT8_WEIGHT = Scheme(INT8, ROW)
"""Weights alone, a scale per output."""


@dataclass(frozen=True)
class Shape:
    """A product's sizes: tokens, inputs, outputs."""

    tokens: int
    inputs: int
    outputs: int


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

    @property
    def multiple(self) -> int:
        """T, I and O must be multiples of it on a GPU: 16 for the tensor cores, and whole blocks."""
        return math.lcm(16, max(self.x.grain.cols, 1), max(self.weight.grain.cols, 1))

    def padded(self, shape: Shape) -> Shape:
        """The sizes with each dimension rounded up to what the GPU paths take."""
        tokens, inputs, outputs = (math.ceil(n / self.multiple) * self.multiple for n in vars(shape).values())
        return Shape(tokens, inputs, outputs)

    def odd(self, shape: Shape) -> list[str]:
        """Why a GPU would refuse one of the three products, empty if none: decided from sizes alone, since a CPU
        takes any."""
        roles = {"tokens": "wgrad", "inputs": "forward", "outputs": "dgrad"}
        return [
            f"{name} = {size} is no multiple of {self.multiple}, over which {roles[name]} sums"
            for name, size in vars(shape).items()
            if size % self.multiple
        ]


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
