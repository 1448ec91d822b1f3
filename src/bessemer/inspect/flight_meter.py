"""What each rank of this host did in each step, from its black box and from /proc: the live source of step records.

On a host whose ranks share cores, the seconds between two marks tell who was scheduled and not who is slow. There a
rank's computing is measured by the processor time of its main thread, which runs forward, backward and optimizer; on
any other host by its phases, less what they waited in operations.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bessemer.runtime.box_tail import BoxTail, TailMark, TailOperation

__all__ = ["ASIDE_PHASES", "COMPUTE_PHASES", "RankMeter", "RankStep", "memory_bytes", "processor_s"]

COMPUTE_PHASES = ("forward_s", "backward_s", "optimizer_s")
ASIDE_PHASES = ("evaluate_s", "checkpoint_s", "profile_s", "dump_s")
"""What one rank may do while others don't and wait for it."""
KEPT_STEPS = 512
KEPT_CLOCKS = 64
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class RankStep:
    """A step of one rank, over. Seconds; times of the rank's monotonic clock. batches: how many units of batches it
    took. aside_s: in what one rank does alone, such as an evaluation, which counts to the step before it. profiled:
    torch's profiler was at work, so that its times say nothing of the rank."""

    step: int
    begin_s: float
    end_s: float
    compute_s: float
    data_s: float
    wait_s: float
    aside_s: float
    batches: int
    profiled: bool = False


@dataclass
class _Open:
    """The step that is under way. whole: it was seen from its begin."""

    step: int
    begin_s: float
    whole: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    computing: list[tuple[float, float]] = field(default_factory=list)
    batches: int = 0


class RankMeter:
    """One rank. `poll` takes in what is new; `steps` are those that are over and not taken yet, `operations` those of
    which the end was seen since the last poll; at `aside_s` it was last seen to do what one rank does alone."""

    def __init__(self, path: Path, since_t: float = 0.0) -> None:
        self.tail = BoxTail(path, since_t)
        self.steps: deque[RankStep] = deque(maxlen=KEPT_STEPS)
        self.operations: list[TailOperation] = []
        self.newest = 0
        self._waits: deque[tuple[float, float]] = deque()
        self._clear()

    def _clear(self) -> None:
        self._open: _Open | None = None
        self._stack: list[str] = []
        self._since_s = 0.0
        self.aside_s = float("-inf")
        self._clocks: deque[tuple[float, float, float]] = deque(maxlen=KEPT_CLOCKS)
        self.steps.clear()
        self._waits.clear()
        self._restarts = self.tail.restarts
        self.newest = 0

    @property
    def pid(self) -> int:
        """0 while there is no black box of this attempt, and where the process is on another host."""
        own = self.tail.own
        return int(own["pid"]) if self.tail.is_live and own["host"] == socket.gethostname() else 0

    @property
    def doing(self) -> tuple[str, ...]:
        """The phases that are open, outermost first."""
        return tuple(self._stack)

    @property
    def is_aside(self) -> bool:
        """Whether it does now what one rank does alone."""
        return any(phase in ASIDE_PHASES for phase in self._stack)

    def poll(self, now_s: float) -> None:
        """now_s: of the monotonic clock, which all processes of a host have in common."""
        self.tail.look()
        if self.tail.restarts != self._restarts:
            self._clear()
        marks, self.operations = self.tail.marks(), self.tail.operations()
        if self.is_aside or any(mark.phase in ASIDE_PHASES for mark in marks):
            self.aside_s = now_s
        self._waits.extend((o.wait_s, o.finish_s) for o in self.operations)
        for mark in marks:
            self._take(mark)
        if self.pid:
            self._clocks.append((now_s, processor_s(self.pid), memory_bytes(self.pid)))

    def processor_s(self, step: RankStep) -> float:
        """Processor seconds of the main thread within a step, between polls in proportion to time. NaN where it isn't
        known, or where an evaluation or a checkpoint is in it."""
        if len(self._clocks) < 2 or step.aside_s > 0.02 * (step.end_s - step.begin_s):
            return float("nan")
        at_s, used_s, _ = np.asarray(self._clocks).T
        if not at_s[0] <= step.begin_s or not step.end_s <= at_s[-1]:
            return float("nan")
        return float(np.interp(step.end_s, at_s, used_s) - np.interp(step.begin_s, at_s, used_s))

    @property
    def memory_bytes(self) -> float:
        return self._clocks[-1][2] if self._clocks else float("nan")

    # ---- inside

    def _take(self, mark: TailMark) -> None:
        if mark.gap:
            self._open = None
            self._stack.clear()
        if mark.step > 0 and (self._open is None or mark.step != self._open.step):
            self._close_step(mark)
        if self._open is not None and self._stack:
            self._count(self._stack[-1], self._since_s, mark.at_s)
        del self._stack[mark.depth - 1 :]  # also phases whose end was overwritten before it was read
        self._stack += ["unknown"] * (mark.depth - 1 - len(self._stack))  # and those whose begin was
        if mark.begins:
            self._stack.append(mark.phase)
            if mark.phase == "data_s" and self._open is not None:
                self._open.batches += 1
        self._since_s = mark.at_s

    def _count(self, phase: str, begin_s: float, end_s: float) -> None:
        assert self._open is not None
        self._open.seconds[phase] = self._open.seconds.get(phase, 0.0) + end_s - begin_s
        if phase in COMPUTE_PHASES:
            self._open.computing.append((begin_s, end_s))

    def _close_step(self, mark: TailMark) -> None:
        """A mark of another step has come: the one that was open is over."""
        if self._open is not None and mark.step > self._open.step and self._open.whole:
            of, seconds = self._open, self._open.seconds
            waited_s = self._waited_s(of, mark.at_s)
            compute_s = sum(seconds.get(phase, 0.0) for phase in COMPUTE_PHASES) - waited_s
            aside_s = sum(seconds.get(phase, 0.0) for phase in ASIDE_PHASES)
            data_s, wait_s = seconds.get("data_s", 0.0), seconds.get("comm_s", 0.0) + waited_s
            profiled = "profile_s" in seconds
            self.newest = of.step
            self.steps.append(
                RankStep(of.step, of.begin_s, mark.at_s, compute_s, data_s, wait_s, aside_s, of.batches, profiled)
            )  # fmt: skip
        self._open = _Open(mark.step, mark.at_s, not mark.gap)

    def _waited_s(self, of: _Open, end_s: float) -> float:
        """Seconds in which the host waited in an operation while a phase counted as computing."""
        waited, at = 0.0, 0
        while self._waits and self._waits[0][0] < end_s:
            wait_s, finish_s = self._waits.popleft()
            while at < len(of.computing) and of.computing[at][1] <= wait_s:
                at += 1
            for begin_s, until_s in of.computing[at : at + 2]:  # a phase, and the rest of one that another was in
                waited += max(0.0, min(until_s, finish_s) - max(begin_s, wait_s))
        return waited


def processor_s(pid: int) -> float:
    """Processor seconds of a process' main thread; where the kernel doesn't count them, of all its threads, to 10 ms.
    NaN where it is gone."""
    try:
        used_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        used_s = 0.0
    if used_s > 0:
        return used_s
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / 100.0


def memory_bytes(pid: int) -> float:
    """Resident memory of a process without mapped files, such as token shards; NaN where it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return float((int(resident) - int(shared)) * PAGE_BYTES)
    except OSError:
        return float("nan")
