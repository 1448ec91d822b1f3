"""What `check` says of models that can't be built; none of it imports torch."""

import subprocess
import sys

import pytest

from bessemer.core.job import Job
from bessemer.core.model import MlaSpec, ModelSpec, MoeSpec, RopeSpec
from bessemer.models.problems import problems

GOOD = ModelSpec(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
    max_positions=64,
)
MOE = MoeSpec(num_experts=4, top_k=2, expert_ffn_size=8)
GROUPED = MoeSpec(num_experts=4, top_k=3, expert_ffn_size=8, num_groups=2)
SINGLE = MoeSpec(num_experts=4, top_k=2, expert_ffn_size=8, num_groups=4, top_groups=2, group_score="top2")
MLA = MlaSpec(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)


def found(**changes):
    return problems(Job(), GOOD.model_copy(update=changes), None)


def test_a_good_model_has_none():
    assert found() == [] and problems(Job(), None, None) == []
    assert found(moe=MOE, mla=MLA, mtp_layers=1) == []


@pytest.mark.parametrize(
    ("changes", "code", "where", "says"),
    [
        ({"moe": MOE, "activation": "gelu"}, "not-runnable", "hidden_act", "experts with gelu"),
        ({"moe": MOE, "mlp_bias": True}, "not-runnable", "mlp_bias", "experts with biases"),
        ({"mla": MLA, "qk_norm": True}, "not-runnable", "family", "norms of queries"),
        ({"mla": MLA, "qkv_bias": True, "o_bias": True}, "not-runnable", "attention_bias", "with biases"),
        ({"mla": MLA, "sliding_window": 8}, "not-runnable", "sliding_window", "with a window"),
        ({"moe": GROUPED}, "model-experts", "num_experts_per_tok", "3 experts a token of the 2 in 1 group"),
        ({"moe": SINGLE}, "model-experts", "n_group", "one expert a group"),
        ({"num_kv_heads": 3}, "model-kv-heads", "num_key_value_heads", "can't share 3"),
        ({"head_dim": 7}, "model-head-dim", "head_dim", "odd"),
        ({"num_layers": 0}, "model-size", "num_hidden_layers", "num_hidden_layers = 0"),
        ({"sliding_window": 0}, "model-window", "sliding_window", "0"),
        ({"norm_eps": 0.0}, "model-eps", "rms_norm_eps", "0.0"),
        ({"rope": RopeSpec(kind="llama3", factor=8.0)}, "model-rope", "rope_scaling", "low_freq_factor"),
        ({"rope": RopeSpec(interleaved=True)}, "not-runnable", "rope_interleave", "interleaved"),
    ],
)
def test_each_problem(changes, code, where, says):
    (one,) = found(**changes)
    assert (one.code, one.where) == (code, f"model.{where}") and says in one.what and one.fix


def test_all_are_reported_at_once():
    codes = [p.code for p in found(num_kv_heads=3, head_dim=7, moe=MOE, mlp_bias=True)]
    assert sorted(codes) == ["model-head-dim", "model-kv-heads", "not-runnable"]


def test_kv_heads_fix_lists_what_works():
    (one,) = found(num_kv_heads=3)
    assert one.fix == "model.num_key_value_heads = 1, 2 or 4"


def test_no_torch():
    code = "import sys, bessemer.models.problems; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
