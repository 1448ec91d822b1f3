"""`price`: the step time and the peak memory of many layouts at once, with where the time goes.

The cost of a layer is computed once per unique key and gathered; pipeline, data parallelism and memory are closed
forms over all layouts. One layout goes through the same code, so that scalar and vector can't differ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.recipes import RECIPES
from bessemer.plan.calibration import Calibration, Constants, default_calibration, gpu_of
from bessemer.plan.collectives import group_s, p2p_s
from bessemer.plan.dims import dims_of
from bessemer.plan.kernels import cross_entropy_s, gemm_s, optimizer_s
from bessemer.plan.layer import CATEGORIES, Keys, LayerCost, Work, layer_cost, precision_of
from bessemer.plan.memory import MEMORY_LINES, Memory, memory_of, stage_kinds, stage_params
from bessemer.plan.pipeline import bubble_s, stage_layers
from bessemer.plan.rates import Rates, rates_of
from bessemer.plan.space import DP_SHARDS, Layouts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.core.machine import Machine
    from bessemer.core.model import ModelSpec
    from bessemer.plan.dims import Dims

__all__ = ["BREAKDOWN", "Prices", "price", "price_arrays"]

BREAKDOWN = (*CATEGORIES, "ends", "p2p", "bubble", "imbalance", "dp", "optimizer", "scale", "fixed")
"""Seconds of a step on the slowest rank: the layers' parts (see `layer.CATEGORIES`), embedding, head and loss,
exposed transfers between stages, pipeline bubble, waiting for a fuller stage, exposed data-parallel exchanges,
optimizer, loss with the number of nodes, what comes once a step. They add up to `step_s`."""


@dataclass
class Prices:
    """Arrays [S]. `low_s`/`high_s`: the step time's band of uncertainty; `stage_forward_s`, `stage_inputs_s`,
    `stage_weights_s`: one micro-batch on the slowest rank, for a replay."""

    step_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    num_micro: NDArray[np.float64]
    breakdown: dict[str, NDArray[np.float64]]
    memory: Memory
    stage_forward_s: NDArray[np.float64]
    stage_inputs_s: NDArray[np.float64]
    stage_weights_s: NDArray[np.float64]


@dataclass
class _Stage:
    """One micro-batch through a rank of a stage: seconds by pass, and [len(CATEGORIES) + 1, S] by part (last: ends)."""

    forward: Any
    inputs: Any
    weights: Any
    parts: Any

    @property
    def total(self) -> Any:
        return self.forward + self.inputs + self.weights


def price(
    spec: ModelSpec,
    machine: Machine,
    layouts: Layouts,
    *,
    global_batch: int,
    seq_len: int,
    num_gpus: int | None = None,
    calibration: Calibration | None = None,
    era: str = "megatron-2026",
    work: Work | None = None,
) -> Prices:
    """Prices `layouts` of one model on one machine.

    ValueError where a layout doesn't use `num_gpus` ranks or `global_batch` isn't micro_batch x dp x a whole number:
    such layouts are the enumeration's to leave out. ConfigError for a machine without figures.
    """
    if num_gpus is not None and np.any(layouts.world_size != num_gpus):
        bad = int(np.argmax(layouts.world_size != num_gpus))
        raise ValueError(f"layout {bad} has {layouts.world_size[bad]} ranks, not {num_gpus}")
    if np.any(global_batch % (layouts.micro_batch * layouts.dp)):
        bad = int(np.argmax(global_batch % (layouts.micro_batch * layouts.dp) != 0))
        raise ValueError(f"layout {bad}: global batch {global_batch} is no multiple of micro_batch x dp")
    gpus = gpu_of(machine)
    constants = (calibration or default_calibration()).resolve(gpus, era)
    batch = np.full(len(layouts), float(global_batch))
    job = work or Work(seq=float(seq_len))
    return price_arrays(
        layouts, dims_of(spec), job, rates_of(machine), constants, batch, calibrated=gpus != ("generic",)
    )


def price_arrays(
    l: Layouts,
    d: Dims,
    w: Work,
    r: Rates,
    c: Constants,
    global_batch: NDArray[np.float64],
    *,
    calibrated: Any = True,
    memory: bool = True,
) -> Prices:
    """As `price`, for dims, rates and constants that are floats or arrays with one entry a layout."""
    num_micro = global_batch / (l.micro_batch * l.dp)
    dense, moe, index = _layers(l, d, w, r, c)
    first_layers, middle_layers, last_layers = stage_layers(
        d.layers, l.pp, l.virtual_stages, l.first_layers, l.last_layers, d.mtp_layers
    )
    ends = _ends(l, d, w, r, c)
    one = l.pp == 1
    first = _stage(
        d,
        dense,
        moe,
        index,
        first_layers + np.where(one, d.mtp_layers, 0.0),
        True,
        ends[0] + np.where(one, ends[1], 0.0),
    )
    middle = _stage(d, dense, moe, index, np.where(l.pp > 2, middle_layers, 0.0), False, 0.0 * ends[0])
    mtp = d.mtp_layers  # a module is a layer like the last one, its joining projection and its own pass over the head
    last = _stage(d, dense, moe, index, np.where(one, 0.0, last_layers + mtp), False, np.where(one, 0.0, ends[1]))
    stages = (first, middle, last)
    totals = np.stack([s.total for s in stages])
    slowest = totals.argmax(axis=0)
    pick = lambda arrays: np.choose(slowest, arrays)  # noqa: E731
    pace = pick([s.total for s in stages])
    whole = first.total + last.total + np.maximum(l.pp - 2, 0) * middle.total
    parts = np.stack([pick([s.parts[i] for s in stages]) for i in range(len(CATEGORIES) + 1)]) * num_micro
    f, i, wt = (
        np.where(pace > 0, x, 0.0)
        for x in (pick([getattr(s, n) for s in stages]) for n in ("forward", "inputs", "weights"))
    )
    even = (whole - pace) / np.maximum((l.pp - 1) * pace, 1e-30)  # the other stages against as many of the slowest
    bubble = c.bubble * bubble_s(l.schedule, l.pp, l.virtual_stages, f * even, i * even, wt * even)
    p2p = _p2p(l, d, w, r, c, num_micro)
    params = _rank_params(l, d, slowest, (first_layers, middle_layers, last_layers))
    dp = _data_parallel(
        l,
        d,
        params,
        r,
        c,
        num_micro,
        (pick([s.forward for s in stages]), pick([s.inputs + s.weights for s in stages])),
        w,
    )
    shard = np.where(l.dp_shard > 0, l.dp * l.cp / l.replicas, 1.0)
    expert_shard = np.where(l.dp_shard > 0, np.maximum(l.dp * l.cp * l.tp / (l.ep * l.etp) / l.replicas, 1), 1.0)
    trained = 1 - np.asarray(w.frozen)
    update = optimizer_s(params.dense / shard + params.experts / expert_shard, r, c) * trained
    update = update + np.where(
        l.offload_optimizer > 0, 16.0 * (params.dense / shard + params.experts / expert_shard) / r.host_bytes_per_s, 0.0
    )
    step = num_micro * pace + bubble + p2p + dp + update + c.step_s
    nodes = np.maximum(l.world_size / r.node, 1.0)
    scale = step * c.scale * np.log2(nodes)
    step = step + scale
    names = dict(zip((*CATEGORIES, "ends"), parts, strict=True))
    zero = np.zeros(len(l))
    names.update(p2p=p2p, bubble=bubble, imbalance=zero, dp=dp, optimizer=update, scale=scale, fixed=zero + c.step_s)
    weighed = memory_of(l, d, w, c, num_micro) if memory else Memory({k: zero for k in MEMORY_LINES}, zero, zero)
    low, high = _band(l, d, step, calibrated)
    return Prices(step, low, high, weighed.total, num_micro, names, weighed, f, i, wt)


def _layers(l: Layouts, d: Dims, w: Work, r: Rates, c: Constants) -> tuple[LayerCost, LayerCost, Any]:
    """Layer costs of the unique keys, and the index that spreads them over the layouts (None: as they are)."""
    names = [f.name for f in fields(Keys)]
    if any(np.ndim(x) for x in (d.layers, w.seq, r.bf16, c.clock)):  # different models: nothing to share
        dense, moe = layer_cost(Keys(**{n: getattr(l, n) for n in names}), d, w, r, c)
        return dense, moe, None
    code = np.zeros(len(l), np.int64)
    for name in names:
        column = getattr(l, name)
        code = code * (int(column.max(initial=0)) + 1) + column
    _, at, index = np.unique(code, return_index=True, return_inverse=True)
    dense, moe = layer_cost(Keys(**{n: getattr(l, n)[at] for n in names}), d, w, r, c)
    return dense, moe, index


def _stage(d: Dims, dense: LayerCost, moe: LayerCost, index: Any, layers: Any, first: bool, ends: Any) -> _Stage:
    dense_layers, moe_layers = stage_kinds(d, layers, first)

    def mix(a: Any, b: Any) -> Any:
        a, b = (a, b) if index is None else (a[..., index], b[..., index])
        return dense_layers * a + moe_layers * b

    parts = np.concatenate([mix(dense.parts, moe.parts), ends.sum(axis=0)[None]])
    return _Stage(
        mix(dense.forward, moe.forward) + ends[0],
        mix(dense.inputs, moe.inputs) + ends[1],
        mix(dense.weights, moe.weights) + ends[2],
        parts,
    )


def _ends(l: Layouts, d: Dims, w: Work, r: Rates, c: Constants) -> tuple[Any, Any]:
    """[3, S] of the embedding (first stage) and of head, loss and multi-token prediction (last stage)."""
    p = precision_of(l.recipe, r, c)
    tokens = l.micro_batch * w.seq / l.cp
    hbm = r.hbm_bytes_per_s * c.hbm
    table = tokens * d.hidden * p.compute_bytes / hbm + c.gap_s * 2
    embedding = np.stack([2 * table, 0 * table, 3 * table])
    head = gemm_s(tokens, d.vocab / l.tp, d.hidden, p, r, c, wide=True) + c.gap_s
    head[2] *= 1 - np.asarray(w.frozen)
    loss = cross_entropy_s(tokens, d.vocab / l.tp, r, c)
    reduce = np.where(l.tp > 1, 1.0, 0.0) * group_s(
        "all_gather", tokens * d.hidden * p.compute_bytes, l.tp, r.domain, r, c
    )
    head = head + np.stack([loss / 2 + reduce, loss / 2 + reduce, 0 * loss])
    return embedding, head * (1 + d.mtp_layers)


def _p2p(l: Layouts, d: Dims, w: Work, r: Rates, c: Constants, num_micro: Any) -> Any:
    """A message each way for every micro-batch and chunk, partly hidden, and the unhidden ones that fill the pipeline."""
    size = (
        l.micro_batch * w.seq / l.cp * d.hidden * 2.0 / l.tp
    )  # each rank sends its part; without sequence parallel it is gathered again inside the node
    inside = l.dp * l.cp * l.tp * l.pp <= r.domain
    one = p2p_s(size, inside, r, c)
    chunks = np.maximum(l.virtual_stages, 1)
    return np.where(l.pp > 1, c.x_pp * 2 * one * num_micro * chunks + 2 * (l.pp - 1) * one, 0.0)


def _rank_params(l: Layouts, d: Dims, slowest: Any, layers: tuple[Any, Any, Any]) -> Any:
    """Parameters of a rank of the slowest stage."""
    one = np.where(l.pp == 1, 1.0, 0.0)
    options = [
        stage_params(l, d, layers[0], first=1.0, last=one),
        stage_params(l, d, layers[1], first=0.0, last=0.0),
        stage_params(l, d, layers[2], first=0.0, last=1.0),
    ]
    chosen = options[0]
    for name in ("dense", "experts", "gathered"):
        setattr(chosen, name, np.choose(slowest, [np.broadcast_to(getattr(o, name), (len(l),)) for o in options]))
    return chosen


def _data_parallel(
    l: Layouts, d: Dims, params: Any, r: Rates, c: Constants, num_micro: Any, passes: tuple[Any, Any], w: Work
) -> Any:
    """Exposed seconds of a step's data-parallel exchanges on the slowest rank.

    Gradients are reduced under the last backward, parameters gathered under the first forward; what doesn't fit there
    is exposed, and of what does the share `x_dp`. With `full`, every micro-batch gathers (twice where it reshards) and
    scatters, under its own passes, with one layer's gather in the open. With pipeline stages, parameters are gathered
    once a step.
    """
    forward, backward = passes
    narrow = np.array(
        [s.operand_bytes if s.quantised else (4.0 if s.compute == "fp32" else 2.0) for s in RECIPES.values()]
    )
    weight_bytes = np.where(np.array([s.quantised for s in RECIPES.values()])[l.recipe], c.gather_fp8, narrow[l.recipe])
    group, local = l.dp * l.cp / l.replicas, np.maximum(r.domain // l.tp, 1)
    experts = np.maximum(l.dp * l.cp * l.tp / (l.ep * l.etp), 1) / l.replicas
    expert_local = np.maximum(r.domain // (l.ep * l.etp), 1)
    trained = 1 - np.asarray(w.frozen)

    def both(op: str, bytes_: Any) -> Any:
        dense = group_s(op, params.dense * bytes_, group, local, r, c)
        return dense + np.where(
            params.experts > 0, group_s(op, params.experts * bytes_, experts, expert_local, r, c), 0.0
        )

    reduce_bytes = np.where(np.array([s.compute == "fp32" for s in RECIPES.values()])[l.recipe], 4.0, c.reduce_bytes)
    scatter = both("reduce_scatter", reduce_bytes) * trained
    gather = both("all_gather", weight_bytes) * np.where(np.asarray(w.frozen) > 0, 0.0, 1.0)
    full = l.dp_shard == DP_SHARDS.index("full")
    copies = np.where(
        l.replicas > 1, group_s("all_reduce", params.dense / group * reduce_bytes, l.replicas, 1, r, c), 0.0
    )
    plain = np.where(l.dp_shard == 0, both("all_reduce", reduce_bytes) * trained, scatter)
    hidden_b = np.minimum(plain, backward)
    hidden_f = np.minimum(gather, forward)
    keep = np.minimum(c.x_dp + np.maximum(1 - c.x_dp, 0) * c.slow * r.engine, 1.0)
    zero1 = plain - hidden_b * (1 - keep) + np.where(l.dp_shard == 0, 0.0, gather - hidden_f * (1 - keep))
    rounds = np.where(l.pp > 1, 1.0, num_micro)
    fs = np.minimum(c.x_fsdp + np.maximum(1 - c.x_fsdp, 0) * c.slow * r.engine, 1.0)
    hosts = np.maximum(group / np.minimum(local, group), 1)
    start = np.maximum(d.layers / l.pp - 1, 0) * (r.latency_s * (group > 1) + (hosts - 1) * c.hop_s)  # of the other layers
    into, out = gather + start, (gather + start) * (c.resharded - 1) + scatter + start
    hide_f, hide_b = np.minimum(into, forward), np.minimum(out, backward)
    lead = into / np.maximum(d.layers, 1)
    fsdp = rounds * (into - hide_f * (1 - fs) + out - hide_b * (1 - fs) + lead)
    return np.where(full, fsdp, zero1) + copies


def _band(l: Layouts, d: Dims, step: Any, calibrated: Any) -> tuple[Any, Any]:
    """The relative half-width within which four of five measured steps of unseen configurations fell
    (docs/validation.md): dense 9 %, MoE 20 %; 20 % or 30 % on a machine that was never calibrated."""
    moe = np.asarray(d.moe_layers) > 0
    width = np.where(np.asarray(calibrated), np.where(moe, 0.20, 0.09), np.where(moe, 0.30, 0.20))
    return step * (1 - width), step * (1 + width)
