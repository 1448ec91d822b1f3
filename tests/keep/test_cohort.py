"""A rank's connection with a coordinator that says what can't be understood."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bessemer.core.errors import PeerLost
from bessemer.keep.cohort import Cohort, Seat
from bessemer.keep.links import listen_at
from bessemer.keep.wire import Frames, pack

PATIENCE_S = 60.0
EPOCH: dict[str, Any] = {"kind": "epoch", "term": 1, "epoch": 1, "step": 0, "active": [0], "joining": [], "joins": {},
                         "parked": False}  # fmt: skip


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield f"unix:{Path(path)}/c"


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xffno frame",
        b"\x00\x00\x00\x07no JSON",
        pack({"kind": "commit", "step": 1, "next": None}),
        pack({"kind": "commit", "term": "first", "step": 1, "next": None}),
        pack({"kind": "commit", "term": 1, "next": None}),
        pack(EPOCH),
        pack({**EPOCH, "shares": [1, 2]}),
    ],
)
def test_nonsense_ends_the_rank_and_does_not_have_it_wait_for_ever(address: str, said: bytes) -> None:
    server = listen_at(address)
    server.setblocking(True)

    def serve() -> None:
        link, _ = server.accept()
        with link:
            link.sendall(pack({"kind": "challenge", "nonce": "n", "term": 1, "epoch": 0}))
            frames = Frames()
            while not frames.feed(link.recv(4096)):
                pass
            link.sendall(said)
            link.recv(1)  # until the rank ends

    thread = threading.Thread(target=serve)
    thread.start()
    cohort = Cohort(address, "secret", Seat(0, 0, 0, "here"))
    cohort.hello(0, "")
    try:
        with pytest.raises(PeerLost, match="can't be understood: ") as raised:
            cohort.check(within_s=PATIENCE_S)
        assert raised.value.code == "coordinator-garbled"
        with pytest.raises(PeerLost):
            cohort.await_epoch()
    finally:
        cohort.close()
        thread.join(PATIENCE_S)
        server.close()
