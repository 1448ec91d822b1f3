"""The agent's ear: one thread that waits for records of the host's processes, for their ends, and for signals."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from bessemer.keep.wire import Frames, WireError, listen, pack

__all__ = ["Heard", "Hub", "Interrupted", "Link", "Wishes", "signals_into", "signals_raise"]

SEND_S = 5.0
"""How long a message to a process may take. It is a few bytes, so a full socket means that nobody reads it."""

_PEER = struct.Struct("3i")  # pid, uid, gid: unix(7)
_SAME_SIGNAL_S = 0.5
"""Two signals closer than this are one wish: `timeout` and shells send to a process and to its group."""


@dataclass(eq=False)
class Link:
    """A connection. `rank` is known after its hello."""

    socket: socket.socket
    frames: Frames = field(default_factory=Frames)
    rank: int | None = None

    def send(self, record: Mapping[str, Any]) -> None:
        """Nothing happens when the other side is gone: its end is seen elsewhere, perhaps in the same `poll`."""
        if self.socket.fileno() < 0:
            return
        self.socket.settimeout(SEND_S)
        with contextlib.suppress(OSError):
            self.socket.sendall(pack(record))
        self.socket.setblocking(False)

    def peer(self) -> int:
        """The process at the other end of a Unix socket. OSError where it's closed."""
        pid, _, _ = _PEER.unpack(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return int(pid)


@dataclass(frozen=True)
class Heard:
    """One thing that happened: a record of a link, the end of a link (`record` is None), or a watched process' end."""

    link: Link | None = None
    record: dict[str, Any] | None = None
    watched: object = None
    problem: str = ""


class Hub:
    """Listens at `path`. `poll` returns what happened, in the order of arrival on each link."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.links: list[Link] = []
        self._selector = selectors.DefaultSelector()
        self._server = listen(path)
        self._selector.register(self._server, selectors.EVENT_READ, "server")
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")

    def watch(self, pidfd: int, what: object) -> None:
        """`what` comes back from `poll` once, when the process behind the descriptor ends."""
        self._selector.register(pidfd, selectors.EVENT_READ, ("pid", pidfd, what))

    def follow(self, connection: socket.socket) -> Link:
        """Hear what comes over a connection that was made from here."""
        connection.setblocking(False)
        link = Link(connection)
        self.links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def drop(self, link: Link) -> None:
        """Close a connection; nothing more is heard of it."""
        self._forget(link)

    def wake(self) -> None:
        """Ends a running `poll`; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"!")

    def poll(self, timeout_s: float) -> list[Heard]:
        """Waits for something to happen. The end of a process comes after everything that it said."""
        ended: list[object] = []
        heard: list[Heard] = []
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data == "server":
                self._accept()
            elif key.data == "wake":
                self._wake_read.recv(4096)
            elif isinstance(key.data, Link):
                heard += self._read(key.data)
            else:
                _, pidfd, what = key.data
                self._selector.unregister(pidfd)
                ended.append(what)
        if ended:  # what an ended process sent before, even on a connection that nobody has accepted yet
            self._accept()
            for link in list(self.links):
                heard += self._read(link)
        return heard + [Heard(watched=what) for what in ended]

    def close(self) -> None:
        for link in list(self.links):
            self._forget(link)
        self._selector.close()
        for end in (self._server, self._wake_read, self._wake_write):
            end.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                return
            self.follow(connection)

    def _read(self, link: Link) -> list[Heard]:
        heard: list[Heard] = []
        while True:
            try:
                data = link.socket.recv(1 << 16)
            except BlockingIOError:
                return heard
            except OSError:
                data = b""
            if not data:
                self._forget(link)
                return [*heard, Heard(link)]
            try:
                heard += [Heard(link, record) for record in link.frames.feed(data)]
            except WireError as error:
                self._forget(link)
                return [*heard, Heard(link, problem=error.message)]

    def _forget(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()


@dataclass
class Wishes:
    """Signals that arrived: `names` in order, those that mean the same wish taken once."""

    names: list[str] = field(default_factory=list)
    last: float = -1e9

    def add(self, number: int) -> bool:
        """Whether the signal is a wish of its own."""
        now = time.monotonic()
        if now - self.last < _SAME_SIGNAL_S:
            return False
        self.names.append(signal.Signals(number).name)
        self.last = now
        return True


class Interrupted(BaseException):
    """A wish to stop, raised in the midst of what can be broken off. No handler of errors takes it for one."""


@contextlib.contextmanager
def signals_raise() -> Iterator[Wishes]:
    """SIGTERM and SIGINT are noted and raise `Interrupted`, for work that may be broken off anywhere."""
    wishes = Wishes()

    def note(number: int, frame: FrameType | None) -> None:
        if wishes.add(number):
            raise Interrupted

    with contextlib.suppress(Interrupted), _handled(note):  # one that comes just behind the work is a wish no less
        yield wishes


@contextlib.contextmanager
def signals_into(hub: Hub) -> Iterator[Wishes]:
    """SIGTERM and SIGINT are noted and wake the hub, instead of ending the process."""
    wishes = Wishes()

    def note(number: int, frame: FrameType | None) -> None:
        wishes.add(number)
        hub.wake()

    with _handled(note):
        yield wishes


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Outside the main thread, where Python can't take signals, nothing is handled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT)}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # the terminal went away; nohup has it ignored already
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
