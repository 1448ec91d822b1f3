"""What a coordinator says last arrives, whatever the others were saying meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from bessemer.keep.links import connect, listen_at
from bessemer.keep.switchboard import Peer, Switchboard
from bessemer.keep.wire import Frames, pack

LARGE = "x" * 300_000
"""More than the other end takes in before it reads, and less than what the kernel takes over for it."""


class Office(Switchboard):
    """Says something large and a last word to whoever comes, and leaves what they say unread."""

    def _greet(self, peer: Peer) -> None:
        self._send(peer, {"kind": "much", "text": LARGE})
        self._send(peer, {"kind": "over"})

    def _on_end(self, peer: Peer) -> None:
        self._part_from(peer)

    def come(self, count: int) -> None:
        for _ in range(count):
            self._accept()


def heard(link: socket.socket) -> list[str]:
    """The kinds of all records until the other side ends, or the connection is lost."""
    frames, kinds = Frames(), []
    while True:
        try:
            data = link.recv(1 << 16)
        except ConnectionError:
            return [*kinds, "reset"]
        if not data:
            return kinds
        kinds += [str(record["kind"]) for record in frames.feed(data)]


def parting(address: str, *, let_go_s: float) -> tuple[list[str], float]:
    """What one hears that talks before and while the coordinator goes, and how long the coordinator took to go."""
    office = Office(listen_at(address))
    port = office._server.getsockname()[1] if address.startswith("tcp") else 0
    link = connect(f"tcp:127.0.0.1:{port}" if port else address, 10.0)
    link.sendall(pack({"kind": "alive"}))
    office.come(1)
    assert not any(peer.out for peer in office._peers), "all is with the kernel"
    took: list[float] = []

    def go() -> None:
        start = time.monotonic()
        if let_go_s:
            office.let_go(let_go_s)
        office.close()
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=go)
    thread.start()
    time.sleep(0.1)
    kinds = heard(link)
    link.close()
    thread.join(60)
    return kinds, took[0]


def test_the_last_word_arrives_though_something_is_unread() -> None:
    kinds, took_s = parting("tcp:127.0.0.1:0", let_go_s=30.0)
    assert kinds == ["much", "over"]
    assert took_s < 20.0, "the other end was waited for, and no longer"


def test_without_that_it_would_not() -> None:
    kinds, _ = parting("tcp:127.0.0.1:0", let_go_s=0.0)
    assert "over" not in kinds


def test_one_that_never_reads_is_waited_for_so_long(tmp_path: Any) -> None:
    office = Office(listen_at(f"unix:{tmp_path}/c"))
    with connect(f"unix:{tmp_path}/c", 10.0):
        office.come(1)
        start = time.monotonic()
        office.let_go(0.3)
        assert 0.25 < time.monotonic() - start < 30.0
        office.close()
