"""Runs of the product with a fault put into one rank: what is kept of it, and what landing then says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_merged_trace import check_form
from train.loops import small_job

from bessemer.core.job_file import dump_job
from bessemer.data import prepare
from bessemer.inspect.landing import read_landing
from bessemer.inspect.merged_trace import merge_traces
from bessemer.inspect.replay import replay
from bessemer.keep.records import read_records
from bessemer.runtime.blackbox import read_blackbox
from bessemer.runtime.dump_folder import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GUILTY = 1
SABOTAGED = f"""
import sys, time
from bessemer.train import passes, worker

whole = passes.Passes._straight

def straight(self, mine, batch):
    if self.mesh.rank == {GUILTY} and self._step == 2:
        if sys.argv[1] == "raise":
            batch = batch | {{"tokens_BS": batch["tokens_BS"] + 1000}}  # beyond the vocabulary
        elif not self.module.__dict__.get("spoilt"):
            self.module.spoilt = True
            self.module.block(1).register_forward_hook(lambda module, args, out: out / (out * 0))
    return whole(self, mine, batch)

passes.Passes._straight = straight
if len(sys.argv) > 2:  # a disk that hangs
    from bessemer.train import dumps

    dumps.publish = lambda *args: time.sleep(600)
sys.exit(worker.main())
"""
AGENT = """
import sys
from bessemer.core.job_file import load_job
from bessemer.keep.agent import Options, run

sys.exit(run(load_job("job.toml"), Options(command=(sys.executable, "rank.py", *sys.argv[1:]))))
"""


def agent_of_failing_run(folder: Path, *how: str, **inspect: Any) -> subprocess.Popen[str]:
    """The agent of a run of two ranks of which one has a fault in step 3."""
    keep = {"every": 0, "restarts": 0}
    train = {"steps": 5, "eval_every": 0}
    job = small_job(folder, layout={"dp": 2}, keep=keep, train=train, inspect={"flight": "off", **inspect})
    prepare(job)
    (folder / "job.toml").write_text(dump_job(job))
    (folder / "rank.py").write_text(SABOTAGED)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AGENT, *how]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def failed_run(folder: Path, how: str, **inspect: Any) -> Path:
    """Its folder, after its end."""
    with agent_of_failing_run(folder, how, **inspect) as agent:
        said, _ = agent.communicate()
    assert agent.returncode == 1, said
    return folder / "runs" / "small"


def test_a_non_finite_activation_is_kept_told_and_replayed(tmp_path: Path) -> None:
    run = failed_run(tmp_path, "spoil", trace_every=2)
    landing = read_landing(run)
    (note,) = landing.dumps
    assert (note.rank, note.step, note.operator) == (GUILTY, 3, "aten.div.Tensor")
    assert landing.verdict.rank == GUILTY
    assert f"bessemer landing --replay {note.path}" in landing.verdict.next
    assert any("dumps/dump-1" in line for line in landing.verdict.evidence)
    (told,) = [r for r in read_records(run / "events.jsonl") if r["event"] == "dump"]
    assert told["path"] == str(note.path) and told["rank"] == GUILTY
    record = read_record(note.path)
    assert record["collectives"] and record["marks"], "what the black box says is in it"
    found = replay(note.path)
    assert found.verdict.kind == "data or code" and found.cause is not None and found.cause.value == 0.0
    merged = merge_traces(run, tmp_path / "trace.json")
    assert merged.ranks == [0, 1] and len(merged.profiles) == 2 and not merged.left_out
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_form(trace)
    products = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    steps = {e["pid"]: e for e in trace["traceEvents"] if e["name"] == "bessemer step 2" and e["ph"] == "X"}
    phases = [e for e in trace["traceEvents"] if e["name"] == "optimizer_s" and e["args"].get("step") == 2]
    assert products and set(steps) == {0, 1} and {e["pid"] for e in phases} == {0, 1}
    for phase in phases:
        step = steps[phase["pid"]]
        assert step["ts"] <= phase["ts"] and phase["ts"] + phase["dur"] <= step["ts"] + step["dur"] + 1e3


def test_an_exception_in_a_step_is_kept_and_told(tmp_path: Path) -> None:
    run = failed_run(tmp_path, "raise")
    landing = read_landing(run)
    (note,) = landing.dumps
    assert (note.rank, note.step, note.kind) == (GUILTY, 3, "exception")
    assert landing.verdict.rank == GUILTY and str(note.path) in landing.verdict.next
    assert f"bessemer landing --replay {note.path}" in (run / "logs" / f"rank-{GUILTY}.log").read_text()
    found = replay(note.path)
    assert "IndexError: index out of range" in str(found) and " of embed" not in str(found)
    assert (found.verdict.kind, found.verdict.confidence) == ("data", 0.7), "with token 0 nothing is raised"


@pytest.mark.parametrize(
    ("how", "said"), [("raise", "IndexError: index out of range"), ("spoil", "made by aten.div.Tensor")]
)
def test_the_fault_is_in_the_log_before_a_dump_that_never_ends(tmp_path: Path, how: str, said: str) -> None:
    run = tmp_path / "runs" / "small"
    with agent_of_failing_run(tmp_path, how, "hanging disk") as agent:
        try:
            box, deadline = run / "blackbox" / f"rank-{GUILTY}", time.monotonic() + 400
            while not (box.exists() and [p.phase for p in read_blackbox(box).open_phases()][-1:] == ["dump_s"]):
                assert agent.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            log = (run / "logs" / f"rank-{GUILTY}.log").read_text()
        finally:
            agent.kill()  # the kernel ends the ranks with it
    assert "step 3" in log and said in log, log
    assert not (run / "dumps").exists()


def test_a_run_without_dumps_leaves_none(tmp_path: Path) -> None:
    run = failed_run(tmp_path, "raise", dumps=0)
    assert not (run / "dumps").exists()
    assert "--replay" not in read_landing(run).verdict.next
