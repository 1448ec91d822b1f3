"""The vault process: saves that stall for a copy only, failures that are heard, ends that leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from checkpoint_tools import META, WAIT_S, assert_holds, leftovers, make_state, rows, running_vault, same, until, whole

from bessemer.core.errors import CheckpointError
from bessemer.keep import memory
from bessemer.keep.checkpoint import CheckpointFolder, Slice
from bessemer.keep.memory import Geometry, Memory
from bessemer.keep.vault_client import VaultClient


@pytest.fixture
def vault(tmp_path):
    with running_vault(tmp_path, "--keep-last", "3") as running:
        yield running


def _pair(vault) -> tuple[VaultClient, VaultClient]:
    return VaultClient(vault.socket, rank=0, world_size=2), VaultClient(vault.socket, rank=1, world_size=2)


def test_saves_become_durable_verified_and_are_announced(vault):
    state = make_state(1)
    with VaultClient(vault.socket) as client:
        stall_s = client.save(10, whole(state), META)
        (saved,) = client.wait(WAIT_S)
        assert client.poll() == []
    assert 0 < stall_s < WAIT_S
    folder = vault.root / "step-10"
    assert saved["step"] == 10 and saved["path"] == str(folder) and saved["deleted"] == [] and saved["seconds"] > 0
    assert saved["bytes"] == (folder / "rank-0.safetensors").stat().st_size
    found = CheckpointFolder(vault.root).newest_verified().checkpoint
    assert found.meta == {**META, "step": 10}
    assert_holds(found, state)
    assert leftovers(vault.root) == []


def test_every_rank_writes_its_share_and_the_manifest_waits_for_all(vault):
    state = make_state(1)
    a, b = _pair(vault)
    with a, b:
        a.save(10, rows(state, 0, 2), META)
        until(lambda: list(vault.root.glob(".step-10.tmp-*/rank-0.safetensors")))
        time.sleep(0.1)
        assert a.poll() == [] and not (vault.root / "step-10").exists()
        b.save(10, rows(state, 1, 2), META)
        assert [s["step"] for s in a.wait(WAIT_S)] == [s["step"] for s in b.wait(WAIT_S)] == [10]
    assert sorted(p.name for p in (vault.root / "step-10").iterdir()) == [
        "manifest.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
    ]
    assert_holds(CheckpointFolder(vault.root).newest_verified().checkpoint, state)


def test_a_rank_that_owns_nothing_takes_part(vault):
    state = make_state(1)
    a, b = _pair(vault)
    with a, b:
        a.save(10, whole(state), META)
        b.save(10, [Slice("embed.weight", (12, 8), (12, 0), torch.zeros(0, 8))], META)
        a.wait(WAIT_S)
    assert_holds(CheckpointFolder(vault.root).newest_verified().checkpoint, state)


def test_two_saves_do_not_wait_and_do_not_tear_each_other_and_the_third_waits(vault):
    tensor = torch.zeros(50_000)
    slices = [Slice.whole("x", tensor)]
    with VaultClient(vault.socket) as client:
        client.reserve(slices, META)
        os.kill(vault.process.pid, signal.SIGSTOP)
        for step in (1, 2):
            tensor.fill_(step)
            client.save(step, slices, META)
        tensor.fill_(3)
        third = threading.Thread(target=client.save, args=(3, slices, META))
        third.start()
        third.join(0.3)
        assert third.is_alive(), "both generations are still to be written"
        os.kill(vault.process.pid, signal.SIGCONT)
        third.join(WAIT_S)
        assert not third.is_alive()
        saved = client.wait(WAIT_S)
        assert [s["step"] for s in saved] == [1, 2, 3]
    for step in (1, 2, 3):
        stored = CheckpointFolder(vault.root).open(step).read_tensor("x")
        assert torch.equal(stored, torch.full((50_000,), float(step)))


def test_many_saves_in_a_row_each_hold_their_own_state(vault):
    tensor = torch.zeros(40_000)
    slices = [Slice.whole("x", tensor), Slice.whole("half", torch.zeros(100).bfloat16())]
    steps = []
    with VaultClient(vault.socket) as client:
        for step in range(1, 21):
            tensor.fill_(step)
            client.save(step, slices, META)
            steps += [s["step"] for s in client.poll()]
        steps += [s["step"] for s in client.wait(WAIT_S)]
    assert steps == list(range(1, 21))
    folder = CheckpointFolder(vault.root)
    assert folder.steps() == [18, 19, 20]
    assert all(folder.open(s).read_tensor("x").unique().tolist() == [s] for s in folder.steps())


def test_retention_is_told_with_the_save_that_allowed_it(tmp_path):
    (tmp_path / "job.toml").write_text("[keep]\nkeep_last = 1\nkeep_every = 20\n")
    with running_vault(tmp_path) as vault, VaultClient(vault.socket) as client:
        deleted = []
        for step in (10, 20, 30, 40, 50):
            client.save(step, whole(make_state(step)), META)
            deleted += [s["deleted"] for s in client.wait(WAIT_S)]
    assert deleted == [[], [10], [], [30], []]
    assert CheckpointFolder(vault.root).steps() == [20, 40, 50]


def test_another_set_of_slices_or_larger_meta_gets_new_memory(vault):
    small, large = {"x": torch.randn(10)}, {"x": torch.randn(10), "y": torch.randn(40_000)}
    with VaultClient(vault.socket) as client:
        client.save(1, whole(small), META)
        client.save(2, whole(large), META)
        client.save(3, whole(small), {"text": "x" * 200_000})
        client.wait(WAIT_S)
    for step, state in ((1, small), (2, large), (3, small)):
        assert_holds(CheckpointFolder(vault.root).open(step), state)
    assert len(CheckpointFolder(vault.root).open(3).meta["text"]) == 200_000


# ---- failures are heard


def test_a_full_disk_is_raised_at_the_next_step_and_nothing_older_is_lost(tmp_path):
    large = [Slice.whole("x", torch.zeros(50_000))]
    with running_vault(tmp_path) as vault, VaultClient(vault.socket) as client:
        client.reserve(large, META)
        client.save(1, whole(make_state(1)), META)
        client.wait(WAIT_S)
        vault.fill_disk(20_000)
        client.save(2, large, META)
        with pytest.raises(CheckpointError, match=r"step-2.*rank-0.safetensors: File too large \(step 2\)") as raised:
            client.wait(WAIT_S)
        assert raised.value.code == "disk-full" and "keep.keep_last" in raised.value.fix
        assert os.listdir(vault.root) == ["step-1"]
        client.save(3, large, META)
        time.sleep(0.3)
        with pytest.raises(CheckpointError, match="File too large"):
            client.save(4, whole(make_state(4)), META)
        client.save(5, whole(make_state(5)), META)
        assert [s["step"] for s in client.wait(WAIT_S)] == [5]
    assert CheckpointFolder(vault.root).steps() == [1, 5]


def test_poll_raises_a_failure_once(tmp_path):
    slices = [Slice.whole("x", torch.zeros(50_000))]
    with running_vault(tmp_path) as vault, VaultClient(vault.socket) as client:
        client.reserve(slices, META)
        vault.fill_disk(1000)
        client.save(2, slices, META)
        error = []

        def failed() -> bool:
            try:
                client.poll()
            except CheckpointError as found:
                error.append(found)
            return bool(error)

        until(failed)
        assert error[0].code == "disk-full"
        assert client.poll() == []
        assert client.wait(WAIT_S) == []


def test_ranks_that_do_not_make_one_state_fail_the_save(vault):
    state = make_state(1)
    a, b = _pair(vault)
    with a, b:
        a.save(1, whole(state), META)
        b.save(1, whole(state), META)
        for client in (a, b):
            with pytest.raises(CheckpointError, match=r"is stored twice, in rank-0.safetensors and in rank-1"):
                client.wait(WAIT_S)
        a.save(2, rows(state, 0, 2), META)
        b.save(2, rows(state, 1, 2), {**META, "cursor": 641})
        for client in (a, b):
            with pytest.raises(CheckpointError, match=r"disagree on cursor: {0: 640, 1: 641}"):
                client.wait(WAIT_S)
    assert os.listdir(vault.root) == []


def test_a_killed_vault_is_an_error_that_says_so(vault):
    with VaultClient(vault.socket) as client:
        client.save(1, whole(make_state(1)), META)
        client.wait(WAIT_S)
        vault.process.kill()
        vault.process.wait()
        for act in (client.poll, client.wait, lambda: client.save(2, whole(make_state(2)), META)):
            with pytest.raises(CheckpointError, match="no vault answers at") as raised:
                act()
            assert raised.value.code == "vault-lost"
    with pytest.raises(CheckpointError, match="no vault answers at"):
        VaultClient(vault.socket, timeout_s=0.2)


def test_wait_gives_up_when_it_is_told_to(vault):
    with VaultClient(vault.socket) as client:
        client.reserve(whole(make_state(1)), META)
        os.kill(vault.process.pid, signal.SIGSTOP)
        client.save(1, whole(make_state(1)), META)
        with pytest.raises(CheckpointError, match=r"step 1 is not durable yet after 0.1 s") as raised:
            client.wait(0.1)
        assert raised.value.code == "vault-busy"
        os.kill(vault.process.pid, signal.SIGCONT)
        assert [s["step"] for s in client.wait(WAIT_S)] == [1]


def test_meta_that_is_no_json_is_refused_before_the_copy(vault):
    with VaultClient(vault.socket) as client:
        with pytest.raises(ValueError, match="JSON"):
            client.save(1, whole(make_state(1)), {"loss": float("inf")})
        client.save(1, whole(make_state(1)), META)
        client.wait(WAIT_S)


def test_too_little_memory_is_an_error_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 300 << 20)
    with pytest.raises(CheckpointError, match=r"need 209,.* bytes; 314,572,800 are available") as raised:
        Memory.create(Geometry(4096, 4096, 100 << 20))
    assert raised.value.code == "no-memory"
    monkeypatch.undo()
    assert memory.available_bytes() > 0


def test_the_shards_read_back_are_those_of_the_tensors(vault):
    """Values that a conversion would change: every bit pattern of bfloat16, NaN and the smallest float32 included."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    state = {"bf16": bits.view(torch.bfloat16), "f32": torch.tensor([1e-45, float("nan"), -0.0])}
    with VaultClient(vault.socket) as client:
        client.save(1, whole(state), META)
        client.wait(WAIT_S)
    checkpoint = CheckpointFolder(vault.root).open(1)
    assert same(checkpoint.read_tensor("bf16").view(torch.uint16), bits)
    assert same(checkpoint.read_tensor("f32").view(torch.int32), state["f32"].view(torch.int32))
