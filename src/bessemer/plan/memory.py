"""Peak memory of a rank, in lines, by closed form; the heaviest stage counts.

Parameters: everything divided by tp but norms, MLA's down projections and the router; routed experts by ep x etp.
Saved activations of a layer and micro-batch follow the saved tensors (arXiv 2205.05198, with flash attention):
two norm inputs, two norm outputs, q, k, v, the attention output and its softmax statistics, the up projections'
output and the activation's. Peaks on top: the loss on the last stage, or the feed-forward backward on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.recipes import RECIPES
from bessemer.core.recompute import RECOMPUTE
from bessemer.plan.pipeline import in_flight, stage_layers
from bessemer.plan.space import CP_KINDS, DP_SHARDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.calibration import Constants
    from bessemer.plan.dims import Dims
    from bessemer.plan.layer import Work
    from bessemer.plan.space import Layouts

__all__ = ["MEMORY_LINES", "Memory", "StageParams", "memory_of", "stage_lines", "stage_params"]

MEMORY_LINES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "transient",
    "dummy_gradients",
    "gathered",
    "runtime",
)


@dataclass
class StageParams:
    """Parameters of a rank of one stage: `dense` are shared out over dp x cp, `experts` over the expert replicas.
    `gathered`: of one layer, as a rank holds it unsharded."""

    dense: NDArray[np.float64]
    experts: NDArray[np.float64]
    gathered: NDArray[np.float64]


@dataclass
class Memory:
    """Bytes [S] of the heaviest stage by line; `stage` is its pipeline rank, `when` what is going on at the peak
    (0: backward of the loss, 1: backward of a layer). `allocated` leaves out the runtime line."""

    lines: dict[str, NDArray[np.float64]]
    stage: NDArray[np.int64]
    when: NDArray[np.int64]

    @property
    def total(self) -> NDArray[np.float64]:
        return np.sum([self.lines[k] for k in MEMORY_LINES], axis=0)

    @property
    def allocated(self) -> NDArray[np.float64]:
        return self.total - self.lines["runtime"]


def stage_kinds(d: Dims, layers: Any, first: bool) -> tuple[Any, Any]:
    """Dense and MoE layers among `layers` of a stage. The leading dense layers lie on the first stage; the rest mix
    evenly."""
    rest = np.maximum(d.layers - d.dense_front, 1)
    share = np.where(np.asarray(d.moe_layers) > 0, d.moe_layers / rest, 0.0)
    front = np.minimum(d.dense_front, layers) if first else 0.0
    front = np.where(np.asarray(d.moe_layers) > 0, front, 0.0)
    moe = (layers - front) * share
    return layers - moe, moe


def stage_params(lay: Layouts, d: Dims, layers: Any, *, first: Any, last: Any) -> StageParams:
    """Parameters of a rank whose stage has `layers` layers; `first`/`last`: whether embedding/head are on it."""
    dense_layers, moe_layers = stage_kinds(d, layers, bool(np.all(first)))
    norm = d.hidden * d.norm_params
    around = d.attention_params / lay.tp + d.latent_params + 2 * norm + d.q_rank + d.kv_rank
    bias = d.bias * ((d.heads * d.qk_dim * 3 + d.up_mats * d.ffn) / lay.tp + 2 * d.hidden)
    dense_layer = around + d.dense_params / lay.tp + bias
    moe_layer = around + d.router_params + d.shared_params / lay.tp
    table = d.vocab * d.hidden / lay.tp
    ends = first * (table + d.learned_positions * d.hidden) + last * (table * (1 - d.tied * first) + norm)
    mtp = (
        last
        * d.mtp_layers
        * (2 * d.hidden**2 / lay.tp + np.where(np.asarray(d.moe_layers) > 0, moe_layer, dense_layer))
    )
    expert = d.expert_params / (lay.ep * lay.etp)
    copies = np.where(np.array([s == "dualpipe" for s in _schedule_names()])[lay.schedule], 2.0, 1.0)
    largest = np.maximum(dense_layer * (d.layers > d.moe_layers), moe_layer * (np.asarray(d.moe_layers) > 0))
    return StageParams(
        copies * (dense_layers * dense_layer + moe_layers * moe_layer) + ends + mtp,
        copies * moe_layers * expert + last * d.mtp_layers * expert,
        largest + expert,
    )


def _schedule_names() -> tuple[str, ...]:
    from bessemer.core.schedules import SCHEDULES

    return tuple(SCHEDULES)


def layer_activations(lay: Layouts, d: Dims, w: Work, c: Constants) -> tuple[Any, Any, Any]:
    """Bytes that one layer saves for one micro-batch: with a dense part, with an MoE part, and just its input."""
    tokens = lay.micro_batch * w.seq / lay.cp
    local = tokens / np.where(lay.sequence_parallel > 0, lay.tp, 1)
    narrow = np.array([1.0 if s.quantised else 2.0 for s in RECIPES.values()])[lay.recipe]
    wide = np.array([4.0 if s.compute == "fp32" else 2.0 for s in RECIPES.values()])[lay.recipe]
    narrow = np.where(wide > 2, wide, narrow)
    drop = {k: np.array([getattr(x, k) for x in RECOMPUTE.values()], float)[lay.recompute] for k in _DROPS}
    kept = {k: 1 - v for k, v in drop.items()}
    heads, q = d.heads / lay.tp, d.heads * d.qk_dim / lay.tp
    kv = d.kv_heads * (d.qk_dim + d.v_dim) / np.minimum(lay.tp, d.kv_heads)
    out = d.heads * d.v_dim / lay.tp
    first_input = local * d.hidden * wide
    norms = 2 * local * d.hidden * narrow * kept["drop_norm"] + local * d.hidden * wide * kept["drop_rest"]
    latent = d.mla * tokens * wide * (2 * d.q_rank + 2 * d.kv_rank + d.rope_dim)
    core = tokens * heads * 4 + np.where(
        lay.cp_kind == CP_KINDS.index("ulysses"), np.where(lay.cp > 1, tokens * out * wide, 0), 0
    )
    core = core + np.where(np.asarray(c.unfused_attention) > 0, 5.0 * tokens * w.seq * heads, 0.0)
    attention = (tokens * (q + kv) * wide + tokens * out * wide + latent) * kept["drop_rest"] + core * kept["drop_core"]

    def ffn(rows: Any, width: Any) -> Any:
        return rows * d.up_mats * width * wide * kept["drop_rest"] + rows * width * narrow * kept["drop_act"]

    dense = norms + attention + ffn(tokens, d.ffn / lay.tp)
    rows = tokens / lay.tp * d.top_k
    routed = ffn(rows * lay.etp, d.expert_ffn / lay.etp) + rows * d.hidden * (narrow + 0.5 * wide) * kept["drop_rest"]
    router = tokens / lay.tp * (4 * d.top_k + 8 * d.experts) * kept["drop_rest"]
    moe = norms + attention + routed + router + ffn(tokens, d.shared_ffn / lay.tp)
    return dense, moe, first_input


_DROPS = ("drop_norm", "drop_act", "drop_core", "drop_rest")


def memory_of(lay: Layouts, d: Dims, w: Work, c: Constants, num_micro: Any) -> Memory:
    """The heaviest of the first, the second and the last stage."""
    first, middle, last = stage_layers(
        d.layers, lay.pp, lay.virtual_stages, lay.first_layers, lay.last_layers, d.mtp_layers
    )
    one = np.where(lay.pp == 1, 1.0, 0.0)
    stages = [
        stage_lines(lay, d, w, c, (first, np.zeros_like(lay.pp), num_micro, 1.0, one)),
        stage_lines(lay, d, w, c, (middle, np.minimum(1, lay.pp - 1), num_micro, 0.0, 0.0)),
        stage_lines(lay, d, w, c, (last, lay.pp - 1, num_micro, one, 1.0)),
    ]
    totals = np.stack([np.sum([lines[k] for k in MEMORY_LINES], axis=0) for lines, _ in stages])
    totals[1] = np.where(lay.pp > 2, totals[1], 0.0)
    totals[2] = np.where(lay.pp > 1, totals[2], 0.0)
    heaviest = totals.argmax(axis=0)
    pick = lambda arrays: np.choose(heaviest, arrays)  # noqa: E731
    ranks = pick([np.zeros_like(lay.pp), np.minimum(1, lay.pp - 1), lay.pp - 1])
    return Memory(
        {k: pick([lines[k] for lines, _ in stages]) for k in MEMORY_LINES}, ranks, pick([when for _, when in stages])
    )


def stage_lines(
    lay: Layouts, d: Dims, w: Work, c: Constants, at: tuple[Any, Any, Any, Any, Any]
) -> tuple[dict[str, Any], Any]:
    layers, rank, num_micro, is_first, is_last = at
    params = stage_params(lay, d, layers, first=is_first, last=is_last)
    states = _states(lay, params, c)
    dense, moe, kept_input = layer_activations(lay, d, w, c)
    dense_layers, moe_layers = stage_kinds(d, layers, bool(np.all(np.asarray(is_first) > 0)))
    held = in_flight(lay.schedule, lay.pp, lay.virtual_stages, num_micro, rank)
    by_layer = np.array([x.by_layer for x in RECOMPUTE.values()])[lay.recompute]
    share = np.where(
        by_layer & (lay.recompute_layers > 0), np.minimum(lay.recompute_layers / np.maximum(layers, 1), 1), 1.0
    )
    plain = _without_recompute(lay, d, w, c) if np.any(share < 1) else (dense, moe)
    layer_bytes = dense_layers * (share * dense + (1 - share) * plain[0]) + moe_layers * (
        share * moe + (1 - share) * plain[1]
    )
    input_bytes = layers * kept_input
    offloaded = np.where(lay.offload_activations > 0, 0.1, 1.0)
    stash = np.where(lay.pp > 1, c.stage_stash, 0.0) * kept_input
    saved = held * ((input_bytes + layer_bytes) * c.memory_activation * offloaded + stash)
    tokens, wide = lay.micro_batch * w.seq / lay.cp, 2.0
    full = np.array([x.drop_rest > 0.9 for x in RECOMPUTE.values()])[lay.recompute]
    again = _without_recompute(lay, d, w, c) if full.any() else (0.0, 0.0)
    working = np.where(
        full, np.maximum(again[0] * (d.layers > d.moe_layers), again[1] * (np.asarray(d.moe_layers) > 0)), 0.0
    )
    mlp = 3 * tokens * np.maximum(d.ffn, d.shared_ffn) * wide / lay.tp + working * c.memory_activation
    table = d.vocab * d.hidden / lay.tp
    hidden = 4 * tokens * d.hidden / lay.tp + np.where(lay.tp > 1, 6.0, 2.0) * tokens * d.hidden
    loss = is_last * (c.logit_bytes * tokens * d.vocab / lay.tp + hidden + c.dummy_grads * wide * table)
    at_loss = loss > mlp
    zero = np.zeros(len(lay))
    # under pipeline stages a stage stays gathered for the whole step, with its unsharded float32 gradients
    whole = (params.dense + params.experts) * 6.0
    few = c.gathered_layers * params.gathered * 2.0
    gathered = np.where(lay.dp_shard == DP_SHARDS.index("full"), np.where(lay.pp > 1, whole, few), zero)
    lines = {
        **states,
        "activations": saved,
        "logits": np.where(at_loss, is_last * c.logit_bytes * tokens * d.vocab / lay.tp, zero),
        "transient": np.where(at_loss, loss - is_last * c.logit_bytes * tokens * d.vocab / lay.tp, mlp),
        "dummy_gradients": c.dummy_grads * wide * _distinct_shapes(lay, d) + zero,
        "gathered": gathered,
        "runtime": c.memory_base_bytes + zero,
    }
    return {k: np.broadcast_to(v, (len(lay),)) + 0.0 for k, v in lines.items()}, np.where(at_loss, 0, 1)


def _states(lay: Layouts, params: StageParams, c: Constants) -> dict[str, Any]:
    """Weights, gradients and optimizer state at rest."""
    shard = lay.dp * lay.cp / lay.replicas
    expert_shard = np.maximum(lay.dp * lay.cp * lay.tp / (lay.ep * lay.etp) / lay.replicas, 1)
    kind = lay.dp_shard
    wide = np.array([4.0 if s.compute == "fp32" else 2.0 for s in RECIPES.values()])[lay.recipe]
    fp16 = np.array([s.name == "fp16" for s in RECIPES.values()])[lay.recipe]
    grad = np.where(fp16, 2.0, np.where(wide > 2, 4.0, c.grad_bytes))
    state = np.where(wide > 2, 8.0, 12.0)
    fsdp = kind == DP_SHARDS.index("full")
    weight, grad, state = np.where(fsdp, 0.0, wide), np.where(fsdp, 4.0, grad), np.where(fsdp, 12.0, state)
    offload = np.where(lay.offload_optimizer > 0, 0.0, 1.0)

    def over(level: str, bytes_: Any) -> Any:
        sharded = kind >= DP_SHARDS.index(level)
        return bytes_ * (
            params.dense / np.where(sharded, shard, 1) + params.experts / np.where(sharded, expert_shard, 1)
        )

    return {
        "weights": over("full", weight),
        "gradients": over("gradient", grad),
        "optimizer": over("optimizer", state) * offload,
    }


def _without_recompute(lay: Layouts, d: Dims, w: Work, c: Constants) -> tuple[Any, Any]:
    from dataclasses import replace

    plain = replace(lay, recompute=np.zeros_like(lay.recompute))
    dense, moe, _ = layer_activations(plain, d, w, c)
    return dense, moe


def _distinct_shapes(lay: Layouts, d: Dims) -> Any:
    """Elements of one weight of every distinct shape of a layer: qkv, proj, fc1, fc2; of experts one expert's."""
    dense = d.attention_params / lay.tp + np.where(d.layers > d.moe_layers, d.dense_params, d.shared_params) / lay.tp
    expert = (d.up_mats + 1) * d.hidden * d.expert_ffn / lay.etp
    return dense + expert + d.latent_params
