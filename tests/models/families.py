"""Tiny random models of each family, ours beside transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from bessemer.core.hf_config import spec_from_config
from bessemer.core.model import ModelSpec
from bessemer.models.build import build
from bessemer.models.decoder import Decoder
from bessemer.models.hf import import_hf

VOCAB, SEQ = 97, 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# no balance loss: transformers adds one only where asked, and over all layers together
_MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.0}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "aux_loss_alpha": 0.0,
    "n_routed_experts": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-6,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
_YARN |= {"mscale": 0.8, "mscale_all_dim": 0.6}
_GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 18, "rope_parameters": _YARN}
_NO_MTP = {"num_nextn_predict_layers": 0}  # transformers has no prediction modules
MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 6, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0},
    ),
    "qwen2-moe": ("Qwen2MoeConfig", {**_SIZES, **_MOE, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_SIZES, **_MOE, "num_experts": 8, "head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "deepseek-v2-lite": ("DeepseekV2Config", {**_DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {**_DEEPSEEK, **_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek-v3": ("DeepseekV3Config", {**_DEEPSEEK, **_GROUPS, **_NO_MTP}),
    "deepseek-v3-wide-values": (
        "DeepseekV3Config",
        {**_DEEPSEEK, **_NO_MTP, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False}
        | {"v_head_dim": 40},
    ),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": False}),
    "llama-biases-tied": (
        "LlamaConfig",
        {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3-rope": (
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 500000.0}},
    ),
    "linear-rope": (
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "dynamic-rope": (
        "LlamaConfig",
        {
            **_SIZES,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "yarn-rope": (
        "LlamaConfig",
        {
            **_SIZES,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1e4,
            },
        },
    ),
    "mistral-window": ("MistralConfig", {**_SIZES, "sliding_window": 9}),
    "qwen2": ("Qwen2Config", {**_SIZES}),
    "qwen2-window": (
        "Qwen2Config",
        {**_SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 24}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0}
        | {"embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    **MOE_CASES,
}


def peer(case: str) -> Any:
    """transformers' model with random weights, norms and biases included; SDPA, float32."""
    kind, fields = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**fields)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one_dim = parameter.dim() == 1
            parameter.normal_(1.0 if one_dim and "bias" not in name else 0.0, 0.2 if one_dim else 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
    return model.eval()


def ours_from(peer_model: Any, folder: Path) -> Decoder:
    """Our model with the peer's weights, by way of the files that it saves."""
    peer_model.save_pretrained(folder)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    model = build(spec, seed=0)
    import_hf(model, folder)
    return model


def peer_gradients(peer_model: Any) -> dict[str, torch.Tensor]:
    """transformers' gradients by the names of its files; it holds the experts of a layer as two packed parameters."""
    found = {}
    mixtral = peer_model.config.model_type == "mixtral"
    for name, parameter in peer_model.named_parameters():
        stem, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not stem.endswith(".experts"):
            found[name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name] = parameter.grad
            continue
        stem = stem.replace(".mlp.", ".block_sparse_moe.") if mixtral else stem
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        parts = {down: parameter.grad}
        if last == "gate_up_proj":
            parts = dict(zip((gate, up), parameter.grad.chunk(2, 1), strict=True))
        for part, stack in parts.items():
            found |= {f"{stem}.{expert}.{part}.weight": matrix for expert, matrix in enumerate(stack)}
    return found


def tokens(batch: int = 2, seq: int = SEQ, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


TINY_LLAMA = ModelSpec(
    family="llama",
    vocab_size=31,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=24,
    max_positions=32,
    tied_embeddings=True,
)
