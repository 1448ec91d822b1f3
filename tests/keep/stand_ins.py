"""Stand-ins for what is around a coordinator: a host's agent, and a link that can be cut."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

from bessemer.keep.links import await_challenge, connect, listen_at, proof
from bessemer.keep.wire import Frames, pack

SECRET = "a secret of the tests"
PATIENCE_S = 60.0
OPEN: list[Any] = []
"""What a test leaves behind: it has `close`."""


class Proxy:
    """Between a host and a coordinator; while `cut`, nothing passes in either direction, and nobody is told."""

    def __init__(self, path: str, to: str) -> None:
        self._server, self._to = listen_at(path), to
        self._server.setblocking(True)
        self._links: list[socket.socket] = []
        self.cut = False
        OPEN.append(self)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            self._links.append(link)
            threading.Thread(target=self._join, args=(link,), daemon=True).start()

    def _join(self, link: socket.socket) -> None:
        while self.cut:
            time.sleep(0.01)
        with suppress(OSError):
            other = connect(self._to, 5.0)
            other.settimeout(None)
            self._links.append(other)
            threading.Thread(target=self._pass, args=(link, other), daemon=True).start()
            self._pass(other, link)

    def close(self) -> None:
        self.cut = False
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for link in [self._server, *self._links]:
            link.close()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.cut:
                    time.sleep(0.01)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Host:
    """A stand-in of an agent: says that it lives, for as long as it may."""

    def __init__(self, address: str, name: str) -> None:
        self._link, self._name = connect(address, 5.0), name
        self.done = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        OPEN.append(self)

    def close(self) -> None:
        self.done = True
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        with suppress(OSError), self._link as link:
            nonce = await_challenge(link, Frames())["nonce"]
            link.sendall(pack({"kind": "hello", "role": "agent", "host": self._name, "proof": proof(SECRET, nonce)}))
            while not self.done:
                link.sendall(pack({"kind": "alive"}))
                time.sleep(0.1)
