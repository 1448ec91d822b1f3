"""Whether a paired difference lies within the spread between seeds, from few seeds.

Runs of the same seed share initialisation and order of data, so differences are taken seed by seed. Their mean has
Student's interval (W. S. Gosset, Biometrika 1908); the spread between seeds is the standard deviation of the
reference's runs. Equivalence follows the two one-sided tests of D. J. Schuirmann (1987): at the level `LEVEL` a
difference lies within a margin if its interval of confidence 1 - 2 LEVEL does.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BETTER", "LEVEL", "UNTOLD", "WITHIN", "WORSE", "Comparison", "chi_square_cdf", "compare", "deviation",
    "deviation_interval", "least_flip_p", "quantile", "sign_flip_p", "student_cdf", "student_quantile",
]  # fmt: skip

LEVEL = 0.05
"""Chance, at a difference of exactly the margin, to call it within the margin (or, likewise, beyond it)."""

EXACT_SEEDS, FLIP_DRAWS = 16, 65536
"""Up to so many seeds every way to flip their signs is tried; above, so many random ones."""

WITHIN, WORSE, BETTER = "within seed noise", "worse than seed noise", "better than seed noise"
UNTOLD = "too few seeds to tell"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity (lower is better) of a recipe against the reference, over the seeds.

    `differences`: recipe - reference of each seed. `low`, `high`: the interval of their mean, of confidence
    1 - 2 LEVEL. `noise`: standard deviation of the reference between seeds, itself known only to lie in
    `noise_interval` (confidence 1 - 2 LEVEL). `p_value`: of Student's paired test that the mean is not zero, both
    sides; `exact_p`: the same by flipping signs, never below `least_flip_p(seeds)`.
    """

    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    noise: float
    noise_interval: tuple[float, float]
    p_value: float
    exact_p: float

    @property
    def verdict(self) -> str:
        """By where the interval lies: inside of +-noise, wholly above or below it, or across one of its ends."""
        if -self.noise <= self.low and self.high <= self.noise:
            return WITHIN
        if self.low > self.noise:
            return WORSE
        return BETTER if self.high < -self.noise else UNTOLD

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "verdict": self.verdict}


def compare(recipe: Sequence[float], reference: Sequence[float]) -> Comparison:
    """`recipe[i]` and `reference[i]` come from the same seed; two seeds at least."""
    differences = tuple(a - b for a, b in zip(recipe, reference, strict=True))
    count = len(differences)
    mean, error = math.fsum(differences) / count, deviation(differences) / math.sqrt(count)
    half = student_quantile(1 - LEVEL, count - 1) * error
    noise = deviation(reference)
    if error == 0:
        p_value = 1.0 if mean == 0 else 0.0
    else:
        p_value = 2 * student_cdf(-abs(mean) / error, count - 1)
    return Comparison(
        differences=differences,
        mean=mean,
        low=mean - half,
        high=mean + half,
        noise=noise,
        noise_interval=deviation_interval(noise, count),
        p_value=p_value,
        exact_p=sign_flip_p(differences),
    )


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample: n - 1 in the denominator."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def deviation_interval(found: float, count: int) -> tuple[float, float]:
    """Interval of confidence 1 - 2 LEVEL of a standard deviation, of which `found` is the estimate from `count` normal
    values."""
    freedom = count - 1
    low, high = (quantile(lambda x: chi_square_cdf(x, freedom), p, 0.0) for p in (1 - LEVEL, LEVEL))
    return found * math.sqrt(freedom / low), found * math.sqrt(freedom / high)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean under all 2^n ways to flip the signs: exact if differences are symmetric about
    zero when nothing differs. Needs no normal distribution.

    Above `EXACT_SEEDS` differences `FLIP_DRAWS` ways are drawn, always the same, and what was measured counts as one
    more, so that the test keeps its level (B. Phipson and G. K. Smyth, arXiv 1603.05766)."""
    least = abs(math.fsum(differences)) * (1 - 1e-12)  # sums in another order may differ in the last bit
    count = len(differences)
    if count <= EXACT_SEEDS:
        flips = itertools.product(*((d, -d) for d in differences))
        return sum(abs(math.fsum(f)) >= least for f in flips) / (1 << count)
    generator, beyond = random.Random(0), 1
    for _ in range(FLIP_DRAWS):
        bits = generator.getrandbits(count)
        beyond += abs(math.fsum(d if bits >> i & 1 else -d for i, d in enumerate(differences))) >= least
    return beyond / (FLIP_DRAWS + 1)


def least_flip_p(count: int) -> float:
    """The smallest value that `sign_flip_p` can take for `count` differences."""
    return 2 / (1 << count) if count <= EXACT_SEEDS else 1 / (FLIP_DRAWS + 1)


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for a whole number of degrees of freedom, in closed form (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    square = math.cos(angle) ** 2
    if freedom % 2:
        total, term = 0.0, math.cos(angle)
        for k in range(3, freedom + 1, 2):
            total += term
            term *= square * (k - 1) / k
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        total, term = 0.0, 1.0
        for k in range(2, freedom + 1, 2):
            total += term
            term *= square * (k - 1) / k
        inside = math.sin(angle) * total
    return (1 + inside) / 2


def student_quantile(p: float, freedom: int) -> float:
    """The t below which a share `p` of Student's distribution lies."""
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    return quantile(lambda t: student_cdf(t, freedom), p, 0.0)


def chi_square_cdf(x: float, freedom: int) -> float:
    """P(X <= x) for a whole number of degrees of freedom, in closed form (Abramowitz and Stegun 26.4.4, 26.4.5)."""
    if freedom % 2:
        above, term = math.erfc(math.sqrt(x / 2)), math.sqrt(2 * x / math.pi) * math.exp(-x / 2)
        for k in range(3, freedom + 1, 2):
            above += term
            term *= x / k
    else:
        above, term = 0.0, math.exp(-x / 2)
        for k in range(2, freedom + 1, 2):
            above += term
            term *= x / k
    return 1 - above


def quantile(cdf: Callable[[float], float], p: float, low: float) -> float:
    """The x >= `low` with cdf(x) = p, by bisection to the last bit."""
    high = low + 1.0
    while cdf(high) < p:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if cdf(middle) < p else (low, middle)
    return high
