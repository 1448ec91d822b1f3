"""Fake ranks for the agent's tests: small scripts that use `Member` and import no torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bessemer.core.job import Job
from bessemer.keep.agent import Options, Timeouts

PRELUDE = """
import os, signal, sys, time
from bessemer.core.errors import BessemerError, NonFinite, Stopped
from bessemer.keep.member import Member
member = Member.from_environment()
def step(n, **more):
    member.phase(n, "forward")
    if member.rank == 0:
        member.metric({"step": n, "loss": 8.0 / n, "grad_norm": 1.5, "lr": 3e-4, "step_s": 0.01,
                       "tokens_per_s": 1e4, **more})
"""

AGENT = """
import sys
from bessemer.core.job_file import load_job
from bessemer.keep.agent import Options, Timeouts, run
job = load_job(sys.argv[1])
found = {}
exec(sys.argv[3], found)
options = Options(command=(sys.executable, "-c", sys.argv[2]), vault=None, timeouts=Timeouts(grace_s=1, stop_s=20),
                  prepare=found.get("prepare"))
sys.exit(run(job, options))
"""


def job_in(folder: Path, *, dp: int = 2, steps: int = 5, **run: Any) -> Job:
    """A job whose run folder is `folder`/r."""
    fields = {
        "run": {"name": "r", "dir": str(folder), **run},
        "layout": {"dp": dp},
        "train": {"steps": steps},
    }
    return Job.model_validate(fields)


def script(body: str) -> str:
    return PRELUDE + body


def options(body: str, **timeouts: float) -> Options:
    given = {"grace_s": 1.0, "kill_s": 1.0, "stop_s": 20.0, **timeouts}
    return Options(command=(sys.executable, "-c", script(body)), vault=None, timeouts=Timeouts(**given))


class AgentProcess:
    """An agent in a process of its own, for tests that send it signals. Ended by force at the end of the test."""

    def __init__(self, job: Job, body: str, prepare: str = "") -> None:
        """`prepare` may define `prepare(printer)`, which the agent calls before the ranks."""
        from bessemer.core.job_file import dump_job

        self.folder = job.run.folder
        job_file = self.folder.parent / "job.toml"
        job_file.write_text(dump_job(job))
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(job_file), script(body), prepare],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 40.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


def until(condition: Any, what: str, timeout_s: float = 30.0) -> None:
    """Waits until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


STEPS = "for n in range(1, 6): step(n)\nmember.close()\n"
ENDLESS = """
note = os.environ["BESSEMER_RUN"] + f"/pid-{member.rank}"
open(note + "~", "w").write(str(os.getpid())); os.rename(note + "~", note)
n = 0
while not member.stop_requested and n < 3000:
    n += 1
    step(n)
    time.sleep(0.02)
if member.rank == 0: member.event("save", step=n, stall_s=0.0)
sys.exit(member.failed(Stopped("on request", step=n)))
"""
