"""`ModelSpec` from a Hugging Face config.json, for the families listed in `FAMILIES`.

An absent key takes the default of transformers' configuration class of that family, except for the sizes, which must
be there. A key or value that would change the function and isn't understood is refused; see `hf_keys.HARMLESS` for
what is read over. `rope_scaling` with `rope_theta` (transformers 4) and `rope_parameters` (5) are both read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bessemer.core.errors import ConfigError
from bessemer.core.hf_keys import HARMLESS, REQUIRED, KeyReader
from bessemer.core.hf_rope import read_rope
from bessemer.core.model import MlaSpec, ModelSpec, MoeSpec
from bessemer.core.problem import Problem, nearest

__all__ = ["DENSE_FAMILIES", "FAMILIES", "spec_from_config"]

SILU: Mapping[str, Literal["swiglu"]] = {"silu": "swiglu", "swish": "swiglu"}
GELUS: Mapping[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


MAX_LAYERS = 100_000
"""Far beyond any model: more is a slip, and every layer is visited when parameters are counted."""


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama. `eps`, `positions`, `kv_heads`, `head_dim`, `theta`: transformers' defaults."""

    bias: Literal["none", "attention", "qkv", "qkv_flag"] = "none"  # attention: one flag for q, k, v and o
    mlp_bias: bool = False  # whether the key mlp_bias exists
    qk_norm: bool = False
    window: Literal["none", "all", "layers"] = "none"  # all: every layer; layers: by layer_types or max_window_layers
    moe: Literal["mixtral", "qwen", "deepseek"] | None = None
    mla: bool = False
    sigmoid_router: bool = False  # DeepSeek-V3's scoring and selection bias
    eps: float = 1e-6
    positions: int = 2048
    theta: float = 10000.0
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / heads
    window_default: int | None = None  # where the key sliding_window is absent


FAMILIES: Mapping[str, Family] = {
    "llama": Family(bias="attention", mlp_bias=True),
    "mistral": Family(window="all", window_default=4096, positions=131072, kv_heads=8),
    "qwen2": Family(bias="qkv", window="layers", positions=32768),
    "qwen3": Family(bias="attention", qk_norm=True, window="layers", positions=32768, head_dim=128),
    "gpt2": Family(eps=1e-5, positions=1024),
    "mixtral": Family(window="all", moe="mixtral", eps=1e-5, positions=131072, theta=1e6, kv_heads=8),
    "qwen2_moe": Family(bias="qkv_flag", moe="qwen", positions=32768),
    "qwen3_moe": Family(bias="attention", qk_norm=True, window="all", moe="qwen", positions=32768, kv_heads=4),
    "deepseek": Family(moe="deepseek"),
    "deepseek_v2": Family(moe="deepseek", mla=True),
    "deepseek_v3": Family(moe="deepseek", mla=True, sigmoid_router=True, positions=4096),
    "kimi_k2": Family(moe="deepseek", mla=True, sigmoid_router=True, positions=4096),
}
"""The supported values of `model_type`."""
DENSE_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.moe is None)

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_EXPERT_NAMES = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen": {"num_local_experts": "num_experts"},
    "deepseek": {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
}


def spec_from_config(
    config: Mapping[str, Any],
    *,
    place: Callable[[str], str] = "model.{}".format,
    own: Collection[str] = (),
    source: str = "the model",
) -> ModelSpec:
    """The model that a config.json describes. ConfigError with every problem found.

    place: the dotted field to name for a key. own: keys that a job gives itself, where a harmless key is an error too,
    since it would have no effect.
    """
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or family is None:
        raise ConfigError([_unknown_family(name, place)], source)
    aliases = _GPT2_NAMES if name == "gpt2" else _EXPERT_NAMES.get(family.moe or "", {})
    keys = KeyReader(config, place, aliases)
    keys.ignore("model_type")
    keys.only("is_encoder_decoder", False)
    keys.only("add_cross_attention", False)
    keys.only("tie_encoder_decoder", False)
    keys.only("is_decoder", False, True)
    keys.only("pruned_heads", {})
    fields = _gpt2_fields(keys) if name == "gpt2" else _llama_fields(keys, family)
    _check_heads(keys, fields, name)
    keys.finish(HARMLESS, own)
    if keys.problems:
        raise ConfigError(keys.problems, source)
    return ModelSpec(family=name, **fields)


def _unknown_family(name: object, place: Callable[[str], str]) -> Problem:
    supported = ", ".join(FAMILIES)
    near = nearest(name, FAMILIES) if isinstance(name, str) else []
    return Problem(
        code="model-family",
        where=place("model_type"),
        what="model_type is missing" if name is None else f"the model family {name!r} is not supported",
        why=f"supported families: {supported}",
        fix=f'model.family = "{near[0]}"' if near else f"model.family = one of {supported}",
    )


def _gpt2_fields(keys: KeyReader) -> dict[str, Any]:
    hidden, heads = keys.integer("n_embd"), keys.integer("n_head")
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": keys.integer("n_layer", most=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(keys, "n_embd", hidden, "n_head", heads),
        "ffn_size": keys.integer_or_none("n_inner", 4 * hidden),
        "max_positions": keys.integer("n_positions", 1024),
        "norm": "layernorm",
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "activation": keys.choice("activation_function", "gelu_new", GELUS),
        "positions": "learned",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "init_std": keys.number("initializer_range", 0.02),
    }


def _llama_fields(keys: KeyReader, family: Family) -> dict[str, Any]:
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers", most=MAX_LAYERS)
    positions = keys.integer("max_position_embeddings", family.positions)
    fields: dict[str, Any] = {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": keys.integer_or_none("num_key_value_heads", heads, absent=family.kv_heads or heads),
        "max_positions": positions,
        "norm_eps": keys.number("rms_norm_eps", family.eps),
        "activation": keys.choice("hidden_act", "silu", SILU),
        "qk_norm": family.qk_norm,
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "init_std": keys.number("initializer_range", 0.02),
        "mtp_layers": keys.integer("num_nextn_predict_layers", 0, least=0) if family.sigmoid_router else 0,
        "mtp_loss_weight": keys.number("mtp_loss_weight", 0.3) if family.sigmoid_router else 0.3,
    }
    interleaved = family.mla and (keys.flag("rope_interleave", True) if family.sigmoid_router else True)
    fields["rope"] = read_rope(keys, family.theta, positions, interleaved)
    fields |= _mla_fields(keys, heads) if family.mla else {"head_dim": _own_head_dim(keys, family, hidden, heads)}
    fields |= _bias_fields(keys, family)
    fields |= _window_fields(keys, family, layers)
    if family.moe is not None:
        fields["moe"] = _moe(keys, family, layers)
    # Mixtral prints its experts' width as intermediate_size: it has no dense layer that would need another.
    fields["ffn_size"] = keys.integer("intermediate_size")
    return fields


def _own_head_dim(keys: KeyReader, family: Family, hidden: int, heads: int) -> int:
    given = keys.integer_or_none("head_dim", family.head_dim)
    return given or _head_dim(keys, "hidden_size", hidden, "num_attention_heads", heads)


def _head_dim(keys: KeyReader, hidden_key: str, hidden: int, heads_key: str, heads: int) -> int:
    if hidden % heads and not keys.wrong & {hidden_key, heads_key}:
        fits = [h for h in range(1, 257) if hidden % h == 0 and hidden // h >= 16]
        keys.report(
            "model-heads",
            heads_key,
            f"{hidden_key} = {hidden} doesn't divide into {heads} heads",
            "without head_dim, a head is hidden size / heads wide",
            f"{heads_key} = {', '.join(map(str, fits[-6:])) or 1}",
        )
    return max(hidden // heads, 1)


def _mla_fields(keys: KeyReader, heads: int) -> dict[str, Any]:
    nope, rope = keys.integer("qk_nope_head_dim", 128), keys.integer("qk_rope_head_dim", 64)
    keys.only("num_key_value_heads", heads)
    keys.only("head_dim", rope, nope + rope)  # derived: transformers writes them beside the parts
    keys.only("qk_head_dim", nope + rope)
    mla = MlaSpec(
        q_lora_rank=keys.integer_or_none("q_lora_rank", absent=REQUIRED),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.integer("v_head_dim", 128),
    )
    return {"mla": mla, "head_dim": nope + rope, "num_kv_heads": heads}


def _bias_fields(keys: KeyReader, family: Family) -> dict[str, Any]:
    if family.bias == "attention":
        both = keys.flag("attention_bias", False)
        bias = {"qkv_bias": both, "o_bias": both}
    elif family.bias == "qkv_flag":
        bias = {"qkv_bias": keys.flag("qkv_bias", True)}
    else:
        keys.only("attention_bias", False)
        bias = {"qkv_bias": family.bias == "qkv"}
    if family.mlp_bias:
        return {**bias, "mlp_bias": keys.flag("mlp_bias", False)}
    keys.only("mlp_bias", False)
    return bias


def _window_fields(keys: KeyReader, family: Family, layers: int) -> dict[str, Any]:
    """`use_sliding_window` false means none, as in transformers; a window acts on all layers, or on those listed."""
    if family.window == "none":
        keys.only("use_sliding_window", False)
        keys.ignore("sliding_window", "max_window_layers")
        keys.words("layer_types", ("full_attention",), layers)
        return {}
    if family.window == "all" and family.moe != "qwen":
        # An explicit null is a model without a window; only an absent key takes transformers' default.
        return {"sliding_window": keys.integer_or_none("sliding_window", absent=family.window_default)}
    used = keys.flag("use_sliding_window", False)
    window = keys.integer_or_none("sliding_window", absent=4096) if used else None
    keys.ignore("sliding_window", "max_window_layers")
    if family.window == "all":
        return {"sliding_window": window}
    types = keys.words("layer_types", ("full_attention", "sliding_attention"), layers)
    if types is None:
        full = tuple(range(min(keys.integer("max_window_layers", 28, least=0), layers)))
    else:
        full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    if window is not None:
        return {"sliding_window": window, "full_attention_layers": full}
    if types is not None and len(full) != layers:
        keys.report(
            "model-value",
            "layer_types",
            "layer_types asks for sliding_attention, but there is no sliding window",
            "use_sliding_window is false or sliding_window is null",
            "use_sliding_window = true and sliding_window = N, or model.layer_types all full_attention",
        )
    return {}


def _moe(keys: KeyReader, family: Family, layers: int) -> MoeSpec:
    if family.moe == "mixtral":
        keys.only("router_jitter_noise", 0, 0.0)
        return MoeSpec(
            num_experts=keys.integer("num_local_experts", 8),
            top_k=keys.integer("num_experts_per_tok", 2),
            expert_ffn_size=keys.integer("intermediate_size"),
            norm_top_k=True,
            aux_loss_coef=keys.number("router_aux_loss_coef", 0.001),
            z_loss_coef=keys.number("router_z_loss_coef", 0.0),
        )
    if family.moe == "qwen":
        return _qwen_moe(keys, family, layers)
    return _deepseek_moe(keys, family)


def _qwen_moe(keys: KeyReader, family: Family, layers: int) -> MoeSpec:
    step, listed = keys.integer("decoder_sparse_step", 1), keys.integers("mlp_only_layers")
    shared = 0 if family.qk_norm else keys.integer("shared_expert_intermediate_size")
    return MoeSpec(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        expert_ffn_size=keys.integer("moe_intermediate_size"),
        num_shared_experts=1 if shared else 0,
        shared_ffn_size=shared,
        shared_gate=bool(shared),
        dense_layers=tuple(i for i in range(layers) if i in listed or (i + 1) % step),
        norm_top_k=keys.flag("norm_topk_prob", False),
        aux_loss_coef=keys.number("router_aux_loss_coef", 0.001),
        z_loss_coef=keys.number("router_z_loss_coef", 0.0),
    )


def _deepseek_moe(keys: KeyReader, family: Family) -> MoeSpec:
    width = keys.integer("moe_intermediate_size")
    shared = keys.integer_or_none("n_shared_experts", 0, absent=REQUIRED, least=0) or 0
    groups = keys.integer_or_none("n_group", 1, absent=8 if family.sigmoid_router else 1)
    top_groups = keys.integer_or_none("topk_group", 1, absent=4 if family.sigmoid_router else 1)
    if family.sigmoid_router:
        keys.only("topk_method", "noaux_tc")
        keys.only("scoring_func", "sigmoid")
        grouped = True
    else:
        grouped = keys.choice("topk_method", "greedy", {"greedy": False, "group_limited_greedy": True})
        keys.only("scoring_func", "softmax")
    return MoeSpec(
        num_experts=keys.integer("n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        expert_ffn_size=width,
        num_shared_experts=shared,
        shared_ffn_size=shared * width,
        first_dense_layers=keys.integer("first_k_dense_replace", 3 if family.sigmoid_router else 0, least=0),
        every=keys.integer("moe_layer_freq", 1),
        scoring="sigmoid" if family.sigmoid_router else "softmax",
        selection_bias=family.sigmoid_router,
        num_groups=(groups or 1) if grouped else 1,
        top_groups=(top_groups or 1) if grouped else 1,
        group_score="top2" if family.sigmoid_router else "max",
        norm_top_k=keys.flag("norm_topk_prob", family.sigmoid_router),
        routed_scale=keys.number("routed_scaling_factor", 2.5 if family.sigmoid_router else 1.0),
        aux_loss_coef=keys.number("aux_loss_alpha", 0.001),
        aux_loss_per_sequence=keys.flag("seq_aux", True),
        z_loss_coef=keys.number("router_z_loss_coef", 0.0),
        bias_rate=keys.number("router_bias_rate", 0.001) if family.sigmoid_router else 0.001,
    )


def _check_heads(keys: KeyReader, fields: Mapping[str, Any], name: str) -> None:
    """What must fit together whatever the family: whole groups of heads, even rotary dimensions, enough experts."""
    heads, kv = fields["num_heads"], fields["num_kv_heads"]
    if heads % kv and not keys.wrong & {"num_attention_heads", "num_key_value_heads"}:
        fits = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        what = f"{heads} heads can't share {kv} key/value heads"
        why = "each key/value head serves a whole number of heads"
        keys.report("model-heads", "num_key_value_heads", what, why, f"num_key_value_heads = {fits}")
    mla, moe = fields.get("mla"), fields.get("moe")
    rotary, key = (mla.qk_rope_head_dim, "qk_rope_head_dim") if mla else (fields["head_dim"], "head_dim")
    if name != "gpt2" and rotary % 2 and not keys.wrong & {key, "hidden_size", "num_attention_heads"}:
        why = "rotary embedding turns pairs of dimensions"
        keys.report("model-heads", key, f"a head of {rotary} dimensions is odd", why, f"{key} = {rotary + 1}")
    if moe is None or keys.wrong & {"num_experts", "num_local_experts", "n_routed_experts"}:
        return
    if moe.top_k > moe.num_experts:
        what = f"num_experts_per_tok = {moe.top_k} of {moe.num_experts} experts"
        keys.report(
            "model-experts", "num_experts_per_tok", what, "", f"num_experts_per_tok = {moe.num_experts} or less"
        )
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        what = f"{moe.num_experts} experts in {moe.num_groups} groups, of which {moe.top_groups} are chosen"
        why = "groups hold equally many experts, and no more can be chosen than there are"
        keys.report("model-experts", "n_group", what, why, f"n_group = a divisor of {moe.num_experts}")
