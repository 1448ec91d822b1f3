"""Routing, dropless dispatch, the balance terms and multi-token prediction, against definitions written out."""

import pytest
import torch
import torch.nn.functional as F
from router_margin import routers

from bessemer.core.counts import flops_per_token, parameter_counts
from bessemer.core.model import MlaSpec, ModelSpec, MoeSpec, RopeSpec
from bessemer.core.presets import preset
from bessemer.models.build import build
from bessemer.models.canonical import load_state, pieces, state
from bessemer.models.hf import export_hf, import_hf
from bessemer.models.moe import expert_load
from bessemer.models.router import balance_loss, choose, gates, run_counts, scores, z_loss
from bessemer.runtime.kernels import KernelSample

VOCAB, SEQ, BATCH = 53, 16, 3
MOE = MoeSpec(num_experts=6, top_k=2, expert_ffn_size=24, norm_top_k=True)
MIXTRAL = ModelSpec(
    family="mixtral",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=24,
    max_positions=32,
    init_std=0.1,
    moe=MOE,
)
DEEPSEEK = MIXTRAL.model_copy(
    update={
        "family": "deepseek_v3",
        "num_kv_heads": 4,
        "head_dim": 12,
        "ffn_size": 40,
        "rope": RopeSpec(interleaved=True),
        "mla": MlaSpec(q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        "mtp_layers": 2,
        "moe": MoeSpec(
            num_experts=6,
            top_k=2,
            expert_ffn_size=24,
            num_shared_experts=1,
            shared_ffn_size=24,
            first_dense_layers=1,
            scoring="sigmoid",
            selection_bias=True,
            num_groups=3,
            top_groups=2,
            group_score="top2",
            norm_top_k=True,
            routed_scale=2.5,
        ),
    }
)
SPECS = {"mixtral": MIXTRAL, "deepseek_v3": DEEPSEEK}


def with_moe(spec, **changes):
    return spec.model_copy(update={"moe": spec.moe.model_copy(update=changes)})


def batch(seed=1, rows=BATCH):
    ids = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def random_scores(tokens, experts, seed=0):
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))


# --- the router's functions


def test_groups_limit_where_a_token_may_go():
    """Each token written out: the best two groups by their best two experts, then the best experts of those."""
    moe = MoeSpec(num_experts=8, top_k=3, expert_ffn_size=1, num_groups=4, top_groups=2, group_score="top2")
    given, bias = random_scores(50, 8), random_scores(1, 8, seed=1)[0] * 0.2
    chosen = choose(given, bias, moe)
    for token in range(50):
        ranked = (given[token] + bias).tolist()
        value = {g: sum(ranked[2 * g : 2 * g + 2]) for g in range(4)}
        allowed = [x for g in sorted(value, key=value.get)[-2:] for x in (2 * g, 2 * g + 1)]
        assert chosen[token].tolist() == sorted(allowed, key=lambda x: -ranked[x])[:3]
    assert not torch.equal(chosen.sort(-1).values, given.topk(3, -1).indices.sort(-1).values)


def test_the_bias_chooses_but_does_not_weigh():
    moe = MoeSpec(num_experts=4, top_k=2, expert_ffn_size=1, norm_top_k=True, routed_scale=3.0)
    given = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    chosen = choose(given, torch.tensor([-1.0, 0.0, 0.0, 1.0]), moe)
    assert chosen.tolist() == [[3, 1]]
    torch.testing.assert_close(gates(given, chosen, moe), torch.tensor([[0.1, 0.3]]) / 0.4 * 3)
    plain = moe.model_copy(update={"norm_top_k": False})
    torch.testing.assert_close(gates(given, chosen, plain), torch.tensor([[0.3, 0.9]]))


def balance(given, chosen, runs):
    return balance_loss(given, run_counts(chosen, runs, given.shape[1]), chosen.shape[1])


def test_the_balance_loss_is_one_where_even_and_grows_with_the_skew():
    even = torch.eye(4).repeat(3, 1) * 0.5 + 0.125
    assert balance(even, even.argmax(-1, keepdim=True), 1).item() == pytest.approx(1)
    skewed = torch.tensor([[1.0, 0, 0, 0]]).repeat(8, 1)
    assert balance(skewed, skewed.argmax(-1, keepdim=True), 2).tolist() == pytest.approx([4, 4])
    given = random_scores(12, 5)
    chosen = given.topk(2, -1).indices
    runs = [balance(given[s], chosen[s], 1) for s in (slice(0, 6), slice(6, 12))]
    torch.testing.assert_close(balance(given, chosen, 2), torch.cat(runs))


# --- the model


@pytest.mark.parametrize("name", SPECS)
def test_every_token_gets_its_experts_and_nothing_else(name):
    """The layer written as a sum over all experts, of which most get weight 0."""
    model = build(SPECS[name], seed=2)
    mlp = model.block(1).mlp
    x = torch.randn(BATCH, SEQ, 32, generator=torch.Generator().manual_seed(3))
    moe, router, experts = mlp.router.moe, mlp.router, mlp.experts
    affinity = scores(x @ router.weight.t(), moe)
    chosen = choose(affinity.flatten(0, 1), router.bias, moe).view(BATCH, SEQ, -1)
    weights = torch.zeros_like(affinity).scatter(-1, chosen, gates(affinity, chosen, moe))
    hidden = F.silu(torch.einsum("bsd,xfd->bsxf", x, experts.gate.weight))
    hidden = hidden * torch.einsum("bsd,xfd->bsxf", x, experts.up.weight)
    expected = torch.einsum("bsxf,xdf,bsx->bsd", hidden, experts.down.weight, weights)
    if mlp.shared is not None:
        expected = expected + mlp.shared(x)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)
    assert router.load.tolist() == torch.bincount(chosen.flatten(), minlength=6).tolist()
    assert router.load.sum() == BATCH * SEQ * moe.top_k


@pytest.mark.parametrize("name", SPECS)
def test_experts_without_a_token_are_fine(name):
    model = build(with_moe(SPECS[name], num_groups=1), seed=2)
    with torch.no_grad():
        for router in routers(model):
            router.weight[2:] = 0  # their scores tie at the lowest
            router.weight[:2] *= 0
            router.weight[:2, 0] = 50.0
    x, y = batch()
    for p in model.block(1).mlp_norm.parameters():
        p.data[0] = 1e3
    model(x, y)[0].backward()
    load = expert_load(model)
    assert (load == 0).any() and (load.sum(1) == BATCH * SEQ * 2).all()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.requires_grad)


def gradients(model, *args, **kwargs):
    model.zero_grad(set_to_none=True)
    loss, weight = model(*args, **kwargs)
    loss.backward()
    return loss.detach(), weight, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SPECS)
def test_a_step_is_bitwise_repeatable_and_every_parameter_takes_part(name):
    model = build(SPECS[name], seed=2)
    once, again = (gradients(model, *batch())[2] for _ in range(2))
    assert all(torch.equal(once[n], again[n]) for n in once)
    assert set(once) == {n for n, p in model.named_parameters() if not n.endswith("router.bias")}
    model.compute_dtype = torch.bfloat16
    rough = gradients(model, *batch())[2]
    assert all(g.dtype == torch.float32 for g in rough.values())


@pytest.mark.parametrize("per_sequence", [True, False])
def test_balance_and_z_loss_are_summands_of_the_objective_but_not_of_the_loss(per_sequence):
    """Against the same terms built outside from the routers' inputs; unequal weights of the sequences."""
    coefs = {"aux_loss_coef": 0.7, "z_loss_coef": 0.3, "aux_loss_per_sequence": per_sequence}
    with_terms, plain = build(with_moe(MIXTRAL, **coefs), seed=2), build(MIXTRAL, seed=2)
    inputs, labels = batch()
    weights = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(4))
    weights[1, 3:] = 0
    loss, _, found = gradients(with_terms, inputs, labels, weights_BS=weights)
    seen = []
    hooks = [r.register_forward_hook(lambda r, args, out: seen.append((r, args[0], out[1]))) for r in routers(plain)]
    value, _ = plain(inputs, labels, weights_BS=weights)
    [hook.remove() for hook in hooks]
    objective = value
    for router, x, chosen in seen:
        logits = x.flatten(0, 1) @ router.weight.t()
        runs, share = (BATCH, weights.sum(1)) if per_sequence else (1, weights.sum())
        objective = objective + 0.7 * (balance(logits.softmax(-1), chosen, runs) * share).sum()
        objective = objective + 0.3 * (z_loss(logits, BATCH) * weights.sum(1)).sum()
    objective.backward()
    assert torch.equal(loss, value.detach())
    for n, p in plain.named_parameters():
        assert (found[n] - p.grad).abs().max() <= 1e-5 * max(p.grad.abs().max(), 1e-3), n
    without = gradients(build(MIXTRAL, seed=2), inputs, labels, weights_BS=weights)[2]
    name = "blocks.0.mlp.router.weight"
    assert (found[name] - without[name]).abs().max() > 0.1 * without[name].abs().max()


def test_a_sequences_balance_does_not_depend_on_what_is_beside_it():
    model = build(with_moe(DEEPSEEK, aux_loss_coef=0.5, aux_loss_per_sequence=True, z_loss_coef=0.1), seed=2)
    inputs, labels = batch()
    together = gradients(model, inputs, labels)[2]
    apart = [gradients(model, inputs[i : i + 1], labels[i : i + 1])[2] for i in range(BATCH)]
    for n, g in together.items():
        assert (sum(a[n] for a in apart) - g).abs().max() <= 1e-5 * max(g.abs().max(), 1e-3), n


@pytest.mark.parametrize("name", SPECS)
def test_packed_documents_equal_separate_ones(name):
    model, cut = build(SPECS[name], seed=2), 7
    inputs, labels = batch(rows=1)
    segments = torch.tensor([[4] * cut + [5] * (SEQ - cut)], dtype=torch.int32)
    loss, _, packed = gradients(model, inputs, labels, segments_BS=segments)
    apart = [gradients(model, inputs[:, s], labels[:, s]) for s in (slice(0, cut), slice(cut, SEQ))]
    torch.testing.assert_close(loss, apart[0][0] + apart[1][0], rtol=2e-6, atol=0)
    for n, g in packed.items():
        assert (apart[0][2][n] + apart[1][2][n] - g).abs().max() <= 2e-5 * max(g.abs().max(), 1e-3), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*SPECS, "dense"])
def test_the_flops_of_a_step_are_those_of_the_closed_form(name, dtype):
    """Every product is counted, whichever kernel it takes: routers, experts of any load, latent attention, MTP."""
    spec = SPECS.get(name, MIXTRAL.model_copy(update={"moe": None}))
    model = build(spec, seed=2, compute_dtype=dtype)
    with KernelSample() as sample:
        model(*batch())[0].backward()
    assert sum(sample.flops.values()) == flops_per_token(spec, SEQ).training * BATCH * SEQ


# --- multi-token prediction


def test_prediction_modules_train_on_the_tokens_further_ahead():
    """The objective written out position by position from the modules' own parts."""
    model = build(DEEPSEEK, seed=2)
    tokens, labels = batch()
    weights = torch.rand(BATCH, SEQ, generator=torch.Generator().manual_seed(4))
    loss, _, found = gradients(model, tokens, labels, weights_BS=weights)
    plain = build(DEEPSEEK.model_copy(update={"mtp_layers": 0}), seed=2)
    with torch.no_grad():
        assert torch.equal(loss, plain(tokens, labels, weights_BS=weights)[0])
        assert torch.equal(loss, model(tokens, labels, weights_BS=weights)[0])
    model.zero_grad(set_to_none=True)
    visible = model._visible(tokens, None, None, weights.sum(1))
    stream = F.embedding(tokens, model.embed.weight)
    for block in model.blocks.values():
        stream = block(stream, visible)
    hidden = model.norm(stream)[1]

    def cross_entropy(states, ahead):
        logits = states[:, : SEQ - ahead] @ model.head.weight.t()
        rows = F.cross_entropy(logits.flatten(0, 1), labels[:, ahead:].flatten(), reduction="none")
        return (rows * weights[:, ahead:].flatten()).sum()

    objective = cross_entropy(hidden, 0)
    for ahead, module in enumerate(model.mtp, 1):
        known = torch.cat((tokens[:, ahead:], torch.full((BATCH, ahead), 9)), 1)  # what comes after the end: anything
        hidden = module(hidden, F.embedding(known, model.embed.weight), visible)
        objective = objective + 0.3 / 2 * cross_entropy(hidden, ahead)
    objective.backward()
    for n, p in model.named_parameters():
        if p.requires_grad:
            assert (found[n] - p.grad).abs().max() <= 2e-5 * max(p.grad.abs().max(), 1e-3), n
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


# --- names, counts, files


@pytest.mark.parametrize("name", SPECS)
def test_pieces_cover_every_row_once_and_match_the_counts(name):
    model = build(SPECS[name], seed=2)
    seen = {n: torch.zeros(p.shape[0], dtype=torch.int64) for n, p in model.named_parameters()}
    for piece in pieces(model):
        seen[piece.param][piece.row : piece.row + piece.rows] += 1
    assert all((rows == 1).all() for rows in seen.values())
    assert sum(p.numel() for p in model.parameters()) == parameter_counts(model.spec).total_with_mtp
    names = dict(state(model))
    assert names["layers.1.mlp.experts.gate.weight"].shape == (6, 24, 32)
    if name == "deepseek_v3":
        expected = {"layers.0.mlp.up.weight", "layers.1.mlp.router.bias", "layers.1.mlp.shared.down.weight"}
        expected |= {f"layers.0.attn.{p}.weight" for p in ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o")}
        expected |= {
            f"mtp.1.{p}.weight" for p in ("embed_norm", "hidden_norm", "join", "norm", "attn.kv_b", "mlp_norm")
        }
        assert expected <= set(names) and not names["layers.1.mlp.router.bias"].any()
    again = build(SPECS[name], seed=3)
    load_state(again, names)
    assert all(torch.equal(value, names[n]) for n, value in state(again))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v2", "deepseek-v3", "kimi-k2"])
def test_published_shapes_build_on_the_meta_device(name):
    spec = preset(name)
    counts = parameter_counts(spec)
    model = build(spec, seed=1, device="meta")
    assert sum(p.numel() for p in model.parameters()) == counts.total_with_mtp
    if name == "deepseek-v3":
        assert counts.total == 671_026_419_200


def test_prediction_modules_in_files(tmp_path):
    """As published: further layers, with copies of embedding and head; the bias stays float32 in a bf16 file."""
    from safetensors.torch import load_file, save_file

    ours = build(DEEPSEEK, seed=2)
    for router in routers(ours):
        router.bias.data.normal_(0, 0.01)
    export_hf(DEEPSEEK, state(ours), tmp_path / "whole")
    again = build(DEEPSEEK, seed=5)
    import_hf(again, tmp_path / "whole")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state(ours), state(again), strict=True))
    export_hf(DEEPSEEK, state(ours), tmp_path / "half", dtype=torch.bfloat16)
    import_hf(again, tmp_path / "half")
    assert torch.equal(routers(again)[0].bias, routers(ours)[0].bias)
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    assert torch.equal(tensors["model.layers.3.shared_head.head.weight"], tensors["lm_head.weight"])
    tensors["model.layers.2.embed_tokens.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(Exception, match=r"model\.layers\.2\.embed_tokens\.weight differs") as raised:
        import_hf(again, tmp_path / "whole")
    assert raised.value.fix == "model.num_nextn_predict_layers = 0"
    save_file({n: t for n, t in tensors.items() if ".layers.2." not in n and ".layers.3." not in n}, file)
    with pytest.raises(Exception, match=r"missing     model\.layers\.2\.") as raised:
        import_hf(again, tmp_path / "whole")
    assert "written without its prediction modules" in raised.value.fix
