"""The memory that rank and vault share, and who is told that it is free."""

from __future__ import annotations

import os
import resource

import pytest

from bessemer.core.errors import CheckpointError
from bessemer.keep import memory
from bessemer.keep.checkpoint import CheckpointFolder
from bessemer.keep.memory import COMMITTED, GENERATIONS, WRITING, Geometry, Memory, pack_layout, place
from bessemer.keep.retention import Retention
from bessemer.keep.slices import Box
from bessemer.keep.vault_steps import MemoryCopy, Seat, StepOptions, Steps
from bessemer.keep.writer import WriteOptions


def test_a_generation_is_committed_only_after_its_copy():
    entries = place([("x", (4,), "F32", Box((0,), (4,))), ("y", (), "I64", Box((), ()))])
    layout = pack_layout(entries)
    created = Memory.create(Geometry.of(entries, layout, b"{}"))
    attached = Memory.attach(created.descriptor, created.geometry)
    for generation in range(GENERATIONS):
        assert created.header(generation).state == 0
        attached.begin(generation, 7 + generation, layout)
        assert created.header(generation).state == WRITING
        with pytest.raises(CheckpointError, match="not committed"):
            created.read(generation)
        start = attached.data_offset(generation)
        attached.mapping[start : start + 16] = bytes(range(16))
        attached.commit(generation, b'{"a":1}')
        assert created.header(generation).state == COMMITTED
        step, meta, blocks = created.read(generation)
        assert (step, meta) == (7 + generation, {"a": 1})
        assert bytes(blocks[0].data) == bytes(range(16)) and blocks[1].box == Box((), ())
        blocks.clear()
    with pytest.raises(PermissionError):
        os.ftruncate(created.descriptor, 0)
    created.close()


@pytest.mark.parametrize("grants", ["always within_size [advise] never deny force", "advise [never]", None])
@pytest.mark.parametrize("populate", [memory._POPULATE_WRITE, 9999], ids=["new kernel", "old kernel"])
def test_memory_is_allocated_whole_however_its_pages_are_granted(tmp_path, monkeypatch, grants, populate):
    setting, asked = tmp_path / "shmem_enabled", []
    if grants is not None:
        setting.write_text(grants + "\n")
    real = memory._populate
    monkeypatch.setattr(memory, "HUGE_PAGES", setting)
    monkeypatch.setattr(memory, "_POPULATE_WRITE", populate)
    monkeypatch.setattr(memory, "_populate", lambda mapping: (asked.append(len(mapping)), real(mapping)))
    geometry = Geometry(4096, 4096, 3 << 20)
    created = Memory.create(geometry)
    assert bool(asked) == ("[advise]" in (grants or ""))
    assert os.fstat(created.descriptor).st_size == geometry.total_bytes
    assert os.fstat(created.descriptor).st_blocks * 512 >= geometry.total_bytes
    attached = Memory.attach(created.descriptor, geometry)
    attached.begin(1, 3, b"[]")
    attached.commit(1, b"{}")
    assert created.read(1) == (3, {}, [])
    created.close()


def _steps(root, retention=None) -> tuple[Steps, list[dict]]:
    told = []
    options = StepOptions(
        root, retention or Retention(), WriteOptions("t"), send=lambda seat, message: not told.append(message)
    )
    return Steps(options), told


def _hand_in(steps: Steps, step: int, owner: Seat | None) -> None:
    """One rank of one hands in a small step, and it is written."""
    entries = place([("x", (4,), "F32", Box((0,), (4,)))])
    layout = pack_layout(entries)
    copy = MemoryCopy(Memory.create(Geometry.of(entries, layout, b"{}")), owner)
    copy.memory.begin(0, step, layout)
    copy.memory.commit(0, b'{"step":%d}' % step)
    steps.hand_in(Seat(0, 1, 1), copy, step, 0)
    copy.memory.close()
    while steps.busy:
        steps.drain()


def test_memory_that_its_rank_gave_back_is_not_reported_free(tmp_path):
    """Else the rank would take a generation of its new memory for free that is just being written."""
    steps, told = _steps(tmp_path)
    _hand_in(steps, 1, Seat(0, 1, 1))
    _hand_in(steps, 2, None)
    steps.close()
    assert [(m["op"], m.get("step")) for m in told] == [("free", None), ("saved", 1), ("saved", 2)]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_unsave_the_new_one(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(tmp_path / "step-1"))

    monkeypatch.setattr("bessemer.keep.retention.remove", refuse)
    steps, told = _steps(tmp_path, Retention(keep_last=1))
    for step in (1, 2):
        _hand_in(steps, step, None)
    steps.close()
    assert [(m["op"], m["step"], m["deleted"]) for m in told] == [("saved", 1, []), ("saved", 2, [])]
    assert "step 2 is saved, but an older one can't be deleted: " in capsys.readouterr().err
    assert CheckpointFolder(tmp_path).steps() == [1, 2]


def test_a_generation_that_is_not_what_it_is_said_to_be_is_not_written(tmp_path):
    steps, told = _steps(tmp_path)
    held = Memory.create(Geometry(4096, 4096, 4096))
    copy = MemoryCopy(held, None)
    with pytest.raises(CheckpointError, match="not committed"):
        steps.hand_in(Seat(0, 1, 1), copy, 1, 0)
    held.begin(0, 1, b"[]")
    held.commit(0, b"{}")
    for step, generation in ((2, 0), (1, 1), (1, 2), (1, -1)):
        with pytest.raises((ValueError, CheckpointError)):
            steps.hand_in(Seat(0, 1, 1), copy, step, generation)
    held.begin(1, 3, b'[{"name":"x","global_shape":[4],"dtype":"F32","global_offset":[0],"shape":[4],"offset":4090}]')
    held.commit(1, b"{}")
    with pytest.raises(CheckpointError, match="outside the memory"):
        steps.hand_in(Seat(0, 1, 1), copy, 3, 1)
    assert not copy.busy and not steps.busy and told == []
    steps.close()
    held.close()


def test_a_limit_of_file_sizes_is_named_as_the_cause():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600 << 10, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            Memory.create(Geometry(4096, 4096, 1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.code, caught.value.fix) == ("no-memory", "ulimit -f unlimited")
