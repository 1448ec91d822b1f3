"""The checks that examples/broken has no file for, and that the values a fix names do mend the fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bessemer import api
from bessemer.core.problem import Problem

BROKEN = Path(__file__).parents[2] / "examples" / "broken"
DEEPSEEK = ("model.preset=deepseek-v2-lite", "data.tokenizer=bytes", "machine.name=h100", "train.global_batch=512")
QWEN_MOE = ("model.preset=qwen3-30b-a3b", "data.tokenizer=bytes", "machine.name=h100", "train.global_batch=512")
NARROW_BUT_FIRST = (
    "model.preset=deepseek-v2-lite", "data.tokenizer=bytes", "model.hidden_size=256", "model.intermediate_size=512",
    "model.moe_intermediate_size=16", "model.num_attention_heads=2", "model.num_key_value_heads=2",
    "model.kv_lora_rank=32", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=16",
)  # fmt: skip
"""Only the first block's feed-forward is wide enough for blocks of 128."""
UNSURE = {"not-runnable", "memory"}
"""Codes that come along with nearly every layout that isn't trained yet."""


@pytest.fixture
def empty(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text("", encoding="utf-8")
    return str(path)


def _found(job: str, sets: tuple[str, ...]) -> dict[tuple[str, str], Problem]:
    return {(p.code, p.where): p for p in api.check(job, sets).problems}


@pytest.mark.parametrize(
    ("sets", "code", "where", "part"),
    [
        (("layout.tp=2", "model.intermediate_size=767"), "tp-ffn", "layout.tp", "767"),
        (("layout.tp=3", *DEEPSEEK), "tp-heads", "layout.tp", "16 attention heads"),
        (("layout.tp=5", *DEEPSEEK), "tp-ffn", "layout.tp", "shared_ffn_size"),
        (("layout.cp=3", "layout.cp_kind=ulysses", "data.seq_len=255"), "cp-heads", "layout.cp", "8 attention heads"),
        (("layout.cp=3", "layout.cp_kind=ulysses"), "cp-sequence", "layout.cp", "6 equal pieces"),
        (("layout.cp=2", "data.seq_len=254"), "cp-sequence", "layout.cp", "4 equal pieces"),
        (("layout.pp=2", "layout.stage_layers=[2, 2]"), "stage-sum", "layout.stage_layers", "adds up to 4"),
        (("layout.tp=2", "layout.tp_chunks=3"), "tp-chunks", "layout.tp_chunks", "256 tokens"),
        (("layout.tp_chunks=3",), "ignored-setting", "layout.tp_chunks", "tp = 1"),
        (("layout.dp=2", "layout.pp=2", "layout.schedule=dualpipev"), "schedule-shape", "layout.schedule", "1 micro"),
        (
            ("layout.dp=2", "layout.dp_shard=full", "keep.replicas=2", "layout.ep=2", *QWEN_MOE),
            "ep-replica",
            "keep.replicas",
            "2 replicas",
        ),
        (("layout.tp=3", "data.seq_len=256", "model.preset=mixtral-8x7b"), "sp-sequence", "layout.tp", "routes"),
        (("layout.pp=7",), "pp-layers", "layout.pp", "7 stages"),
        (("layout.virtual_stages=2",), "ignored-setting", "layout.virtual_stages", "pp = 1"),
        (("layout.stage_layers=[6]",), "ignored-setting", "layout.stage_layers", "[6]"),
        (("layout.sequence_parallel=true",), "ignored-setting", "layout.sequence_parallel", "tp = 1"),
        (("layout.schedule=1f1c",), "schedule-unknown", "layout.schedule", "1f1c"),
        (("layout.etp=2",), "etp-no-experts", "layout.etp", "none"),
        (("layout.dp=4", "layout.ep=8", *QWEN_MOE), "ep-ranks", "layout.ep", "4 ranks"),
        (("layout.dp=3", "layout.ep=3", *QWEN_MOE), "ep-experts", "layout.ep", "128 experts"),
        (("layout.dp=5", "layout.etp=5", *QWEN_MOE), "etp-ffn", "layout.etp", "768"),
        (("train.global_batch=8", "train.micro_batch=16"), "batch-split", "train.global_batch", "micro_batch 16"),
        (
            ("layout.dp=4", "layout.dp_shard=full", "train.global_batch=48"),
            "batch-split",
            "train.global_batch",
            "micro_batch 8 x dp 4",
        ),
        (("keep.unit=16", "train.global_batch=24"), "batch-split", "train.global_batch", "keep.unit 16"),
        (("layout.dp=2", "keep.replicas=1"), "replicas", "keep.replicas", "nothing sharded"),
        (("layout.dp_shard=full",), "ignored-setting", "layout.dp_shard", "nothing to share out"),
        (("train.batch_ramp=[[50, 0]]",), "batch-ramp", "train.batch_ramp[0]", "0 sequences"),
        (("train.batch_ramp=[[0, 8]]",), "batch-ramp", "train.batch_ramp[0]", "where it begins"),
        (("train.lr_schedule=constant", "train.min_lr_ratio=0.5"), "ignored-setting", "train.min_lr_ratio", "constant"),
        (
            ("train.lr_schedule=wsd", "train.decay_fraction=0.8", "train.warmup_steps=50"),
            "decay-overlap",
            "train.decay_fraction",
            "overlap",
        ),
        (("train.betas=[0.0, 0.9]",), "betas", "train.betas[0]", "0.0"),
        (("data.val_fraction=0", "train.eval_sequences=8"), "ignored-setting", "train.eval_sequences", "val_fraction"),
        (("data.val_fraction=0", "train.eval_every=8"), "val-none", "data.val_fraction", "8 steps"),
        (("keep.every=0", "keep.keep_every=10"), "ignored-setting", "keep.keep_every", "every = 0"),
        (("keep.min_replicas=2",), "ignored-setting", "keep.min_replicas", "restart"),
        (("keep.memory_every=2",), "ignored-setting", "keep.memory_every", "restart"),
        (("keep.mode=zero-interruption", "keep.min_replicas=2"), "min-replicas", "keep.min_replicas", "1 replicas"),
        (("run.resume=atuo",), "resume-missing", "run.resume", "atuo"),
        (("precision.recipe=fp9",), "recipe-unknown", "precision.recipe", "fp9"),
        (("precision.recipe=nvfp4", "machine.name=h100"), "recipe-machine", "precision.recipe", "h100"),
        (("precision.recipe=mxfp8", "machine.name=h200"), "recipe-machine", "precision.recipe", "a scale per 32"),
        (("precision.recipe=fp8-row", "machine.name=a100-80gb"), "recipe-machine", "precision.recipe", "fp8 matrix"),
        (("precision.recipe=fp8-block128", "machine.name=mtt-s5000"), "recipe-machine", "precision.recipe", "musa"),
        (("precision.recipe=mxfp8", "precision.margin=1"), "ignored-setting", "precision.margin", "margin = 1"),
        (("precision.amax=max",), "ignored-setting", "precision.amax", '"max"'),
        (("precision.high_last=1",), "ignored-setting", "precision.high_last", "bf16"),
        (
            ("precision.recipe=mxfp8", "precision.high_first=5", "precision.high_last=1"),
            "precision-high",
            "precision.high_first",
            "none of the 6 blocks",
        ),
        (
            (
                "model.hidden_size=64",
                "model.intermediate_size=128",
                "precision.recipe=fp8-block128",
                "precision.smooth=true",
                "precision.saved=fp8",
                "precision.watch_every=1",
                "precision.fall_back=true",
            ),
            "ignored-setting",
            "precision.recipe",
            "attn.qkv: inputs 64 -> 128",
        ),
        (
            (*NARROW_BUT_FIRST, "precision.recipe=fp8-block128", "precision.high_first=1"),
            "ignored-setting",
            "precision.recipe",
            "quantises no layer",
        ),
        (
            ("model.intermediate_size=64", "precision.recipe=fp8-block128", "precision.smooth=true"),
            "ignored-setting",
            "precision.smooth",
            "mlp.down: inputs 64 -> 128",
        ),
        (
            ("precision.recipe=fp8-current", "precision.watch_every=101"),
            "watch-every",
            "precision.watch_every",
            "100 steps",
        ),
        (
            ("precision.recipe=fp8-current", "precision.watch_every=51", "precision.fall_back=true"),
            "watch-every",
            "precision.fall_back",
            "one sample in 100 steps",
        ),
        (("model.num_hidden_layers=1000000000000",), "model-value", "model.num_hidden_layers", "at most 100000"),
        (("machine.gpus=3", "layout.dp=2"), "gpus", "machine.gpus", "needs 2"),
        (("machine.gpus=3",), "gpus", "machine.gpus", "= 1 rank"),
        (("train.steps=5", "train.warmup_steps=10"), "warmup-steps", "train.warmup_steps", "longer than the run"),
        (("model.head_dim=15",), "model-heads", "model.head_dim", "15 dimensions"),
    ],
)
def test_contradiction(empty: str, sets: tuple[str, ...], code: str, where: str, part: str) -> None:
    problem = _found(empty, sets)[code, where]
    assert part in f"{problem.what}\n{problem.why}"
    assert problem.fix


@pytest.mark.parametrize(
    "sets",
    [
        ("layout.dp=2",),
        ("layout.dp=4", "layout.dp_shard=full", "train.global_batch=32"),
        ("layout.dp=4", "layout.dp_shard=gradient", "keep.replicas=2", "train.global_batch=32"),
        ("layout.dp=2", "keep.replicas=2"),
        ("keep.unit=16", "train.global_batch=32"),
        ("train.batch_ramp=[[10, 8], [20, 16]]", "train.global_batch=32"),
        ("train.optimizer=muon", "train.muon_lr=0.01"),
        ("train.lr_schedule=wsd", "train.decay_fraction=0.9"),
        ("train.steps=3",),  # shorter than the default warm-up
        ("layout.schedule=1f1b", "layout.virtual_stages=1", "layout.cp_kind=ring"),  # written out, as defaults are
        ("precision.recipe=fp32", "machine.gpus=1"),
        ("precision.recipe=fp8-delayed", "precision.history=4", "precision.amax=most_recent", "precision.margin=1"),
        ("precision.recipe=mxfp8", "precision.high_first=1", "precision.high_last=1"),
        ("precision.recipe=fp8-block128", "machine.name=h100"),
        ("precision.recipe=fp8-block128", "precision.smooth=true", "precision.watch_every=100"),
        (*NARROW_BUT_FIRST, "precision.recipe=fp8-block128", "precision.smooth=true"),
        ("precision.recipe=fp8-current", "precision.watch_every=50", "precision.fall_back=true"),
        ("precision.recipe=fp8-current", "model.hidden_size=64", "model.intermediate_size=128"),
        ("precision.recipe=fp8-current", "machine.name=mtt-s5000"),
        ("precision.recipe=nvfp4", "machine.name=b200"),
        ("precision.recipe=mxfp8", "machine.name=a100-80gb", "precision.emulate=true"),
        ("layout.dp=12", "train.global_batch=96"),  # on a CPU there is no host to fill
    ],
)
def test_sound_jobs_have_no_problems(empty: str, sets: tuple[str, ...]) -> None:
    assert not _found(empty, sets)


_VALUE = r'(?:"[^"]*"|\[[^\]]*\]|-?\d[\w.-]*|true|false)'
_FIX = re.compile(rf"(\w+\.\w+) = ({_VALUE}(?:(?:, | or ){_VALUE})*)")


def _suggestions(fix: str) -> list[str]:
    """The overrides that a fix proposes, each value of a list for itself."""
    return [f"{field}={value}" for field, values in _FIX.findall(fix) for value in re.findall(_VALUE, values)]


def test_suggestions_are_read_as_people_read_them() -> None:
    assert _suggestions('model.vocab_size = 4098, or layout.tp = 1, 2 or 4') == [
        "model.vocab_size=4098", "layout.tp=1", "layout.tp=2", "layout.tp=4",
    ]  # fmt: skip
    assert _suggestions('delete it, or train.optimizer = "muon"') == ['train.optimizer="muon"']


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.toml")), ids=lambda p: p.stem)
def test_each_value_that_a_fix_names_mends_the_fault(path: Path) -> None:
    """An override can't take a misplaced key away or make a list of another length whole, so those are left out."""
    for (code, where), problem in _found(str(path), ()).items():
        if code in ("misplaced-key", "unknown-key"):
            continue
        for override in _suggestions(problem.fix):
            if override.count("=") == 1 and "][" not in override and "[" not in override.partition("=")[0]:
                assert (code, where) not in _found(str(path), (override,)), f"{override} does not mend {problem}"


@pytest.mark.parametrize("tp", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("preset", ["llama-3-8b", "qwen3-32b", "gpt-3-175b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_degrees_that_a_fix_names_fit(empty: str, preset: str, tp: int) -> None:
    base = (f"model.preset={preset}", f"layout.tp={tp}", "machine.name=h100", "data.tokenizer=bytes")
    for (code, where), problem in _found(empty, base).items():
        if code in UNSURE or where != "layout.tp":
            continue
        suggestions = [s for s in _suggestions(problem.fix) if s.startswith("layout.tp=")]
        assert suggestions
        for override in suggestions:
            assert (code, where) not in _found(empty, (*base, override))


_INTEGERS = st.integers(-2, 9) | st.sampled_from([0, 64, 1000, 10**12])
_OVERRIDES = st.one_of(
    st.tuples(
        st.sampled_from([
            "layout.dp", "layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.etp", "layout.virtual_stages",
            "train.steps", "train.global_batch", "train.micro_batch", "train.warmup_steps", "train.eval_every",
            "train.decay_fraction", "keep.replicas", "keep.unit", "keep.every", "keep.keep_every", "keep.min_replicas",
            "machine.gpus", "machine.gpus_per_node", "data.seq_len", "data.val_fraction", "model.num_hidden_layers",
            "model.num_attention_heads", "model.num_key_value_heads", "model.vocab_size", "model.hidden_size",
        ]),
        _INTEGERS.map(str),
    ),
    st.tuples(st.sampled_from(["layout.stage_layers", "train.betas"]), st.lists(_INTEGERS, max_size=4).map(str)),
    st.tuples(st.just("train.batch_ramp"), st.lists(st.lists(_INTEGERS, min_size=2, max_size=2), max_size=3).map(str)),
    st.sampled_from([
        ("layout.dp_shard", "full"), ("layout.sequence_parallel", "true"), ("layout.cp_kind", "ulysses"),
        ("layout.schedule", "zb-h1"), ("keep.mode", "zero-interruption"), ("precision.recipe", "mxfp8"),
        ("train.optimizer", "muon"), ("train.lr_schedule", "wsd"), ("machine.name", "mtt-s5000"),
        ("machine.name", "b200"), ("data.tokenizer", "bytes"), ("model.preset", "deepseek-v3"),
        ("model.preset", "qwen3-30b-a3b"), ("model.preset", "gpt-3-175b"), ("model.rope_scaling", "{factor = 2}"),
    ]),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=st.lists(_OVERRIDES, max_size=8))
def test_no_job_breaks_the_check(empty: str, overrides: list[tuple[str, str]]) -> None:
    """Whatever stands in the file, the answer is a list of problems: each whole, none twice."""
    result = api.check(empty, [f"{field}={value}" for field, value in overrides])
    assert result.ok == bool(result.summary)
    assert len(set(result.problems)) == len(result.problems)
    assert all(p.code and p.where and p.what and p.fix for p in result.problems), str(result)
