"""Profiled steps: which are due, what is kept, and that nothing that goes wrong there reaches the step."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from bessemer.core.job import InspectSection
from bessemer.runtime.step_profiler import ASK_FILE, StepProfiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_steps(profiler: StepProfiler, steps: range) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    for step in steps:
        with profiler.step(step):
            (x @ x).sum().backward()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_one_step_in_n_and_the_newest_are_kept(tmp_path: Path) -> None:
    section = InspectSection(trace_every=2, traces=2)
    run_steps(StepProfiler(tmp_path, rank=3, section=section, device=torch.device("cpu")), range(1, 8))
    assert names(tmp_path) == ["step-4-rank-3.json.gz", "step-6-rank-3.json.gz"]
    with gzip.open(tmp_path / "step-6-rank-3.json.gz") as file:
        trace = json.load(file)
    anchor = trace["bessemer"]
    assert (anchor["rank"], anchor["step"]) == (3, 6)
    (marked,) = [e for e in trace["traceEvents"] if e["name"] == anchor["name"] and e["ph"] == "X"]
    inside = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "aten::mm" in e["name"]]
    assert inside and all(marked["ts"] <= e["ts"] <= marked["ts"] + marked["dur"] for e in inside)


def test_a_touched_file_or_a_signal_asks_for_the_next_step(tmp_path: Path) -> None:
    section = InspectSection(trace_on="file")
    profiler = StepProfiler(tmp_path, rank=0, section=section, device=torch.device("cpu"))
    run_steps(profiler, range(1, 3))
    (tmp_path / ASK_FILE).touch()
    run_steps(profiler, range(3, 6))
    assert names(tmp_path) == [ASK_FILE, "step-3-rank-0.json.gz"], "once for each touch"
    before = signal.getsignal(signal.SIGUSR2)
    try:
        section = InspectSection(trace_on="signal")
        profiler = StepProfiler(tmp_path, rank=1, section=section, device=torch.device("cpu"))
        run_steps(profiler, range(1, 2))
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.01)
        run_steps(profiler, range(2, 4))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert names(tmp_path)[1:] == ["step-2-rank-1.json.gz", "step-3-rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_leaves_the_step_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    section = InspectSection(trace_every=1)
    run_steps(StepProfiler(tmp_path / "traces", rank=0, section=section, device=torch.device("cpu")), range(1, 2))
    assert "could not be profiled" in capsys.readouterr().err


def test_an_error_of_the_step_passes_through(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, rank=0, section=InspectSection(trace_every=1), device=torch.device("cpu"))
    with pytest.raises(KeyError, match="the step's own"), profiler.step(1):
        raise KeyError("the step's own")
