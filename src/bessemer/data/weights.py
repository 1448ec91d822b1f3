"""The weights of a mixture as exact fractions. No numpy: `bessemer check` uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["MAX_PERIOD", "period_of", "shares_of"]

MAX_PERIOD = 1 << 16
"""The longest table of choices; finer weights are refused."""


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """The weights over their sum, exactly as their shortest decimal form says (0.1 is 1/10)."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def period_of(weights: Sequence[float]) -> int:
    """After how many samples the choice repeats: the common denominator of the shares."""
    return math.lcm(*(share.denominator for share in shares_of(weights)))
