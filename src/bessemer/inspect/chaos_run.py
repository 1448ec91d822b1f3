"""One run of a job as a process of its own, with faults thrown at it, and started again when it fails."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.errors import BessemerError, RequestError
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.inspect.chaos_faults import OF_HOSTS, OF_RANKS, Fault, Plan, Schedule
from bessemer.inspect.chaos_flip import flip_and_kill
from bessemer.inspect.chaos_hosts import Hosts, Namespaces
from bessemer.inspect.chaos_target import Standing, child_running, is_child

__all__ = ["ChaosRun", "Thrown"]

LOOK_S = 0.1
TELL_S = 15.0
VAIN_RESTARTS = 2
"""In a row without a new step: then it is given up."""
WAIT_FOR_TARGET_S = 30.0
"""How long a fault waits for its target: a spare may be starting."""
END_S = 60.0
"""How long hosts may go on after the run has finished: one that was away may wait for others that have gone."""
BACK_S = 5.0
"""A host of several that ended badly is started again so long after, as launchers do."""
HALF_S = 0.5
FULL_BYTES = 4096
COORDINATOR, VAULT = "bessemer.keep.coordinate", "bessemer.keep.vault"


@dataclass
class Thrown:
    """A fault that was thrown, or why it was not. `t`: unix seconds; `step`: how many were committed."""

    kind: str
    t: float
    step: int
    rank: int | None = None
    group: int | None = None
    host: int | None = None
    leader: bool = False
    skipped: str = ""


@dataclass
class ChaosRun:
    """Runs `job` in its run folder. `stop_after`: asks it to stop once so many steps are committed; `plan`: without
    one nothing is thrown; `count`: of hosts. After `run`: what was thrown, and how often the run had to be started
    again."""

    job: Job
    tell: Callable[[str], None]
    plan: Plan | None = None
    stop_after: int | None = None
    count: int = 1
    thrown: list[Thrown] = field(default_factory=list)
    restarts: int = 0
    _waiting: list[tuple[float, Fault]] = field(default_factory=list)
    _back: dict[int, float] = field(default_factory=dict)  # hosts that are down, and when they are started again
    _away: set[int] = field(default_factory=set)  # hosts that are stopped or cut off

    def run(self) -> None:
        """RequestError where the job is refused, or fails without faults; a run under faults that comes no further when
        it is started again is left unfinished."""
        folder = self.job.run.folder
        file = folder.parent / "jobs" / f"{folder.name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump_job(self.job))
        self._standing = Standing(folder)
        self._schedule = None if self.plan is None else Schedule(self.plan)
        self._first_t: float | None = None
        vain = 0
        while True:
            before = self._standing.step
            code = self._once(file)
            if code == 2:
                raise RequestError(
                    f"the job is refused:\n{_tail(_log_of(file))}", code="chaos-job", fix=f"bessemer check {file}"
                )
            self._standing.refresh()
            if self._standing.finished or (self.stop_after is not None and code == 3):
                return
            if self.plan is None:
                raise BessemerError(
                    f"the undisturbed run ended with code {code}:\n{_tail(_log_of(file))}", code="chaos-run"
                )
            vain = vain + 1 if self._standing.step <= before else 0
            if vain > VAIN_RESTARTS:
                return
            self.restarts += 1
            self.tell(f"the run ended with code {code} at step {self._standing.step}: started again")

    def _once(self, file: Path) -> int:
        command = [sys.executable, "-m", "bessemer.cli", "train", str(file), "--quiet"]
        with self._places() as hosts:
            self._back, self._away = {}, set()
            for number in range(self.count):
                hosts.start(number, command, _log_of(file))
            self._follow(hosts, command, _log_of(file))
            codes = [agent.wait() for agent in hosts.agents.values()]
        if 2 in codes:
            return 2
        return next((code for code in codes if code not in (0, 3)), max(codes))

    def _places(self) -> Hosts:
        return Namespaces(self.count) if self.plan is not None and self.plan.cuts else Hosts.on_loopback(self.count)

    def _follow(self, hosts: Hosts, command: list[str], log: Path) -> None:
        """Until all have ended."""
        told, asked, finished = time.monotonic(), False, None  # type: float, bool, float | None
        while running := hosts.running():
            time.sleep(LOOK_S)
            now = time.monotonic()
            self._standing.refresh()
            if self._standing.step and self._first_t is None:
                self._first_t = now
            if self.stop_after is not None and self._standing.step >= self.stop_after and not asked:
                hosts.agents[running[0]].send_signal(signal.SIGTERM)
                asked = True
            if self._standing.finished:
                finished = finished or now
            if finished is not None and now > finished + END_S:
                hosts.kill_all()
            self._throw_due(hosts)
            self._bring_back(hosts, command, log)
            if now - told > TELL_S:
                told = now
                self.tell(f"step {self._standing.step} of {self.job.train.steps}")

    def _bring_back(self, hosts: Hosts, command: list[str], log: Path) -> None:
        """Hosts that ended badly while others go on. What ends so without a fault, or is refused, ends all."""
        running, now = hosts.running(), time.monotonic()
        bad = {number: agent.returncode for number, agent in hosts.agents.items()
               if number not in running and agent.returncode not in (0, 3)}  # fmt: skip
        if not running or not bad or self._standing.finished:
            return
        if self.plan is None or 2 in bad.values():
            hosts.kill_all()
            return
        for number in bad:
            self._back.setdefault(number, now + BACK_S)
        for number in [number for number, at in self._back.items() if at <= now]:
            del self._back[number]
            hosts.start(number, command, log)
            self.tell(f"step {self._standing.step}: host {number} is started again")

    # ---- faults

    def _throw_due(self, hosts: Hosts) -> None:
        if self._schedule is None or self._first_t is None or self._standing.finished:
            return
        now = time.monotonic()
        for fault in self._schedule.due(self._standing.step, now - self._first_t):
            self._waiting.append((now + WAIT_FOR_TARGET_S, fault))
        left = []
        for until, fault in self._waiting:
            thrown = Thrown(fault.kind, time.time(), self._standing.step)
            if self._throw(fault, hosts, thrown):
                self._note(thrown)
            elif now > until:
                thrown.skipped = f"nothing to hit within {WAIT_FOR_TARGET_S:g} s"
                self._note(thrown)
            else:
                left.append((until, fault))
        self._waiting = left

    def _note(self, thrown: Thrown) -> None:
        self.thrown.append(thrown)
        whom = "" if thrown.rank is None else f" rank {thrown.rank} (group {thrown.group})"
        whom += "" if thrown.host is None else f" host {thrown.host}"
        self.tell(f"step {thrown.step}: {thrown.kind}{whom}{'; ' if thrown.skipped else ''}{thrown.skipped}")

    def _throw(self, fault: Fault, hosts: Hosts, thrown: Thrown) -> bool:
        """Whether there was something to hit."""
        if fault.kind in OF_HOSTS:
            return self._throw_at_host(fault, hosts, thrown)
        agents = [hosts.agents[number].pid for number in hosts.running()]
        if fault.kind not in OF_RANKS:
            module = COORDINATOR if fault.kind == "coordinator" else VAULT
            if fault.kind == "coordinator" and self.count > 1:  # on other hosts there may be standbys
                lead = hosts.agents[self._standing.lead(self.count)].pid
                agents = [lead] if lead in agents else []
            there = [(pid, agent) for agent in agents if (pid := child_running(agent, module)) is not None]
            if not there:
                return False
            pid, agent = there[int(fault.draw * len(there))]
            if fault.kind == "flip":
                known = [rank.pid for rank in self._standing.ranks.values()]
                return flip_and_kill(pid, [own for own in known if is_child(own, agent)])
            return _hit(fault, pid, agent)
        ranks = self._standing.candidates(fault.rule.rank)
        found = [(rank, agent) for rank in ranks for agent in agents if is_child(rank.pid, agent)]
        if not found:
            return False
        if fault.rule.rank == "every":
            return sum(_hit(fault, rank.pid, agent) for rank, agent in found) > 0
        rank, agent = found[int(fault.draw * len(found))]
        thrown.rank, thrown.group = rank.number, rank.group
        thrown.leader = rank.group in self._standing.active[:1]
        return _hit(fault, rank.pid, agent)

    def _throw_at_host(self, fault: Fault, hosts: Hosts, thrown: Thrown) -> bool:
        """One at a time, so that somebody is left."""
        there = [number for number in hosts.running() if fault.rule.host in ("any", number)]
        if not there or self._away or self._back or len(hosts.running()) < self.count:
            return False
        number = thrown.host = there[int(fault.draw * len(there))]
        for_s = fault.rule.for_s
        if fault.kind == "host":
            hosts.signal(number, signal.SIGKILL)
            self._back[number] = time.monotonic() + (BACK_S if for_s is None else for_s)
            return True
        assert for_s is not None
        self._away.add(number)
        if isinstance(hosts, Namespaces) and fault.kind == "cut":  # `_places` made such, since the plan cuts
            hosts.cut(number)
        else:
            hosts.signal(number, signal.SIGSTOP)
        _later(for_s, _return, fault.kind, hosts, number, self._away)
        return True


def _return(kind: str, hosts: Hosts, number: int, away: set[int]) -> None:
    if isinstance(hosts, Namespaces) and kind == "cut":
        with contextlib.suppress(OSError):  # the run is over
            hosts.mend(number)
    else:
        hosts.signal(number, signal.SIGCONT)
    away.discard(number)


def _hit(fault: Fault, pid: int, agent: int) -> bool:
    rule = fault.rule
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "slow":
            _later(0.0, _slow_down, pid, agent, rule.duty, rule.for_s)
        elif fault.kind == "disk-full":
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
            assert rule.for_s is not None
            _later(rule.for_s, _make_room, pid, agent, (soft, hard))
        elif fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            if rule.for_s is not None:
                _later(rule.for_s, _send, pid, agent, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGTERM if fault.kind == "term" else signal.SIGKILL)
        return True
    return False


def _later(delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
    timer = threading.Timer(delay_s, action, arguments)
    timer.daemon = True
    timer.start()


def _send(pid: int, agent: int, number: int) -> None:
    if is_child(pid, agent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _slow_down(pid: int, agent: int, duty: float, for_s: float) -> None:
    end = time.monotonic() + for_s
    while time.monotonic() < end and is_child(pid, agent):
        _send(pid, agent, signal.SIGSTOP)
        time.sleep(HALF_S * duty)
        _send(pid, agent, signal.SIGCONT)
        time.sleep(HALF_S * (1 - duty))


def _make_room(pid: int, agent: int, limits: tuple[int, int]) -> None:
    if is_child(pid, agent):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _log_of(file: Path) -> Path:
    return file.with_suffix(".log")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
