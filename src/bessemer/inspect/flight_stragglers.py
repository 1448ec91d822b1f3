"""Slow ranks: who computes longer for a token than the ranks of the same pipeline stage, over two windows of steps.

    score = StragglerScore(placement)
    score.update(sample)                    # every step
    for found in score.slow(): ...          # when a window is full

Only time in which a rank computes is compared. Who waits is a victim: beside a rank that is 20 % slow its peers in
tensor parallelism show the longer communication, and it shows the shortest. Ranks of other stages have other layers,
and a longer batch is more work: so costs are per token and within a stage, and what all ranks of a stage have in common
in a step (its layers, a hot afternoon) cancels.

Legend: R ranks, S stages, N ranks of the largest stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bessemer.inspect.flight_records import Floats, Placement, StepSample

__all__ = ["WINDOWS", "Slow", "StragglerScore", "Window", "others_median", "stage_spread"]

MAD_TO_SD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class Window:
    """steps: how many are averaged. z: robust standard deviations over the peers, and least_excess: by what part
    longer, from which on a rank is slow."""

    steps: int
    z: float
    least_excess: float


WINDOWS = (Window(20, 6.0, 0.03), Window(200, 5.5, 0.015))
"""The mean of w steps with jitter s scatters by s / sqrt(w). 20 steps show 10 % in a jitter of 3 % (15 of these) and
20 % in 8 % (11); 200 steps show 3 % (14) and 5 % (9). A normal distribution passes z = 6 once in 10^9, 5.5 once in
5 x 10^7: over 10,240 ranks once in 100,000 and in 5,000 windows."""
FEW = 8
"""In a stage of fewer ranks than this the spread among them can't be told from so few..."""
LEAST_EXCESS_OF_FEW = 0.2
"""... so that only a rank that is slower by this part counts."""
CLIP_Z, CLIP = 5.0, 0.15
"""One step counts for no more than the larger of these two: standard deviations, and parts. So two pauses of any length
within 20 steps, as of a garbage collection, stay below the least excess."""
CLIP_OF_FEW = 1.0
FILLED = 0.8
"""The part of a window in which a rank must have been seen."""


@dataclass(frozen=True)
class Slow:
    """A slow rank by index, in windows of `steps`: z, and by what part it computes longer than its peers (the median of
    the window)."""

    index: int
    steps: int
    z: float
    excess: float


class _Stages:
    """Ranks by stage, as rows of equal length that end in NaN."""

    def __init__(self, stage_R: NDArray[np.int64]) -> None:
        order = np.argsort(stage_R, kind="stable")
        _, first, count = np.unique(stage_R[order], return_index=True, return_counts=True)
        self._index_SN = np.full((len(count), int(count.max(initial=0))), len(stage_R))  # of the NaN that is appended
        self._row_R, self._column_R = np.empty_like(order), np.empty_like(order)
        for row, (begin, size) in enumerate(zip(first, count, strict=True)):
            members = order[begin : begin + size]
            self._index_SN[row, :size] = members
            self._row_R[members], self._column_R[members] = row, np.arange(size)

    def rows(self, values_R: Floats) -> Floats:
        rows: Floats = np.append(values_R, np.nan)[self._index_SN]
        return rows

    def flat(self, rows_SN: Floats) -> Floats:
        flat: Floats = rows_SN[self._row_R, self._column_R]
        return flat


def others_median(rows_SN: Floats) -> Floats:
    """For each element the median of the others in its row that are known (not NaN); NaN where there are none."""
    known_S = np.count_nonzero(~np.isnan(rows_SN), axis=1)[:, None]
    sorted_SN = np.sort(rows_SN, axis=1)  # NaN last

    def at(place_S: NDArray[np.int64]) -> Floats:
        """Of the others, the one at that place: places from the element's own on move up by one."""
        here = np.take_along_axis(sorted_SN, np.clip(place_S, 0, rows_SN.shape[1] - 1), axis=1)
        after = np.take_along_axis(sorted_SN, np.clip(place_S + 1, 0, rows_SN.shape[1] - 1), axis=1)
        return np.where(rows_SN <= here, after, here)

    middle = 0.5 * (at((known_S - 2) // 2) + at((known_S - 1) // 2))
    return np.where((known_S > 1) & ~np.isnan(rows_SN), middle, np.nan)


def stage_spread(rows_SN: Floats) -> Floats:
    """The robust standard deviation of each row, [S, 1]: 1.4826 times the median absolute deviation."""
    return MAD_TO_SD * _median(np.abs(rows_SN - _median(rows_SN)))


def _median(rows_SN: Floats) -> Floats:
    """Of each row over what is known, [S, 1]. np.nanmedian needs several times as long."""
    known_S = np.maximum(1, np.count_nonzero(~np.isnan(rows_SN), axis=1))[:, None]
    sorted_SN = np.sort(rows_SN, axis=1)
    low = np.take_along_axis(sorted_SN, (known_S - 1) // 2, axis=1)
    high = np.take_along_axis(sorted_SN, known_S // 2, axis=1)
    middle: Floats = 0.5 * (low + high)
    return middle


class StragglerScore:
    """The state from step to step: by how much each rank was slower than its peers in the last steps."""

    def __init__(self, placement: Placement, windows: tuple[Window, ...] = WINDOWS) -> None:
        self.windows = windows
        self._stages = _Stages(placement.stage)
        num_ranks, longest = len(placement), max(w.steps for w in windows)
        self._raw = np.full((longest, num_ranks), np.nan, dtype=np.float32)
        self._clipped = np.zeros((longest, num_ranks), dtype=np.float32)
        self._sums = np.zeros((len(windows), 3, num_ranks))  # of each window: excess, its square, how many are known
        self._seen = 0

    def update(self, sample: StepSample) -> None:
        """Take in one step. Its excess: seconds per token over the median of the stage's other ranks, less 1."""
        with np.errstate(divide="ignore", invalid="ignore"):
            cost_R = np.where(sample.tokens > 0, sample.compute_s / sample.tokens, np.nan)
            cost_SN = self._stages.rows(cost_R)
            excess_SN = cost_SN / others_median(cost_SN) - 1
        num_known = np.count_nonzero(~np.isnan(excess_SN), axis=1)[:, None]
        clip_S = np.where(num_known < FEW, CLIP_OF_FEW, np.maximum(CLIP, CLIP_Z * stage_spread(excess_SN)))
        clipped = np.nan_to_num(self._stages.flat(np.clip(excess_SN, -clip_S, clip_S)))
        raw = self._stages.flat(excess_SN)
        longest = len(self._raw)
        for window, sums in zip(self.windows, self._sums, strict=True):
            if self._seen >= window.steps:
                self._add(sums, (self._seen - window.steps) % longest, -1.0)
        at = self._seen % longest
        self._raw[at], self._clipped[at] = raw, clipped
        for sums in self._sums:
            self._add(sums, at, 1.0)
        self._seen += 1

    def slow(self) -> list[Slow]:
        """The ranks that are slow now, the slowest first; each once, by the shortest window that shows it."""
        found: dict[int, Slow] = {}
        for place, window in enumerate(self.windows):
            if self._seen < window.steps:
                continue
            z_R, mean_R, least_R = self.scores(place)
            with np.errstate(invalid="ignore"):
                flagged = np.flatnonzero((z_R > window.z) & (mean_R > least_R))
            rows = (self._seen - 1 - np.arange(window.steps)) % len(self._raw)
            for index in flagged.tolist():
                excess = float(np.nanmedian(self._raw[rows, index]))
                found.setdefault(index, Slow(index, window.steps, float(z_R[index]), excess))
        return sorted(found.values(), key=lambda slow: -slow.excess)

    def scores(self, place: int) -> tuple[Floats, Floats, Floats]:
        """Of window `place`: (z, mean excess, the least excess that counts) of each rank; NaN where little is known.

        z = (mean - median of the others' means) / spread. The spread is that among the stage's ranks (robust), and no
        less than the means' standard error as the ranks' own steps show it.
        """
        window = self.windows[place]
        total_R, squares_R, known_R = self._sums[place]
        with np.errstate(divide="ignore", invalid="ignore"):
            mean_R = np.where(known_R >= FILLED * window.steps, total_R / known_R, np.nan)
            error_R = np.sqrt(np.maximum(0.0, squares_R / known_R - mean_R**2) / known_R)
            mean_SN = self._stages.rows(mean_R)
            spread_S = np.maximum(stage_spread(mean_SN), _median(self._stages.rows(error_R)))
            z_SN = (mean_SN - others_median(mean_SN)) / spread_S
        few_S = np.count_nonzero(~np.isnan(mean_SN), axis=1)[:, None] < FEW
        least_SN = np.where(few_S, LEAST_EXCESS_OF_FEW, window.least_excess) * np.ones_like(mean_SN)
        return self._stages.flat(z_SN), mean_R, self._stages.flat(least_SN)

    def _add(self, sums: Floats, at: int, sign: float) -> None:
        clipped = self._clipped[at].astype(np.float64)
        sums[0] += sign * clipped
        sums[1] += sign * clipped**2
        sums[2] += sign * ~np.isnan(self._raw[at])
