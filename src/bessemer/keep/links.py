"""Connections with a coordinator: addresses, and the proof that both sides know the run's secret.

Connections speak the frames of `wire.py`. The coordinator sends challenge{nonce, term, epoch}; the other side answers
with hello{proof, role, ...}. The secret comes from the environment (`BESSEMER_SECRET`) and never travels.

Every message between ranks and coordinator carries the term.

    rank  -> hello{proof, role: "rank", group, incarnation, place, host, step, address, state, epoch, share, ...}
             vote{epoch, step, digest}   synced{}   stuck{epoch, why}   leave{}   ping{}
             done{}     this rank has done what there was to do after the last step
    rank  <- epoch, commit, fenced, released, failed     as `membership.py` has them      pong{}
             conclude{}   over{}                          `conclusion.py` says when
    agent -> hello{proof, role: "agent", host}   lost{group, incarnation, why}   alive{}   scale{replicas}
    agent <- event{event, fields}     what happened, for the run's records
    standby -> hello{proof, role: "standby"}   alive{}
    standby <- decision{decision}   alive{}   over{}     `takeover.py` says what follows
    meet  -> hello{proof, role: "meet", meeting}         `meetings.py` says what follows
"""

from __future__ import annotations

import hmac
import socket
from pathlib import Path
from typing import Any

from bessemer.keep.wire import Frames

__all__ = ["SECRET", "await_challenge", "connect", "listen_at", "proof"]

SECRET = "BESSEMER_SECRET"


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
        try:
            link.connect(rest)
        except OSError:
            link.close()
            raise
    else:
        host, _, port = rest.rpartition(":")
        link = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def await_challenge(link: socket.socket, frames: Frames) -> dict[str, Any]:
    """The first record of a coordinator. Raises OSError when none comes within the socket's timeout."""
    while True:
        data = link.recv(4096)
        if not data:
            raise ConnectionError("it closed the connection")
        for record in frames.feed(data):
            return record
