"""Which tensor of a Hugging Face checkpoint holds which logical tensors, per dense family."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bessemer.core.errors import RequestError
from bessemer.core.model import ModelSpec
from bessemer.models.canonical import shapes

__all__ = ["HEADS", "SUPPORTED", "HfTensor", "hf_tensors", "is_buffer", "normal_name"]

_LLAMA_LIKE = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT2 = {
    "embed": "transformer.wte",
    "pos_embed": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attn_norm": "ln_1",
    "attn.q": "attn.c_attn",
    "attn.k": "attn.c_attn",
    "attn.v": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
HEADS = "lm_head.weight"

# Constants that older versions of transformers wrote beside the weights: masks and rotation frequencies.
_BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class HfTensor:
    """The tensor `name` is the logical `parts` below each other, turned over if `transposed` (GPT-2's Conv1D)."""

    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool


def hf_tensors(spec: ModelSpec) -> list[HfTensor]:
    """Every tensor of a checkpoint of `spec`, each logical tensor in exactly one of them."""
    if spec.family not in SUPPORTED:
        raise RequestError(
            f"weights of the family {spec.family!r} can't be read or written as a Hugging Face checkpoint",
            code="hf-family",
            fix=f"one of the families {', '.join(SUPPORTED)}",
        )
    groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes(spec).items():
        groups.setdefault(_hf_name(spec, name), []).append((name, shape))
    return [_tensor(spec, name, parts) for name, parts in groups.items()]


def _tensor(spec: ModelSpec, name: str, parts: list[tuple[str, tuple[int, ...]]]) -> HfTensor:
    rows = tuple(shape[0] for _, shape in parts)
    shape = (sum(rows), *parts[0][1][1:])
    transposed = spec.family == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None
    return HfTensor(name, tuple(n for n, _ in parts), rows, shape[::-1] if transposed else shape, transposed)


def _hf_name(spec: ModelSpec, name: str) -> str:
    table, layers = (_GPT2, "transformer.h") if spec.family == "gpt2" else (_LLAMA_LIKE, "model.layers")
    stem, kind = name.rsplit(".", 1)
    match = re.match(r"layers\.(\d+)\.(.+)", stem)
    if match is None:
        return f"{table[stem]}.{kind}"
    return f"{layers}.{match[1]}.{table[match[2]]}.{kind}"


def normal_name(spec: ModelSpec, name: str) -> str:
    """The name as above of a stored tensor: GPT-2 checkpoints of the base model lack the `transformer.` prefix."""
    if spec.family == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{name}"
    return name


def is_buffer(name: str) -> bool:
    """Whether `name` is a constant that is no weight of the model (causal masks, rotation frequencies)."""
    return _BUFFERS.search(name) is not None
