"""How a coordinator takes over from one that died: what it has heard of, who has to come, and what is believed.

A coordinator tells each decision to its standbys, and appends it to a log file, before it tells the members. One that
takes over under a new term waits for the members of the newest epoch that it or any member knows of: until all have
come, or the lease is over and most have. Those that haven't come count as lost. A group that an agent calls lost is not
waited for, and not counted. Without a majority it waits on: a minority never commits, unless on several hosts its claim
is the first (`hosts_coordinator.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bessemer.keep.links import await_challenge, connect, proof
from bessemer.keep.membership import Membership, Report
from bessemer.keep.records import RecordWriter, read_records
from bessemer.keep.wire import Frames, pack

__all__ = ["Decision", "DecisionLog", "Takeover", "stand_by"]

_AGAIN_S = 1.0


@dataclass(frozen=True)
class Decision:
    """Where a run stands. joins: by joiner its donor, the donor's incarnation, and the step of the snapshot."""

    term: int = 0
    epoch: int = 0
    step: int = 0
    replicas: int = 0
    active: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    joins: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, m: Membership) -> Decision:
        return cls(m.term, m.epoch, m.step, m.replicas, tuple(m.active), tuple(m.joining), m.joins)

    def after(self, record: Mapping[str, Any]) -> Decision:
        """With what a later record says."""
        if "epoch" not in record:
            return replace(self, step=int(record["step"]))
        term, epoch, step, replicas = (int(record[k]) for k in ("term", "epoch", "step", "replicas"))
        joins = {int(n): (int(d), int(i), int(s)) for n, (d, i, s) in record["joins"].items()}
        return Decision(term, epoch, step, replicas, tuple(record["active"]), tuple(record["joining"]), joins)

    def record(self, before: Decision | None) -> dict[str, Any]:
        """What makes `before` this one: all of it, or the step alone where nothing else has changed."""
        if before is not None and replace(before, step=self.step) == self:
            return {"step": self.step}
        return asdict(self)


class DecisionLog:
    """Decisions one a line. A new epoch is on the disk before anybody hears of it; a commit is with the kernel, which
    is enough where the coordinator alone dies. On a full disk they wait in memory: the members and a standby know
    them too."""

    def __init__(self, path: Path, *, anew: bool) -> None:
        """`anew`: what an earlier attempt has left is of no account."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            path.unlink(missing_ok=True)
        self._writer = RecordWriter(path)

    def write(self, record: Mapping[str, Any]) -> None:
        self._writer.write(record)
        if "epoch" in record:
            self._writer.sync()

    def close(self) -> None:
        with suppress(OSError):  # no room for the last ones, which the members and a standby know
            self._writer.close()

    @staticmethod
    def read(path: Path) -> Decision:
        """The newest decision: that of the highest term, since a coordinator that was replaced may still write."""
        newest = now = Decision()
        for record in read_records(path) if path.exists() else ():
            now = now.after(record)
            if (now.term, now.epoch, now.step) >= (newest.term, newest.epoch, newest.step):
                newest = now
        return newest


class Takeover:
    """Collects what members report. `started`: when, by the monotonic clock; `lease_s`: how long those that don't come
    are waited for, after the start and after the latest one that came: they don't all notice at once."""

    def __init__(self, known: Decision, block: int, steps: int, *, started: float, lease_s: float) -> None:
        self.known = known
        self.reports: dict[tuple[int, int], Report] = {}
        self._block, self._steps, self._lease_s, self._over = block, steps, lease_s, started + lease_s
        self._dead: set[int] = set()

    def came(self, report: Report, record: Mapping[str, Any], now: float) -> None:
        """A rank's hello. One that knows of a newer epoch brings its members."""
        self._over = max(self._over, now + self._lease_s)
        self.reports[report.group, report.place] = report
        if report.epoch > self.known.epoch:
            active, joining = tuple(record["active"]), tuple(record["joining"])
            self.known = replace(self.known, epoch=report.epoch, active=active, joining=joining, joins={})
        if report.epoch > 0 and report.state == "active":
            self.known = replace(self.known, step=max(self.known.step, report.step))

    def gone(self, group: int, place: int) -> None:
        self.reports.pop((group, place), None)

    def dead(self, group: int) -> None:
        """An agent says so."""
        self._dead.add(group)

    def ready(self, now: float) -> bool:
        known = self.known
        if known.step >= self._steps and known.epoch:
            return True  # nothing is left to be committed
        here = {group for group, _ in self.reports if self._whole(group)}
        if set(known.active + known.joining) - self._dead <= here and known.epoch:
            return True
        active = set(known.active)
        return now >= self._over and 2 * len(active & (here | self._dead)) >= len(active) + bool(active)

    @property
    def missing(self) -> list[int]:
        """Members of the epoch that are dead or not here as a whole."""
        members = self.known.active + self.known.joining
        return sorted(group for group in members if group in self._dead or not self._whole(group))

    @property
    def part_here(self) -> float:
        """What part of the active groups, which hold the state, is here; 0 before the first epoch."""
        active = set(self.known.active)
        return len(active - set(self.missing)) / len(active) if active and self.known.epoch else 0.0

    def without(self, lost: Sequence[int], now: float) -> None:
        """Another coordinator went on from this epoch without those groups: what followed is where the run stood."""
        gone, known = set(lost), self.known
        active, joining = (tuple(n for n in names if n not in gone) for names in (known.active, known.joining))
        self.known = replace(known, epoch=known.epoch + 1, active=active, joining=joining, joins={})
        self._over = now + self._lease_s

    def finish(self, **shape: Any) -> tuple[Membership, list[tuple[int, int]]]:
        """The membership that goes on, and the seats of those that are no part of it. `shape`: as for `Membership`."""
        known = self.known
        believed: list[Report] = []
        fenced: list[tuple[int, int]] = []
        for seat, report in self.reports.items():
            group = report.group
            member = group in known.active or group in known.joining
            if group in self._dead or (member and not self._whole(group)) or (not member and report.epoch > 0):
                fenced.append(seat)
                continue
            state: Literal["active", "joining", "spare"] = (
                "active" if group in known.active else "joining" if member else "spare"
            )
            believed.append(replace(report, state=state))
        if known.epoch:
            shape |= {"step": known.step}
        return Membership.recovered(believed, epoch=known.epoch, joins=known.joins, **shape), fenced

    def _whole(self, group: int) -> bool:
        found = [self.reports.get((group, place)) for place in range(self._block)]
        return None not in found and len({r.incarnation for r in found if r is not None}) == 1


def stand_by(primary: str, secret: str, *, lease_s: float) -> Decision | None:
    """Hear the decisions of the coordinator at `primary`; returns the last one once that coordinator has ended or was
    silent for three leases. None: the run has ended in order. Raises OSError where nobody listens there.

    One that merely closed the connection, since this process was itself silent for too long, is followed again."""
    link, known = connect(primary, 30.0), Decision()
    while True:
        with link:
            known, how = _follow(link, secret, lease_s, known)
        if how == "over":
            return None
        if how == "silent":
            return known
        try:
            link = connect(primary, _AGAIN_S)
        except OSError:
            return known


def _follow(
    link: socket.socket, secret: str, lease_s: float, known: Decision
) -> tuple[Decision, Literal["over", "silent", "ended"]]:
    """Until the connection says no more; the newest decision, and why."""
    frames = Frames()
    try:
        challenge = await_challenge(link, frames)
        link.sendall(pack({"kind": "hello", "role": "standby", "proof": proof(secret, str(challenge["nonce"]))}))
    except OSError:
        return known, "silent"
    link.settimeout(lease_s / 3)
    known, silent = replace(known, term=max(known.term, int(challenge["term"]))), 0
    while True:
        try:
            link.sendall(pack({"kind": "alive"}))
            data = link.recv(1 << 16)
            silent = 0
        except TimeoutError:
            silent += 1
            if silent >= 9:
                return known, "silent"
            continue
        except OSError:
            return known, "ended"
        if not data:
            return known, "ended"
        for record in frames.feed(data):
            if record["kind"] == "decision":
                known = known.after(record["decision"])
            elif record["kind"] == "over":
                return known, "over"
