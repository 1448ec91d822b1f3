"""A run whose hosts can't reach each other: the smaller side parks, changes nothing, and is refused afterwards.

Once with two real networks, joined by a pair of interfaces that is taken down (needs root and `ip`); and, everywhere,
with a host whose ranks and agent reach the coordinator through a link that passes nothing for a while."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from keep.stand_ins import OPEN, Host, Proxy
from train.fleet import Fleet, enter
from train.test_elastic import _digests, _job, _undisturbed

from bessemer.core.job import Job
from bessemer.keep.links import listen_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOME, AWAY = "10.77.0.1", "10.77.0.2"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bsm", dir="/tmp") as path:  # a socket's path must be short
        yield Path(path)
        while OPEN:
            OPEN.pop().close()


class Split(Fleet):
    """Groups 0 and 1 and the coordinator are on host a, group 2 is on host b, each with an agent."""

    def __enter__(self) -> Split:
        super().__enter__()
        Host(self.addresses_for(0), "a")
        self.host_b()
        return self

    def host_of(self, group: int) -> str:
        return "ab"[group == 2]

    def host_b(self) -> None:
        Host(self.addresses_for(2), "b")

    def cut(self) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        raise NotImplementedError


class SplitByProxy(Split):
    """The links of host b with the coordinator are cut; sums still reach it, which must not help."""

    def _listen(self) -> socket.socket:
        self.proxy = Proxy(f"unix:{self.folder}/b", self.address)
        return super()._listen()

    def addresses_for(self, group: int) -> str:
        return f"unix:{self.folder}/b" if group == 2 else self.address

    def cut(self) -> None:
        self.proxy.cut = True

    def heal(self) -> None:
        self.proxy.cut = False


class SplitByNetwork(Split):
    """Each host is a network namespace."""

    def __init__(self, folder: Path, job: Job, **how: Any) -> None:
        super().__init__(folder, job, **how)
        self._names = f"bsm{os.getpid()}a", f"bsm{os.getpid()}b"

    def _listen(self) -> socket.socket:
        server = _within(self._names[0], lambda: listen_at(f"tcp:{HOME}:0"))
        self.address = f"tcp:{HOME}:{server.getsockname()[1]}"
        return server

    def __enter__(self) -> Split:
        _within(self._names[0], lambda: super(SplitByNetwork, self).__enter__())
        return self

    def network_of(self, group: int) -> tuple[str, str]:
        return self._names[group == 2], (HOME, AWAY)[group == 2]

    def host_b(self) -> None:
        _within(self._names[1], super().host_b)

    def cut(self) -> None:
        _ip("-n", self._names[0], "link", "set", "veth", "down")

    def heal(self) -> None:
        _ip("-n", self._names[0], "link", "set", "veth", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _within(namespace: str, call: Callable[[], Any]) -> Any:
    """What `call` returns in a thread that is in that network."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: (enter(namespace), found.append(call())))
    thread.start()
    thread.join()
    assert found, "the thread has failed"
    return found[0]


@contextmanager
def networks() -> Iterator[None]:
    """Two namespaces with an interface `veth` each, joined. Skips the test where they can't be made."""
    first, second = names = f"bsm{os.getpid()}a", f"bsm{os.getpid()}b"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`; the variant with a proxy runs everywhere")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "veth", "netns", first, "type", "veth", "peer", "name", "veth", "netns", second)
        for name, address in zip(names, (HOME, AWAY), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
            for interface in ("lo", "veth"):
                _ip("-n", name, "link", "set", interface, "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"no network namespaces here ({error.stderr.strip()}); the variant with a proxy runs everywhere")
    try:
        yield
    finally:
        _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _part_and_meet_again(fleet: Split, name: str) -> None:
    with fleet:
        for group in range(3):
            fleet.start(group)
        fleet.until(lambda m: m.step >= 3)
        fleet.cut()
        fleet.until(lambda m: m.active == [0, 1])
        at = fleet.membership.step
        fleet.until(lambda m: m.step >= at + 5)
        fleet.heal()
        ended = fleet.wait()
    assert _digests(ended, groups=2) == _undisturbed(name, 30)
    [lost] = [e for e in fleet.events if e["event"] == "group_lost"]
    assert (lost["group"], lost["why"][:6]) == (2, "host b")
    for place in range(fleet.block):
        assert ended[2, 0, place]["ended"].startswith("fenced"), ended[2, 0, place]["ended"]
    assert ended[2, 0, 0]["metrics"][-1]["step"] <= lost["step"], "it went on alone"


@pytest.mark.parametrize("name", ["one rank", "tp"])
def test_a_host_behind_a_cut_link_parks_and_is_refused(folder: Path, name: str) -> None:
    _part_and_meet_again(SplitByProxy(folder, _job(name, 30), pause_s=0.05), name)


@pytest.mark.parametrize("name", ["one rank", "tp"])
def test_a_host_in_a_network_that_is_cut_off_parks_and_is_refused(folder: Path, name: str) -> None:
    with networks():
        _part_and_meet_again(SplitByNetwork(folder, _job(name, 30), pause_s=0.05), name)
