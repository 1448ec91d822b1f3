"""A Monte Carlo of `bessemer.plan.goodput`: the same process played out, failure by failure, on arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bessemer.plan.goodput import Estimate, GoodputInputs, capacity_by_missing, overcome_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """Effective time as `Estimate.effective_time`, its standard error, and the failures that were played."""

    effective_time: float
    standard_error: float
    failures: int


@dataclass(frozen=True)
class _Failures:
    """Arrays [N], in order of time: when, whether it falls back to disk, end of its stop, of joining, of its repair."""

    at_s: NDArray[np.float64]
    rare: NDArray[np.bool_]
    over_s: NDArray[np.float64]
    joined_s: NDArray[np.float64]
    repaired_s: NDArray[np.float64]


def simulate(
    inputs: GoodputInputs, planned: Estimate, *, failures: int = 40_000, batches: int = 20, seed: int = 0
) -> Simulated:
    """Plays `failures` failures of the mode, spares and intervals of `planned`; deterministic in `seed`.

    The standard error comes from the spread between `batches` stretches of equal length; a first one is dropped, in
    which the repair shop fills.
    """
    found = _draw(inputs, planned, failures + failures // batches, np.random.default_rng(seed))
    times, running_s, work_s = _clocks(inputs, planned, found)
    useful = _kept(inputs, planned, found, _Clock(times, running_s, work_s))
    edges = np.linspace(found.at_s[failures // batches], found.at_s[-1], batches + 1)
    done = np.interp(edges, found.at_s, useful)
    shares = np.diff(done) / np.diff(edges)
    return Simulated(float(shares.mean()), float(shares.std(ddof=1) / np.sqrt(batches)), failures)


def _draw(inputs: GoodputInputs, planned: Estimate, count: int, rng: np.random.Generator) -> _Failures:
    common_s, back_s = overcome_s(inputs, planned.mode)
    at = np.cumsum(rng.exponential(inputs.mttf_s, count))
    rare = rng.random(count) < (0.0 if planned.mode == "disk" else inputs.fallback_share)
    over = at + np.where(rare, back_s, common_s)
    joined = np.maximum(over, at + inputs.join_s) if planned.mode == "zero" else over
    drained = rng.random(count) < inputs.drain_share
    return _Failures(at, rare, over, joined, joined + np.where(drained, inputs.repair_s, inputs.reboot_s))


@dataclass(frozen=True)
class _Clock:
    """Running seconds and capacity-weighted running seconds up to each of `at_s`, both linear between."""

    at_s: NDArray[np.float64]
    running_s: NDArray[np.float64]
    work_s: NDArray[np.float64]

    def running(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(at_s, self.at_s, self.running_s)

    def work(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(at_s, self.at_s, self.work_s)


def _clocks(
    inputs: GoodputInputs, planned: Estimate, found: _Failures
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """How many stops, joins and repairs go on after each instant in which one of these numbers changes."""
    zeros, ones = np.zeros(len(found.at_s)), np.ones(len(found.at_s))
    at = np.concatenate([found.at_s, found.over_s, found.joined_s, found.repaired_s])
    stops = np.concatenate([ones, -ones, zeros, zeros])
    joins = np.concatenate([ones, zeros, -ones, zeros])
    repairs = np.concatenate([zeros, zeros, ones, -ones])
    order = np.argsort(at, kind="stable")
    at = at[order]
    stopped, joining, away = (np.rint(np.cumsum(x[order])).astype(int) for x in (stops, joins, repairs))
    short = np.zeros_like(away) if planned.spares is None else np.maximum(away - planned.spares, 0)
    if planned.mode == "zero":
        nodes = max(inputs.unit // inputs.gpus_per_node, 1)
        missing = joining + -(-short // nodes)
        speed = capacity_by_missing(inputs)[np.minimum(missing, inputs.replicas)]
        on = stopped == 0
    else:
        on = (stopped == 0) & (short == 0)
        speed = np.ones(len(at))
    length = np.diff(at, append=at[-1])
    clock = [np.append(0.0, np.cumsum(length * x)[:-1]) for x in (on * 1.0, on * speed)]
    return at, clock[0], clock[1]


def _kept(inputs: GoodputInputs, planned: Estimate, found: _Failures, clock: _Clock) -> NDArray[np.float64]:
    """Committed work up to each failure, roll-backs taken off."""
    run, work = np.diff(clock.running(found.at_s), prepend=0.0), np.diff(clock.work(found.at_s), prepend=0.0)
    density = np.divide(work, run, out=np.zeros_like(run), where=run > 0)
    if planned.mode == "disk":
        return np.cumsum(density * _saved(run, planned.interval_s, inputs.checkpoint_s, 0.0))
    if planned.mode == "memory":
        kept = density * _saved(run, planned.interval_s, inputs.snapshot_s, 0.0)
        return _rolled_back(kept, found.rare, planned.durable_interval_s, 0.0, inputs.write_s)
    redone = np.minimum(run, inputs.step_s / 2) * density
    return _rolled_back(work - redone, found.rare, planned.interval_s, inputs.snapshot_s, inputs.write_s)


def _saved(run: NDArray[np.float64], interval_s: float, stall_s: float, lag_s: float) -> NDArray[np.float64]:
    """Of each stretch of running time, the work up to its last finished save."""
    return interval_s * np.floor(np.maximum(run - lag_s, 0.0) / (interval_s + stall_s))


def _rolled_back(
    work: NDArray[np.float64], rare: NDArray[np.bool_], interval_s: float, stall_s: float, lag_s: float
) -> NDArray[np.float64]:
    """Sums of `work`, of which each rare failure leaves only what its last durable save held."""
    total = np.cumsum(work)
    ends = np.flatnonzero(rare)
    before = np.append(0.0, total[ends])
    stretch = np.diff(before)
    kept = _saved(stretch, interval_s, stall_s, lag_s)
    saved = np.append(0.0, np.cumsum(kept))
    group = np.searchsorted(ends, np.arange(len(work)), side="left")  # how many rare failures came before
    running = (total - before[group]) * interval_s / (interval_s + stall_s)
    at_end = np.zeros(len(work), bool)
    at_end[ends] = True
    return np.where(at_end, saved[np.minimum(group + 1, len(saved) - 1)], saved[group] + running)
