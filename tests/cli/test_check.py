"""`bessemer check` on the broken jobs of examples/broken: each fault is found with its place and a fix, no other is."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer import api
from bessemer.cli import main
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job

BROKEN = Path(__file__).parents[2] / "examples" / "broken"

EXPECTED: dict[str, set[tuple[str, str]]] = {
    "batch": {("batch-split", "train.global_batch")},
    "betas": {("betas", "train.betas[1]")},
    "choice": {("unknown-choice", "train.optimizer")},
    "context": {
        ("cp-sequence", "layout.cp"),
        ("ignored-setting", "layout.schedule"),
    },
    "corpus": {("paths-empty", "data.paths")},
    "experts": {
        ("ep-experts", "layout.ep"),
    },
    "family": {("model-family", "model.family")},
    "five": {
        ("unknown-key", "train.sed"),
        ("seq-positions", "data.seq_len"),
        ("batch-split", "train.global_batch"),
        ("ignored-setting", "train.muon_momentum"),
        ("ignored-setting", "layout.dp_shard"),
    },
    "gpus": {("gpus", "machine.gpus"), ("gpus-per-node", "machine.gpus_per_node")},
    "heads": {("tp-heads", "layout.tp")},
    "idle_replicas": {("batch-units", "train.global_batch")},
    "ignored": {
        ("ignored-setting", "layout.cp_kind"),
        ("ignored-setting", "train.decay_fraction"),
        ("ignored-setting", "train.muon_lr"),
        ("ignored-setting", "keep.spares"),
    },
    "kv_heads": {("tp-kv-heads", "layout.tp")},
    "layers": {
        ("pp-layers", "layout.pp"),
        ("schedule-shape", "layout.schedule"),
    },
    "machine": {("machine-unknown", "machine.name")},
    "memory": {("memory", "machine.name")},
    "micro_batches": {("schedule-shape", "layout.schedule")},
    "misplaced_key": {("misplaced-key", "steps"), ("misplaced-key", "train.seq_len")},
    "mode": {("one-replica", "keep.mode")},
    "model_key": {("model-key", "model.hiden_size")},
    "no_experts": {("ep-no-experts", "layout.ep")},
    "out_of_range": {("out-of-range", "train.clip"), ("out-of-range", "train.lr"), ("out-of-range", "layout.dp")},
    "positions": {("seq-positions", "data.seq_len")},
    "preset": {("model-preset", "model.preset")},
    "ramp": {
        ("batch-ramp", "train.batch_ramp[1]"),
        ("batch-ramp", "train.batch_ramp[2]"),
        ("batch-split", "train.batch_ramp[1][1]"),
    },
    "recipe": {("recipe-machine", "precision.recipe")},
    "replicas": {("replicas", "keep.replicas")},
    "resume": {("resume-missing", "run.resume")},
    "schedule": {("warmup-steps", "train.warmup_steps"), ("eval-every", "train.eval_every")},
    "sequence_parallel": {("sp-sequence", "layout.sequence_parallel")},
    "stage_count": {("stage-count", "layout.stage_layers")},
    "stage_layers": {("stage-sum", "layout.stage_layers")},
    "syntax": {("toml-syntax", f"{BROKEN / 'syntax.toml'}:3:13")},
    "tokenizer": {("tokenizer-vocab", "data.tokenizer")},
    "unit": {("unit-split", "keep.unit")},
    "unknown_key": {("unknown-key", "train.warmup_step")},
    "unknown_table": {("unknown-table", "trian")},
    "wrong_type": {("wrong-type", "train.steps"), ("wrong-type", "train.global_batch"), ("wrong-type", "data.paths")},
}


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    shown = capsys.readouterr()
    assert not shown.err
    return int(caught.value.code or 0), shown.out


def test_every_broken_job_is_in_the_table_and_says_what_is_broken() -> None:
    files = sorted(BROKEN.glob("*.toml"))
    assert [f.stem for f in files] == sorted(EXPECTED)
    for file in files:
        assert file.read_text(encoding="utf-8").startswith("# Broken"), file


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_broken_job(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(BROKEN / f"{name}.toml")
    code, out = _run(capsys, path, "--json")
    found = json.loads(out)
    assert code == 2 and set(found) == {"ok", "problems"} and found["ok"] is False
    assert {(p["code"], p["where"]) for p in found["problems"]} == EXPECTED[name]
    assert len(found["problems"]) == len(EXPECTED[name])
    for problem in found["problems"]:
        assert set(problem) == {"code", "where", "what", "why", "fix"}
        assert problem["what"] and problem["fix"]
    code, text = _run(capsys, path)
    assert code == 2 and "(nothing was started)" in text
    assert all(f"[{where}]" in text for _, where in EXPECTED[name])


def test_five_faults_are_five_problems() -> None:
    assert len(api.check(str(BROKEN / "five.toml")).problems) == 5


def test_the_default_job_has_no_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("", encoding="utf-8")
    code, out = _run(capsys, str(path), "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] is True and found["problems"] == []
    assert found["job_hash"] == Job().hash and found["memory_bytes"]["parameters"] > 0
    code, text = _run(capsys, str(path))
    assert code == 0 and "no problems" in text and "5,770,496 parameters" in text


def test_a_resolved_job_checks_like_the_job_it_came_from(tmp_path: Path) -> None:
    """The job.toml of a run folder writes every default out; that must not read as settings without effect."""
    path = tmp_path / "job.toml"
    path.write_text(dump_job(Job()), encoding="utf-8")
    assert api.check(str(path)).problems == ()


def test_what_follows_from_a_slip_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[train]\nsteps = "2000"\nwarmup_steps = 500\neval_every = 700\nclip = -1\n', encoding="utf-8")
    codes = {(p.code, p.where) for p in api.check(str(path)).problems}
    assert codes == {("wrong-type", "train.steps"), ("out-of-range", "train.clip")}


def test_all_rooms_are_asked_even_where_the_model_and_the_machine_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = '[model]\npreset = "gpt-9"\n[machine]\nname = "h9000"\n[train]\nglobal_batch = 15\n[layout]\nep = 2\n'
    path.write_text(text, encoding="utf-8")
    assert {p.code for p in api.check(str(path)).problems} == {
        "model-preset", "machine-unknown", "batch-split",
    }  # fmt: skip


def test_sets_reach_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = _run(capsys, str(BROKEN / "batch.toml"), "--set", "train.global_batch=96")
    assert code == 0


def test_check_is_quick_and_imports_no_torch() -> None:
    """Under a second in a process of its own, in CPU time: it waits for nothing, and the wall clock of a machine that
    is busy with other tests says nothing about it."""
    script = (
        "import sys\n"
        "from bessemer.cli import main\n"
        f"try: main(['check', {str(BROKEN / 'five.toml')!r}])\n"
        "except SystemExit as stop: code = stop.code\n"
        "heavy = {'torch', 'tokenizers', 'safetensors', 'transformers', 'pyarrow', 'xxhash'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("5 problems in ") and not done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.0


def test_a_verb_without_its_extra_prints_the_line_to_install_it() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from bessemer.cli import main\n"
        f"main(['train', {str(BROKEN / 'batch.toml')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "pip install 'bessemer[train]'" in done.stderr and "Traceback" not in done.stderr
