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


class Places:
    """Where hosts are: `names` are their addresses, `inside` the words before each host's commands."""

    def __init__(self, names: Sequence[str], inside: Sequence[Sequence[str]]) -> None:
        self.names, self.inside = list(names), list(inside)
        self.port = 29500

    @classmethod
    def loopback(cls, count: int) -> Places:
        made = cls([f"127.0.0.{number + 1}" for number in range(count)], [()] * count)
        made.port = _free_port(made.names)
        return made

    @classmethod
    def namespaces(cls, count: int) -> Network:
        """OSError where this process may not make any."""
        return Network(count)


class Network(Places):
    """Each host in a network namespace of its own, joined by one that forwards."""

    def __init__(self, count: int) -> None:
        self._prefix = f"bsm{os.getpid()}"
        names = [f"10.99.{number}.2" for number in range(count)]
        super().__init__(names, [("ip", "netns", "exec", f"{self._prefix}-{number}") for number in range(count)])
        self._made: list[str] = []
        try:
            self._add("hub")
            _ip("netns", "exec", f"{self._prefix}-hub", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
            for number in range(count):
                self._add_host(number)
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            _ip("netns", "del", name)

    def cut(self, number: int) -> None:
        _ip("-n", f"{self._prefix}-hub", "link", "set", f"p{number}", "down")

    def mend(self, number: int) -> None:
        _ip("-n", f"{self._prefix}-hub", "link", "set", f"p{number}", "up")

    def _add(self, name: str) -> str:
        _ip("netns", "add", f"{self._prefix}-{name}")
        self._made.append(f"{self._prefix}-{name}")
        return self._made[-1]

    def _add_host(self, number: int) -> None:
        hub, host = f"{self._prefix}-hub", self._add(str(number))
        _ip("link", "add", f"v{number}", "netns", host, "type", "veth", "peer", "name", f"p{number}", "netns", hub)
        for space, link, end in ((hub, f"p{number}", 1), (host, f"v{number}", 2)):
            _ip("-n", space, "addr", "add", f"10.99.{number}.{end}/30", "dev", link)
            _ip("-n", space, "link", "set", link, "up")
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "route", "add", "default", "via", f"10.99.{number}.1")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"ip {' '.join(words)} ended with {done.returncode}")


class HostRun:
    """One run. What its agents print goes to files beside the job's."""

    def __init__(self, job: Job, places: Places) -> None:
        self.job, self.places = job, places
        self._file = job.run.folder.parent.parent / f"{job.run.name}.toml"
        self._file.write_text(dump_job(job))
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
        names = self.places.names
        for number in numbers or range(len(names)):
            if number in self.agents:
                self.agents[number].wait()
            ours = {"RANK": str(number), "WORLD_SIZE": str(len(names)), "BESSEMER_HOSTS": ",".join(names),
                    "MASTER_PORT": str(self.places.port), SECRET: "a secret of the tests"}  # fmt: skip
            log = self._logs[number] = self._file.with_suffix(f".{number}.log")
            command = [*self.places.inside[number], sys.executable, "-m", "bessemer.cli", "train", str(self._file)]
            with log.open("a") as output:
                self.agents[number] = subprocess.Popen(
                    command, env={**os.environ, **ours}, stdout=output, stderr=output, text=True, start_new_session=True
                )

    def signal_host(self, number: int, what: int) -> None:
        """To all processes of a host, the agent first."""
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
    """One that is free at all these addresses."""
    while True:
        with socket.socket() as first:
            first.bind((names[0], 0))
            port = int(first.getsockname()[1])
            try:
                for name in names[1:]:
                    with socket.socket() as other:
                        other.bind((name, port))
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
