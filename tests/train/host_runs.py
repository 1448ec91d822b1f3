"""Runs on several "hosts" of this machine: each is an agent with all that it starts, at a loopback address of its own
or in a network namespace, in sessions that can be killed and stopped as a whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from train.loops import small_job

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.keep.links import SECRET

PATIENCE_S = 300.0


def host_job(folder: Path, *, steps: int = 40, dp: int = 4, **keep: Any) -> Job:
    job = small_job(
        folder,
        layout={"dp": dp},
        train={"steps": steps, "global_batch": 16, "micro_batch": 2, "eval_every": 0},
        keep={"every": 0, "mode": "zero-interruption", "sums": "exact", "lease_s": 3.0, **keep},
    )
    (folder / "job.toml").write_text(dump_job(job))
    return job


class HostRun:
    """`names` are the hosts' addresses; `inside`: by host the words before its command."""

    def __init__(self, folder: Path, job: Job, names: Sequence[str], inside: Sequence[Sequence[str]] = ()) -> None:
        self.folder, self.job, self.names = folder, job, list(names)
        self.inside = list(inside) or [() for _ in names]
        self.port = _free_port(names[:1]) if not inside else 29500
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self._logs: dict[int, Path] = {}

    def __enter__(self) -> HostRun:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self.agents):
            self.signal_host(number, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()

    def start(self, *numbers: int) -> None:
        for number in numbers or range(len(self.names)):
            ours = {"RANK": str(number), "WORLD_SIZE": str(len(self.names)), "BESSEMER_HOSTS": ",".join(self.names),
                    "MASTER_PORT": str(self.port), SECRET: "a secret of the tests", "OMP_NUM_THREADS": "1"}  # fmt: skip
            log = self._logs[number] = self.folder / f"agent-{number}.log"
            command = [*self.inside[number], sys.executable, "-m", "bessemer.cli", "train", str(self.folder / "job.toml")]
            with log.open("a") as output:
                self.agents[number] = subprocess.Popen(
                    command, env={**os.environ, **ours}, stdout=output, stderr=output, text=True, start_new_session=True
                )

    def signal_host(self, number: int, what: int) -> None:
        """To all processes of a host, the agent last when it wakes up and first when it dies."""
        for pid in _tree(self.agents[number].pid):
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue

    def events(self, name: str = "") -> list[dict[str, Any]]:
        return [e for e in self.read("events.jsonl") if e["event"] == name or not name]

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.job.run.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def step(self) -> int:
        return max((r["step"] for r in self.read("metrics.jsonl")), default=0)

    @property
    def active(self) -> list[int]:
        epochs = self.events("epoch")
        return epochs[-1]["active"] if epochs else []

    def until(self, what: Callable[[], Any], say: str = "", timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, f"not in {timeout_s} s: {say}\n{self.told()}"
            time.sleep(0.05)

    def wait(self, numbers: Sequence[int] | None = None, timeout_s: float = PATIENCE_S) -> list[int]:
        """The exit codes of these agents."""
        deadline = time.monotonic() + timeout_s
        codes = []
        for number in self.agents if numbers is None else numbers:
            try:
                codes.append(self.agents[number].wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"host {number} goes on after {timeout_s} s\n{self.told()}") from None
        return codes

    def told(self) -> str:
        """For a failed test: what was printed and the latest events."""
        parts = [f"-- agent {n}\n{p.read_text()[-1500:]}" for n, p in self._logs.items() if p.exists()]
        for path in sorted((self.job.run.folder / "logs").glob("*.log")):
            text = path.read_text()[-600:]
            parts += [f"-- {path.name}\n{text}"] if text.strip() else []
        return "\n".join([*parts, *(json.dumps(e)[:300] for e in self.events()[-25:])])

    def state(self) -> bytes:
        """The tensors of the last checkpoint, in files of one rank."""
        folders = sorted((self.job.run.folder / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
        assert folders and folders[-1].name == f"step-{self.job.train.steps}", self.told()
        return b"".join(path.read_bytes() for path in sorted(folders[-1].glob("*.safetensors")))


def _free_port(names: Sequence[str]) -> int:
    """One whose neighbour is free too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind((names[0], 0))
            port = int(one.getsockname()[1])
            try:
                two.bind((names[0], port + 1))
            except OSError:
                continue
            return port


def _tree(root: int) -> Iterator[int]:
    """The process and all that descend from it, itself first."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            below.setdefault(int(fields[1]), []).append(int(entry.name))
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        todo += below.get(pid, [])
