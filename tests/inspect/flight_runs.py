"""Runs of the product with the watch beside them, and something wrong with one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from train.loops import small_job

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.data import prepare

SABOTAGED = """
import os, signal, sys, time
import torch
from bessemer.train import step, worker

how, guilty, at_step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
whole, commit = step.Step.run, step.Step.commit
me = int(os.environ.get("BESSEMER_NUMBER", os.environ["RANK"]))

def strike(self):
    open("struck", "w").close()
    if how == "hang":
        hang_here()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "flip":
        first = next(iter(self.optimizer.params.values()))
        first.data.view(-1)[0] += 1e-3

def hang_here():
    time.sleep(600)

def sabotaged(self, at, *args, **named):
    begin = time.thread_time()
    if at == at_step and me == guilty and not os.path.exists("struck"):
        strike(self)
    done = whole(self, at, *args, **named)
    if how == "slow" and me == guilty:
        used = time.thread_time() - begin
        until = time.thread_time() + 0.5 * used
        while time.thread_time() < until:
            pass
    return done

def committed(self, at, *args, **named):
    if "BESSEMER_GROUP" in os.environ and at == at_step and me == guilty and not os.path.exists("struck"):
        strike(self)
    return commit(self, at, *args, **named)

step.Step.run, step.Step.commit = sabotaged, committed
if "BESSEMER_AGENT" in os.environ:
    sys.exit(worker.main())
from bessemer.api._flight import beside
from bessemer.core.job_file import load_job
job = load_job("job.toml")
sys.exit(worker.join(job, beside(job)))
"""
AGENT = """
import sys
from bessemer.api._flight import beside
from bessemer.core.job_file import load_job
from bessemer.keep.agent import Options, run

job = load_job("job.toml")
sys.exit(run(job, Options(command=(sys.executable, "rank.py", *sys.argv[1:]), beside=beside(job))))
"""


@contextmanager
def watched_run(
    folder: Path, how: str, guilty: int, at_step: int, **sections: dict[str, Any]
) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of a run in `folder`/runs/small, of which one rank goes wrong in step `at_step` (from 0)."""
    _write(folder, sections)
    with _started(folder, "agent", [sys.executable, "-c", AGENT, how, str(guilty), str(at_step)]) as agent:
        yield agent  # the kernel ends ranks and watch with it


@contextmanager
def launched_run(
    folder: Path, how: str, guilty: int, at_step: int, port: int, **sections: dict[str, Any]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same with ranks that another launcher started: one process each, with what they say in rank-R.log."""
    job = _write(folder, sections)
    world = {"WORLD_SIZE": str(job.layout.world_size), "LOCAL_WORLD_SIZE": str(job.layout.world_size)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "rank.py", how, str(guilty), str(at_step)]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                _started(folder, f"rank-{rank}", command, RANK=str(rank), LOCAL_RANK=str(rank), **world, **meeting)
            )
            for rank in range(job.layout.world_size)
        ]


def _write(folder: Path, sections: dict[str, Any]) -> Job:
    keep = {"every": 0} | sections.pop("keep", {})
    train = {"eval_every": 0} | sections.pop("train", {})
    job = small_job(folder, keep=keep, train=train, **sections)
    prepare(job)
    (folder / "job.toml").write_text(dump_job(job))
    (folder / "rank.py").write_text(SABOTAGED)
    return job


@contextmanager
def _started(folder: Path, name: str, command: list[str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "runs" / "small" / "events.jsonl"
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event for line in whole if (event := json.loads(line))["event"] == name]


def first_finding(folder: Path, agent: subprocess.Popen[bytes], kind: str, timeout_s: float = 150.0) -> dict[str, Any]:
    """The first finding of that kind, as soon as it is told. `agent`: or rank 0 of a launched run. The time counts from
    the first step on: on a busy machine ranks may take minutes to start."""
    started_s = None
    metrics = folder / "runs" / "small" / "metrics.jsonl"
    while started_s is None or time.monotonic() - started_s < timeout_s:
        ended = agent.poll() is not None
        for event in events_of(folder, "finding"):
            if event["kind"] == kind:
                return event
        assert not ended, f"the run ended with {agent.poll()}: {_said(folder)}"
        if started_s is None and metrics.exists() and metrics.stat().st_size:
            started_s = time.monotonic()
        time.sleep(0.1)
    raise AssertionError(f"no {kind} in {timeout_s} s; {_said(folder)}")


def _said(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
