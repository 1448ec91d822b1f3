"""The coordinator of a run on several hosts: what `Coordinator` is to one, with a desk for the agents (`desk.py`).

Terms are shared out among the hosts, so that no two coordinators ever have the same one. After a partition each
coordinator that took over looks for others and tells them its term: that of the lower one ends, and what was connected
with it goes over to the other.

None goes on without some of an epoch's groups before it has claimed that epoch (`claims.py`). One that has most of the
active groups claims at once, and so does an old coordinator with half of them; the others wait until these, if they
live, have had time to do so.
"""

from __future__ import annotations

import hmac
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from bessemer.keep.claims import Claim, Claims
from bessemer.keep.coordinator import Coordinator
from bessemer.keep.desk import Desk, token_of
from bessemer.keep.links import await_challenge, connect, proof
from bessemer.keep.membership import Membership
from bessemer.keep.switchboard import Peer
from bessemer.keep.takeover import Takeover
from bessemer.keep.wire import Frames, WireError, pack

__all__ = ["HostsCoordinator"]

HERALD_S = 3.0
SETTLE_S = 0.3
"""After the first host fell silent: others may do so at the same time."""
HALF_LEASES = 4
"""How long a coordinator that took over waits before it claims the epoch with half of the active groups: the other
half, with the old coordinator, has done so by then if it lives."""
FEW_LEASES = 8
"""Of any with fewer than half: the others need three leases to find the silence, and two to come together."""
RETRY_S = 2.0
ABSENT_S = 10.0
"""Beyond a lease, for an agent to connect with a coordinator of which it has to hear first."""
STRANDED_S = 120.0
"""How long a coordinator to which no group has come that holds the state, or that another one has forestalled, waits
until the run is whole again; then it gives up, so that the launcher starts what it leads anew."""
_LOOK_S = 1.0
_OF_THE_DESK = ("record", "stop", "give_up", "standings", "evict", "done", "concluded")


class HostsCoordinator(Coordinator):
    """`addresses`: by host where a coordinator of its would listen; `desk` says which host is this one's."""

    def __init__(
        self, server: socket.socket, membership: Membership, desk: Desk, addresses: Sequence[str], **more: Any
    ) -> None:
        self.desk, self._hosts = desk, tuple(addresses)
        self._claims = Claims(desk.run, token_of(desk.run))
        self._parked = False  # losses are known, and whether this side may go on without them isn't
        self._claim_at = self._retry_at = self._began = 0.0
        self._untold: list[tuple[str, dict[str, Any]]] = []  # while parked
        self._absent: dict[str, float] = {}  # since when
        self._absent_at = 0.0
        self._ended = threading.Event()
        self._forestalled = False  # another coordinator has claimed what this one would go on from
        self._stranded_since: float | None = None
        super().__init__(server, membership, **more)
        desk.send = self._send
        for group in () if self._takeover is None else self._takeover.known.active + self._takeover.known.joining:
            desk.saw(group % len(self._hosts), group)
        if self._takeover is None:
            self._claims.clear()
        else:
            self._began = time.monotonic()
            threading.Thread(target=self._herald, name="bessemer-herald", daemon=True).start()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        super().run(lambda: until() or self.desk.over)

    def turn(self, timeout_s: float) -> None:
        super().turn(timeout_s)
        now = time.monotonic()
        if self._parked and self._takeover is None and now >= self._claim_at:
            self._decide()
        if self._takeover is not None and (part := self._takeover.part_here):
            wait_s = self._lease_s * (HALF_LEASES if part >= 0.5 else FEW_LEASES)
            if now >= self._began + wait_s:
                self._take_over(self._takeover)
        m, decides = self.membership, self._takeover is None and not self._parked
        while self._untold and decides:
            event, fields = self._untold.pop(0)
            self._tell_agents(event, **fields)
        if decides and m.begun and not m.active and not self.finished:
            self.desk.tell_all({"kind": "give_up", "why": "no group is left that holds the state"})
        self._check_stranded(time.monotonic())
        self._check_absent(time.monotonic())
        self.desk.turn(time.monotonic(), decides=decides, begun=m.begun, standby=bool(self._with_role("standby")))

    def close(self) -> None:
        self._ended.set()
        super().close()

    def _later(self, term: int) -> int:
        """The next term of this host."""
        count = len(self._hosts)
        return term + 1 + (self.desk.number - term - 1) % count

    # ---- connections

    def _part_from(self, peer: Peer) -> None:
        super()._part_from(peer)
        self.desk.gone(peer)

    def _hello(self, peer: Peer, record: dict[str, Any]) -> None:
        own = proof(self._secret, peer.nonce)
        if record.get("role") == "coordinator" and hmac.compare_digest(str(record.get("proof", "")), own):
            if int(record["term"]) > self.membership.term:
                self.superseded = int(record["term"])
            return
        super()._hello(peer, record)
        if peer.role == "standby":
            self._tell_agents("standby")
        elif peer.role == "agent":
            m = self.membership
            members = (m.active, m.joining) if self._takeover is None and m.begun else None
            if self._conclusion is not None:  # groups of those that come may have to save the last step
                members = self._conclusion.holders, []
            step = m.step if self._takeover is None else self._takeover.known.step
            self.desk.come(peer, record, begun=self._known_epoch > 0, term=m.term, step=step, members=members)

    def _hello_of_rank(self, peer: Peer, record: dict[str, Any]) -> None:
        super()._hello_of_rank(peer, record)
        self.desk.saw(int(record["group"]) % len(self._hosts), int(record["group"]))

    # ---- agents

    def _from_agent(self, peer: Peer, record: dict[str, Any]) -> None:
        if record["kind"] == "concluded":
            for standby in self._with_role("standby"):
                self._send(standby, {"kind": "over"})
        if record["kind"] == "standings" and (self._takeover is not None or self._parked):
            return  # they wait for this coordinator
        if record["kind"] in _OF_THE_DESK:
            self.desk.take(peer, record)
        else:
            super()._from_agent(peer, record)

    def _tell_agents(self, event: str, **fields: Any) -> None:
        fields = {"t": time.time(), **fields}
        if self._parked:
            self._untold.append((event, fields))
            return
        self.desk.note(event, fields)
        if self._with_role("agent"):  # one that comes later is told who the members are
            super()._tell_agents(event, **fields)

    # ---- going on without some

    @property
    def _cut_off(self) -> bool:
        return self._parked

    def _lost(self, group: int, incarnation: int, why: str) -> None:
        m = self.membership
        decides = self._takeover is None and not self.finished
        if decides and group in self._silent and group in (*m.active, *m.joining):
            self._parked = True
            few = self._last is not None and 2 * len(self._silent & set(self._last.active)) > len(self._last.active)
            self._claim_at = self._silent_at + (FEW_LEASES * self._lease_s if few else SETTLE_S)
        super()._lost(group, incarnation, why)

    def _decide(self, *, force: bool = False, before: tuple[int, int] | None = None) -> None:
        m, now = self.membership, time.monotonic()
        if self._takeover is None and m.waiting:
            if self._parked and now < self._claim_at:
                self._decide_at = self._force_at = None  # `turn` comes back to it
                return
            claimed = self._claimed(m.epoch, sorted(m.lost_names)) if m.settles(force=force) else None
            self._parked = claimed is not None
            self._forestalled = claimed is not None and claimed.term > 0
            if self._parked:
                self._decide_at = self._force_at = None
                self._claim_at = now + RETRY_S
                return
        super()._decide(force=force, before=before)

    def _take_over(self, takeover: Takeover) -> None:
        known, now = takeover.known, time.monotonic()
        if now < self._retry_at:
            return
        if known.epoch and known.step < self.membership.steps and not self.finished:
            claimed = self._claimed(known.epoch, takeover.missing, since=known.epoch)
            if claimed is not None:
                if claimed.term:
                    takeover.without(claimed.lost, now)
                self._retry_at = now + RETRY_S
                return
        super()._take_over(takeover)

    def _claimed(self, epoch: int, lost: Sequence[int], since: int | None = None) -> Claim | None:
        """None where this side may go on; else who does, as far as is known."""
        try:
            return self._claims.take(epoch, self.membership.term, lost, since=since)
        except (OSError, ValueError) as error:
            print(f"epoch {epoch} can't be claimed: {error}", file=sys.stderr, flush=True)
            return Claim(0, ())

    def _check_stranded(self, now: float) -> None:
        takeover = self._takeover
        alone = takeover is not None and takeover.known.epoch > 0 and not takeover.part_here
        if self.finished or not (alone or (self._parked and self._forestalled)):
            self._stranded_since = None
        elif self._stranded_since is None:
            self._stranded_since = now
        elif now - self._stranded_since > STRANDED_S:
            what = "no group that holds the state has come" if alone else "another coordinator goes on from here"
            why = f"{what}, and nothing more was heard for {STRANDED_S:g} s"
            self.desk.tell_all({"kind": "give_up", "why": why, "elsewhere": True})

    def _check_absent(self, now: float) -> None:
        """Hosts whose ranks are connected and whose agent isn't, for longer than it takes to come."""
        if now < self._absent_at:
            return
        self._absent_at = now + self._lease_s / 4
        present = {peer.host for peer in self._with_role("agent")}
        absent = {peer.host for peer in self._with_role("rank")} - present
        self._absent = {host: self._absent.get(host, now) for host in absent}
        for host in [host for host, since in self._absent.items() if now - since > ABSENT_S + self._lease_s]:
            for peer in [p for p in self._with_role("rank") if p.host == host]:
                self._silent.add(peer.group)
                self._silent_at = now
                self._lost(peer.group, peer.incarnation, f"host {host} has no agent")

    # ---- other coordinators

    def _herald(self) -> None:
        """In a thread, until this coordinator ends."""
        while not self._ended.wait(HERALD_S):
            for number, address in enumerate(self._hosts):
                if number != self.desk.number and not self._ended.is_set():
                    with suppress(OSError, WireError, KeyError):
                        self._tell_term(address)

    def _tell_term(self, address: str) -> None:
        with connect(address, _LOOK_S) as link:
            challenge, term = await_challenge(link, Frames()), self.membership.term
            if int(challenge["term"]) < term:
                shown = proof(self._secret, str(challenge["nonce"]))
                link.sendall(pack({"kind": "hello", "role": "coordinator", "proof": shown, "term": term}))
