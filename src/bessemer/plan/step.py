"""One training step on the slowest pipeline rank, from the cost of a layer: stages, ends, pipeline, optimizer.

`Case` holds everything that the closed forms read; each function takes it and returns arrays [S].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.schedules import SCHEDULES
from bessemer.plan.collectives import group_s, p2p_s
from bessemer.plan.exchanges import stream_bytes
from bessemer.plan.kernels import cross_entropy_s, gemm_s, optimizer_s, precision_of
from bessemer.plan.layer import CATEGORIES, Keys, LayerCost, layer_cost
from bessemer.plan.memory import StageParams, layer_activations, stage_kinds, stage_params
from bessemer.plan.pipeline import bubble_s, stage_layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.calibration import Constants
    from bessemer.plan.dims import Dims
    from bessemer.plan.layer import Work
    from bessemer.plan.rates import Rates
    from bessemer.plan.space import Layouts

__all__ = ["Case", "Slowest", "offload_s", "optimizer_step_s", "pipeline_s", "slowest_rank"]

_DUAL = np.array([name.startswith("dualpipe") for name in SCHEDULES])


@dataclass(frozen=True)
class Case:
    """S layouts with what they run and where; dims, rates and constants are floats or arrays [S]."""

    layouts: Layouts
    dims: Dims
    work: Work
    rates: Rates
    constants: Constants
    num_micro: NDArray[np.float64]

    @property
    def tokens(self) -> Any:
        """Of a micro-batch on one rank."""
        return self.layouts.micro_batch * self.work.seq / self.layouts.cp


@dataclass
class Slowest:
    """The slowest pipeline rank, seconds of one micro-batch by pass, arrays [S].

    `parts`: [len(CATEGORIES) + 1, S], the last is embedding, head and loss; `others`: all other stages together
    against as many of the slowest; `params`: what the rank holds."""

    forward: NDArray[np.float64]
    inputs: NDArray[np.float64]
    weights: NDArray[np.float64]
    parts: NDArray[np.float64]
    others: NDArray[np.float64]
    params: StageParams

    @property
    def total(self) -> NDArray[np.float64]:
        return self.forward + self.inputs + self.weights


@dataclass
class StageCost:
    """One micro-batch on a rank: seconds by pass [S], `parts` as in `Slowest`."""

    forward: Any
    inputs: Any
    weights: Any
    parts: Any

    @property
    def total(self) -> Any:
        return self.forward + self.inputs + self.weights


def stages_of(case: Case) -> tuple[tuple[Any, Any, Any], tuple[StageCost, StageCost, StageCost]]:
    """Layers and costs of the first pipeline rank, of one in the middle and of the last; what isn't there costs 0."""
    lay, d = case.layouts, case.dims
    dense, moe, index = _layers(case)
    layers = stage_layers(d.layers, lay.pp, lay.virtual_stages, lay.first_layers, lay.last_layers, d.mtp_layers)
    embedding, head = _ends(case)
    one = lay.pp == 1
    mtp = d.mtp_layers  # a module is a layer like the last one, with its own pass over the head
    costs = (dense, moe, index)
    return layers, (
        _stage(d, costs, layers[0] + np.where(one, mtp, 0.0), True, embedding + np.where(one, head, 0.0)),
        _stage(d, costs, np.where(lay.pp > 2, layers[1], 0.0), False, 0.0 * embedding),
        _stage(d, costs, np.where(one, 0.0, layers[2] + mtp), False, np.where(one, 0.0, head)),
    )


def slowest_rank(case: Case) -> Slowest:
    """Costs the first, a middle and the last stage and picks the one that sets the pace."""
    lay = case.layouts
    layers, stages = stages_of(case)
    totals = [s.total for s in stages]
    at = np.stack(totals).argmax(axis=0)

    def pick(arrays: list[Any]) -> Any:
        return np.where(at == 0, arrays[0], np.where(at == 1, arrays[1], arrays[2]))

    whole = totals[0] + totals[2] + np.maximum(lay.pp - 2, 0) * totals[1]
    parts = np.stack([pick([s.parts[i] for s in stages]) for i in range(len(CATEGORIES) + 1)])
    forward, inputs, weights = (pick([getattr(s, n) for s in stages]) for n in ("forward", "inputs", "weights"))
    pace = pick(totals)
    others = (whole - pace) / np.maximum((lay.pp - 1) * pace, 1e-30)
    return Slowest(forward, inputs, weights, parts, others, _rank_params(case, at, layers))


def pipeline_s(case: Case, rank: Slowest) -> tuple[Any, Any]:
    """Seconds of bubble, and of exposed transfers between stages in a step: a message each way for every micro-batch
    and chunk, partly hidden, and the unhidden ones that fill the pipeline. Each tensor-parallel rank sends its part of
    the tokens; without sequence parallel they are gathered again inside the node."""
    lay, c = case.layouts, case.constants
    passes = (rank.forward * rank.others, rank.inputs * rank.others, rank.weights * rank.others)
    bubble = c.bubble * bubble_s(lay.schedule, lay.pp, lay.virtual_stages, *passes)
    size = stream_bytes(case.tokens, case.dims.hidden, 2.0, lay.tp)
    one = p2p_s(size, lay.world_size <= case.rates.domain, case.rates, c)
    sent = c.x_pp * 2 * one * case.num_micro * np.maximum(lay.virtual_stages, 1) + 2 * (lay.pp - 1) * one
    return bubble, np.where(lay.pp > 1, sent, 0.0)


def optimizer_step_s(case: Case, params: StageParams) -> Any:
    """The optimizer over a rank's shard of the state; from host memory its 16 bytes a parameter cross the bus."""
    lay, r = case.layouts, case.rates
    sharded = lay.dp_shard > 0
    shard = np.where(sharded, lay.dp * lay.cp / lay.replicas, 1.0)
    expert_shard = np.maximum(lay.dp * lay.cp * lay.tp / (lay.ep * lay.etp) / lay.replicas, 1)
    local = params.dense / shard + params.experts / np.where(sharded, expert_shard, 1.0)
    moved = np.where(lay.offload_optimizer > 0, 16.0 * local / r.host_bytes_per_s, 0.0)
    return (optimizer_s(local, r, case.constants) + moved) * (1 - np.asarray(case.work.frozen))


def offload_s(case: Case, rank: Slowest) -> Any:
    """Exposed seconds a micro-batch of sending saved activations to host memory and back: what compute doesn't hide."""
    lay, d = case.layouts, case.dims
    if not lay.offload_activations.any():
        return np.zeros(len(lay))
    dense, moe, _ = layer_activations(lay, d, case.work, case.constants)
    share = d.moe_layers / d.layers
    saved = (dense * (1 - share) + moe * share) * d.layers / lay.pp
    each = np.maximum(2 * 0.9 * saved / case.rates.host_bytes_per_s - rank.total, 0.0)
    return np.where(lay.offload_activations > 0, each, 0.0)


def _layers(case: Case) -> tuple[LayerCost, LayerCost, Any]:
    """Layer costs of the unique keys, and the index that spreads them over the layouts (None: as they are)."""
    lay, d, w, r, c = case.layouts, case.dims, case.work, case.rates, case.constants
    columns = {f.name: getattr(lay, f.name) for f in fields(Keys) if f.name != "two_way"}
    columns["two_way"] = (_DUAL[lay.schedule] & (lay.pp > 1)).astype(np.int64)
    if any(np.ndim(x) for x in (d.layers, w.seq, r.bf16, c.clock)):  # different models: nothing to share
        dense, moe = layer_cost(Keys(**columns), d, w, r, c)
        return dense, moe, None
    code = np.zeros(len(lay), np.int64)
    for column in columns.values():
        code = code * (int(column.max(initial=0)) + 1) + column
    _, at, index = np.unique(code, return_index=True, return_inverse=True)
    dense, moe = layer_cost(Keys(**{name: column[at] for name, column in columns.items()}), d, w, r, c)
    return dense, moe, index


def _stage(d: Dims, costs: tuple[LayerCost, LayerCost, Any], layers: Any, first: bool, ends: Any) -> StageCost:
    dense, moe, index = costs
    dense_layers, moe_layers = stage_kinds(d, layers, first)
    has_moe = np.any(np.asarray(d.moe_layers) > 0)

    def mix(a: Any, b: Any) -> Any:
        a = a if index is None else a[..., index]
        if not has_moe:
            return dense_layers * a
        return dense_layers * a + moe_layers * (b if index is None else b[..., index])

    parts = np.concatenate([mix(dense.parts, moe.parts), ends.sum(axis=0)[None]])
    return StageCost(
        mix(dense.forward, moe.forward) + ends[0],
        mix(dense.inputs, moe.inputs) + ends[1],
        mix(dense.weights, moe.weights) + ends[2],
        parts,
    )


def _ends(case: Case) -> tuple[Any, Any]:
    """[3, S] of the embedding (first stage), and of head and loss of the model and its multi-token predictions."""
    lay, d, w, r, c = case.layouts, case.dims, case.work, case.rates, case.constants
    p = precision_of(lay.recipe, r, c)
    tokens = case.tokens
    table = tokens * d.hidden * p.compute_bytes / (r.hbm_bytes_per_s * c.hbm) + c.gap_s * 2
    embedding = np.stack([2 * table, 0 * table, 3 * table])
    head = gemm_s(tokens, d.vocab / lay.tp, d.hidden, p, r, c, wide=True) + c.gap_s
    head[2] *= 1 - np.asarray(w.frozen)
    loss = cross_entropy_s(tokens, d.vocab / lay.tp, r, c)
    reduce = group_s("all_gather", stream_bytes(tokens, d.hidden, p.compute_bytes), lay.tp, r.domain, r, c)
    head = head + np.stack([loss / 2 + reduce, loss / 2 + reduce, 0 * loss])
    return embedding, head * (1 + d.mtp_layers)


def _rank_params(case: Case, at: Any, layers: tuple[Any, Any, Any]) -> StageParams:
    """Parameters of a rank of stage `at`: 0 the first, 1 a middle one, 2 the last."""
    lay, d = case.layouts, case.dims
    one = np.where(lay.pp == 1, 1.0, 0.0)
    options = [
        stage_params(lay, d, layers[0], first=1.0, last=one),
        stage_params(lay, d, layers[1], first=0.0, last=0.0),
        stage_params(lay, d, layers[2], first=0.0, last=1.0),
    ]

    def pick(name: str) -> Any:
        a, b, c = (getattr(o, name) for o in options)
        return np.where(at == 0, a, np.where(at == 1, b, c))

    return StageParams(pick("dense"), pick("experts"), pick("gathered"))
