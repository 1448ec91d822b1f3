"""Exposed seconds of a step's data-parallel exchanges: DDP, ZeRO-1/2, ZeRO-3 and FSDP, HSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.recipes import RECIPES
from bessemer.plan.collectives import group_s
from bessemer.plan.space import DP_SHARDS

if TYPE_CHECKING:
    from bessemer.plan.memory import StageParams
    from bessemer.plan.step import Case, Slowest

__all__ = ["data_parallel_s"]

_SPECS = list(RECIPES.values())
_FLOAT32 = np.array([s.compute == "fp32" for s in _SPECS])
_QUANTISED = np.array([s.quantised for s in _SPECS])


def data_parallel_s(case: Case, rank: Slowest, waiting: Any) -> Any:
    """Gradients are reduced under the last backward, parameters gathered under the first forward; what doesn't fit
    there is exposed, and of what does the share `x_dp`.

    With `full`, every micro-batch gathers (twice where it reshards) and scatters, under its own passes, with one
    layer's gather in the open; with pipeline stages parameters are gathered once a step. HSDP adds an all-reduce of
    the shards over the replicas. `waiting`: seconds by which a micro-batch is longer than its passes.
    """
    lay, c, r = case.layouts, case.constants, case.rates
    stretch = 1 + waiting / np.maximum(rank.total, 1e-30)
    forward, backward = rank.forward * stretch, (rank.inputs + rank.weights) * stretch
    gather, scatter, reduce = _exchanges(case, rank.params)
    slow = c.slow * r.engine
    keep = np.minimum(c.x_dp + np.maximum(1 - c.x_dp, 0) * slow, 1.0)
    plain = np.where(lay.dp_shard == 0, reduce, scatter)
    simple = plain - np.minimum(plain, backward) * (1 - keep)
    simple = simple + np.where(lay.dp_shard == 0, 0.0, gather - np.minimum(gather, forward) * (1 - keep))
    full = lay.dp_shard == DP_SHARDS.index("full")
    copies = 0.0
    if (lay.replicas > 1).any():
        shard = rank.params.dense / np.maximum(lay.dp * lay.cp / lay.replicas, 1)
        copies = np.where(
            lay.replicas > 1, group_s("all_reduce", shard * _reduce_bytes(case), lay.replicas, 1, r, c), 0.0
        )
    if not full.any():
        return simple + copies
    rounds = np.where(lay.pp > 1, 1.0, case.num_micro)
    keep = np.minimum(c.x_fsdp + np.maximum(1 - c.x_fsdp, 0) * slow, 1.0)
    start = _starts(case)
    into, out = gather + start, (gather + start) * (c.resharded - 1) + scatter + start
    lead = into / np.maximum(case.dims.layers, 1)
    exposed = into - np.minimum(into, forward) * (1 - keep) + out - np.minimum(out, backward) * (1 - keep) + lead
    return np.where(full, rounds * exposed, simple) + copies


def _reduce_bytes(case: Case) -> Any:
    return np.where(_FLOAT32[case.layouts.recipe], 4.0, case.constants.reduce_bytes)


def _exchanges(case: Case, params: StageParams) -> tuple[Any, Any, Any]:
    """Seconds of one gather of all parameters, one scatter and one all-reduce of all gradients of a rank."""
    lay, c, r = case.layouts, case.constants, case.rates
    weight_bytes = np.where(_QUANTISED[lay.recipe], c.gather_fp8, np.where(_FLOAT32[lay.recipe], 4.0, 2.0))
    group, local = lay.dp * lay.cp / lay.replicas, np.maximum(r.domain // lay.tp, 1)
    experts = np.maximum(lay.dp * lay.cp * lay.tp / (lay.ep * lay.etp), 1) / lay.replicas
    expert_local = np.maximum(r.domain // (lay.ep * lay.etp), 1)
    trained = 1 - np.asarray(case.work.frozen)

    def both(op: Any, bytes_: Any) -> Any:
        seconds = group_s(op, params.dense * bytes_, group, local, r, c)
        if np.any(params.experts > 0):
            seconds = seconds + group_s(op, params.experts * bytes_, experts, expert_local, r, c)
        return seconds * trained

    reduce_bytes = _reduce_bytes(case)
    reduce = both("all_reduce", reduce_bytes) if (lay.dp_shard == 0).any() else 0.0
    return both("all_gather", weight_bytes), both("reduce_scatter", reduce_bytes), reduce


def _starts(case: Case) -> Any:
    """Latency of the gathers of all layers but the first, which `_exchanges` counts."""
    lay, r = case.layouts, case.rates
    group, local = lay.dp * lay.cp / lay.replicas, np.maximum(r.domain // lay.tp, 1)
    hosts = np.maximum(group / np.minimum(local, group), 1)
    layers = np.maximum(case.dims.layers / lay.pp - 1, 0)
    return layers * (r.latency_s * (group > 1) + (hosts - 1) * case.constants.hop_s)
