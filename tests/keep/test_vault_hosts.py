"""Vaults of several hosts that write one checkpoint into one folder."""

from __future__ import annotations

import os

import pytest
import torch
from checkpoint_tools import META, WAIT_S, assert_holds, leftovers, make_state, rows, running_vault

from bessemer.core.errors import CheckpointError
from bessemer.keep.checkpoint import CheckpointFolder
from bessemer.keep.vault_client import VaultClient


def _hosts(tmp_path):
    token = ("--token", "attempt-1", "--parts-timeout", "50")
    return running_vault(tmp_path, *token, name="host-a"), running_vault(tmp_path, *token, name="host-b")


def test_vaults_of_two_hosts_write_one_checkpoint(tmp_path):
    state = make_state(1)
    one, two = _hosts(tmp_path)
    with one as host_a, two as host_b:
        clients = [
            VaultClient((host_a, host_b)[rank // 2].socket, rank=rank, world_size=4, local_world_size=2)
            for rank in range(4)
        ]
        for step in (1, 2, 3, 4):
            for rank, client in enumerate(clients if step % 2 else reversed(clients)):
                place_of = rank if step % 2 else 3 - rank
                client.save(step, rows(state, place_of, 4), META)
        done = [[s["step"] for s in client.wait(WAIT_S)] for client in clients]
        for client in clients:
            client.close()
        assert done == [[1, 2, 3, 4]] * 4
        assert host_a.finish() == host_b.finish() == 0
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.steps() == [2, 3, 4] and leftovers(folder.root) == []
    assert sorted(os.listdir(folder.root / "step-4")) == ["manifest.json", *(f"rank-{r}.safetensors" for r in range(4))]
    for step in folder.steps():
        assert_holds(folder.open(step), state)


@pytest.mark.parametrize("full", ["a", "b"])
def test_a_host_that_fails_fails_the_checkpoint_on_all(tmp_path, full):
    state = {"x": torch.zeros(20_000)}
    one, two = _hosts(tmp_path)
    with one as host_a, two as host_b:
        a = VaultClient(host_a.socket, rank=0, world_size=2, local_world_size=1)
        b = VaultClient(host_b.socket, rank=1, world_size=2, local_world_size=1)
        with a, b:
            a.reserve(rows(state, 0, 2), META)
            b.reserve(rows(state, 1, 2), META)
            (host_a if full == "a" else host_b).fill_disk(20_000)
            a.save(1, rows(state, 0, 2), META)
            b.save(1, rows(state, 1, 2), META)
            codes = {}
            for name, client in (("a", a), ("b", b)):
                with pytest.raises(CheckpointError) as raised:
                    client.wait(WAIT_S)
                codes[name] = raised.value.code
        assert host_b.finish() == host_a.finish() == 0
    assert codes == {full: "disk-full", "ba"["ab".index(full)]: "checkpoint-parts"}
    assert os.listdir(tmp_path / "checkpoints") == []


def test_after_a_failed_step_the_hosts_go_on_with_the_next(tmp_path):
    state = {"x": torch.zeros(20_000)}
    one, two = _hosts(tmp_path)
    with one as host_a, two as host_b:
        a = VaultClient(host_a.socket, rank=0, world_size=2, local_world_size=1)
        b = VaultClient(host_b.socket, rank=1, world_size=2, local_world_size=1)
        with a, b:
            b.reserve(rows(state, 1, 2), META)
            host_b.fill_disk(20_000)
            for client, rank in ((a, 0), (b, 1)):
                client.save(1, rows(state, rank, 2), META)
            for client in (a, b):
                with pytest.raises(CheckpointError):
                    client.wait(WAIT_S)
            small = {"x": torch.arange(4)}
            for client, rank in ((a, 0), (b, 1)):
                client.save(2, rows(small, rank, 2), META)
            assert [client.wait(WAIT_S)[0]["step"] for client in (a, b)] == [2, 2]
    assert os.listdir(tmp_path / "checkpoints") == ["step-2"]
