"""Measuring for a calibration: figures that can be checked, on kernels of no size."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bessemer.cli import main
from bessemer.runtime.device import Cpu
from bessemer.runtime.sustained import (
    measure_attention,
    measure_copy,
    measure_gap,
    measure_gemms,
    measure_update,
    paired_s,
    sustained_s,
)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_sustained_is_the_median_of_the_later_half() -> None:
    calls = iter([0.02, 0.02, 0.02, *[0.001] * 5000])
    assert 0.0009 < sustained_s(lambda: spin(next(calls)), Cpu(), 1.0) < 0.01


def test_pairs_give_the_difference_of_two_calls() -> None:
    small, more = paired_s(lambda: spin(0.002), lambda: spin(0.006), Cpu(), 0.05)
    assert 0.0019 < small < 0.004 and 0.003 < more < 0.006


def test_waiting_is_not_the_kernels_time() -> None:
    assert sustained_s(lambda: time.sleep(0.005), Cpu(), 0.05) < 0.002


def test_every_kernel_is_timed_in_every_shape_and_type() -> None:
    cpu = Cpu()
    gemms = measure_gemms(cpu, ["bf16", "fp32"], 0.02, [(8, 16, 32), (4, 4, 4)])
    assert [(g.dtype, g.rows, g.outputs, g.depth) for g in gemms[:2]] == [("bf16", 8, 16, 32), ("bf16", 4, 4, 4)]
    assert len(gemms) == 4 and all(g.seconds > 0 for g in gemms)
    attention = measure_attention(cpu, "fp32", 0.02, [(1, 2, 16, 8)])
    assert attention[0].forward_s > 0 and attention[0].backward_s > 0
    assert measure_copy(cpu, 0.01, 1 << 20) > 1e8
    assert 1e-8 < measure_gap(cpu, 0.01, 20) < 1e-2
    assert 0 < measure_update(cpu, 0.01, 1 << 12) < 1e-3


@pytest.mark.slow
def test_a_calibrated_cpu_can_be_planned_for_and_another_computers_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "here.toml"
    job = (
        "plan",
        "search",
        "smollm2-135m",
        "--machine",
        str(file),
        "--gpus",
        "2",
        "--global-batch",
        "8",
        "--seq",
        "512",
    )

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    code, out, err = run("plan", "calibrate", "--seconds", "0.8", "--out", str(file), "--json")
    assert code == 0, err
    assert json.loads(out)["kind"] == "measured"
    code, out, err = run(*job, "--json")
    assert code == 0, err
    best = json.loads(out)["layouts"][0]
    assert best["step_s"] > 0 and best["layout"]["recipe"] in ("bf16", "fp32")
    beside = tmp_path / "here.calibration.toml"
    beside.write_text(beside.read_text().replace('device = "', 'device = "another '))
    code, _, err = run(*job)
    assert code == 2 and "calibration-device" in err and "another device" in err
