"""The memory that rank and vault share, and who is told that it is free."""

from __future__ import annotations

import os

import pytest

from bessemer.core.errors import CheckpointError
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


def test_memory_that_its_rank_gave_back_is_not_reported_free(tmp_path):
    """Else the rank would take a generation of its new memory for free that is just being written."""
    entries = place([("x", (4,), "F32", Box((0,), (4,)))])
    layout = pack_layout(entries)
    told = []
    seat = Seat(0, 1, 1)
    options = StepOptions(tmp_path, Retention(), WriteOptions("t"), send=lambda seat, message: not told.append(message))
    steps = Steps(options)
    for step, owner in ((1, seat), (2, None)):
        copy = MemoryCopy(Memory.create(Geometry.of(entries, layout, b"{}")), owner)
        copy.memory.begin(0, step, layout)
        copy.memory.commit(0, b'{"step":%d}' % step)
        steps.hand_in(seat, copy, step, 0)
        copy.memory.close()
        while steps.busy:
            steps.drain()
    steps.close()
    assert [(m["op"], m.get("step")) for m in told] == [("free", None), ("saved", 1), ("saved", 2)]
