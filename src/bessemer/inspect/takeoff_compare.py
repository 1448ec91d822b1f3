"""Comparing hosts with each other: who is below the fleet's median, who differs from the majority, which end of a slow
link is to blame. Pure functions over numbers and words.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["LEAST", "blame", "low_outliers", "majority"]

LEAST = 3
"""Of two that differ nothing says which one is wrong."""
_DEVIATIONS = 6.0
_MAD = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution

K = TypeVar("K", bound=Hashable)
Link = tuple[int, int]


def low_outliers(values: Mapping[K, float], drop: float) -> dict[K, float]:
    """Those that lie more than the share `drop` below the median, and more than 6 robust standard deviations:
    key -> its share of the median. None among fewer than three.

    The deviation is 1.4826 x MAD x (1 + 4/n): of few values the MAD is often far too small.
    """
    if len(values) < LEAST:
        return {}
    middle = statistics.median(values.values())
    spread = _MAD * statistics.median(abs(v - middle) for v in values.values()) * (1 + 4 / len(values))
    limit = min((1 - drop) * middle, middle - _DEVIATIONS * spread)
    return {key: value / middle for key, value in values.items() if value < limit}


def majority(values: Mapping[K, str]) -> str | None:
    """The value that more than half have; None where there is no such value."""
    if not values:
        return None
    value, count = Counter(values.values()).most_common(1)[0]
    return value if 2 * count > len(values) else None


def blame(slow: Sequence[Link], measured: Sequence[Link]) -> tuple[dict[int, int], list[Link]]:
    """(rank -> its slow links, links that are slow by themselves), of the links that were found slow among those
    measured.

    A rank is to blame for at least two slow links that are half of all it has; the rank with the most comes first, and
    its links are then explained. What remains are links of which no end is slow otherwise.
    """
    total = Counter(rank for link in measured for rank in link)
    left = list(slow)
    guilty: dict[int, int] = {}
    while left:
        count = Counter(rank for link in left for rank in link)
        rank = max(sorted(count), key=lambda r: count[r] / total[r] if count[r] > 1 else 0.0)
        if count[rank] < 2 or 2 * count[rank] < total[rank]:
            break
        guilty[rank] = count[rank]
        left = [link for link in left if rank not in link]
    return guilty, left
