"""The config.json of a `ModelSpec`: what transformers 5.24 loads as the same model and `spec_from_config` reads."""

from __future__ import annotations

from typing import Any

from bessemer.core.hf_families import FAMILIES
from bessemer.core.hf_rope import rope_config
from bessemer.core.model import ModelSpec, MoeSpec

__all__ = ["config_from_spec"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """A config.json for `spec` (its family is `model_type`); dtype, token ids and version are the writer's."""
    head = {"architectures": [_ARCHITECTURES[spec.family]], "model_type": spec.family, "vocab_size": spec.vocab_size}
    return head | (_gpt2(spec) if spec.family == "gpt2" else _llama_like(spec))


def _gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_positions": spec.max_positions,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.ffn_size,
        "activation_function": "gelu_new" if spec.activation == "gelu_tanh" else "gelu",
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embeddings,
        # This model has no dropout; transformers' defaults are 0.1.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama_like(spec: ModelSpec) -> dict[str, Any]:
    family = FAMILIES[spec.family]
    config: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embeddings,
        "attention_dropout": 0.0,
        **rope_config(spec.rope),
    }
    if spec.mla is None:
        config["head_dim"] = spec.head_dim
    else:
        config |= spec.mla.model_dump()
    if family.bias == "attention":
        config["attention_bias"] = spec.qkv_bias
    elif family.bias == "qkv_flag":
        config["qkv_bias"] = spec.qkv_bias
    if family.mlp_bias:
        config["mlp_bias"] = spec.mlp_bias
    if family.sigmoid_router:
        config |= {"rope_interleave": spec.rope.interleaved, "num_nextn_predict_layers": spec.mtp_layers}
    config |= _window(spec)
    if spec.moe is not None:
        config |= _moe(spec, spec.moe) | _training(spec, spec.moe)
    return config


def _training(spec: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    """Our own keys, which say how a model is trained; written where they differ from the defaults only."""
    config: dict[str, Any] = {}
    if moe.z_loss_coef:
        config["router_z_loss_coef"] = moe.z_loss_coef
    if moe.bias_rate != MoeSpec.model_fields["bias_rate"].default:
        config["router_bias_rate"] = moe.bias_rate
    if spec.mtp_loss_weight != ModelSpec.model_fields["mtp_loss_weight"].default:
        config["mtp_loss_weight"] = spec.mtp_loss_weight
    return config


def _window(spec: ModelSpec) -> dict[str, Any]:
    family = FAMILIES[spec.family]
    if family.window == "none":
        return {}
    if family.window == "all" and family.moe != "qwen":
        return {"sliding_window": spec.sliding_window}
    used = spec.sliding_window is not None
    config: dict[str, Any] = {"use_sliding_window": used, "sliding_window": spec.sliding_window}
    if family.window == "layers":
        config["layer_types"] = [
            "full_attention" if spec.window(layer) is None else "sliding_attention" for layer in range(spec.num_layers)
        ]
    return config


def _moe(spec: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    kind = FAMILIES[spec.family].moe
    common = {"num_experts_per_tok": moe.top_k}
    if kind == "mixtral":
        return {**common, "num_local_experts": moe.num_experts, "router_aux_loss_coef": moe.aux_loss_coef}
    if kind == "qwen":
        config = {
            **common,
            "num_experts": moe.num_experts,
            "moe_intermediate_size": moe.expert_ffn_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers),
            "norm_topk_prob": moe.norm_top_k,
            "router_aux_loss_coef": moe.aux_loss_coef,
        }
        return config | ({"shared_expert_intermediate_size": moe.shared_ffn_size} if spec.family == "qwen2_moe" else {})
    if moe.scoring == "sigmoid":
        method = "noaux_tc"
    else:
        method = "group_limited_greedy" if moe.num_groups > 1 else "greedy"
    return {
        **common,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_ffn_size,
        "first_k_dense_replace": moe.first_dense_layers,
        "moe_layer_freq": moe.every,
        "topk_method": method,
        "scoring_func": moe.scoring,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.norm_top_k,
        "routed_scaling_factor": moe.routed_scale,
        "aux_loss_alpha": moe.aux_loss_coef,
        "seq_aux": moe.aux_loss_per_sequence,
    }
