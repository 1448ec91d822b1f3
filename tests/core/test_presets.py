"""Models by name, and the model of a job: one of preset, folder or family, with the job's own keys on top."""

import json

import pytest

from bessemer.core.counts import parameter_counts
from bessemer.core.errors import ConfigError
from bessemer.core.hf_config import FAMILIES, config_from_spec, resolve_model
from bessemer.core.job import ModelSection
from bessemer.core.presets import PRESETS, preset, preset_config, preset_source

DESIGN = """llama-3-8b llama-3-70b llama-3.1-405b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b mixtral-8x7b
deepseek-v2-lite deepseek-v2 deepseek-v3 kimi-k2 gpt-3-175b megatron-530b megatron-1t"""


def problems(**keys):
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelSection(**keys))
    return caught.value.problems


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_has_a_source_and_a_known_family(name):
    assert preset(name).family in FAMILIES
    assert len(preset_source(name)) > 10


def test_the_names_of_the_design_are_there():
    assert set(DESIGN.split()) <= set(PRESETS)


def test_a_job_without_a_model_gets_the_small_llama_of_the_demo():
    spec = resolve_model(ModelSection())
    assert (spec.family, spec.vocab_size, spec.tied_embeddings) == ("llama", 4096, True)
    assert 4e6 < parameter_counts(spec).total < 8e6
    assert resolve_model(ModelSection(num_hidden_layers=2)).num_layers == 2


def test_preset_with_the_jobs_own_keys():
    spec = resolve_model(ModelSection(preset="llama-3-70b", num_hidden_layers=12, vocab_size=4096))
    assert (spec.num_layers, spec.vocab_size, spec.hidden_size) == (12, 4096, 8192)


def test_none_stands_for_null():
    assert resolve_model(ModelSection(preset="mistral-7b", sliding_window="none")).sliding_window is None
    assert preset("deepseek-v2-lite").mla.q_lora_rank is None


def test_family_with_its_keys():
    spec = resolve_model(
        ModelSection(
            family="qwen3",
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=256,
        )
    )
    assert spec.qk_norm
    assert spec.head_dim == 32


@pytest.mark.parametrize("key", ["hf", "weights"])
def test_folder_with_config_json(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps(config_from_spec(preset("smollm2-135m"))))
    assert resolve_model(ModelSection(**{key: str(tmp_path)})) == preset("smollm2-135m")
    assert resolve_model(ModelSection(**{key: str(tmp_path / "config.json")})) == preset("smollm2-135m")


def test_two_sources_are_one_too_many():
    (problem,) = problems(preset="llama-3-8b", family="llama")
    assert (problem.code, problem.where) == ("model-source", "model.family")


def test_unknown_preset_names_the_nearest():
    (problem,) = problems(preset="lama-3-8b")
    assert problem.where == "model.preset"
    assert "llama-3-8b" in problem.fix


def test_unknown_family_names_the_supported():
    (problem,) = problems(family="gemma2")
    assert problem.where == "model.family"
    assert "gemma2" in problem.what
    assert all(name in problem.why for name in FAMILIES)


def test_every_wrong_key_of_a_job_is_reported_at_its_place():
    found = problems(family="llama", hidden_size=100, num_attention_heads=7, num_layers=5, attention_dropout=0.1)
    places = {p.where: p for p in found}
    assert {"model.num_hidden_layers", "model.vocab_size", "model.intermediate_size"} <= places.keys()
    assert places["model.num_attention_heads"].code == "model-heads"
    assert "num_hidden_layers" in places["model.num_layers"].fix
    # Harmless in a checkpoint's config.json, but in a job it would be a setting without effect.
    assert places["model.attention_dropout"].code == "model-key"


def test_a_wrong_key_of_a_folder_is_reported_at_the_folder(tmp_path):
    config = {**preset_config("smollm2-135m"), "hidden_act": "relu", "attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = problems(hf=str(tmp_path))
    assert problem.where == "model.hf"
    assert "hidden_act" in problem.what
    found = problems(hf=str(tmp_path), hidden_size=-1)
    assert {p.where for p in found} == {"model.hf", "model.hidden_size"}


def test_the_family_of_a_preset_cannot_be_changed():
    (problem,) = problems(preset="llama-3-8b", model_type="qwen3")
    assert problem.where == "model.model_type"


@pytest.mark.parametrize(
    ("content", "text"), [(None, "doesn't exist"), ("{", "not JSON"), ("[1]", "no JSON object"), ("\xff", "not JSON")]
)
def test_a_folder_without_a_readable_config(tmp_path, content, text):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    (problem,) = problems(hf=str(tmp_path))
    assert problem.code == "model-hf"
    assert problem.where == "model.hf"
    assert text in problem.what
