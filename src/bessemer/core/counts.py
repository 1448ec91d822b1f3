"""Exact parameter counts and forward FLOPs of a `ModelSpec`, by class. Closed forms: nothing is allocated.

FLOPs count the multiply-adds of matrix products, two operations each. Left out, because they are no matrix products
and well under 1 % of a large model: norms, rotary embedding, softmax, activations, residual additions, the embedding
look-up and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bessemer.core.model import ModelSpec

__all__ = ["Counts", "Flops", "attention_parameters", "flops_per_token", "layer_parameters", "parameter_counts"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters by class: the elements of all tensors of a checkpoint."""

    embedding: int = 0  # tokens, and positions where they are learned
    attention: int = 0  # projections with their biases
    dense_ffn: int = 0
    router: int = 0  # with the gate of a shared expert and the selection bias, which no gradient trains
    experts: int = 0  # routed and shared
    norms: int = 0
    head: int = 0  # 0 where tied to the embedding
    mtp: int = 0  # multi-token prediction; its embedding and head are those of the model
    inactive: int = 0  # of the experts: those that one token isn't routed to (mtp left out)

    @property
    def total(self) -> int:
        """All parameters without the multi-token prediction modules, as published counts have it."""
        parts = self.embedding + self.attention + self.dense_ffn + self.router + self.experts
        return parts + self.norms + self.head

    @property
    def total_with_mtp(self) -> int:
        """What is trained and stored: `total` and the multi-token prediction modules."""
        return self.total + self.mtp

    @property
    def active(self) -> int:
        """Parameters that one token's forward pass belongs to: `total` without the experts it isn't routed to.

        The embedding table is counted whole, as in the published "12.9 B active" of Mixtral and "3.3 B" of Qwen3.
        """
        return self.total - self.inactive

    @property
    def active_without_embedding(self) -> int:
        """`active` without the embedding table: the published "2.4 B" of DeepSeek-V2-Lite, "32 B" of Kimi K2."""
        return self.active - self.embedding


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Forward FLOPs per token, averaged over a sequence, by the operator that does them."""

    attention_projections: float  # q, k, v, o, and the low-rank steps of latent attention
    attention_scores: float  # q k^T and the weighted sum of v
    dense_ffn: float
    router: float
    experts: float  # the routed ones that a token visits, and the shared one
    head: float  # logits over the vocabulary
    mtp: float  # multi-token prediction modules, each with its own pass over the head

    @property
    def forward(self) -> float:
        """All of them."""
        parts = self.attention_projections + self.attention_scores + self.dense_ffn + self.router
        return parts + self.experts + self.head + self.mtp

    @property
    def training(self) -> float:
        """Forward and backward: three times forward, since backward takes gradients of inputs and of weights."""
        return 3 * self.forward


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of one decoder layer; `inactive`: of the experts, those that one token isn't routed to."""

    attention: int
    dense_ffn: int
    router: int
    experts: int
    norms: int
    inactive: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.dense_ffn + self.router + self.experts + self.norms


def parameter_counts(spec: ModelSpec) -> Counts:
    """Exact parameters of `spec`, equal to the sum of the tensors that a checkpoint holds."""
    layers = [layer_parameters(spec, layer) for layer in range(spec.num_layers)]
    positions = spec.max_positions * spec.hidden_size if spec.positions == "learned" else 0
    return Counts(
        embedding=spec.vocab_size * spec.hidden_size + positions,
        attention=sum(layer.attention for layer in layers),
        dense_ffn=sum(layer.dense_ffn for layer in layers),
        router=sum(layer.router for layer in layers),
        experts=sum(layer.experts for layer in layers),
        norms=sum(layer.norms for layer in layers) + _norm(spec),
        head=0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size,
        mtp=spec.mtp_layers * _mtp_parameters(spec),
        inactive=sum(layer.inactive for layer in layers),
    )


def layer_parameters(spec: ModelSpec, layer: int) -> LayerCounts:
    """Parameters of decoder layer `layer` (from 0)."""
    dense, router, experts, inactive = 0, 0, 0, 0
    moe = spec.moe
    if moe is not None and spec.is_moe_layer(layer):
        expert = _ffn(spec, moe.expert_ffn_size)
        router = spec.hidden_size * (moe.num_experts + (1 if moe.shared_gate else 0))
        router += moe.num_experts if moe.selection_bias else 0
        shared = _ffn(spec, moe.shared_ffn_size) if moe.shared_ffn_size else 0
        experts = moe.num_experts * expert + shared
        inactive = (moe.num_experts - moe.top_k) * expert
    else:
        dense = _ffn(spec, spec.ffn_size)
    norms = 2 * _norm(spec)
    if spec.qk_norm:
        norms += 2 * spec.head_dim
    if spec.mla is not None:
        norms += spec.mla.kv_lora_rank + (spec.mla.q_lora_rank or 0)
    return LayerCounts(attention_parameters(spec), dense, router, experts, norms, inactive)


def attention_parameters(spec: ModelSpec) -> int:
    """Weights and biases of one layer's attention projections."""
    weights = _attention_weights(spec)
    if spec.mla is not None:
        return weights
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return weights + (q + 2 * kv if spec.qkv_bias else 0) + (spec.hidden_size if spec.o_bias else 0)


def flops_per_token(spec: ModelSpec, seq_len: int, *, attention: Literal["causal", "full"] = "causal") -> Flops:
    """Forward FLOPs per token of sequences of `seq_len` tokens.

    attention "causal" counts only the pairs that the causal mask and a sliding window leave, (seq_len + 1) / 2 keys a
    query without a window. "full" counts seq_len keys a query, as the usual model-FLOPs formulas do.
    """
    kinds = [spec.is_moe_layer(layer) for layer in range(spec.num_layers)]
    num_moe = sum(kinds)
    scores = sum(_scores(spec, seq_len, spec.window(layer), attention) for layer in range(spec.num_layers))
    head = 2.0 * spec.vocab_size * spec.hidden_size
    router, experts = _moe_flops(spec)
    last = spec.num_layers - 1
    mtp_layer = 2.0 * _attention_weights(spec) + _scores(spec, seq_len, spec.window(last), attention)
    mtp_layer += router + experts if kinds[last] else 2.0 * _ffn_weights(spec, spec.ffn_size)
    return Flops(
        attention_projections=2.0 * spec.num_layers * _attention_weights(spec),
        attention_scores=scores,
        dense_ffn=2.0 * (spec.num_layers - num_moe) * _ffn_weights(spec, spec.ffn_size),
        router=num_moe * router,
        experts=num_moe * experts,
        head=head,
        mtp=spec.mtp_layers * (2.0 * 2 * spec.hidden_size**2 + mtp_layer + head),
    )


def mean_keys(seq_len: int, window: int | None, attention: Literal["causal", "full"] = "causal") -> float:
    """Keys that a query meets, averaged over the positions of a sequence: min(i, window) over i = 1 .. seq_len."""
    if attention == "full":
        return float(seq_len)
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def _scores(spec: ModelSpec, seq_len: int, window: int | None, attention: Literal["causal", "full"]) -> float:
    value_dim = spec.head_dim if spec.mla is None else spec.mla.v_head_dim
    return 2.0 * mean_keys(seq_len, window, attention) * spec.num_heads * (spec.head_dim + value_dim)


def _moe_flops(spec: ModelSpec) -> tuple[float, float]:
    """Forward FLOPs per token of one MoE layer: router, experts."""
    moe = spec.moe
    if moe is None:
        return 0.0, 0.0
    width = moe.top_k * moe.expert_ffn_size + moe.shared_ffn_size
    router = 2.0 * spec.hidden_size * (moe.num_experts + (1 if moe.shared_gate else 0))
    return router, 2.0 * _ffn_weights(spec, width)


def _attention_weights(spec: ModelSpec) -> int:
    hidden, heads, mla = spec.hidden_size, spec.num_heads, spec.mla
    if mla is None:
        q, kv = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return hidden * (q + 2 * kv) + q * hidden
    q_in = hidden if mla.q_lora_rank is None else mla.q_lora_rank
    query = q_in * heads * spec.head_dim + (0 if mla.q_lora_rank is None else hidden * mla.q_lora_rank)
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expand = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + latent + expand + heads * mla.v_head_dim * hidden


def _ffn_weights(spec: ModelSpec, width: int) -> int:
    return (3 if spec.gated else 2) * spec.hidden_size * width


def _ffn(spec: ModelSpec, width: int) -> int:
    biases = width * (2 if spec.gated else 1) + spec.hidden_size if spec.mlp_bias else 0
    return _ffn_weights(spec, width) + biases


def _norm(spec: ModelSpec) -> int:
    return spec.hidden_size * (2 if spec.norm == "layernorm" else 1)


def _mtp_parameters(spec: ModelSpec) -> int:
    """One module of DeepSeek-V3 (arXiv 2412.19437 section 2.2): two norms, the joining projection 2D -> D, a decoder
    layer like the last one, and the norm before the shared head."""
    return 2 * spec.hidden_size**2 + 3 * _norm(spec) + layer_parameters(spec, spec.num_layers - 1).total
