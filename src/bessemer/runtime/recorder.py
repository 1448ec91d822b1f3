"""The writing side of the black box: what a rank leaves behind, whatever ends it.

    recorder = Recorder(run / "blackbox" / "rank-3", rank=3, world=8, job_hash=job.hash)
    phases.attach(recorder)          # runtime/phases.py
    record_to(recorder)              # comm/collectives.py

The file is mapped into memory (`ring.py` has its form): a record is stored by one call, without a lock, and is the
kernel's from then on, so that it outlives `kill -9`. Any thread may write: a slot is claimed by counting, which is
atomic. A forked child must not, since it counts on its own. Nothing is forced to the disk, so the last half minute
doesn't outlive the host. Where the run folder's disk is slow, the kernel can hold up a store while it writes the page
back; a path in memory (tmpfs) has no such delay.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.runtime import ring
from bessemer.runtime.ring import FINISH_AT, MARK_BYTES, OPERATION_BYTES, WAIT_AT

__all__ = ["Channel", "Lane", "Recorder", "UNLISTED"]

TABLE_BYTES = 64 << 10
UNLISTED = 0xFFFF
"""The number of what found no place in the table any more, and of no phase at all."""

_pack_mark, _seal_mark = ring.MARK.pack, ring.SEALED_MARK.pack_into
_pack_operation, _seal_operation = ring.OPERATION.pack, ring.SEALED_OPERATION.pack_into
_store_ending = ring.ENDING.pack_into
_crc32 = zlib.crc32
_clock = time.perf_counter


class Recorder:
    """Creates the black box of this process and writes to it.

    A file that is already at `path` is what an earlier process of this rank left; it is kept as `path`.previous.
    num_marks, num_operations: how many of the last ones are kept. OSError where the file can't be made or filled.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world: int,
        job_hash: str,
        num_marks: int = 4096,
        num_operations: int = 1024,
    ) -> None:
        self.path = path
        self._lock = threading.Lock()  # of the table, which is written when something gets a name
        self._numbers: dict[tuple[str, str], int] = {}
        self._counts = {kind: itertools.count() for kind in ("phase", "lane", "dtype", "group")}
        self._claim_mark = itertools.count(1).__next__
        self._claim_operation = itertools.count(1).__next__
        self._latest = 0
        self._num_marks, self._num_operations = num_marks, num_operations
        self._marks_at = ring.HEAD_BYTES + TABLE_BYTES
        self._operations_at = self._marks_at + num_marks * MARK_BYTES
        size = self._operations_at + num_operations * OPERATION_BYTES
        first = ring.line(
            {
                "rank": rank,
                "world": world,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "job": job_hash,
                "wall_s": time.time(),
                "clock_s": _clock(),
            }
        )
        self._end = ring.HEAD_BYTES + len(first)  # of the table
        sizes = ring.HEAD.pack(ring.MAGIC, TABLE_BYTES, num_marks, num_operations, 0)[:-4]
        head = ring.HEAD.pack(ring.MAGIC, TABLE_BYTES, num_marks, num_operations, _crc32(sizes))
        self._map = _mapped(path, (head.ljust(ring.HEAD_BYTES, b"\0") + first).ljust(size, b"\0"))

    def phase(self, name: str) -> int:
        """The number of a phase; the same for the same name."""
        return self._named("phase", name)

    def dtype(self, name: str, item_bytes: int) -> int:
        """The number of an element type of `item_bytes` bytes."""
        return self._named("dtype", name, bytes=item_bytes)

    def lane(self, name: str) -> Lane:
        """A writer of the marks of one thread, whose phases nest."""
        return Lane(self, self._named("lane", name))

    def channel(self, name: str, ranks: Sequence[int], backend: str, *, blocks: bool) -> Channel:
        """A writer of the operations of a group.

        ranks: its global ranks, in its own order. blocks: whether a host that has waited knows the operation to be
        over; otherwise only the device's stream waits, and a finish says no more than that the host went on.
        """
        entry = {"ranks": ring.ranges(ranks), "backend": backend, "blocks": blocks}
        with self._lock:
            return Channel(self, self._listed("group", name, entry))

    def close(self) -> None:
        """Let go of the file. Nothing may be written after it."""
        self._map.close()

    def _named(self, kind: str, name: str, **entry: Any) -> int:
        with self._lock:
            if (kind, name) not in self._numbers:
                self._numbers[kind, name] = self._listed(kind, name, entry)
            return self._numbers[kind, name]

    def _listed(self, kind: str, name: str, entry: dict[str, Any]) -> int:
        number = next(self._counts[kind])
        text = ring.line({kind: number, "name": name, **entry})
        if self._end + len(text) > self._marks_at or number >= UNLISTED:
            return UNLISTED
        self._map[self._end : self._end + len(text)] = text
        self._end += len(text)
        return number


class Lane:
    """The marks of one thread. `step` and the finer places go into each mark; they hold until they are set anew."""

    __slots__ = ("_claim", "_lane", "_map", "_num_marks", "_start", "layer", "micro_batch", "recorder", "stage", "step")

    def __init__(self, recorder: Recorder, lane: int) -> None:
        self.recorder = recorder
        self.step = self.micro_batch = self.stage = self.layer = ring.NONE
        self._lane = lane
        self._map, self._claim = recorder._map, recorder._claim_mark
        self._start, self._num_marks = recorder._marks_at, recorder._num_marks

    def mark(self, kind: int, phase: int, enclosing: int, depth: int, at_s: float) -> None:
        """Record that `phase` began or ended (`ring.BEGIN`, `ring.END`).

        enclosing: the phase around it, or UNLISTED; depth: 1 for an outermost one; at_s: of `time.perf_counter`.
        """
        number = self._claim()
        body = _pack_mark(
            number, at_s, self.step, phase, kind, self._lane,
            self.micro_batch, self.stage, self.layer, enclosing, depth,
        )  # fmt: skip
        _seal_mark(self._map, self._start + number % self._num_marks * MARK_BYTES, body, _crc32(body))

    def clocks(self) -> None:
        """Record what the wall clock shows now, so that ranks can be laid beside each other."""
        number = self._claim()
        now_s, wall_s = _clock(), time.time()
        body = ring.PAIR.pack(number, now_s, self.step, UNLISTED, ring.CLOCK, self._lane, wall_s, UNLISTED, 0)
        _seal_mark(self._map, self._start + number % self._num_marks * MARK_BYTES, body, _crc32(body))


class Channel:
    """The operations of one group. Its three functions are called for each of them, and so look up nothing but their
    own variables.

    enqueued(operation, dtype, taken, given, peer, waits): record that the host hands an operation over; returns its
    number, for what follows. operation: index in `ring.OPERATIONS`; dtype: as `Recorder.dtype` gave it; taken, given:
    elements of its input and output; peer: global rank of a message's other end, or `ring.NONE`; waits: whether the
    host waits for it from the start.

    waiting(number), finished(number): record that the host starts to wait for that operation, or has waited.
    """

    __slots__ = ("enqueued", "finished", "waiting")

    def __init__(self, recorder: Recorder, group: int) -> None:
        claim, slots, start, mapped = (
            recorder._claim_operation, recorder._num_operations, recorder._operations_at, recorder._map
        )  # fmt: skip
        order = 0
        orders: dict[tuple[int, int], int] = {}  # of messages, by direction and peer

        def enqueued(operation: int, dtype: int, taken: int, given: int, peer: int, waits: bool) -> int:
            nonlocal order
            if peer < 0:
                place = order = order + 1
            else:
                place = orders[operation, peer] = orders.get((operation, peer), 0) + 1
            number = recorder._latest = claim()
            body = _pack_operation(number, _clock(), place, taken, given, peer, group, operation, dtype, waits)
            _seal_operation(mapped, start + number % slots * OPERATION_BYTES, body, _crc32(body))
            return number

        def waiting(number: int) -> None:
            if recorder._latest - number < slots:  # else the slot is a later operation's by now
                _store_ending(mapped, start + number % slots * OPERATION_BYTES + WAIT_AT, _clock(), number)

        def finished(number: int) -> None:
            if recorder._latest - number < slots:
                _store_ending(mapped, start + number % slots * OPERATION_BYTES + FINISH_AT, _clock(), number)

        self.enqueued, self.waiting, self.finished = enqueued, waiting, finished


def _mapped(path: Path, content: bytes) -> mmap.mmap:
    """A new file of `content`, mapped. It is filled before it is mapped: a store to a page that a full disk has no
    room for would kill the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    with open(aside, "w+b") as file:
        file.write(content)
        file.flush()
        mapped = mmap.mmap(file.fileno(), len(content))
    if path.exists():
        path.replace(path.with_name(path.name + ".previous"))
    aside.replace(path)
    return mapped
