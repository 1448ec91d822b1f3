"""The parameters that a rank of Bessemer's own trainer holds, by name and shape, without building them.

Names and shapes are those of `bessemer.models.decoder.Decoder` under tensor, expert and pipeline parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from bessemer.core.layout import Layout
from bessemer.core.model import ModelSpec

__all__ = ["Parameter", "rank_parameters"]

Kind = Literal["divided", "whole", "partial", "expert", "untrained"]


class Parameter(NamedTuple):
    """`kind` says how tensor-parallel ranks hold it. divided: each its share.  whole: all of it, and each sees the
    gradient of all tokens unless sequence parallelism divides them.  partial: all of it, but each has only its part of
    the gradient.  expert: divided by expert parallelism instead.  untrained: all of it, without a gradient.

    shared_rows: rows of keys and values that several tensor-parallel ranks hold, each with its part of the gradient.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    shared_rows: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])


def rank_parameters(spec: ModelSpec, layout: Layout, layers: Iterable[int]) -> list[Parameter]:
    """Those of a rank that holds `layers`, with what belongs to the first and the last of the model's."""
    layers, last = tuple(layers), spec.num_layers - 1
    begins, ends, hidden = 0 in layers, last in layers, spec.hidden_size
    table = (math.ceil(spec.vocab_size / layout.tp), hidden)
    found: list[Parameter] = []
    if begins or (ends and (spec.tied_embeddings or spec.mtp_layers > 0)):
        found.append(Parameter("embed.weight", table, "divided"))
    if begins and spec.positions == "learned":
        found.append(Parameter("pos_embed.weight", (spec.max_positions, hidden), "whole"))
    for layer in layers:
        found += _block(spec, layout, f"blocks.{layer}", moe=spec.is_moe_layer(layer))
    if not ends:
        return found
    found += _norm(spec, "norm", hidden)
    if not spec.tied_embeddings:
        found.append(Parameter("head.weight", table, "divided"))
    for step in range(spec.mtp_layers):
        name = f"mtp.{step}"
        for norm in ("embed_norm", "hidden_norm", "norm"):
            found += _norm(spec, f"{name}.{norm}", hidden)
        found.append(Parameter(f"{name}.join.weight", (hidden, 2 * hidden), "whole"))
        found += _block(spec, layout, f"{name}.block", moe=spec.is_moe_layer(last))
    return found


def _block(spec: ModelSpec, layout: Layout, name: str, *, moe: bool) -> Iterator[Parameter]:
    for norm in ("attn_norm", "mlp_norm"):
        yield from _norm(spec, f"{name}.{norm}", spec.hidden_size)
    yield from (_attention if spec.mla is None else _latent_attention)(spec, layout.tp, f"{name}.attn")
    if moe:
        yield from _mixture(spec, layout, f"{name}.mlp")
    else:
        yield from _feed_forward(spec, spec.ffn_size // layout.tp, f"{name}.mlp")


def _norm(spec: ModelSpec, name: str, size: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,), "whole")
    if spec.norm == "layernorm":
        yield Parameter(f"{name}.bias", (size,), "whole")


def _projection(name: str, out: int, inner: int, *, bias: bool, rows: bool = False) -> Iterator[Parameter]:
    """Columns of outputs, or with `rows` of inputs: then every rank has the whole bias."""
    yield Parameter(f"{name}.weight", (out, inner), "divided")
    if bias:
        yield Parameter(f"{name}.bias", (out,), "whole" if rows else "divided")


def _attention(spec: ModelSpec, tp: int, name: str) -> Iterator[Parameter]:
    width = spec.num_heads // tp * spec.head_dim
    keys_values = 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim
    shared = keys_values if tp > spec.num_kv_heads else 0
    for made in _projection(f"{name}.qkv", width + keys_values, spec.hidden_size, bias=spec.qkv_bias):
        yield made._replace(shared_rows=shared)
    yield from _projection(f"{name}.o", spec.hidden_size, width, bias=spec.o_bias, rows=True)
    for norm in ("q_norm", "k_norm") if spec.qk_norm else ():
        yield Parameter(f"{name}.{norm}.weight", (spec.head_dim,), "partial")


def _latent_attention(spec: ModelSpec, tp: int, name: str) -> Iterator[Parameter]:
    mla, heads, hidden = spec.mla, spec.num_heads // tp, spec.hidden_size
    assert mla is not None
    query_rank, latent = mla.q_lora_rank, mla.kv_lora_rank
    if query_rank is None:
        yield Parameter(f"{name}.q.weight", (heads * spec.head_dim, hidden), "divided")
    else:
        yield Parameter(f"{name}.q_a.weight", (query_rank, hidden), "whole")
        yield from _norm(spec, f"{name}.q_a_norm", query_rank)
        yield Parameter(f"{name}.q_b.weight", (heads * spec.head_dim, query_rank), "divided")
    yield Parameter(f"{name}.kv_a.weight", (latent + mla.qk_rope_head_dim, hidden), "whole")
    yield from _norm(spec, f"{name}.kv_a_norm", latent)
    yield Parameter(f"{name}.kv_b.weight", (heads * (mla.qk_nope_head_dim + mla.v_head_dim), latent), "divided")
    yield Parameter(f"{name}.o.weight", (hidden, heads * mla.v_head_dim), "divided")


def _feed_forward(spec: ModelSpec, width: int, name: str) -> Iterator[Parameter]:
    """`width`: of this rank."""
    up, ups = ("gate_up", 2) if spec.gated else ("up", 1)
    yield from _projection(f"{name}.{up}", ups * width, spec.hidden_size, bias=spec.mlp_bias)
    yield from _projection(f"{name}.down", spec.hidden_size, width, bias=spec.mlp_bias, rows=True)


def _mixture(spec: ModelSpec, layout: Layout, name: str) -> Iterator[Parameter]:
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    yield Parameter(f"{name}.router.weight", (moe.num_experts, hidden), "partial")
    if moe.selection_bias:
        yield Parameter(f"{name}.router.bias", (moe.num_experts,), "untrained")
    experts, width = moe.num_experts // layout.ep, moe.expert_ffn_size // layout.etp
    for stack in ("gate", "up"):
        yield Parameter(f"{name}.experts.{stack}.weight", (experts, width, hidden), "expert")
    yield Parameter(f"{name}.experts.down.weight", (experts, hidden, width), "expert")
    if moe.shared_ffn_size:
        yield from _feed_forward(spec, moe.shared_ffn_size // layout.tp, f"{name}.shared")
    if moe.shared_gate:
        yield Parameter(f"{name}.shared_gate.weight", (1, hidden), "whole")
