"""config.json to `ModelSpec` and back: through transformers' own classes, in old and new form, and what is refused."""

import json

import pytest

from bessemer.core.errors import ConfigError
from bessemer.core.hf_config import DENSE_FAMILIES, FAMILIES, config_from_spec, spec_from_config
from bessemer.core.presets import PRESETS, preset

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}
SIZES = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads n_embd n_layer
n_head num_experts num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size q_lora_rank kv_lora_rank
n_shared_experts shared_expert_intermediate_size num_nextn_predict_layers"""
SCALED = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def problems(config):
    with pytest.raises(ConfigError) as caught:
        spec_from_config(config)
    return caught.value.problems


def one_problem(config):
    found = problems(config)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_of_every_preset(name):
    spec = preset(name)
    config = json.loads(json.dumps(config_from_spec(spec)))
    assert spec_from_config(config) == spec


@pytest.mark.parametrize("name", [n for n in PRESETS if preset(n).family not in ("kimi_k2",)])
def test_round_trip_through_transformers(name):
    """transformers reads what is written, and what it writes itself is read back: its form has rope_parameters."""
    transformers = pytest.importorskip("transformers")
    spec = preset(name)
    theirs = transformers.AutoConfig.for_model(**config_from_spec(spec))
    assert theirs.model_type == spec.family
    assert spec_from_config(json.loads(theirs.to_json_string(use_diff=False))) == spec


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("kimi_k2", "deepseek")])
def test_defaults_are_those_of_transformers(family):
    """Every key that transformers' class fills in by itself may be left out, and means the same then."""
    transformers = pytest.importorskip("transformers")
    needed = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}
    full = json.loads(transformers.AutoConfig.for_model(family, **needed).to_json_string(use_diff=False))
    bare = {key: full[key] for key in SIZES.split() if key in full}
    assert spec_from_config(bare) == spec_from_config(full)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("form", ["old", "new", "type"])
def test_rope_in_all_its_forms(kind, form):
    scaling = dict(SCALED[kind])
    if form == "new":
        config = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default", **scaling}}
    else:
        if form == "type" and scaling:
            scaling["type"] = scaling.pop("rope_type")
        config = {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling or None}
    spec = spec_from_config(config)
    assert (spec.rope.kind, spec.rope.theta) == (kind, 5e5)
    assert spec.rope.factor == scaling.get("factor")
    assert spec_from_config(config_from_spec(spec)) == spec
    if kind == "yarn":
        assert (spec.rope.beta_fast, spec.rope.beta_slow, spec.rope.truncate) == (32.0, 1.0, False)
        assert spec.rope.original_max_positions == 64


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("family", [f for f in DENSE_FAMILIES if f != "gpt2"])
def test_transformers_understands_the_rope_that_is_written(kind, family):
    transformers = pytest.importorskip("transformers")
    spec = spec_from_config({**LLAMA, "model_type": family, "rope_theta": 3e4, "rope_scaling": SCALED[kind] or None})
    theirs = transformers.AutoConfig.for_model(**config_from_spec(spec)).rope_parameters
    assert theirs["rope_theta"] == 3e4
    assert theirs["rope_type"] == ("default" if kind == "none" else kind)
    assert theirs.get("factor") == spec.rope.factor


def test_layers_of_a_qwen_window():
    by_number = spec_from_config({**QWEN, "max_window_layers": 2})
    assert [by_number.window(i) for i in range(3)] == [None, None, 16]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    by_name = spec_from_config({**QWEN, "layer_types": types})
    assert [by_name.window(i) for i in range(3)] == [16, None, 16]
    assert config_from_spec(by_name)["layer_types"] == types
    unused = spec_from_config({**QWEN, "use_sliding_window": False})
    assert (unused.sliding_window, unused.full_attention_layers) == (None, ())


def test_an_absent_window_of_mistral_is_not_a_null_one():
    mistral = {**LLAMA, "model_type": "mistral"}
    assert spec_from_config(mistral).sliding_window == 4096  # transformers' default
    assert spec_from_config({**mistral, "sliding_window": None}).sliding_window is None


def test_dense_layers_of_a_sparse_model():
    moe = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 16}
    spec = spec_from_config({**moe, "model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 1})
    assert [spec.is_moe_layer(i) for i in range(3)] == [False, True, True]
    spec = spec_from_config({**moe, "model_type": "qwen3_moe", "decoder_sparse_step": 2})
    assert [spec.is_moe_layer(i) for i in range(3)] == [False, True, False]
    v3 = preset("deepseek-v3")
    assert [v3.is_moe_layer(i) for i in (0, 2, 3, 60)] == [False, False, True, True]


def test_how_experts_and_predictions_are_trained():
    """Keys of our own, which transformers carries along; absent they take the defaults and aren't written."""
    plain = config_from_spec(preset("deepseek-v3"))
    own = {"router_z_loss_coef": 0.001, "router_bias_rate": 0.005, "mtp_loss_weight": 0.1}
    assert not own.keys() & plain.keys()
    spec = spec_from_config({**plain, **own})
    assert (spec.moe.z_loss_coef, spec.moe.bias_rate, spec.mtp_loss_weight) == (0.001, 0.005, 0.1)
    assert config_from_spec(spec) == {**plain, **own}
    assert preset("deepseek-v3").moe.bias_rate == 0.001
    mixtral = config_from_spec(preset("mixtral-8x7b"))
    assert spec_from_config({**mixtral, "router_z_loss_coef": 0.01}).moe.z_loss_coef == 0.01
    assert one_problem({**mixtral, "router_bias_rate": 0.01}).where == "model.router_bias_rate"


def test_biases_by_family():
    assert spec_from_config({**LLAMA, "attention_bias": True}).o_bias
    qwen2 = spec_from_config({**LLAMA, "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    gpt2 = spec_from_config(
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_inner": None}
    )
    assert (gpt2.qkv_bias, gpt2.o_bias, gpt2.mlp_bias, gpt2.ffn_size, gpt2.norm) == (True, True, True, 256, "layernorm")


def test_two_names_of_one_key():
    names = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    assert spec_from_config({**names, "model_type": "gpt2"}).hidden_size == 64
    problem = one_problem({**names, "n_embd": 32, "model_type": "gpt2"})
    assert "two names" in problem.why


def test_bookkeeping_of_a_checkpoint_is_read_over():
    extra = {"torch_dtype": "bfloat16", "transformers_version": "4.40", "use_cache": True, "bos_token_id": 1}
    extra |= {"attention_dropout": 0.1, "architectures": ["LlamaForCausalLM"], "quantization_config": None}
    assert spec_from_config({**LLAMA, **extra}) == spec_from_config(LLAMA)
    assert spec_from_config({**LLAMA, "something_unset": None}) == spec_from_config(LLAMA)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_size(key):
    problem = one_problem({k: v for k, v in LLAMA.items() if k != key})
    assert (problem.code, problem.where) == ("model-missing", f"model.{key}")


@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        ({"model_type": "gemma"}, "model-family", "model_type"),
        ({"model_type": None}, "model-family", "model_type"),
        ({"hidden_act": "gelu"}, "model-unsupported", "hidden_act"),
        ({"mystery_gate": True}, "model-key", "mystery_gate"),
        ({"num_heads": 4}, "model-key", "num_heads"),
        ({"hidden_size": 64.0}, "model-value", "hidden_size"),
        ({"hidden_size": True}, "model-value", "hidden_size"),
        ({"num_hidden_layers": 0}, "model-value", "num_hidden_layers"),
        ({"rms_norm_eps": "1e-5"}, "model-value", "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "model-value", "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "model-heads", "num_key_value_heads"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "model-heads", "num_attention_heads"),
        ({"head_dim": 15}, "model-heads", "head_dim"),
        ({"add_cross_attention": True}, "model-unsupported", "add_cross_attention"),
        ({"partial_rotary_factor": 0.5}, "model-unsupported", "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "model-unsupported", "rope_scaling.type"),
        ({"rope_scaling": {"type": "linear"}}, "model-missing", "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "model-key", "rope_scaling.x"),
        ({"rope_scaling": 4}, "model-value", "rope_scaling"),
        ({"rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e4}}, "model-value", "rope_theta"),
        ({"rope_scaling": SCALED["linear"], "rope_parameters": SCALED["linear"]}, "model-value", "rope_scaling"),
    ],
)
def test_what_would_change_the_function_is_refused(change, code, key):
    problem = one_problem({**LLAMA, **change})
    assert (problem.code, problem.where) == (code, f"model.{key}")
    assert problem.fix


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_qwen_contradictions(change, key):
    assert one_problem({**QWEN, **change}).where == f"model.{key}"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_group": 7}, "n_group"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ],
)
def test_deepseek_contradictions(change, key):
    assert one_problem({**config_from_spec(preset("deepseek-v3")), **change}).where == f"model.{key}"


def test_a_query_rank_must_be_said():
    config = config_from_spec(preset("deepseek-v2-lite"))
    assert config.pop("q_lora_rank") is None
    assert one_problem(config).code == "model-missing"


def test_all_problems_are_reported_at_once():
    found = problems({**LLAMA, "hidden_act": "relu", "vocab_size": -1, "rope_scaling": {"type": "su"}, "extra": 1})
    assert {p.where for p in found} == {
        "model.hidden_act",
        "model.vocab_size",
        "model.rope_scaling.type",
        "model.extra",
    }


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"head_dim": 15}, "model.head_dim = 16"),
        ({"hidden_act": "relu"}, 'model.hidden_act = "silu", "swish"'),
        ({"hidden_size": 0}, "model.hidden_size = a whole number of at least 1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "model.rope_scaling.factor = N"),
    ],
)
def test_a_fix_names_the_key_with_its_table(change, fix):
    assert fix in [p.fix for p in problems({**LLAMA, **change})]
