"""Copies in the vault's memory: what ranks that are started again find there, and what they refuse."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import META, WAIT_S, blank, leftovers, make_state, rows, running_vault, same, until, whole
from ranks import run_ranks
from train import loops
from train.loops import Recorder, small_job, state_of

from bessemer.core.errors import CheckpointError
from bessemer.core.job import Job
from bessemer.core.job_file import dump_job
from bessemer.data import open_dataset, prepare
from bessemer.keep.checkpoint import CheckpointFolder, Slice
from bessemer.keep.memory_copies import MemoryCopies, settled
from bessemer.keep.run_folder import RunFolder
from bessemer.keep.vault_client import VaultClient
from bessemer.train.loop import Loop
from bessemer.train.restore import Origin


@pytest.fixture
def vault(tmp_path):
    with running_vault(tmp_path) as running:
        yield running


def at(step: int) -> dict[str, object]:
    return {**META, "step": step}


def assert_read(copies: MemoryCopies, step: int, state: dict[str, torch.Tensor]) -> None:
    slices = blank(whole(state))
    copies.read_into(step, slices, threads=2)
    for s in slices:
        assert same(s.tensor, state[s.name]), s.name
    assert copies.meta(step) == at(step)


def flip(copies: MemoryCopies, step: int) -> None:
    """One bit of one tensor, in the memory that everybody shares."""
    rank, generation, _ = copies._of(step)[0]
    memory = copies._memories[rank]
    _, _, blocks = memory.read(generation)
    block = max(blocks, key=lambda b: len(b.data))
    block.data[len(block.data) // 2] ^= 0x10


def test_the_two_newest_copies_outlive_their_client_and_nothing_is_written(vault):
    with VaultClient(vault.socket) as client:
        for step in (1, 2, 3):
            assert client.hold(step, whole(make_state(step)), META) > 0
    with MemoryCopies(vault.socket) as copies:
        assert copies.steps(whole(make_state(0))) == [2, 3]
        for step in (2, 3):
            assert_read(copies, step, make_state(step))
    assert not CheckpointFolder(vault.root).steps() and leftovers(vault.root) == []


def test_ranks_read_what_others_own_in_any_cut(vault):
    state = make_state(4)
    for rank in range(3):
        with VaultClient(vault.socket, rank=rank, world_size=3) as client:
            client.hold(4, rows(state, rank, 3), META)
    with MemoryCopies(vault.socket) as copies:
        assert_read(copies, 4, state)
        for rank in range(2):
            mine = rows(state, rank, 2)
            empty = blank(mine)
            copies.read_into(4, empty)
            assert all(same(a.tensor, b.tensor) for a, b in zip(empty, mine, strict=True))


def test_a_step_that_a_rank_has_not_committed_is_not_there(vault):
    clients = [VaultClient(vault.socket, rank=rank, world_size=2) for rank in range(2)]
    for step in (1, 2):
        for rank in range(2 if step == 1 else 1):
            clients[rank].hold(step, rows(make_state(step), rank, 2), META)
    with MemoryCopies(vault.socket) as copies:
        assert copies.steps(whole(make_state(0))) == [1]
        assert copies.missing(2, whole(make_state(0)))
        with pytest.raises(CheckpointError, match="lacks"):
            copies.read_into(2, blank(whole(make_state(0))))
    for client in clients:
        client.close()


def test_a_torn_copy_does_not_count_and_goes_first(vault):
    slices = whole(make_state(0))
    client = VaultClient(vault.socket)
    for step in (1, 2):
        client.hold(step, whole(make_state(step)), META)
    client._memory.begin(client._free_generation(client._memory), 3, client._plan.layout)  # and it dies there
    client.close()
    with MemoryCopies(vault.socket) as copies:
        assert copies.steps(slices) == [2]
        assert_read(copies, 2, make_state(2))
    with VaultClient(vault.socket) as client:
        client.reserve(slices, at(2))
        client.hold(3, whole(make_state(3)), META)
        with MemoryCopies(vault.socket) as copies:
            assert copies.steps(slices) == [2, 3], "the sound one was not overwritten"


def test_a_flipped_bit_is_refused_and_the_other_copy_still_holds(vault):
    with VaultClient(vault.socket) as client:
        for step in (1, 2):
            client.hold(step, whole(make_state(step)), META)
    with MemoryCopies(vault.socket) as copies:
        flip(copies, 2)
        with pytest.raises(CheckpointError, match="checksum differs") as caught:
            copies.read_into(2, blank(whole(make_state(2))))
        assert caught.value.code == "checkpoint-damaged"
        assert_read(copies, 1, make_state(1))


def test_a_copy_that_is_overwritten_while_it_is_read_is_refused(vault):
    slices = whole(make_state(1))
    with VaultClient(vault.socket) as client:
        client.hold(1, slices, META)
        with MemoryCopies(vault.socket) as copies:
            for step in (2, 3):
                client.hold(step, whole(make_state(step)), META)
            with pytest.raises(CheckpointError):
                copies.read_into(1, blank(slices))
            with pytest.raises(CheckpointError, match="has gone"):
                copies.meta(1)


def test_a_run_that_went_back_finds_nothing_of_its_lost_future(vault):
    slices = whole(make_state(0))
    with VaultClient(vault.socket) as client:
        for step in (7, 8):
            client.hold(step, slices, META)
    with VaultClient(vault.socket) as client:
        client.reserve(slices, at(7))
        with MemoryCopies(vault.socket) as copies:
            assert copies.steps(slices) == [7]
    with VaultClient(vault.socket) as client:
        client.reserve(slices, at(0))
        with MemoryCopies(vault.socket) as copies:
            assert copies.steps(slices) == []


def test_a_durable_save_is_a_copy_too_and_settles(vault):
    state = make_state(5)
    with VaultClient(vault.socket) as client:
        client.save(5, whole(state), META)
    with MemoryCopies(vault.socket) as copies:
        assert_read(copies, 5, state)
    settled(vault.socket)
    assert CheckpointFolder(vault.root).steps() == [5]


def test_a_hold_does_not_wait_for_the_disk(vault):
    slices = [Slice.whole("x", torch.zeros(50_000))]
    with VaultClient(vault.socket) as client:
        client.reserve(slices, META)
        os.kill(vault.process.pid, signal.SIGSTOP)
        client.save(1, slices, META)
        client.save(2, slices, META)
        start = time.monotonic()
        client.hold(3, slices, META)
        assert time.monotonic() - start < WAIT_S
        os.kill(vault.process.pid, signal.SIGCONT)
        client.wait(WAIT_S)
        client.hold(4, slices, META)
    with MemoryCopies(vault.socket) as copies:
        assert 3 not in copies.steps(slices) and 4 in copies.steps(slices)


def test_without_a_vault_there_are_no_copies(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        MemoryCopies(tmp_path / "nobody")
    assert caught.value.code == "vault-lost"


def rank_main(rank: int, world: int, job: Job, socket: str, die_at: int | None, restore: str) -> dict[str, Any]:
    """Train as the worker does, up to the end, or up to step `die_at`, where `run_ranks` then kills all by SIGKILL."""
    from train.toy import toy_parts

    os.environ["BESSEMER_RESTORE"] = restore
    parts, recorder = toy_parts(job, rank), Recorder()
    saver = VaultClient(socket, rank=rank, world_size=world)
    data, origin = open_dataset(job, "train"), Origin.of_environment(Path(socket))
    loop = Dying(parts, data, None, recorder, saver, job.run.folder, origin=origin)
    loop.die_at = die_at
    try:
        loop.run()
    except DeathIsDue:
        OPEN.append(saver)  # the kernel closes it
        return {}
    saver.close()
    return {"losses": [(m["step"], m["loss"]) for m in recorder.metrics], "events": recorder.events,
            "state": state_of(parts)}  # fmt: skip


OPEN: list[VaultClient] = []


class DeathIsDue(BaseException):
    pass


class Dying(Loop):
    die_at: int | None = None

    def _step(self, step: int, batches: Any) -> Any:
        if step == 4:
            self.saver.wait()  # else one generation may still be being written when steps 6 and 7 are copied
        if step == self.die_at:
            self.parts.mesh.sum_over_world(torch.zeros(1))  # all have their copy of this step
            raise DeathIsDue
        return super()._step(step, batches)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict[str, Any]]:
    job = ten_steps(tmp_path_factory.mktemp("undisturbed"))
    with loops.vault(job.run.folder) as socket:
        return run_ranks(2, rank_main, job, str(socket), None, "")


def ten_steps(folder: Path) -> Job:
    """Durable checkpoints at steps 4 and 8, and a copy in memory of each."""
    keep = {"every": 4, "memory_every": 1, "restarts": 3}
    job = small_job(folder, layout={"dp": 2}, train={"steps": 10}, keep=keep, data={"val_fraction": 0.0})
    prepare(job)
    return job


def kill_all(job: Job, socket: Path) -> None:
    assert run_ranks(2, rank_main, job, str(socket), 7, "") == [{}, {}]


def assert_goes_on(job: Job, socket: Path, source: str, step: int, undisturbed: list[dict[str, Any]]) -> str:
    """Returns the reason that was given."""
    found = run_ranks(2, rank_main, job, str(socket), None, "memory")
    loaded = next(e for e in found[0]["events"] if e["event"] == "loaded")
    assert (loaded["source"], loaded["step"]) == (source, step), loaded["why"]
    assert found[0]["losses"] == undisturbed[0]["losses"][step:], "bit for bit"
    for rank in range(2):
        for key, tensor in found[rank]["state"].items():
            assert same(tensor, undisturbed[rank]["state"][key]), key
    assert leftovers(job.run.folder / "checkpoints") == []
    return str(loaded["why"])


def test_after_kill_9_of_all_ranks_the_run_goes_on_from_the_newest_step_in_memory(tmp_path, undisturbed):
    job = ten_steps(tmp_path)
    with loops.vault(job.run.folder) as socket:
        kill_all(job, socket)
        settled(socket)
        assert CheckpointFolder(job.run.folder / "checkpoints").steps() == [4]
        assert_goes_on(job, socket, "memory", 7, undisturbed)


def test_after_the_death_of_the_vault_too_it_goes_on_from_disk(tmp_path, undisturbed):
    job = ten_steps(tmp_path)
    with loops.vault(job.run.folder) as socket:
        kill_all(job, socket)
    with loops.vault(job.run.folder) as socket:
        why = assert_goes_on(job, socket, "disk", 4, undisturbed)
    assert "in the memory of all ranks" in why


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "source", "step"), [(1, "memory", 6), (2, "disk", 4)])
def test_a_flipped_bit_in_memory_leads_to_the_next_source(tmp_path, undisturbed, copies, source, step):
    job = ten_steps(tmp_path)
    with loops.vault(job.run.folder) as socket:
        kill_all(job, socket)
        with MemoryCopies(socket) as held:
            for damaged in (7, 6)[:copies]:
                flip(held, damaged)
        why = assert_goes_on(job, socket, source, step, undisturbed)
    assert "step 7 in memory refused by rank" in why and "checksum differs" in why
    assert ("step 6 in memory refused by rank" in why) == (copies == 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["restart", "zero-interruption"])
def test_the_agent_starts_killed_ranks_again_in_place(tmp_path, mode):
    job = ten_steps(tmp_path)
    job = job.model_copy(update={"keep": job.keep.model_copy(update={"mode": mode})})
    (tmp_path / "job.toml").write_text(dump_job(job))
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-c", AGENT]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder(job)
    events = list(run.events())
    assert [(e["source"], e["step"]) for e in events if e["event"] == "loaded"] == [("seed", 0), ("memory", 7)]
    assert [m["step"] for m in run.metrics()] == list(range(1, 11))
    assert events[-1]["event"] == "finished"
    assert CheckpointFolder(run.path / "checkpoints").steps() == [4, 8, 10]
    until(lambda: not any(str(tmp_path) in line for line in processes()))


RANK = """
import os, signal, sys
from bessemer.train import elastic, loop, worker

def dying(whole):
    def step(self, at, batches):
        if at == 7 and not os.environ["BESSEMER_RESTORE"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, at, batches)
    return step

for kind in (loop.Loop, elastic.ElasticLoop):
    kind._step = dying(kind._step)
sys.exit(worker.main())
"""
AGENT = """
import sys
from bessemer.core.job_file import load_job
from bessemer.keep.agent import Options, run
sys.exit(run(load_job("job.toml"), Options(command=(sys.executable, "rank.py"), quiet=True)))
"""


def processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
