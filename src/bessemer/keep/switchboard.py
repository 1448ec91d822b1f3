"""The connections of a coordinator: accepting, reading whole records, and sending without waiting."""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bessemer.keep.wire import Frames, WireError, pack

__all__ = ["Peer", "Switchboard"]


@dataclass(eq=False)
class Peer:
    """The other side of a connection; what follows `heard` (by the monotonic clock) is known after its hello."""

    link: socket.socket
    nonce: str
    frames: Frames = field(default_factory=Frames)
    out: deque[bytes] = field(default_factory=deque)
    writes: bool = False  # whether it waits until the socket takes more
    heard: float = 0.0
    role: str = ""
    group: int = -1
    incarnation: int = -1
    place: int = -1
    host: str = ""


class Switchboard:
    """Abstract: `_greet`, `_take`, `_on_end` and `_on_nonsense` of a subclass say what the connections mean."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._peers: set[Peer] = set()
        self._by_role: dict[str, set[Peer]] = {}

    def let_go(self, timeout_s: float) -> None:
        """What was said last arrives: this side of each connection ends, and the other one's end is waited for. A
        socket that is closed while something in it is unread takes back what is still on its way."""
        self._selector.unregister(self._server)
        self._server.close()
        deadline = time.monotonic() + timeout_s
        self._hang_up(list(self._peers))
        while self._peers and time.monotonic() < deadline:
            for key, mask in self._selector.select(deadline - time.monotonic()):
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                    self._hang_up([key.data])
                if mask & selectors.EVENT_READ and _has_ended(key.data.link):
                    self._part_from(key.data)

    @staticmethod
    def _hang_up(peers: Iterable[Peer]) -> None:
        """On those to which all is said."""
        for peer in peers:
            if not peer.out:
                with suppress(OSError):
                    peer.link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for peer in list(self._peers):
            self._part_from(peer)
        self._selector.close()
        self._server.close()

    def _greet(self, peer: Peer) -> None:
        raise NotImplementedError

    def _take(self, peer: Peer, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def _on_end(self, peer: Peer) -> None:
        raise NotImplementedError

    def _on_nonsense(self, error: Exception) -> None:
        raise NotImplementedError

    def _enrol(self, peer: Peer, role: str) -> None:
        """Its hello says what it is. Roles are looked up, not searched for: ranks may be ten thousand."""
        peer.role = role
        self._by_role.setdefault(role, set()).add(peer)

    def _with_role(self, role: str) -> list[Peer]:
        return list(self._by_role.get(role, ()))

    def _listen(self, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                self._accept()
            elif key.data in self._peers:
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            link, _ = self._server.accept()
        except OSError:  # it is gone already, or there is no room for it now
            return
        link.setblocking(False)
        if link.family != socket.AF_UNIX:  # else a record may wait until the one before it is acknowledged
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(link, secrets.token_hex(16), heard=time.monotonic())
        self._peers.add(peer)
        self._selector.register(link, selectors.EVENT_READ, peer)
        self._greet(peer)

    def _read(self, peer: Peer) -> None:
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
            self._on_nonsense(error)
            self._on_end(peer)

    def _send(self, peer: Peer, record: Mapping[str, Any]) -> None:
        self._post(peer, pack(record))

    def _post(self, peer: Peer, frame: bytes) -> None:
        if not peer.out:
            try:
                sent = peer.link.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # its end is seen when it is read from
            if sent == len(frame):
                return
            frame = frame[sent:]
        peer.out.append(frame)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        waited = peer.writes
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
        peer.writes = bool(peer.out)
        if peer in self._peers and peer.writes != waited:
            self._selector.modify(peer.link, selectors.EVENT_READ | selectors.EVENT_WRITE * peer.writes, peer)

    def _part_from(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._by_role.get(peer.role, set()).discard(peer)
            self._selector.unregister(peer.link)
            peer.link.close()


def _has_ended(link: socket.socket) -> bool:
    """Takes what has come, of which nothing is wanted any more."""
    try:
        return not link.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True
