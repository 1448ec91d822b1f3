"""What of a model a rank holds: elements of its parameters under tensor, expert and pipeline parallelism.

Of what tensor parallelism cannot divide every rank has all: norms, routers, the down projections of latent attention,
biases of what is summed, and key/value heads that are fewer than the ranks. Vocabularies are filled up to equal shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from bessemer.core.layout import Layout
from bessemer.core.model import ModelSpec
from bessemer.core.schedules import SCHEDULES, stages_of_rank
from bessemer.core.stages import num_stages, stage_ranges

__all__ = [
    "Elements",
    "HeldLayers",
    "block_elements",
    "end_elements",
    "layers_by_stage",
    "prediction_elements",
    "rank_elements",
]


class Elements(NamedTuple):
    """`dense`: all but experts; `experts`: of the routed experts; `matrices`: how many of `dense` are in the matrices
    of blocks; `untrained`: how many of `dense` no gradient trains. Numbers, or arrays with an entry a layout."""

    dense: Any
    experts: Any = 0
    matrices: Any = 0
    untrained: Any = 0

    def plus(self, other: Elements, times: Any = 1) -> Elements:
        """With `times` the other."""
        return Elements(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class HeldLayers:
    """What a pipeline rank, or one stage of it, holds: layers without and with experts, and the ends of the model."""

    dense: float
    moe: float
    begins: bool
    ends: bool

    @classmethod
    def of(cls, spec: ModelSpec, layers: Iterable[int]) -> HeldLayers:
        layers = tuple(layers)
        moe = sum(map(spec.is_moe_layer, layers))
        return cls(len(layers) - moe, moe, 0 in layers, spec.num_layers - 1 in layers)


def layers_by_stage(spec: ModelSpec, layout: Layout, seq_len: int) -> list[dict[int, range]]:
    """By pipeline rank: the layers of each of its stages, which come in order. ValueError where layers don't fill the
    stages."""
    if layout.pp == 1:
        return [{0: range(spec.num_layers)}]
    ranges = stage_ranges(spec, layout, seq_len)
    chunks = num_stages(layout) // layout.pp
    kind = SCHEDULES[layout.schedule]
    ranks = [sorted(stages_of_rank(kind, layout.pp, chunks, rank)) for rank in range(layout.pp)]
    return [{stage: ranges[stage] for stage in stages} for stages in ranks]


def block_elements(spec: ModelSpec, layout: Layout, *, moe: bool) -> Elements:
    """Of one block of a rank."""
    hidden, tp = spec.hidden_size, layout.tp
    matrices, vectors = _attention(spec, tp)
    vectors += 2 * _norm(spec) + (2 * spec.head_dim if spec.qk_norm else 0)
    experts = untrained = 0
    if moe and spec.moe is not None:
        shared = spec.moe.shared_ffn_size
        matrices += hidden * (spec.moe.num_experts + spec.moe.shared_gate)
        untrained = spec.moe.num_experts if spec.moe.selection_bias else 0
        expert = 3 * hidden * (spec.moe.expert_ffn_size // layout.etp)
        experts = spec.moe.num_experts // layout.ep * expert
        if shared:
            matrices, vectors = matrices + _ffn(spec, shared, tp)[0], vectors + _ffn(spec, shared, tp)[1]
    else:
        matrices, vectors = matrices + _ffn(spec, spec.ffn_size, tp)[0], vectors + _ffn(spec, spec.ffn_size, tp)[1]
    return Elements(matrices + vectors + untrained, experts, matrices, untrained)


def _attention(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """(elements of matrices, of biases and norms inside)."""
    hidden, mla, heads = spec.hidden_size, spec.mla, spec.num_heads // tp
    if mla is None:
        packed = (heads + 2 * max(1, spec.num_kv_heads // tp)) * spec.head_dim
        biases = (packed if spec.qkv_bias else 0) + (hidden if spec.o_bias else 0)
        return hidden * (packed + heads * spec.head_dim), biases
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    latent += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    queries = heads * spec.head_dim
    query = hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries)
    return latent + query + heads * mla.v_head_dim * hidden, mla.kv_lora_rank + (mla.q_lora_rank or 0)


def _ffn(spec: ModelSpec, width: int, tp: int) -> tuple[int, int]:
    width //= tp
    ups = 2 if spec.gated else 1
    return (ups + 1) * spec.hidden_size * width, (ups * width + spec.hidden_size) if spec.mlp_bias else 0


def _norm(spec: ModelSpec) -> int:
    return spec.hidden_size * (2 if spec.norm == "layernorm" else 1)


def end_elements(spec: ModelSpec, layout: Layout, *, begins: bool, ends: bool) -> Elements:
    """Of embedding, final norm and head, without the blocks of multi-token prediction."""
    table = math.ceil(spec.vocab_size / layout.tp) * spec.hidden_size
    embeds = begins or (ends and (spec.tied_embeddings or spec.mtp_layers > 0))
    positions = spec.max_positions * spec.hidden_size if begins and spec.positions == "learned" else 0
    head = table if ends and not spec.tied_embeddings else 0
    return Elements(embeds * table + positions + head + ends * _norm(spec))


def prediction_elements(spec: ModelSpec, layout: Layout) -> Elements:
    """Of one module of multi-token prediction."""
    joins = 2 * spec.hidden_size**2
    own = Elements(joins + 3 * _norm(spec), 0, joins)
    return own.plus(block_elements(spec, layout, moe=spec.is_moe_layer(spec.num_layers - 1)))


def rank_elements(spec: ModelSpec, layout: Layout, held: HeldLayers) -> Elements:
    """Of all that a pipeline rank holds."""
    found = end_elements(spec, layout, begins=held.begins, ends=held.ends)
    found = found.plus(block_elements(spec, layout, moe=False), held.dense)
    found = found.plus(block_elements(spec, layout, moe=True), held.moe)
    return found.plus(prediction_elements(spec, layout), spec.mtp_layers) if held.ends else found
