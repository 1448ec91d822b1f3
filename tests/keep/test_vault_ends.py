"""Ranks, parents and strangers come and go: what was handed in is kept, and the vault leaves nothing behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_tools import META, WAIT_S, assert_holds, leftovers, make_state, rows, running_vault, until, whole

from bessemer.core.errors import CheckpointError
from bessemer.keep.checkpoint import CheckpointFolder, Slice
from bessemer.keep.vault_client import VaultClient
from bessemer.keep.wire import pack


@pytest.fixture
def vault(tmp_path):
    with running_vault(tmp_path, "--keep-last", "3") as running:
        yield running


def _pair(vault) -> tuple[VaultClient, VaultClient]:
    return VaultClient(vault.socket, rank=0, world_size=2), VaultClient(vault.socket, rank=1, world_size=2)


# ---- ranks die


RANK = """
import sys
from bessemer.keep.memory import Geometry, Memory
from bessemer.keep.wire import pack
from bessemer.keep.writer import WriteOptions
import os, signal, socket
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall(pack({"op": "hello", "protocol": 2, "rank": 1, "world_size": 2, "local_world_size": 2}))
link.sendall(pack({"op": "reserve", "step": 0, "layout_bytes": 4096, "meta_bytes": 4096, "data_bytes": 4096}))
held = []
while not held:
    _, held, _, _ = socket.recv_fds(link, 4096, 1)
Memory.attach(held[0], Geometry(4096, 4096, 4096)).begin(0, 10, b"[]")
print("copying", flush=True)
signal.pause()
"""


def test_a_rank_killed_while_it_copies_costs_that_checkpoint_only(vault):
    state = make_state(1)
    with VaultClient(vault.socket, rank=0, world_size=2) as a:
        command = [sys.executable, "-c", RANK, str(vault.socket)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
            assert rank.stdout.readline() == b"copying\n"
            a.save(10, rows(state, 0, 2), META)
            rank.kill()
            with pytest.raises(CheckpointError, match="a rank of this host went away") as raised:
                a.wait(WAIT_S)
            assert raised.value.code == "checkpoint-dropped"
        until(lambda: os.listdir(vault.root) == [])
        with VaultClient(vault.socket, rank=1, world_size=2) as b:
            a.save(20, rows(state, 0, 2), META)
            b.save(20, rows(state, 1, 2), META)
            assert [s["step"] for s in a.wait(WAIT_S)] == [20]
    assert_holds(CheckpointFolder(vault.root).newest_verified().checkpoint, state)


def test_what_was_handed_in_is_written_though_its_ranks_are_gone(vault):
    state = make_state(1)
    a, b = _pair(vault)
    a.save(10, rows(state, 0, 2), META)
    b.save(10, rows(state, 1, 2), META)
    a.close()
    b.close()
    until(lambda: CheckpointFolder(vault.root).steps() == [10])
    assert_holds(CheckpointFolder(vault.root).newest_verified().checkpoint, state)


def test_a_step_that_a_rank_left_out_is_given_up(vault):
    state = make_state(1)
    a, b = _pair(vault)
    with a, b:
        a.save(10, rows(state, 0, 2), META)
        a.save(20, rows(state, 0, 2), META)
        b.save(20, rows(state, 1, 2), META)
        assert [s["step"] for s in b.wait(WAIT_S)] == [20]
        with pytest.raises(CheckpointError, match="step 10 was not saved"):
            a.wait(WAIT_S)
        assert [s["step"] for s in a.poll()] == [20]
    assert os.listdir(vault.root) == ["step-20"]


def test_what_one_rank_of_an_earlier_group_handed_in_is_no_part_of_a_later_ones_save(vault):
    """Else the checkpoint would be of both, and the rank that hands in again would wait for the others for ever."""
    earlier, state = make_state(1), make_state(2)
    with VaultClient(vault.socket, rank=1, world_size=2) as alone:
        alone.save(10, rows(earlier, 1, 2), META)
    a, b = _pair(vault)
    with a, b:
        a.save(10, rows(state, 0, 2), META)
        b.save(10, rows(state, 1, 2), META)
        assert [s["step"] for client in (a, b) for s in client.wait(WAIT_S)] == [10, 10]
    assert_holds(CheckpointFolder(vault.root).newest_verified().checkpoint, state)


def test_a_restarted_rank_finds_its_memory_and_can_save_the_same_step_again(vault):
    with VaultClient(vault.socket) as first:
        first.save(10, whole(make_state(1)), META)
    with VaultClient(vault.socket) as second:
        second.save(10, whole(make_state(2)), META)
        second.wait(WAIT_S)
    assert_holds(CheckpointFolder(vault.root).newest_verified().checkpoint, make_state(2))
    assert leftovers(vault.root) == []


def test_a_second_client_of_a_rank_replaces_the_first(vault):
    with VaultClient(vault.socket) as first:
        first.save(10, whole(make_state(1)), META)
        with VaultClient(vault.socket) as second:
            second.save(20, whole(make_state(2)), META)
            second.wait(WAIT_S)
            with pytest.raises(CheckpointError, match="no vault answers"):
                first.save(30, whole(make_state(3)), META)
    assert CheckpointFolder(vault.root).steps() == [10, 20]


# ---- the end


def _alone(vault) -> None:
    """Nothing of the vault is left: no process, no socket, no shared memory by name."""
    assert vault.process.returncode == 0
    assert not vault.socket.exists()
    assert not [p for p in os.listdir("/dev/shm") if "bessemer" in p]


def test_it_ends_when_its_parent_and_all_clients_are_gone(vault):
    client = VaultClient(vault.socket)
    client.save(1, whole(make_state(1)), META)
    vault.process.stdin.close()
    client.save(2, whole(make_state(2)), META)
    assert [s["step"] for s in client.wait(WAIT_S)] == [1, 2]
    assert vault.process.poll() is None, "a client is still there"
    client.save(3, [Slice.whole("x", torch.zeros(3_000_000))], META)
    client.close()
    assert vault.process.wait(WAIT_S) == 0
    assert CheckpointFolder(vault.root).newest_verified().checkpoint.step == 3
    _alone(vault)


def test_signals_that_a_whole_job_gets_do_not_end_it(vault):
    with VaultClient(vault.socket) as client:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(vault.process.pid, number)
        client.save(1, whole(make_state(1)), META)
        assert client.wait(WAIT_S)
    assert vault.finish() == 0
    _alone(vault)


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "bessemer.keep.vault", *sys.argv[1:]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(100)
"""


def test_it_ends_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, "--socket", str(tmp_path / "s"), "--run", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        with VaultClient(tmp_path / "s") as client:
            client.save(1, whole(make_state(1)), META)
            parent.kill()
            client.wait(WAIT_S)
        until(lambda: not (tmp_path / "s").exists())
        until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [1]


def test_it_must_be_given_a_pipe(tmp_path):
    command = [sys.executable, "-m", "bessemer.keep.vault", "--socket", str(tmp_path / "s"), "--run", str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "standard input must be a pipe" in done.stderr


def test_it_runs_niced_and_without_torch(tmp_path):
    with running_vault(tmp_path, nice=10) as vault, VaultClient(vault.socket):
        stat = Path(f"/proc/{vault.process.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[16]) == os.nice(0) + 10
        assert "libtorch" not in Path(f"/proc/{vault.process.pid}/maps").read_text()


# ---- strangers


@pytest.mark.parametrize(
    "message",
    [
        {"op": "save", "step": 1, "generation": 0},
        {"op": "hello", "protocol": 99, "rank": 0, "world_size": 1, "local_world_size": 1},
        {"op": "hello", "protocol": 2, "rank": 3, "world_size": 2, "local_world_size": 2},
        {"op": "hello", "protocol": 2},
        {"op": "dance"},
        {},
    ],
)
def test_a_message_that_makes_no_sense_is_refused_and_harms_nobody(vault, message):
    with VaultClient(vault.socket) as client, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(vault.socket))
        stranger.sendall(pack(message))
        assert b"refused" in stranger.recv(4096)
        client.save(1, whole(make_state(1)), META)
        client.wait(WAIT_S)


def test_a_rank_that_is_not_of_the_run_hears_why_it_is_refused(vault):
    with pytest.raises(CheckpointError, match="is not a place in a run") as raised:
        VaultClient(vault.socket, rank=2, world_size=2)
    assert raised.value.code == "vault-protocol"


def test_noise_ends_that_connection_only(vault):
    with VaultClient(vault.socket) as client, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(vault.socket))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(WAIT_S)
        while stranger.recv(4096):
            pass
        client.save(1, whole(make_state(1)), META)
        client.wait(WAIT_S)


def test_a_rank_may_have_thousands_of_files_open(vault):
    """select() can't watch a descriptor above 1023; data loaders and shared memory use that many."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, old[1]), old[1]))
    held = []
    try:
        while not held or held[-1] < 1024:
            held.append(os.dup(0))
        with VaultClient(vault.socket) as client:
            client.save(1, whole(make_state(1)), META)
            assert client.wait(WAIT_S)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
