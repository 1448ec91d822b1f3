"""Copies of one host's memory in the vault of another: two vaults here, as two hosts."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_tools import META, RunningVault, blank, make_state, running_vault, same, until, whole

from bessemer.core.errors import CheckpointError
from bessemer.keep import peers
from bessemer.keep.links import SECRET
from bessemer.keep.memory_copies import MemoryCopies, fetch
from bessemer.keep.peers import About, TcpTransport
from bessemer.keep.vault_client import VaultClient

HERE = "tcp:127.0.0.1:0"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp:127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of this run")


@contextlib.contextmanager
def host(folder: Path, name: str, address: str, *peers_of_it: str) -> Iterator[RunningVault]:
    flags = [flag for peer in peers_of_it for flag in ("--peer", peer)]
    with running_vault(folder / name, "--listen", address, *flags) as vault:
        until(vault.socket.exists)
        yield vault


def asking() -> TcpTransport:
    return TcpTransport(HERE, "of this run")


def steps_at(address: str) -> list[int]:
    transport = asking()
    try:
        return sorted(about.step for about in transport.found(address))
    finally:
        transport.close()


def read(vault: RunningVault, step: int) -> None:
    state = make_state(step)
    with MemoryCopies(vault.socket) as copies:
        assert step in copies.steps(whole(state))
        slices = blank(whole(state))
        copies.read_into(step, slices)
        assert all(same(s.tensor, state[s.name]) for s in slices)
        assert copies.meta(step)["step"] == step


def hold(vault: RunningVault, *steps: int) -> None:
    """Each once the one before has its checksums, as in a run, whose steps take longer."""
    with VaultClient(vault.socket) as client:
        for step in steps:
            client.hold(step, whole(make_state(step)), META)
            with MemoryCopies(vault.socket) as copies:
                assert step in copies.steps(whole(make_state(step)))


def test_a_new_host_gets_what_the_lost_one_had_from_its_peer(tmp_path):
    a, b = free_address(), free_address()
    with host(tmp_path, "b", b) as other:
        with host(tmp_path, "a", a, b) as lost:
            hold(lost, 1, 2, 3)
            until(lambda: 3 in steps_at(b))
            assert lost.process.poll() is None
        with host(tmp_path, "c", free_address(), b) as new:
            with MemoryCopies(new.socket) as copies:
                assert copies.steps(whole(make_state(3))) == []
            assert fetch(new.socket) == ([0], [])
            read(new, 3)
            with VaultClient(new.socket) as client:  # and it goes on there
                client.reserve(whole(make_state(3)), {**META, "step": 3})
                client.hold(4, whole(make_state(4)), META)
            read(new, 3)
            read(new, 4)
            until(lambda: 4 in steps_at(b))
        assert other.process.poll() is None


def test_a_peer_that_is_gone_costs_nothing_but_its_copies(tmp_path):
    nobody = free_address()
    with host(tmp_path, "a", free_address(), nobody) as vault:
        hold(vault, 1, 2)
        ranks, refused = fetch(vault.socket)
        assert ranks == [] and len(refused) == 1 and nobody in refused[0]
        read(vault, 2)


class Damaged:
    """A peer whose copy has a flipped bit that its checksums don't know of."""

    def __init__(self, about: About, image: bytes) -> None:
        self.about, self.image = about, image

    def found(self) -> list[About]:
        return [self.about]

    def source(self, about: About) -> memoryview:
        return memoryview(self.image)

    def room(self, about: About) -> memoryview:
        raise CheckpointError("full", code="no-memory")

    def arrived(self, about: About) -> None:
        raise AssertionError("nothing was let in")


def taken(vault: RunningVault, address: str, step: int) -> tuple[About, bytearray]:
    """What a vault has of a step, over the wire."""
    transport = asking()
    try:
        about = next(a for a in transport.found(address) if a.step == step)
        image = bytearray(about.geometry.generation_bytes - 4096)
        transport.get(address, about, memoryview(image))
    finally:
        transport.close()
    return about, image


@pytest.mark.parametrize("where", ["data", "layout", "meta"])
def test_a_corrupt_peer_copy_is_refused_and_the_next_peer_is_asked(tmp_path, where):
    a = free_address()
    with host(tmp_path, "a", a) as good:
        hold(good, 5)
        about, image = taken(good, a, 5)
        at = {"data": about.geometry.data_at - 4096, "layout": 0, "meta": about.geometry.meta_at - 4096}[where]
        image[at + 3] ^= 4
        bad = asking()
        bad.serve(Damaged(about, bytes(image)))
        with host(tmp_path, "c", free_address(), bad.address, a) as new:
            ranks, refused = fetch(new.socket)
            assert ranks == [0]
            assert len(refused) == 1 and bad.address in refused[0] and "damaged" in refused[0]
            read(new, 5)
        with host(tmp_path, "d", free_address(), bad.address) as new:
            assert fetch(new.socket)[0] == []
            with MemoryCopies(new.socket) as copies:
                assert copies.steps(whole(make_state(5))) == []
        bad.close()


def test_who_does_not_know_the_secret_gets_and_leaves_nothing(tmp_path):
    a = free_address()
    with host(tmp_path, "a", a) as vault:
        hold(vault, 1)
        about, image = taken(vault, a, 1)
        stranger = TcpTransport(HERE, "of another run")
        for call in (
            lambda: stranger.found(a),
            lambda: stranger.get(a, about, memoryview(bytearray(len(image)))),
            lambda: stranger.put(a, about, memoryview(image)),
        ):
            with pytest.raises(OSError):
                call()
        stranger.close()


def test_a_transfer_that_breaks_off_leaves_the_copy_before_it(tmp_path):
    a, b = free_address(), free_address()
    with host(tmp_path, "b", b), host(tmp_path, "a", a) as vault:
        hold(vault, 1, 2)
        sent = {step: taken(vault, a, step) for step in (1, 2)}
        transport = asking()
        transport.put(b, sent[1][0], memoryview(sent[1][1]))
        with pytest.raises(OSError), transport._open(b, {"op": "put", "about": sent[2][0].as_json()}) as link:
            peers._answer(link)
            link.sendall(sent[2][1][:1000])
            raise ConnectionError("the host is gone")
        assert steps_at(b) == [1]
        with pytest.raises(CheckpointError, match="damaged"):
            transport.put(b, sent[2][0], memoryview(bytes(len(sent[2][1]))))
        assert steps_at(b) == [1]
        transport.put(b, sent[2][0], memoryview(sent[2][1]))
        assert steps_at(b) == [1, 2]
        transport.put(b, sent[1][0], memoryview(sent[1][1]))
        assert steps_at(b) == [1], "the run went back, so the later step is of its lost future"
        transport.close()


def test_the_rate_of_sending_is_bounded(tmp_path):
    a = free_address()
    image = memoryview(bytearray(3 * (1 << 20)))
    with host(tmp_path, "a", a) as vault, VaultClient(vault.socket) as client:
        client.hold(1, whole({"x": torch.zeros(700_000)}), META)
        with MemoryCopies(vault.socket):
            about, kept = taken(vault, a, 1)
        image = memoryview(kept)
        slow = TcpTransport(HERE, "of this run", rate=len(image) / 0.5)
        start = time.monotonic()
        slow.put(a, about, image)
        assert time.monotonic() - start > 0.5
        slow.close()
