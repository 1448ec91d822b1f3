"""The coordinator: the one process whose commits make steps true. It carries what ranks and agents say to the
`Membership`, and its decisions to them. `links.py` has what they say to each other.

The end of a rank's connection is its death, and that of its group. An agent that is silent for the lease takes the
groups of its ranks with it. A coordinator that hears of a later term is replaced: it ends.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bessemer.keep.conclusion import Conclusion
from bessemer.keep.links import proof
from bessemer.keep.meetings import Meetings
from bessemer.keep.membership import Membership, Message, Report
from bessemer.keep.switchboard import Peer, Switchboard
from bessemer.keep.takeover import Decision, DecisionLog, Takeover
from bessemer.keep.wire import pack

__all__ = ["Coordinator"]

DEBOUNCE_S = 0.02
"""Losses that come so close together make one epoch."""
RENEW_S = 1.0
"""How long after a sum failed a loss that explains it is waited for."""
HOLD_S = 0.2
"""How long a step whose lost group had voted may still become true by the others' votes."""
_MOST_UNHEARD = 10_000


class Coordinator(Switchboard):
    """The event loop around one `Membership`. `lease_s`: how long an agent may be silent. `takes_over`: from a
    coordinator that made these decisions; `membership` is then where it would begin, under a later term."""

    def __init__(
        self,
        server: socket.socket,
        membership: Membership,
        *,
        secret: str,
        lease_s: float = 1.5,
        log: DecisionLog | None = None,
        takes_over: Decision | None = None,
    ) -> None:
        super().__init__(server)
        self.membership = membership
        self.superseded = 0
        """The later term that was heard of."""
        self._log = log
        self._last: Decision | None = None
        self._takeover: Takeover | None = None
        if takes_over is not None:
            m, now = membership, time.monotonic()
            m.term, m.replicas = self._later(takes_over.term), takes_over.replicas or m.replicas
            self._takeover = Takeover(takes_over, m.block, m.steps, started=now, lease_s=lease_s)
        self._secret, self._lease_s = secret, lease_s
        self._ranks: dict[tuple[int, int], Peer] = {}
        self._meetings = Meetings(self._send)
        self._decide_at: float | None = None
        self._force_at: float | None = None
        self._renew: tuple[float, int] | None = None  # when, and which epoch
        self._addresses: dict[tuple[int, int], str] = {}
        self._alive_at = 0.0
        self._had_standby = False
        self._members: tuple[int, ...] = ()  # of the epoch, as it was formed
        self._leavers: set[int] = set()
        self._scaled = False
        self._unheard: deque[dict[str, Any]] = deque(maxlen=_MOST_UNHEARD)  # while there is no agent
        self._silent_at = 0.0
        self._silent: set[int] = set()  # groups that were given up since, on hosts that fell silent
        self._conclusion: Conclusion | None = None

    @property
    def finished(self) -> bool:
        return self._conclusion is not None

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until the run has finished and all but standbys have gone, or a later term is heard of, or `until`
        says so."""
        while not until() and not self.superseded:
            standbys = self._with_role("standby")
            if self.finished and len(standbys) == len(self._peers):
                for peer in standbys:
                    self._send(peer, {"kind": "over"})
                return
            self.turn(0.1)

    def turn(self, timeout_s: float) -> None:
        now = time.monotonic()
        due = [at for at in (self._decide_at, self._force_at) if at is not None]
        due += [] if self._renew is None else [self._renew[0]]
        self._listen(max(0.0, min([now + timeout_s, *due]) - now))
        now = time.monotonic()
        self._check_leases(now)
        if self._takeover is not None and self._takeover.ready(now):
            self._take_over(self._takeover)
        if self._decide_at is not None and now >= self._decide_at:
            self._decide()
        if self._force_at is not None and now >= self._force_at:
            self._decide(force=True)
        if self._renew is not None and now >= self._renew[0]:
            self.membership.renew(self._renew[1])
            self._renew = None
            self._decide()
        self._conclude()

    def close(self) -> None:
        super().close()
        if self._log is not None:
            self._log.close()

    # ---- connections

    def _greet(self, peer: Peer) -> None:
        challenge = {"kind": "challenge", "nonce": peer.nonce, "term": self.membership.term}
        self._send(peer, challenge | {"epoch": self._known_epoch})

    def _on_nonsense(self, error: Exception) -> None:
        self._tell_agents("warning", message=f"the coordinator closed a connection: {error!r}", rank=None)

    def _on_end(self, peer: Peer) -> None:
        self._part_from(peer)
        self._meetings.gone(peer)
        if peer.role == "rank" and self._ranks.get((peer.group, peer.place)) is peer:
            del self._ranks[peer.group, peer.place]
            if self._takeover is not None:
                self._takeover.gone(peer.group, peer.place)
            self._lost(peer.group, peer.incarnation, "its connection ended")

    # ---- what is said

    def _take(self, peer: Peer, record: dict[str, Any]) -> None:
        kind, m = record["kind"], self.membership
        if not peer.role:
            self._hello(peer, record)
        elif peer.role == "agent":
            self._from_agent(peer, record)
        elif peer.role == "meet":
            self._meetings.take(peer, record)
        elif peer.role == "standby":
            if self._silent:
                self._decide_soon(0.0)  # it still stands by
        elif int(record["term"]) > m.term:
            self.superseded = int(record["term"])
        elif kind == "ping":
            self._send(peer, {"kind": "pong", "term": m.term})
        elif self._takeover is not None and kind != "leave":
            pass  # it belongs to an epoch that nobody waits for any more
        elif kind == "vote":
            m.voted(peer.group, peer.place, int(record["epoch"]), int(record["step"]), str(record["digest"]))
            self._decide_soon(0.0)
        elif kind == "done":
            if self._conclusion is not None:
                self._conclusion.done(peer.group, peer.place)
        elif kind == "synced":
            m.synced(peer.group, peer.place)
            self._decide_soon(0.0)
        elif kind == "stuck":
            self._on_stuck(peer, int(record["epoch"]), str(record["why"]))
        elif kind == "leave":
            self._leavers.add(peer.group)
            m.leave(peer.group)
            self._tell_agents("leaving", group=peer.group)
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _hello(self, peer: Peer, record: dict[str, Any]) -> None:
        shown = str(record.get("proof", ""))
        if record["kind"] != "hello" or not hmac.compare_digest(shown, proof(self._secret, peer.nonce)):
            raise ValueError("a connection that doesn't know the run's secret")
        self._enrol(peer, str(record["role"]))
        if peer.role == "agent":
            peer.host = str(record["host"])
            while self._unheard:
                self._send(peer, self._unheard.popleft())
        elif peer.role == "standby":
            self._had_standby = True
            self._decide_soon(0.0)
            self._send(peer, {"kind": "decision", "decision": Decision.of(self.membership).record(None)})
        elif peer.role == "meet":
            self._meetings.come(peer, str(record["meeting"]))
        else:
            self._hello_of_rank(peer, record)

    def _hello_of_rank(self, peer: Peer, record: dict[str, Any]) -> None:
        group, incarnation, place, epoch = (int(record[k]) for k in ("group", "incarnation", "place", "epoch"))
        if int(record["term"]) > self.membership.term and self._takeover is None:
            self.superseded = int(record["term"])
            return
        seat, step, m = (group, place), record["step"], self.membership
        if self._takeover is not None and int(record["term"]) >= m.term:
            m.term = self._later(int(record["term"]))
        known, end, active = m.groups.get(group), self._conclusion, record["state"] == "active"
        last = end is not None and active and epoch >= end.epoch and int(step) >= m.steps - 1
        fresh = self._takeover is None and not last  # else it comes from the coordinator before this one
        if fresh and (seat in self._ranks or epoch or (known and known.incarnation != incarnation)):
            why = f"group {group} is no part of the run any more"
            self._send(peer, {"kind": "fenced", "term": self.membership.term, "why": why})
            return
        peer.group, peer.incarnation, peer.place, peer.host = group, incarnation, place, str(record["host"])
        self._ranks[seat], self._addresses[seat] = peer, str(record["address"])
        if self._takeover is not None:
            share, stands = tuple(int(unit) for unit in record["share"]), -1 if step is None else int(step)
            report = Report(group, incarnation, place, record["state"], epoch, stands, share)
            self._takeover.came(report, record, time.monotonic())
        elif self._conclusion is not None and last:
            self._conclusion.came(group)
            commit = {"kind": "commit", "epoch": epoch, "step": self.membership.steps, "finished": True, "next": None}
            self._send(peer, commit | {"term": self.membership.term})  # which it may not have heard of
        else:
            self.membership.arrived(group, incarnation, place, None if step is None else int(step))
        if record["leaving"] and not last:
            self._leavers.add(group)
            self.membership.leave(group)
        self._tell_agents("arrived", group=group, place=place, step=step)
        self._decide_soon(0.0)

    def _later(self, term: int) -> int:
        """A term above that one."""
        return term + 1

    def _from_agent(self, peer: Peer, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "lost":
            if self._takeover is not None:
                self._takeover.dead(int(record["group"]))
            self._lost(int(record["group"]), int(record["incarnation"]), str(record["why"]))
        elif kind == "scale":
            self.membership.replicas = int(record["replicas"])
            self._scaled = True
            self._settle_scale()
        elif kind != "alive":
            raise ValueError(f"unknown kind {kind!r}")

    def _settle_scale(self) -> None:
        """A number of groups that somebody wished for is a decision before anybody hears of it."""
        if self._scaled and self._takeover is None:
            self._scaled = False
            self._keep(self.membership)
            self._tell_agents("scale", replicas=self.membership.replicas)

    def _on_stuck(self, peer: Peer, epoch: int, why: str) -> None:
        """A sum failed. Mostly a loss explains it, which is heard of within moments; else the same groups try again."""
        if epoch == self.membership.epoch:
            self.membership.stuck(epoch)
            self._decide_soon(DEBOUNCE_S)
            self._tell_agents("sum_failed", group=peer.group, place=peer.place, epoch=epoch, why=why)
            if self._renew is None or self._renew[1] != epoch:
                self._renew = time.monotonic() + RENEW_S, epoch

    def _lost(self, group: int, incarnation: int, why: str) -> None:
        known, m = self.membership.groups.get(group), self.membership
        if self._conclusion is not None:
            if self._conclusion.over:
                return
            self._conclusion.gone(group)
        elif known is None or known.incarnation != incarnation:
            return
        else:
            self._tell_agents("group_lost", group=group, state=known.state, step=m.step, why=why)
            m.lost(group, incarnation)
            self._decide_soon(DEBOUNCE_S)
        for place in range(m.block):
            peer = self._ranks.pop((group, place), None)
            if peer is not None:
                self._send(peer, {"kind": "fenced", "term": m.term, "why": f"group {group} is lost: {why}"})

    def _check_leases(self, now: float) -> None:
        if now >= self._alive_at:
            self._alive_at = now + self._lease_s / 4
            for peer in self._with_role("standby"):
                self._send(peer, {"kind": "alive"})
        for peer in self._with_role("standby"):
            if now - peer.heard > self._lease_s:
                self._on_end(peer)
        for peer in self._with_role("agent"):
            if now - peer.heard > self._lease_s:
                self._part_from(peer)
                others = [p for p in self._with_role("rank") if p.host == peer.host]
                self._silent |= {p.group for p in others}
                self._silent_at = now
                for other in others:
                    self._lost(other.group, other.incarnation, f"host {peer.host} is silent for {self._lease_s:g} s")

    @property
    def _cut_off(self) -> bool:
        """Whether this side may be the smaller one of two: at least half of the epoch's groups fell silent, of which
        nobody knows whether they live, and since then no standby has said that it still stands by."""
        if not self._had_standby or not self._silent:
            return False
        if 2 * len(self._silent & set(self._members)) < len(self._members):
            return False
        return not any(peer.heard > self._silent_at for peer in self._with_role("standby"))

    def _conclude(self) -> None:
        """Once the last step is true: who has to save it, and that all may go."""
        for groups, record in () if self._conclusion is None else self._conclusion.decide(time.monotonic()):
            if record["kind"] == "conclude":
                self._tell_agents("concludes", group=groups[0])
            self._tell_ranks(Message(groups, range(self.membership.block), record))

    # ---- decisions

    def _decide_soon(self, delay_s: float) -> None:
        at = time.monotonic() + delay_s
        self._decide_at = at if self._decide_at is None else min(self._decide_at, at)

    @property
    def _known_epoch(self) -> int:
        return self.membership.epoch if self._takeover is None else self._takeover.known.epoch

    def _take_over(self, takeover: Takeover) -> None:
        m = self.membership
        shape = {"block": m.block, "steps": m.steps, "minimum": m.minimum, "units_of": m._units_of, "term": m.term}
        self.membership, fenced = takeover.finish(replicas=m.replicas, **shape)
        self._takeover = None
        for group in self._leavers:
            self.membership.leave(group)
        for seat in fenced:
            why = f"group {seat[0]} did not come whole to the new coordinator"
            self._send(self._ranks.pop(seat), {"kind": "fenced", "term": m.term, "why": why})
        known = takeover.known
        left = sorted({*known.active, *known.joining} - set(self.membership.groups))
        self._tell_agents("took_over", term=m.term, epoch=known.epoch, step=self.membership.step, lost=left)
        if self.membership.begun and self.membership.step >= m.steps:
            till, here = time.monotonic() + self._lease_s, self.membership.active
            self._conclusion = Conclusion(m.block, known.epoch, known.active, here=here, told=False, not_before=till)
        self._decide(before=(known.epoch, known.step))
        self._settle_scale()

    def _decide(self, *, force: bool = False, before: tuple[int, int] | None = None) -> None:
        m = self.membership
        self._decide_at = None
        if self._takeover is not None or self._cut_off:
            return
        epoch, step = before or (m.epoch, m.step)
        messages = m.decide(force=force)
        self._keep(m)
        for message in messages:
            self._tell_ranks(message)
        self._force_at = (self._force_at or time.monotonic() + HOLD_S) if m.waiting else None
        if m.step != step:
            self._tell_agents("commit", step=m.step, epoch=epoch)
        if m.epoch != epoch:
            self._tell_agents("epoch", epoch=m.epoch, step=m.step, active=m.active, joining=m.joining, term=m.term)
        if m.begun and m.step >= m.steps and self._conclusion is None:  # it begins where it ends
            self._conclusion = Conclusion(m.block, m.epoch, m.active, told=False)

    def _tell_ranks(self, message: Message) -> None:
        groups, places, record = message
        if record.get("finished") and self._conclusion is None:
            self._conclusion = Conclusion(self.membership.block, record["epoch"], self.membership.active, told=True)
        for group in groups if record["kind"] == "released" else ():
            self._tell_agents("left", group=group)
        record = {**record, "term": self.membership.term}
        epoch = record if record["kind"] == "epoch" else record.get("next")
        frame = b"" if epoch and epoch["joins"] else pack(record)
        for place in places:
            own = frame or pack(self._with_addresses(record, place))
            for peer in filter(None, (self._ranks.get((group, place)) for group in groups)):
                self._post(peer, own)

    def _keep(self, m: Membership) -> None:
        """A decision is with the log and the standbys before any member hears of it."""
        last = self._last
        if last is None or (last.epoch, last.step, last.replicas) != (m.epoch, m.step, m.replicas):
            if last is None or last.epoch != m.epoch:
                self._members, self._silent = (*m.active, *m.joining), set()
                self._last = Decision.of(m)
            else:
                self._last = replace(last, step=m.step, replicas=m.replicas)
            record = self._last.record(last)
            if self._log is not None:
                self._log.write(record)
            for peer in self._with_role("standby"):
                self._send(peer, {"kind": "decision", "decision": record})

    def _with_addresses(self, record: dict[str, Any], place: int) -> dict[str, Any]:
        """To each join the address at which the joiner's rank of the same place takes its snapshot."""
        if record["kind"] == "commit" and record["next"] is not None:
            return {**record, "next": self._with_addresses(record["next"], place)}
        if record["kind"] != "epoch":
            return record
        joins = {n: {**j, "address": self._addresses.get((int(n), place), "")} for n, j in record["joins"].items()}
        return {**record, "joins": joins}

    def _tell_agents(self, event: str, **fields: Any) -> None:
        record = {"kind": "event", "event": event, "fields": {"t": time.time(), **fields}}
        agents = self._with_role("agent")
        for peer in agents:
            self._send(peer, record)
        if not agents:
            self._unheard.append(record)
