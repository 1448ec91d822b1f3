"""The order of samples: a permutation of 0..n-1 for each (seed, epoch) that is computed, never stored.

A Feistel network over the smallest b bits that hold n (b >= 2) is a bijection of 0..2^b-1; walking along it until the
value is below n (Black and Rogaway 2002, "cycle walking") makes it one of 0..n-1. 2^b < 2n for n > 2, so fewer than
two steps are expected. Memory is O(1) and any place can be asked for, with n up to 2^62. The values depend on nothing
but (n, seed, epoch, place): no library's generator, no platform.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_SAMPLES", "Order"]

MAX_SAMPLES = 1 << 62
_ROUNDS = 8
_MASK = (1 << 64) - 1
_FEW = 24  # below this many ids plain integers are faster than arrays


def _mix(value: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on 64-bit integers: a Python int or a uint64 array."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=4096)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mix((_mix(seed & _MASK) ^ (epoch * 0x9E3779B97F4A7C15)) & _MASK)
    keys = []
    for _ in range(_ROUNDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        keys.append(_mix(state))
    return tuple(keys)


class Order:
    """The endless order of a corpus of `num_samples`: place i is in epoch i // n, which has its own permutation."""

    def __init__(self, num_samples: int, seed: int) -> None:
        if not 0 < num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples must be from 1 to 2^62, not {num_samples}")
        self.num_samples = num_samples
        self.seed = seed
        bits = max(2, (num_samples - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1

    def sample(self, place: int) -> int:
        """The sample at `place` >= 0 of the endless order."""
        epoch, index = divmod(place, self.num_samples)
        keys = _round_keys(self.seed, epoch)
        index = self._permute(index, keys)
        while index >= self.num_samples:
            index = self._permute(index, keys)
        return int(index)

    def samples(self, places: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The samples at many places, each as `sample` gives it."""
        asked = np.asarray(places, np.int64)
        if asked.size < _FEW:
            return np.array([self.sample(int(place)) for place in asked], np.int64)
        epochs, indices = np.divmod(asked, self.num_samples)
        found = indices.astype(np.uint64)
        for epoch in np.unique(epochs).tolist():
            own = np.flatnonzero(epochs == epoch)
            keys = _round_keys(self.seed, epoch)
            values, left = found[own], np.arange(own.size)
            while left.size:
                values[left] = self._permute(values[left], keys)
                left = left[values[left] >= self.num_samples]
            found[own] = values
        return found.astype(np.int64)

    def _permute(self, index: Any, keys: tuple[int, ...]) -> Any:
        """One bijection of 0..2^b-1: the halves are mixed into each other in turn."""
        low, high = index & self._low_mask, index >> self._low_bits
        for i in range(0, _ROUNDS, 2):
            low = low ^ (_mix((high + keys[i]) & _MASK) & self._low_mask)
            high = high ^ (_mix((low + keys[i + 1]) & _MASK) & self._high_mask)
        return (high << self._low_bits) | low
