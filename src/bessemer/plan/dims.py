"""`Dims`: the numbers of one model, or of many side by side, that the cost model computes with.

Every field is a float, or an array with one entry a layout where layouts of different models are priced together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bessemer.core.model import ModelSpec

__all__ = ["Dims", "dims_of", "stack"]

Number = "float | NDArray[np.float64]"


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes by their usual meaning; 0 where a part is absent. Widths are elements, counts are layers or heads."""

    layers: float
    hidden: float
    heads: float
    kv_heads: float
    qk_dim: float  # of a head's query and key
    v_dim: float  # of a head's value
    q_rank: float  # MLA: width of the query's latent; 0: none
    kv_rank: float  # MLA: width of the latent of key and value; 0: no MLA
    rope_dim: float  # MLA: rotary part, shared by the heads
    ffn: float  # of dense layers
    up_mats: float  # 2 where the activation is gated, else 1
    vocab: float
    tied: float
    window: float  # 0: none
    window_share: float  # of the layers that have the window
    moe_layers: float
    dense_front: float  # dense layers before the first MoE layer
    experts: float
    top_k: float
    expert_ffn: float
    shared_ffn: float
    top_groups: float  # node-limited routing: groups that a token reaches; 0: no limit
    mtp_layers: float
    learned_positions: float  # rows of a learned position table
    norm_params: float  # parameters of one norm of width hidden, as a multiple of hidden (layernorm 2, rmsnorm 1)
    bias: float  # 1 where the linear layers have biases
    expert_bias: float  # 1 where the experts have biases

    @property
    def mla(self) -> float:
        """1 where attention is latent."""
        return np.where(np.asarray(self.kv_rank) > 0, 1.0, 0.0)[()]

    @property
    def attention_params(self) -> float:
        """Weights of a layer's attention projections that tensor parallelism divides."""
        q, kv, out = self.heads * self.qk_dim, self.kv_heads * (self.qk_dim + self.v_dim), self.heads * self.v_dim
        q_in = np.where(np.asarray(self.q_rank) > 0, self.q_rank, self.hidden)
        plain = self.hidden * (q + kv + out)
        nope = self.qk_dim - self.rope_dim
        latent = q_in * q + self.kv_rank * self.heads * (nope + self.v_dim) + out * self.hidden
        return np.where(self.mla > 0, latent, plain)[()]

    @property
    def latent_params(self) -> float:
        """MLA's down projections, which every tensor-parallel rank holds whole."""
        return self.mla * self.hidden * (self.q_rank + self.kv_rank + self.rope_dim)

    @property
    def dense_params(self) -> float:
        """Weights of a dense feed-forward part."""
        return (self.up_mats + 1) * self.hidden * self.ffn

    @property
    def shared_params(self) -> float:
        """Weights of the shared experts of a layer."""
        return (self.up_mats + 1) * self.hidden * self.shared_ffn

    @property
    def expert_params(self) -> float:
        """Weights of all routed experts of a layer."""
        return self.experts * (self.up_mats + 1) * self.hidden * self.expert_ffn

    @property
    def router_params(self) -> float:
        """Weights of a layer's router."""
        return self.hidden * self.experts


def dims_of(spec: ModelSpec) -> Dims:
    """The numbers of `spec`."""
    kinds = [spec.is_moe_layer(layer) for layer in range(spec.num_layers)]
    windowed = [w for w in map(spec.window, range(spec.num_layers)) if w is not None]
    moe, mla = spec.moe, spec.mla
    return Dims(
        layers=spec.num_layers,
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_heads if mla else spec.num_kv_heads,
        qk_dim=spec.head_dim,
        v_dim=mla.v_head_dim if mla else spec.head_dim,
        q_rank=(mla.q_lora_rank or 0) if mla else 0,
        kv_rank=mla.kv_lora_rank if mla else 0,
        rope_dim=mla.qk_rope_head_dim if mla else 0,
        ffn=spec.ffn_size,
        up_mats=2 if spec.gated else 1,
        vocab=spec.vocab_size,
        tied=float(spec.tied_embeddings),
        window=windowed[0] if windowed else 0,
        window_share=len(windowed) / spec.num_layers,
        moe_layers=sum(kinds),
        dense_front=kinds.index(True) if any(kinds) else 0,
        experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert_ffn=moe.expert_ffn_size if moe else 0,
        shared_ffn=moe.shared_ffn_size if moe else 0,
        top_groups=moe.top_groups if moe and moe.num_groups > 1 else 0,
        mtp_layers=spec.mtp_layers,
        learned_positions=spec.max_positions if spec.positions == "learned" else 0,
        norm_params=2 if spec.norm == "layernorm" else 1,
        bias=float(spec.mlp_bias),
        expert_bias=float(spec.moe is not None and spec.mlp_bias),
    )


def stack(many: Sequence[Dims]) -> Dims:
    """One `Dims` of arrays with an entry for each of `many`."""
    return Dims(**{f.name: np.array([getattr(d, f.name) for d in many], float) for f in fields(Dims)})
