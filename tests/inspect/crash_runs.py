"""Runs of the product, as users start them, that end badly in a known way: `bessemer train` with real ranks of a tiny
model, and what landing then says of the run folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.loops import small_job

from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.inspect.chaos_hosts import process_tree
from bessemer.inspect.chaos_target import child_running
from bessemer.inspect.landing import Landing, read_landing

PATIENCE_S = 400.0
APART_S = 1.5
"""Two signals that come within a second are taken for one."""
SURE = 0.5
SABOTAGE = Path(__file__).with_name("crash_sabotage.py")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
GROUP_BYTES = 64 << 20
NOWHERE = "nowhere"
Loss = tuple[int, str]


@dataclass(frozen=True)
class Truth:
    """What a landing report should say. kind: the class of the end; ranks: which are right to name (None: nobody; some
    work only rank 0 does, for all). losses: rank and class of what the run outlived; also: of what may be told of as
    outlived, where that is a matter of milliseconds."""

    kind: str
    ranks: tuple[int | None, ...] = (None,)
    losses: tuple[Loss, ...] = ()
    also: tuple[Loss, ...] = ()

    def __str__(self) -> str:
        told = [f"{_who(self.ranks[0])}{self.kind}"] if not self.losses else []
        return "; ".join([*told, *(f"lost {_who(rank)}{kind}" for rank, kind in self.losses)])


@dataclass(frozen=True)
class Judgement:
    """right: rank and class, of the end and of each loss. wrong_and_sure: a rank or class that isn't true was claimed
    with a confidence of 0.5 or more; "unknown" claims no class."""

    told: str
    confidence: float
    right: bool
    wrong_and_sure: bool


@dataclass(frozen=True)
class Scenario:
    """plan: that of crash_sabotage.py, empty for none. play: what happens from outside, from the start of the run on.
    sections: of the job. needs: "root", "cgroup" or nothing."""

    name: str
    truth: Truth
    plan: dict[str, Any] = field(default_factory=dict)
    play: Callable[[CrashRun], object] = lambda run: run.to_the_end()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: str = ""


class CrashRun:
    """One scenario in `folder`. Everything that it starts has ended after `with`."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.base, self.scenario = folder, scenario
        self.job = self._job(folder, scenario)
        self.run = self.job.run.folder
        self.marker = folder / "struck"
        self._agents: list[subprocess.Popen[bytes]] = []
        self._group: Path | None = None
        self.mounted: Path | None = None

    @staticmethod
    def _job(folder: Path, scenario: Scenario) -> Job:
        sections = {name: dict(fields) for name, fields in scenario.sections.items()}
        defaults: dict[str, dict[str, Any]] = {
            "layout": {"dp": 2},
            "train": {"steps": 40, "eval_every": 0},
            "keep": {"every": 0},
        }
        for name, fields in defaults.items():
            sections[name] = fields | sections.get(name, {})
        for name, place in sections.get("run", {}).items():
            sections["run"][name] = str(folder / place)  # paths, all of them
        return small_job(folder, **sections)

    def __enter__(self) -> CrashRun:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                self.signal_tree(agent, signal.SIGKILL)
            agent.wait()
        if self._group is not None:
            _remove_group(self._group)
        if self.mounted is not None:
            subprocess.run(["umount", "-l", str(self.mounted)], check=True)

    # ---- what scenarios do

    def start(
        self, plan: dict[str, Any] | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """The agent, with the scenario's sabotage or another one."""
        plan = self.scenario.plan if plan is None else plan
        hooks = self.base / "hooks"
        hooks.mkdir(exist_ok=True)
        shutil.copy(SABOTAGE, hooks / "sitecustomize.py")
        ours = {"PYTHONPATH": str(hooks), "OMP_NUM_THREADS": "1"}
        if plan:
            more: dict[str, Any] = {"marker": str(self.marker)}
            if plan["do"] == "out-of-memory":
                self._group = _memory_group(self.job.run.name)
                more["cgroup"] = str(self._group)
            ours["CRASH"] = json.dumps(plan | more)
        file = self.base / "job.toml"
        file.write_text(dump_job(self.job))
        command = [sys.executable, "-m", "bessemer.cli", "train", str(file), "--quiet"]
        whole = {**os.environ, **ours, **(environment or {})}
        with (self.base / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                command, env=whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._agents.append(agent)
        return agent

    def to_the_end(self) -> int:
        """Start it and wait until it ends; the agent's exit code."""
        return self.end_of(self.start())

    def end_of(self, agent: subprocess.Popen[bytes]) -> int:
        try:
            return agent.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.scenario.name} goes on after {PATIENCE_S:g} s\n{self.told()}") from None

    def until(self, what: Callable[[], Any], say: str) -> None:
        """While the run goes on."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            ended = self._agents[-1].poll()
            assert ended is None, f"{self.scenario.name} ended with {ended} before {say}\n{self.told()}"
            assert time.monotonic() < deadline, f"{self.scenario.name}: not in {PATIENCE_S:g} s: {say}\n{self.told()}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: len(_lines(self.run / "metrics.jsonl")) >= step, f"step {step}")

    def until_event(self, name: str, **fields: Any) -> None:
        def there() -> bool:
            return any(fields.items() <= event.items() for event in self.events(name))

        self.until(there, f"{name} {fields}")

    def events(self, name: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in _lines(self.run / "events.jsonl")]
        return [record for record in records if record["event"] == name]

    def child(self, module: str) -> int:
        """The oldest child of the agent that runs this module."""
        found: list[int] = []

        def look() -> bool:
            pid = child_running(self._agents[-1].pid, module)
            found.extend([] if pid is None else [pid])
            return bool(found)

        self.until(look, module)
        return found[0]

    def interrupt(self, times: int, number: int = signal.SIGINT) -> int:
        """Signals to the agent, as from a keyboard; its exit code."""
        agent = self._agents[-1]
        for left in reversed(range(times)):
            agent.send_signal(number)
            while left and agent.poll() is None and not self.events("stop_requested"):
                time.sleep(0.02)
            time.sleep(APART_S if left else 0.0)
        return self.end_of(agent)

    def signal_tree(self, agent: subprocess.Popen[bytes], number: int) -> None:
        """To all processes of a host, the agent first."""
        for pid in process_tree(agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def told(self) -> str:
        """For a scenario that doesn't come to its end."""
        parts = [_tail(path) for path in (self.base / "agent.log", *sorted((self.run / "logs").glob("*.log")))]
        return "\n".join([*parts, *_lines(self.run / "events.jsonl")[-12:]])

    def land(self) -> Landing | None:
        """None where landing says that there is no run."""
        try:
            return read_landing(self.run)
        except RequestError as error:
            assert error.code == "no-run", error
            return None


@contextmanager
def crashed(folder: Path, scenario: Scenario) -> Iterator[tuple[CrashRun, Landing | None]]:
    """The run after it has been played, and its landing report. AssertionError where it wasn't played as planned: on a
    machine that has too much to do, a run may end before anything was done to it."""
    with CrashRun(folder, scenario) as run:
        scenario.play(run)
        planned = scenario.plan.get("at", NOWHERE) != NOWHERE
        assert run.marker.exists() or not planned, f"{scenario.name}: nothing was done to it\n{run.told()}"
        yield run, run.land()


def judged(landing: Landing | None, truth: Truth) -> Judgement:
    """The report held against the truth. A run that went on is judged by what it lost."""
    if landing is None:
        return Judgement("no run", 1.0, truth.kind == "no run", truth.kind != "no run")
    verdict = landing.verdict
    claims = [(verdict.rank, verdict.kind, verdict.confidence, verdict.rank in truth.ranks, verdict.kind == truth.kind)]
    left = list(truth.losses)
    for loss in landing.losses:
        rank, kind = loss.verdict.rank, loss.verdict.kind
        known = [(r, k) for r, k in (*left, *truth.also) if r == rank]
        claims.append((rank, kind, loss.verdict.confidence, bool(known), bool(known) and known[0][1] == kind))
        left = [claim for claim in left if claim not in known[:1]]
    right = not left and all(by_rank and by_class for *_, by_rank, by_class in claims)
    sure = any(c >= SURE and not (r and (k or kind == "unknown")) for _, kind, c, r, k in claims)
    outlived = truth.kind == verdict.kind and len(claims) > 1 and bool(truth.losses or not right)
    shown = claims[1:] if outlived else claims[:1] if right else claims
    told = "; ".join(f"{'' if claim is claims[0] else 'lost '}{_who(claim[0])}{claim[1]}" for claim in shown)
    return Judgement(told, min(claim[2] for claim in shown), right, sure)


def _who(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


def _lines(path: Path) -> list[str]:
    """The whole lines of a file that may still be written."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace")[-1500:] if path.exists() else ""
    return f"-- {path.name}\n{text}" if text.strip() else ""


def memory_groups() -> bool:
    """Whether this process may make a memory cgroup."""
    return os.access(MEMORY_GROUPS, os.W_OK) and (MEMORY_GROUPS / "memory.limit_in_bytes").exists()


def _memory_group(name: str) -> Path:
    group = MEMORY_GROUPS / f"bessemer-{os.getpid()}-{name}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
    return group


def _remove_group(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:  # its last process has not quite ended
            time.sleep(0.1)
