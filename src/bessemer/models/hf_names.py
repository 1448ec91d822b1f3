"""Which tensor of a Hugging Face checkpoint holds which logical tensors, per family."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bessemer.core.errors import RequestError
from bessemer.core.hf_families import FAMILIES
from bessemer.core.model import ModelSpec
from bessemer.models.canonical import shapes

__all__ = [
    "HEADS",
    "SUPPORTED",
    "HfTensor",
    "copies",
    "hf_tensors",
    "is_buffer",
    "is_full_precision",
    "normal_name",
]

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
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
    # multi-token prediction: further layers after the last one
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
}
_MIXTRAL = _LLAMA_LIKE | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
_QWEN2_MOE = _LLAMA_LIKE | {f"mlp.shared.{p}": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}
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
_TABLES = {"gpt2": _GPT2, "mixtral": _MIXTRAL, "qwen2_moe": _QWEN2_MOE}
_SELECTION_BIAS = "e_score_correction_bias"
SUPPORTED = tuple(FAMILIES)
HEADS = "lm_head.weight"

# Constants that older versions of transformers wrote beside the weights: masks and rotation frequencies.
_BUFFERS = re.compile(r"(\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class HfTensor:
    """The tensor `name` is the logical `parts` below each other, turned over if `transposed` (GPT-2's Conv1D); or
    matrix `expert` of the stack that is its one part."""

    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    expert: int | None = None


def hf_tensors(spec: ModelSpec) -> list[HfTensor]:
    """Every tensor of a checkpoint of `spec`, each logical tensor in exactly one of them."""
    if spec.family not in SUPPORTED:
        raise RequestError(
            f"weights of the family {spec.family!r} can't be read or written as a Hugging Face checkpoint",
            code="hf-family",
            fix=f"one of the families {', '.join(SUPPORTED)}",
        )
    groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    tensors = []
    for name, shape in shapes(spec).items():
        if len(shape) == 3:
            stem = _hf_name(spec, name)
            tensors += [HfTensor(stem.format(e), (name,), shape[1:2], shape[1:], expert=e) for e in range(shape[0])]
        else:
            groups.setdefault(_hf_name(spec, name), []).append((name, shape))
    return [_tensor(spec, name, parts) for name, parts in groups.items()] + tensors


def _tensor(spec: ModelSpec, name: str, parts: list[tuple[str, tuple[int, ...]]]) -> HfTensor:
    rows = tuple(shape[0] for _, shape in parts)
    shape = (sum(rows), *parts[0][1][1:])
    transposed = spec.family == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None
    return HfTensor(name, tuple(n for n, _ in parts), rows, shape[::-1] if transposed else shape, transposed)


def _hf_name(spec: ModelSpec, name: str) -> str:
    """The file's name of a logical tensor; of a stack with {} in the place of the expert."""
    table = _TABLES.get(spec.family, _LLAMA_LIKE)
    layers = "transformer.h" if spec.family == "gpt2" else "model.layers"
    stem, kind = name.rsplit(".", 1)
    match = re.match(r"(layers|mtp)\.(\d+)\.(.+)", stem)
    if match is None:
        return f"{table[stem]}.{kind}"
    layer, part = int(match[2]), match[3]
    if match[1] == "mtp":
        layer += spec.num_layers
        if part == "norm":
            return f"{layers}.{layer}.shared_head.norm.{kind}"
    if part == "mlp.router" and kind == "bias":
        return f"{layers}.{layer}.{table[part]}.{_SELECTION_BIAS}"
    return f"{layers}.{layer}.{table[part]}.{kind}"


def copies(spec: ModelSpec) -> dict[str, str]:
    """Names under which a file of a prediction module repeats the model's own tensors, and the names of those."""
    found = {}
    for layer in range(spec.num_layers, spec.num_layers + spec.mtp_layers):
        found[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"model.layers.{layer}.shared_head.head.weight"] = (
            "model.embed_tokens.weight" if spec.tied_embeddings else HEADS
        )
    return found


def is_full_precision(name: str) -> bool:
    """Whether `name` stays float32 in a file of a narrower type: a rounded selection bias would lose its steps."""
    return name.endswith(_SELECTION_BIAS)


def normal_name(spec: ModelSpec, name: str) -> str:
    """The name as above of a stored tensor: GPT-2 checkpoints of the base model lack the `transformer.` prefix."""
    if spec.family == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{name}"
    return name


def is_buffer(name: str) -> bool:
    """Whether `name` is a constant that is no weight of the model (causal masks, rotation frequencies)."""
    return _BUFFERS.search(name) is not None
