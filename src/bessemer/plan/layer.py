"""The cost of one decoder layer for one micro-batch: its kernels, its exchanges, what is made again, the host's pace.

Computed once per unique `Keys` (a few hundred in a search) and gathered; all formulas broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.core.recompute import RECOMPUTE
from bessemer.plan.collectives import group_s
from bessemer.plan.exchanges import ContextExchange, key_value_width, query_output_width, routed_bytes, stream_bytes
from bessemer.plan.gains import filled_work
from bessemer.plan.kernels import (
    Passes,
    Precision,
    attention_core,
    cast_s,
    gemm_s,
    grouped_share,
    precision_of,
)
from bessemer.plan.space import CP_KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bessemer.plan.calibration import Constants
    from bessemer.plan.dims import Dims
    from bessemer.plan.gains import Choice
    from bessemer.plan.rates import Rates

__all__ = ["CATEGORIES", "Keys", "LayerCost", "Work", "layer_cost"]

CATEGORIES = ("gemm", "attention", "grouped", "element", "cast", "gap", "host", "recompute", "tp", "cp", "ep")
"""What a layer's time is made of: products, attention core, grouped products of experts, small operators and
permutation, quantisation, gaps between kernels, waiting for the host, recompute, and exposed exchanges."""

FORWARD, INPUTS, WEIGHTS = 0, 1, 2
_SHARP = 8.0
"""Device and host overlap imperfectly: a layer takes the 8-norm of their times, 9 % more than either where equal."""


@dataclass(frozen=True)
class Keys:
    """What the cost of a layer depends on, arrays [U]; named as in `Layouts`, `two_way` follows from the schedule."""

    tp: NDArray[np.int64]
    cp: NDArray[np.int64]
    ep: NDArray[np.int64]
    etp: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    sequence_parallel: NDArray[np.int64]
    cp_kind: NDArray[np.int64]
    tp_overlap: NDArray[np.int64]
    graph: NDArray[np.int64]
    recompute: NDArray[np.int64]
    recipe: NDArray[np.int64]
    two_way: NDArray[np.int64]  # 1: expert exchanges run under the passes of the other direction (DualPipe)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step has to do. `attention_share`: of the causal pairs that are really computed (packed short
    sequences: less than 1). `frozen`: 1 where base weights get no gradient (LoRA). `imbalance`: tokens of the fullest
    expert rank against the mean. `dispatch_bytes`: of an element sent to an expert. `choice`: which linear layers
    Bessemer's own trainer leaves high (None: other software quantises them all)."""

    seq: Any
    attention_share: Any = 1.0
    frozen: Any = 0.0
    imbalance: Any = 1.0
    dispatch_bytes: Any = 2.0
    choice: Choice | None = None


@dataclass
class LayerCost:
    """Seconds of one layer for one micro-batch. `parts`: [len(CATEGORIES), U], forward and backward together;
    `forward`, `inputs` (recompute and input gradient) and `weights` add up to their sum."""

    parts: NDArray[np.float64]
    forward: NDArray[np.float64]
    inputs: NDArray[np.float64]
    weights: NDArray[np.float64]


Packed = tuple[tuple[str, Any], ...]
"""Of the linear layers that a product computes side by side the names, and how many columns each has."""


@dataclass(frozen=True)
class _At:
    """Where a layer is costed: keys, tokens of a rank's micro-batch, dims, work, precision, rates, constants."""

    k: Keys
    tokens: Any
    d: Dims
    w: Work
    p: Precision
    r: Rates
    c: Constants


@dataclass
class _Exchange:
    """Seconds of an exchange that stay exposed, forward and backward."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]


def layer_cost(k: Keys, d: Dims, w: Work, r: Rates, c: Constants) -> tuple[LayerCost, LayerCost]:
    """A dense layer and an MoE layer (zeros where the model has none)."""
    at = _At(k, k.micro_batch * w.seq / k.cp, d, w, precision_of(k.recipe, r, c), r, c)
    attention, tp_attention = _attention_part(at)
    cp = _cp_exchange(at)
    dense, tp_dense = _dense_part(at, d.ffn)
    zeros = np.zeros_like(at.tokens)
    exchanges = (_sum(tp_attention, tp_dense), cp, _Exchange(zeros, zeros))
    dense_cost = _compose(at, attention + dense, exchanges, c.host_dense_s)
    if not np.any(np.asarray(d.moe_layers) > 0):
        return dense_cost, LayerCost(np.zeros((len(CATEGORIES), len(zeros))), zeros, zeros, zeros)
    moe, ep = _moe_part(at)
    shared, tp_shared = _dense_part(at, d.shared_ffn, "mlp.shared", whole=False)
    kernels = attention + (moe + shared).scaled(c.moe)
    return dense_cost, _compose(at, kernels, (_sum(tp_attention, tp_shared), cp, ep), c.host_moe_s)


def _sum(a: _Exchange, b: _Exchange) -> _Exchange:
    return _Exchange(a.forward + b.forward, a.backward + b.backward)


def _element_s(bytes_: list[Any], r: Rates, c: Constants, size: int) -> NDArray[np.float64]:
    each = c.element / (r.hbm_bytes_per_s * c.hbm)
    return np.stack([np.broadcast_to(b * each, (size,)) for b in bytes_])


def _adapter_s(tokens: Any, out: Any, depth: Any, w: Work, r: Rates, c: Constants) -> NDArray[np.float64]:
    """A low-rank adapter reads the input of its linear layer and adds to the output; backward the other way round."""
    used = np.asarray(w.frozen) * tokens * (np.asarray(out) > 0)
    return _element_s([used * (2.0 * depth + 4.0 * out), used * (4.0 * depth + 2.0 * out), 0.0], r, c, len(tokens))


def _gap_s(counts: tuple[float, float, float], p: Precision, c: Constants, size: int) -> NDArray[np.float64]:
    return np.stack([np.broadcast_to(n * c.gap_s, (size,)) for n in counts])


def _attention_part(at: _At) -> tuple[Passes, _Exchange]:
    """Norm, projections, rotary, attention core, output projection, residual; the tensor-parallel exchanges."""
    k, tokens, d, w, p, r, c = at.k, at.tokens, at.d, at.w, at.p, at.r, at.c
    size, mla = len(tokens), np.asarray(d.mla) > 0
    q, out = d.heads * d.qk_dim / k.tp, d.heads * d.v_dim / k.tp
    kv = d.kv_heads * (d.qk_dim + d.v_dim) / np.minimum(k.tp, d.kv_heads)
    nope_v = d.heads * (d.qk_dim - d.rope_dim + d.v_dim) / k.tp
    local = tokens / np.where(k.sequence_parallel > 0, k.tp, 1)
    ahead_rows = np.where(p.gather_bytes < p.compute_bytes, local, tokens)  # quantised before it is gathered, or after
    q_in = np.where(np.asarray(d.q_rank) > 0, d.q_rank, d.hidden)
    hidden = np.broadcast_to(d.hidden, size)
    products = [  # rows, rows quantised forward and backward, width, depth
        (tokens, ahead_rows, tokens, np.where(mla, q, q + kv), np.where(mla, q_in, d.hidden)),
        (tokens, tokens, ahead_rows, hidden, out),
        (tokens, ahead_rows, tokens, np.where(mla, nope_v, 0.0), np.maximum(d.kv_rank, 1.0)),
        (local, local, local, np.where(mla, d.q_rank + d.kv_rank + d.rope_dim, 0.0), hidden),
    ]
    part = Passes.zero(size)
    for packed, (rows, ahead, back, width, depth) in zip(_attention_names(at), products, strict=True):
        high = _high(at, packed, rows, depth)
        part.gemm += _gemm_s(at, high, rows, width, depth) * (width > 0)
        part.cast += cast_s(ahead, back, width, depth, p, r, c) * (1 - high)
        part.element += _adapter_s(rows, width, depth, w, r, c)
    core = attention_core(tokens, w.seq, k.tp, d, p, r, c)
    part.attention += core * np.where(np.asarray(c.unfused_attention) > 0, 1.0, w.attention_share)
    rope = tokens * (q + kv / 2) * 4.0
    latent = np.where(mla, local * (d.q_rank + d.kv_rank) * 4.0 + tokens * (q + kv) * 2.0, 0.0)
    part.element += _element_s(
        [local * d.hidden * 10 + rope + latent, local * d.hidden * 12 + rope + latent, 0.0], r, c, size
    )
    part.gap += _gap_s((7.0, 9.0, 2.0), p, c, size)
    gathered = np.where(mla, d.q_rank + d.kv_rank + d.rope_dim, d.hidden)
    return part.scaled(c.layer), _tp_exchange(at, gathered)


def _attention_names(at: _At) -> list[Packed]:
    """What each product of `_attention_part` is made of."""
    k, d = at.k, at.d
    if at.w.choice is None:
        return [()] * 4
    q, out = d.heads * d.qk_dim / k.tp, d.hidden
    if d.mla == 0:
        kv = d.kv_heads * (d.qk_dim + d.v_dim) / np.minimum(k.tp, d.kv_heads)
        return [(("attn.qkv", q + kv),), (("attn.o", out),), (), ()]
    nope_v = d.heads * (d.qk_dim - d.rope_dim + d.v_dim) / k.tp
    first, latent = "attn.q", [("attn.kv_a", d.kv_rank + d.rope_dim)]
    if d.q_rank > 0:
        first, latent = "attn.q_b", [("attn.q_a", d.q_rank), *latent]
    return [((first, q),), (("attn.o", out),), (("attn.kv_b", nope_v),), tuple(latent)]


def _high(at: _At, packed: Packed, tokens: Any, depth: Any) -> Any:
    """[S]: share of a product that runs in 16 bits, 0 where nothing was chosen."""
    if at.w.choice is None or not packed:
        return 0.0
    whole = sum(width for _, width in packed)
    return sum(at.w.choice.high(name, at.k.recipe, tokens, width, depth) * width for name, width in packed) / whole


def _gemm_s(at: _At, high: Any, tokens: Any, out: Any, depth: Any) -> NDArray[np.float64]:
    """[3, S] of products of which a share runs high, and the others are filled up, as the trainer does."""
    narrow = gemm_s(tokens, out, depth, at.p, at.r, at.c)
    if at.w.choice is None:
        return narrow
    narrow = narrow * filled_work(at.k.recipe, tokens, out, depth)
    both: NDArray[np.float64] = narrow * (1 - high) + gemm_s(tokens, out, depth, at.p, at.r, at.c, wide=True) * high
    return both


def _dense_part(at: _At, ffn: Any, name: str = "mlp", *, whole: bool = True) -> tuple[Passes, _Exchange]:
    """A feed-forward part of width `ffn`; with `whole` its norm and residual too."""
    k, tokens, d, w, p, r, c = at.k, at.tokens, at.d, at.w, at.p, at.r, at.c
    size, used = len(tokens), np.where(np.asarray(ffn) > 0, 1.0, 0.0)
    width = np.maximum(ffn, 1.0) / k.tp
    hidden = np.broadcast_to(np.asarray(d.hidden, float), (size,))
    local = tokens / np.where(k.sequence_parallel > 0, k.tp, 1)
    part = Passes.zero(size)
    ahead_rows = np.where(p.gather_bytes < p.compute_bytes, local, tokens)
    up = "gate_up" if np.all(np.asarray(d.up_mats) == 2) else "up"
    for kind, ahead, back, out, depth in (
        (up, ahead_rows, tokens, d.up_mats * width, hidden),
        ("down", tokens, ahead_rows, hidden, width),
    ):
        high = _high(at, ((f"{name}.{kind}", out),) if np.all(used > 0) else (), tokens, depth)
        part.gemm += _gemm_s(at, high, tokens, out, depth)
        part.cast += cast_s(ahead, back, out, depth, p, r, c) * (1 - high)
        part.element += _adapter_s(tokens, out, depth, w, r, c)
    act = tokens * width
    around = local * d.hidden * float(whole)
    moved = [act * (2 * d.up_mats + 2) + around * 10, act * (4 * d.up_mats + 2) + around * 12, 0.0]
    part.element += _element_s(moved, r, c, size)
    part.gap += _gap_s((5.0, 6.0, 2.0), p, c, size)
    exchange = _tp_exchange(at, d.hidden)
    return part.scaled(used * c.layer), _Exchange(exchange.forward * used, exchange.backward * used)


def _tp_exchange(at: _At, gathered: Any) -> _Exchange:
    """With sequence parallel a gather and a scatter forward, the same and one more gather backward (for the weight
    gradient); without it an all-reduce each way. All of it is exposed unless `tp_overlap`."""
    k, tokens, d, p, r, c = at.k, at.tokens, at.d, at.p, at.r, at.c
    into, out = stream_bytes(tokens, gathered, p.gather_bytes), stream_bytes(tokens, d.hidden, p.compute_bytes)
    gather = group_s("all_gather", into, k.tp, r.domain, r, c)
    scatter = group_s("reduce_scatter", out, k.tp, r.domain, r, c)
    reduce = group_s("all_reduce", out, k.tp, r.domain, r, c)
    sp = k.sequence_parallel > 0
    forward = np.where(sp, gather + scatter, reduce)
    backward = np.where(sp, 2 * gather + scatter, reduce)
    share = np.where(k.tp_overlap > 0, c.x_tp + np.maximum(1 - c.x_tp, 0) * c.slow * r.engine, 1.0)
    return _Exchange(forward * share, backward * share)


def _cp_exchange(at: _At) -> _Exchange:
    """Ring: cp - 1 blocks of keys and values, twice as much backward, under the attention core: a ring gathers and
    scatters so. All-gather: the same bytes at once. Ulysses: four all-to-alls each way. Gradients are added up in the
    compute type."""
    k, d, p, r, c = at.k, at.d, at.p, at.r, at.c
    key_value = at.tokens * key_value_width(d.kv_heads, d.qk_dim, d.v_dim, k.tp)
    query_output = at.tokens * query_output_width(d.heads, d.qk_dim, d.v_dim, k.tp)
    size = ContextExchange(
        ranks=k.cp,
        query_output=query_output,
        key_value=key_value,
        element_bytes=p.compute_bytes,
        gradient_bytes=p.compute_bytes,
    )
    local = np.maximum(r.domain // k.tp, 1)
    gather = group_s("all_gather", size.gathered, k.cp, local, r, c)
    scatter = group_s("reduce_scatter", size.scattered, k.cp, local, r, c)
    swap = group_s("alltoall", size.swapped, k.cp, local, r, c)
    share = np.where(k.cp_kind == CP_KINDS.index("ring"), c.x_cp + np.maximum(1 - c.x_cp, 0) * c.slow * r.engine, 1.0)
    ulysses = k.cp_kind == CP_KINDS.index("ulysses")
    return _Exchange(np.where(ulysses, swap, gather) * share, np.where(ulysses, swap, gather + scatter) * share)


def _moe_part(at: _At) -> tuple[Passes, _Exchange]:
    """Norm, router, permutation, grouped products of the routed experts, residual; dispatch and combine.

    A rank owns tokens/tp of the micro-batch; each goes to top_k experts of ep x etp ranks. Balanced, every rank works
    on tokens/tp x top_k x etp rows of width expert_ffn/etp.
    """
    k, tokens, d, w, p, r, c = at.k, at.tokens, at.d, at.w, at.p, at.r, at.c
    size, has = len(tokens), np.where(np.asarray(d.experts) > 0, 1.0, 0.0)
    own = tokens / k.tp
    rows = own * d.top_k * k.etp * w.imbalance
    width = np.maximum(d.expert_ffn, 1.0) / k.etp
    experts = np.maximum(np.maximum(d.experts, 1) / k.ep, 1.0)
    share = grouped_share(np.maximum(rows / experts, 1e-9), width, c)
    part = Passes.zero(size)
    hidden = np.broadcast_to(np.asarray(d.hidden, float), (size,))
    if w.choice is not None and w.choice.emulated:  # quantised, and multiplied in 16 bits
        p = replace(p, gemm_flops_per_s=p.wide_flops_per_s, operand_bytes=p.compute_bytes)
    fast = replace(p, gemm_flops_per_s=p.gemm_flops_per_s * share)
    for kind, out, depth in (("up", d.up_mats * width, hidden), ("down", hidden, width)):
        high = _high(at, ((f"mlp.experts.{kind}", out),), rows, depth)
        weights = (experts - 1) * out * depth / r.hbm_bytes_per_s
        more = np.stack(np.broadcast_arrays(weights * p.operand_bytes, weights * p.operand_bytes, weights * 8.0))
        part.grouped += gemm_s(rows, out, depth, fast, r, c) + more
        part.cast += cast_s(rows, rows, out, depth, p, r, c) * (1 - high)
    part.gemm += gemm_s(own, np.maximum(d.experts, 1.0), hidden, p, r, c, wide=True)
    # experts with biases and a clamped activation run it as separate kernels
    act, moved = (
        rows * width * np.where(np.asarray(d.expert_bias) > 0, c.unfused_experts, 1.0),
        8.0 * rows * d.hidden * c.permute,
    )
    around = own * d.hidden
    bytes_ = [act * (2 * d.up_mats + 2) + around * 10 + moved, act * (4 * d.up_mats + 2) + around * 12 + moved, 0.0]
    part.element += _element_s(bytes_, r, c, size)
    fixed = np.stack([np.broadcast_to(n * c.moe_fixed_s, (size,)) for n in (1.0, 1.0, 0.0)])
    part.gap += _gap_s((16.0, 18.0, 3.0), p, c, size) + fixed
    return part.scaled(has * c.layer), _ep_exchange(at, own)


def _ep_exchange(at: _At, own: Any) -> _Exchange:
    """Dispatch and combine: an all-to-all each, forward and backward; with etp a gather and a scatter around it.

    A token crosses to another host once, however many of its experts live there (and node-limited routing caps their
    number); inside the scale-up domain it is sent once per expert.
    """
    k, d, w, p, r, c = at.k, at.d, at.w, at.p, at.r, at.c
    local = np.clip(r.domain // k.etp, 1, k.ep)
    hosts = k.ep / local
    spread = hosts * (1 - (1 - 1 / hosts) ** d.top_k)
    limit = np.where(np.asarray(d.top_groups) > 0, d.top_groups, spread)
    copies = np.where(hosts > 1, np.minimum(np.minimum(spread, limit), d.top_k), d.top_k)
    sent = own * w.imbalance
    dispatch = group_s("alltoall", routed_bytes(sent, copies, d.hidden, w.dispatch_bytes), k.ep, local, r, c)
    combine = group_s("alltoall", routed_bytes(sent, copies, d.hidden, p.compute_bytes), k.ep, local, r, c)
    gathered = routed_bytes(sent, d.top_k * k.etp, d.hidden, p.compute_bytes)
    around = group_s("all_gather", gathered, k.etp, r.domain, r, c)
    around = around + group_s("reduce_scatter", gathered, k.etp, r.domain, r, c)
    one_way = (dispatch + combine) * np.where(hosts > 1, c.x_ep_wire, c.x_ep) + around
    one_way = one_way * np.where(k.two_way > 0, np.minimum(c.slow * r.engine, 1.0), 1.0)
    return _Exchange(one_way, one_way)


def _compose(at: _At, kernels: Passes, exchanges: tuple[_Exchange, _Exchange, _Exchange], host_s: Any) -> LayerCost:
    """Adds recompute, exchanges and the host's pace: a layer takes at least as long as its launches."""
    k, w, c = at.k, at.w, at.c
    policies = list(RECOMPUTE.values())
    pick = lambda name: np.array([getattr(x, name) for x in policies], float)[k.recompute]  # noqa: E731
    full = pick("again_gemm") * pick("again_core") > 0.99
    share = np.where(full, c.recompute_full, 1.0)
    engine = kernels.scaled(1.0)
    trained = 1.0 - np.asarray(w.frozen)
    engine.gemm[WEIGHTS] *= trained
    engine.grouped[WEIGHTS] *= trained
    again = pick("again_gemm") * (engine.gemm[FORWARD] + engine.grouped[FORWARD] + engine.cast[FORWARD])
    again = again + pick("again_core") * engine.attention[FORWARD]
    again = again + pick("again_element") * (engine.element[FORWARD] + engine.gap[FORWARD])
    tp, cp, ep = exchanges
    again = (again + pick("again_comm") * (tp.forward + cp.forward + ep.forward)) * share
    total = engine.total
    forward = total[FORWARD] + tp.forward + cp.forward + ep.forward
    inputs = total[INPUTS] + again + tp.backward + cp.backward + ep.backward
    paced = host_s * (1 + pick("again_gemm") * share / 3) * np.where(k.graph > 0, 0.0, 1.0)
    busy = forward + inputs + total[WEIGHTS]
    wait = (busy**_SHARP + paced**_SHARP) ** (1 / _SHARP) - busy + c.stall_s
    rows = [engine.gemm, engine.attention, engine.grouped, engine.element, engine.cast, engine.gap]
    parts = [row.sum(axis=0) for row in rows] + [wait, again]
    parts += [x.forward + x.backward for x in (tp, cp, ep)]
    third = wait / 3
    return LayerCost(np.stack(np.broadcast_arrays(*parts)), forward + third, inputs + third, total[WEIGHTS] + third)
