"""A rank that fails inside a pipeline, a tensor or an expert group takes the run down in time, with its own error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from train.loops import small_job
from train.toy import MIXTRAL, MODEL

from bessemer.core.job_file import dump_job
from bessemer.data import prepare
from bessemer.keep.agent import Timeouts

SABOTAGED = """
import os, signal, sys, time
from bessemer.train import step, worker

whole = step.Step.run

def run(self, at, *args, **named):
    if at == 4 and self.mesh.rank == 2:
        open("failed_at", "w").write(str(time.time()))
        if sys.argv[1] == "raise":
            raise ValueError("injected")
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MODEL, {"pp": 2, "tp": 2}),
        (MIXTRAL, {"dp": 2, "cp": 2, "ep": 4}),
    ],
    ids=["pipeline of tensor groups", "experts over context groups"],
)
def test_the_first_error_is_the_failed_ranks_own(
    tmp_path: Path, model: dict[str, Any], layout: dict[str, Any], how: str
) -> None:
    job = small_job(tmp_path, model=model | {"vocab_size": 257}, layout=layout, keep={"every": 0})
    prepare(job)
    (tmp_path / "job.toml").write_text(dump_job(job))
    (tmp_path / "rank.py").write_text(SABOTAGED)
    done = subprocess.run(
        [sys.executable, "-c", AGENT, how],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    took_s = time.time() - float((tmp_path / "failed_at").read_text())
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    limits = Timeouts()
    assert took_s < limits.grace_s + limits.kill_s, f"{took_s:.1f} s until the run was down\n{said}"
    first = re.search(r"rank (\d+)\b.*", done.stderr)
    assert first is not None, said
    assert first.group(1) == "2", said
    assert ("injected" if how == "raise" else "SIGKILL") in said
