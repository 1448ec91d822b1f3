"""The coordinator's work for one step of a run of many groups, with simulated ranks: one place a group, a unit each.

What it decides (votes noted, the commit and its message) is measured by itself, and then in a coordinator with one
connection for each group, which a process beside it holds: there each vote is received and parsed, and each commit
sent. Seconds are CPU seconds of the coordinator's process, which the machine's load can't stretch.
"""

from __future__ import annotations

import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from _keep_runs import tell
from table import Row

from bessemer.keep.coordinator import Coordinator
from bessemer.keep.links import await_challenge, connect, listen_at, proof
from bessemer.keep.membership import Membership
from bessemer.keep.wire import Frames, pack

SECRET = "bench"
BAR_MS = 20.0
DIGEST = "0123456789abcdef"
SPARE_FILES = 64


def rows(sizes: Sequence[int], steps: int, connected: Sequence[int]) -> list[Row]:
    """For each number of groups the fastest of `steps` steps; for those `connected` also with connections."""
    found = []
    for groups in sizes:
        decided = _decided(groups, steps)
        bar = BAR_MS if groups == max(sizes) else None
        found.append(Row(f"coordinator, {groups:,} groups: decide a step", 1e3 * min(decided), "CPU ms", "lower", bar,
                         f"noting votes, committing, one message; median {1e3 * _median(decided):.2f}"))  # fmt: skip
    found.append(_epoch_row(max(sizes)))
    for groups in connected:
        tell(f"{groups:,} connections")
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if groups + SPARE_FILES > room:
            tell(f"left out: this process may open no more than {room} files")
            continue
        whole = _connected(groups, steps)
        note = f"receiving, parsing, deciding, sending over Unix sockets; median {1e3 * _median(whole):.1f}"
        found.append(Row(f"coordinator, {groups:,} groups: a step with its connections", 1e3 * min(whole), "CPU ms",
                         "lower", None, note))  # fmt: skip
    return found


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def _membership(groups: int) -> Membership:
    return Membership(replicas=groups, block=1, steps=10**9, units_of=lambda step: groups)


def _decided(groups: int, steps: int) -> list[float]:
    m = _membership(groups)
    for group in range(groups):
        m.arrived(group, 0, 0, 0)
    m.decide()
    found = []
    for _ in range(steps):
        start = time.process_time()
        for group in range(groups):
            m.voted(group, 0, m.epoch, m.step, DIGEST)
        frames = [pack(message.record) for message in m.decide()]
        found.append(time.process_time() - start)
        assert len(frames) == 1 and m.step == len(found)
    return found


def _epoch_row(groups: int) -> Row:
    """Losing a group: a new epoch, and its message."""
    m = _membership(groups)
    for group in range(groups):
        m.arrived(group, 0, 0, 0)
    m.decide()
    found, size = [], 0
    for group in range(1, 6):
        start = time.process_time()
        m.lost(group, 0)
        frames = [pack(message.record) for message in m.decide()]
        found.append(time.process_time() - start)
        size = sum(map(len, frames))
        assert m.epoch == group + 1
    note = f"deciding and packing; the message has {size / 1e3:.0f} kB"
    return Row(f"coordinator, {groups:,} groups: a group is lost", 1e3 * min(found), "CPU ms", "lower", None, note)


def _connected(groups: int, steps: int) -> list[float]:
    _let_open(groups)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        address = f"unix:{folder}/c"
        coordinator = Coordinator(listen_at(address), _membership(groups), secret=SECRET, lease_s=600.0)
        command = [sys.executable, __file__, address, str(groups)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as ranks:
            try:
                return _steps(coordinator, steps)
            finally:
                assert ranks.stdin is not None
                ranks.stdin.close()
                coordinator.close()


def _steps(coordinator: Coordinator, steps: int) -> list[float]:
    m, found = coordinator.membership, list[float]()
    before, at = 0.0, 0
    deadline = time.monotonic() + 300.0
    while len(found) < steps + 1:
        assert time.monotonic() < deadline, f"only step {m.step} within 300 s"
        coordinator.turn(0.1)
        m = coordinator.membership
        if m.step != at:
            now = time.process_time()
            found.append(now - before)
            before, at = now, m.step
    return found[1:]


def _let_open(files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(files + SPARE_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def simulate(address: str, groups: int) -> None:
    """The ranks: each votes at once for every step that it is told of. Ends with standard input, or the coordinator."""
    _let_open(groups)
    selector = selectors.DefaultSelector()
    links = []
    for group in range(groups):
        link, frames = connect(address, 60.0), Frames()
        challenge = await_challenge(link, frames)
        hello = {"kind": "hello", "proof": proof(SECRET, challenge["nonce"]), "role": "rank", "group": group}
        hello |= {"incarnation": 0, "place": 0, "host": "here", "step": 0, "address": "nowhere", "term": 1}
        link.sendall(pack({**hello, "epoch": 0, "state": "spare", "share": [], "leaving": False}))
        links.append(link)
        selector.register(link, selectors.EVENT_READ)
    for link in links:  # the first epoch is too long to be read at once
        _epoch_of(link)
    selector.register(sys.stdin, selectors.EVENT_READ)
    step, told = 0, set[socket.socket]()
    while True:
        vote = pack({"kind": "vote", "epoch": 1, "step": step, "digest": DIGEST, "term": 1})
        for link in links:
            try:
                link.sendall(vote)
            except OSError:
                return  # the coordinator has what it wanted
        told.clear()
        while len(told) < groups:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.recv(1 << 16):
                    return
                told.add(key.fileobj)
        step += 1


def _epoch_of(link: socket.socket) -> None:
    frames = Frames()
    while True:
        data = link.recv(1 << 20)
        if not data:
            raise ConnectionError("the coordinator is gone")
        if frames.feed(data):
            return


if __name__ == "__main__":
    simulate(sys.argv[1], int(sys.argv[2]))
