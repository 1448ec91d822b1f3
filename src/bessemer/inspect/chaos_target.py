"""A run under chaos, as its folder tells of it: who is active, what can be hit, how far it is."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Standing", "child_running", "is_child"]

_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Rank:
    number: int
    group: int
    pid: int


@dataclass
class Standing:
    """What the records of the run in `folder` say so far; `refresh` reads what is new."""

    folder: Path
    ranks: dict[int, Rank] = field(default_factory=dict)
    active: list[int] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    term: int = 1
    step: int = 0
    finished: bool = False
    _read: int = 0

    def refresh(self) -> None:
        for event in self._new_events():
            self.note(event)
        self.step = self._last_step()

    def note(self, event: Mapping[str, Any]) -> None:
        """One line of events.jsonl. Where there are no groups each rank counts as one, active from its start."""
        name = event["event"]
        if name == "start":
            self.ranks, self.active, self.joining, self.arrived = {}, [], [], set()
        elif name == "rank_started":
            number = int(event["rank"])
            self.ranks[number] = Rank(number, int(event.get("group", number)), int(event["pid"]))
            if "group" not in event:
                self.active = sorted({*self.active, number})
        elif name in ("rank_lost", "group_lost"):
            self._remove(int(event.get("group", event.get("rank"))))
        elif name == "arrived":
            self.arrived.add(int(event["group"]))
        elif name == "epoch":
            self.active, self.joining = list(event["active"]), list(event["joining"])
            self.term = int(event.get("term", 1))
        elif name == "finished":
            self.finished = True

    def _remove(self, group: int) -> None:
        self.ranks = {n: rank for n, rank in self.ranks.items() if rank.group != group}
        self.active = [g for g in self.active if g != group]
        self.joining = [g for g in self.joining if g != group]
        self.arrived.discard(group)

    def lead(self, hosts: int) -> int:
        """Of so many hosts the one whose coordinator leads. The first host begins with term 1; a later term of a host
        leaves its number when divided by their count."""
        return self.term % hosts if self.term > 1 else 0

    def candidates(self, who: int | str) -> list[Rank]:
        """The ranks that "active", "leader", "spare", "every" or a number means now, ascending."""
        if isinstance(who, int):
            return [self.ranks[who]] if who in self.ranks else []
        spare = self.arrived - set(self.active) - set(self.joining)
        active = set(self.active)
        groups = {"active": active, "every": active, "leader": set(self.active[:1]), "spare": spare}[who]
        return [self.ranks[number] for number in sorted(self.ranks) if self.ranks[number].group in groups]

    def _new_events(self) -> Iterator[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        if not file.exists():
            return
        with file.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield json.loads(line)

    def _last_step(self) -> int:
        """Of the last whole line of metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return 0
        with file.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - _TAIL_BYTES))
            whole = lines.read().rpartition(b"\n")[0].splitlines()
        with contextlib.suppress(ValueError, IndexError):
            return int(json.loads(whole[-1])["step"])
        return 0


def is_child(pid: int, parent: int) -> bool:
    """Whether the process is there, and `parent` started it: so its number is nobody else's."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return after_name[0] not in ("Z", "X") and int(after_name[1]) == parent


def child_running(parent: int, module: str) -> int | None:
    """The oldest child of `parent` that runs `python -m MODULE`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or not is_child(int(entry.name), parent):
            continue
        with contextlib.suppress(OSError):
            if module.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                started = (entry / "stat").read_text().rpartition(")")[2].split()[19]
                found.append((int(started), int(entry.name)))
    return min(found)[1] if found else None
