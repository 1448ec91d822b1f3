"""What a coordinator does for the agents of several hosts: one of them writes the run's records, one has a standby
started, and what one says that holds for all is told to all.

    agent -> hello{..., number, token, newest, wrote}
             record{of, record}   stop{signal}   give_up{why}   standings{due, standings}   done{}   concluded{}
             evict{rank, why}
    agent <- welcome{newest, begun, term, step, members} or refused{code, message, fix}
             write{begun}     this one writes the records from now on     resend{}     another one does
             record{of, record}     of another host, to the one that writes
             stand_by{of}     start a standby of the coordinator at that address
             stop{signal}   give_up{why}   alive{}   lose{standing}
             evict{rank, why}     whoever has it
             last{}     all others are done     over{}     the one that writes is, too

newest: the highest number that a group of that host has had. standings: so far are that host's members while no step
comes true (`standstill.py`); due: for too long. lose: [group, step, epoch, far], if it is still there.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.keep.standstill import Standing, behind
from bessemer.keep.switchboard import Peer

__all__ = ["Desk"]

STANDBY_S = 10.0
"""How long a host has to start a standby before another one is asked."""
STANDING_S = 3.0
"""How long what an agent has said of its standing groups holds."""
_MOST_HELD = 100_000


@dataclass
class _Host:
    number: int
    wrote: bool
    done: bool = False
    standings: tuple[float, bool, list[Standing]] = (0.0, False, [])  # until when that holds; due


@dataclass
class Desk:
    """`number`: of the host on which this coordinator runs; `address`: where it listens; `run`: the run folder, of
    whose attempt all agents must be."""

    number: int
    address: str
    run: Path
    lease_s: float
    over: bool = False
    """The one that writes has said its last word."""
    newest: dict[int, int] = field(default_factory=dict)
    """By host the highest number that a group of its has had."""
    send: Callable[[Peer, Mapping[str, Any]], None] = lambda peer, record: None
    hosts: dict[Peer, _Host] = field(default_factory=dict)
    _writer: Peer | None = None
    _held: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_HELD))
    _started: float = field(default_factory=time.monotonic)
    _sign_at: float = 0.0
    _ask_at: float = 0.0
    _asked: list[int] = field(default_factory=list)
    _for_all: list[dict[str, Any]] = field(default_factory=list)  # told to those that come later, too

    # ---- who comes and goes

    def come(
        self, peer: Peer, record: Mapping[str, Any], *, begun: bool, term: int, step: int,
        members: tuple[list[int], list[int]] | None = None,
    ) -> None:  # fmt: skip
        """An agent says hello. step: so many are true. members: the groups that are active, and those that join; None
        where an epoch is to come that says so."""
        own = token_of(self.run)
        if str(record["token"]) != own:
            what = f"host {record['host']} doesn't see the run folder of the coordinator at {self.run}"
            fix = "set run.dir to a folder that all hosts mount at the same place"
            self.send(peer, {"kind": "refused", "code": "other-folder", "message": what, "fix": fix})
            return
        self.hosts[peer] = _Host(int(record["number"]), bool(record["wrote"]))
        number = int(record["number"])
        self.saw(number, int(record["newest"]))
        known = {"begun": begun, "term": term, "step": step, "members": members}
        self.send(peer, {"kind": "welcome", "newest": self.newest[number], **known})
        if self._writer is not None:
            self.send(peer, {"kind": "resend"})
        for told in self._for_all:
            self.send(peer, told)

    def gone(self, peer: Peer) -> None:
        host = self.hosts.pop(peer, None)
        if host is not None and host.number in self._asked:
            self._asked.remove(host.number)  # it may not have heard
            self._ask_at = 0.0
        if peer is self._writer:
            self._writer = None
            self._started = time.monotonic()

    def saw(self, number: int, group: int) -> None:
        """A group of that host."""
        self.newest[number] = max(self.newest.get(number, -1), group)

    # ---- what is said

    def take(self, peer: Peer, record: Mapping[str, Any]) -> None:
        """ValueError: no agent of several hosts says that."""
        kind, host = record["kind"], self.hosts.get(peer)
        if host is None:
            raise ValueError(f"{kind!r} of an agent that was not welcome")
        if kind == "record":
            self._hand_on({"kind": "record", "of": record["of"], "record": record["record"]})
        elif kind == "stop":
            self.tell_all({"kind": "stop", "signal": str(record["signal"])})
        elif kind == "give_up":
            self.tell_all({"kind": "give_up", "why": str(record["why"])})
        elif kind == "standings":
            standings = [Standing(*standing) for standing in record["standings"]]
            host.standings = time.monotonic() + STANDING_S, bool(record["due"]), standings
            self._settle_standstill()
        elif kind == "evict":
            for other in list(self.hosts):
                self.send(other, {"kind": "evict", "rank": int(record["rank"]), "why": str(record["why"])})
        elif kind == "done":
            host.done = True
        elif kind == "concluded":
            self.over = True
            for other in list(self.hosts):
                self.send(other, {"kind": "over"})
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def tell_all(self, record: dict[str, Any]) -> None:
        """Once, also to those that come later."""
        if record["kind"] not in [told["kind"] for told in self._for_all]:
            self._for_all.append(record)
            for peer in list(self.hosts):
                self.send(peer, record)

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Something happened while nobody writes. Who writes is told as all agents are."""
        if self._writer is None:
            self._held.append({"kind": "record", "of": "events", "record": {"event": event, **fields}})

    def _hand_on(self, record: dict[str, Any]) -> None:
        if self._writer is None:
            self._held.append(record)
        else:
            self.send(self._writer, record)

    def _settle_standstill(self) -> None:
        """Groups are lost that others wait for, wherever these are."""
        now = time.monotonic()
        known = {peer: host.standings for peer, host in self.hosts.items() if host.standings[0] > now}
        if not any(due for _, due, _ in known.values()):
            return
        late = {s.group for s in behind(s for _, _, standings in known.values() for s in standings)}
        for peer, (_, _, standings) in known.items():
            for standing in (s for s in standings if s.group in late):
                self.send(peer, {"kind": "lose", "standing": [standing.group, *standing.at]})
        if late:
            for host in self.hosts.values():
                host.standings = (0.0, False, [])

    # ---- what is due

    def turn(self, now: float, *, decides: bool, begun: bool, standby: bool) -> None:
        """Every so often. decides: this coordinator's word counts; standby: it has one."""
        if now >= self._sign_at:
            self._sign_at = now + self.lease_s / 4
            for peer in list(self.hosts):
                self.send(peer, {"kind": "alive"})
        if not decides or not self.hosts:
            return
        if self._writer is None:
            first = min(self.hosts, key=lambda peer: (not self.hosts[peer].wrote, self.hosts[peer].number))
            if not begun or self.hosts[first].wrote or now - self._started > self.lease_s:
                self._appoint(first, begun)
        if standby:
            self._ask_at, self._asked = 0.0, []
        elif now >= self._ask_at:
            self._ask_for_standby(now)
        writer = self._writer
        if writer is not None and self.hosts[writer].done and all(host.done for host in self.hosts.values()):
            self.send(writer, {"kind": "last"})
            self.hosts[writer].done = False  # told once

    def _appoint(self, peer: Peer, begun: bool) -> None:
        self._writer = peer
        self.send(peer, {"kind": "write", "begun": begun})
        while self._held:
            self.send(peer, self._held.popleft())
        for other in list(self.hosts):
            if other is not peer:
                self.send(other, {"kind": "resend"})

    def _ask_for_standby(self, now: float) -> None:
        """A host other than this one, each in its turn."""
        others = {host.number: peer for peer, host in self.hosts.items() if not host.done}
        left = [number for number in sorted(others) if number not in (self.number, *self._asked)]
        if not left:
            self._asked = []
            return
        self._asked.append(left[0])
        self._ask_at = now + STANDBY_S
        self.send(others[left[0]], {"kind": "stand_by", "of": self.address})


def token_of(run: Path) -> str:
    """What tells attempts and folders apart; empty where there is none."""
    try:
        return str(json.loads((run / "run.json").read_text())["token"])
    except (OSError, ValueError, KeyError):
        return ""
