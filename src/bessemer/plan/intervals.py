"""When to save: Young's and Daly's intervals and the exact optimum, with the efficiency that each leaves.

Work runs in stretches of tau seconds, each followed by a save that stalls for delta. A failure (Poisson, mean time M
between them while work runs) throws away what came after the last finished save. A save that is written in the
background counts `lag_s` after its stall only.
"""

from __future__ import annotations

import math

__all__ = ["best_interval_s", "daly_interval_s", "efficiency", "young_interval_s"]


def efficiency(interval_s: float, stall_s: float, mttf_s: float, lag_s: float = 0.0) -> float:
    """Kept work over running time: (tau/M) e^(-lag/M) / (e^((tau+delta)/M) - 1), exact.

    Daly, Future Generation Computer Systems 22 (2006), equation 20, without its restart term.
    """
    return interval_s / mttf_s * math.exp(-lag_s / mttf_s) / math.expm1((interval_s + stall_s) / mttf_s)


def young_interval_s(stall_s: float, mttf_s: float) -> float:
    """sqrt(2 delta M): J. W. Young, Communications of the ACM 17 (1974)."""
    return math.sqrt(2 * stall_s * mttf_s)


def daly_interval_s(stall_s: float, mttf_s: float) -> float:
    """sqrt(2 delta M) (1 + sqrt(x)/3 + x/9) - delta with x = delta / 2M, or M where delta >= 2M (Daly 2006, eq. 37)."""
    if stall_s >= 2 * mttf_s:
        return mttf_s
    x = stall_s / (2 * mttf_s)
    return young_interval_s(stall_s, mttf_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s


def best_interval_s(stall_s: float, mttf_s: float) -> float:
    """The tau at which `efficiency` is greatest, whatever the lag: 1 - tau/M = e^(-(tau+delta)/M), by bisection.

    Zero where a save costs nothing.
    """
    delta = stall_s / mttf_s
    low, high = 0.0, 1.0
    for _ in range(80):
        x = (low + high) / 2
        if -math.log1p(-x) < x + delta:  # e^-(x+delta) < 1-x: the optimum lies higher
            low = x
        else:
            high = x
    return (low + high) / 2 * mttf_s if stall_s > 0 else 0.0
