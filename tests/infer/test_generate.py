"""Generation: cached equals uncached, greedy equals transformers, sampling does what it says."""

import pytest
import torch
from transformers import MistralForCausalLM

from bessemer.core.errors import RequestError
from bessemer.core.model import MlaSpec, ModelSpec, MoeSpec, RopeSpec
from bessemer.infer import KvCache, LatentCache, Sampling, generate, probabilities, sample
from bessemer.models.build import build
from bessemer.models.canonical import state
from bessemer.models.hf import export_hf

VOCAB = 61
PROMPTS = [[5, 9, 2, 31, 7, 7, 12, 40, 3], [11], [60, 4, 8, 15, 16]]


def small(**changes):
    fields = {
        "family": "mistral",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 48,
        "max_positions": 64,
        "init_std": 0.3,
    }
    return build(ModelSpec(**(fields | changes)), seed=3)


LATENT = {
    "mla": MlaSpec(q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    "num_kv_heads": 4,
    "head_dim": 12,
    "family": "deepseek_v3",
    "init_std": 0.2,
}
VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 4},
    "learned": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "family": "gpt2"},
    "qk-norm": {"qk_norm": True},
    "yarn": {"rope": RopeSpec(kind="yarn", factor=4.0, original_max_positions=16)},
    "experts": {"moe": MoeSpec(num_experts=4, top_k=2, expert_ffn_size=16)},
    "latent": LATENT,
    "latent, compressed queries, experts": LATENT
    | {
        "mla": LATENT["mla"].model_copy(update={"q_lora_rank": 14}),
        "moe": MoeSpec(num_experts=4, top_k=2, expert_ffn_size=16, scoring="sigmoid", selection_bias=True),
        "rope": RopeSpec(interleaved=True, kind="yarn", factor=4.0, original_max_positions=16, mscale_all_dim=1.0),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached(variant):
    model = small(**VARIANTS[variant])
    tokens = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    whole = model.logits(tokens)
    kind = KvCache if model.spec.mla is None else LatentCache
    cache = kind(model.spec, 2, 16, dtype=torch.float32, device=torch.device("cpu"))
    parts, at = [], 0
    for count in (4, 1, 3, 1):
        cache.begin(torch.tensor([at, at]), count)
        parts.append(model.logits(tokens[:, at : at + count], cache=cache))
        at += count
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_greedy_equals_transformers(tmp_path, window):
    model = small(sliding_window=window)
    export_hf(model.spec, state(model), tmp_path / "hf")
    theirs = MistralForCausalLM.from_pretrained(tmp_path / "hf")
    got = generate(model, PROMPTS, max_new_tokens=12)
    for prompt, sequence in zip(PROMPTS, got, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert sequence == expected[0].tolist()


@pytest.mark.parametrize("variant", ["plain", "latent"])
def test_a_batch_of_ragged_prompts_equals_each_alone_and_stops_apart(variant):
    model = small(**VARIANTS[variant])
    free = generate(model, PROMPTS, max_new_tokens=12)
    stop = free[0][len(PROMPTS[0]) + 4]
    got = generate(model, PROMPTS, max_new_tokens=12, stop={stop})
    for prompt, sequence, whole in zip(PROMPTS, got, free, strict=True):
        assert generate(model, [prompt], max_new_tokens=12, stop={stop}) == [sequence]
        new = whole[len(prompt) :]
        assert sequence == prompt + (new[: new.index(stop)] if stop in new else new)
    assert len({len(s) - len(p) for s, p in zip(got, PROMPTS, strict=True)}) > 1


def test_the_seed_decides_and_neighbours_don_t():
    model = small()
    hot = Sampling(temperature=1.5, seed=4)
    first = generate(model, PROMPTS, max_new_tokens=10, sampling=hot)
    assert first == generate(model, PROMPTS, max_new_tokens=10, sampling=hot)
    assert first != generate(model, PROMPTS, max_new_tokens=10, sampling=Sampling(temperature=1.5, seed=5))
    assert generate(model, PROMPTS[:1], max_new_tokens=10, sampling=hot) == first[:1]


def test_probabilities_follow_their_definitions():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0]])
    plain = probabilities(logits, Sampling())
    torch.testing.assert_close(plain, logits.softmax(1))
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=0.5)), (logits * 2).softmax(1))
    top2 = probabilities(logits[:1], Sampling(top_k=2))
    torch.testing.assert_close(top2, torch.tensor([[2.0, 1.0]]).softmax(1).new_tensor([[0.7310586, 0.2689414, 0, 0]]))
    nucleus = probabilities(logits[:1], Sampling(top_p=0.8))  # 0.644 alone is short of 0.8, with 0.237 it isn't
    assert (nucleus > 0).tolist() == [[True, True, False, False]]
    assert probabilities(logits, Sampling(top_p=1e-9)).count_nonzero(1).tolist() == [1, 1]
    assert probabilities(logits, Sampling(temperature=0)).tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]


def test_samples_have_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    drawn = sample(logits, Sampling(seed=1), list(range(4000)), [0] * 4000)
    share = drawn.bincount(minlength=4) / 4000
    assert (share - logits[0].softmax(0)).abs().max() < 0.025  # three standard deviations are 0.024
    only = sample(logits, Sampling(seed=1, top_k=1), list(range(4000)), [0] * 4000)
    assert (only == 0).all()


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ({"prompts": [[]]}, "generate-prompt", "prompt 0 is empty"),
        ({"prompts": [[1], [VOCAB]]}, "generate-prompt", "prompt 1 has token ids outside of the vocabulary"),
        ({"prompts": [[-1]]}, "generate-prompt", "outside of the vocabulary"),
        ({"prompts": [[1] * 60], "max_new_tokens": 5}, "generate-length", "max_new_tokens = 4"),
        ({"prompts": [[1]], "max_new_tokens": -1}, "generate-length", "max_new_tokens = -1"),
    ],
)
def test_bad_requests_are_refused(call, code, says):
    with pytest.raises(RequestError) as raised:
        generate(small(), **({"max_new_tokens": 3} | call))
    assert raised.value.code == code and says in str(raised.value)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -2}, {"top_p": 0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        Sampling(**bad)


def test_no_prompts_and_no_tokens_are_fine():
    assert generate(small(), [], max_new_tokens=3) == []
    assert generate(small(), PROMPTS, max_new_tokens=0) == PROMPTS
