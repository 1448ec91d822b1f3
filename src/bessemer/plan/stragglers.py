"""How much a synchronous step is slowed because it waits for the slowest of n nodes."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

__all__ = ["expected_maximum", "pace"]


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """E[max] of `count` standard normal variables, in standard deviations, by integrating P(max > x); error < 1e-4.

    sqrt(2 ln n), which is often put for it, is 10 to 30 % too high.
    """
    if count == 1:
        return 0.0
    x = np.linspace(0.0, 9.0, 1801)
    above = np.array([0.5 * math.erfc(v / math.sqrt(2.0)) for v in x.tolist()])
    more = -np.expm1(count * np.log1p(-above))  # P(max > x)
    less = np.exp(count * np.log(np.maximum(above, 1e-300)))  # P(max < -x)
    return float(np.trapezoid(more - less, x))


def pace(nodes: int, *, jitter: float, slow_share: float, slow_by: float) -> float:
    """Speed of the step relative to one in which all nodes are equally fast, between 0 and 1.

    jitter: standard deviation of a node's step time, as a fraction, anew in each step. slow_share: of the nodes, those
    that are lastingly slow, by the fraction `slow_by`; one is enough to slow all.
    """
    at_least_one = -math.expm1(nodes * math.log1p(-slow_share)) if slow_share < 1 else 1.0
    return 1.0 / ((1.0 + jitter * expected_maximum(nodes)) * (1.0 + slow_by * at_least_one))
