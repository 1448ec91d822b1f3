"""What blocks keep and make again, against sums done by hand."""

from __future__ import annotations

import pytest

from bessemer.core.counts import flops_per_token
from bessemer.core.errors import ConfigError
from bessemer.core.layout import Layout
from bessemer.core.presets import preset
from bessemer.core.recompute import FINE, PARTS, RECOMPUTE, parts_of_layer, recompute
from bessemer.core.saved import again, layer_bytes
from bessemer.core.sizes import Sizes

LLAMA, MIXTRAL, DEEPSEEK = preset("llama-3-8b"), preset("mixtral-8x7b"), preset("deepseek-v3")
BF16 = Sizes(2)


def test_a_layer_of_llama_8b_by_hand() -> None:
    """D 4096, 32 query and 8 key/value heads of 128, F 14336; the stream is float32, the rest bf16."""
    stream, normed, heads, out, wide = 4 * 4096, 2 * 4096, 2 * (4096 + 2 * 1024), 2 * 4096, 2 * 14336
    statistics = 2 * 4 + 4 * 32  # of the norms, and of attention
    plain = 2 * stream + 2 * normed + heads + out + 3 * wide + statistics
    assert layer_bytes(LLAMA, 0, (), BF16) == plain
    assert layer_bytes(LLAMA, 0, PARTS, BF16) == stream
    fine = stream + normed + heads + out + 2 * wide + 4 * 32  # what attention adds stays for the second norm
    assert layer_bytes(LLAMA, 0, FINE, BF16) == fine
    assert layer_bytes(LLAMA, 0, ("attention",), BF16) == plain - out - 4 * 32
    assert layer_bytes(LLAMA, 0, (*FINE, "up"), BF16) == fine - 2 * wide


def test_parts_of_a_layer() -> None:
    assert "heads" in parts_of_layer(preset("qwen3-8b"), 0) and "heads" not in parts_of_layer(LLAMA, 0)
    assert parts_of_layer(DEEPSEEK, 0) == parts_of_layer(DEEPSEEK, 3) - {"router", "dispatch", "experts"}
    assert "mla_up" in parts_of_layer(DEEPSEEK, 0, RECOMPUTE["fine"].parts)
    assert parts_of_layer(LLAMA, 0, ("router", "norm")) == {"norm"}


@pytest.mark.parametrize("spec", [LLAMA, MIXTRAL, DEEPSEEK], ids=lambda s: s.family)
def test_everything_again_is_a_forward_pass(spec) -> None:
    """Of a dense layer all but the product that leaves it, of a layer with experts all."""
    layers = range(spec.num_layers)
    found = sum(again(spec, layer, PARTS, BF16, 4096).flops for layer in layers)
    down = sum(2 * spec.hidden_size * spec.ffn_size for layer in layers if not spec.is_moe_layer(layer))
    whole = flops_per_token(spec, 4096)
    blocks = whole.attention_projections + whole.attention_scores + whole.dense_ffn + whole.router + whole.experts
    assert found + down == pytest.approx(blocks, rel=1e-12)


def test_the_cheap_parts_cost_no_products_but_the_routers() -> None:
    assert again(LLAMA, 0, FINE, BF16, 4096).flops == 0
    assert again(MIXTRAL, 0, FINE, BF16, 4096).flops == 2 * 4096 * 8
    up = 2 * (1536 * 128 * 192 + 512 * 128 * 256)  # of latents: queries, then keys and values
    assert again(DEEPSEEK, 0, FINE, BF16, 4096).flops == up


def test_tensor_parallelism_divides_what_it_shares_out() -> None:
    plain, divided = Layout(tp=2), Layout(tp=2, sequence_parallel=True)
    stream, normed = 4 * 4096, 2 * 4096
    heads = layer_bytes(LLAMA, 0, FINE, BF16) - stream - normed
    assert layer_bytes(LLAMA, 0, FINE, Sizes.of(plain, 2)) == stream + normed + heads / 2
    assert layer_bytes(LLAMA, 0, FINE, Sizes.of(divided, 2)) == (stream + normed + heads) / 2
    assert layer_bytes(LLAMA, 0, PARTS, Sizes.of(divided, 2)) == stream / 2
    without = [p for p in FINE if p != "gather"]  # both gathered inputs, rearranged rows of attention and activation
    copies = 2 * normed + 2 * 4096 / 2 + 2 * 14336 / 2
    assert layer_bytes(LLAMA, 0, without, Sizes.of(divided, 2)) == (stream + normed + heads) / 2 + copies
    one = layer_bytes(LLAMA, 0, without, Sizes.of(divided, 2, micro_batch=1))
    assert one == (stream + normed + heads) / 2 + 2 * normed  # rows of one sequence are in order


def test_policies_keep_less_the_more_they_make_again() -> None:
    for spec, layer in ((LLAMA, 0), (MIXTRAL, 0), (DEEPSEEK, 0), (DEEPSEEK, 3)):
        for order in (("none", "ops", "fine", "full"), ("none", "ops", "mlp", "full"), ("none", "selective", "full")):
            kept = [layer_bytes(spec, layer, RECOMPUTE[n].parts, BF16) for n in order]
            assert kept == sorted(kept, reverse=True) and kept[0] > kept[1] and kept[-2] > kept[-1]
    with pytest.raises(ConfigError):
        recompute("some")
