"""Runs on several "hosts" of this machine, whose agents are processes with all that they start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train.loops import small_job

from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.inspect.chaos_hosts import Hosts

PATIENCE_S = 400.0


def host_job(base: Path, name: str, *, steps: int, dp: int = 4, **keep: Any) -> Job:
    """A run `name` on the corpus of `base`, which all runs there share."""
    return small_job(
        base,
        run={"name": name},
        layout={"dp": dp},
        train={"steps": steps, "global_batch": 24, "micro_batch": 2, "eval_every": 0},
        keep={"every": 0, "mode": "zero-interruption", "sums": "exact", "lease_s": 2.0, **keep},
    )


class HostRun:
    """One run. What its agents print goes to files beside the job's."""

    def __init__(self, job: Job, hosts: Hosts) -> None:
        self.job, self.hosts, self.agents = job, hosts, hosts.agents
        self._file = job.run.folder.parent.parent / f"{job.run.name}.toml"
        self._file.write_text(dump_job(job))
        self._logs: dict[int, Path] = {}

    def __enter__(self) -> HostRun:
        self.hosts.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hosts.__exit__(*error)

    def start(self, *numbers: int) -> None:
        for number in numbers or range(len(self.hosts.names)):
            log = self._logs[number] = self._file.with_suffix(f".{number}.log")
            self.hosts.start(number, [sys.executable, "-m", "bessemer.cli", "train", str(self._file)], log)

    def signal_host(self, number: int, what: int) -> None:
        self.hosts.signal(number, what)

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
