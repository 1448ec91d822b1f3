"""Which corpus each sample of a mixture comes from: exact over any prefix.

With weights w_i = p_i / q in lowest terms the choice repeats every q samples. Within the period Tijdeman's rule (1980,
"The chairman assignment problem") picks, of the corpora that are behind by at least 1/(2k-2), the one that
falls due first; then after any n samples each corpus has been chosen w_i n times to within 1 - 1/(2k-2), which is
less than one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bessemer.data.weights import MAX_PERIOD, period_of, shares_of

__all__ = ["Mixture"]


class Mixture:
    """Sample ids -> (corpus, place within that corpus's own endless order), in O(1) from a table of one period."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ValueError for no or non-positive weights, or a period above MAX_PERIOD."""
        if not weights or min(weights) <= 0:
            raise ValueError(f"a mixture needs positive weights, not {list(weights)}")
        self.period = period_of(weights)
        if self.period > MAX_PERIOD:
            raise ValueError(f"the weights repeat only after {self.period} samples, at most {MAX_PERIOD} are possible")
        self.per_period = [int(share * self.period) for share in shares_of(weights)]
        self._corpus = _choose(self.per_period, self.period)
        self._rank = np.empty(self.period, np.int64)
        for corpus in range(len(self.per_period)):
            own = np.flatnonzero(self._corpus == corpus)
            self._rank[own] = np.arange(own.size)

    def locate(self, sample_id: int) -> tuple[int, int]:
        """(corpus, place in it) of `sample_id` >= 0."""
        round_, slot = divmod(sample_id, self.period)
        corpus = int(self._corpus[slot])
        return corpus, round_ * self.per_period[corpus] + int(self._rank[slot])


def _choose(per_period: Sequence[int], period: int) -> np.ndarray:
    """The corpus of each slot of one period; all in integers, so that it is the same everywhere."""
    count = len(per_period)
    chosen = np.zeros(period, np.int32)
    if count == 1:
        return chosen
    slack = 2 * count - 2
    taken = [0] * count
    for slot in range(period):
        best = -1
        for i, share in enumerate(per_period):
            if slack * (share * (slot + 1) - period * taken[i]) < period:
                continue  # not yet behind by 1/slack
            # due times (taken + 1 - 1/slack) / share, compared by cross-multiplying
            if (
                best < 0
                or (slack * taken[i] + slack - 1) * per_period[best] < (slack * taken[best] + slack - 1) * share
            ):
                best = i
        chosen[slot] = best
        taken[best] += 1
    return chosen
