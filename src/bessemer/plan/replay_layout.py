"""A priced layout replayed as it is: its schedule with the outer stages' own times, messages and memory.

`bessemer.plan.replayed` asks how long a bubble lasts and takes all stages for the slowest; this is for looking at one
layout: where each rank waits and why, and what it holds when. What the cost model fits beyond a rank's own work (the
share of exchanges that stays exposed, the bubble's factor, the loss with the number of nodes) is not in it, so that
`step_s` differs from the price's by these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.schedules import rank_of_stage, schedule
from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.collectives import p2p_s
from bessemer.plan.dims import dims_of
from bessemer.plan.pipeline import in_flight
from bessemer.plan.rates import rates_of
from bessemer.plan.replay import Replay, StageTimes, num_stages, replay
from bessemer.plan.stages import stage_memory
from bessemer.plan.step import Case, slowest_rank, stages_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.figures import Priced

__all__ = ["layout_times", "replay_layout"]


def replay_layout(priced: Priced, index: int) -> Replay:
    """One step of the layout at `index`. Without pipeline stages it is one rank that takes its micro-batches in turn.

    ConfigError where the schedule can't be built from the layout's numbers.
    """
    row = priced.layouts.row(index)
    pp, name = int(row["pp"]), str(row["schedule"]) if row["pp"] != 1 else "1f1b"
    virtual = int(row["virtual_stages"]) if pp > 1 else 1
    micro = int(priced.prices.num_micro[index])
    times = layout_times(priced, index)
    return replay(name, stages=pp, micro_batches=micro, virtual_stages=virtual, times=times)


def layout_times(priced: Priced, index: int) -> StageTimes:
    """Times and bytes of each stage. A rank's chunks share its work evenly; embedding and head are shared with it."""
    case = _case(priced, index)
    row, pp = priced.layouts.row(index), int(priced.layouts.pp[index])
    name = str(row["schedule"]) if pp > 1 else "1f1b"
    virtual = int(row["virtual_stages"]) if pp > 1 else 1
    stages = num_stages(name, pp, virtual)
    chunks = max(stages // pp, 1)
    kind = schedule(name)
    ranks = [stage if kind.shape == "two-way" else rank_of_stage(kind, pp, stage, 0, 2) for stage in range(stages)]
    seconds = _rank_seconds(case)[:, ranks] / chunks
    held, static = _rank_bytes(priced, index)
    size = case.tokens * case.dims.hidden * 2.0 / case.layouts.tp
    hop = p2p_s(size, case.layouts.world_size <= case.rates.domain, case.rates, case.constants)
    prices = priced.prices
    return StageTimes(
        forward_s=seconds[0].tolist(),
        input_s=seconds[1].tolist(),
        weight_s=seconds[2].tolist(),
        p2p_s=float(np.asarray(hop).ravel()[0]) if pp > 1 else 0.0,
        dp_s=float(prices.breakdown["dp"][index]),
        optimizer_s=float(prices.breakdown["optimizer"][index]),
        activation_bytes=(held[ranks] / chunks).tolist(),
        static_bytes=static.tolist(),
    )


def _case(priced: Priced, index: int) -> Case:
    request, one = priced.request, priced.layouts.take(np.array([index]))
    machine = request.rank_machine
    constants = (request.calibration or default_calibration()).resolve(gpu_of(machine), request.era)
    work = request.work
    return Case(one, dims_of(request.padded), work, rates_of(machine), constants, priced.prices.num_micro[[index]])


def _rank_seconds(case: Case) -> NDArray[np.float64]:
    """[3, pp]: forward, input and weight gradient of a micro-batch on each rank; what the slowest hides, all hide."""
    pp = int(case.layouts.pp[0])
    _, costs = stages_of(case)
    slow = slowest_rank(case)
    raw = np.array([[_one(s.forward), _one(s.inputs), _one(s.weights)] for s in costs]).T
    at = int(raw.sum(axis=0).argmax())
    shown = np.array([_one(slow.forward), _one(slow.inputs), _one(slow.weights)])
    scale = np.divide(shown, raw[:, at], out=np.ones(3), where=raw[:, at] > 0)
    which = [0] + [1] * (pp - 2) + [2] * (pp > 1)
    return np.asarray(raw[:, which] * scale[:, None], float)


def _one(value: Any) -> float:
    return float(np.asarray(value).ravel()[0])


def _rank_bytes(priced: Priced, index: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[pp]: saved activations of one micro-batch on each rank, and all else at its peak."""
    layouts, pp = priced.layouts, int(priced.layouts.pp[index])
    lines = stage_memory(priced, index)
    at = (layouts.schedule[index], pp, layouts.virtual_stages[index], priced.prices.num_micro[index])
    most = np.broadcast_to(in_flight(*at, np.arange(pp)), (pp,))
    whole = np.array([rank.get("activations", 0.0) for rank in lines])
    return whole / most, np.array([sum(rank.values()) for rank in lines]) - whole
