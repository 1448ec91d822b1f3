"""What `check` says of `model.weights`, from config.json and the headers of the files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from families import CASES, TINY_LLAMA, peer

from bessemer.core.hf_config import spec_from_config
from bessemer.core.job import Job
from bessemer.models.build import build
from bessemer.models.canonical import state
from bessemer.models.hf import export_hf, import_hf
from bessemer.models.problems import problems

SPEC = TINY_LLAMA
GPT2 = SPEC.model_copy(
    update={"family": "gpt2", "num_kv_heads": 2, "norm": "layernorm", "activation": "gelu_tanh", "positions": "learned"}
    | {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "ffn_size": 64}
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    export_hf(SPEC, state(build(SPEC, seed=1)), folder / "llama")
    export_hf(GPT2, state(build(GPT2, seed=1)), folder / "gpt2")
    export_hf(SPEC, state(build(SPEC, seed=1)), folder / "shards", shard_bytes=4000)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "w"))


def found(weights, spec=SPEC):
    listed = problems(Job.model_validate({"model": {"weights": str(weights)}}), spec, None)
    assert all(p.where == "model.weights" and p.fix for p in listed)
    return listed


def test_weights_that_fit(folder, monkeypatch):
    assert found(folder / "llama") == found(folder / "shards") == found(folder / "gpt2", GPT2) == []
    (folder / "llama" / "config.json").unlink()  # the job may describe the model by itself
    assert found(folder / "llama") == []
    monkeypatch.setenv("HOME", str(folder))
    assert found("~/llama") == []
    import_hf(build(SPEC, seed=2), "~/llama")


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_writes_fits(case, tmp_path):
    peer(case).save_pretrained(tmp_path)
    assert found(tmp_path, spec_from_config(json.loads((tmp_path / "config.json").read_text()))) == []


def test_a_folder_that_is_missing_or_holds_no_weights(folder):
    for weights, says in ((folder / "nope", "does not exist"), (folder, "neither model.safetensors nor")):
        (one,) = found(weights)
        assert one.code == "weights-files" and says in one.what
    (next((folder / "shards").glob("model-00002-*"))).unlink()
    (one,) = found(folder / "shards")
    assert one.code == "weights-files" and "model-00002" in one.what


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_damaged_file(folder, damage):
    file = folder / "llama" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-5], "text": b"<html>not found</html>", "empty": b""}[damage])
    (one,) = found(folder / "llama")
    assert one.code == "weights-files" and str(file) in one.what


def test_another_family(folder):
    (one,) = found(folder / "gpt2")
    assert one.code == "weights-mismatch" and "of the family gpt2, the job's is llama" in one.what
    (folder / "gpt2" / "config.json").unlink()
    (one,) = found(folder / "gpt2")
    assert one.code == "weights-mismatch" and "no tensor model.embed_tokens.weight" in one.what


@pytest.mark.parametrize(
    ("change", "by_config", "by_header"),
    [
        ({"hidden_size": 32}, "hidden_size 16, the job's is 32", "the embedding is [31, 16], the job's [31, 32]"),
        ({"vocab_size": 64}, "vocab_size 31, the job's is 64", "the embedding is [31, 16], the job's [64, 16]"),
        ({"num_layers": 1}, "num_hidden_layers 2, the job's is 1", "2 layers, the job's has 1"),
        ({"ffn_size": 48}, "intermediate_size 24, the job's is 48", None),
        ({"tied_embeddings": False}, "tie_word_embeddings true, the job's is false", None),
    ],
)
def test_other_sizes(folder, change, by_config, by_header):
    spec = SPEC.model_copy(update=change)
    (one,) = found(folder / "llama", spec)
    assert one.code == "weights-mismatch" and by_config in one.what
    if by_header is not None:
        (folder / "llama" / "config.json").unlink()
        (one,) = found(folder / "llama", spec)
        assert one.code == "weights-mismatch" and by_header in one.what


def test_check_says_it_without_torch(tmp_path):
    (tmp_path / "job.toml").write_text('[model]\npreset = "llama-3-8b"\nweights = "/nope"\n')
    code = (
        "import sys; from bessemer.api import check; "
        f"print([(p.code, p.where) for p in check({str(tmp_path / 'job.toml')!r}).problems]); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "('weights-files', 'model.weights')" in done.stdout
