import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from corpus_files import make_job, write_megatron, write_texts

from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem
from bessemer.data.problems import problems


def spec(vocab_size: int) -> ModelSpec:
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 16}
    return ModelSpec(family="llama", vocab_size=vocab_size, max_positions=64, **sizes)


def found(tmp_path: Path, vocab: int = 1 << 20, **data: Any) -> list[Problem]:
    listed = problems(make_job(tmp_path, **data), spec(vocab), None)
    assert all(p.what and p.fix for p in listed)
    return listed


def codes(listed: list[Problem]) -> list[tuple[str, str]]:
    return [(p.code, p.where) for p in listed]


def test_a_good_job_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == [] and found(tmp_path, corpus="python-stdlib", tokenizer="bpe-4096") == []
    assert found(tmp_path, paths=[str(write_texts(tmp_path / "c"))]) == []


def test_corpora_that_do_not_exist(tmp_path: Path) -> None:
    (one,) = found(tmp_path, corpus="python-stdlb")
    assert (one.code, one.where) == ("corpus-unknown", "data.corpus") and '"python-stdlib"' in one.fix
    listed = found(tmp_path, paths=[str(tmp_path / "no*.txt"), str(tmp_path / "gone")])
    assert codes(listed) == [("paths-empty", "data.paths")] * 2
    listed = found(tmp_path, mixture=[{"corpus": "python-stdlib"}, {"corpus": "wikipedia"}, {"paths": ["/none"]}])
    assert codes(listed) == [("corpus-unknown", "data.mixture.1.corpus"), ("paths-empty", "data.mixture.2.paths")]


def test_more_than_one_corpus(tmp_path: Path) -> None:
    folder = str(write_texts(tmp_path / "c"))
    assert codes(found(tmp_path, corpus="python-stdlib", paths=[folder])) == [("corpus-several", "data.paths")]
    listed = found(tmp_path, mixture=[{"corpus": "python-stdlib", "paths": [folder]}, {"weight": 2}])
    assert codes(listed) == [("mixture-part", "data.mixture.0"), ("mixture-part", "data.mixture.1")]


def test_weights_too_fine_get_ones_that_work(tmp_path: Path) -> None:
    parts = [{"corpus": "python-stdlib", "weight": w} for w in (0.123456, 0.876543)]
    (one,) = found(tmp_path, mixture=parts)
    assert one.code == "mixture-weights" and "0.123, 0.877" in one.fix
    assert found(tmp_path, mixture=[{**p, "weight": w} for p, w in zip(parts, (0.123, 0.877), strict=True)]) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [("bpe-100", "tokenizer-size"), ("bpe_4096", "tokenizer-unknown"), ("no/such.json", "tokenizer-unknown")],
)
def test_tokenizers_that_do_not_exist(tmp_path: Path, name: str, code: str) -> None:
    (one,) = found(tmp_path, tokenizer=name)
    assert (one.code, one.where) == (code, "data.tokenizer")


def test_tokenizer_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert codes(found(tmp_path, tokenizer=str(path))) == [("tokenizer-file", "data.tokenizer")]
    (one,) = found(tmp_path, tokenizer=str(tmp_path))
    assert one.code == "tokenizer-unknown" and str(path) in one.fix
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 7, "content": "<odd>"}]}
    path.write_text(json.dumps(content))
    assert codes(found(tmp_path, tokenizer=str(path))) == [("tokenizer-eos", "data.tokenizer")]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<odd>"}')
    assert found(tmp_path, tokenizer=str(path), vocab=8) == []
    (one,) = found(tmp_path, tokenizer=str(path), vocab=7)
    assert one.code == "tokenizer-vocab" and "model.vocab_size = 8" in one.fix


def test_tokenizers_larger_than_the_vocabulary(tmp_path: Path) -> None:
    assert codes(found(tmp_path, vocab=256)) == [("tokenizer-vocab", "data.tokenizer")]
    (one,) = found(tmp_path, vocab=1000, tokenizer="bpe-4096")
    assert 'data.tokenizer = "bpe-1000"' in one.fix
    assert problems(make_job(tmp_path), None, None) == []


def test_a_corpus_below_one_batch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 319)
    paths = [str(tmp_path / "a.txt")]
    (one,) = found(tmp_path, paths=paths, train={"global_batch": 10})
    assert one.code == "corpus-small" and "train.global_batch = 9" in one.fix
    assert found(tmp_path, paths=paths, train={"global_batch": 9}) == []
    (one,) = found(tmp_path, paths=paths, train={"global_batch": 1, "batch_ramp": [(5, 100)]})
    assert one.code == "corpus-small"


def test_an_empty_corpus_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (one,) = found(tmp_path, paths=[str(tmp_path / "a.txt")])
    assert (one.code, one.where) == ("corpus-empty", "data") and "empty" in one.what
    (tmp_path / "b.txt").write_text("x")
    (one,) = found(tmp_path, paths=[str(tmp_path / "*.txt")], train={"global_batch": 1})
    assert one.code == "corpus-small" and one.why.startswith("1 sequence of")


@pytest.mark.parametrize("pattern", ["gone", "no*.txt"])
def test_relative_paths_say_from_where_they_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = found(tmp_path, paths=[pattern])
    assert f"meant from the current directory, {tmp_path}" in one.why and "same command in the directory" in one.fix
    (one,) = found(tmp_path, paths=[str(tmp_path / pattern)])
    assert "current directory" not in one.why + one.fix


def test_a_tilde_is_the_home_folder_in_paths_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_texts(tmp_path / "c")
    content = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<|endoftext|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert found(tmp_path, paths=["~/c", "~/c/*.txt"], tokenizer="~/tokenizer.json") == []
    (one,) = found(tmp_path, paths=["~no-such-user/a.txt"])  # no crash: nobody has this home folder
    assert one.code == "paths-empty"


def test_token_files(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[[1] * 200]], code=8)
    assert found(tmp_path, paths=[str(tmp_path / "m")], train={"global_batch": 6}) == []
    (one,) = found(tmp_path, paths=[str(tmp_path / "m")], train={"global_batch": 7})
    assert one.code == "corpus-small" and "200 tokens" in one.what
    listed = found(tmp_path, paths=[str(tmp_path / "m")], tokenizer="bpe-300")
    assert codes(listed) == [("megatron-tokenizer", "data.tokenizer")]
    folder = str(write_texts(tmp_path / "c"))
    assert codes(found(tmp_path, paths=[folder, str(tmp_path / "m")])) == [("megatron-mixed", "data.paths")]
    (tmp_path / "m.idx").write_bytes(b"odd")
    assert codes(found(tmp_path, paths=[str(tmp_path / "m")])) == [("megatron-index", "data.paths")]


def test_evaluation_without_a_validation_split(tmp_path: Path) -> None:
    job = make_job(tmp_path, val_fraction=0, train={"eval_every": 10})
    assert codes(problems(job, None, None)) == [("val-none", "data.val_fraction")]


def test_checking_is_quick_and_loads_no_heavy_package(tmp_path: Path) -> None:
    job = make_job(tmp_path, tokenizer="bpe-4096")
    problems(job, spec(4096), None)
    times = []
    for _ in range(5):
        begin = time.process_time()
        problems(job, spec(4096), None)
        times.append(time.process_time() - begin)
    assert min(times) < 0.02
    code = (
        "import sys, bessemer.data.problems\n"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'pyarrow', 'xxhash') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
