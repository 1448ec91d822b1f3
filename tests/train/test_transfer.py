"""Snapshots on their way to a joiner, over connections that break off: they are sent again, and nothing else lands."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from train.faults import Fault
from train.fleet import Fleet
from train.toy import toy_job

from bessemer.keep.cohort import Join
from bessemer.keep.links import connect, listen_at
from bessemer.train import transfer
from bessemer.train.transfer import Landing, Snapshot, deliver

SECRET, PATIENCE_S = "a secret of the tests", 60.0
ELEMENTS = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)


class BadLine:
    """Before a landing: of each of the first connections a million bytes pass, and then it breaks off (or a bit flips
    there, or nothing comes any more); all later ones are sound."""

    def __init__(self, path: Path, to: str, faults: list[str]) -> None:
        self.address, self._to, self._faults = f"unix:{path}", to, faults
        self._server = listen_at(self.address)
        self._server.setblocking(True)
        self._links: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._server.accept()
                other = connect(self._to, PATIENCE_S)
                self._links += [link, other]
                fault = self._faults.pop(0) if self._faults else ""
                threading.Thread(target=self._pass, args=(link, other, fault), daemon=True).start()
                threading.Thread(target=self._pass, args=(other, link, ""), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, fault: str) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                passed += len(data)
                if passed > 1_000_000 and fault:
                    if fault == "silent":
                        return
                    if fault == "breaks":
                        break
                    data[0] ^= 1
                    fault = ""
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for link in [self._server, *self._links]:
            link.close()


@pytest.mark.parametrize("faults", [[], ["breaks"], ["flips"], ["breaks", "flips", "breaks"], ["silent"]], ids=str)
def test_a_snapshot_is_sent_until_it_has_arrived_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    if "silent" in faults:
        monkeypatch.setattr(transfer, "_TIMEOUT_S", 2.0)
    landing = Landing(f"unix:{folder}/l", SECRET)
    line = BadLine(folder / "p", f"unix:{folder}/l", list(faults))
    tensors = [("param/x", torch.arange(ELEMENTS, dtype=torch.float32)), ("buffer/y", torch.ones(3))]
    told: list[OSError] = []
    try:
        join = Join(donor=2, step=7, address=line.address)
        deliver(Snapshot(2, 7, tensors), join, SECRET, wanted=lambda: True, tell=told.append)
        assert len(told) >= len(faults)
        found = landing.arrived
        assert found is not None and (found.donor, found.step) == (2, 7)
        assert all(torch.equal(mine, sent) for (_, mine), (_, sent) in zip(found.tensors, tensors, strict=True))
    finally:
        line.close()
        landing.close()


def test_who_waits_no_longer_is_sent_nothing(folder: Path) -> None:
    told: list[OSError] = []
    nobody = Join(donor=0, step=1, address=f"unix:{folder}/nobody")
    answers = [True, True, False]
    deliver(Snapshot(0, 1, []), nobody, SECRET, wanted=lambda: answers.pop(0), tell=told.append)
    assert len(told) == 3 and not answers


def test_a_landing_outlives_a_lack_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landing = Landing(f"unix:{folder}/l", SECRET)
    real, refused = landing._server.accept, threading.Event()

    class Lacking:
        """Once there is no file left for a connection."""

        def fileno(self) -> int:
            return 1

        def accept(self) -> tuple[socket.socket, object]:
            if not refused.is_set():
                refused.set()
                raise OSError(24, "Too many open files")
            return real()

    server = landing._server
    monkeypatch.setattr(landing, "_server", Lacking())
    try:
        connect(f"unix:{folder}/l", PATIENCE_S).close()  # lets the thread come to the next one
        join = Join(donor=0, step=1, address=f"unix:{folder}/l")
        deliver(Snapshot(0, 1, []), join, SECRET, wanted=lambda: True, tell=lambda error: None)
        assert refused.is_set() and landing.arrived is not None
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [{"dp": 3}, {"dp": 3, "tp": 2}], ids=str)
def test_a_transfer_that_breaks_off_is_repeated(folder: Path, layout: dict[str, int]) -> None:
    """Group 5 is to have its state from group 2, whose connection breaks off with a part of it sent; both live."""
    job = toy_job(train={"steps": 40, "global_batch": 12, "micro_batch": 2}, layout=layout)
    with Fleet(folder, job, pause_s=0.05) as fleet:
        for group, fault in enumerate((None, Fault("forward", 4), Fault("reset", 0, place=fleet.block - 1))):
            fleet.start(group, fault=fault)
        fleet.start(5, joins=True)
        ended = fleet.wait()
    finished = {seat: end for seat, end in ended.items() if end["ended"] == "finished"}
    assert {seat[0] for seat in finished} == {0, 2, 5}, {seat: end["ended"] for seat, end in ended.items()}
    for place in range(fleet.block):
        assert len({end["digest"] for seat, end in finished.items() if seat[2] == place}) == 1
    assert [e["to"] for e in ended[2, 0, 0]["events"] if e["event"] == "donated"] == [5], "the same copy, sent again"
    assert "joined" in [e["event"] for e in ended[5, 0, 0]["events"]]
