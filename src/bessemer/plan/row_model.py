"""Cells of a measured row -> the model's dims, the step time and the memory; see `bessemer.plan.rows`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from bessemer.plan.dims import Dims

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SkipError", "cell_dims", "number", "peak_memory", "step_time"]

# Published facts of models whose rows leave columns empty, by what the model's name starts with (lower case, letters
# and digits only): xAI's Grok-1 release; Meta's Llama 4 model card (every second layer MoE, expert and shared expert
# 8192 wide); config.json of the others. Values stand where the row has none.
_KNOWN: tuple[tuple[str, dict[str, float]], ...] = (
    ("grok1", {"num_experts": 8, "topk": 2, "moe_ffn": 32768, "head_dim": 128, "dense_layers": 0}),
    ("llama4maverick", {"moe_ffn": 8192, "shared_expert_ffn": 8192, "moe_every": 2, "head_dim": 128}),
    ("llama4scout", {"num_experts": 16, "topk": 1, "moe_ffn": 8192, "shared_expert_ffn": 8192, "head_dim": 128}),
    ("qwen3", {"vocab": 151936}),
    ("gptoss", {"vocab": 201088, "window": 128, "window_share": 0.5}),
    (
        "mixtral8x22b",
        {
            "layers": 56,
            "hidden": 6144,
            "heads": 48,
            "kv_heads": 8,
            "vocab": 32768,
            "num_experts": 8,
            "topk": 2,
            "moe_ffn": 16384,
        },
    ),
    (
        "mixtral8x7b",
        {
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "vocab": 32000,
            "num_experts": 8,
            "topk": 2,
            "moe_ffn": 14336,
        },
    ),
    ("nemotron8b", {"vocab": 256000, "kv_heads": 32}),
    ("nemotron22b", {"vocab": 256000, "kv_heads": 48}),
)


class SkipError(Exception):
    """Carries the reason for which a row is left out."""


def number(cells: Mapping[str, str], name: str) -> float | None:
    text = cells.get(name, "").replace(",", "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise SkipError(f"{name} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise SkipError(f"{name} is no sensible number")
    return value


def _vocab(cells: Mapping[str, str], known: Mapping[str, float], assumed: list[str]) -> float:
    vocab = number(cells, "vocab") or known.get("vocab")
    if vocab is None:
        vocab = 0.0 if "one layer" in cells.get("task", "") else 51200.0
        if vocab:
            assumed.append("vocab 51200")
    return vocab


def _predictions(cells: Mapping[str, str], name: str, layers: float) -> float:
    """DeepSeek-V3's multi-token prediction module: trained in Megatron-Bridge's runs unless the row says without."""
    bridge = "bridge" in cells.get("framework", "").lower()
    without = "w/o mtp" in cells.get("model", "").lower()
    return float(name.startswith("deepseekv3") and layers >= 61 and bridge and not without)


def cell_dims(cells: Mapping[str, str], assumed: list[str]) -> Dims:
    name = re.sub(r"[^a-z0-9]", "", cells.get("model", "").lower())
    known = next((facts for start, facts in _KNOWN if name.startswith(start)), {})

    def get(column: str, default: float | None = None) -> float:
        value = number(cells, column)
        if value is None and column in known:
            assumed.append(f"{column} {known[column]:g} (published)")
            return known[column]
        if value is None and default is None:
            raise SkipError("architecture not printed")
        return value if value is not None else float(default or 0)

    hidden, heads = get("hidden"), number(cells, "heads") or known.get("heads")
    if heads is None:
        heads = hidden // 128
        assumed.append(f"heads {heads:g} (hidden / 128)")
    layers = get("layers")
    kv = number(cells, "kv_heads") or known.get("kv_heads") or heads
    head_dim = number(cells, "head_dim") or known.get("head_dim") or hidden / heads
    experts = get("num_experts", 0)
    gated = cells.get("ffn_gated", "") == "yes" or (experts > 0 and cells.get("ffn_gated", "") != "no")
    moe_ffn = number(cells, "moe_ffn") or known.get("moe_ffn") or 0.0
    ffn = number(cells, "ffn") or (0.0 if moe_ffn else 4 * hidden)
    if experts and not moe_ffn:
        moe_ffn = ffn
    if not cells.get("ffn") and not moe_ffn:
        assumed.append("ffn 4 x hidden")
    dense = get("dense_layers", 0)
    every = known.get("moe_every", 1)
    rank = {k: float(v) for k, v in re.findall(r"(\w+)=(\d+)", cells.get("mla", ""))}
    return Dims(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if rank else kv,
        qk_dim=rank.get("qk_nope", 0) + rank.get("qk_rope", 0) if rank else head_dim,
        v_dim=rank.get("v", head_dim) if rank else head_dim,
        q_rank=rank.get("q_lora", 0),
        kv_rank=rank.get("kv_lora", 0),
        rope_dim=rank.get("qk_rope", 0),
        ffn=ffn,
        up_mats=2 if gated else 1,
        vocab=_vocab(cells, known, assumed),
        tied=float("bloom" in cells["source_id"].lower() and not gated),
        window=known.get("window", 0),
        window_share=known.get("window_share", 0),
        moe_layers=(layers - dense) / every if experts else 0,
        dense_front=dense if experts else 0,
        experts=experts,
        top_k=get("topk", 0) if experts else 0,
        expert_ffn=moe_ffn if experts else 0,
        shared_ffn=(number(cells, "shared_expert_ffn") or known.get("shared_expert_ffn", 0)) if experts else 0,
        top_groups=4 if rank and experts >= 256 else 0,
        mtp_layers=_predictions(cells, name, layers),
        learned_positions=0,
        norm_params=1 if gated else 2,
        bias=0,
        expert_bias=float(name.startswith("gptoss")),
    )


def step_time(cells: Mapping[str, str], dims: Dims, batch: float, seq: float, assumed: list[str]) -> float | None:
    """Printed, else from tokens/s, else from the rate in model FLOPs, with attention counted in full."""
    step, tokens, gpus = number(cells, "step_time_s"), number(cells, "tokens_per_s_per_gpu"), number(cells, "n_gpus")
    if step:
        return step
    if tokens and gpus:
        return batch * seq / (tokens * gpus)
    rate, share = number(cells, "tflops_per_gpu"), number(cells, "mfu_pct")
    if not rate and share and "989" in cells.get("flops_convention", ""):
        rate = share / 100 * 989.5
    if not rate or not gpus:
        return None
    causal = _counts_causal(cells)
    assumed.append(f"step time from model FLOPs with {'causal' if causal else 'full'} attention")
    layer = float(dims.attention_params + dims.latent_params)
    dense = (dims.layers - dims.moe_layers) * dims.dense_params
    active = (dims.up_mats + 1) * dims.hidden * (dims.top_k * dims.expert_ffn + dims.shared_ffn)
    weights = dims.layers * layer + dense + dims.moe_layers * active + dims.hidden * dims.vocab
    attention = dims.layers * seq * dims.heads * (dims.qk_dim + dims.v_dim) * (0.5 if causal else 1.0)
    return float(batch * seq * (6 * weights + 6 * attention) / (rate * 1e12 * gpus))


def _counts_causal(cells: Mapping[str, str]) -> bool:
    """Whether the source's model FLOPs count half of the attention; Megatron-Core does since 2025."""
    text = cells.get("flops_convention", "").lower()
    if "full" in text or "non-causal" in text or "989" in text:  # papers' MFU counts it in full
        return False
    if "causal" in text:
        return True
    return "megatron" in cells.get("framework", "").lower() and (number(cells, "year") or 0) >= 2025


def peak_memory(cells: Mapping[str, str]) -> float | None:
    value = number(cells, "peak_mem")
    return (
        None if value is None else value * {"GiB": 2**30, "GB": 1e9, "MiB": 2**20}.get(cells.get("mem_unit", ""), 2**30)
    )
