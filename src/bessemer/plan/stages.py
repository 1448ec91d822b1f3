"""The best layout stage by stage, for pictures: memory lines of every pipeline rank, and its passes over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.dims import dims_of
from bessemer.plan.figures import Priced
from bessemer.plan.memory import stage_lines
from bessemer.plan.own_memory import own_rank_lines
from bessemer.plan.pipeline import stage_layers
from bessemer.plan.replayed import passes_of

__all__ = ["Bar", "Lanes", "lanes_of", "stage_memory"]


def stage_memory(priced: Priced, index: int) -> list[dict[str, float]]:
    """Bytes by line of each pipeline rank at its peak, from the first to the last."""
    request, one = priced.request, priced.layouts.take(np.array([index]))
    constants = (request.calibration or default_calibration()).resolve(gpu_of(request.machine), request.era)
    if request.own:
        micro = priced.prices.num_micro[[index]]
        every = own_rank_lines(one, request.padded, request.seq_len, micro, constants.memory_base_bytes)
        return [{name: size for name, size in lines.items() if size > 0} for lines in every]
    dims, work = dims_of(request.padded), request.work
    pp = int(one.pp[0])
    first, middle, last = stage_layers(dims.layers, one.pp, one.virtual_stages, one.first_layers, one.last_layers)
    found = []
    for rank in range(pp):
        layers = first if rank == 0 else last if rank == pp - 1 else middle
        at = (layers, np.array([rank]), priced.prices.num_micro[[index]], float(rank == 0), float(rank == pp - 1))
        lines, _ = stage_lines(one, dims, work, constants, at)
        found.append({name: float(value[0]) for name, value in lines.items() if value[0] > 0})
    return found


@dataclass(frozen=True)
class Bar:
    """A pass of one rank: `kind` F, B, I, W, dp or optimizer."""

    kind: str
    start_s: float
    end_s: float
    micro: int = -1
    stage: int = -1


@dataclass(frozen=True)
class Lanes:
    """What each pipeline rank does from `start_s` to `end_s` of a step of `step_s`; `note` says what is left out."""

    lanes: list[list[Bar]]
    start_s: float
    end_s: float
    step_s: float
    note: str


def lanes_of(priced: Priced, index: int, *, most: int = 6000) -> Lanes | None:
    """The timeline of a step, cut to its first `most` passes; None where it is too long to replay."""
    if int(priced.layouts.pp[index]) == 1:
        return _one_rank(priced, index, most)
    if not passes_of(priced)[index]:
        return None
    from bessemer.plan.replay_layout import replay_layout  # which itself asks this module for the stages' memory

    run = replay_layout(priced, index)
    order = np.argsort(run.start_s, kind="stable")[:most]
    lanes: list[list[Bar]] = [[] for _ in range(run.ranks)]
    kinds = ("F", "B", "I", "W")
    for i in order.tolist():
        bar = Bar(
            kinds[int(run.kind[i])], float(run.start_s[i]), float(run.end_s[i]), int(run.micro[i]), int(run.stage[i])
        )
        lanes[int(run.rank[i])].append(bar)
    whole = len(order) == len(run)
    if whole:
        ready = float((run.free_s + run.dp_s).max())
        for rank in range(run.ranks):
            free, dp = float(run.free_s[rank]), float(run.dp_s[rank])
            lanes[rank] += [Bar("dp", free, free + dp), Bar("optimizer", ready, ready + float(run.optimizer_s[rank]))]
    end = run.step_s if whole else float(run.start_s[order[-1]])
    note = "" if whole else f"the first {len(order):,} of {len(run):,} passes"
    return Lanes(lanes, 0.0, end, run.step_s, note)


def _one_rank(priced: Priced, index: int, most: int) -> Lanes:
    """Without pipeline stages every rank does the same: micro-batches one after another, exchange, update."""
    prices, micro = priced.prices, int(priced.prices.num_micro[index])
    forward = float(prices.stage_forward_s[index])
    backward = float(prices.stage_inputs_s[index] + prices.stage_weights_s[index])
    shown = min(micro, most // 2)
    bars, now = [], 0.0
    for m in range(shown):
        bars += [Bar("F", now, now + forward, m, 0), Bar("B", now + forward, now + forward + backward, m, 0)]
        now += forward + backward
    for kind in ("dp", "optimizer"):
        spent = float(prices.breakdown[kind][index])
        bars.append(Bar(kind, now, now + spent))
        now += spent
    step = float(prices.step_s[index])
    note = "" if shown == micro else f"the first {shown} of {micro} micro-batches"
    return Lanes([bars], 0.0, now, step, note)
