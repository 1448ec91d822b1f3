"""What a run left behind, read as evidence: events with their line, the last error of each log, black boxes, the
kernel's words. Anything may be missing or torn; what is damaged is noted, never a reason to give up.

Log lines carry no time. A log that was last written before an attempt began can't be of that attempt.
"""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bessemer.core.errors import DataError, RequestError
from bessemer.inspect.landing_traces import Trace, last_trace
from bessemer.keep.records import read_records
from bessemer.runtime.blackbox import Blackbox, read_blackboxes

__all__ = [
    "Event", "KernelLine", "Remains", "Try", "about_process", "clock_text", "kernel_lines", "last_sign_t",
    "read_remains",
]  # fmt: skip

ON_REQUEST = ("finished", "stopped")
LONGEST = 500
"""Characters of an event that are quoted."""


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl; `number` counts from 1, `t` in unix seconds."""

    number: int
    t: float
    name: str
    fields: Mapping[str, Any]

    @property
    def text(self) -> str:
        told = ", ".join(f"{k} {v}" for k, v in self.fields.items() if k not in ("t", "event") and v not in (None, ""))
        told = " | ".join(line.strip() for line in told.splitlines())
        told = told if len(told) <= LONGEST else told[:LONGEST] + " ..."
        return f"events.jsonl:{self.number} ({clock_text(self.t)}): {self.name}{': ' if told else ''}{told}"


@dataclass(frozen=True)
class KernelLine:
    """A line of the kernel's log of this host, at `t` in unix seconds."""

    t: float
    text: str


@dataclass
class Try:
    """One attempt: its events from `start` to the last before the next one. until_t: infinite for the last."""

    events: list[Event]
    until_t: float = math.inf

    @property
    def start_t(self) -> float:
        return self.events[0].t if self.events else 0.0

    @property
    def end(self) -> Event | None:
        """The event that ended it: finished, stopped or failed."""
        return next((e for e in reversed(self.events) if e.name in (*ON_REQUEST, "failed")), None)

    @property
    def world_size(self) -> int | None:
        return self.events[0].fields.get("world_size") if self.events else None

    def named(self, *names: str) -> list[Event]:
        return [e for e in self.events if e.name in names]


@dataclass
class Remains:
    """All of it. `traces` by log name without its ending ("rank-3", "vault"), with when that log was last written."""

    folder: Path
    tries: list[Try]
    metrics: list[dict[str, Any]]
    traces: dict[str, Trace]
    written: dict[str, float]
    boxes: dict[int, Blackbox]
    kernel: Sequence[KernelLine]
    running: bool
    now: float
    free_bytes: int | None = None  # on the disk of the folder, as it is now
    notes: list[str] = field(default_factory=list)

    def trace(self, log: str, of: Try) -> Trace | None:
        """The last error in a log, where it can be this attempt's."""
        found = self.traces.get(log)
        return found if found is not None and self.may_be_of(self.written[log], of) else None

    def may_be_of(self, t: float, of: Try) -> bool:
        return of.start_t - 1.0 <= t <= of.until_t

    def boxes_of(self, of: Try) -> list[Blackbox]:
        """The black boxes that this attempt wrote last."""
        return [box for box in self.boxes.values() if self.may_be_of(last_sign_t(box), of)]

    def step_s(self) -> float:
        """The usual length of a step; 0 where none was committed."""
        return median([float(m["step_s"]) for m in self.metrics if m.get("step_s")] or [0.0])

    def host(self, rank: int | None, of: Try) -> str | None:
        """Of a rank: as its black box says, else where the run has one host that of the start."""
        if rank is None:
            return None
        if rank in self.boxes:
            return self.boxes[rank].host
        hosts = {box.host for box in self.boxes.values()}
        first = of.events[0].fields.get("host") if of.events else None
        return first if first is not None and hosts <= {first} and (hosts or of.world_size == 1) else None


def last_sign_t(box: Blackbox) -> float:
    """When a black box was last written, in unix seconds; 0 if it holds nothing."""
    times = [m.at_s for m in box.marks[-1:]]
    for operation in box.operations:
        times += [t for t in (operation.enqueue_s, operation.wait_s, operation.finish_s) if t is not None]
    return box.wall_s(max(times)) if times else 0.0


def read_remains(
    folder: Path, *, now: float | None = None, kernel: Sequence[KernelLine] | None = None, running: bool | None = None
) -> Remains:
    """Read a run folder. now, kernel and running default to what this host says.

    RequestError `no-run` where the folder holds nothing that a run leaves behind.
    """
    logs = sorted((folder / "logs").glob("*.log"))
    boxes = read_blackboxes(folder / "blackbox") if (folder / "blackbox").is_dir() else []
    if not (logs or boxes or (folder / "events.jsonl").is_file()):
        raise RequestError(
            f"{folder} is no run folder: it has no events.jsonl, no logs and no black boxes",
            code="no-run",
            fix="the path of a run folder, runs/NAME",
        )
    notes: list[str] = []
    events = [
        Event(n, float(r.get("t") or 0.0), str(r.get("event")), r)
        for n, r in enumerate(_tolerant(folder / "events.jsonl", notes), 1)
    ]
    traces = {log.stem: trace for log in logs if (trace := last_trace(log, f"logs/{log.name}")) is not None}
    return Remains(
        folder=folder,
        tries=_tries(events),
        metrics=_tolerant(folder / "metrics.jsonl", notes),
        traces=traces,
        written={log.stem: log.stat().st_mtime for log in logs},
        boxes={box.rank: box for box in boxes},
        kernel=kernel_lines() if kernel is None else kernel,
        running=_is_locked(folder / "lock") if running is None else running,
        now=time.time() if now is None else now,
        free_bytes=_free_bytes(folder),
        notes=notes,
    )


def clock_text(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def kernel_lines() -> list[KernelLine]:
    """What the kernel of this host said, if this user may read it; else nothing."""
    try:
        said = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=False).stdout
        boot_t = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = (re.match(r"\[\s*(\d+\.\d+)\] (.*)", line) for line in said.splitlines())
    return [KernelLine(boot_t + float(m.group(1)), m.group(2)) for m in found if m is not None]


def about_process(remains: Remains, rank: int, of: Try) -> list[KernelLine]:
    """The kernel's lines about the process of a rank. Its pid is known from its black box."""
    box = remains.boxes.get(rank)
    if box is None or box.host != socket.gethostname():
        return []
    word = re.compile(rf"\b(?:\[{box.pid}\]|process {box.pid}\b|pid={box.pid}\b)|\[{box.pid}\]")
    return [line for line in remains.kernel if word.search(line.text) and remains.may_be_of(line.t, of)]


def _tolerant(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The records up to the first damaged one, which is noted."""
    found: list[dict[str, Any]] = []
    try:
        for record in read_records(path):
            found.append(record)
    except DataError as error:
        notes.append(f"{path.name}:{len(found) + 1} is damaged, and nothing after it was read: {error.message}")
    return found


def _tries(events: list[Event]) -> list[Try]:
    tries: list[Try] = []
    for event in events:
        if event.name == "start" or not tries:
            if tries:
                tries[-1].until_t = event.t
            tries.append(Try([]))
        tries[-1].events.append(event)
    return tries or [Try([])]


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _is_locked(path: Path) -> bool:
    """Whether the process of this host that locked the folder still lives; asked without taking the lock, which might
    refuse a start. The vault inherits the lock, and ends some time after an agent that was killed."""
    try:
        inode = path.stat().st_ino
        held = Path("/proc/locks").read_text()
    except OSError:
        return False
    fields = [line.split() for line in held.splitlines()]
    pids = [f[4] for f in fields if len(f) > 5 and ":" in f[5] and f[5].rpartition(":")[2] == str(inode)]
    return any(int(pid) <= 0 or Path(f"/proc/{pid}").exists() for pid in pids)  # 0: of another pid namespace
