"""Fits a law to trained models: Huber's loss of the logarithm, from many starts, with bootstrap intervals.

As in Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3) residuals are of log L under Huber's loss, so that a model
that went wrong can't pull the fit. Instead of L-BFGS, Levenberg-Marquardt steps with Huber's weights, which all starts
and all bootstrap samples take side by side. `DELTA` is larger than Hoffmann's 1e-3: models as small as these scatter by
about one per cent from seed to seed, and among residuals ten times `DELTA` it would be a fit of absolute values.

The bootstrap is the wild one for groups (Cameron, Gelbach and Miller 2008): each point keeps its prediction and its
residual, with what the fit took of it put back (the residuals of a group over one less their leverage, CR3), and all
points of a group, which share a seed and so err together, get one random sign. So no point is ever missing, which few
points of a designed grid can't afford, and points may scatter differently.
Legend: S starts or samples, K constants, n points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bessemer.core.errors import RequestError
from bessemer.lab.scaling_laws import LEAST_BITS, MOST_BITS, Array, Law, Points, Reference

__all__ = ["DELTA", "LEVEL", "SPREAD", "Estimate", "Fit", "fit"]

DELTA = 1e-2
LEVEL = 0.9
"""Confidence of the intervals."""
SPREAD = 3.0
"""An interval whose ends are further apart than by this factor doesn't determine a positive constant."""

LEAST_LEFT = 0.05
_STEPS = 300
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A constant of the fit with its interval. `why`: why the points don't determine it, empty where they do."""

    value: float
    low: float
    high: float
    why: str = ""

    def as_json(self) -> dict[str, float | str | bool]:
        return {**vars(self), "determined": not self.why}


@dataclass(frozen=True)
class Fit:
    """`scatter`: standard deviation of log L about the law, corrected for the constants. `optimum`: bits at `cost`.
    `samples` [S, K] are natural constants of the bootstrap, `natural` [1, K] those of the fit itself."""

    law: Law
    points: Points
    predicted: Array
    constants: dict[str, Estimate]
    scatter: float
    optimum: Estimate
    cost: float
    natural: Array
    samples: Array

    def curve(self, bits: Sequence[float]) -> tuple[Array, Array, Array]:
        """(loss, low end, high end) at `cost` over the bits, [len(bits)] each: the least that N and D allow."""
        middle = self.law.at_cost(self.natural, self.cost, bits, 0)[0]
        spread = np.concatenate([self.law.at_cost(s[None], self.cost, bits, 0) for s in self.samples[:200]])
        low, high = np.quantile(spread, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        return middle, low, high


def fit(law: Law, points: Points, *, cost: float, samples: int = 400, starts: int = 256, seed: int = 0) -> Fit:
    """The law at the points that it speaks of. `cost`: N D P for which the best precision is asked. RequestError where
    there are no more points than constants."""
    points = points.at(law.usable(points))
    count, free = len(points), len(law.constants)
    if count <= free:
        what = f"the law {law.name!r} has {free} constants, and {count} finished points can't tell them"
        raise RequestError(what, code="lab-few-points", fix="a larger grid, or let this one finish")
    at, rng = Reference.of(points), np.random.default_rng(seed)
    target = np.log(points.loss)
    low, high = law.bounds
    begin = _starts(law, points, rng, starts)
    found, cost_of = _descend(law, points, at, np.broadcast_to(target, (starts, count)), begin)
    best, order = found[np.argmin(cost_of)], np.argsort(cost_of)
    predicted, slope = (v[0] for v in law.predict(best[None], points, at))
    residual = target - np.log(predicted)
    groups, member = np.unique(points.group, return_inverse=True)
    signs = rng.choice([-1.0, 1.0], (samples, len(groups)))[:, member]
    targets = np.log(predicted) + signs * _put_back(residual, slope / predicted[:, None], member)
    # a sample begins at the optimum and at the other ends of the search, so that it may leave the optimum's valley
    others = found[order[np.linspace(0, starts // 4, 3).astype(int)]]
    tried = [_descend(law, points, at, targets, np.broadcast_to(o, (samples, free))) for o in others]
    choice = np.argmin([c for _, c in tried], axis=0)
    internal = np.stack([f for f, _ in tried])[choice, np.arange(samples)]
    natural, drawn = law.natural(best[None], at), law.natural(internal, at)
    scatter = float(np.sqrt((residual**2).sum() / (count - free)))
    flat = _flat(law, slope / predicted[:, None], scatter)
    told = flat | law.untold(points)
    bound = [told.get(c.name) or _at_bounds(internal[:, k], low[k], high[k]) for k, c in enumerate(law.constants)]
    constants = {c.name: _estimate(natural[0, k], drawn[:, k], bound[k]) for k, c in enumerate(law.constants)}
    optimum = _optimum(law.best(natural, cost, 0)[0], law.best(drawn, cost, 0), points)
    if blind := [name for name in law.decides if name in flat]:
        optimum = replace(optimum, why=f"it hangs on {blind[0]}, with which the losses hardly change")
    return Fit(law, points, predicted, constants, scatter, optimum, cost, natural, drawn)


def _starts(law: Law, points: Points, rng: np.random.Generator, count: int) -> Array:
    """[S, K]: at random between the bounds, what is nats below the largest loss."""
    low, high = law.bounds
    nats = np.array([math.log(c.high) > math.log(points.loss.max()) and c.low <= 1e-2 for c in law.constants])
    top = np.where(nats, np.minimum(high, math.log(points.loss.max())), high)
    bottom = np.where(nats, np.maximum(low, math.log(points.loss.min()) - 4), low)
    return np.asarray(bottom + (top - bottom) * rng.random((count, len(low))))


def _descend(law: Law, points: Points, at: Reference, targets: Array, start: Array) -> tuple[Array, Array]:
    """(internal constants [S, K], Huber's loss [S]) of the nearest minimum to each start."""
    low, high = law.bounds
    now = np.array(start)
    damping = np.full(len(now), 1e-2)
    loss, slope = law.predict(now, points, at)
    residual = np.log(loss) - targets
    value = _huber(residual)
    active = np.arange(len(now))
    for _ in range(_STEPS):
        r, jacobian = residual[active], slope[active] / loss[active][..., None]
        weight = 1 / np.maximum(1, np.abs(r) / DELTA)
        gradient = np.einsum("sn,snk->sk", weight * r, jacobian)
        position = now[active]
        held = ((position <= low) & (gradient > 0)) | ((position >= high) & (gradient < 0))
        jacobian = np.where(held[:, None, :], 0.0, jacobian)
        gradient = np.where(held, 0.0, gradient)
        hessian = np.einsum("sn,snk,snj->skj", weight, jacobian, jacobian)
        diagonal = np.einsum("skk->sk", hessian)
        diagonal += damping[active, None] * (diagonal + 1e-6 * diagonal.max(-1, keepdims=True)) + 1e-12
        step = np.linalg.solve(hessian, -gradient[..., None])[..., 0]
        tried = np.clip(position + np.clip(step, -2, 2), low, high)
        new_loss, new_slope = law.predict(tried, points, at)
        new_residual = np.log(new_loss) - targets[active]
        new_value = _huber(new_residual)
        better = new_value < value[active]
        gain = value[active] - new_value
        done = better & (gain < _TOLERANCE + 1e-9 * value[active])
        moved = active[better]
        now[moved], loss[moved], slope[moved] = tried[better], new_loss[better], new_slope[better]
        residual[moved], value[moved] = new_residual[better], new_value[better]
        damping[active] = np.where(better, damping[active] / 5, damping[active] * 4)
        active = active[~(done | (damping[active] > 1e10))]
        if not len(active):
            break
    return now, value


def _put_back(residual: Array, jacobian: Array, member: NDArray[np.int64]) -> Array:
    """[n]: residuals less what the fit took of them, group by group: (1 - H_gg)^-1 r_g with H the projection on the
    columns of `jacobian` [n, K]. `LEAST_LEFT`: where a group alone tells a constant, next to nothing would be left."""
    projection = jacobian @ np.linalg.pinv(jacobian)
    made = np.empty_like(residual)
    for group in range(member.max() + 1):
        mine = member == group
        left, axes = np.linalg.eigh(np.eye(mine.sum()) - projection[np.ix_(mine, mine)])
        made[mine] = axes @ ((axes.T @ residual[mine]) / np.maximum(left, LEAST_LEFT))
    return made


def _flat(law: Law, jacobian: Array, scatter: float) -> dict[str, str]:
    """Constants that could be e times as large, all others fixed, before the points would notice. Samples that start
    at the optimum needn't wander along such a valley, so that their interval can be short."""
    slope = np.sqrt((jacobian**2).sum(0))
    return {
        c.name: "the losses hardly change with it" for c, s in zip(law.constants, slope, strict=True) if s < scatter
    }


def _huber(residual: Array) -> Array:
    size = np.abs(residual)
    return np.asarray(np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA)).sum(-1))


def _at_bounds(drawn: Array, low: float, high: float) -> str:
    """Which bound the interval of the internal constant touches."""
    ends = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    room = 1e-3 * (high - low)
    touched = [name for name, hit in (("lower", ends[0] < low + room), ("upper", ends[1] > high - room)) if hit]
    return f"the interval reaches the {' and '.join(touched)} bound of the search" if touched else ""


def _estimate(value: float, drawn: Array, bound: str) -> Estimate:
    low, high = (float(v) for v in np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    wide = f"the ends of the interval are {high / low:.3g} times apart" if high > SPREAD * low else ""
    return Estimate(float(value), low, high, bound or wide)


def _optimum(value: float, drawn: Array, points: Points) -> Estimate:
    low, high = (float(v) for v in np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    least, most = (float(f(points.weight_bits)) for f in (np.min, np.max))
    why = ""
    if low <= LEAST_BITS or high >= MOST_BITS:
        why = f"the interval reaches the end of what is looked at, {LEAST_BITS:g} to {MOST_BITS:g} bits"
    elif high > 2 * low:
        why = f"the ends of the interval are {high / low:.3g} times apart"
    elif value < least or value > most:
        why = f"it lies beyond the {least:g} to {most:g} bits that were trained"
    return Estimate(float(value), low, high, why)
