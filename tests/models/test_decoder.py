"""The decoder's own promises: documents, weights, types, and what sharding and gradient hooks rely on."""

import pytest
import torch
import torch.nn.functional as F

from bessemer.core.counts import parameter_counts
from bessemer.core.errors import CheckpointError
from bessemer.core.model import ModelSpec, RopeSpec
from bessemer.models.build import build, initial
from bessemer.models.canonical import load_state, pieces, shapes, state

VOCAB, SEQ = 53, 24
BASE = {
    "family": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 40,
    "max_positions": 32,
}
GPT = {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "num_kv_heads": 4, "qkv_bias": True}
GPT |= {"o_bias": True, "mlp_bias": True, "tied_embeddings": True, "family": "gpt2"}
SPECS = {
    "llama": ModelSpec(**BASE),
    "tied-qk-norm": ModelSpec(**BASE, tied_embeddings=True, qk_norm=True),
    "gpt": ModelSpec(**(BASE | GPT)),
}


def batch(rows=3, seed=1):
    ids = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture(params=SPECS)
def model(request):
    return build(SPECS[request.param], seed=2)


def test_the_loss_is_the_cross_entropy_of_the_logits(model):
    tokens, labels = batch()
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(3))
    weights[0, :5] = 0
    labels = labels.clone()
    labels[1, 3:6] = -100
    loss, weight = model(tokens, labels, weights_BS=weights)
    rows = F.cross_entropy(model.logits(tokens).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    counted = weights.flatten() * (labels.flatten() != -100)
    torch.testing.assert_close(loss, (rows * counted).sum(), rtol=2e-6, atol=0)
    torch.testing.assert_close(weight, counted.sum())
    assert loss.dtype == weight.dtype == torch.float32


def test_evaluation_gives_the_same_loss_without_gradients(model):
    tokens, labels = batch()
    with torch.no_grad():
        plain = model(tokens, labels)[0]
    assert not plain.requires_grad and torch.equal(plain, model(tokens, labels)[0].detach())


@pytest.mark.parametrize("name", ["llama", "tied-qk-norm"])
def test_packed_documents_equal_separate_ones(name):
    """A token's logits and its document's gradients don't depend on what is packed beside it. (Learned positions go
    on over documents, so they are not among these.)"""
    model = build(SPECS[name], seed=2)
    tokens, labels = batch(1)
    cut = 10
    segments = torch.tensor([[4] * cut + [5] * (SEQ - cut)], dtype=torch.int32)
    packed, _ = model(tokens, labels, segments_BS=segments)
    packed.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    apart = [model(tokens[:, s], labels[:, s])[0] for s in (slice(0, cut), slice(cut, SEQ))]
    (apart[0] + apart[1]).backward()
    torch.testing.assert_close(packed, apart[0] + apart[1], rtol=2e-6, atol=0)
    for got, p in zip(grads, model.parameters(), strict=True):
        assert (got - p.grad).abs().max() <= 1e-5 * max(p.grad.abs().max(), 1e-3)
    without, _ = model(tokens, labels)
    assert abs((without - packed).item()) > 1e-4  # else the mask had nothing to mask


def test_bf16_keeps_float32_masters_and_stays_close(model):
    tokens, labels = batch()
    exact, weight = model(tokens, labels)
    model.compute_dtype = torch.bfloat16
    rough, _ = model(tokens, labels)
    rough.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert model.logits(tokens).dtype == torch.bfloat16
    assert 0 < abs((exact - rough).item()) / float(weight) < 0.01


def test_a_step_is_bitwise_repeatable_and_gradients_accumulate(model):
    tokens, labels = batch()

    def gradients():
        model.zero_grad(set_to_none=True)
        model(tokens, labels)[0].backward()
        return [p.grad.clone() for p in model.parameters()]

    once, again = gradients(), gradients()
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    model(tokens, labels)[0].backward()
    for a, p in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * a, rtol=1e-6, atol=1e-9)


def test_post_accumulate_hooks_fire_once_for_every_parameter(model):
    fired = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.grad is not None)))
    model(*batch())[0].backward()
    assert sorted(fired) == sorted((name, True) for name, _ in model.named_parameters())


def test_compute_dtype_is_one_of_two():
    with pytest.raises(ValueError, match=r"torch\.float16"):
        build(SPECS["llama"], seed=1).compute_dtype = torch.float16


def test_more_tokens_than_learned_positions_are_refused():
    model = build(SPECS["gpt"], seed=1)
    with pytest.raises(ValueError, match="40 tokens in a sequence, but the model has 32 positions"):
        model.logits(torch.zeros(1, 40, dtype=torch.int64))


# --- canonical names and first weights


def test_pieces_cover_every_row_of_every_parameter_once(model):
    seen = {name: torch.zeros(p.shape[0], dtype=torch.int64) for name, p in model.named_parameters()}
    names = set()
    for piece in pieces(model):
        seen[piece.param][piece.row : piece.row + piece.rows] += 1
        assert piece.shape == (piece.rows, *dict(model.named_parameters())[piece.param].shape[1:])
        assert piece.name not in names
        names.add(piece.name)
    assert all((rows == 1).all() for rows in seen.values())
    assert sum(p.numel() for p in model.parameters()) == parameter_counts(model.spec).total


def test_canonical_names_are_as_agreed():
    names = set(shapes(SPECS["tied-qk-norm"]))
    layer = {"attn_norm", "attn.q", "attn.k", "attn.v", "attn.o", "attn.q_norm", "attn.k_norm", "mlp_norm"}
    layer |= {"mlp.gate", "mlp.up", "mlp.down"}
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in layer} | {"embed.weight", "norm.weight"}
    assert names == expected
    assert "head.weight" in shapes(SPECS["llama"])
    gpt = set(shapes(SPECS["gpt"]))
    assert {"pos_embed.weight", "norm.bias", "layers.1.attn.k.bias", "layers.0.mlp.up.bias"} <= gpt


def test_first_weights_depend_on_seed_and_name_only(model):
    for name, rows in state(model):
        assert torch.equal(rows, initial(model.spec, name, tuple(rows.shape), 2)), name
    deeper = build(model.spec.model_copy(update={"num_layers": 2, "tied_embeddings": True}), seed=2)
    mine = dict(state(model))
    assert all(torch.equal(rows, mine[name]) for name, rows in state(deeper))
    other = dict(state(build(model.spec, seed=3)))
    assert not torch.equal(other["embed.weight"], mine["embed.weight"])
    assert not torch.equal(mine["layers.0.attn.q.weight"], mine["layers.1.attn.q.weight"])
    assert float(mine["embed.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(mine["layers.0.mlp.down.weight"].std()) == pytest.approx(0.01, rel=0.1)


def test_meta_models_hold_nothing():
    assert all(p.is_meta for p in build(SPECS["llama"], seed=1, device="meta").parameters())


def test_load_state_lists_everything_that_is_wrong(model):
    good = dict(state(model))
    bad = {k: v.clone() for k, v in good.items() if k != "norm.weight"}
    bad["layers.0.attn.q.weight"] = torch.zeros(3, 3)
    bad["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as raised:
        load_state(model, bad)
    text = str(raised.value)
    for part in ("norm.weight is missing", "extra is unexpected", "layers.0.attn.q.weight has shape (3, 3)"):
        assert part in text
    assert raised.value.code == "weights-mismatch"


def test_unknown_rope_fields_are_named():
    spec = ModelSpec(**BASE, rope=RopeSpec(kind="linear"))
    with pytest.raises(ValueError, match=r"needs rope\.factor"):
        build(spec, seed=1)(*batch())
