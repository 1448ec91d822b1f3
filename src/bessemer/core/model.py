"""`ModelSpec`: what a model is, independent of how it is trained, stored or laid out.

Field names follow the field's usual terms; `hf_config.py` maps Hugging Face's `config.json` to and from it,
`counts.py` derives parameters and FLOPs from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Frozen", "MlaSpec", "ModelSpec", "MoeSpec", "RopeSpec"]


class Frozen(BaseModel):
    """Base of all configuration objects: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=False)


class RopeSpec(Frozen):
    """Rotary position embedding. `kind` names the frequency scaling; fields that a kind doesn't use stay None.

    none: inv_freq_i = theta^(-2i/d).  linear: positions / factor.  dynamic: NTK-aware, theta grows with length.
    yarn: Peng et al. 2023 (arXiv 2309.00071).  llama3: Meta's three-band rule (Llama 3.1 release).
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "dynamic", "yarn", "llama3"] = "none"
    factor: float | None = None
    original_max_positions: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    mscale: float | None = None  # yarn, DeepSeek
    mscale_all_dim: float | None = None  # yarn, DeepSeek
    attention_factor: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    interleaved: bool = False  # pairs are (0,1), (2,3) ... (DeepSeek), not (0,d/2), (1,d/2+1) ...


class MoeSpec(Frozen):
    """Mixture of experts in the feed-forward part. Layers before `first_dense_layers` stay dense, as do those
    whose index isn't a multiple of `every` (1: each layer is MoE) and those listed in `dense_layers`."""

    num_experts: int
    top_k: int
    expert_ffn_size: int
    num_shared_experts: int = 0
    shared_ffn_size: int = 0  # width of all shared experts together; 0: none
    shared_gate: bool = False  # Qwen2-MoE: a sigmoid gate on the shared expert
    first_dense_layers: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False  # DeepSeek-V3: auxiliary-loss-free balancing, a bias used for selection only
    num_groups: int = 1  # node-limited routing: groups of experts
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    norm_top_k: bool = False
    routed_scale: float = 1.0
    aux_loss_coef: float = 0.0
    aux_loss_per_sequence: bool = False  # DeepSeek: balance is asked of each sequence, not of the micro-batch
    z_loss_coef: float = 0.0  # on the squared log-sum-exp of the router's logits
    bias_rate: float = 0.001  # what the selection bias moves by at each step


class MlaSpec(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). `q_lora_rank` None: no query compression."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class ModelSpec(Frozen):
    """A decoder-only transformer: dense, mixture-of-experts (`moe`) and/or latent attention (`mla`)."""

    family: str  # Hugging Face's model_type: llama, mistral, qwen2, qwen3, gpt2, mixtral, qwen3_moe, deepseek_v3 ...
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with `mla`: qk_nope_head_dim + qk_rope_head_dim
    ffn_size: int  # of the dense layers
    max_positions: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"  # the gelus are ungated, one up projection
    positions: Literal["rope", "learned"] = "rope"
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k (Qwen3)
    sliding_window: int | None = None  # a query sees this many positions, itself included
    full_attention_layers: tuple[int, ...] = ()  # layers that ignore sliding_window (Qwen2's max_window_layers)
    tied_embeddings: bool = False
    init_std: float = 0.02
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    mtp_layers: int = 0  # multi-token prediction modules (DeepSeek-V3), not counted in num_layers
    mtp_loss_weight: float = 0.3  # of the mean of their losses, beside the model's own

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate projection beside the up projection."""
        return self.activation == "swiglu"

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward part of layer `layer` (from 0) is a mixture of experts."""
        moe = self.moe
        if moe is None or layer < moe.first_dense_layers or layer in moe.dense_layers:
            return False
        return layer % moe.every == 0

    def window(self, layer: int) -> int | None:
        """The sliding window of layer `layer`, or None where it attends to everything before it."""
        return None if layer in self.full_attention_layers else self.sliding_window
