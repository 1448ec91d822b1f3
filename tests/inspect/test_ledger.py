"""The ledger of written run folders: each known loss lands in its factor and nowhere else."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from run_builder import PEAKS, Pace, RunBuilder, flops_a_step, make_job

from bessemer.core.errors import DataError, RequestError
from bessemer.inspect.ledger import FACTORS, Ledger, read_ledger

STEPS = 12


def ledger_of(folder: Path, pace: Pace | None = None, reference: Path | None = None, **options: object) -> Ledger:
    """A run of STEPS steps at `pace`, nothing lost outside the steps."""
    builder = RunBuilder(make_job(), pace or Pace(), **options)  # type: ignore[arg-type]
    builder.start()
    builder.steps(1, STEPS)
    builder.event("finished", step=STEPS)
    return read_ledger(builder.write(folder), reference)


def values(ledger: Ledger) -> dict[str, float]:
    found = {}
    for name in FACTORS:
        value = ledger.factors[name].value
        assert value is not None, f"{name}: {ledger.factors[name].reason}"
        found[name] = value
    return found


def check(ledger: Ledger, **expected: float) -> None:
    """These factors have these values, all others those of a healthy run; the product is the yield."""
    healthy = {
        "generality": 1.0,
        "effective_compute": 0.5,
        "node_efficiency": 0.8,
        "cluster_efficiency": 1.0,
        "stability": 1.0,
    }
    found = values(ledger)
    assert found == pytest.approx(healthy | expected, rel=1e-6)
    assert math.prod(found.values()) == pytest.approx(ledger.total.value, rel=1e-9)
    lost = sum(f.lost_s or 0.0 for f in ledger.factors.values())
    ideal = (ledger.useful_flops or 0) / (ledger.peak_flops_per_s or 1)
    assert lost + ideal == pytest.approx(ledger.wall.wall_s, rel=1e-9)
    assert sum(ledger.wall.lost_s.values()) == pytest.approx(ledger.wall.wall_s - ledger.wall.committed_s, abs=1e-6)


def test_a_healthy_run(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run")
    check(ledger)
    assert ledger.useful_flops == pytest.approx(STEPS * flops_a_step(make_job()))
    assert ledger.peak_flops_per_s == pytest.approx(PEAKS["bf16"])
    assert ledger.tokens == STEPS * 16 * 64
    kinds = {name: factor.kind for name, factor in ledger.factors.items()}
    assert kinds == dict.fromkeys(FACTORS, "measured") | {"cluster_efficiency": None}  # nothing was measured for it
    assert ledger.factors["cluster_efficiency"].reason == "1 by definition: the run is on one node"
    assert ledger.total.kind == "measured"


def test_a_fallback_lands_in_generality(tmp_path: Path) -> None:
    share = 0.2
    pace = Pace(fp32_share=share)
    slower = 1 - share + share * PEAKS["bf16"] / PEAKS["fp32"]  # kernel time over the healthy one
    pace.beside_kernels = 0.25 * slower  # so that the node keeps its efficiency
    check(ledger_of(tmp_path / "run", pace), generality=1 / slower)


def test_a_slower_kernel_lands_in_effective_compute(tmp_path: Path) -> None:
    check(
        ledger_of(tmp_path / "run", Pace(kernel_slowdown=1.5, beside_kernels=0.375)),
        effective_compute=0.5 / 1.5,
    )


def test_launch_gaps_land_in_node_efficiency(tmp_path: Path) -> None:
    check(ledger_of(tmp_path / "run", Pace(beside_kernels=1.0)), node_efficiency=0.5)


def test_recompute_lands_in_node_efficiency(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", Pace(recompute=1 / 3))
    check(ledger, node_efficiency=1 / (4 / 3 + 0.25))
    assert ledger.factors["node_efficiency"].kind == "modelled"
    assert any("1.3333 x the useful FLOPs" in note for note in ledger.notes)


def test_pairs_that_documents_hide_are_a_gain_of_effective_compute(tmp_path: Path) -> None:
    """The kernels leave out a twentieth of the FLOPs that are useful, in proportion less time."""
    ledger = ledger_of(tmp_path / "run", Pace(recompute=-0.04))
    check(ledger, effective_compute=0.5 / 0.96, node_efficiency=0.96 / (0.96 + 0.25))
    assert ledger.factors["node_efficiency"].kind == ledger.factors["effective_compute"].kind == "measured"
    assert any("packed documents" in note for note in ledger.notes)


@pytest.mark.parametrize(("recompute", "document_mask"), [(-0.04, False), (-0.5, True)])
def test_flops_that_no_document_can_hide_were_not_seen(tmp_path: Path, recompute: float, document_mask: bool) -> None:
    builder = RunBuilder(make_job(data={"document_mask": document_mask}), Pace(recompute=recompute))
    builder.start()
    builder.steps(1, STEPS)
    ledger = read_ledger(builder.write(tmp_path / "run"))
    assert ledger.factors["node_efficiency"].kind == "modelled"
    assert not any("packed documents" in note for note in ledger.notes)


def two_nodes(folder: Path, waiting_s: float) -> Path:
    builder = RunBuilder(make_job(gpus_per_node=1), Pace(waiting_s=waiting_s))
    builder.start()
    builder.steps(1, STEPS)
    builder.event("finished", step=STEPS)
    return builder.write(folder)


def one_node(folder: Path, **job: object) -> Path:
    """Half the devices, half the batch: the same work a device."""
    half = make_job(**{"gpus_per_node": 1, "dp": 1, "batch": 8, **job})  # type: ignore[arg-type]
    builder = RunBuilder(half, world_size=half.layout.dp)
    builder.start()
    whole = builder.healthy_kernel_s
    builder.pace.kernel_slowdown = 2 * 8 / half.train.global_batch  # one device of the two
    builder.pace.beside_kernels *= 2
    builder.steps(1, 5)
    assert builder.metrics[0]["step_s"] == pytest.approx(whole * 2 * 1.25) or job
    return builder.write(folder)


def test_a_late_rank_lands_in_cluster_efficiency_modelled(tmp_path: Path) -> None:
    healthy_s = RunBuilder(make_job()).healthy_kernel_s * 1.25
    ledger = read_ledger(two_nodes(tmp_path / "run", waiting_s=healthy_s / 2))
    check(ledger, cluster_efficiency=1 / 1.5)
    assert ledger.factors["cluster_efficiency"].kind == "modelled"
    assert ledger.factors["node_efficiency"].kind == "modelled"  # rests on the same step time
    assert ledger.total.kind == "measured"
    assert any("--reference" in note for note in ledger.notes)


def test_a_late_rank_lands_in_cluster_efficiency_measured(tmp_path: Path) -> None:
    healthy_s = RunBuilder(make_job()).healthy_kernel_s * 1.25
    reference = one_node(tmp_path / "reference")
    ledger = read_ledger(two_nodes(tmp_path / "run", waiting_s=healthy_s / 2), reference)
    check(ledger, cluster_efficiency=1 / 1.5)
    assert ledger.factors["cluster_efficiency"].kind == "measured"
    assert str(reference) in ledger.factors["cluster_efficiency"].reason


def test_waiting_on_one_node_stays_a_loss_of_the_node(tmp_path: Path) -> None:
    healthy_s = RunBuilder(make_job()).healthy_kernel_s * 1.25
    check(ledger_of(tmp_path / "run", Pace(waiting_s=healthy_s)), node_efficiency=0.4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 16}, "sequences a device and step: 8 here, 16 there"),
        ({"dp": 2, "batch": 16}, "a node of this run has 1, the reference ran on 2"),
        ({"train": {"micro_batch": 2}}, "train.micro_batch: 4 here, 2 there"),
        ({"data": {"seq_len": 32}}, "data.seq_len: 64 here, 32 there"),
        ({"precision": {"recipe": "fp32"}}, "precision: "),
        ({"model": {"num_hidden_layers": 3}}, "model: "),
    ],
)
def test_a_reference_with_other_work_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    reference = one_node(tmp_path / "reference", **change)
    with pytest.raises(RequestError, match="no one-node reference") as refused:
        read_ledger(two_nodes(tmp_path / "run", 0.0), reference)
    assert refused.value.code == "reference-differs"
    assert said in refused.value.message


def test_set_up_and_tail_land_in_stability(tmp_path: Path) -> None:
    builder = RunBuilder(make_job())
    step_s = builder.healthy_kernel_s * 1.25
    builder.start(set_up_s=6 * step_s)
    builder.steps(1, STEPS)
    builder.wait(2 * step_s)
    builder.event("finished", step=STEPS)
    ledger = read_ledger(builder.write(tmp_path / "run"))
    check(ledger, stability=STEPS / (STEPS + 8))
    assert ledger.wall.lost_s["set_up"] == pytest.approx(6 * step_s, rel=1e-4)
    assert ledger.wall.lost_s["tail"] == pytest.approx(2 * step_s, rel=1e-4)


def test_checkpoints_and_evaluation_land_in_stability(tmp_path: Path) -> None:
    builder = RunBuilder(make_job())
    step_s = builder.healthy_kernel_s * 1.25
    builder.start()
    for number in range(1, STEPS + 1):
        builder.step(number)
        if number in (4, STEPS):  # evaluated before its line is written, saved after it
            builder.wait(2 * step_s)
            builder.event("eval", step=number, loss=1.0, seconds=2 * step_s)
            builder.metrics[-1]["t"] = builder.now
            builder.wait(step_s)
            builder.event("save", step=number, stall_s=step_s)
    ledger = read_ledger(builder.write(tmp_path / "run"))
    check(ledger, stability=STEPS / (STEPS + 6))
    assert ledger.wall.lost_s["evaluation"] == pytest.approx(4 * step_s, rel=1e-4)
    assert ledger.wall.lost_s["checkpoint"] == pytest.approx(2 * step_s, rel=1e-4)
    assert sum(ledger.wall.lost_s.values()) == pytest.approx(6 * step_s, rel=1e-4)


def killed_run(tmp_path: Path, *, cut: bool, told: bool, failed: bool) -> tuple[Ledger, float]:
    """8 steps, the last 3 unsaved; a rank dies in the ninth; down for 4 steps; set up in 2; goes on to STEPS."""
    builder = RunBuilder(make_job())
    step_s = builder.healthy_kernel_s * 1.25
    builder.start()
    builder.steps(1, 8)
    last_t = builder.now
    builder.wait(step_s / 2)
    if failed:
        builder.event("rank_lost", rank=1, signal=9, step=9)
    builder.wait(4 * step_s)
    builder.start(set_up_s=2 * step_s, step=5)
    if told:
        builder.event("cut", step=5, steps=3, last_t=last_t)
    if cut:
        builder.metrics = [m for m in builder.metrics if m["step"] <= 5]
    builder.steps(6, STEPS)
    builder.event("finished", step=STEPS)
    return read_ledger(builder.write(tmp_path / "run")), step_s


@pytest.mark.parametrize(
    ("cut", "told", "failed", "redone", "restart"),
    [
        (False, False, True, 3, 6.5),  # the lines of the lost steps are still there
        (True, False, True, 3.5, 6),  # only the failure says when the work ended
        (True, True, True, 3, 6.5),
        (True, True, False, 3, 6.5),  # the agent itself was killed, and the next one told what it cut
    ],
)
def test_a_killed_member_lands_in_stability(
    tmp_path: Path, cut: bool, told: bool, failed: bool, redone: float, restart: float
) -> None:
    ledger, step_s = killed_run(tmp_path, cut=cut, told=told, failed=failed)
    check(ledger, stability=STEPS / (STEPS + 9.5))
    assert ledger.steps == STEPS
    assert ledger.wall.lost_s["redone"] == pytest.approx(redone * step_s, rel=1e-4)
    assert ledger.wall.lost_s["restart"] == pytest.approx(restart * step_s, rel=1e-4)


def test_time_after_a_requested_stop_does_not_count(tmp_path: Path) -> None:
    builder = RunBuilder(make_job())
    step_s = builder.healthy_kernel_s * 1.25
    builder.start()
    builder.steps(1, 6)
    builder.event("stopped", step=6)
    builder.wait(1e6)
    builder.start(set_up_s=3 * step_s, step=6)
    builder.steps(7, STEPS)
    ledger = read_ledger(builder.write(tmp_path / "run"))
    check(ledger, stability=STEPS / (STEPS + 3))
    assert ledger.wall.lost_s["set_up"] == pytest.approx(3 * step_s, rel=1e-4)


def test_attempts_with_other_devices_count_with_their_peak(tmp_path: Path) -> None:
    """Twice the devices from step 7 on, each as efficient: nothing may change but the peak."""
    builder = RunBuilder(make_job())
    builder.start()
    builder.steps(1, 6)
    builder.event("stopped", step=6)
    builder.world_size = 4
    builder.peaks = {path: 2 * peak for path, peak in PEAKS.items()}
    builder.start(step=6)
    builder.pace = Pace(kernel_slowdown=0.5, beside_kernels=0.125)
    builder.steps(7, STEPS)
    ledger = read_ledger(builder.write(tmp_path / "run"))
    check(ledger)
    assert ledger.peak_flops_per_s == pytest.approx(PEAKS["bf16"] * 4 / 3)


def test_without_samples_three_factors_are_unknown(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", sample_every=1000)
    unknown = [name for name in FACTORS if ledger.factors[name].value is None]
    assert unknown == ["generality", "effective_compute", "node_efficiency"]
    assert all("kernels" in ledger.factors[name].reason for name in unknown)
    assert ledger.total.value == pytest.approx(0.4)
    assert ledger.factors["stability"].value == pytest.approx(1.0)


def test_without_a_peak_what_rests_on_it_is_unknown(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", peaks=None)
    assert ledger.total.value is None
    assert "machine" in ledger.total.reason
    unknown = [name for name in FACTORS if ledger.factors[name].value is None]
    assert unknown == ["generality", "effective_compute"]
    assert ledger.factors["node_efficiency"].value == pytest.approx(0.8)
    assert ledger.peak_flops_per_s is None


def test_a_path_without_a_peak_is_named(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", Pace(fp32_share=0.1), peaks={"bf16": PEAKS["bf16"]})
    assert "fp32" in ledger.factors["generality"].reason
    assert ledger.factors["effective_compute"].value is None
    assert ledger.total.value is not None


def test_a_precision_without_a_peak_is_named(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", peaks={"fp32": 1e12})
    assert "no peak for bf16" in ledger.total.reason


def test_a_run_that_just_started(tmp_path: Path) -> None:
    builder = RunBuilder(make_job())
    builder.start(set_up_s=3.0)
    builder.event("ready")
    ledger = read_ledger(builder.write(tmp_path / "run"))
    assert ledger.factors["stability"].value == 0.0
    assert ledger.total.value == 0.0
    assert ledger.factors["cluster_efficiency"].value is None
    assert "no step" in ledger.factors["cluster_efficiency"].reason
    assert ledger.wall.lost_s["set_up"] == pytest.approx(3.0)


def test_torn_tails_are_left_out_and_damage_is_an_error(tmp_path: Path) -> None:
    ledger_of(tmp_path / "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step": 13, "samp')
    check(read_ledger(tmp_path / "run"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(['{"step": 1}', *lines[1:], ""]))
    with pytest.raises(DataError, match="no samples and no step_s"):
        read_ledger(tmp_path / "run")


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    ledger_of(tmp_path / "a-run")
    with pytest.raises(RequestError) as refused:
        read_ledger(tmp_path / "b-run")
    assert refused.value.code == "no-run"
    assert str(tmp_path / "a-run") in refused.value.fix
    (tmp_path / "a-run" / "events.jsonl").write_text("")
    with pytest.raises(RequestError, match="nothing has started"):
        read_ledger(tmp_path / "a-run")


def test_a_factor_above_one_is_explained(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", Pace(kernel_slowdown=0.4, beside_kernels=0.1))
    assert any("effective_compute" in note and "measured while the machine was busy" in note for note in ledger.notes)


def test_both_forms_of_the_result(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", Pace(beside_kernels=1.0))
    found = json.loads(json.dumps(ledger.as_json()))
    assert [found[name] for name in FACTORS] == [ledger.factors[name].value for name in FACTORS]
    assert found["yield"] == ledger.total.value
    assert found["kinds"]["yield"] == "measured"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(ledger)
    text = console.export_text()
    assert "lost most: node_efficiency" in text or "lost most: effective_compute" in text
    assert "0.5000" in text
