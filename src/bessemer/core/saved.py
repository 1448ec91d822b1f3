"""What a block saves for its backward pass under each choice of recomputed parts, and what making them again costs.

    layer_bytes(spec, layer, parts, sizes)       # bytes a token that stay between forward and backward
    waiting_bytes(spec, layer, sizes)            # those between the gradients of inputs and of weights, put off
    again(spec, layer, parts, sizes, seq_len)    # the products that run a second time, and the bytes that others move

Closed forms of the tensors that the operators of `bessemer.ops` save on their native path; plain torch keeps more, but
of parts that are made again nothing either way. Counted for the sets that policies and budgets use: whoever makes a
projection again makes norms again too. All sizes are those of one rank and one token of its context rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from bessemer.core.counts import mean_keys
from bessemer.core.model import ModelSpec
from bessemer.core.recompute import parts_of_layer
from bessemer.core.sizes import Sizes

__all__ = ["Again", "Product", "again", "kept_parts", "layer_bytes", "waiting_bytes"]

_STREAM = 4
"""Bytes of an element of the residual stream, of statistics, scores and gates: float32 under every recipe."""
_INDEX = 8
"""Bytes of an index: which expert, which row."""
_SWIGLU_BLOCK = 128
"""Elements of SwiGLU's input, kept in a byte each, that share a scale of one byte."""


@dataclass(frozen=True)
class Product:
    """A matrix product of `rows` x `depth` by `depth` x `out`, rows counted per token of the rank."""

    part: str
    rows: float
    out: float
    depth: float

    @property
    def flops(self) -> float:
        """Per token."""
        return 2.0 * self.rows * self.out * self.depth


@dataclass(frozen=True)
class Again:
    """What runs a second time, per token. `attention_flops`: of the attention core, on causal pairs. `moved_bytes`:
    read and written by norms, activation functions and the like."""

    products: tuple[Product, ...]
    attention_flops: float
    moved_bytes: float

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.products) + self.attention_flops


@dataclass(frozen=True)
class _Attention:
    """Elements of the attention of a rank, a token."""

    queries: float  # of all its heads, as wide as keys
    keys: float
    values: float  # as attention saves them: filled up to the width of keys
    out: float  # of all heads, as wide as values really are
    heads: float
    latents: float = 0.0  # of queries, and of keys and values: what is normed
    shared: float = 0.0  # the rotated key that all heads share
    expanded: float = 0.0  # keys and values as the projection from the latent returns them

    @property
    def padded(self) -> bool:
        return self.out < self.queries

    @classmethod
    def of(cls, spec: ModelSpec, tp: int) -> _Attention:
        heads = spec.num_heads / tp
        wide = heads * spec.head_dim
        mla = spec.mla
        if mla is None:
            kv = max(spec.num_kv_heads / tp, 1.0) * spec.head_dim
            return cls(wide, kv, kv, wide, heads)
        expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        width = heads * max(spec.head_dim, mla.v_head_dim)
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        return cls(width, width, width, heads * mla.v_head_dim, heads, latents, mla.qk_rope_head_dim, expanded)


def layer_bytes(spec: ModelSpec, layer: int, parts: Collection[str], at: Sizes) -> float:
    """Bytes a token that the block of `layer` keeps for its backward pass, its input among them."""
    parts = kept_parts(spec, layer, parts, at)
    hidden, c = spec.hidden_size / at.sequence, at.compute_bytes
    kept = _STREAM * hidden
    if "norm" not in parts:
        kept += _STREAM * (hidden + 2 / at.sequence)
    elif "out" not in parts:
        kept += c * hidden  # what attention adds, from which the sum is made again
    kept += _attention_bytes(spec, parts, at)
    if spec.is_moe_layer(layer):
        return kept + _experts_bytes(spec, parts, at)
    kept += _entering_bytes((spec.hidden_size,), "up" in parts, parts, at)
    return kept + _feed_forward_bytes(spec, spec.ffn_size, parts, at)


def kept_parts(spec: ModelSpec, layer: int, parts: Collection[str], at: Sizes) -> frozenset[str]:
    """The parts of a layer that are made again if `parts` are wanted: SwiGLU too, where its input is kept narrow."""
    always = ("activation",) if at.narrow is not None and spec.gated else ()
    return parts_of_layer(spec, layer, {*parts, *always})


def _entering_bytes(widths: tuple[float, ...], again: bool, parts: frozenset[str], at: Sizes) -> float:
    """Of what norms return for projections that enter tensor parallelism, each of its own, and these save: what they
    have gathered from all ranks, or what the norm returned. again: whether the projections are made again."""
    width = sum(widths)
    if at.coded and not again:
        return width
    gathered = at.divided and not (again or "gather" in parts)
    if at.codes and not again and (gathered or not (at.divided or "norm" in parts)):
        return sum(map(at.code_bytes, widths))
    if gathered:
        return at.compute_bytes * width
    return 0.0 if "norm" in parts else at.compute_bytes * width / at.sequence


def _attention_bytes(spec: ModelSpec, parts: frozenset[str], at: Sizes) -> float:
    a, c = _Attention.of(spec, at.tp), at.compute_bytes
    core = "attention" not in parts
    copied = core and at.cp > 1  # the core keeps copies of queries, keys and values in pieces
    if spec.mla is not None:
        kept = _latent_bytes(spec, a, parts, at)
        if "mla_up" not in parts and not copied:
            kept += c * (a.queries + a.keys)
            kept += 0.0 if core else c * a.expanded  # inputs of the core stay: values are a view of it
        kept += c * a.values if core and not copied else 0.0
    else:
        packed = c * (a.queries + a.keys + a.values)
        kept = _entering_bytes((spec.hidden_size,), "qkv" in parts, parts, at)
        if "qkv" not in parts:
            apart = spec.qk_norm and "heads" not in parts  # from the packed projection, which is kept too
            kept += packed * (spec.qk_norm + (apart or not spec.qk_norm) * (not copied))
            kept += _STREAM * (a.queries + a.keys) / spec.head_dim if apart else 0.0
    rearranged = at.rearranged and "gather" not in parts
    # codes, where attention doesn't keep the very tensor that the projection reads
    codes = at.codes and a.padded and at.cp == 1 and "out" not in parts and (rearranged or not at.rearranged)
    again = not (at.coded or codes or (rearranged and "out" not in parts))
    kept += _core_bytes(spec, a, at, again=again) if core else 0.0
    if "out" in parts:
        return kept
    if at.coded:
        return kept + a.out
    if codes:
        return kept + (at.code_bytes(a.out) if core or rearranged else 0.0)
    return kept + (c * a.out if rearranged else 0.0)


def _core_bytes(spec: ModelSpec, a: _Attention, at: Sizes, *, again: bool) -> float:
    """What the attention core keeps beside its inputs: its result, in the width of keys and once more in that of
    values where they differ, and the statistics of softmax; under context parallelism its inputs in pieces too.
    again: the projection that leaves attention keeps the result as it came, no codes and no rearranged copy."""
    c, statistics = at.compute_bytes, _STREAM * a.heads
    read = c * a.out * again
    result = (c * a.queries + read if a.padded else c * a.out) + statistics
    if at.cp == 1:
        return result
    if at.cp_kind != "ulysses":  # values are not filled up
        return c * (a.queries + a.keys + (a.out if a.padded else a.values) + a.out) + statistics
    kv_heads = round(a.keys / spec.head_dim)
    repeats = at.cp // math.gcd(kv_heads, at.cp)
    inputs = c * (a.queries + repeats * (a.keys + a.values))
    return inputs + result + (0.0 if a.padded else read)  # its result comes back to this rank's tokens


def _latent_bytes(spec: ModelSpec, a: _Attention, parts: frozenset[str], at: Sizes) -> float:
    """What the down projections read, and latents before and after their norms, as far as they are kept."""
    mla, c = spec.mla, at.compute_bytes
    assert mla is not None
    kept = 0.0 if "norm" in parts else c * spec.hidden_size / at.sequence
    coded = at.coded and "qkv" not in parts
    if coded:  # by each of the two projections
        kept = spec.hidden_size * (1 / at.sequence + (1 if mla.q_lora_rank is None else 1 / at.sequence))
    if mla.q_lora_rank is None:  # query heads come straight from the stream, and are inputs of `mla_up`
        gathered = at.divided and not coded and not {"qkv", "gather"} & parts
        kept += c * spec.hidden_size if gathered else 0.0
        kept += c * a.queries if "mla_up" in parts and "qkv" not in parts else 0.0
    if "norm" not in parts:
        kept += (c * a.latents + _STREAM * (1 if mla.q_lora_rank is None else 2)) / at.sequence
        products = mla.kv_lora_rank + a.shared if "mla_up" in parts and not at.divided else 0.0
    else:
        products = 0.0 if "qkv" in parts else a.latents + a.shared
    kept += c * products / at.sequence + (c * a.shared if "mla_up" in parts and at.divided else 0.0)
    latents = (mla.kv_lora_rank, *([mla.q_lora_rank] if mla.q_lora_rank else []))
    return kept + _entering_bytes(latents, "mla_up" in parts, parts, at)


def _feed_forward_bytes(spec: ModelSpec, ffn_size: int, parts: frozenset[str], at: Sizes) -> float:
    """Of the activation's input, and of its result, which the projection that leaves reads."""
    width, c = ffn_size / at.tp, at.compute_bytes
    if "up" in parts:
        kept = 0.0
    elif at.narrow is not None and spec.gated:
        kept = 2 * width + math.ceil(2 * width / _SWIGLU_BLOCK)
    else:
        kept = c * width * (2 if spec.gated else 1)
    if at.coded:
        return kept + width
    copied = at.rearranged and "gather" not in parts
    if "activation" in parts and not copied:
        return kept
    codes = at.codes and (copied or not at.rearranged)
    return kept + (at.code_bytes(width) if codes else c * width)


def _experts_bytes(spec: ModelSpec, parts: frozenset[str], at: Sizes) -> float:
    moe = spec.moe
    assert moe is not None
    c, hidden, chosen = at.compute_bytes, spec.hidden_size, moe.top_k
    kept = 0.0
    if "router" not in parts:
        wide = _STREAM * hidden if c < _STREAM or "norm" in parts else 0  # a copy, where the input isn't float32
        kept += wide + _STREAM * (moe.num_experts * (2 if moe.z_loss_coef else 1) + chosen) + _INDEX * chosen
        kept += _STREAM * ((chosen + 1) * moe.norm_top_k + bool(moe.aux_loss_coef) + 2 * bool(moe.z_loss_coef))
    if "experts" in parts:
        kept += (_STREAM + _INDEX) * chosen if "router" not in parts else 0
        return kept / at.tp + (0.0 if "norm" in parts else c * hidden / at.sequence)
    kept += 2 * _INDEX * chosen  # the order of rows, and its inverse
    kept += chosen * (at.etp * _rows_bytes(moe.expert_ffn_size / at.etp, hidden, parts, at) + c * hidden)
    return kept / at.tp + _shared_bytes(spec, parts, at)


def _rows_bytes(width: float, hidden: float, parts: frozenset[str], at: Sizes) -> float:
    """Of a row on one of the ranks of its expert: what gate and up read, what SwiGLU reads, and what down reads."""
    c, again = at.compute_bytes, "dispatch" in parts and not at.exchanged
    if "up" in parts:
        kept = 0.0 if again else c * hidden
    elif at.coded:
        kept = hidden
    else:
        kept = 0.0 if again else at.code_bytes(hidden) if at.codes else c * hidden
    if "up" not in parts:
        kept += c * 2 * width if at.narrow is None else 2 * width + math.ceil(2 * width / _SWIGLU_BLOCK)
    if at.coded:
        return kept + width
    return kept + (0.0 if "activation" in parts else c * width)


def _shared_bytes(spec: ModelSpec, parts: frozenset[str], at: Sizes) -> float:
    """Of the shared expert, and of the norm's result as far as it is kept: routed experts read copies of it, their rows
    sorted and, for the router, in float32."""
    moe = spec.moe
    assert moe is not None
    c, hidden = at.compute_bytes, spec.hidden_size
    kept, gathered = 0.0, False
    if moe.shared_ffn_size:
        coded = at.coded and "up" not in parts
        gathered = coded or (at.divided and not {"up", "gather"} & parts)
        kept += (1 if coded else c) * hidden if gathered else 0.0
        kept += _feed_forward_bytes(spec, moe.shared_ffn_size, parts, at)
        kept += c * (hidden + 2) / at.sequence if moe.shared_gate else 0
    read = (moe.shared_ffn_size and not gathered) or moe.shared_gate
    if "norm" not in parts and (read or c == _STREAM or {"router", "dispatch"} & parts):
        kept += c * hidden / at.sequence
    return kept


def waiting_bytes(spec: ModelSpec, layer: int, at: Sizes) -> float:
    """Bytes a token that wait for the gradients of a layer's weights where a schedule puts these off: inputs and
    results' gradients of all projections, whatever was made again for them."""
    a, mla, moe = _Attention.of(spec, at.tp), spec.mla, spec.moe
    hidden, c = spec.hidden_size, at.compute_bytes
    one = 1 if at.coded else c  # byte of an input or a gradient

    def read(*widths: float) -> float:
        """Of inputs that no other operator keeps."""
        return sum(map(at.code_bytes, widths)) if at.codes else one * sum(widths)

    kept = one * (a.out + hidden)  # of the projection that leaves attention
    if mla is None:
        kept += read(hidden) + one * (a.queries + a.keys + a.values)
    else:
        heads = spec.num_heads * spec.head_dim / at.tp
        latent = mla.q_lora_rank or 0
        down = mla.kv_lora_rank + a.shared + latent
        inputs = 2 * hidden if at.coded and latent else hidden  # two projections read the same tensor
        kept += one * ((inputs + down) / at.sequence + a.expanded + heads) + read(mla.kv_lora_rank, latent)
        kept += one * hidden if not latent and (at.coded or at.divided) else 0.0  # query heads read a tensor apart
    ups = 2 if spec.gated else 1
    if moe is None or not spec.is_moe_layer(layer):
        return kept + read(hidden) + one * (hidden + (ups + 1) * spec.ffn_size / at.tp)
    kept += _STREAM * (hidden + moe.num_experts) / at.tp
    kept += moe.top_k / at.tp * (at.etp * (read(hidden) + one * hidden) + one * 3 * moe.expert_ffn_size)
    if moe.shared_ffn_size:
        kept += one * (2 * hidden + (ups + 1) * moe.shared_ffn_size / at.tp)
    return kept


def again(spec: ModelSpec, layer: int, parts: Collection[str], at: Sizes, seq_len: int) -> Again:
    """What the backward pass of `layer` makes again: only parts that the layer has cost anything."""
    parts = kept_parts(spec, layer, parts, at)
    products = [p for p in _products(spec, layer, at) if p.part in parts]
    if "experts" in parts:  # which holds the others of its layer
        products = [p for p in products if p.part != "up"]
        parts -= {"up", "activation", "dispatch"}
    attention = 0.0
    if "attention" in parts:
        value = spec.head_dim if spec.mla is None else spec.mla.v_head_dim
        attention = 2.0 * mean_keys(seq_len, spec.window(layer)) * spec.num_heads / at.tp * (spec.head_dim + value)
    return Again(tuple(products), attention, _moved_bytes(spec, layer, parts, at))


def _products(spec: ModelSpec, layer: int, at: Sizes) -> list[Product]:
    hidden, a, mla, moe = spec.hidden_size, _Attention.of(spec, at.tp), spec.mla, spec.moe
    heads = spec.num_heads * spec.head_dim / at.tp
    found = [Product("out", 1, hidden, a.out)]
    if mla is None:
        found.append(Product("qkv", 1, a.queries + a.keys + a.values, hidden))
    else:
        stream = 1 / at.sequence
        found.append(Product("qkv", stream, mla.kv_lora_rank + a.shared, hidden))
        found.append(Product("mla_up", 1, a.expanded, mla.kv_lora_rank))
        if mla.q_lora_rank is None:
            found.append(Product("qkv", 1, heads, hidden))
        else:
            found.append(Product("qkv", stream, mla.q_lora_rank, hidden))
            found.append(Product("mla_up", 1, heads, mla.q_lora_rank))
    gated = 2 if spec.gated else 1
    if moe is None or not spec.is_moe_layer(layer):
        return [*found, Product("up", 1, gated * spec.ffn_size / at.tp, hidden)]
    rows, width = moe.top_k * at.etp / at.tp, moe.expert_ffn_size / at.etp
    shared = moe.shared_ffn_size / at.tp
    found.append(Product("router", 1 / at.tp, moe.num_experts, hidden))
    for part in ("up", "experts"):
        found.append(Product(part, rows, 2 * width, hidden))
        found += [Product(part, 1, gated * shared, hidden)] if shared else []
    found.append(Product("experts", rows, hidden, width))
    found += [Product("experts", 1, hidden, shared)] if shared else []
    return [*found, Product("experts", 1, 1, hidden)] if moe.shared_gate else found


def _moved_bytes(spec: ModelSpec, layer: int, parts: frozenset[str], at: Sizes) -> float:
    """Inputs read and outputs written once each."""
    a, c, moe = _Attention.of(spec, at.tp), at.compute_bytes, spec.moe
    hidden = spec.hidden_size / at.sequence
    moved = 0.0
    if "norm" in parts:
        moved += hidden * (3 * _STREAM + 3 * c) + 2 * c * a.latents
    if "heads" in parts:
        moved += 2 * c * (a.queries + a.keys + a.values)
    if "mla_up" in parts:
        moved += c * (a.expanded + 3 * (a.queries + a.keys))
    gated, dense = 3 if spec.gated else 2, spec.ffn_size / at.tp
    if moe is None or not spec.is_moe_layer(layer):
        return moved + (c * gated * dense if "activation" in parts else 0.0)
    rows, shared = moe.top_k / at.tp, moe.shared_ffn_size / at.tp
    if "activation" in parts:
        moved += c * (3 * rows * moe.expert_ffn_size + gated * shared)
    if "router" in parts:
        moved += (spec.hidden_size * (c + 2 * _STREAM) + 4 * _STREAM * moe.num_experts) / at.tp
    if "dispatch" in parts:
        moved += 2 * c * rows * spec.hidden_size
    if "experts" in parts:
        moved += c * rows * (6 * spec.hidden_size + 7 * moe.expert_ffn_size) + c * gated * shared
    return moved
