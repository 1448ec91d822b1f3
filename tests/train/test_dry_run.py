"""A job run in shapes only: held against what ranks really hold, and the planner's prediction against it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from train.toy import DEEPSEEK, MIXTRAL, MODEL, toy_parts

from bessemer import api, ops
from bessemer.cli import main
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.core.memory import rank_lines
from bessemer.core.units import toml_text
from bessemer.models.canonical import local
from bessemer.models.decoder import Decoder
from bessemer.parallel.program import Step
from bessemer.plan.own_memory import own_rank_lines
from bessemer.plan.space import Layouts
from bessemer.runtime.allocations import AllocationSample
from bessemer.train.dry_memory import StageBytes, peak_bytes, stage_bytes
from bessemer.train.dry_run import dry_run

WEIGHTS_BAR, ACTIVATIONS_BAR, SECONDS_BAR = 0.02, 0.10, 60.0
FULL_SHAPES = Path(__file__).parents[2] / "examples" / "full_shapes"
SEQ = 128
native = pytest.mark.skipif(bool(ops.why_absent()), reason="without native kernels a CPU saves other tensors")


def small_job(model: dict[str, Any], layout: dict[str, Any], recipe: str = "bf16", moments: str = "fp32") -> Job:
    """Four micro-batches of two sequences a data-parallel rank, without document masks."""
    return Job.model_validate(
        {
            "model": model | {"vocab_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 2 * SEQ},
            "data": {"seq_len": SEQ},
            "layout": layout,
            "train": {"micro_batch": 2, "global_batch": 8 * layout.get("dp", 1)},
            "precision": {"recipe": recipe, "moments": moments},
        }
    )


def real_bytes(rank: int, _world_size: int, text: str) -> tuple[int, dict[str, int]]:
    """(pipeline rank, bytes by line) of a rank that really runs units; its gradients exist before.

    The least of several peaks: gloo's threads may hold a tensor for a moment after its exchange was waited for.
    """
    job = Job.model_validate_json(text)
    parts = toy_parts(job, rank)
    micro, vocabulary = job.micro_batches, parts.spec.vocab_size
    shape, generator = (micro, job.train.micro_batch, SEQ), torch.Generator().manual_seed(rank)
    batches = [{"tokens_BS": t, "labels_BS": t} for t in torch.randint(0, vocabulary, shape, generator=generator)]
    peaks = []
    for _ in range(4):
        for param in parts.module.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        with AllocationSample() as sample:
            parts.step.passes.run(iter(batches), micro)
        parts.parallel.finish()
        peaks.append(sample.peak_bytes)
    return parts.mesh.at("pp"), {
        "weights": sum(local(p).nbytes for p in parts.module.parameters()),
        "optimizer": sum(local(t).nbytes for t in parts.optimizer.kept()),
        "peak": min(peaks[1:]),  # the first unit also makes what stays, such as rotation tables
    }


@native
@pytest.mark.parametrize(
    ("model", "layout", "recipe", "tolerance"),
    [
        (MODEL, {}, "bf16", 1e-3),
        (MODEL, {"tp": 2, "sequence_parallel": True}, "bf16", 1e-3),
        (MODEL, {"pp": 2, "virtual_stages": 2}, "bf16", 1e-3),
        (MODEL, {"pp": 2, "schedule": "gpipe"}, "fp32", 0.02),  # oneDNN makes the loss's products apart
        (MODEL, {"pp": 2, "schedule": "zb-h1"}, "bf16", 0.03),  # where I and W of several micro-batches overlap
        (MODEL, {"cp": 2}, "bf16", 1e-3),
        (MIXTRAL, {"dp": 2, "ep": 2}, "fp32", 0.01),
        (DEEPSEEK, {"tp": 2, "pp": 2, "ep": 2, "sequence_parallel": True, "schedule": "zb-v"}, "bf16", 0.03),
    ],
    ids=lambda value: str(value.get("family", value)) if isinstance(value, dict) else None,
)
def test_ranks_really_hold_what_is_counted(
    model: dict[str, Any], layout: dict[str, Any], recipe: str, tolerance: float
) -> None:
    job = small_job(model, layout, recipe)
    text, ranks = job.model_dump_json(), job.layout.world_size
    found = run_ranks(ranks, real_bytes, text) if ranks > 1 else [real_bytes(0, 1, text)]
    dry = dry_run(job, resolve_model(job.model))
    for pipeline_rank, lines in enumerate(rank.lines for rank in dry):
        ranks_of = [real for at, real in found if at == pipeline_rank]
        for real in ranks_of:
            assert (lines["weights"], lines["optimizer"]) == (real["weights"], real["optimizer"])
        peak = statistics.mean(real["peak"] for real in ranks_of)  # what one expert has too much, another lacks
        assert lines["activations"] + lines["working"] == pytest.approx(peak, rel=tolerance)


def kept_bytes(rank: int, _world_size: int, text: str) -> tuple[int, int]:
    """(pipeline rank, bytes of optimizer state that a rank holds)."""
    parts = toy_parts(Job.model_validate_json(text), rank)
    return parts.mesh.at("pp"), sum(local(t).nbytes for t in parts.optimizer.kept())


@pytest.mark.parametrize(
    ("moments", "layout", "model"),
    [
        ("bf16", {}, {"tie_word_embeddings": False}),
        ("fp8", {}, {}),
        ("bf16", {"dp": 2, "dp_shard": "full"}, {}),
        ("fp8", {"dp": 2, "dp_shard": "full"}, {}),
        ("fp8", {"dp": 2, "dp_shard": "optimizer"}, {}),
        ("fp8", {"tp": 2, "pp": 2}, {}),
    ],
    ids=str,
)
def test_moments_take_what_the_closed_form_says(moments: str, layout: dict[str, Any], model: dict[str, Any]) -> None:
    """To the byte in the ranks, in a dry run, by `check`'s closed form and by the planner's: shapes divide here."""
    job = small_job(MODEL | model, layout, moments=moments)
    spec, text, ranks = resolve_model(job.model), job.model_dump_json(), job.layout.world_size
    real = run_ranks(ranks, kept_bytes, text) if ranks > 1 else [kept_bytes(0, 1, text)]
    micro = np.array([job.train.global_batch / (job.train.micro_batch * job.layout.dp)])
    planner = own_rank_lines(Layouts.from_job(job), spec, SEQ, micro, precision=job.precision)
    for at, kept in real:
        assert kept == dry_run(job, spec)[at].lines["optimizer"] == rank_lines(job, spec)[at]["optimizer"]
        assert planner[at]["optimizer"] == pytest.approx(kept, abs=0.5)


@native
@pytest.mark.parametrize("model", [MODEL, MIXTRAL, DEEPSEEK], ids=lambda m: m["family"])
def test_autograd_really_saves_what_is_counted(model: dict[str, Any]) -> None:
    """Of two blocks in the middle of a model: bytes of all storages that nodes save, parameters left out."""
    spec = resolve_model(small_job(model, {}).model)
    made = {}
    for device in ("cpu", "meta"):
        made[device] = Decoder(spec, device=device, layers=(1, 2))
        made[device].compute_dtype = torch.bfloat16
    for param in made["cpu"].parameters():
        torch.nn.init.normal_(param, std=0.02)
    saved = {p.untyped_storage().data_ptr(): 0 for p in made["cpu"].parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    tokens = torch.zeros(2, SEQ, dtype=torch.int64)
    x = torch.randn(2, SEQ, spec.hidden_size, requires_grad=True)
    made["cpu"](tokens, tokens, layers=range(1, 2), stream_BSD=x)  # makes the rotation tables
    for table in made["cpu"]._rope.tables(SEQ, tokens.device):
        saved[table.untyped_storage().data_ptr()] = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, _ = made["cpu"](tokens, tokens, layers=range(1, 3), stream_BSD=x)
    counted = stage_bytes(made["meta"], range(1, 3), tokens.to("meta"), split_backward=False)
    assert counted.held == pytest.approx(sum(saved.values()), rel=0.03)
    assert out.requires_grad


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "data": {"seq_len": 8192},
        "layout": {"dp": 4, "tp": 2, "pp": 2},
        "train": {"micro_batch": 1, "global_batch": 64},
    },
    "llama-3-70b": {
        "data": {"seq_len": 8192},
        "layout": {"dp": 8, "tp": 8, "pp": 8, "sequence_parallel": True, "dp_shard": "optimizer"},
        "train": {"micro_batch": 1, "global_batch": 512},
    },
    "mixtral-8x7b": {
        "data": {"seq_len": 4096},
        "layout": {"dp": 16, "pp": 4, "ep": 8, "dp_shard": "optimizer"},
        "train": {"micro_batch": 1, "global_batch": 256},
    },
    "qwen3-30b-a3b": {
        "data": {"seq_len": 4096},
        "layout": {"dp": 16, "ep": 8, "dp_shard": "full"},
        "train": {"micro_batch": 1, "global_batch": 256},
    },
    "deepseek-v3": {
        "data": {"seq_len": 4096},
        "layout": {"dp": 32, "pp": 16, "ep": 32, "dp_shard": "optimizer"},
        "train": {"micro_batch": 1, "global_batch": 2048, "recompute": "full"},
    },
}


def job_file(folder: Path, preset: str, **sections: dict[str, Any]) -> Path:
    table = {"model": {"preset": preset}, "machine": {"name": "h100"}} | PUBLISHED[preset]
    table = {name: table.get(name, {}) | sections.get(name, {}) for name in {**table, **sections}}
    file = folder / "job.toml"
    file.write_text(toml_text(table), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("preset", "ranks", "layout", "moments"),
    [
        ("llama-3-8b", 16, {}, "fp32"),
        ("llama-3-8b", 16, {"sequence_parallel": True}, "fp32"),
        ("llama-3-70b", 512, {}, "bf16"),
        ("mixtral-8x7b", 64, {}, "fp8"),
        ("qwen3-30b-a3b", 16, {}, "fp8"),
        ("deepseek-v3", 512, {}, "fp32"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_planner_agrees_at_published_shapes(
    preset: str, ranks: int, layout: dict[str, Any], moments: str, tmp_path: Path
) -> None:
    file = str(job_file(tmp_path, preset, layout=layout, precision={"moments": moments}))
    assert api.check(file).ok
    found = api.train(file, dry_run=True, ranks=ranks).dry
    assert found is not None and found.fits and found.seconds < SECONDS_BAR
    assert len(found.rows) == found.job.layout.pp
    for row in found.rows:
        for line, bar in (("weights", WEIGHTS_BAR), ("optimizer", WEIGHTS_BAR), ("activations", ACTIVATIONS_BAR)):
            difference = row.difference(line)
            assert difference is not None and abs(difference) < bar, (row.pipeline_rank, line, difference)
    held = sum(row.parameters for row in found.rows) * ranks // len(found.rows)
    assert held > 0 and found.rows[0].run["weights"] == 4 * found.rows[0].parameters


@pytest.mark.parametrize("file", sorted(FULL_SHAPES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_examples_run_dry_at_their_full_shapes(file: Path) -> None:
    found = api.train(str(file), dry_run=True).dry
    assert found is not None and found.fits and found.seconds < SECONDS_BAR
    for row in found.rows:
        assert abs(row.difference("weights") or 0.0) < WEIGHTS_BAR
        assert abs(row.difference("optimizer") or 0.0) < WEIGHTS_BAR
        assert abs(row.difference("activations") or 0.0) < ACTIVATIONS_BAR


@pytest.mark.parametrize(
    "chosen",
    [{"recompute": "budget", "recompute_gb": 15.0}, {"recompute": "fine", "recompute_modules": ["norm", "up"]}],
    ids=["budget", "modules"],
)
def test_what_a_job_chooses_to_make_again_is_predicted(chosen: dict[str, Any], tmp_path: Path) -> None:
    found = api.train(str(job_file(tmp_path, "llama-3-8b", train=chosen)), dry_run=True).dry
    assert found is not None
    assert all(abs(row.difference("activations") or 0.0) < ACTIVATIONS_BAR for row in found.rows)


def test_the_command_prints_the_same_as_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file(tmp_path, "llama-3-8b", run={"dir": str(tmp_path / "runs")})
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["train", str(file), "--dry-run", "--ranks", "16", *flags])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        if not flags:
            assert "16 ranks: dp 4 x tp 2 x pp 2" in out and "h100" in out and "in shapes in" in out
            shown = out
    told = json.loads(out)
    assert told["ranks"] == 16 and told["fits"] is True and len(told["pipeline_ranks"]) == 2
    for row in told["pipeline_ranks"]:
        assert f"{row['bytes']['total'] / 2**30:.2f}" in shown
        assert f"{row['planner_bytes']['activations'] / 2**30:.2f}" in shown
        assert row["bytes"]["total"] == sum(size for line, size in row["bytes"].items() if line != "total")
    assert not (tmp_path / "runs").exists()


def test_a_job_that_does_not_fit_is_told_how_much_it_needs(tmp_path: Path) -> None:
    file = job_file(tmp_path, "llama-3-8b", layout={"dp": 1, "tp": 1, "pp": 1})
    found = api.train(str(file), dry_run=True).dry
    assert found is not None and found.fits is False and "too little" in str(found)


def test_wrong_requests_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(job_file(tmp_path, "llama-3-8b"))
    with pytest.raises(ConfigError) as refused:
        api.train(file, dry_run=True, ranks=512)
    [problem] = refused.value.problems
    assert problem.code == "dry-run-ranks" and "layout.dp=128" in problem.fix and "--ranks 16" in problem.fix
    with pytest.raises(RequestError, match="--dry-run"):
        api.train(file, ranks=16)
    with pytest.raises(ConfigError):
        api.train(file, ["layout.tp=3"], dry_run=True)
    with pytest.raises(SystemExit) as ended:
        main(["train", file, "--json"])
    assert ended.value.code == 2 and "--dry-run" in capsys.readouterr().err


def test_what_meets_on_a_rank_follows_its_program() -> None:
    """What is held at once, and the most during a pass."""
    stage = StageBytes(held=100, waiting=0, during={"F": 130, "B": 150}, takes=0, gives=0)
    order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert peak_bytes([Step(do, 0, micro) for do, micro in order], {0: stage}) == (200, 250)
    split = StageBytes(held=100, waiting=40, during={"F": 100, "I": 120, "W": 60}, takes=0, gives=0)
    order = [("F", 0), ("F", 1), ("I", 0), ("F", 2), ("W", 0), ("I", 1), ("I", 2), ("W", 1), ("W", 2)]
    assert peak_bytes([Step(do, 0, micro) for do, micro in order], {0: split}) == (240, 260)
