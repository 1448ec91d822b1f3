"""Runs of the product with a fault put into one rank: the report names that rank and what it did."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from train.loops import small_job

from bessemer.core.job_file import dump_job
from bessemer.data import prepare
from bessemer.inspect.landing import read_landing

GUILTY = 1
SABOTAGED = f"""
import os, signal, sys, time
from bessemer.train import step, worker

whole = step.Step.run

def run(self, at, *args, **named):
    if at == 2 and self.mesh.rank == {GUILTY}:
        open("failed_at", "w").write("x")
        if sys.argv[1] == "raise":
            raise ValueError("injected")
        if sys.argv[1] == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, at, *args, **named)

step.Step.run = run
sys.exit(worker.main())
"""
AGENT = """
import sys
from bessemer.core.job_file import load_job
from bessemer.keep.agent import Options, run

sys.exit(run(load_job("job.toml"), Options(command=(sys.executable, "rank.py", sys.argv[1]))))
"""


@contextmanager
def sabotaged(folder: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two ranks of which one fails in step 3; its folder is `folder`/runs/small."""
    job = small_job(folder, layout={"dp": 2}, keep={"every": 0, "restarts": 0}, train={"steps": 5, "eval_every": 0})
    prepare(job)
    (folder / "job.toml").write_text(dump_job(job))
    (folder / "rank.py").write_text(SABOTAGED)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AGENT, how]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as agent:
        try:
            yield agent
        finally:
            agent.kill()  # the kernel ends the ranks with it


@pytest.mark.slow
def test_a_rank_that_raises(tmp_path: Path) -> None:
    with sabotaged(tmp_path, "raise") as agent:
        assert agent.wait() == 1
    landing = read_landing(tmp_path / "runs" / "small")
    verdict = landing.verdict
    assert (verdict.rank, verdict.kind, verdict.host) == (GUILTY, "code", os.uname().nodename)
    assert verdict.confidence > 0.5
    assert any("rank.py:" in line and " run" in line for line in verdict.evidence), verdict.evidence
    assert GUILTY not in verdict.victims


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    with sabotaged(tmp_path, "kill") as agent:
        assert agent.wait() == 1
    verdict = read_landing(tmp_path / "runs" / "small").verdict
    assert (verdict.rank, verdict.kind, verdict.host) == (GUILTY, "unknown", os.uname().nodename)
    assert any("SIGKILL" in line for line in verdict.evidence), verdict.evidence


@pytest.mark.slow
def test_a_rank_that_hangs_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "small"
    with sabotaged(tmp_path, "hang") as agent:
        while not (tmp_path / "failed_at").exists():
            assert agent.poll() is None
            time.sleep(0.1)
        deadline = time.monotonic() + 30
        while read_landing(folder, now=time.time() + 600).verdict.rank is None and time.monotonic() < deadline:
            time.sleep(0.2)  # until the other rank has come to the collective
        early, late = read_landing(folder).verdict, read_landing(folder, now=time.time() + 600).verdict
    assert early.kind == "no fault"
    assert (late.rank, late.kind) == (GUILTY, "unknown") and late.confidence > 0.5
    assert any("not arrived: 1" in line for line in late.evidence), late.evidence
