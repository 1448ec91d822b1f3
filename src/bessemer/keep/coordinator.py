"""The coordinator: the one process whose commits make steps true. It carries what ranks and agents say to the
`Membership`, and its decisions to them.

    python -m bessemer.keep.coordinator --address unix:DIR/coordinator --job runs/NAME/job.toml [--log FILE]

Connections speak the frames of `wire.py` and first prove that they know the run's secret, which comes from the
environment (`BESSEMER_SECRET`): the coordinator sends challenge{nonce}, the other side answers with hello{proof, ...}.

    rank  -> hello{proof, role: "rank", group, incarnation, place, step, state, epoch, share, address}
             vote{epoch, step, digest}   synced{}   stuck{epoch, why}   leave{}
    rank  <- epoch, commit, fenced, released, failed     as `membership.py` has them
    agent -> hello{proof, role: "agent", host}   lost{group, incarnation, why}   alive{}   scale{replicas}
    agent <- event{event, fields}     what happened, for the run's records

The end of a rank's connection is its death, and that of its group. An agent that is silent for the lease takes the
groups of its ranks with it.
"""

from __future__ import annotations

import argparse
import hmac
import os
import secrets
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.job import Job
from bessemer.core.job_file import load_job
from bessemer.data.cursor import units_of_step
from bessemer.keep.membership import Membership
from bessemer.keep.wire import Frames, WireError, pack

__all__ = ["SECRET", "Coordinator", "connect", "listen_at", "main", "proof"]

SECRET = "BESSEMER_SECRET"
DEBOUNCE_S = 0.02
"""Losses that come so close together make one epoch."""
RENEW_S = 1.0
"""How long after a sum failed a loss that explains it is waited for."""
HOLD_S = 0.2
"""How long a step whose lost group had voted may still become true by the others' votes."""


def proof(secret: str, nonce: str) -> str:
    """What shows that the other side knows the secret, without sending it."""
    return hmac.new(secret.encode(), nonce.encode(), "sha256").hexdigest()


def listen_at(address: str) -> socket.socket:
    """A listening socket at "unix:PATH" or "tcp:HOST:PORT" (port 0: any)."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        Path(rest).unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(rest)
    else:
        host, _, port = rest.rpartition(":")
        server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host.strip("[]"), int(port)))
    server.listen(1024)
    server.setblocking(False)
    return server


def connect(address: str, timeout_s: float) -> socket.socket:
    """Raises OSError when nobody listens there."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(timeout_s)
        link.connect(rest)
    else:
        host, _, port = rest.rpartition(":")
        link = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


@dataclass(eq=False)
class _Peer:
    link: socket.socket
    nonce: str
    frames: Frames = field(default_factory=Frames)
    out: deque[bytes] = field(default_factory=deque)
    role: str = ""
    group: int = -1
    incarnation: int = -1
    place: int = -1
    host: str = ""
    heard: float = 0.0


class Coordinator:
    """The event loop around one `Membership`. `lease_s`: how long an agent may be silent."""

    def __init__(self, server: socket.socket, membership: Membership, *, secret: str, lease_s: float = 1.5) -> None:
        self.membership = membership
        self._server, self._secret, self._lease_s = server, secret, lease_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._peers: set[_Peer] = set()
        self._ranks: dict[tuple[int, int], _Peer] = {}
        self._decide_at: float | None = None
        self._force_at: float | None = None
        self._renew: tuple[float, int] | None = None  # when, and which epoch
        self._addresses: dict[tuple[int, int], str] = {}
        self.finished = False

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until the run has finished and everybody has gone, or `until` says so."""
        while not until() and not (self.finished and not self._peers):
            self.turn(0.1)

    def turn(self, timeout_s: float) -> None:
        now = time.monotonic()
        due = [at for at in (self._decide_at, self._force_at) if at is not None]
        due += [] if self._renew is None else [self._renew[0]]
        for key, mask in self._selector.select(max(0.0, min([now + timeout_s, *due]) - now)):
            if key.fileobj is self._server:
                self._accept()
            elif key.data in self._peers:
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
        now = time.monotonic()
        self._check_leases(now)
        if self._decide_at is not None and now >= self._decide_at:
            self._decide()
        if self._force_at is not None and now >= self._force_at:
            self._decide(force=True)
        if self._renew is not None and now >= self._renew[0]:
            self.membership.renew(self._renew[1])
            self._renew = None
            self._decide()

    def close(self) -> None:
        for peer in list(self._peers):
            self._part_from(peer)
        self._selector.close()
        self._server.close()

    # ---- connections

    def _accept(self) -> None:
        link, _ = self._server.accept()
        link.setblocking(False)
        peer = _Peer(link, secrets.token_hex(16), heard=time.monotonic())
        self._peers.add(peer)
        self._selector.register(link, selectors.EVENT_READ, peer)
        self._send(peer, {"kind": "challenge", "nonce": peer.nonce})

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_end(peer)
            return
        peer.heard = time.monotonic()
        try:
            for record in peer.frames.feed(data):
                self._take(peer, record)
        except (WireError, KeyError, TypeError, ValueError) as error:
            self._tell_agents("warning", message=f"the coordinator closed a connection: {error!r}", rank=None)
            self._on_end(peer)

    def _send(self, peer: _Peer, record: dict[str, Any]) -> None:
        peer.out.append(pack(record))
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.out:
                sent = peer.link.send(peer.out[0])
                if sent < len(peer.out[0]):
                    peer.out[0] = peer.out[0][sent:]
                else:
                    peer.out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            peer.out.clear()  # its end is seen when it is read from
        if peer in self._peers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
            self._selector.modify(peer.link, events, peer)

    def _part_from(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.link)
            peer.link.close()

    def _on_end(self, peer: _Peer) -> None:
        self._part_from(peer)
        if peer.role == "rank" and self._ranks.get((peer.group, peer.place)) is peer:
            del self._ranks[peer.group, peer.place]
            self._lost(peer.group, peer.incarnation, "its connection ended")

    # ---- what is said

    def _take(self, peer: _Peer, record: dict[str, Any]) -> None:
        kind, m = record["kind"], self.membership
        if not peer.role:
            self._hello(peer, record)
        elif peer.role == "agent":
            self._from_agent(record)
        elif kind == "vote":
            m.voted(peer.group, peer.place, int(record["epoch"]), int(record["step"]), str(record["digest"]))
            self._decide_soon(0.0)
        elif kind == "synced":
            m.synced(peer.group, peer.place)
            self._decide_soon(0.0)
        elif kind == "stuck":
            self._on_stuck(peer, int(record["epoch"]), str(record["why"]))
        elif kind == "leave":
            m.leave(peer.group)
            self._tell_agents("leaving", group=peer.group)
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _hello(self, peer: _Peer, record: dict[str, Any]) -> None:
        if record["kind"] != "hello" or not hmac.compare_digest(
            str(record.get("proof", "")), proof(self._secret, peer.nonce)
        ):
            raise ValueError("a connection that doesn't know the run's secret")
        peer.role = str(record["role"])
        if peer.role == "agent":
            peer.host = str(record["host"])
            return
        peer.group, peer.incarnation, peer.place = (int(record[k]) for k in ("group", "incarnation", "place"))
        peer.host = str(record["host"])
        before = self._ranks.get((peer.group, peer.place))
        if before is None:
            self._ranks[peer.group, peer.place] = peer
            self._addresses[peer.group, peer.place] = str(record["address"])
        step = record["step"]
        self.membership.arrived(peer.group, peer.incarnation, peer.place, None if step is None else int(step))
        self._tell_agents("arrived", group=peer.group, place=peer.place, step=step)
        self._decide_soon(0.0)

    def _from_agent(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "lost":
            self._lost(int(record["group"]), int(record["incarnation"]), str(record["why"]))
        elif kind == "scale":
            self.membership.replicas = int(record["replicas"])
            self._tell_agents("scale", replicas=self.membership.replicas)
        elif kind != "alive":
            raise ValueError(f"unknown kind {kind!r}")

    def _on_stuck(self, peer: _Peer, epoch: int, why: str) -> None:
        """A sum failed. Mostly a loss explains it, which is heard of within moments; else the same groups try again."""
        if epoch == self.membership.epoch:
            self.membership.stuck(epoch)
            self._decide_soon(DEBOUNCE_S)
            self._tell_agents("sum_failed", group=peer.group, place=peer.place, epoch=epoch, why=why)
            if self._renew is None or self._renew[1] != epoch:
                self._renew = time.monotonic() + RENEW_S, epoch

    def _lost(self, group: int, incarnation: int, why: str) -> None:
        known = self.membership.groups.get(group)
        if self.finished or known is None or known.incarnation != incarnation:
            return
        self._tell_agents("group_lost", group=group, state=known.state, step=self.membership.step, why=why)
        self.membership.lost(group, incarnation)
        for place in range(self.membership.block):
            peer = self._ranks.pop((group, place), None)
            if peer is not None:
                self._send(peer, {"kind": "fenced", "why": f"group {group} is lost: {why}"})
        self._decide_soon(DEBOUNCE_S)

    def _check_leases(self, now: float) -> None:
        silent = [p for p in self._peers if p.role == "agent" and now - p.heard > self._lease_s]
        for peer in silent:
            self._part_from(peer)
            for other in [p for p in self._peers if p.role == "rank" and p.host == peer.host]:
                self._lost(other.group, other.incarnation, f"host {peer.host} is silent for {self._lease_s:g} s")

    # ---- decisions

    def _decide_soon(self, delay_s: float) -> None:
        at = time.monotonic() + delay_s
        self._decide_at = at if self._decide_at is None else min(self._decide_at, at)

    def _decide(self, *, force: bool = False) -> None:
        m = self.membership
        self._decide_at = None
        epoch, step = m.epoch, m.step
        for message in m.decide(force=force):
            self.finished = self.finished or bool(message.record.get("finished"))
            peer = self._ranks.get((message.group, message.place))
            if peer is not None:
                self._send(peer, self._with_addresses(message.record, message.place))
        self._force_at = (self._force_at or time.monotonic() + HOLD_S) if m.waiting else None
        if m.step != step:
            self._tell_agents("commit", step=m.step, epoch=epoch)
        if m.epoch != epoch:
            self._tell_agents("epoch", epoch=m.epoch, step=m.step, active=m.active, joining=m.joining, term=m.term)

    def _with_addresses(self, record: dict[str, Any], place: int) -> dict[str, Any]:
        """To each join the address at which the joiner's rank of the same place takes its snapshot."""
        if record["kind"] == "commit" and record["next"] is not None:
            return {**record, "next": self._with_addresses(record["next"], place)}
        if record["kind"] != "epoch":
            return record
        joins = {n: {**j, "address": self._addresses.get((int(n), place), "")} for n, j in record["joins"].items()}
        return {**record, "joins": joins}

    def _tell_agents(self, event: str, **fields: Any) -> None:
        for peer in [p for p in self._peers if p.role == "agent"]:
            self._send(peer, {"kind": "event", "event": event, "fields": {"t": time.time(), **fields}})


def membership_of(job: Job, *, term: int = 1) -> Membership:
    """The membership that the job asks for."""
    layout = job.layout
    return Membership(
        replicas=job.replicas,
        block=layout.world_size // job.replicas,
        steps=job.train.steps,
        minimum=job.keep.min_replicas or 1,
        units_of=lambda step: len(units_of_step(job, step)),
        term=term,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bessemer.keep.coordinator", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--address", required=True, help="unix:PATH or tcp:HOST:PORT")
    parser.add_argument("--job", type=Path, required=True, help="the run's job.toml")
    parser.add_argument("--lease", type=float, default=1.5, help="seconds that an agent may be silent")
    given = parser.parse_args(arguments)
    secret = os.environ.get(SECRET, "")
    if not secret:
        parser.error(f"{SECRET} is not set: without a secret anybody could join")
    server = listen_at(given.address)
    Coordinator(server, membership_of(load_job(given.job)), secret=secret, lease_s=given.lease).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
