"""Parameter counts against published sizes and against transformers' own modules on the meta device; FLOPs by hand."""

import pytest

from bessemer.core.counts import flops_per_token, mean_keys, parameter_counts
from bessemer.core.hf_config import config_from_spec, spec_from_config
from bessemer.core.presets import PRESETS, preset

EXACT = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "smollm2-135m": 134_515_008,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v2-lite": 15_706_484_224,
}
"""Totals that the published checkpoints of these models have."""


@pytest.mark.parametrize("name", EXACT)
def test_totals_of_published_checkpoints(name):
    assert parameter_counts(preset(name)).total == EXACT[name]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7e9, 12.9e9),  # arXiv 2401.04088
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),  # arXiv 2505.09388
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("deepseek-v2", 236e9, 21e9),  # arXiv 2405.04434
        ("deepseek-v3", 671e9, 37e9),  # arXiv 2412.19437
        ("gpt-3-175b", 175e9, 175e9),  # arXiv 2005.14165
        ("megatron-530b", 529.6e9, 529.6e9),  # arXiv 2104.04473 table 1
        ("megatron-1t", 1008.0e9, 1008.0e9),
    ],
)
def test_published_sizes(name, total, active):
    counts = parameter_counts(preset(name))
    assert counts.total == pytest.approx(total, rel=0.003)
    assert counts.active == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("name", "total", "active"), [("deepseek-v2-lite", 15.7e9, 2.4e9), ("kimi-k2", 1.03e12, 32e9)])
def test_published_active_sizes_without_the_embedding(name, total, active):
    counts = parameter_counts(preset(name))
    assert counts.total == pytest.approx(total, rel=0.005)
    assert counts.active_without_embedding == pytest.approx(active, rel=0.025)


def test_mtp_is_apart_and_close_to_its_published_size():
    counts = parameter_counts(preset("deepseek-v3"))
    assert counts.mtp == pytest.approx(
        11.5e9, rel=0.01
    )  # README_WEIGHTS of DeepSeek-V3, without the joining projection
    # 684.53 B in the published shards: the module's copies of embedding and head, and the fp8 scales, come on top.
    copies = 2 * 129280 * 7168
    assert counts.total_with_mtp + copies == pytest.approx(684.53e9, rel=0.0002)


def test_classes_of_llama_by_hand():
    counts = parameter_counts(preset("llama-3-8b"))
    assert counts.embedding == counts.head == 128256 * 4096
    assert counts.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert counts.dense_ffn == 32 * 3 * 4096 * 14336
    assert counts.norms == 65 * 4096
    assert counts.router == counts.experts == counts.mtp == 0
    assert counts.active == counts.total


def test_deepseek_moe_16b():
    spec = spec_from_config(
        {
            "model_type": "deepseek",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 102400,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        }
    )
    assert parameter_counts(spec).total == pytest.approx(16.4e9, rel=0.003)  # arXiv 2401.06066
    assert parameter_counts(spec).active == pytest.approx(2.8e9, rel=0.02)


SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
GQA = {**SMALL, "num_key_value_heads": 2}
MLA = {**SMALL, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
TINY = {
    "llama": {**GQA, "model_type": "llama"},
    "llama-bias": {**GQA, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "llama-tied": {**GQA, "model_type": "llama", "tie_word_embeddings": True},
    "mistral": {**GQA, "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**GQA, "model_type": "qwen2"},
    "qwen3": {**GQA, "model_type": "qwen3", "head_dim": 32},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 128},
    "mixtral": {**GQA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**GQA, **QWEN_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**GQA, **QWEN_MOE, "model_type": "qwen3_moe", "head_dim": 32, "mlp_only_layers": [2]},
    "qwen3_moe-sparse": {**GQA, **QWEN_MOE, "model_type": "qwen3_moe", "decoder_sparse_step": 2},
    "deepseek_v2": {**MLA, **DEEPSEEK, "model_type": "deepseek_v2", "first_k_dense_replace": 1},
    "deepseek_v2-lite": {**MLA, **DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 1},
    "deepseek_v3": {**MLA, **DEEPSEEK, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
}


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_have_the_tensors_of_transformers(name):
    """The config goes through `ModelSpec` and back, so that reading, writing and counting are all checked."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    spec = spec_from_config(TINY[name])
    config = transformers.AutoConfig.for_model(**config_from_spec(spec))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}  # a tied head is the embedding itself
    assert parameter_counts(spec).total == sum(t.numel() for t in tensors.values())


def test_flops_are_two_per_weight_and_pair():
    spec = preset("llama-3-8b")
    counts, flops = parameter_counts(spec), flops_per_token(spec, 8192)
    assert flops.attention_projections == 2 * counts.attention
    assert flops.dense_ffn == 2 * counts.dense_ffn
    assert flops.head == 2 * counts.head
    assert flops.attention_scores == 32 * 2 * (8193 / 2) * 32 * (128 + 128)
    assert flops.training == 3 * flops.forward
    full = flops_per_token(spec, 8192, attention="full")
    assert full.attention_scores == 32 * 4 * 8192 * 4096  # 4 L S D of the usual formulas
    assert full.head == flops.head


def test_megatron_formula_of_a_whole_step():
    """Narayanan et al. 2021 equation 2, 96 B s l h^2 (1 + s / 6h + V / 16lh), counts recompute: 4/3 of ours."""
    spec, seq = preset("megatron-530b"), 2048
    hidden, layers, vocab = spec.hidden_size, spec.num_layers, spec.vocab_size
    formula = 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    ours = flops_per_token(spec, seq, attention="full")
    recomputed = ours.training + ours.forward - ours.head  # the head isn't computed again
    assert recomputed == pytest.approx(formula, rel=1e-9)


def test_moe_and_latent_attention_count_what_a_token_visits():
    spec = preset("deepseek-v3")
    flops = flops_per_token(spec, 4096)
    assert flops.experts == 58 * 2 * 9 * 3 * 7168 * 2048
    assert flops.router == 58 * 2 * 256 * 7168
    assert flops.dense_ffn == 3 * 2 * 3 * 7168 * 18432
    assert flops.attention_scores == 61 * 2 * (4097 / 2) * 128 * (192 + 128)
    assert flops.attention_projections == 2 * parameter_counts(spec).attention
    assert flops.mtp > flops.head


@pytest.mark.parametrize("window", [1, 3, 8, 20, None])
def test_mean_keys_is_the_average_over_positions(window):
    by_hand = sum(min(i, window or 12) for i in range(1, 13)) / 12
    assert mean_keys(12, window) == pytest.approx(by_hand)
    assert mean_keys(12, window, "full") == 12


def test_a_sliding_window_saves_only_where_it_acts():
    spec = preset("mistral-7b")
    full = spec.model_copy(update={"sliding_window": None})
    half = spec.model_copy(update={"full_attention_layers": tuple(range(16))})
    scores = [flops_per_token(s, 16384).attention_scores for s in (spec, half, full)]
    assert scores[1] == pytest.approx((scores[0] + scores[2]) / 2)


@pytest.mark.parametrize("name", PRESETS)
def test_forward_is_about_two_flops_per_active_matrix_weight(name):
    spec = preset(name)
    counts, flops = parameter_counts(spec), flops_per_token(spec, 1)
    matrices = counts.active - counts.embedding - counts.norms
    matrices += counts.embedding if spec.tied_embeddings else 0
    assert flops.forward - flops.mtp == pytest.approx(2 * matrices, rel=0.005)
