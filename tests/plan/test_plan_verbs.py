"""`bessemer plan search|explain|compare|calibrate` as a person types them: JSON shapes, files written, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bessemer import api
from bessemer.cli import main
from bessemer.cli._signature import command_parameters, parameter_docs, summary
from bessemer.core.errors import ConfigError
from bessemer.core.machine import Machine, Origin, load_machine
from bessemer.core.model import ModelSpec
from bessemer.plan import local
from bessemer.plan.calibration import Constant
from bessemer.plan.local_fit import AttentionTime, LayerTime, Measured, ProductTime, fit_constants
from bessemer.plan.units_check import unit_problems

SMALL = (
    "llama-3-8b",
    "--machine",
    "h100",
    "--gpus",
    "8",
    "--global-batch",
    "32",
    "--seq",
    "2048",
    "--fix",
    "recipe=bf16",
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    out = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0 if code is None else 1), out.out, out.err


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return dict(json.loads(out))


def test_search_prints_a_ranking_and_json_of_the_fixed_shape(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "search", *SMALL, "--top", "3", "--tokens", "1e12", "--gpu-hour", "2")
    assert code == 0
    for words in (
        "layouts priced",
        "where the time goes",
        "what breaks first",
        "one change away",
        "Time against memory",
        "cost",
    ):
        assert words in text
    found = asked(capsys, "search", *SMALL, "--top", "3")
    assert {"searched", "pruned", "feasible", "seconds", "layouts"} <= set(found)
    assert len(found["layouts"]) == 3 and found["searched"] >= found["feasible"] > 0 and found["pruned"] > 0
    for row in found["layouts"]:
        assert {"layout", "step_s", "mfu", "tokens_per_s_per_gpu", "memory_bytes", "band", "runnable"} <= set(row)
        low, high = row["band"]
        assert low < row["step_s"] < high and 0 < row["mfu"] < 1
    steps = [row["step_s"] for row in found["layouts"]]
    assert steps == sorted(steps)


def test_a_given_layout_is_the_same_as_in_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    row = asked(capsys, "search", *SMALL, "--top", "5")["layouts"][4]
    one = asked(capsys, "search", *SMALL, "--layout", json.dumps(row["layout"]))
    assert one["searched"] == 1
    for key in ("layout", "step_s", "mfu", "memory_bytes", "band", "runnable", "tokens_per_s_per_gpu"):
        assert one["layouts"][0][key] == pytest.approx(row[key]), key


def test_the_written_job_is_accepted_by_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    code, text, err = run(capsys, "search", *SMALL, "--write", str(job))
    assert code == 0, err
    assert "accepts it" in text and api.check(str(job)).ok
    code, text, _ = run(capsys, "explain", str(job))
    assert code == 0 and "where the time goes" in text


def test_a_layout_that_cannot_be_trained_is_written_only_where_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    wide = ("search", *SMALL, "--fix", "pp=2", "--fix", "schedule=dualpipe", "--write", str(job))
    code, _, err = run(capsys, *wide)
    assert code == 2 and "plan-not-runnable" in err and not job.exists()
    code, text, _ = run(capsys, *wide, "--modelled")
    assert code == 0 and "modelled only" in text
    assert {p.code for p in api.check(str(job)).problems} == {"not-runnable"}


def test_the_report_is_one_page_that_asks_no_network_and_escapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, config = tmp_path / "plan.html", tmp_path / "<b>evil" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }))  # fmt: skip
    code, _, err = run(capsys, "search", str(config), *SMALL[1:], "--fix", "pp=2", "--report", str(page), "--top", "4")
    assert code == 0, err
    text = page.read_text()
    assert "<b>evil" not in text and "&lt;b&gt;evil" in text
    assert not re.search(r"(src|href)=(?!\"#)", text) and "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text and not re.search(r"https?://", text)
    for part in ("ranking", "time", "timeline", "memory", "front", "around", "sensitivity"):
        assert f'id="s-{part}"' in text


def test_explain_compares_with_a_run_and_compare_sets_two_jobs_side_by_side(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, run_folder = tmp_path / "a.toml", tmp_path / "run"
    job.write_text(
        '[model]\npreset = "llama-3-8b"\n[layout]\ndp = 8\ndp_shard = "full"\n'
        '[machine]\nname = "h100"\n[data]\nseq_len = 2048\n[train]\nglobal_batch = 64\n'
    )
    run_folder.mkdir()
    lines = [json.dumps({"step": i + 1, "step_s": 9.0 if i < 5 else 0.5}) for i in range(12)]
    (run_folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = asked(capsys, "explain", str(job), "--run", str(run_folder))
    assert found["measured_s"] == 0.5 and found["error"] == pytest.approx(found["step_s"] / 0.5 - 1)
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"])
    both = asked(capsys, "compare", str(job), str(job))
    assert both["step_ratio"] == 1.0
    code, text, _ = run(capsys, "compare", str(job), str(job))
    assert code == 0 and "B - A" in text


def test_explain_writes_a_trace_of_every_pipeline_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job, trace = tmp_path / "a.toml", tmp_path / "step.json"
    job.write_text(
        '[model]\npreset = "llama-3-8b"\n[layout]\ndp = 2\npp = 4\n'
        '[machine]\nname = "h100"\n[data]\nseq_len = 2048\n[train]\nglobal_batch = 16\nmicro_batch = 1\n'
    )
    found = asked(capsys, "explain", str(job), "--trace", str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in events if e["cat"] == "forward"} == {0, 1, 2, 3}
    assert len([e for e in events if e["cat"] == "forward"]) == 4 * 8, "8 micro-batches on 4 stages"
    assert max(e["ts"] + e["dur"] for e in events) / 1e6 == pytest.approx(found["step_s"], rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("search", "llama-3-7b", *SMALL[1:]), ["model-preset", "llama-3-8b"]),
        (("search", "llama-3-8b", "--machine", "h110", *SMALL[3:]), ["machine-unknown", "h100", "plan calibrate"]),
        (("search", *SMALL, "--fix", "tpp=2"), ["plan-fix", "--fix tp=2"]),
        (("search", *SMALL, "--layout", '{"tp": 3}'), ["plan-layout"]),
        (("search", *SMALL, "--layout", "[1]"), ["plan-layout"]),
        (("search", *SMALL, "--software-era", "megatron-2027"), ["plan-software", "megatron-2026"]),
        (("search", "llama-3-8b", "--machine", "a100-80gb", *SMALL[3:-2], "--fix", "recipe=mxfp8"), ["recipe-machine"]),
        (("search", "llama-3.1-405b", *SMALL[1:]), ["plan-memory", "--gpus"]),
        (("serch", "x"), ["Did you mean 'search'?"]),
    ],
)
def test_bad_requests_name_what_to_type(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in out + err


def test_every_verb_of_the_group_documents_its_parameters() -> None:
    for verb in api.plan.VERBS:
        function = getattr(api.plan, verb)
        assert summary(function), verb
        for parameter in command_parameters(function):
            assert parameter_docs(function).get(parameter.name), f"{verb}: {parameter.name}"


def test_the_group_alone_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys)
    assert code == 0 and all(verb in text for verb in api.plan.VERBS)


def test_a_rough_machine_from_a_data_sheet_is_marked_and_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "card.toml"
    figures = ("bf16=400e12", "memory_bytes=80e9", "memory_bytes_per_s=2e12", "gpus_per_node=8")
    sheet = [word for figure in figures for word in ("--sheet", figure)]
    found = asked(capsys, "calibrate", "--out", str(file), "--name", "card", *sheet)
    assert found["rough"] and "rough" in load_machine(str(file)).origin.source
    ranked = asked(capsys, "search", "llama-3-8b", "--machine", str(file), *SMALL[3:], "--top", "1")
    low, high = ranked["layouts"][0]["band"]
    assert high / low > 1.4, "a machine that was never calibrated has a wide band"
    code, _, err = run(capsys, "calibrate", "--out", str(file), "--name", "card", *sheet)
    assert code == 2 and "machine-exists" in err
    code, _, err = run(
        capsys, "calibrate", "--out", str(tmp_path / "b.toml"), "--name", "b", "--sheet", "nic_bytes_per_s=400e9"
    )
    assert code == 2 and "unit-bounds" in err and "5e+10" in err


def test_figures_in_the_wrong_unit_are_told() -> None:
    origin = Origin(kind="published", source="a test")
    good = load_machine("h100")
    assert unit_problems(good) == []
    cases = {"memory_bytes_per_s": 3350.0, "nic_bytes_per_s": 400e9, "memory_bytes": 80, "tdp_w": 700e3}
    for field, value in cases.items():
        assert [p.where for p in unit_problems(good.model_copy(update={field: value}))] == [field]
    above = Machine(
        name="x", device="cuda", origin=origin, nic_bytes_per_s=100e9, scaleup_bidirectional_bytes_per_s=64e9
    )
    assert "bits" in unit_problems(above)[0].fix


def test_a_calibration_of_another_device_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cpu.calibration.toml"
    local.write_calibration(file, "EPYC, 64 cores", {"gap_s": Constant(1e-5, 1e-6, 1e-4, 1e-5, 0.0, "a test")})
    found = local.read_calibration(file, "EPYC, 64 cores")
    assert found.resolve(("generic",), local.LOCAL_ERA).gap_s == 1e-5
    with pytest.raises(ConfigError, match="another device"):
        local.read_calibration(file, "Xeon, 2 cores")
    file.write_text("device = 3\n")
    with pytest.raises(ConfigError, match="can't be read"):
        local.read_calibration(file, None)


def test_fitted_constants_reproduce_what_they_were_fitted_to() -> None:
    """Measurements made by the model itself give back its constants."""
    machine = load_machine("h100")
    spec = ModelSpec(family="llama", vocab_size=4096, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4,
                     head_dim=32, ffn_size=512, max_positions=512)  # fmt: skip
    products = [ProductTime("bf16", 4096, 4096, 4096, 4096**3 * 2 / 5e14)]
    measured = Measured(
        machine=machine, products=products, attention=[AttentionTime(2, 8, 1024, 64, 2e-4, 6e-4)],
        layers=[LayerTime(spec, "bf16", 8, 512, 4e-3, 2e-3)], gap_s=1e-6, update_s=1e-10,
    )  # fmt: skip
    found = fit_constants(measured, "a test")
    assert 0.4 < found["gemm_bf16"].value < 0.8
    again = fit_constants(measured, "a test")
    assert {k: v.value for k, v in again.items()} == {k: v.value for k, v in found.items()}
    assert found["layer"].value > 0 and found["optimizer"].value == pytest.approx(1e-10 * 3350e9 / 30, rel=1e-6)
