"""Hugging Face folders that don't fit, and folders that can't be written: one clear error, nothing left behind."""

import json

import pytest
import torch
from families import TINY_LLAMA
from safetensors.torch import load_file, save_file

from bessemer.core.errors import CheckpointError, RequestError
from bessemer.models.build import build
from bessemer.models.canonical import state
from bessemer.models.hf import export_hf, import_hf

SPEC = TINY_LLAMA
TOKENIZER = json.dumps({"added_tokens": [{"id": 7, "content": "<|end|>", "special": True}], "model": {}})


@pytest.fixture
def folder(tmp_path):
    export_hf(SPEC, state(build(SPEC, seed=1)), tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_every_difference_is_listed_at_once_and_nothing_is_loaded(folder):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(16, 8)
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(2)
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)

    rewrite(folder, spoil)
    model = build(SPEC, seed=5)
    before = {k: v.clone() for k, v in state(model)}
    with pytest.raises(CheckpointError) as raised:
        import_hf(model, folder)
    text = str(raised.value)
    for line in (
        "missing     model.norm.weight (16,)",
        "shape       model.layers.0.self_attn.q_proj.weight is (16, 8), the model wants (16, 16)",
        "unexpected  model.layers.0.self_attn.sinks (2,)",
        "type        model.layers.1.mlp.up_proj.weight is I8",
        "(4 differences)",
    ):
        assert line in text
    assert raised.value.code == "weights-mismatch"
    assert all(torch.equal(v, before[k]) for k, v in state(model))


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(folder):
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_hf(build(SPEC, seed=5), folder)
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        import_hf(build(SPEC, seed=5), folder)


def test_buffers_of_old_files_are_no_weights(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    import_hf(build(SPEC, seed=5), folder)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_half_precision_sources_are_widened(folder, source):
    rewrite(folder, lambda t: t.update({k: v.to(source) for k, v in t.items()}))
    model = build(SPEC, seed=5)
    import_hf(model, folder)
    for (name, got), (_, first) in zip(state(model), state(build(SPEC, seed=1)), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, first.to(source).float()), name


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "can't be read as safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is not an index of shards"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "names files that are missing: b.safetensors",
        ),
    ],
)
def test_unreadable_folders(folder, damage, says):
    damage(folder)
    with pytest.raises(CheckpointError, match=says) as raised:
        import_hf(build(SPEC, seed=5), folder)
    assert raised.value.code == "weights-files"


def test_a_pickle_is_named_but_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle, which is not read"):
        import_hf(build(SPEC, seed=5), tmp_path)


def test_unsupported_families_name_the_supported():
    spec = SPEC.model_copy(update={"family": "phi"})
    with pytest.raises(RequestError, match="llama, mistral, qwen2, qwen3, gpt2, mixtral") as raised:
        export_hf(spec, [], "unused")
    assert raised.value.code == "hf-family"


def test_gpt2_files_of_the_base_model_have_no_prefix(tmp_path):
    changes = {"family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "positions": "learned"}
    changes |= {"num_kv_heads": 2, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
    spec = SPEC.model_copy(update=changes)
    export_hf(spec, state(build(spec, seed=1)), tmp_path / "hf")

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)

    rewrite(tmp_path / "hf", strip)
    model = build(spec, seed=5)
    import_hf(model, tmp_path / "hf")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state(model), state(build(spec, seed=1)), strict=True))


def test_export_writes_all_files_and_the_end_token(tmp_path):
    export_hf(SPEC, state(build(SPEC, seed=1)), tmp_path / "hf", tokenizer_json=TOKENIZER)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    read = {p.name: json.loads(p.read_text()) for p in (tmp_path / "hf").glob("*.json")}
    assert read["config.json"]["eos_token_id"] == read["generation_config.json"]["eos_token_id"] == 7
    assert read["tokenizer_config.json"]["eos_token"] == "<|end|>"
    assert read["config.json"]["dtype"] == "float32"


def test_a_failed_export_leaves_nothing(tmp_path):
    parts = list(state(build(SPEC, seed=1)))
    for bad, says in (
        (parts[:-1], "is missing"),
        ([*parts, parts[0]], "comes twice"),
        ([("x", parts[0][1])], "x is unexpected"),
    ):
        with pytest.raises(CheckpointError, match=says):
            export_hf(SPEC, bad, tmp_path / "hf")
    with pytest.raises(RequestError, match="no special token"):
        export_hf(SPEC, parts, tmp_path / "hf", tokenizer_json=TOKENIZER, eos_token="</s>")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(folder):
    with pytest.raises(RequestError, match="exists already"):
        export_hf(SPEC, [], folder)
