"""Two laws of the loss over parameters, tokens and precision, and the precision that is best for a given cost.

    effective   L = A Neff^-a + B D^-b + E,  Neff = N (1 - e^(-Pw/gw)) (1 - e^(-Pi/gi))
                Kumar et al. 2024 (arXiv 2411.04330), equations 3 and 4: weights and inputs of the products
    float       L = n/N^a + d/D^b + e + (D^b/N^a) log2(block) / (g (X + 1/2)^x (M + 1/2)^m)
                Sun et al. 2025 (arXiv 2501.02423), equation 18; X exponent and M mantissa bits

Training is taken to cost N D P, up to a factor, as both papers do. Where one scale serves a whole tensor the second
law says nothing of log2(block); it is a constant t here, which only points with blocks can tell.

Every constant is positive and fitted as its logarithm. The prefactors are fitted as what they make of the loss, in
nats, at the `Reference`, since they alone hang on the exponents by many orders of magnitude.
Legend: S sets of constants, K constants, n points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LAWS", "PUBLISHED_EFFECTIVE", "PUBLISHED_FLOAT", "Array", "Constant", "EffectiveParameters", "FloatFormat", "Law",
    "Points", "Reference", "best_precision",
]  # fmt: skip

Array = NDArray[np.float64]

PUBLISHED_EFFECTIVE = {"weights": (2.6745, 0.3037), "inputs": (2.2102, 1.4072), "key-value cache": (0.9578, 2.4185)}
"""(g, shift) of Kumar et al., table 2: their fit reads 1 - e^(shift - P/g), integers of 3 to 12 bits, 30 M to 220 M
parameters. That sign of the shift is the one that gives their best precision, 7 bits."""

PUBLISHED_FLOAT = {
    "n": 69.2343, "a": 0.2368, "d": 68973.0621, "b": 0.5162, "e": 1.9061, "g": 11334.5197, "x": 3.1926, "m": 2.9543,
}  # fmt: skip
"""Sun et al., table 2: 41 M to 679 M parameters, 10 to 100 billion tokens."""

LEAST_BITS, MOST_BITS = 1.0, 16.0
"""Between these the best precision is looked for."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """Trained models, each array [n]: parameters that were quantised, tokens, bits of weights and of inputs, exponent
    and mantissa bits of both (NaN where they differ), elements to a scale (0: one for the tensor), loss in nats, and
    the group: points with the same number share a seed, and so err together."""

    parameters: Array
    tokens: Array
    weight_bits: Array
    input_bits: Array
    exponent_bits: Array
    mantissa_bits: Array
    block: Array
    loss: Array
    group: Array

    def __len__(self) -> int:
        return len(self.loss)

    def at(self, which: NDArray[np.bool_] | NDArray[np.int64]) -> Points:
        """Those of a mask or of indices."""
        return Points(**{name: values[which] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Reference:
    """Where prefactors are told: the geometric middle of the grid; block of the blocks in it (2 if there are none)."""

    parameters: float
    tokens: float
    block: float

    @classmethod
    def of(cls, points: Points) -> Reference:
        blocks = points.block[points.block > 0]
        middle = [float(np.exp(np.log(v).mean())) for v in (points.parameters, points.tokens)]
        return cls(middle[0], middle[1], float(blocks.min()) if len(blocks) else 2.0)


@dataclass(frozen=True)
class Constant:
    """`low`, `high`: where the fit looks for it (for prefactors: for its share of the loss at the reference)."""

    name: str
    low: float
    high: float
    what: str


class Law:
    """Abstract: each law gives the methods. `internal` [S, K] are logarithms, prefactors taken at the reference;
    `natural` the constants of the formula."""

    name: str
    formula: str
    constants: tuple[Constant, ...]
    decides: tuple[str, ...]
    """Constants of precision, on which the best one hangs."""

    @property
    def bounds(self) -> tuple[Array, Array]:
        """Of the internal constants, [K] each."""
        low, high = ([math.log(getattr(c, side)) for c in self.constants] for side in ("low", "high"))
        return np.array(low), np.array(high)

    def usable(self, points: Points) -> NDArray[np.bool_]:
        """[n]: the points that the law speaks of."""
        raise NotImplementedError

    def untold(self, points: Points) -> dict[str, str]:
        """Constant -> why no point can tell it, whatever the losses are."""
        raise NotImplementedError

    def predict(self, internal: Array, points: Points, at: Reference) -> tuple[Array, Array]:
        """(loss [S, n], its derivatives by the internal constants [S, n, K])."""
        raise NotImplementedError

    def natural(self, internal: Array, at: Reference) -> Array:
        """[S, K] of the formula's constants."""
        raise NotImplementedError

    def internal(self, natural: Array, at: Reference) -> Array:
        """The inverse of `natural`."""
        raise NotImplementedError

    def best(self, natural: Array, cost: float, block: float) -> Array:
        """[S]: the bits at which a cost N D P buys the least loss, with N and D free; between 1 and 16."""
        raise NotImplementedError

    def at_cost(self, natural: Array, cost: float, bits: Sequence[float], block: float) -> Array:
        """[S, len(bits)]: the least loss that the cost buys at each number of bits."""
        raise NotImplementedError


class EffectiveParameters(Law):
    name = "effective"
    formula = "L = A Neff^-a + B D^-b + E, Neff = N (1 - e^(-Pw/gw)) (1 - e^(-Pi/gi))"
    constants = (
        Constant("A", 1e-3, 1e2, "prefactor of the parameters"),
        Constant("a", 0.02, 3.0, "exponent of the parameters"),
        Constant("B", 1e-3, 1e2, "prefactor of the tokens"),
        Constant("b", 0.02, 3.0, "exponent of the tokens"),
        Constant("E", 1e-2, 1e1, "loss that is left, nats"),
        Constant("gw", 0.1, 20.0, "bits over which weights saturate"),
        Constant("gi", 0.1, 20.0, "bits over which inputs saturate"),
    )
    decides = ("gw", "gi")

    def usable(self, points: Points) -> NDArray[np.bool_]:
        """Points with blocks are another grid, for which the bits would mean something else."""
        return np.asarray(points.block == 0)

    def untold(self, points: Points) -> dict[str, str]:
        if (points.weight_bits != points.input_bits).any():
            return {}
        return dict.fromkeys(("gw", "gi"), "weights and inputs have the same bits everywhere")

    def predict(self, internal: Array, points: Points, at: Reference) -> tuple[Array, Array]:
        share, a, data, b, rest, gw, gi = (v[:, None] for v in np.exp(internal).T)
        size, tokens = np.log(points.parameters / at.parameters), np.log(points.tokens / at.tokens)
        (lost_w, slope_w), (lost_i, slope_i) = _saturation(points.weight_bits / gw), _saturation(points.input_bits / gi)
        log_size = size + lost_w + lost_i
        first, second = share * np.exp(-a * log_size), data * np.exp(-b * tokens)
        loss = first + second + rest
        columns = (first, -a * log_size * first, second, -b * tokens * second, rest + 0 * loss,
                   a * first * slope_w, a * first * slope_i)  # fmt: skip
        return loss, np.stack(columns, -1)

    def natural(self, internal: Array, at: Reference) -> Array:
        made = np.exp(internal)
        made[:, 0] *= at.parameters ** made[:, 1]
        made[:, 2] *= at.tokens ** made[:, 3]
        return made

    def internal(self, natural: Array, at: Reference) -> Array:
        made = natural.copy()
        made[:, 0] *= at.parameters ** -made[:, 1]
        made[:, 2] *= at.tokens ** -made[:, 3]
        return np.log(made)

    def best(self, natural: Array, cost: float, block: float) -> Array:
        """Neff D = (cost/P) f(P): whatever a, b and the cost are, the best P is the one of the largest f(P)/P."""
        return np.array([best_precision([(gw, 0.0), (gi, 0.0)]) for gw, gi in natural[:, 5:7]])

    def at_cost(self, natural: Array, cost: float, bits: Sequence[float], block: float) -> Array:
        A, a, B, b, E, gw, gi = (v[:, None] for v in natural.T)
        P = np.asarray(bits)[None]
        useful = cost / P * -np.expm1(-P / gw) * -np.expm1(-P / gi)  # Neff D
        neff = ((a * A) / (b * B) * useful**b) ** (1 / (a + b))  # where the derivative by log N is zero
        return np.asarray(A * neff**-a + B * (useful / neff) ** -b + E)


class FloatFormat(Law):
    name = "float"
    formula = "L = n/N^a + d/D^b + e + (D^b/N^a) log2(block) / (g (X + 1/2)^x (M + 1/2)^m); log2(block) = t per tensor"
    constants = (
        Constant("n", 1e-3, 1e2, "prefactor of the parameters"),
        Constant("a", 0.02, 3.0, "exponent of the parameters"),
        Constant("d", 1e-3, 1e2, "prefactor of the tokens"),
        Constant("b", 0.02, 3.0, "exponent of the tokens"),
        Constant("e", 1e-2, 1e1, "loss that is left, nats"),
        Constant("g", 1e-4, 1e2, "divisor of the penalty (found as that of e2m1)"),
        Constant("x", 0.05, 20.0, "exponent of the exponent bits"),
        Constant("m", 0.05, 20.0, "exponent of the mantissa bits"),
        Constant("t", 1.0, 64.0, "log2(block) that a scale for the whole tensor is worth"),
    )
    decides = ("x", "m")
    _E2M1 = (2.5, 1.5)

    def usable(self, points: Points) -> NDArray[np.bool_]:
        return np.asarray(~np.isnan(points.exponent_bits))

    def untold(self, points: Points) -> dict[str, str]:
        kinds = points.block > 0
        return {} if kinds.any() and not kinds.all() else {"t": "no points with blocks beside some without"}

    def predict(self, internal: Array, points: Points, at: Reference) -> tuple[Array, Array]:
        share, a, data, b, rest, penalty, x, m, t = (v[:, None] for v in np.exp(internal).T)
        size, tokens = np.log(points.parameters / at.parameters), np.log(points.tokens / at.tokens)
        exponent = np.log((points.exponent_bits + 0.5) / self._E2M1[0])
        mantissa = np.log((points.mantissa_bits + 0.5) / self._E2M1[1])
        blocks = points.block > 0
        scaling = np.where(blocks, np.log2(np.maximum(points.block, 1)) / t, 1.0)
        first, second = share * np.exp(-a * size), data * np.exp(-b * tokens)
        third = penalty * np.exp(b * tokens - a * size - x * exponent - m * mantissa) * scaling
        loss = first + second + rest + third
        columns = (first, -a * size * (first + third), second, b * tokens * (third - second), rest + 0 * loss, third,
                   -x * exponent * third, -m * mantissa * third, np.where(blocks, -third, 0.0))  # fmt: skip
        return loss, np.stack(columns, -1)

    def natural(self, internal: Array, at: Reference) -> Array:
        made = np.exp(internal)
        made[:, 5] = made[:, 8] * self._penalty_of_one(made, at) / made[:, 5]
        made[:, 0] *= at.parameters ** made[:, 1]
        made[:, 2] *= at.tokens ** made[:, 3]
        return made

    def internal(self, natural: Array, at: Reference) -> Array:
        made = natural.copy()
        made[:, 5] = made[:, 8] * self._penalty_of_one(made, at) / made[:, 5]
        made[:, 0] *= at.parameters ** -made[:, 1]
        made[:, 2] *= at.tokens ** -made[:, 3]
        return np.log(made)

    def _penalty_of_one(self, made: Array, at: Reference) -> Array:
        """[S]: the last term of e2m1 at the reference, for log2(block) = g = 1."""
        a, b, x, m = made[:, 1], made[:, 3], made[:, 6], made[:, 7]
        bits = self._E2M1[0] ** -x * self._E2M1[1] ** -m
        return np.asarray(at.tokens**b * at.parameters**-a * bits)

    def best(self, natural: Array, cost: float, block: float) -> Array:
        """With the bits divided best (equation 31: X + 1/2 = P x/(x + m)) the last term is (D^b/N^a) q P^-s, s = x + m.
        Where the derivatives by log N, log D and log P are equal, D^b = n a/(q (s - a)) P^s and
        N^a = q (s + b)/(b d) D^2b P^-s, so the cost is a power of P, as in equation 54."""
        n, a, d, b = natural.T[:4]
        q, s = self._divided(natural, block)
        with np.errstate(invalid="ignore", divide="ignore"):
            first = n * a / (q * (s - a))
            second = q * (s + b) / (b * d) * first**2
            bits = (cost / (first ** (1 / b) * second ** (1 / a))) ** (1 / (s / a + s / b + 1))
        # s <= a: the penalty falls more slowly than parameters become dearer, so the fewest bits are best
        return np.clip(np.where(s > a, bits, LEAST_BITS), LEAST_BITS, MOST_BITS)

    def at_cost(self, natural: Array, cost: float, bits: Sequence[float], block: float) -> Array:
        n, a, d, b, e, _, _, _, _ = (v[:, None, None] for v in natural.T)
        q, s = (v[:, None, None] for v in self._divided(natural, block))
        P = np.asarray(bits)[None, :, None]
        log_n = np.linspace(math.log(1e2), math.log(cost / 1e2), 4000)
        N = np.exp(log_n)[None, None]
        D = cost / (N * P)
        return np.asarray((n / N**a + d / D**b + e + D**b / N**a * q * P**-s).min(-1))

    def _divided(self, natural: Array, block: float) -> tuple[Array, Array]:
        """(q, s), [S] each."""
        g, x, m, t = natural[:, 5], natural[:, 6], natural[:, 7], natural[:, 8]
        s = x + m
        log2_block = t if block == 0 else np.full_like(t, math.log2(block))
        return log2_block / g * s**s / (x**x * m**m), s


LAWS: tuple[Law, ...] = (EffectiveParameters(), FloatFormat())


def best_precision(parts: Sequence[tuple[float, float]]) -> float:
    """The P between 1 and 16 with the largest product of 1 - e^(shift - P/g) over P; `parts`: (g, shift) of each thing
    that is quantised. Two alike without shifts: 1.2564 g; three: 1.9038 g; one: the least."""
    bits = np.linspace(LEAST_BITS, MOST_BITS, 15001)
    worth = 1 / bits
    for g, shift in parts:
        worth = worth * np.maximum(-np.expm1(shift - bits / g), 0.0)
    return float(bits[np.argmax(worth)])


def _saturation(ratio: Array) -> tuple[Array, Array]:
    """Of u = P/g: (log(1 - e^-u), how fast 1 - e^-u falls as log g grows, over itself: u e^-u / (1 - e^-u))."""
    saturated = -np.expm1(-ratio)
    return np.log(saturated), ratio * np.exp(-ratio) / saturated
