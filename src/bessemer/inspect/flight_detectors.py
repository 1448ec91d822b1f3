"""The other detectors of the flight inspection: slow links, data stalls, spikes, experts, memory, silent corruption.

Each is a rule over arrays with the state that it needs from step to step, and takes one kind of record. What isn't
said to be from elsewhere is this project's own rule, held to by the tests of the simulator.

Legend: R ranks, G groups of one kind, P places in a copy of the model, C copies, L MoE layers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bessemer.inspect.flight_records import Floats, HashSample, LinkSample, MetricSample, StepSample
from bessemer.inspect.flight_stragglers import FEW, MAD_TO_SD, others_median, stage_spread

__all__ = ["Corrupt", "ExpertLoad", "LinkScore", "MemoryGrowth", "Spikes", "StallScore", "corrupt_ranks"]

LINK_STEPS, LINK_Z, LINK_EXCESS = 20, 6.0, 0.3
LINK_EXCESS_OF_FEW = 2.0
LINK_LEAST_S, LINK_LEAST_PART = 1e-3, 0.02
STALL_STEPS, STALL_PART = 5, 0.2
SPIKE_STEPS, SPIKE_NEAR_STEPS, SPIKE_LEAST_STEPS, SPIKE_Z = 128, 16, 32, 6.5
LOSS_EXCESS, NORM_EXCESS = 0.05, 1.0
EXPERT_STEPS, EXPERT_RATIO, EXPERT_LEAST = 20, 2.0, 3.0
MEMORY_SAMPLES, MEMORY_EVERY, MEMORY_PART = 64, 4, 0.02


class _Ring:
    """The last rows of an array that comes once a step."""

    def __init__(self, rows: int, width: int) -> None:
        self.values = np.full((rows, width), np.nan)
        self.seen = 0

    def put(self, row: Floats) -> bool:
        """Whether all rows are known by now."""
        self.values[self.seen % len(self.values)] = row
        self.seen += 1
        return self.seen >= len(self.values)


class LinkScore:
    """Slow links, by how long transfers take once the last rank has come: what ranks wait for each other isn't in it.

    A group is slow where the median of its last 20 steps is 30 % above that of the other groups of its kind, by 6
    robust standard deviations. Fewer than 8 groups are held against the median of their own best 20 steps, and have to
    take three times as long in nine of ten. What all others of its kind have become slower by (where it has no others:
    three quarters of all groups) is no link's doing, but that of other work on their hosts. What is below 1 ms, or 2 %
    of the step, counts as that. Which pair of ranks of a group it is needs a test of pairs.
    """

    def __init__(self) -> None:
        self._rings: dict[tuple[str, tuple[tuple[int, ...], ...]], _Ring] = {}
        self._best: dict[tuple[str, tuple[tuple[int, ...], ...]], Floats] = {}
        self._growth: dict[tuple[str, tuple[tuple[int, ...], ...]], Floats] = {}  # over the best

    def update(self, sample: LinkSample) -> list[tuple[int, float, float]]:
        """(index of the group, z or ratio, by what part longer) of those that are slow now, the slowest first."""
        key = sample.kind, sample.groups
        ring = self._rings.setdefault(key, _Ring(LINK_STEPS, len(sample.groups)))
        if not ring.put(sample.transfer_s):
            return []
        median_G = np.median(ring.values, axis=0)
        least_s = max(LINK_LEAST_S, LINK_LEAST_PART * sample.step_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            if len(sample.groups) < FEW:
                best_G = self._best[key] = np.fmin(self._best.get(key, median_G), median_G)
                self._growth[key] = np.percentile(ring.values, 10, axis=0) / np.maximum(best_G, least_s)
                score_G = self._growth[key] / self._usual_growth(key)
                excess_G = score_G - 1
                slow_G = excess_G > LINK_EXCESS_OF_FEW
            else:
                others_G = others_median(median_G[None])[0]
                excess_G = median_G / others_G - 1
                score_G = (median_G - others_G) / stage_spread(median_G[None])[0]
                slow_G = (excess_G > LINK_EXCESS) & (score_G > LINK_Z)
            slow_G &= median_G > least_s
        found = [(int(g), float(score_G[g]), float(excess_G[g])) for g in np.flatnonzero(slow_G)]
        return sorted(found, key=lambda slow: -slow[2])

    def _usual_growth(self, key: tuple[str, tuple[tuple[int, ...], ...]]) -> Floats:
        """By how much each group of `key` would have grown without a fault of its own; no less than 1."""
        own_G = self._growth[key]
        if len(own_G) > 1:
            others = [np.delete(own_G, g) for g in range(len(own_G))]
            return np.asarray([max(1.0, float(np.nanmin(each, initial=np.inf))) for each in others])
        all_others = [growth for of, growth in self._growth.items() if of != key]
        if not all_others:
            return np.ones(1)
        return np.asarray([max(1.0, float(np.nanpercentile(np.concatenate(all_others), 25)))])


class StallScore:
    """Data stalls: ranks that wait for batches for more than a fifth of the step, in most of the last 5 steps."""

    def __init__(self, num_ranks: int) -> None:
        self._ring = _Ring(STALL_STEPS, num_ranks)

    def update(self, sample: StepSample) -> list[tuple[int, float]]:
        """(index of the rank, part of the step) of those that stall now, the worst first."""
        full = self._ring.put(sample.data_s / sample.step_s)
        if not full:
            return []
        part_R = np.median(self._ring.values, axis=0)
        found = [(int(r), float(part_R[r])) for r in np.flatnonzero(part_R > STALL_PART)]
        return sorted(found, key=lambda stall: -stall[1])


class Spikes:
    """Spikes of loss and gradient norm: robust z over the last 128 steps above 6.5, upwards only.

    Both are taken as logarithms, less what the 16 steps before lead to expect, since the loss falls and the norm
    follows the learning rate: the median of the last 8, and the change from the 8 before them. z = difference /
    (1.4826 x median absolute difference). The loss has to be 5 % above that too, the norm twice as high. What isn't
    finite counts at once.
    """

    def __init__(self) -> None:
        self._losses, self._norms = _Trend(), _Trend()

    def update(self, sample: MetricSample) -> list[tuple[str, float, float]]:
        """(kind of the finding, z, by what part above what was to be expected)."""
        found = []
        for kind, trend, value, least in (
            ("loss_spike", self._losses, sample.loss, math.log1p(LOSS_EXCESS)),
            ("gradient_spike", self._norms, sample.grad_norm, math.log1p(NORM_EXCESS)),
        ):
            if not math.isfinite(value):
                found.append((kind, math.inf, math.inf))
                continue
            z, above = trend.update(math.log(max(value, 1e-30)))
            if z > SPIKE_Z and above > least:
                found.append((kind, z, math.expm1(above)))
        return found


class _Trend:
    """The last values, and how far each was from what those before it led to expect."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SPIKE_NEAR_STEPS)
        self._apart: deque[float] = deque(maxlen=SPIKE_STEPS)

    def update(self, value: float) -> tuple[float, float]:
        """(robust z, difference from what was expected); both are 0 while too little is known."""
        if len(self._values) < SPIKE_NEAR_STEPS:
            self._values.append(value)
            return 0.0, 0.0
        half = SPIKE_NEAR_STEPS // 2
        before, recent = np.median(np.asarray(self._values).reshape(2, half), axis=1).tolist()
        ahead = (half + 1) / 2 / half  # from the middle of the recent half, in halves
        above = value - (recent + ahead * (recent - before))
        spread = MAD_TO_SD * float(np.median(self._apart)) if len(self._apart) >= SPIKE_LEAST_STEPS else math.inf
        self._values.append(value)
        self._apart.append(abs(above))
        return above / max(spread, 1e-9), above


class ExpertLoad:
    """Routers that collapse: the largest load of an expert over the mean one, as the median of 20 steps, is above 3 and
    twice what it was in this layer's best 20 steps."""

    def __init__(self) -> None:
        self._ring: _Ring | None = None
        self._best: Floats | None = None

    def update(self, sample: MetricSample) -> list[tuple[int, float, float]]:
        """(MoE layer from 0, imbalance, the layer's best)."""
        load_L = np.asarray(sample.imbalance, dtype=np.float64)
        if not len(load_L):
            return []
        if self._ring is None:
            self._ring = _Ring(EXPERT_STEPS, len(load_L))
        if not self._ring.put(load_L):
            return []
        now_L = np.median(self._ring.values, axis=0)
        best_L = self._best = now_L if self._best is None else np.fmin(self._best, now_L)
        bad = np.flatnonzero((now_L > EXPERT_LEAST) & (now_L > EXPERT_RATIO * best_L))
        return [(int(layer), float(now_L[layer]), float(best_L[layer])) for layer in bad]


class MemoryGrowth:
    """Ranks whose memory grows and doesn't stop: over 256 steps each quarter's median is higher than the one before,
    the last rise is at least half of the first, and the whole is over 2 %."""

    def __init__(self, num_ranks: int) -> None:
        self._ring = _Ring(MEMORY_SAMPLES, num_ranks)
        self._steps = 0

    def update(self, sample: StepSample) -> list[tuple[int, float, float]]:
        """(index of the rank, growth as a part, bytes a step) of those that grow, the fastest first."""
        self._steps += 1
        if self._steps % MEMORY_EVERY or not self._ring.put(sample.memory_bytes):
            return []
        rows = (self._ring.seen + np.arange(MEMORY_SAMPLES)) % MEMORY_SAMPLES  # oldest first
        quarters = np.median(self._ring.values[rows].reshape(4, MEMORY_SAMPLES // 4, -1), axis=1)
        rises = np.diff(quarters, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            part_R = quarters[3] / quarters[0] - 1
            grows_R = (rises > 0).all(axis=0) & (2 * rises[2] > rises[0]) & (part_R > MEMORY_PART)
        between = 0.75 * MEMORY_SAMPLES * MEMORY_EVERY
        found = [(int(r), float(part_R[r]), float(quarters[3, r] - quarters[0, r]) / between)
                 for r in np.flatnonzero(grows_R)]  # fmt: skip
        return sorted(found, key=lambda grown: -grown[1])


@dataclass(frozen=True)
class Corrupt:
    """Ranks of one place whose parameters differ. wrong: those that a strict majority of at least three copies
    contradicts; empty where none agrees, so that only the difference is known."""

    place: int
    wrong: tuple[int, ...]
    ranks: tuple[int, ...]


def corrupt_ranks(sample: HashSample) -> list[Corrupt]:
    """The places whose copies don't all have the same hash. A majority is the middle of the sorted hashes if anything
    is, so it's found by one sort."""
    num_copies = sample.hashes.shape[1]
    middle_P = np.sort(sample.hashes, axis=1)[:, num_copies // 2]
    same_PC = sample.hashes == middle_P[:, None]
    agree_P = np.count_nonzero(same_PC, axis=1)
    found = []
    for place in np.flatnonzero(agree_P < num_copies).tolist():
        ranks: Sequence[int] = sample.ranks[place].tolist()
        decided = num_copies >= 3 and 2 * agree_P[place] > num_copies
        wrong = tuple(r for r, same in zip(ranks, same_PC[place].tolist(), strict=True) if not same)
        found.append(Corrupt(place, wrong if decided else (), tuple(ranks)))
    return found
