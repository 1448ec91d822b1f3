"""All ranks of a run at one moment: where each spends its step, which are slow, and the frame that a page draws.

    ranks = Ranks(BoxFeed(Boxes(run / "blackbox"), job))
    ranks.read({}, hung=False, ended=False); ranks.worst(20); ranks.frame()

A feed is a `BoxFeed` over the black boxes of a run folder, or a `SampleFeed` that is given the `StepSample`s of a
fleet. Which ranks are slow, and by how much, is the flight inspection's rule (`flight_stragglers`): compute time for a
token against the other ranks of the pipeline stage, over 20 and 200 steps. Black boxes don't tell tokens; there all
ranks of a stage count as having the same.

Legend: R ranks, P phases, F the phases that are in a frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bessemer.core.job import Job
from bessemer.inspect.flight_records import Placement, StepSample
from bessemer.inspect.flight_stragglers import StragglerScore
from bessemer.inspect.watch_boxes import COMPUTE, PHASES, Boxes, RankBox
from bessemer.runtime.ring import ranges

__all__ = ["STATES", "BoxFeed", "RankFeed", "Ranks", "Reading", "SampleFeed"]

WINDOW = 20
FRAMED = 4
"""Phases of a frame at most: with 10,240 ranks it is 100 KiB."""
SCORE_LOW, SCORE_STEP, UNKNOWN_SCORE = 0.75, 0.0025, 0xFF
"""A score in a frame is `SCORE_LOW` + count x `SCORE_STEP`, up to 1.385."""
STATES = ("unknown", "running", "slow", "waiting", "stalled", "lost", "spare", "ended", "stale")
"""unknown: left nothing to read. waiting, stalled: while a run stands still, in a collective or outside of one. stale:
what it left is of an earlier attempt, or stands still while the run goes on."""
UNKNOWN, RUNNING, SLOW, WAITING, STALLED, LOST, SPARE, ENDED, STALE = range(len(STATES))
UNKNOWN_SECONDS = 0xFFFF
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Reading:
    """What a feed knows now; arrays are [R] by index of the placement.

    step: 0 unknown. seconds: [R, P], of the last whole step, NaN unknown. fresh: the steps that came since the last
    reading, oldest first; of a new placement the last `WINDOW` steps. doing: the phase that is open ("": between
    phases), since `since_t`; stale: [R], whose black box isn't of this attempt or is left behind. These are empty where
    the feed doesn't say.
    """

    generation: int  # of the placement
    placement: Placement
    step: NDArray[np.int64]
    seconds: Floats
    fresh: Sequence[StepSample]
    doing: Sequence[str] = ()
    since_t: Sequence[float] = ()
    stale: Sequence[bool] = ()


class RankFeed(Protocol):
    """Where readings come from. phases: their names, the first `FRAMED` of them for frames."""

    phases: tuple[str, ...]

    def read(self) -> Reading | None:
        """None before there is anything."""

    def history(self, index: int) -> list[tuple[int, list[float]]]:
        """(step, seconds by phase) of the last steps of the rank at `index`."""


class BoxFeed:
    """From the black boxes in a run folder."""

    phases: tuple[str, ...] = PHASES

    def __init__(self, boxes: Boxes, job: Job) -> None:
        self._boxes = boxes
        layout = job.layout
        self._pp, self._inner = layout.pp, job.shard * layout.cp * layout.tp
        self._ranks: list[RankBox] = []
        self._generation = -1
        self._taken: dict[int, int] = {}  # steps by rank

    def read(self) -> Reading | None:
        ranks = self._ranks = self._boxes.read()
        if not ranks:
            return None
        if self._boxes.generation != self._generation:
            self._generation = self._boxes.generation
            self._taken = {box.rank: box.num_steps - min(len(box.steps), WINDOW) for box in ranks}
        numbers = np.array([box.rank for box in ranks], np.int64)
        block = self._pp * self._inner
        placement = Placement(
            ranks=numbers,
            stage=numbers % block // self._inner,
            copy=numbers // block,
            place=numbers % block,
            hosts=tuple(box.host for box in ranks),
        )
        unknown = [math.nan] * len(PHASES)
        last = [box.steps[-1] if box.steps else (0, unknown) for box in ranks]
        return Reading(
            generation=self._generation,
            placement=placement,
            step=np.array([step for step, _ in last], np.int64),
            seconds=np.array([seconds for _, seconds in last], np.float32),
            fresh=self._fresh(ranks),
            doing=[box.doing for box in ranks],
            since_t=[box.since_t for box in ranks],
            stale=[box.is_stale(self._boxes.step) for box in ranks],
        )

    def history(self, index: int) -> list[tuple[int, list[float]]]:
        return list(self._ranks[index].steps)

    def _fresh(self, ranks: Sequence[RankBox]) -> list[StepSample]:
        """The n-th last step of each rank that has taken n since, for falling n."""
        new = [min(box.num_steps - self._taken[box.rank], len(box.steps)) for box in ranks]
        self._taken = {box.rank: box.num_steps for box in ranks}
        unknown = [math.nan] * len(PHASES)
        samples = []
        for back in range(max(new), 0, -1):
            steps = [box.steps[-back] if n >= back else (0, unknown) for box, n in zip(ranks, new, strict=True)]
            seconds_RP = np.array([seconds for _, seconds in steps], np.float64)
            nothing_R = np.full(len(ranks), np.nan)
            compute_R = seconds_RP[:, COMPUTE].sum(1)
            number = max(step for step, _ in steps)
            samples.append(StepSample(number, 0.0, math.nan, compute_R, nothing_R, nothing_R, np.ones(len(ranks)),
                                      nothing_R))  # fmt: skip
        return samples


class SampleFeed:
    """From samples of a whole fleet, as the flight inspection reads them: give each one to `take`."""

    phases: tuple[str, ...] = ("compute", "waiting", "data")

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._window: list[tuple[int, Floats]] = []  # step and seconds [R, P] of the last ones, the newest last
        self._fresh: list[StepSample] = []

    def take(self, sample: StepSample) -> None:
        """The next step of all ranks."""
        seconds_RP = np.stack([sample.compute_s, sample.wait_s, sample.data_s], 1).astype(np.float32)
        self._window = [*self._window[1 - WINDOW :], (sample.step, seconds_RP)]
        self._fresh.append(sample)

    def read(self) -> Reading | None:
        if not self._window:
            return None
        fresh, self._fresh = self._fresh, []
        step, seconds_RP = self._window[-1]
        return Reading(0, self._placement, np.full(len(self._placement), step, np.int64), seconds_RP, fresh)

    def history(self, index: int) -> list[tuple[int, list[float]]]:
        return [(step, [float(v) for v in seconds_RP[index]]) for step, seconds_RP in self._window]


class Ranks:
    """The latest reading of a feed, scored."""

    def __init__(self, feed: RankFeed) -> None:
        self.feed = feed
        self.reading: Reading | None = None
        self.states: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.scores: NDArray[np.float64] = np.zeros(0)
        """[R]: compute time for a token over that of the stage's other ranks; NaN where too little is known."""
        self._z: NDArray[np.float64] = np.zeros(0)
        self._rule: StragglerScore | None = None
        self._generation = -1

    def read(self, known: Mapping[int, int], *, hung: bool, ended: bool) -> None:
        """Reads and scores. known: states (numbers of STATES) of ranks that the run's events tell; hung: whether the
        run stands still for longer than a step may take; ended: whether it is over."""
        reading = self.reading = self.feed.read()
        if reading is None:
            return
        slow = self._score(reading)
        seen = np.isfinite(reading.seconds).any(1) | np.array([bool(d) for d in reading.doing] or [False])
        states = np.where(slow, SLOW, np.where(seen, ENDED if ended else RUNNING, UNKNOWN)).astype(np.uint8)
        if hung and reading.doing:
            waits = np.array([doing == "comm_s" for doing in reading.doing])
            states[seen] = np.where(waits, WAITING, STALLED)[seen]
        states[np.flatnonzero(reading.stale)] = STALE
        for index, rank in enumerate(reading.placement.ranks.tolist() if known else ()):
            states[index] = known.get(rank, states[index])
        self.states = states

    def place(self) -> dict[str, Any] | None:
        """What changes only with the set of ranks: their numbers as runs [first, step, count], and hosts likewise as
        [index, count] into their names."""
        if self.reading is None:
            return None
        placement = self.reading.placement
        names = list(dict.fromkeys(placement.hosts))
        numbers = {name: number for number, name in enumerate(names)}
        runs: list[list[int]] = []
        for host in placement.hosts:
            if runs and runs[-1][0] == numbers[host]:
                runs[-1][1] += 1
            else:
                runs.append([numbers[host], 1])
        return {"generation": self.reading.generation, "ranks": ranges(placement.ranks.tolist()),
                "hosts": names, "host_runs": runs}  # fmt: skip

    def worst(self, count: int) -> list[dict[str, Any]]:
        """Those with the highest score, and before them those that are lost or held up; the worst first."""
        if self.reading is None:
            return []
        bad = np.isin(self.states, (WAITING, STALLED, LOST))
        order = np.where(np.isnan(self.scores), 0.0, self.scores) + bad * np.where(self.states == WAITING, 1e3, 1e6)
        first = np.argsort(-order, kind="stable")[:count]
        return [self.one(int(index)) for index in first if order[index] > 0]

    def one(self, index: int) -> dict[str, Any]:
        """A rank of the reading, by index."""
        reading = self.reading
        assert reading is not None, "one is asked of a reading"
        at = reading.placement
        seconds = {p: _plain(v) for p, v in zip(self.feed.phases, reading.seconds[index], strict=True)}
        return {
            "rank": int(at.ranks[index]),
            "host": at.hosts[index],
            "copy": int(at.copy[index]),
            "stage": int(at.stage[index]),
            "state": STATES[self.states[index]],
            "step": int(reading.step[index]),
            "score": _plain(self.scores[index]),
            "z": _plain(self._z[index]),
            "seconds": seconds,
            "doing": reading.doing[index] if reading.doing else "",
            "since_t": round(reading.since_t[index], 3) if reading.since_t and reading.doing[index] else None,
        }

    def index(self, rank: int) -> int | None:
        """Of the rank with that number."""
        if self.reading is None:
            return None
        found = np.flatnonzero(self.reading.placement.ranks == rank)
        return int(found[0]) if len(found) else None

    def summary(self) -> dict[str, Any]:
        """Quantiles over all ranks by phase, and how many are in each state. framed: how many phases a frame has."""
        if self.reading is None:
            return {"phases": [], "counts": {}}
        seconds_RP = self.reading.seconds
        phases = []
        for number, name in enumerate(self.feed.phases):
            known = seconds_RP[:, number][np.isfinite(seconds_RP[:, number])]
            marks = np.percentile(known, (1, 50, 99, 100)) if len(known) else [math.nan] * 4
            phases.append({"name": name, **dict(zip(("p1", "p50", "p99", "max"), map(_plain, marks), strict=True))})
        counts = np.bincount(self.states, minlength=len(STATES))
        return {
            "phases": phases,
            "framed": min(FRAMED, len(phases)),
            "counts": {name: int(n) for name, n in zip(STATES, counts, strict=True) if n},
            "step": int(self.reading.step.max()),
            "count": len(self.states),
        }

    def frame(self) -> tuple[float, bytes]:
        """(seconds of one count, uint16 counts [F, R] with 65535 for unknown, then uint8 scores [R] with 255 for
        unknown, then uint8 states [R]), little-endian: 2 F + 2 bytes a rank."""
        if self.reading is None:
            return 0.0, b""
        seconds_FR = self.reading.seconds.T[:FRAMED]
        known = np.isfinite(seconds_FR)
        unit_s = float(seconds_FR[known].max(initial=0.0)) / (UNKNOWN_SECONDS - 1) or 1e-9
        counts_FR = np.where(known, np.nan_to_num(seconds_FR) / unit_s, UNKNOWN_SECONDS).round().astype("<u2")
        steps = np.clip(np.nan_to_num((self.scores - SCORE_LOW) / SCORE_STEP), 0, UNKNOWN_SCORE - 1).round()
        scores = np.where(np.isfinite(self.scores), steps, UNKNOWN_SCORE).astype(np.uint8)
        return unit_s, counts_FR.tobytes() + scores.tobytes() + self.states.tobytes()

    def _score(self, reading: Reading) -> NDArray[np.bool_]:
        """[R]: whether a rank is slow."""
        if self._rule is None or reading.generation != self._generation:
            self._rule, self._generation = StragglerScore(reading.placement), reading.generation
        for sample in reading.fresh:
            self._rule.update(sample)
        z_R, mean_R, _ = self._rule.scores(0)
        self._z, self.scores = z_R, 1.0 + mean_R
        slow = np.zeros(len(reading.placement), bool)
        for found in self._rule.slow():
            slow[found.index] = True
            self.scores[found.index] = 1.0 + found.excess  # the mean is of clipped steps
        return slow


def _plain(value: Any) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
