"""Tiny random models of each dense family, ours beside transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from bessemer.core.hf_config import spec_from_config
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
    return model.eval()


def ours_from(peer_model: Any, folder: Path) -> Decoder:
    """Our model with the peer's weights, by way of the files that it saves."""
    peer_model.save_pretrained(folder)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    model = build(spec, seed=0)
    import_hf(model, folder)
    return model


def tokens(batch: int = 2, seq: int = SEQ, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))
