"""Prices whose pipeline bubble was replayed event by event instead of taken from the closed form.

A rank's micro-batch takes what the price says of the fullest stage, cut into the schedule's stages; exchanges between
stages stay in the price's own line. Zero-bubble schedules are replayed as a run of steps (their ranks stay staggered),
the others as one step. The closed forms of 1f1b and gpipe agree with their replay; those of the zero-bubble schedules
hold where forward, input and weight gradient take equally long, which they seldom do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bessemer.core.errors import ConfigError
from bessemer.core.schedules import SCHEDULES
from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.figures import Priced
from bessemer.plan.pipeline import bubble_s
from bessemer.plan.replay import StageTimes, num_stages, replay, settled_step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BUDGET", "MOST", "passes_of", "with_replay"]

MOST = 40_000
"""Passes of a step that are replayed; a longer one keeps the closed form, whose error shrinks with its length."""
BUDGET = 1_000_000
"""Passes that the best layouts of a search may take together: some seconds."""
Shape = tuple[str, int, int, int]


def passes_of(priced: Priced) -> NDArray[np.int64]:
    """[S]: passes that a replay of each layout walks, 0 where there is nothing to replay or too much."""
    layouts, micro = priced.layouts, priced.prices.num_micro
    names = list(SCHEDULES.values())
    chunks = np.array([s.chunks or 1 for s in names])[layouts.schedule] * layouts.virtual_stages
    chunks = np.where(np.array([s.shape == "two-way" for s in names])[layouts.schedule], 1, chunks)
    kinds = np.where(np.array([s.split_backward for s in names])[layouts.schedule], 3, 2)
    passes = (layouts.pp * chunks * micro * kinds).astype(np.int64)
    return np.where((layouts.pp > 1) & (passes <= MOST), passes, 0)


def with_replay(priced: Priced) -> Priced:
    """`priced` with every bubble replayed: step time, band and the line `bubble` follow."""
    wanted = np.flatnonzero(passes_of(priced))
    if not len(wanted):
        return priced
    prices, many = priced.prices, priced.layouts
    request = priced.request
    factor = (request.calibration or default_calibration()).resolve(gpu_of(request.machine), request.era).bubble
    ideal = bubble_s(
        many.schedule,
        many.pp,
        many.virtual_stages,
        prices.stage_forward_s,
        prices.stage_inputs_s,
        prices.stage_weights_s,
    )
    known: dict[tuple[object, ...], float] = {}
    bubble = prices.breakdown["bubble"].copy()
    for index in wanted.tolist():
        shape, times = _shape(priced, index), _times(priced, index)
        key = (*shape, times.forward_s, times.input_s, times.weight_s)
        if key not in known:
            known[key] = _idle_s(shape, times)
        bubble[index] = bubble[index] * known[key] / ideal[index] if bubble[index] > 0 else factor * known[key]
    more = bubble - prices.breakdown["bubble"]
    scale = 1 + prices.breakdown["scale"] / (prices.step_s - prices.breakdown["scale"])
    step = prices.step_s + more * scale
    parts = {**prices.breakdown, "bubble": bubble, "scale": prices.breakdown["scale"] + more * (scale - 1)}
    ratio = step / prices.step_s
    new = replace(prices, step_s=step, low_s=prices.low_s * ratio, high_s=prices.high_s * ratio, breakdown=parts)
    return Priced(request, many, new)


def _shape(priced: Priced, index: int) -> Shape:
    row = priced.layouts.row(index)
    return str(row["schedule"]), int(row["pp"]), int(priced.prices.num_micro[index]), int(row["virtual_stages"])


def _idle_s(shape: Shape, times: StageTimes) -> float:
    """Seconds of a step in which a rank of even stages does nothing."""
    name, stages, micro, virtual = shape
    work = sum(float(x) for x in (times.forward_s, times.input_s, times.weight_s))  # type: ignore[arg-type]
    busy = work * num_stages(name, stages, virtual) / stages * micro
    settled = SCHEDULES[name].split_backward
    try:
        if settled:
            whole = settled_step_s(name, stages=stages, micro_batches=micro, virtual_stages=virtual, times=times)
        else:
            whole = replay(name, stages=stages, micro_batches=micro, virtual_stages=virtual, times=times).pipeline_s
    except (ConfigError, RuntimeError) as error:
        raise AssertionError(f"the search let {name} through with {stages} stages and {micro} micro-batches") from error
    return max(whole - busy, 0.0)


def _times(priced: Priced, index: int) -> StageTimes:
    """Times of one stage."""
    (name, stages, _, virtual), prices = _shape(priced, index), priced.prices
    chunks = num_stages(name, stages, virtual) / stages
    forward, inputs, weights = (
        float(a[index]) / chunks for a in (prices.stage_forward_s, prices.stage_inputs_s, prices.stage_weights_s)
    )
    return StageTimes(forward_s=forward, input_s=inputs, weight_s=weights)
